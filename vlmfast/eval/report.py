"""Tables of result folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from vlmfast.core.display import markdown_table
from vlmfast.core.files import make_folder, replace_text
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError

from .axes import share_of
from .chart import figure, write_page
from .chart import rows as rows_of
from .failures import read_failures
from .results import META, Results, check_same, read, write_json
from .scores import Interval
from .summary import (
    CACHE_BASELINES,
    CONTROLS,
    MODALITIES,
    Row,
    baseline,
    compare,
    difference,
    full_model,
    kept,
    kept_cache,
    mean_tokens,
    median_time,
    reduces,
    rereads,
    shrinks,
    splits,
)

_NOUN = {"image": "images", "video": "videos"}
_FEW = 30  # a bootstrap over fewer images gives intervals that are too narrow


def load(folder: Path) -> dict[str, list[Results]]:
    """Results by task, the full model first, then by method and falling cost, controls last.

    Runs that ended early because too many samples failed are not among them (`failures_of`).

    Raises
    ------
    VLMFastError
        If there are none, or they are not comparable.
    """
    metas = sorted(folder.glob(f"*/*/{META}")) or sorted(folder.glob(f"*/{META}"))
    if not metas:
        raise VLMFastError(
            f"no results in {folder}: expected {folder}/<task>/<recipe>/{META}, "
            "as 'vlmfast eval' writes them"
        )
    tasks: dict[str, list[Results]] = {}
    for meta in metas:
        results = read(meta.parent)
        if results.samples and results.name not in read_failures(meta.parent.parent):
            tasks.setdefault(results.meta["task"], []).append(results)
    if not tasks:
        raise VLMFastError(f"no samples in {folder}: no run has finished a sample yet")
    for runs in tasks.values():
        check_same({str(run.path): run.meta for run in runs})
        runs.sort(key=_order)
    return tasks


def failures_of(runs: list[Results]) -> dict[str, str]:
    """The recipes without a result in the folder of these runs, and the reasons."""
    return read_failures(runs[0].path.parent)


def _order(run: Results) -> tuple:
    rank = 2 if run.meta["control"] else int(run.meta["recipe"] != "none")
    cost = -(kept(run) or 0), -(kept_cache(run) or 0)
    return rank, baseline(run) is not None, run.meta["method"], *cost, run.name


def write_report(folder: Path, out: Path) -> tuple[str, list[Path]]:
    """Write ``report.md``, charts and ``report.json``; returns the text and the files.

    For each task and axis, ``<task>.html`` is an interactive chart, which loads
    ``plotly.min.js`` from the same folder.
    """
    parts, charts, axes, numbers = [], [], [], {}
    for task, runs in load(folder).items():
        common, notes = on_common_samples(runs)
        failed = failures_of(runs)
        rows = compare(common)
        parts.append(f"## {task}\n\n{_about(common)}\n")
        tokens, cache = by_tokens(rows), by_cache(rows)
        known = any(row.numbers[f"accuracy_{m}"] is not None for row in rows for m in MODALITIES)
        if tokens and known:
            parts.append(f"Interactive chart: `{task}.html`\n")
            charts.append((task, "kept", out / f"{task}.html"))
            axes.append("visual tokens")
        if tokens:
            parts.append(f"{glance(tokens)}{folded('All recipes', _written(_BY_TOKENS, tokens))}\n")
        if cache:
            parts.append(f"### KV cache\n\n{_ABOUT_CACHE}\n")
            if known:
                parts.append(f"Interactive chart: `{task}-cache.html`\n")
                charts.append((task, "held", out / f"{task}-cache.html"))
            parts.append(f"{cache_glance(cache)}{folded('All recipes', cache_table(cache))}\n")
            axes.append("KV cache")
        if any(row.session for row in rows):
            long = folded("All sessions", session_table(rows))
            parts.append(f"### Sessions\n\n{_ABOUT_SESSIONS}\n\n{long}\n")
        if any(row.numbers.get("metrics") for row in rows):
            about = _ABOUT_ROBUSTNESS if task.startswith("robustness") else _ABOUT_METRICS
            parts.append(f"### Metrics of {task}\n\n{about}\n\n{metrics_table(rows)}\n")
            parts.append(f"{group_tables(rows)}\n")
        parts.append(f"### Cost\n\n{folded('Cost of each recipe', _written(_COST, rows))}\n")
        if known and (pairs := pair_table(rows)):
            parts.append(f"### Pairs\n\n{_ABOUT_PAIRS}\n\n{folded('All pairs', pairs)}\n")
        notes += warnings(rows)
        parts += [f"**Warning:** {note}.\n" for note in notes]
        if failed:
            parts.append(f"### No result\n\n{failure_table(failed)}\n")
        rows += [row.session for row in rows if row.session]
        recipes = {row.run.name: row.numbers for row in rows}
        numbers[task] = {"recipes": recipes, "failed": failed, "warnings": notes}
    title = f"# Accuracy against {' and '.join(dict.fromkeys(axes))}\n"
    text = "\n".join([title, *filter(None, parts)])
    make_folder(out)
    replace_text(out / "report.md", text)
    write_json(out / "report.json", {"tasks": numbers})
    for task, axis, page in charts:  # last, because they need a package that a report does not
        drawn = figure(rows_of({"tasks": numbers}, task, axis))
        write_page(drawn, page, f"{task}: accuracy")
    return text, [out / "report.md", *(page for *_, page in charts), out / "report.json"]


def write_difference(before: Path, after: Path, out: Path) -> tuple[str, list[Path]]:
    """Write the differences between two folders to ``difference.md`` in ``out``."""
    old, new = load(before), load(after)
    tasks = [task for task in old if task in new]
    if not tasks:
        raise VLMFastError(f"{before} and {after} have no task in common")
    parts = [f"# Changes from {before} to {after}\n"]
    for task in tasks:
        olds, news = ({run.name: run for run in runs[task]} for runs in (old, new))
        shared = [(olds[name], run) for name, run in news.items() if name in olds]
        if not shared:
            raise VLMFastError(f"{before} and {after} have no recipe of {task} in common")
        parts.append(f"## {task}\n\n{_difference_table(shared)}\n")
        for folder, runs, others in ((before, olds, news), (after, news, olds)):
            alone = [name for name in runs if name not in others]
            if alone:
                parts.append(f"Only in {folder}: {', '.join(alone)}.\n")
        for folder, found in ((before, old), (after, new)):
            if failed := failures_of(found[task]):
                parts.append(f"No result in {folder}:\n\n{failure_table(failed)}\n")
    text, file = "\n".join(parts), out / "difference.md"
    make_folder(out)
    replace_text(file, text)
    return text, [file]


def on_common_samples(runs: list[Results]) -> tuple[list[Results], list[str]]:
    """Restrict all runs to their common samples; a note reports omitted samples."""
    common = set.intersection(*(set(run.samples) for run in runs))
    if not common:
        raise VLMFastError(
            "the recipes have no sample in common: "
            + ", ".join(f"{run.name} has {len(run.samples)}" for run in runs)
        )
    most = max(len(run.samples) for run in runs)
    short = [f"{run.name} ({len(run.samples)})" for run in runs if len(run.samples) < most]
    notes = []
    if short:
        notes.append(
            f"not every run has all {most} samples: {', '.join(short)}; the table uses the "
            f"{len(common)} common samples"
        )
    return [run.only(common) for run in runs], notes


# --- one folder ----------------------------------------------------------------------------------


def tables(rows: list[Row]) -> str:
    """All tables that apply to the rows."""
    tokens, cache = by_tokens(rows), by_cache(rows)
    parts = [_written(_BY_TOKENS, tokens)] if tokens else []
    parts += [cache_table(cache)] if cache else []
    parts += [session_table(rows)] if any(row.session for row in rows) else []
    return "\n\n".join(parts)


def by_tokens(rows: list[Row]) -> list[Row]:
    """The rows of the table by visual tokens; empty if all recipes are cache methods."""
    caches = any(map(shrinks, rows))
    found = [row for row in rows if not shrinks(row)]
    own = [r for r in found if not (_is_reference(r) or (caches and baseline(r.run) == "random"))]
    return found if own or not caches else []


def by_cache(rows: list[Row]) -> list[Row]:
    """The rows of the table by cache size, with its controls; empty without cache methods."""
    if not any(map(shrinks, rows)):
        return []
    return [r for r in rows if shrinks(r) or _is_reference(r) or baseline(r.run) == "random"]


def _is_reference(row: Row) -> bool:
    return row.run.meta["recipe"] == "none"


Cell = Callable[[Row], str]


def _written(columns: dict[str, Cell], rows: list[Row]) -> str:
    """A Markdown table, one row per recipe."""
    found = [[cell(row) for cell in ({"recipe": _label} | columns).values()] for row in rows]
    return markdown_table(["recipe", *columns], found)


def _label(row: Row) -> str:
    return row.run.label


def _one(key: str) -> Cell:
    """A number, with its interval if it has one."""
    return lambda row: _percent(row.numbers.get(key), row.numbers.get(f"{key}_ci"))


def _each(title: str, key: str) -> dict[str, Cell]:
    """A column for images and one for videos."""
    return {title.format(noun): _one(f"{key}_{m}") for m, noun in _NOUN.items()}


def _pair(key: str, scale: float = 1) -> Cell:
    """Image / video."""
    return lambda row: _two(*(row.numbers[f"{key}_{m}"] for m in MODALITIES), scale=scale)


def _against(name: str, other: Callable[[Row], Row | None]) -> dict[str, Cell]:
    """Differences, image and video."""

    def gap(row: Row, modality: str) -> str:
        base = other(row)
        return _points(None if base is None else row.gap(base, modality))

    return {f"against {name}, {noun}": partial(gap, modality=m) for m, noun in _NOUN.items()}


def _control(name: str) -> Callable[[Row], Row | None]:
    return lambda row: row.controls.get(name)


_TIMES = {
    "TTFT ms (image / video)": _pair("ttft_s", 1000),
    "stages' own ms (image / video)": _pair("reduce_s", 1000),
}
_BY_TOKENS = {
    **_each("{} %", "accuracy"),
    "captions % (image / video)": _pair("caption", 100),
    "loyalty %": lambda row: _percent(row.numbers.get("loyalty")),
    "equivalent tokens (image / video)": _pair("equivalent_tokens"),
    "kept %": _one("kept"),
    **_TIMES,
    **_against("random", _control("random")),
}
_BY_CACHE = {
    "cache %": _one("held"),
    **_each("{} %", "accuracy"),
    **_each("captions of {} %", "caption"),
    "loyalty %": _one("loyalty"),
    **_TIMES,
}
_OF_SESSIONS = {
    "cache %": _one("held"),
    "first questions % (image / video)": _pair("accuracy_first", 100),
    **_each("later questions, {} %", "accuracy_later"),
    **_each("captions of {} %", "caption"),
    "loyalty %": _one("loyalty"),
    "TTFT ms of later questions (image / video)": _pair("ttft_later_s", 1000),
}
_COST = {
    "equivalent tokens": _pair("equivalent_tokens"),
    "GFLOPs of their prefill": _pair("flops_prefill", 1e-9),
    "TTFT ms": _pair("ttft_s", 1000),
    "tokens per second": lambda row: _two(
        *(1 / t if (t := row.numbers[f"tpot_s_{m}"]) else None for m in MODALITIES)
    ),
    "KV cache %": _pair("held", 100),
    "peak memory MB (on a CPU: of the process so far)": _pair("peak_memory_bytes", 1e-6),
}


def cache_table(rows: list[Row]) -> str:
    """A Markdown table by the cache's size, one row per recipe."""
    full = next((row for row in rows if row.run.name == "none"), None)
    others = _against("the full model", lambda row: None if _is_reference(row) else full)
    for name in CACHE_BASELINES:
        if any(name in row.controls for row in rows):
            others |= _against(name, _control(name))
    return _written(_BY_CACHE | others, rows)


