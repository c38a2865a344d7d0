"""Tables of the task ``robustness``."""

from __future__ import annotations

from dataclasses import fields, replace
from statistics import fmean
from typing import Any

from vlmfast.core.display import markdown_table
from vlmfast.core.recipe import Recipe

from .results import Results, named
from .robustness import NAME, VERBOSE, attacked_control
from .summary import difference, kept, summarise

_ABOUT = (
    "Accuracy in percent on the same questions, with 95 % intervals over images; *drop* is the "
    "paired difference from the clean images. The attack is optimized against the selection of "
    "each recipe, and *full model* is the accuracy of the full model on the same attacked images. "
    "*changed* is the fraction of the kept tokens that are no longer kept, with noise / under "
    "attack. *passes* are forward passes of the vision tower for each image."
)
_ABOUT_GUARDS = (
    "Accuracy of a guarded recipe minus that of the same recipe without a guard, in points, each "
    "under the attack that is optimized against it."
)
_ABOUT_VERBOSE = (
    "Tokens of a description, mean / maximum, and the fraction of answers that reach "
    "`max_new_tokens`. The images are optimized for long answers of the full model."
)


def section(runs: list[Results]) -> tuple[str, dict[str, Any]]:
    """The tables of the runs of `robustness.plan` on one task, and their numbers."""
    of_task = {NAME: (questions, _questions), VERBOSE: (lengths, _lengths)}
    measure, write = of_task[runs[0].meta["task"]]
    numbers = measure(runs)
    return write(numbers), numbers


def is_robustness(task: str) -> bool:
    """Whether a task's runs are those of `robustness.plan`."""
    return task in (NAME, VERBOSE)


def _by_name(runs: list[Results]) -> dict[str, Results]:
    return {run.name: run for run in runs}


def _sizes(runs: list[Results]) -> list[int]:
    """The ``eps`` of the runs, ascending."""
    parts = [str(run.meta["control"]).split("-") for run in runs if run.meta["control"]]
    return sorted({int(part[1]) for part in parts})


def _recipes(runs: list[Results]) -> list[str]:
    """Recipes by method, each after the one that it guards."""
    found = {run.meta["recipe"] for run in runs} - {"none"}
    return sorted(found, key=lambda recipe: (unguarded(recipe), recipe))


def unguarded(recipe: str) -> str:
    """The recipe without guards; itself where it has none."""
    plain = []
    for stage in Recipe.parse(recipe):
        own = {f.name: f.default for f in fields(stage) if f.name in ("guard", "reserve")}
        plain.append(replace(stage, **own))
    return str(Recipe(tuple(plain)))


def passes(recipe: str) -> int:
    """Forward passes of the vision tower for each image."""
    return 1 + max((getattr(stage, "guard", 0) for stage in Recipe.parse(recipe)), default=0)


# --- accuracy ------------------------------------------------------------------------------------


def questions(runs: list[Results]) -> dict[str, Any]:
    """Accuracies under each perturbation, as JSON values; runs that do not exist are left out."""
    by_name, sizes = _by_name(runs), _sizes(runs)
    full = by_name.get("none")
    numbers: dict[str, Any] = {
        "steps": runs[0].meta["options"]["steps"],
        "eps": sizes,
        "questions": len(max((run.samples for run in runs), key=len)),
        "images": len({s["picture"] for run in runs for s in run.samples.values()}),
        "recipes": {},
    }
    for recipe in ["none", *_recipes(runs)]:
        clean = by_name.get(recipe)
        if clean is None:
            continue
        own: dict[str, Any] = {"passes": passes(recipe), "kept": kept(clean), "eps": {}}
        own["clean"] = _accuracy(clean)
        base = by_name.get(unguarded(recipe))
        guards = unguarded(recipe) != recipe and base is not None
        if guards and base is not None:
            own["guards"] = unguarded(recipe)
            own["won_clean"] = _gap(clean, base)
        for eps in sizes:
            found = own["eps"][str(eps)] = {}
            for kind in ("noise", "attack"):
                run = by_name.get(named(recipe, f"{kind}-{eps}"))
                if run is None:
                    continue
                found[kind] = {
                    **_accuracy(run),
                    "drop": _gap(run, clean),
                    "changed": _mean(run, "changed"),
                }
                before = by_name.get(named(unguarded(recipe), f"{kind}-{eps}"))
                if guards and before is not None:
                    found[kind]["won"] = _gap(run, before)
            attacked = by_name.get(named("none", attacked_control(eps, recipe)))
            if attacked is not None and full is not None:
                found["full"] = {**_accuracy(attacked), "drop": _gap(attacked, full)}
        numbers["recipes"][recipe] = own
    return numbers


def _accuracy(run: Results) -> dict[str, Any]:
    numbers = summarise(run)
    return {"accuracy": numbers["accuracy_image"], "ci": numbers["accuracy_image_ci"]}


