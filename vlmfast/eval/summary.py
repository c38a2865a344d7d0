"""Compute accuracy, loyalty and cost of one recipe, and differences between two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median
from typing import Any

from vlmfast.core.recipe import Recipe

from .axes import shrinks_cache
from .draws import joined, scores
from .results import Results, named
from .scores import Interval, Scored, bootstrap, mcnemar, wilson
from .tasks import metrics

MODALITIES = ("image", "video")
# Content-independent selections: baselines for every method.
BASELINES = ("random", "grid", "downsample")
# Baselines that every report needs.
CONTROLS = ("random", "downsample")
# Content-independent baselines for cache methods: the first and the last slots, and a random
# subset of the visual tokens before the language model.
CACHE_BASELINES = ("streamingllm", "random")
_SAME_COST = 0.15
# Of the lines of ``timings.jsonl``.
_COSTS = ("ttft_s", "tpot_s", "flops_prefill", "peak_memory_bytes")


@dataclass(eq=False)
class Row:
    """One recipe in a table.

    Parameters
    ----------
    run : Results
    numbers : dict
        See `summarise`.
    controls : dict of str to Row
        By method name: the baseline with the nearest cost.
    bases : list of Row
        For a run with a control or in sessions, that of the recipe alone; for a guarded recipe,
        that of the recipe without its guard, with the same control.
    """

    run: Results
    numbers: dict[str, Any]
    controls: dict[str, Row] = field(default_factory=dict)
    bases: list[Row] = field(default_factory=list)
    _known: dict[tuple, Interval | None] = field(default_factory=dict, repr=False)

    @property
    def in_sessions(self) -> bool:
        return bool(self.run.meta.get("session"))

    def gap(self, other: Row, modality: str, what: str = "questions") -> Interval | None:
        """Score minus that of another row, paired.

        ``what`` is ``questions``, ``captions``, or ``later``: all but the first of a session.
        """
        key = (id(other), modality, what)
        if key not in self._known:
            runs = [self.run, other.run]
            if what == "later":
                runs = [turns(run, first=False) for run in runs]
            own, its = runs
            self._known[key] = difference(own, its, modality, captions=what == "captions")
        return self._known[key]


def compare(runs: list[Results]) -> list[Row]:
    """Combine every run with its controls, after joining draws of controls."""
    runs = joined(runs)
    full = full_model(runs)
    rows = {run.name: Row(run, summarise(run, full)) for run in runs}
    for row in rows.values():
        # Sessions are compared with the sessions of the controls.
        alike = [other for other in rows.values() if other.in_sessions == row.in_sessions]
        row.controls = controls_at_cost(row, alike)
        recipe, control = row.run.meta["recipe"], row.run.meta["control"]
        names = [recipe] if row.in_sessions or (control and recipe != "none") else []
        if (base := unguarded(recipe)) != recipe:
            names.append(named(base, row.run.variant))
        row.bases = [rows[name] for name in names if name in rows]
        gaps = {base.run.name: row.gap(base, "image") for base in row.bases}
        if gaps:
            row.numbers["gaps_image"] = {name: gap and list(gap) for name, gap in gaps.items()}
    return list(rows.values())


def summarise(run: Results, full: Results | None = None) -> dict[str, Any]:
    """Every number of one recipe, as JSON values.

    Accuracies are means over question types, without captions; a failed sample counts as wrong.
    ``kept`` is the fraction of visual tokens kept, averaged over layers. ``held`` is the size of
    the cache when decoding starts, as a fraction of the full cache. For sessions,
    ``accuracy_first`` is over the first questions and ``accuracy_later`` over the others. For data
    sets, ``metrics`` are their own under lmms-eval's names, and ``groups`` has the accuracy of
    each subject, duration and so on.

    Parameters
    ----------
    run : Results
    full : Results, optional
        Results of the full model, for ``loyalty``: the fraction of equal answers.
    """
    numbers: dict[str, Any] = {"recipe": run.meta["recipe"], "control": run.meta["control"]}
    for modality in MODALITIES:
        part = of_modality(run, modality)
        first, later = turns(part, first=True), turns(part, first=False)
        scored = {
            "accuracy": _scores(part),
            "caption": _scores(part, captions=True),
            "accuracy_first": _scores(first),
            "accuracy_later": _scores(later),
            **({} if full is None else {"loyalty": _agreement(part, full)}),
        }
        for key, rows in scored.items():
            _put(numbers, f"{key}_{modality}", _mean_score(rows))
        costs = {key: median_time(part, key) for key in _COSTS}
        costs |= {"reduce_s": median_time(part, "time_reduce_s")}
        costs |= {"ttft_later_s": median_time(later), "equivalent_tokens": mean_tokens(part)}
        costs |= {"kept": kept(part), "held": kept_cache(part)}
        numbers |= {f"{key}_{modality}": value for key, value in costs.items()}
    by_type: dict[str, list[float]] = {}
    for s in _scored(run):
        by_type.setdefault(_type(s), []).append(s["score"])
    numbers["types"] = {type_: _accuracy(by_type[type_]) for type_ in sorted(by_type)}
    if run.meta.get("options"):
        numbers["metrics"] = metrics(run.meta, run.samples.values()) or _perturbed(run)
        numbers["groups"] = groups(run)
    if full is not None:
        _put(numbers, "loyalty", _mean_score(_agreement(run, full)))
    numbers["visual_tokens_in"] = _mean(run, "visual_tokens_in")
    numbers["equivalent_tokens"] = mean_tokens(run)
    numbers["kept"], numbers["held"] = kept(run), kept_cache(run)
    if "draws" in run.meta:
        numbers["draws"] = run.meta["draws"]
    numbers["samples"] = len(run.samples)
    numbers["errors"] = sum("error" in s for s in run.samples.values())
    return numbers


def _perturbed(run: Results) -> dict[str, float]:
    """Metrics of the task ``robustness``, of the runs where they are known.

    ``changed``: fraction of the kept tokens that are no longer kept, mean over images. ``tokens``,
    ``longest``, ``at_limit``: mean and maximum of the lengths of descriptions, and the fraction of
    those that reach ``max_new_tokens``.
    """
    changed = {s["picture"]: s["changed"] for s in run.samples.values() if "changed" in s}
    found = {"changed": fmean(changed.values())} if changed else {}
    if run.meta["task"] == "robustness-verbose" and run.timings:
        lengths = [line["generated_tokens"] for line in run.timings.values()]
        most = run.meta["generation"]["caption"]["max_new_tokens"]
        found |= {"tokens": fmean(lengths), "longest": max(lengths)}
        found["at_limit"] = fmean(n >= most for n in lengths)
    return found


def difference(a: Results, b: Results, modality: str, *, captions: bool = False) -> Interval | None:
    """Accuracy of ``a`` minus accuracy of ``b`` on the questions that both have, paired.

    Draws of two controls with equal seeds are paired; one score is paired with every draw.
    """
    pairs = [
        (s["picture"], s["type"], _minus(scores(s), scores(b.samples[doc])))
        for doc, s in of_modality(a, modality).samples.items()
        if doc in b.samples and _is_caption(s) == captions and s["score"] is not None
    ]
    return bootstrap(pairs)


def _minus(a: list[float], b: list[float]) -> list[float]:
    most = max(len(a), len(b))
    both = (s * most if len(s) == 1 else s for s in (a, b))
    # Draws that an interrupted run lacks are left out of both.
    return [x - y for x, y in zip(*both, strict=False)]


def splits(a: Results, b: Results) -> tuple[int, int, float] | None:
    """Number of questions that only ``a`` answers correctly, only ``b``, and McNemar's p.

    Captions are left out because their scores are not binary, and so are several draws (``None``).
    """
    if any("draws" in run.meta for run in (a, b)):
        return None
    pairs = [
        (s["score"], b.samples[doc]["score"])
        for doc, s in a.samples.items()
        if doc in b.samples and not _is_caption(s) and s["score"] is not None
    ]
    only_a, only_b = (sum(x > y for x, y in pairs), sum(x < y for x, y in pairs))
    return only_a, only_b, mcnemar(only_a, only_b)


def groups(run: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """The accuracy of each group, by grouping; intervals resample whole images."""
    found: dict[str, dict[str, list[dict]]] = {}
    for s in _scored(run):
        for group, name in s.get("groups", {}).items():
            found.setdefault(group, {}).setdefault(name, []).append(s)
    return {
        group: {name: _of_group(samples) for name, samples in sorted(own.items())}
        for group, own in found.items()
    }


def _of_group(samples: list[dict]) -> dict[str, Any]:
    found = _mean_score([(s["picture"], _type(s), scores(s)) for s in samples])
    assert found is not None  # a group has samples
    mean, low, high = found
    return {"accuracy": mean, "ci": [low, high], "n": len(samples)}


def kept(run: Results) -> float | None:
    """Mean fraction of visual tokens kept, averaged over layers."""
    return _mean(run, "equivalent_tokens", "visual_tokens_in")


def kept_cache(run: Results) -> float | None:
    """Mean size of the cache when decoding starts, as a fraction of the full cache."""
    return _mean(run, "kv_bytes", "kv_bytes_full")


def mean_tokens(run: Results) -> float | None:
    """Mean number of visual tokens, averaged over layers."""
    return _mean(run, "equivalent_tokens")


def median_time(run: Results, key: str = "ttft_s") -> float | None:
    """Median seconds to the first token, or of another time of `Stats`."""
    times = [line[key] for line in run.timings.values() if key in line]
    return median(times) if times else None


def full_model(runs: list[Results]) -> Results | None:
    """The run of the full model."""
    return next((run for run in runs if run.name == "none"), None)


def unguarded(recipe: str) -> str:
    """The recipe without guards; itself where it has none."""
    plain = []
    for stage in Recipe.parse(recipe):
        own = {f.name: f.default for f in fields(stage) if f.name in ("guard", "reserve")}
        plain.append(replace(stage, **own))
    return str(Recipe(tuple(plain)))


def rereads(run: Results) -> bool:
    """Whether a session prefills the images for each question, because the recipe uses it."""
    return depends_on_question(Recipe.parse(run.meta["recipe"]))


def depends_on_question(recipe: Recipe) -> bool:
    """Whether any part of a recipe uses the question."""
    return any(part.query_dependent for stage in recipe for part in (stage, *stage.expand()))


def shrinks(row: Row) -> bool:
    """Whether a recipe has cache methods and the cache was smaller than the full one."""
    recipe = Recipe.parse(row.run.meta["recipe"])
    return shrinks_cache(recipe) and 0 < (row.numbers["held"] or 0) < 0.999


def reduces(row: Row) -> bool:
    """Whether a recipe is a reducer and dropped tokens; False for cache methods and controls."""
    recipe = Recipe.parse(row.run.meta["recipe"])
    if row.run.meta["control"] or shrinks_cache(recipe):
        return False
    return 0 < (row.numbers["kept"] or 0) < 0.999


def controls_at_cost(row: Row, rows: list[Row]) -> dict[str, Row]:
    """For each kind of control the row with the nearest cost, if it is near enough.

    Uses the measured cost rather than the requested one, because a method inside the language
    model cannot go below its floor. Cost is the fraction of visual tokens kept, or for cache
    methods the size of the cache. Rows with the same position policy are preferred: policies
    differ more than methods.
    """
    names: tuple[str, ...]
    if shrinks(row):
        names, cost = CACHE_BASELINES, "held"
    elif reduces(row):
        names, cost = ("random",) if baseline(row.run) else CONTROLS, "kept"
    else:
        return {}

    def distance(r: Row) -> float:
        return abs((r.numbers[cost] or 0) - row.numbers[cost])

    found = {}
    for name in names:
        if baseline(row.run) == name:
            continue
        near = [
            r
            for r in rows
            if baseline(r.run) == name
            and (reduces(r) or shrinks(r))
            and distance(r) <= _SAME_COST * row.numbers[cost]
        ]
        alike = [r for r in near if _positions(r.run) == _positions(row.run)]
        if near:
            found[name] = min(alike or near, key=distance)
    return found


def baseline(run: Results) -> str | None:
    """Name of the baseline that a recipe consists of; None for other recipes."""
    name = run.meta["method"].partition(":")[0]
    known = name in BASELINES + CACHE_BASELINES and "+" not in run.meta["method"]
    return name if known else None


def _positions(run: Results) -> set[str]:
    """The position policies of a recipe's stages; a stage without one counts as ``keep``."""
    return {getattr(s, "positions", "keep") for s in Recipe.parse(run.meta["recipe"])}