def session_table(rows: list[Row]) -> str:
    """A Markdown table of the sessions, one row per recipe."""

    def asked(cell: Cell) -> Cell:
        return lambda row: cell(cast(Row, row.session))

    rows = [row for row in rows if row.session]
    alone = {id(row.session): row for row in rows}
    columns = _OF_SESSIONS | _against("single questions", lambda row: alone[id(row)])
    own: dict[str, Cell] = {
        "images are processed": lambda row: "for each question" if rereads(row.run) else "once",
        **{title: asked(cell) for title, cell in columns.items()},
    }
    return _written(own, rows)


def metrics_table(rows: list[Row]) -> str:
    """A Markdown table of a task's own metrics, one row per recipe; empty if it has none."""

    def cell(name: str) -> Cell:
        return lambda row: f"{row.numbers['metrics'][name]:.4g}"

    rows = [row for row in rows if row.numbers.get("metrics")]
    return _written({n: cell(n) for n in rows[0].numbers["metrics"]}, rows) if rows else ""


def group_tables(rows: list[Row]) -> str:
    """For each grouping of the questions, the accuracy of each group, one column per recipe."""
    rows = [row for row in rows if row.numbers.get("groups")]
    parts = []
    for group, first in rows[0].numbers["groups"].items() if rows else ():
        head = [group, "questions", *(f"{row.run.label} %" for row in rows)]
        lines = []
        for name, numbers in first.items():
            found = [row.numbers["groups"].get(group, {}).get(name, {}) for row in rows]
            cells = [_percent(own.get("accuracy"), own.get("ci")) for own in found]
            lines.append([name, str(numbers["n"]), *cells])
        parts.append(markdown_table(head, lines))
    return "\n\n".join(parts)


