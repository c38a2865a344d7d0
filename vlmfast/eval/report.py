"""Tables of result folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import VLMFastError
from .results import META, Results, check_same, read, writable
from .scores import Interval
from .summary import (
    MODALITIES,
    Row,
    baseline,
    compare,
    difference,
    full_model,
    kept,
    mean_tokens,
    median_time,
    reduces,
)

_NOUN = {"image": "pictures", "video": "clips"}
_FEW = 30  # a bootstrap over fewer pictures gives intervals that are too narrow


def load(folder: Path) -> dict[str, list[Results]]:
    """Results by task, the full model first, then by method and falling cost, controls last.

    Raises
    ------
    VLMFastError
        When there are none, or they do not compare.
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
        if results.samples:
            tasks.setdefault(results.meta["task"], []).append(results)
    if not tasks:
        raise VLMFastError(f"no samples in {folder}: the runs there have only begun")
    for runs in tasks.values():
        check_same({str(run.path): run.meta for run in runs})
        runs.sort(key=_order)
    return tasks


def _order(run: Results) -> tuple:
    place = 2 if run.meta["control"] else int(run.meta["recipe"] != "none")
    return place, baseline(run) is not None, run.meta["method"], -(kept(run) or 0), run.name


def write_report(folder: Path, out: Path) -> tuple[str, list[Path]]:
    """``report.md`` and a plot for each task in ``out``; returns the text and the files."""
    from .plot import plot

    parts, files, plots = ["# Accuracy against visual tokens\n"], [], []
    for task, runs in load(folder).items():
        common, notes = on_common_samples(runs)
        rows, image = compare(common), out / f"{task}.png"
        plots.append((rows, image))
        parts.append(f"## {task}\n\n{_about(common)}\n\n{glance(rows)}{table(rows)}\n")
        parts += [f"**Warning:** {note}.\n" for note in notes + warnings(rows)]
        parts.append(f"![Accuracy of {task} against the share of visual tokens kept]({image.name})")
    text = "\n".join(parts) + "\n"
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        files.append(out / "report.md")
        files[0].write_text(text, encoding="utf-8")
        for rows, image in plots:  # last: they need matplotlib
            plot(rows, image)
            files.append(image)
    return text, files


def write_difference(before: Path, after: Path, out: Path) -> tuple[str, list[Path]]:
    """``difference.md`` in ``out``: what changed between two folders."""
    old, new = load(before), load(after)
    tasks = [task for task in old if task in new]
    if not tasks:
        raise VLMFastError(f"{before} and {after} have no task in common")
    parts = [f"# What changed from {before} to {after}\n"]
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
    text, file = "\n".join(parts), out / "difference.md"
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return text, [file]


def on_common_samples(runs: list[Results]) -> tuple[list[Results], list[str]]:
    """The same samples of every run, and a note where that leaves some out."""
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
            f"not every run has all {most} samples: {', '.join(short)}; the table is over the "
            f"{len(common)} that all of them have"
        )
    return [run.only(common) for run in runs], notes


