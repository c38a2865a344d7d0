"""Generate one documentation page per method from the registry and the measured reports.

Nothing on these pages is written by hand. Text and parameters come from the method's docstring and
fields, numbers from ``docs/results/**/report.json`` and ``benchmarks/results``. `pages` needs the
package and matplotlib; MkDocs is not imported here.
"""

from __future__ import annotations

import functools
import html
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import vlmfast
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import Stage
from vlmfast.eval.axes import shrinks_cache

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DRAFTS = ROOT / "benchmarks" / "results" / "speculation-tiny-cpu.json"

PROTOCOLS = {
    "media": ("Frames", "before encoding, to select the frames of a video"),
    "views": ("Views", "before the vision tower, to leave out crops and frames"),
    "in-encoder": ("Vision tower", "between the blocks of the vision tower"),
    "encode": ("Before the language model", "between the vision tower and the language model"),
    "prefill": (
        "Inside the language model",
        "between the layers of the language model, during prefill",
    ),
    "cache": ("KV cache", "on the keys and values of the prompt, after each layer's attention"),
    "decode": ("Decoding", "on the cache, between decode steps"),
    "drafter": ("Drafters", "during decoding, where it drafts tokens that the model verifies"),
}

# Example recipes of methods whose defaults are unsuited to `tiny`, whose prompts are short.
EXAMPLES = {
    "cake": "cake:window=0.1",
    "fastkv": "fastkv:window=0.1",
    "frames-clip": "frames-clip:4",
    "lookm": "lookm:0.5",
    "pyramidkv": "pyramidkv:window=0.1",
    "quickprefill": "quickprefill:score=key-norm",
    "snapkv": "snapkv:window=0.1",
}
_VIDEO = (
    "It needs an OpenCLIP model in addition to the VLM. The weights are not shipped. They are "
    "downloaded when needed; offline, set `model=local-dir:FOLDER`."
)
# Requirements of methods that are not shipped.
NEEDS = {
    "clip-relevance": _VIDEO,
    "frames-clip": _VIDEO,
}


# --- measured reports ----------------------------------------------------------------------------


@functools.cache
def parsed(recipe: str) -> Recipe:
    """A recipe of the reports, which name few recipes many times."""
    return Recipe.parse(recipe)


@dataclass(frozen=True)
class Report:
    """One task of a ``report.json``.

    Parameters
    ----------
    place : str
        Its folder below ``docs``.
    task, about : str
        ``about`` is the line of its ``report.md`` on model, seed and number of questions.
    recipes : dict
        The numbers of each run by its name, as ``vlmfast report`` writes them.
    """

    place: str
    task: str
    about: str
    recipes: dict[str, dict[str, Any]]

    def runs(self, word: str) -> dict[str, dict[str, Any]]:
        """Runs with this method alone and single questions, by decreasing cost."""
        found = {}
        for name, numbers in self.recipes.items():
            if "@" in name or numbers["control"]:
                continue
            stages = parsed(numbers["recipe"])
            if len(stages) == 1 and stages[0].name == word:
                found[name] = numbers
        return found


def reports(docs: Path = DOCS) -> list[Report]:
    """Every report in ``docs/results``, the one of the folder itself first."""
    found = []
    files = sorted((docs / "results").rglob("report.json"), key=lambda f: (len(f.parts), f))
    for file in files:
        text = file.with_suffix(".md").read_text(encoding="utf-8")
        for task, of in json.loads(file.read_text(encoding="utf-8"))["tasks"].items():
            about = re.search(rf"^## {re.escape(task)}\n\n(.+)$", text, re.MULTILINE)
            if about is None:
                raise ValueError(f"{file.with_suffix('.md')} has no section on {task}")
            place = file.parent.relative_to(docs).as_posix()
            found.append(Report(place, task, about[1], of["recipes"]))
    return found


def measured(word: str, found: list[Report]) -> list[Report]:
    """The reports that ran this method."""
    return [report for report in found if report.runs(word)]


def axis_of(word: str, report: Report) -> str:
    """``held`` (cache size) for methods that shrink the cache, else ``kept`` (visual tokens)."""
    run = next(iter(report.runs(word).values()))
    return "held" if shrinks_cache(parsed(run["recipe"])) else "kept"


