"""Generate one documentation page per method from the registry and the measured reports.

Nothing on these pages is written by hand. Text and parameters come from the method's docstring and
fields, numbers from ``docs/results/**/report.json`` and ``benchmarks/results``. `pages` needs the
package and plotly; MkDocs is not imported here.
"""

from __future__ import annotations

import functools
import html
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charts import html_of
from sources import ROOT, listed, read, table

import vlmfast
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import TIERS
from vlmfast.eval import chart
from vlmfast.eval.axes import shrinks_cache

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
# Requirements of methods whose weights are not shipped.
NEEDS = dict.fromkeys(
    ("clip-relevance", "frames-clip"),
    "It needs an OpenCLIP model in addition to the VLM. The weights are not shipped. They are "
    "downloaded when needed; offline, set `model=local-dir:FOLDER`.",
)


# --- measured reports ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """One task of a ``report.json``.

    Parameters
    ----------
    place : str
        Its folder below ``docs``.
    task, about : str
        ``about`` is the line of its ``report.md`` on model, seed and number of questions.
    """

    place: str
    task: str
    about: str

    @functools.cache  # noqa: B019 - there are a dozen
    def rows(self, axis: str) -> list[chart.Measured]:
        return chart.rows(DOCS / self.place / "report.json", self.task, axis)

    def shown(self, word: str) -> list[chart.Measured]:
        """The full model, the runs of this method alone, and the baselines; empty without runs."""
        own, full, others = [], [], []
        for row in self.rows(axis_of(word)):
            if row.group == chart.FULL:
                full.append(row)
            elif row.method.partition(":")[0] == word and "+" not in row.method:
                own.append(row)
            elif row.method in ("random", "streamingllm"):
                others.append(row)
        return [*full, *own, *others] if own else []


@functools.cache
def reports() -> list[Report]:
    """Every report in ``docs/results``, the one of the folder itself first."""
    found = []
    files = sorted((DOCS / "results").rglob("report.json"), key=lambda f: (len(f.parts), f))
    for file in files:
        text = file.with_suffix(".md").read_text(encoding="utf-8")
        for task in read(file)["tasks"]:
            about = re.search(rf"^## {re.escape(task)}\n\n(.+)$", text, re.MULTILINE)
            if about is None:
                raise ValueError(f"{file.with_suffix('.md')} has no section on {task}")
            found.append(Report(file.parent.relative_to(DOCS).as_posix(), task, about[1]))
    return found


def measured(word: str) -> list[Report]:
    """The reports that ran this method."""
    return [report for report in reports() if report.shown(word)]


def axis_of(word: str) -> str:
    """``held`` (cache size) for methods that shrink the cache, else ``kept`` (visual tokens)."""
    return "held" if shrinks_cache(stage_class(word)()) else "kept"


def curves(word: str, report: Report) -> str:
    """The chart of a method beside the baselines."""
    drawn = chart.figure(report.shown(word))
    drawn.for_each_trace(lambda trace: trace.update(visible=True))
    drawn.update_layout(height=drawn.layout.height - 100, margin_b=180)  # a short legend
    return html_of(drawn, "../")


# --- tables --------------------------------------------------------------------------------------


def numbers_table(word: str, report: Report) -> str:
    """The points of the chart."""
    axis = axis_of(word)
    keys = [(key, kind) for key in ("accuracy", "caption") for kind in ("image", "video")]
    keys = keys if axis == "held" else keys[:2]
    cost = "KV cache size %" if axis == "held" else "tokens kept %"
    names = {"accuracy": "questions" if axis == "held" else "", "caption": "captions"}
    titles = [f"{names[key]}, {kind}s %".removeprefix(", ") for key, kind in keys]
    lines = [["recipe", f"{cost}, images / videos", *titles]]
    for row in report.shown(word):
        n = row.numbers
        paid = (_percent(n[f"{axis}_{kind}"]) for kind in ("image", "video"))
        scores = (_percent(n[f"{k}_{kind}"], n[f"{k}_{kind}_ci"]) for k, kind in keys)
        lines.append([f"`{row.recipe}`", " / ".join(paid), *scores])
    return table(lines)


def _percent(value: float | None, ci: list[float] | None = None) -> str:
    """A fraction in percent, with its interval."""
    if value is None:
        return "–"
    text = f"{100 * value:.1f}"
    return f"{text} [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]" if ci else text


def questions(word: str, report: Report) -> str:
    """The number of questions per point."""
    types = report.shown(word)[1].numbers["types"]
    each = sorted({of["n"] for of in types.values()})
    return f"{' or '.join(map(str, each))} questions of each of {len(types)} types"


def drafts_table(word: str) -> str:
    """Accepted tokens on ``tiny``; empty if the benchmark did not run this drafter."""
    rows = []
    for name, part in read(DRAFTS)["parts"].items():
        work, _, drafter = name.split(" | ")
        if "mean_accepted" in part and word in re.split(r"[+:]", drafter):
            passes = part["calls"] / part["plain_calls"]
            rows.append({**part, "drafter": drafter, "work": work, "passes": passes})
    columns = {
        "recipe": "`{drafter}`",
        "workload": "{work}",
        "accepted tokens per round": "{mean_accepted:.2f}",
        "forward passes": "{passes:.0f %}",
        "speed relative to no drafter": "{wall[value]:.2f}x [{wall[low]:.2f}, {wall[high]:.2f}]",
        "identical answers": "{identical} of {pairs}",
    }
    return listed(rows, columns) if rows else ""


def _measured_section(word: str, protocol: str) -> Iterator[str]:
    yield "## Measured on `tiny`"
    nothing = f"Not measured on `tiny`. {NEEDS.get(word, '')}".strip()
    if protocol == "drafter":
        rows = drafts_table(word)
        data = read(DRAFTS)
        settings = data["settings"]
        about = (
            f"Measured on {data['date'][:10]} on {data['threads']} thread of a CPU, "
            f"{settings['dtype']}, torch {settings['torch']}, transformers "
            f"{settings['transformers']}, with {settings['pairs']} pairs of a drafted and a "
            "plain answer. Speed is measured from the image to the last token "
            f"([`{DRAFTS.name}`](../../{DRAFTS.relative_to(ROOT).as_posix()}))."
        )
        yield from (rows, about) if rows else (nothing,)
        yield (
            "A drafter never changes an answer, so it does not affect accuracy; see "
            "[speculation](../speculation.md)."
        )
        return
    first, *others = measured(word) or [None]
    if first is None:
        yield nothing
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
    in Markdown. What Markdown would read as a tag is escaped.
    """
    out: list[str] = []
    item = loose = False
    for line in doc.strip().splitlines():
        if line and not line.startswith(" "):
            loose = loose and line.startswith("- ")
            item = line.startswith("- ")
            out += [""] if loose and out[-1] else []
        loose = loose or (item and not line)
        if not line.startswith(" " * (6 if item else 4)):  # no code
            parts = re.split(r"(`+[^`]*`+)", re.sub("::$", ":", line))
            line = "".join(p if p[:1] == "`" else re.sub(r"<(?=\w)", "&lt;", p) for p in parts)
        out.append(f"  {line}" if item and line.startswith("  ") else line)
    return "\n".join(out)


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