# --- one folder ----------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """A Markdown table, one row per recipe."""
    head = [
        "recipe",
        "pictures %",
        "clips %",
        "captions % (picture / clip)",
        "loyalty %",
        "equivalent tokens (picture / clip)",
        "kept %",
        "TTFT ms (picture / clip)",
        "stages' own ms (picture / clip)",
        "against random, pictures",
        "against random, clips",
    ]
    return _markdown(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    n = row.numbers
    return [
        f"`{row.run.name}`",
        *(_percent(n[f"accuracy_{m}"], n[f"accuracy_{m}_ci"]) for m in MODALITIES),
        _two(*(n[f"caption_{m}"] for m in MODALITIES), scale=100),
        _percent(n.get("loyalty")),
        _two(*(n[f"equivalent_tokens_{m}"] for m in MODALITIES)),
        _percent(n["kept"]),
        *(
            _two(*(n[f"{key}_{m}"] for m in MODALITIES), scale=1000)
            for key in ("ttft_s", "reduce_s")
        ),
        *(_points(row.gaps.get(m)) for m in MODALITIES),
    ]


def glance(rows: list[Row]) -> str:
    """Methods by budgets: accuracy on pictures and clips; empty with fewer than two methods."""
    budgets = sorted({row.run.meta["budget"] for row in rows if _at_budget(row)}, reverse=True)
    methods = list(dict.fromkeys(row.run.meta["method"] for row in rows if _at_budget(row)))
    if len(methods) < 2:
        return ""
    cells = {
        (row.run.meta["method"], row.run.meta["budget"]): _glimpse(row)
        for row in rows
        if _at_budget(row)
    }
    head = ["pictures % / clips %", *(f"{100 * budget:g} % of the tokens" for budget in budgets)]
    lines = [
        [f"`{method}`", *(cells.get((method, budget), _NONE) for budget in budgets)]
        for method in methods
    ]
    return (
        f"{_markdown(head, lines)}\n\n"
        "In bold what is above `random` of the same cost beyond the 95 % interval; in brackets the "
        "share that was really kept where it is not the budget.\n\n"
    )


def _at_budget(row: Row) -> bool:
    return row.run.meta["budget"] is not None and reduces(row)


def _glimpse(row: Row) -> str:
    shown = []
    for modality in MODALITIES:
        accuracy, gap = row.numbers[f"accuracy_{modality}"], row.gaps.get(modality)
        text = _percent(accuracy)
        shown.append(f"**{text}**" if gap and gap[1] > 0 else text)
    kept_share, budget = row.numbers["kept"], row.run.meta["budget"]
    off = abs(kept_share - budget) > 0.1 * budget
    return " / ".join(shown) + (f" ({_percent(kept_share)} %)" if off else "")


def warnings(rows: list[Row]) -> list[str]:
    """What a reader must know before believing the table."""
    notes, present = [], {baseline(row.run) for row in rows}
    reducing = [row for row in rows if reduces(row)]
    for name in ("random", "downsample"):
        if reducing and name not in present:
            notes.append(f"the control `{name}` is missing; add `--recipe {name}`")
    for modality, noun in _NOUN.items():
        samples = [s for s in rows[0].run.samples.values() if s["modality"] == modality]
        number = len({s["picture"] for s in samples})
        if 0 < number < _FEW:
            notes.append(f"only {number} {noun}: too few for intervals; use a larger `--limit`")
    if full_model([row.run for row in rows]) is None:
        notes.append("the full model is missing, so there is no loyalty")
    for row in reducing:
        if baseline(row.run):
            continue
        if row.random is None and "random" in present:
            notes.append(
                f"nothing to compare `{row.run.name}` with: no `random` near the "
                f"{_percent(row.numbers['kept'])} % of the tokens that it keeps"
            )
        for modality, gap in row.gaps.items():
            if gap is not None and gap[1] <= 0:
                notes.append(
                    f"`{row.run.name}` is not better than `{row.random.name}` on "
                    f"{_NOUN[modality]}: {_points(gap)} points"
                )
    for row in rows:
        if row.numbers["errors"]:
            notes.append(
                f"{row.numbers['errors']} samples of `{row.run.name}` failed and count as wrong"
            )
    return notes


def _about(runs: list[Results]) -> str:
    meta, samples = runs[0].meta, runs[0].samples.values()
    pictures = len({s["picture"] for s in samples})
    devices = sorted({run.meta.get("device") or "unknown" for run in runs})
    weights = f", weights {meta['weights_sha256'][:12]}" if meta["weights_sha256"] else ""
    return (
        f"Model {meta['model']}{weights}; task version {meta['task_version']}, "
        f"seed {meta['seed']}; {len(samples)} questions about {pictures} pictures "
        f"and clips; on {', '.join(devices)}.\n\n"
        "Accuracies are means over question types; brackets are 95 % intervals (bootstrap over "
        "pictures and clips, paired for differences). Loyalty: the same answer as the full model. "
        "Equivalent tokens: visual tokens kept, averaged over layers. TTFT: median time to the "
        "first token. `random` is taken at the nearest cost."
    )


# --- two folders ---------------------------------------------------------------------------------


def _difference_table(pairs: list[tuple[Results, Results]]) -> str:
    rows = []
    for old, new in pairs:
        check_same(
            {str(run.path): run.meta for run in (old, new)}, ("task", "task_version", "seed")
        )
        common = set(old.samples) & set(new.samples)
        old, new = old.only(common), new.only(common)
        tokens = [mean_tokens(run) for run in (old, new)]
        times = [median_time(run, m) for m in MODALITIES for run in (old, new)]
        rows.append(
            [
                f"`{new.name}`",
                str(len(common)),
                *(_points(difference(new, old, m)) for m in MODALITIES),
                _arrow(*tokens),
                *(_arrow(*times[i : i + 2], scale=1000) for i in (0, 2)),
            ]
        )
    head = [
        "recipe",
        "samples",
        "pictures, points",
        "clips, points",
        "equivalent tokens",
        "TTFT ms, pictures",
        "TTFT ms, clips",
    ]
    return _markdown(head, rows)


# --- words ---------------------------------------------------------------------------------------

_NONE = "–"


def _percent(value: float | None, ci: list[float] | None = None) -> str:
    if value is None:
        return _NONE
    text = f"{100 * value:.1f}"
    return f"{text} [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]" if ci else text


def _points(gap: Interval | None) -> str:
    if not gap:
        return _NONE
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(
        *(round(100 * value, 1) + 0.0 for value in gap)  # no -0.0
    )


def _two(a: float | None, b: float | None, scale: float = 1) -> str:
    return " / ".join(_NONE if v is None else f"{v * scale:.1f}" for v in (a, b))


def _arrow(a: float | None, b: float | None, scale: float = 1) -> str:
    if a is None or b is None:
        return _NONE
    change = f" ({100 * (b / a - 1):+.0f} %)" if a else ""
    return f"{a * scale:.1f} → {b * scale:.1f}{change}"


def _markdown(head: list[Any], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])
