"""MkDocs hook: interactive charts on the report pages, drawn by a local plotly.js.

A chart replaces its name in ``report.md``. Its data comes from the ``report.json`` of the same
folder. ``plotly.min.js`` is copied from the plotly package and loaded by ``docs/charts.js``.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from plotly.utils import PlotlyJSONEncoder

from vlmfast.eval.chart import CONFIG, figure, rows

SCRIPT = "assets/plotly.min.js"
_PLOT = re.compile(
    r"^Interactive chart: `(?P<task>[\w-]+?)(?P<cache>-cache)?\.html`$", re.MULTILINE
)


def on_files(files: Any, *, config: Any) -> Any:
    """Add plotly.js to the site."""
    import plotly
    from mkdocs.structure.files import File

    source = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    files.append(File.generated(config, SCRIPT, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Put charts in the place of their names in a report."""
    place = posixpath.dirname(page.file.src_uri)
    report = Path(config.docs_dir) / place / "report.json"
    if page.file.src_uri.split("/")[0] != "results" or not report.is_file():
        return markdown
    root = f"{posixpath.relpath('.', place)}/"

    def drawn(plot: re.Match[str]) -> str:
        axis = "held" if plot["cache"] else "kept"
        return html_of(figure(rows(report, plot["task"], axis)), root)

    return _PLOT.sub(drawn, markdown)


def html_of(shown: Any, root: str) -> str:
    """A figure as an HTML block, which ``docs/charts.js`` draws; ``root`` leads to the site's."""
    # JSON inside HTML: no character may end the element.
    data = json.dumps(shown.to_plotly_json() | {"config": CONFIG}, cls=PlotlyJSONEncoder)
    data = data.replace("<", "\\u003c")
    return (
        f'<div class="chart" data-script="{root}{SCRIPT}" data-search-exclude>'
        f'<script type="application/json">{data}</script></div>'
    )