def failure_table(failed: dict[str, str]) -> str:
    """A Markdown table of the recipes without a result; empty if there are none."""
    cells = {name: " ".join(reason.split()).replace("|", r"\|") for name, reason in failed.items()}
    lines = [f"| `{name}` | {reason} |" for name, reason in cells.items()]
    return "\n".join(["| no result | reason |", "|---|---|", *lines] if lines else [])


def pair_table(rows: list[Row]) -> str:
    """A Markdown table of each recipe against the full model and its controls, same questions."""
    full = next((row for row in rows if row.run.name == "none"), None)
    lines = []
    for row in rows:
        others = [full] if full is not None and row is not full else []
        for other in [*others, *row.controls.values(), *row.bases]:
            gaps = [_points(row.gap(other, modality)) for modality in MODALITIES]
            lines.append([row.run.label, other.run.label, *gaps, *_split(row.run, other.run)])
    head = ["recipe", "against", "images, points", "videos, points"]
    head += ["only recipe right", "only other right", "McNemar's p"]
    return markdown_table(head, lines) if lines else ""


def _split(run: Results, other: Results) -> list[str]:
    found = splits(run, other)
    return [_NONE] * 3 if found is None else [str(found[0]), str(found[1]), f"{found[2]:.2g}"]


def glance(rows: list[Row]) -> str:
    """Methods by budgets: accuracy on images and videos; empty with fewer than two methods."""
    shown = [row for row in rows if row.run.meta["budget"] is not None and reduces(row)]
    single = {row.run.meta["budget"] for row in shown if "+" not in row.run.meta["method"]}
    cells = {}
    for row in shown:
        budget = _near(row.run.meta["budget"], single)
        cells[row.run.labelled(row.run.meta["method"]), budget] = _glimpse(row, budget)
    grid = _grid(cells, "images % / videos %", "of the tokens")
    return grid and f"{grid}\n\n{_ABOUT_GLANCE}\n\n"