def of_modality(run: Results, modality: str) -> Results:
    """The samples about images, or those about videos."""
    return run.only({doc for doc, s in run.samples.items() if s["modality"] == modality})


def turns(run: Results, *, first: bool) -> Results:
    """The first questions of sessions, or the later ones."""
    turns = {doc: s["turn"] for doc, s in run.samples.items() if "turn" in s}
    return run.only({doc for doc, turn in turns.items() if (turn == 0) == first})


def _is_caption(sample: dict) -> bool:
    return sample["type"].endswith("-caption")


def _type(sample: dict) -> str:
    """Type with the modality: images and videos share type names."""
    return f"{sample['modality']}/{sample['type']}"


def _scores(run: Results, *, captions: bool = False) -> list[Scored]:
    return [(s["picture"], _type(s), scores(s)) for s in _scored(run) if _is_caption(s) == captions]


def _scored(run: Results) -> Iterator[dict]:
    """The samples whose score is known."""
    return (s for s in run.samples.values() if s["score"] is not None)


def _agreement(run: Results, full: Results) -> list[Scored]:
    rows: list[Scored] = []
    for doc, s in run.samples.items():
        if doc in full.samples and not _is_caption(s):
            expected = _answer(full.samples[doc])
            alike = [
                float("error" not in draw and _answer(draw) == expected)
                for draw in s.get("draws", (s,))
            ]
            rows.append((s["picture"], _type(s), alike))
    return rows


