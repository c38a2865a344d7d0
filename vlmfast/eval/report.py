"""Tables of result folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

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
    of_modality,
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
    parts, charts, numbers = [], [], {}
    for task, runs in load(folder).items():
        common, notes = on_common_samples(runs)
        failed = failures_of(runs)
        rows = compare(common)
        parts.append(f"## {task}\n\n{_about(common)}\n")
        caches = any(map(shrinks, rows))
        if caches:
            parts.append(f"{_ABOUT_CACHE}\n")
        known = any(row.numbers[f"accuracy_{m}"] is not None for row in rows for m in MODALITIES)
        if known:
            axes = {"kept": task} if not caches or any(map(_is_reducer, rows)) else {}
            axes |= {"held": f"{task}-cache"} if caches else {}
            for axis, name in axes.items():
                parts.append(f"Interactive chart: `{name}.html`\n")
                charts.append((task, axis, out / f"{name}.html"))
        parts.append(f"{glance(rows)}{folded('All recipes', table(rows))}\n")
        if any(row.numbers.get("metrics") for row in rows):
            about = _ABOUT_ROBUSTNESS if task.startswith("robustness") else _ABOUT_METRICS
            parts.append(f"### Metrics of {task}\n\n{about}\n\n{metrics_table(rows)}\n")
            parts.append(f"{group_tables(rows)}\n")
        if known and (pairs := pair_table(rows)):
            parts.append(f"### Pairs\n\n{_ABOUT_PAIRS}\n\n{folded('All pairs', pairs)}\n")
        notes += warnings(rows)
        parts += [f"**Warning:** {note}.\n" for note in notes]
        if failed:
            parts.append(f"### No result\n\n{failure_table(failed)}\n")
        recipes = {row.run.name: row.numbers for row in rows}
        numbers[task] = {"recipes": recipes, "failed": failed, "warnings": notes}
    text = "\n".join(["# Accuracy and cost\n", *filter(None, parts)])
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

_NONE = "–"
Cell = Callable[[Row], str]


def table(rows: list[Row]) -> str:
    """A Markdown table of accuracy and cost, one row per recipe, without empty columns."""
    columns = {title: [cell(row) for row in rows] for title, cell in _COLUMNS.items()}
    filled = {title: cells for title, cells in columns.items() if any(map(_is_filled, cells))}
    return _written(filled, rows) if rows else ""


def _written(columns: dict[str, list[str]], rows: list[Row]) -> str:
    lines = [[row.run.label, *cells] for row, *cells in zip(rows, *columns.values(), strict=True)]
    return markdown_table(["recipe", *columns], lines)


def _is_filled(cell: str) -> bool:
    return cell.strip(f"{_NONE} /") != ""


def _is_reducer(row: Row) -> bool:
    return reduces(row) and baseline(row.run) != "random"


def _one(key: str) -> Cell:
    """A number, with its interval if it has one."""
    return lambda row: _percent(row.numbers.get(key), row.numbers.get(f"{key}_ci"))


def _each(title: str, key: str) -> dict[str, Cell]:
    """A column for images and one for videos."""
    return {title.format(noun): _one(f"{key}_{m}") for m, noun in _NOUN.items()}


def _pair(key: str, scale: float = 1) -> Cell:
    """Image / video."""
    return lambda row: _two(*(row.numbers[f"{key}_{m}"] for m in MODALITIES), scale=scale)


def _reads(row: Row) -> str:
    """How often a session processes its images."""
    if not row.in_sessions:
        return _NONE
    return "for each question" if rereads(row.run) else "once"


_COLUMNS: dict[str, Cell] = {
    "tokens kept %": _one("kept"),
    "cache %": _one("held"),
    **_each("{} %", "accuracy"),
    **_each("first questions of sessions, {} %", "accuracy_first"),
    **_each("later questions, {} %", "accuracy_later"),
    **_each("captions of {} %", "caption"),
    "loyalty %": _one("loyalty"),
    "equivalent tokens": _pair("equivalent_tokens"),
    "prefill GFLOPs": _pair("flops_prefill", 1e-9),
    "TTFT ms": _pair("ttft_s", 1000),
    "TTFT ms of later questions": _pair("ttft_later_s", 1000),
    "stages' own ms": _pair("reduce_s", 1000),
    "ms per token": _pair("tpot_s", 1000),
    "peak memory MB": _pair("peak_memory_bytes", 1e-6),
    "a session processes images": _reads,
}


def metrics_table(rows: list[Row]) -> str:
    """A Markdown table of a task's own metrics, one row per recipe; empty if it has none."""
    rows = [row for row in rows if row.numbers.get("metrics")]
    names = rows[0].numbers["metrics"] if rows else ()
    columns = {n: [f"{row.numbers['metrics'][n]:.4g}" for row in rows] for n in names}
    return _written(columns, rows) if rows else ""


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
        alone = row is full or row.in_sessions  # compared with single questions
        others = [full] if full is not None and not alone else []
        for other in [*others, *row.controls.values(), *row.bases]:
            gaps = [_points(row.gap(other, modality)) for modality in MODALITIES]
            lines.append([row.run.label, other.run.label, *gaps, *_split(row.run, other.run)])
    head = ["recipe", "against", "images, points", "videos, points"]
    head += ["only recipe right", "only other right", "McNemar's p"]
    return markdown_table(head, lines) if lines else ""


def _split(run: Results, other: Results) -> list[str]:
    found = splits(run, other)
    return [_NONE] * 3 if found is None else [str(found[0]), str(found[1]), f"{found[2]:.2g}"]