def text_table(rows: list[list[str]]) -> str:
    """A table of words, aligned to the left."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return table(escaped).replace("---:", "---")


def parameters_table(method: dict[str, Any]) -> str:
    """Name, default, range and meaning of every parameter."""
    rows = [["parameter", "default", "allowed", "meaning"]]
    for p in method["parameters"]:
        bare = " *(bare value)*" if p["name"] == method["value"] else ""
        default = f"`{shown(p['default'])}`"
        rows.append([f"`{p['name']}`{bare}", default, _allowed(p), html.escape(p["doc"], False)])
    return text_table(rows)


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


def method_page(method: dict[str, Any]) -> str:
    """The page of one method in Markdown."""
    word, protocol = method["name"], method["protocol"]
    path = source(word)
    facts = {
        "tier": method["tier"],
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
    parts += _measured_section(word, protocol)
    parts += ["## Parameters", parameters_table(method) if method["parameters"] else "None."]
    doc = importlib.import_module(stage_names()[word]).__doc__
    if not doc:
        raise ValueError(f"{path} has no module docstring, which is the text of the method's page")
    parts += ["## How it works", prose(doc)]
    return "\n\n".join(parts) + "\n"


def index_page(methods: list[dict[str, Any]]) -> str:
    """The list of all methods, by where they are applied."""
    parts = [
        "# Methods",
        f"{len(methods)} methods, in pipeline order. Each page documents the method and its "
        "parameters, and shows measurements on the shipped model. `vlmfast methods` prints the "
        "same list. *Core* are the methods that the project is about and those that lead a table "
        "of results, *baseline* established methods to compare with, *experimental* all others.",
    ]
    for protocol, (title, where) in PROTOCOLS.items():
        here = [m for m in methods if m["protocol"] == protocol]
        rows = [
            [
                f"[`{m['name']}`]({m['name']}.md)",
                m["tier"],
                m["summary"],
                paper(m["paper"]),
                "yes" if m["trained"] else "",
                _where_measured(m),
            ]
            for m in sorted(here, key=lambda m: TIERS.index(m["tier"]))
        ]
        rows.insert(0, ["method", "tier", "summary", "paper", "trained", "measured"])
        about = f"{where[0].upper()}{where[1:]}."
        parts += [f"## {title}", about, text_table(rows)] if here else []
    return "\n\n".join(parts) + "\n"


def _where_measured(method: dict[str, Any]) -> str:
    if method["protocol"] == "drafter":
        return "accepted tokens" if drafts_table(method["name"]) else ""
    report = next(iter(measured(method["name"])), None)
    if report is None:
        return ""
    kind = "cache" if axis_of(method["name"]) == "held" else "tokens"
    return f"[{kind}](../{report.place}/report.md)"


def pages() -> dict[str, str]:
    """The Markdown of every generated page, by its path below ``docs``."""
    methods = vlmfast.methods()
    made = {f"methods/{m['name']}.md": method_page(m) for m in methods}
    return {"methods/index.md": index_page(methods), **made}


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