def _answer(sample: dict) -> list:
    """The parsed answer, or the text if parsing found nothing or guessed."""
    return sample["filtered_resps" if sample.get("answered", True) else "resps"]


def _mean_score(rows: list[Scored]) -> Interval | None:
    """`bootstrap`; if all answers are right or all are wrong, Wilson's interval over images.

    The bootstrap interval of equal scores would have width zero.
    """
    found: set[float] = set()
    for _, _, own in rows:
        found |= {own} if isinstance(own, float) else set(own)
    if found in ({0.0}, {1.0}):
        images = len({image for image, _, _ in rows})
        return wilson(found.pop() * images, images)
    return bootstrap(rows)


def _accuracy(scores: list[float]) -> dict[str, Any]:
    # Wilson's interval assumes binary scores; for captions, whose scores vary less around the same
    # mean, it is conservative.
    mean, low, high = wilson(sum(scores), len(scores))
    return {"accuracy": mean, "ci": [low, high], "n": len(scores)}


def _mean(run: Results, key: str, of: str | None = None) -> float | None:
    """Mean of a number of the samples, or of its fraction of another one."""
    values = [
        s[key] / (s[of] if of else 1)
        for s in run.samples.values()
        if s.get(key) is not None and (of is None or s.get(of))
    ]
    return fmean(values) if values else None


def _put(numbers: dict[str, Any], name: str, interval: Interval | None) -> None:
    numbers[name] = interval and interval[0]
    numbers[f"{name}_ci"] = interval and list(interval[1:])