def line_of(recipe: str) -> str:
    """The recipe without its budget, which the points of one curve have in common."""
    stage = parsed(recipe)[0]
    axes = {"budget", "keep"} | ({stage.lead} if _number(stage) else set())
    plain = {f.name: f.default for f in fields(stage) if f.name in axes}
    return str(replace(stage, **plain))


def _number(stage: Stage) -> bool:
    value = getattr(stage, stage.lead) if stage.lead else None
    return isinstance(value, int | float) and not isinstance(value, bool)


def lines_of(word: str, report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    """The runs of a method, grouped by `line_of`."""
    lines: dict[str, dict[str, dict[str, Any]]] = {}
    for name, numbers in report.runs(word).items():
        lines.setdefault(line_of(numbers["recipe"]), {})[name] = numbers
    return lines


def baselines(word: str, report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    """The longest curve of each baseline for methods of this kind."""
    words = ("random", "streamingllm") if axis_of(word, report) == "held" else ("random",)
    lines = [lines_of(control, report) for control in words if control != word]
    return dict(max(of.items(), key=lambda line: len(line[1])) for of in lines if of)


# --- curves --------------------------------------------------------------------------------------

_INK = "#010101"  # replaced by the text colour of the page
_COLORS = ("#3b8edb", "#d5762a", "#22a884", "#c66fa3")
_GREY = "#8a8a8a"
_COST = {"kept": "visual tokens kept, mean of layers (%)", "held": "KV cache size (%)"}
_PANELS = {
    "kept": (("accuracy", "image", "Images"), ("accuracy", "video", "Videos")),
    "held": (
        ("accuracy", "image", "Questions, images"),
        ("accuracy", "video", "Questions, videos"),
        ("caption", "image", "Captions, images"),
        ("caption", "video", "Captions, videos"),
    ),
}


def curves(word: str, report: Report) -> str:
    """The plots of a method as inline SVG in the colours of the page."""
    axis, full = axis_of(word, report), report.recipes["none"]
    # Kinds of questions that the report does not contain have no plot.
    asked = [panel for panel in _PANELS[axis] if full[f"{panel[0]}_{panel[1]}"] is not None]
    panels = [_panel(word, report, axis, *panel, legend=not i) for i, panel in enumerate(asked)]
    return '<div class="curves" data-search-exclude>\n' + "\n".join(panels) + "\n</div>"


def points(
    runs: dict[str, dict[str, Any]], axis: str, key: str, modality: str
) -> list[tuple[float, ...]]:
    """Cost, accuracy and its interval of each run in percent, by increasing cost."""
    rows = [
        (n[f"{axis}_{modality}"], n[f"{key}_{modality}"], *n[f"{key}_{modality}_ci"])
        for n in runs.values()
        if n[f"{key}_{modality}"] is not None
    ]
    return sorted(tuple(100 * value for value in row) for row in rows)


def _panel(
    word: str, report: Report, axis: str, key: str, modality: str, title: str, legend: bool
) -> str:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    salt = {"svg.fonttype": "none", "svg.hashsalt": f"{word}{key}{modality}", "font.size": 11}
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _INK)
    ink |= dict.fromkeys(("xtick.color", "ytick.color"), _INK)
    with matplotlib.rc_context(salt | ink | {"font.family": "sans-serif"}):
        figure = Figure(figsize=(4.3, 3.4), layout="constrained")
        place = figure.subplots()
        full = report.recipes["none"]
        low, high = (100 * v for v in full[f"{key}_{modality}_ci"])
        place.axhspan(low, high, color=_INK, alpha=0.12, linewidth=0)
        place.axhline(100 * full[f"{key}_{modality}"], color=_INK, linewidth=1, label="full model")
        styles = iter(("--", ":"))
        for label, runs in baselines(word, report).items():
            x, y, _, _ = zip(*points(runs, axis, key, modality), strict=True)
            place.plot(x, y, next(styles), color=_GREY, marker=".", label=label.partition(":")[0])
        for color, (label, runs) in zip(_COLORS * 9, lines_of(word, report).items(), strict=False):
            x, y, lows, highs = zip(*points(runs, axis, key, modality), strict=True)
            bars = [[m - l for m, l in zip(y, lows, strict=True)]]
            bars.append([h - m for m, h in zip(y, highs, strict=True)])
            place.errorbar(
                x, y, yerr=bars, color=color, marker="o", markersize=5, capsize=2.5, label=label
            )
        place.set_xscale("log")
        place.set_xlim(4, 110)
        place.xaxis.set_major_locator(FixedLocator((5, 10, 20, 50, 100)))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        place.set_ylim(0, 104)
        place.set(xlabel=_COST[axis], ylabel="accuracy (%)", title=title)
        place.grid(alpha=0.2, color=_INK, linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
        if legend:  # the other plots have the same lines
            place.legend(loc="best", frameon=False, fontsize=9)
        text = StringIO()
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=none)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # A style sheet inside an inline SVG would apply to the whole page.
    svg = re.sub(r"<(style|metadata)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=2)
    label = html.escape(f"{word}: {title.lower()}, accuracy against {_COST[axis]}")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return re.sub(r"\n\s*", "\n", svg.replace(_INK, "currentColor")).strip()


# --- tables --------------------------------------------------------------------------------------


def percent(value: float | None, ci: list[float] | None = None) -> str:
    """A fraction in percent, with its interval."""
    if value is None:
        return "–"
    text = f"{100 * value:.1f}"
    return f"{text} [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]" if ci else text


def table(head: list[str], rows: list[list[str]], right: bool = False) -> str:
    """A Markdown table; pipes in its cells are escaped."""
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], rule, *cells[1:]])


