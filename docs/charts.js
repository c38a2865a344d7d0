// Draws the charts of the report pages (tools/charts.py) in the text colour of the page.
// plotly.js is loaded when the first chart comes into view.
(() => {
  const colors = (chart) => ({
    "font.color": getComputedStyle(chart).color,
    "hoverlabel.font.color": "#fff",
  });

  const draw = async (chart) => {
    const shown = JSON.parse(chart.querySelector("script").textContent);
    await Plotly.newPlot(chart, shown.data, shown.layout, shown.config);
    await Plotly.relayout(chart, colors(chart));
    chart.classList.add("drawn");
  };

  let loaded = null;
  const load = (src) => (loaded ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = src;
    script.onload = resolve;
    script.onerror = reject;
    document.head.append(script);
  }));

  const charts = [...document.querySelectorAll(".chart")];
  if (!charts.length) return;
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      load(target.dataset.script).then(() => draw(target));
    }
  }, { rootMargin: "800px" });
  charts.forEach((chart) => near.observe(chart));

  // The palette switch changes an attribute of the page.
  new MutationObserver(() => {
    for (const chart of charts) if (chart.classList.contains("drawn")) Plotly.relayout(chart, colors(chart));
  }).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
})();
