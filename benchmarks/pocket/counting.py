"""How recipes miscount: ``python benchmarks/pocket/counting.py RESULTS --out FILE``.

``RESULTS`` is the folder that ``evidence.py --out`` wrote. Of the answers to "How many objects are
there?" it counts the right ones, those that are too high and those that are too low, by recipe. The
draws of `random` are counted together.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmfast.eval.results import Results, read, write_json

KINDS = ("right", "high", "low", "other")


def kind_of(sample: dict[str, Any]) -> str:
    """One of `KINDS`; ``other`` is an answer that is no number."""
    answer, target = str(sample["filtered_resps"][0]), str(sample["target"])
    if not answer.isdecimal():
        return "other"
    return KINDS[(int(answer) > int(target)) + 2 * (int(answer) < int(target))]


def counted(every: Iterable[Results]) -> list[dict[str, Any]]:
    """Rows with the number of answers of each kind, by recipe without its seed."""
    found: dict[str, Counter[str]] = {}
    for results in every:
        name = ",".join(part for part in results.name.split(",") if not part.startswith("seed="))
        kinds = [kind_of(s) for s in results.samples.values() if s["type"] == "count"]
        found.setdefault(name, Counter()).update(kinds)
    return [
        {"recipe": name, "answers": of.total(), **{kind: of[kind] for kind in KINDS}}
        for name, of in sorted(found.items())
        if of
    ]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    folders = sorted(path.parent for path in args.results.glob("*/*/meta.json"))
    rows = counted(map(read, folders))
    command = shlex.join(["python", "benchmarks/pocket/counting.py", *arguments])
    write_json(args.out, {"command": command, "rows": rows})
    for row in rows:
        print(f"{row['recipe']}: " + ", ".join(f"{row[kind]} {kind}" for kind in KINDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