def _near(budget: float, columns: set[float]) -> float:
    """The column of a stack, whose budget is a product: the nearest one within a tenth of it."""
    nearest = min(columns, key=lambda column: abs(column - budget), default=budget)
    return nearest if abs(nearest - budget) <= 0.1 * budget else budget


def cache_glance(rows: list[Row]) -> str:
    """The same by shares of the cache: questions, captions, and later questions in sessions.

    Methods without a share have their own column.
    """
    grids = []
    for what, title in _VIEWS.items():
        cells = {}
        for row in filter(shrinks, rows):
            captions = any(row.numbers[f"caption_{m}"] is not None for m in MODALITIES)
            if (what == "later" and row.session is None) or (what == "captions" and not captions):
                continue
            share = share_of(Recipe.parse(row.run.meta["recipe"]))
            method = row.run.meta["method" if share is not None else "recipe"]
            cells[row.run.labelled(method), share] = _glimpse(row, share, what)
        grids.append(_grid(cells, f"{title}: images % / videos %", "of the cache"))
    text = "\n\n".join(filter(None, grids))
    return text and f"{text}\n\n{_ABOUT_GLANCE} \\*: the image is processed again.\n\n"


_ABOUT_GLANCE = (
    "Bold: above every control of the same cost beyond the 95 % interval. Brackets: what is kept, "
    "where it differs from what was asked for."
)
_VIEWS = {
    "questions": "single questions",
    "captions": "captions",
    "later": "later questions in a session",
}


def _grid(cells: Mapping[tuple[str, Any], str], title: str, what: str) -> str:
    """A Markdown table of methods by shares; the share ``None`` is the last column."""
    methods = list(dict.fromkeys(method for method, _ in cells))
    if len(methods) < 2:
        return ""
    shares = sorted({share for _, share in cells if share is not None}, reverse=True)
    head = [title, *(f"{100 * share:g} % {what}" for share in shares)]
    if any(share is None for _, share in cells):
        head.append("no share")
    columns = [*shares, None][: len(head) - 1]
    return markdown_table(
        head,
        [[method, *(cells.get((method, s), _NONE) for s in columns)] for method in methods],
    )