def numbers_table(word: str, report: Report) -> str:
    """The points of the curves, including the full model and the baselines."""
    axis = axis_of(word, report)
    paid = "KV cache size %" if axis == "held" else "tokens kept %"
    scores = [(key, m) for key, m, _ in _PANELS[axis]]
    titles = [title.lower() for _, _, title in _PANELS[axis]]
    head = ["recipe", f"{paid}, images / videos", *(f"{title} %" for title in titles)]
    runs = {"none": report.recipes["none"]} | report.runs(word)
    for line in baselines(word, report).values():
        runs |= line
    rows = [
        [
            f"`{name}`",
            f"{percent(n[f'{axis}_image'])} / {percent(n[f'{axis}_video'])}",
            *(percent(n[f"{key}_{m}"], n[f"{key}_{m}_ci"]) for key, m in scores),
        ]
        for name, n in runs.items()
    ]
    return table(head, rows, right=True)


def questions(word: str, report: Report) -> str:
    """The number of questions per point."""
    types = next(iter(report.runs(word).values()))["types"]
    each = sorted({of["n"] for of in types.values()})
    return f"{' or '.join(map(str, each))} questions of each of {len(types)} types"


def drafts_table(word: str) -> str:
    """Accepted tokens on ``tiny``; empty if the benchmark did not run this drafter."""
    data = json.loads(DRAFTS.read_text(encoding="utf-8"))
    rows = []
    for name, part in data["parts"].items():
        work, _, drafter = name.split(" | ")
        if "mean_accepted" not in part or word not in re.split(r"[+:]", drafter):
            continue
        wall = part["wall"]
        rows.append(
            [
                f"`{drafter}`",
                work,
                f"{part['mean_accepted']:.2f}",
                f"{100 * part['calls'] / part['plain_calls']:.0f} %",
                f"{wall['value']:.2f}x [{wall['low']:.2f}, {wall['high']:.2f}]",
                f"{part['identical']} of {part['pairs']}",
            ]
        )
    head = ["recipe", "workload", "accepted tokens per round", "forward passes"]
    head += ["speed relative to no drafter", "identical answers"]
    return table(head, rows, right=True) if rows else ""


def _measured_section(word: str, protocol: str, found: list[Report]) -> Iterator[str]:
    yield "## Measured on `tiny`"
    if protocol == "drafter":
        rows = drafts_table(word)
        if not rows:
            yield f"Not measured on `tiny`. {NEEDS.get(word, '')}".strip()
        else:
            data = json.loads(DRAFTS.read_text(encoding="utf-8"))
            settings = data["settings"]
            yield rows
            yield (
                f"Measured on {data['date'][:10]} on {data['threads']} thread of a CPU, "
                f"{settings['dtype']}, torch {settings['torch']}, transformers "
                f"{settings['transformers']}, with {settings['pairs']} pairs of a drafted and a "
                "plain answer. Speed is measured from the image to the last token "
                f"([`{DRAFTS.name}`](../../{DRAFTS.relative_to(ROOT).as_posix()}))."
            )
        yield (
            "A drafter never changes an answer, so it does not affect accuracy; see "
            "[speculation](../speculation.md)."
        )
        return
    first, *others = measured(word, found) or [None]
    if first is None:
        yield f"Not measured on `tiny`. {NEEDS.get(word, '')}".strip()
        if protocol != "media":
            yield (
                f"Measure it with `vlmfast eval shapes --recipe {word} --recipe random "
                "--budget 0.33,0.11 --out runs/mine` ([evaluation](../evaluation.md))."
            )
        return
    yield curves(word, first)
    yield numbers_table(word, first)
    yield (
        f"{first.about} Each point uses {questions(word, first)}. Brackets and error bars are "
        "95 % intervals. The grey band is the interval of the full model. See the "
        f"[full report](../{first.place}/report.md)."
    )
    if others:
        links = (f"[{report.place}](../{report.place}/report.md)" for report in others)
        yield f"Also measured in {', '.join(links)}."
    yield (
        "`tiny` is trained only on synthetic scenes. Use it to compare methods, and measure again "
        "on your own model."
    )