_ABOUT_GLANCE = (
    "Images % / videos %. Bold: above every control of the same cost beyond the 95 % interval. "
    "Brackets: what is kept, where it differs from what was asked for. \\*: the image is processed "
    "again for each question."
)
_VIEWS = {
    "questions": "single questions",
    "captions": "captions",
    "later": "later questions in a session",
}
_KEYS = {"questions": "accuracy", "captions": "caption", "later": "accuracy_later"}


def glance(rows: list[Row]) -> str:
    """Accuracy of methods by budgets and by shares of the cache.

    Methods without either have their own column. Empty with fewer than two methods.
    """
    grids: dict[str, dict[tuple[str, float | None], str]] = {}
    for what, title in _VIEWS.items():
        for row in rows:
            cache, meta = shrinks(row), row.run.meta
            if not _is_viewed(row, what) or not (cache or reduces(row)):
                continue
            share = share_of(Recipe.parse(meta["recipe"])) if cache else meta["budget"]
            method = row.run.labelled(meta["recipe" if share is None else "method"])
            cells = grids.setdefault(f"{title}, kept of the {'cache' if cache else 'tokens'}", {})
            cells[method, share] = _glimpse(row, share, what)
    text = "\n\n".join(filter(None, (_grid(title, cells) for title, cells in grids.items())))
    return text and f"{text}\n\n{_ABOUT_GLANCE}\n\n"


def _is_viewed(row: Row, what: str) -> bool:
    """Whether a row has scores of this kind; only caches differ in captions and in sessions."""
    scored = any(row.numbers[f"{_KEYS[what]}_{m}"] is not None for m in MODALITIES)
    fits = row.in_sessions == (what == "later")
    return scored and fits and (shrinks(row) or what == "questions")


def _grid(title: str, cells: Mapping[tuple[str, float | None], str]) -> str:
    """A Markdown table of methods by shares; the share ``None`` is the last column."""
    methods = list(dict.fromkeys(method for method, _ in cells))
    shares = sorted({share for _, share in cells}, key=lambda share: -(share or 0))
    head = [title, *("default" if share is None else f"{100 * share:g} %" for share in shares)]
    lines = [[method, *(cells.get((method, s), _NONE) for s in shares)] for method in methods]
    return markdown_table(head, lines) if len(methods) > 1 else ""


def _glimpse(row: Row, share: float | None, what: str) -> str:
    """Scores, bold if above all controls, and the actual cost if it differs from ``share``."""
    shown = []
    for modality in MODALITIES:
        gaps = [row.gap(control, modality, what) for control in row.controls.values()]
        text = _percent(row.numbers[f"{_KEYS[what]}_{modality}"])
        shown.append(f"**{text}**" if gaps and all(gap and gap[1] > 0 for gap in gaps) else text)
    paid = row.numbers["held" if shrinks(row) else "kept"]
    off = share is None or abs(paid - share) > 0.1 * share
    again = " \\*" if what == "later" and rereads(row.run) else ""
    return " / ".join(shown) + again + (f" ({_percent(paid)} %)" if off else "")


def warnings(rows: list[Row]) -> list[str]:
    """Limitations of the results that a reader must know."""
    notes, present = [], {baseline(row.run) for row in rows}
    if all(s["score"] is None for s in rows[0].run.samples.values()):
        notes.append("the answers to these questions are hidden, so the runs have no scores")
    needed: tuple[str, ...] = CONTROLS if any(map(_is_reducer, rows)) else ()
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
    alone = [f"`{row.run.name}`" for row in methods if not (row.controls or row.in_sessions)]
    if alone and present.intersection(CONTROLS + CACHE_BASELINES):
        notes.append(f"no control of about the same cost as {', '.join(alone)}")
    notes += _no_better(methods)
    for row in rows:
        if row.numbers["errors"]:
            notes.append(
                f"{row.numbers['errors']} samples of `{row.run.name}` failed and count as wrong"
            )
    return notes


def _no_better(rows: list[Row]) -> list[str]:
    """Methods that do not beat a control, one note per control and kind of question."""
    found: dict[str, list[str]] = {}
    for what, title in _VIEWS.items():
        for row in (row for row in rows if _is_viewed(row, what)):
            for name, control in row.controls.items():
                for modality, noun in _NOUN.items():
                    gap = row.gap(control, modality, what)
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
        "time to the first token. Cache: bytes when decoding starts, as a fraction of the full "
        "one. Peak memory: on a CPU that of the process so far. Pairs of numbers are of images / "
        "videos. Of a control with several draws, scores are means, and intervals resample the "
        "draws too."
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
    "Most cache methods prefill the complete prompt, so that the short answer to a single question "
    "depends little on the compressed cache. Captions are long, and later questions of a session "
    "(`@session`) only see the compressed cache: these separate the methods. The controls ignore "
    "the content: `streamingllm` keeps the first and the last slots, and `random` drops visual "
    "tokens before the language model."
)


_LONG = 12  # rows that a page shows without a click


def folded(title: str, text: str) -> str:
    """A Markdown table, folded if it is long, for code hosts and MkDocs."""
    number = text.count("\n") - 1  # without head and rule
    if number <= _LONG:
        return text
    head = f'<details markdown="1">\n<summary>{title} ({number} rows)</summary>'
    return f"{head}\n\n{text}\n\n</details>"


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
            times = (median_time(of_modality(run, m)) for run in (old, new))
            cells[f"TTFT ms, {noun}"] = _arrow(*times, scale=1000)
        rows.append(cells)
    return markdown_table(list(rows[0]), [list(cells.values()) for cells in rows])


# --- cells ---------------------------------------------------------------------------------------


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
