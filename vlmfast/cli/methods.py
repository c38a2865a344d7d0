"""``vlmfast methods``: the methods by place, the details of some, or which run on a model."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .output import print_json, print_table

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

# Folders of methods, in pipeline order.
PLACES = {
    "frames": "frames of a video, before the vision tower",
    "views": "views of images that the vision tower encodes",
    "encoder": "inside the vision tower",
    "tokens": "between the vision tower and the language model",
    "prefill": "between the layers of the language model, during prefill",
    "cache": "KV cache",
    "drafter": "speculative decoding; the answer does not change",
}
# Of methods from other packages, by their protocol.
_PLACE_OF_PROTOCOL = {
    "media": "frames",
    "views": "views",
    "in-encoder": "encoder",
    "encode": "tokens",
    "prefill": "prefill",
    "cache": "cache",
    "decode": "cache",
    "drafter": "drafter",
}


def run(args: argparse.Namespace, load: Callable[[], VLM]) -> None:
    """Print methods and presets; ``load`` loads the model of ``--model``."""
    from vlmfast.core.methods import methods
    from vlmfast.core.recipe import PRESETS
    from vlmfast.core.registry import stage_class

    if args.model is None:
        args.names = [name if name in PRESETS else stage_class(name).name for name in args.names]
    found = [_placed(method) for method in methods()]
    found = [method for method in found if not args.where or method["place"] in args.where]
    if args.model is not None:
        _print_supported(args, load, {method["name"] for method in found})
        return
    if args.names:
        presets = [{"name": name, "recipe": text or "none"} for name, text in PRESETS.items()]
        by_name = {row["name"]: row for row in [*presets, *found]}
        found = [by_name[name] for name in dict.fromkeys(args.names) if name in by_name]
    if args.json:
        print_json(found)
    elif not found:
        print("no method acts there")
    elif args.names:
        for number, method in enumerate(found):
            print("\n" * bool(number), end="")
            _print_details(method)
    else:
        _print_list(found)


def _placed(method: dict[str, Any]) -> dict[str, Any]:
    """A method of `vlmfast.methods` with its place and whether it depends on the question."""
    from vlmfast.core.registry import stage_class, stage_names

    stage = stage_class(method["name"])()
    package, folder, place, *_ = [*stage_names()[method["name"]].split("."), "", ""]
    if (package, folder) != ("vlmfast", "compressors"):
        place = _PLACE_OF_PROTOCOL[stage.expand()[0].protocol]
    return {
        **method,
        "place": place,
        "query_dependent": bool(stage.query_dependent),
        "other_model": stage.other_model,
    }


def _print_list(found: list[dict[str, Any]]) -> None:
    """One line a method, by place and tier; shortened to the width of a terminal."""
    from vlmfast.core.recipe import PRESETS
    from vlmfast.core.stage import TIERS

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    traits = {m["name"]: _marks(m) for m in found}
    first = max(len(_shortest(m)) for m in found)
    second = max(map(len, traits.values()))
    third = max(len(m["tier"]) for m in found)
    for number, (place, about) in enumerate(PLACES.items()):
        here = [m for m in found if m["place"] == place]
        if not here:
            continue
        print("\n" * bool(number), end="")
        print(f"{place}: {about}")
        for method in sorted(here, key=lambda m: TIERS.index(m["tier"])):
            start = f"  {_shortest(method):<{first}}  {method['tier']:<{third}}  "
            start += f"{traits[method['name']]:<{second}}"
            line = f"{start}  {method['summary']}"
            print(line if len(line) <= width else f"{line[: width - 1]}…")
    print()
    print("T: needs trained weights   Q: depends on the question   M: runs another model")
    print(f"presets: {', '.join(PRESETS)}")
    print("'vlmfast methods NAME' shows the parameters, their defaults and the paper")


def _marks(method: dict[str, Any]) -> str:
    marks = {"T": method["trained"], "Q": method["query_dependent"], "M": method["other_model"]}
    return "".join(mark for mark, holds in marks.items() if holds)


def _shortest(method: dict[str, Any]) -> str:
    """The method with its bare value, as in recipes: ``hired:0.2``."""
    lead = next((p for p in method["parameters"] if p["name"] == method["value"]), None)
    if lead is None or lead["default"] is None:
        return method["name"]
    return f"{method['name']}:{_value(lead['default'])}"


def _print_details(method: dict[str, Any]) -> None:
    if "place" not in method:
        print(f"{method['name']}  (preset)\n  recipe: {method['recipe']}")
        return
    traits = [
        method["tier"],
        method["place"],
        "trained" if method["trained"] else "training-free",
        "query-dependent" if method["query_dependent"] else "query-independent",
        *(["runs another model"] if method["other_model"] else []),
    ]
    print(f"{method['name']}  ({', '.join(traits)})")
    print(f"  {method['summary']}")
    print(f"  paper: {method['paper']}")
    print(f"  recipe: {_shortest(method)}")
    starts = [f"{p['name']}={_value(p['default'])}" for p in method["parameters"]]
    indent = " " * (6 + max(map(len, starts), default=0))
    width = max(shutil.get_terminal_size(fallback=(100, 24)).columns, len(indent) + 40)
    for start, parameter in zip(starts, method["parameters"], strict=True):
        about = _about(parameter, parameter["name"] == method["value"])
        text = f"    {start:<{len(indent) - 4}}{about}"
        print(textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False))


def _about(parameter: dict[str, Any], leads: bool) -> str:
    """Type, allowed values and meaning of a parameter."""
    from vlmfast.core.params import describe

    kind = parameter["type"] if not parameter.get("choices") else ""
    allowed = ", ".join(filter(None, [kind, describe(parameter)]))
    bare = "the bare value" if leads else ""
    return "; ".join(filter(None, [allowed, parameter.get("doc"), bare]))


def _value(value: Any) -> str:
    from vlmfast.core.params import show

    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else show(value)


def _print_supported(args: argparse.Namespace, load: Callable[[], VLM], chosen: set[str]) -> None:
    """Print which methods run on a model."""
    from vlmfast.api.support import support, support_of

    args.recipes = args.names  # checked before the model is loaded
    vlm = load()
    if args.names:
        found = [support_of(vlm, name, video=args.video) for name in args.names]
    else:
        found = [row for row in support(vlm, video=args.video) if row.method in chosen]
    if args.json:
        print_json([asdict(method) for method in found])
    elif found:
        print_table(
            [
                {
                    "method": method.method,
                    "runs": {True: "yes", False: "no", None: "?"}[method.runs],
                    "saliency": method.saliency or "-",
                    "note": method.note,
                }
                for method in found
            ]
        )
    else:
        print("no method acts there")