# --- docstrings and parameters -------------------------------------------------------------------


def prose(doc: str) -> str:
    """Convert a module's docstring to Markdown.

    ``::`` starts a code block. Continued list items are indented by two in docstrings and by four
    in Markdown. Everything else is Markdown already.
    """
    out: list[str] = []
    lines = doc.strip().splitlines()
    item, block = False, 0  # inside a list; indentation of a code block
    loose = False  # a list with paragraphs as items needs blank lines between them
    for i, line in enumerate(lines):
        margin = "    " if item else ""
        if block and line.strip() and len(line) - len(line.lstrip()) < block:
            while not out[-1].strip():
                out.pop()
            out += [f"{margin}```", ""]
            block = 0
        if block:
            out.append(margin + line[block:] if line.strip() else "")
            continue
        if line and not line.startswith(" "):
            loose = loose and line.startswith("- ")
            item = line.startswith("- ")
            if loose and out[-1]:
                out.append("")
        loose = loose or (item and not line)
        margin = "    " if item else ""
        indent = 6 if item else 4
        follows = next((later for later in lines[i + 1 :] if later.strip()), "")
        opens = line.endswith("::") and follows.startswith(" " * indent)
        out.append(
            ("  " if item and line.startswith("  ") else "") + _text(line[: -1 if opens else None])
        )
        if opens:
            out += ["", f"{margin}```text"]
            block, loose = indent, item
    if block:
        out.append(f"{'    ' if item else ''}```")
    return re.sub(r"```text\n\n+", "```text\n", "\n".join(out))


def _text(line: str) -> str:
    """Escape characters that Markdown would treat as markup, except in code."""
    parts = re.split(r"(`+[^`]*`+)", line)
    return "".join(p if p.startswith("`") else re.sub(r"<(?=\w)", "&lt;", p) for p in parts)


def shown(value: Any) -> str:
    """Format a default value as in a recipe."""
    if isinstance(value, tuple):
        return "/".join(map(shown, value)) or "none"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def _allowed(parameter: dict[str, Any]) -> str:
    if parameter["choices"]:
        return ", ".join(f"`{choice}`" for choice in parameter["choices"])
    bounds = [f"{sign} {shown(parameter[k])}" for k, sign in _SIGNS.items() if k in parameter]
    return ", ".join(bounds) or {"bool": "`true`, `false`"}.get(parameter["type"], "")


def parameters_table(method: dict[str, Any]) -> str:
    """Name, default, range and meaning of every parameter."""
    rows = []
    for p in method["parameters"]:
        bare = " *(bare value)*" if p["name"] == method["value"] else ""
        default = f"`{shown(p['default'])}`"
        rows.append([f"`{p['name']}`{bare}", default, _allowed(p), html.escape(p["doc"], False)])
    return table(["parameter", "default", "allowed", "meaning"], rows)


def paper(text: str) -> str:
    """Paper references, with arXiv numbers as links."""
    return re.sub(r"(?:arXiv )?(\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", text)


def source(word: str) -> str:
    """The file of a method, relative to the root of the repository."""
    path = Path(importlib.import_module(stage_names()[word]).__file__)
    path = path.with_name("stage.py") if path.name == "__init__.py" else path
    return path.relative_to(ROOT).as_posix()


def example(word: str) -> str:
    """A recipe that consists of this method."""
    return EXAMPLES.get(word, word)


def _acts(word: str) -> str:
    parts = dict.fromkeys(part.protocol for part in stage_class(word)().expand())
    where = "; ".join(PROTOCOLS[protocol][1] for protocol in parts)
    return where.replace("its layers", "layers of the language model")