def _gap(run: Results, other: Results) -> list[float] | None:
    """Difference of accuracies with the ends of its paired interval."""
    found = difference(run, other, "image")
    return None if found is None else list(found)


def _mean(run: Results, key: str) -> float | None:
    """Mean over images."""
    by_image = {s["picture"]: s[key] for s in run.samples.values() if key in s}
    return fmean(by_image.values()) if by_image else None


def _questions(numbers: dict[str, Any]) -> str:
    parts = [
        f"{numbers['questions']} questions about {numbers['images']} images, "
        f"{numbers['steps']} steps. {_ABOUT}"
    ]
    parts += [accuracy_table(numbers), f"### Guards\n\n{_ABOUT_GUARDS}", guard_table(numbers)]
    return "\n\n".join(filter(None, parts if any_guard(numbers) else parts[:2]))


def any_guard(numbers: dict[str, Any]) -> bool:
    """Whether a recipe can be compared with the same one without a guard."""
    return any("guards" in own for own in numbers["recipes"].values())


def accuracy_table(numbers: dict[str, Any]) -> str:
    """A row for each recipe and ``eps``."""
    rows = []
    head = ["recipe", "eps", "clean", "noise", "attack", "drop", "full model", "changed", "passes"]
    for recipe, own in numbers["recipes"].items():
        for eps, found in own["eps"].items():
            noise, attack = found.get("noise"), found.get("attack")
            changed = [_percent(of and of["changed"]) for of in (noise, attack)]
            rows.append(
                [
                    f"`{recipe}`",
                    f"{eps}/255",
                    _within(own["clean"]),
                    _within(noise),
                    _within(attack),
                    _points(attack and attack["drop"]),
                    _within(found.get("full")),
                    "" if recipe == "none" else " / ".join(changed),
                    str(own["passes"]),
                ]
            )
    return markdown_table(head, rows)


def guard_table(numbers: dict[str, Any]) -> str:
    """What each guard wins back."""
    sizes = [str(eps) for eps in numbers["eps"]]
    rows, head = [], ["recipe", "passes", "clean", *(f"attack, {eps}/255" for eps in sizes)]
    for recipe, own in numbers["recipes"].items():
        if "guards" in own:
            won = [own["eps"].get(eps, {}).get("attack", {}).get("won") for eps in sizes]
            cells = map(_points, [own["won_clean"], *won])
            rows.append([f"`{recipe}`", str(own["passes"]), *cells])
    return markdown_table(head, rows)


# --- lengths -------------------------------------------------------------------------------------


def lengths(runs: list[Results]) -> dict[str, Any]:
    """Generated tokens on clean, noisy and verbose images, as JSON values."""
    most = runs[0].meta["generation"]["caption"]["max_new_tokens"]
    numbers: dict[str, Any] = {
        "steps": runs[0].meta["options"]["steps"],
        "max_new_tokens": most,
        "images": len({s["picture"] for run in runs for s in run.samples.values()}),
        "recipes": {},
    }
    by_name = _by_name(runs)
    for recipe in ["none", *_recipes(runs)]:
        own = {}
        for control in (None, *(f"{k}-{e}" for e in _sizes(runs) for k in ("noise", "verbose"))):
            run = by_name.get(named(recipe, control))
            found = [] if run is None else [t["generated_tokens"] for t in run.timings.values()]
            if found:
                own[control or "clean"] = {
                    "mean": fmean(found),
                    "max": max(found),
                    "at_limit": fmean(n >= most for n in found),
                }
        numbers["recipes"][recipe] = own
    return numbers


def _lengths(numbers: dict[str, Any]) -> str:
    about = (
        f"{numbers['images']} images, {numbers['steps']} steps, `max_new_tokens` "
        f"{numbers['max_new_tokens']}."
    )
    return f"{about} {_ABOUT_VERBOSE}\n\n{length_table(numbers)}"


def length_table(numbers: dict[str, Any]) -> str:
    """A row for each recipe."""
    kinds = list(dict.fromkeys(kind for own in numbers["recipes"].values() for kind in own))
    rows, titles = [], [kind.replace("-", ", ") + "/255" * ("-" in kind) for kind in kinds]
    for recipe, own in numbers["recipes"].items():
        cells = []
        for kind in kinds:
            of = own.get(kind)
            text = of and f"{of['mean']:.1f} / {of['max']} ({of['at_limit']:.0%})"
            cells.append((text or "").replace("%", " %"))
        rows.append([f"`{recipe}`", *cells])
    return markdown_table(["recipe", *titles], rows)


# --- cells ---------------------------------------------------------------------------------------


def _within(of: dict[str, Any] | None) -> str:
    if of is None or of["accuracy"] is None:
        return ""
    low, high = of["ci"]
    return f"{100 * of['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _points(gap: list[float] | None) -> str:
    if gap is None:
        return ""
    mean, low, high = (100 * value for value in gap)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