def _glimpse(row: Row, share: float | None, what: str = "questions") -> str:
    """Scores, bold if above all controls, and the actual cost if it differs from ``share``."""
    key = {"questions": "accuracy", "captions": "caption", "later": "accuracy_later"}[what]
    asked = row.session if what == "later" else row
    assert asked is not None
    shown = []
    for modality in MODALITIES:
        gaps = [asked.gap(control, modality, what) for control in asked.controls.values()]
        text = _percent(asked.numbers[f"{key}_{modality}"])
        shown.append(f"**{text}**" if gaps and all(gap and gap[1] > 0 for gap in gaps) else text)
    paid = asked.numbers["held" if shrinks(row) else "kept"]
    off = share is None or abs(paid - share) > 0.1 * share
    again = " \\*" if what == "later" and rereads(row.run) else ""
    return " / ".join(shown) + again + (f" ({_percent(paid)} %)" if off else "")


def warnings(rows: list[Row]) -> list[str]:
    """Limitations of the results that a reader must know."""
    notes, present = [], {baseline(row.run) for row in rows}
    if all(s["score"] is None for s in rows[0].run.samples.values()):
        notes.append("the answers to these questions are hidden, so the runs have no scores")
    needed: tuple[str, ...] = CONTROLS if any(map(reduces, by_tokens(rows))) else ()
    needed += CACHE_BASELINES if any(map(shrinks, rows)) else ()
    for name in dict.fromkeys(needed):
        if name not in present:
            notes.append(f"the control `{name}` is missing; add `--recipe {name}`")
    for modality, noun in _NOUN.items():
        samples = [s for s in rows[0].run.samples.values() if s["modality"] == modality]
        number = len({s["picture"] for s in samples})
        if 0 < number < _FEW:
            notes.append(f"only {number} {noun}: too few for intervals; use a larger `--limit`")
    if full_model([row.run for row in rows]) is None:
        notes.append("the full model is missing, so loyalty is not available")
    methods = [r for r in rows if (reduces(r) or shrinks(r)) and not baseline(r.run)]
    alone = [f"`{row.run.name}`" for row in methods if not row.controls]
    if alone and present.intersection(CONTROLS + CACHE_BASELINES):
        notes.append(f"no control of about the same cost as {', '.join(alone)}")
    notes += _no_better(methods)
    for row in [*rows, *(row.session for row in rows if row.session)]:
        if row.numbers["errors"]:
            notes.append(
                f"{row.numbers['errors']} samples of `{row.run.name}` failed and count as wrong"
            )
    for row in rows:
        if row.run.variant == "session":
            notes.append(f"`{row.run.name}` was run in sessions only")
    return notes


def _no_better(rows: list[Row]) -> list[str]:
    """Methods that do not beat a control, one note per control and kind of question."""
    found: dict[str, list[str]] = {}
    for what, title in _VIEWS.items():
        for row in rows:
            asked = row.session if what == "later" else row
            # Only caches are compared by captions and in sessions.
            if asked is None or not (shrinks(row) or what == "questions"):
                continue
            for name, control in asked.controls.items():
                for modality, noun in _NOUN.items():
                    gap = asked.gap(control, modality, what)
                    if gap is not None and gap[1] <= 0:
                        place = f"`{name}` of the same cost ({title}, {noun})"
                        found.setdefault(place, []).append(f"`{row.run.meta['recipe']}`")
    return [f"not better than {place}: {', '.join(names)}" for place, names in found.items()]


def _about(runs: list[Results]) -> str:
    meta, samples = runs[0].meta, runs[0].samples.values()
    inputs = len({s["picture"] for s in samples})
    devices = sorted({run.meta.get("device") or "unknown" for run in runs})
    weights = f", weights {meta['weights_sha256'][:12]}" if meta["weights_sha256"] else ""
    options = "".join(f", {key} {value}" for key, value in (meta.get("options") or {}).items())
    return (
        f"Model {meta['model']}{weights}; task version {meta['task_version']}, "
        f"seed {meta['seed']}{options}; {len(samples)} questions about {inputs} images "
        f"and videos; on {', '.join(devices)}.\n\n"
        "Accuracies are means over question types; brackets are 95 % intervals (bootstrap over "
        "images and videos, paired for differences). Loyalty: fraction of answers equal to the "
        "full model's. Equivalent tokens: visual tokens kept, averaged over layers. TTFT: median "
        "time to the first token. `random` is the run with the nearest cost. Of a control with "
        "several draws, scores are means, and intervals resample the draws too."
    )