def _trained(word: str) -> str:
    drafter = word.startswith("draft-")
    home = "speculation.md#train-a-drafter" if drafter else "models.md#trained-methods"
    if (ROOT / "vlmfast" / "weights" / f"tiny-{word}").is_dir():
        return f"yes; weights for `tiny` are shipped, [train others](../{home})"
    return f"yes; [train the weights](../{home})"


def method_page(method: dict[str, Any], found: list[Report]) -> str:
    """The page of one method in Markdown."""
    word, protocol = method["name"], method["protocol"]
    path = source(word)
    facts = {
        "applied": _acts(word),
        "paper": paper(method["paper"]),
        "trained": _trained(word) if method["trained"] else "no",
        "source": f"[`{path}`](../../{path})",
    }
    if method["floor"]:
        note = "of the visual tokens, averaged over 32 layers"
        facts["minimum budget"] = f"{100 * method['floor']:.3g} % {note}"
    recipe = example(word)
    parts = [
        f"# {word}",
        f"**{method['summary']}**",
        "\n".join(f"- {name}: {fact}" for name, fact in facts.items()),
        "## Usage",
    ]
    if word in NEEDS:
        parts.append(NEEDS[word])
    question = "Describe the image." if protocol == "drafter" else "What is in the bottom left?"
    media = "examples/picture.png"
    shows_video = protocol == "media" or getattr(stage_class(word)(), "reuses_frames", False)
    if shows_video:
        media, question = "examples/clip.mp4", "Which way does the cyan star move?"
    parts.append(
        f'```\nvlmfast ask {media} "{question}" --recipe {recipe}\n```\n\n'
        f'```python\nvlm = vlmfast.VLM.from_pretrained("tiny")\n'
        f'vlm.ask(\n    "{question}",\n'
        f'    {"video" if shows_video else "images"}="{media}",\n'
        f'    recipe="{recipe}",\n)\n```'
    )
    parts += _measured_section(word, protocol, found)
    parts += ["## Parameters", parameters_table(method) if method["parameters"] else "None."]
    doc = importlib.import_module(stage_names()[word]).__doc__
    if not doc:
        raise ValueError(f"{path} has no module docstring, which is the text of the method's page")
    parts += ["## How it works", prose(doc)]
    return "\n\n".join(parts) + "\n"


def index_page(methods: list[dict[str, Any]], found: list[Report]) -> str:
    """The list of all methods, by where they are applied."""
    parts = [
        "# Methods",
        f"{len(methods)} methods, in pipeline order. Each page documents the method and its "
        "parameters, and shows measurements on the shipped model. `vlmfast methods` prints the "
        "same list.",
    ]
    for protocol, (title, where) in PROTOCOLS.items():
        here = [m for m in methods if m["protocol"] == protocol]
        if not here:
            continue
        rows = [
            [
                f"[`{m['name']}`]({m['name']}.md)",
                m["summary"],
                paper(m["paper"]),
                "yes" if m["trained"] else "",
                _where_measured(m, found),
            ]
            for m in here
        ]
        head = ["method", "summary", "paper", "trained", "measured"]
        parts += [f"## {title}", f"{where[0].upper()}{where[1:]}.", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _where_measured(method: dict[str, Any], found: list[Report]) -> str:
    if method["protocol"] == "drafter":
        return "accepted tokens" if drafts_table(method["name"]) else ""
    report = next(iter(measured(method["name"], found)), None)
    if report is None:
        return ""
    kind = "cache" if axis_of(method["name"], report) == "held" else "tokens"
    return f"[{kind}](../{report.place}/report.md)"


def pages(docs: Path = DOCS) -> dict[str, str]:
    """The Markdown of every generated page, by its path below ``docs``."""
    methods, found = vlmfast.methods(), reports(docs)
    made = {f"methods/{m['name']}.md": method_page(m, found) for m in methods}
    return {"methods/index.md": index_page(methods, found), **made}


def nav() -> list[Any]:
    """The navigation entries of the methods."""
    by: dict[str, list[str]] = {}
    for m in vlmfast.methods():
        by.setdefault(m["protocol"], []).append(m["name"])
    groups = [
        {title: [{word: f"methods/{word}.md"} for word in by[protocol]]}
        for protocol, (title, _) in PROTOCOLS.items()
        if protocol in by
    ]
    return ["methods/index.md", *groups]