_ABOUT_METRICS = (
    "Named as in lmms-eval, in the mode of the run; intervals of groups resample whole images and "
    "videos."
)
_ABOUT_ROBUSTNESS = (
    "`changed` is the fraction of the kept tokens that are no longer kept. An attack is optimized "
    "against the selection of its recipe; `none@attack-E-RECIPE` is the full model on the same "
    "images. Descriptions have the mean and the maximum of their `tokens`, and the fraction "
    "`at_limit`, which reaches `max_new_tokens`."
)
_ABOUT_PAIRS = (
    "The same questions under two recipes, without captions: differences with their interval "
    "(bootstrap over images and videos), and McNemar's exact test. The test assumes independent "
    "questions, so its p is too small if several questions are about one image."
)
_ABOUT_CACHE = (
    "Cache %: bytes of the cache when decoding starts, including the parameters of quantized "
    "slots, as a fraction of the full cache. Most methods prefill the complete prompt, which "
    "determines the first token of an answer. The short answer to a single question therefore "
    "depends little on the compressed cache. Captions are long, and later questions in a "
    "session only see the compressed cache of an image: these separate the methods.\n\n"
    "No cache method selects at random. The controls ignore the content: `streamingllm` keeps the "
    "first and the last slots, and `random` drops visual tokens before the language model, which "
    "also reduces the cost of the prefill. Each control is the run with the nearest cache size."
)
_ABOUT_SESSIONS = (
    "All questions about an image or a video, one after another in a session, without history. "
    "If a recipe does not depend on the question, the image is prefilled and its cache compressed "
    "once, before the first question; cache % is that cache plus the question. With the "
    "other recipes, each question prefills the image again, with the same answer as a single "
    "question. Against single questions: the same questions, paired."
)


_LONG = 12  # rows that a page shows without a click


def folded(title: str, table: str) -> str:
    """A Markdown table, folded if it is long, for code hosts and MkDocs."""
    number = table.count("\n") - 1  # without head and rule
    if number <= _LONG:
        return table
    head = f'<details markdown="1">\n<summary>{title} ({number} rows)</summary>'
    return f"{head}\n\n{table}\n\n</details>"


# --- two folders ---------------------------------------------------------------------------------


def _difference_table(pairs: list[tuple[Results, Results]]) -> str:
    rows = []
    for old, new in pairs:
        check_same(
            {str(run.path): run.meta for run in (old, new)},
            ("task", "task_version", "seed", "options"),
        )
        common = set(old.samples) & set(new.samples)
        old, new = old.only(common), new.only(common)
        cells = {"recipe": new.label, "samples": str(len(common))}
        for m, noun in _NOUN.items():
            cells[f"{noun}, points"] = _points(difference(new, old, m))
        cells["McNemar's p"] = _split(new, old)[2]
        cells["equivalent tokens"] = _arrow(mean_tokens(old), mean_tokens(new))
        for m, noun in _NOUN.items():
            times = (median_time(run, m) for run in (old, new))
            cells[f"TTFT ms, {noun}"] = _arrow(*times, scale=1000)
        rows.append(cells)
    return markdown_table(list(rows[0]), [list(cells.values()) for cells in rows])


# --- cells ---------------------------------------------------------------------------------------

_NONE = "–"


def _percent(value: float | None, ci: list[float] | None = None) -> str:
    if value is None:
        return _NONE
    return f"{100 * value:.1f}" + (f" [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]" if ci else "")


def _points(gap: Interval | None) -> str:
    shown = (round(100 * value, 1) + 0.0 for value in gap or ())  # no -0.0
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*shown) if gap else _NONE


def _two(a: float | None, b: float | None, *, scale: float = 1) -> str:
    return " / ".join(_NONE if v is None else f"{v * scale:.1f}" for v in (a, b))


def _arrow(a: float | None, b: float | None, *, scale: float = 1) -> str:
    if a is None or b is None:
        return _NONE
    change = f" ({100 * (b / a - 1):+.0f} %)" if a else ""
    return f"{a * scale:.1f} → {b * scale:.1f}{change}"
