"""Record the answers of the library: ``python tools/record_answers.py``.

Writes ``tests/data/answers/answers.jsonl``, the reference of ``tests/api/test_answers.py``. Change
it only to fix a defect, and name the defect in the commit. ``--compare FILE`` lists the differences
from another recording instead. An interrupted run is resumed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import recorded
from vlmfast.core.journal import Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=recorded.FILE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", action="append", help="record only these model families")
    parser.add_argument("--compare", type=Path, help="list the differences from this recording")
    args = parser.parse_args()
    if args.compare is not None:
        compare(args.compare, args.out)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    progress = args.out.with_suffix(".part")
    with (
        Journal(progress) as journal,
        ProcessPoolExecutor(args.workers, initializer=_one_thread) as pool,
    ):
        done = {line["n"]: line["found"] for line in journal.lines}
        todo = [case for case in recorded.cases() if case["n"] not in done]
        todo = [case for case in todo if not args.family or case["family"] in args.family]
        for case, found in zip(todo, pool.map(recorded.record, todo, chunksize=8), strict=True):
            done[case["n"]] = found
            journal.append({"n": case["n"], "found": found})
    write(args.out, [done[number] for number in sorted(done) if done[number] is not None])
    progress.unlink()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the file: a header, then one case per line."""
    import torch
    import transformers

    recorded.stratified(lines)
    answers = [answer for line in lines for answer in line["answers"]]
    head = {
        "command": "python tools/record_answers.py",
        "dtype": "float64",
        "noise": recorded.NOISE,
        "requests": len(answers),
        "near ties": sum("stable" in answer or "ties" in answer for answer in answers),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    packed = [json.dumps(line, separators=(",", ":")) for line in (head, *lines)]
    path.write_text("\n".join(packed) + "\n", encoding="utf-8")
    ways = Counter(line["case"]["way"] for line in lines)
    print(f"{len(lines)} cases, {head['requests']} requests, {head['near ties']} with near ties")
    print(", ".join(f"{way} {count}" for way, count in sorted(ways.items())))


def compare(before: Path, after: Path) -> None:
    """Print the cases whose answers differ between two recordings, and the fields that differ."""
    recordings = {}
    for name, path in (("before", before), ("after", after)):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        recordings[name] = {line["case"]["n"]: line for line in lines}
    groups: Counter[tuple[str, ...]] = Counter()
    for number in sorted(recordings["before"].keys() | recordings["after"].keys()):
        old, new = (recordings[name].get(number) for name in ("before", "after"))
        case = (old or new)["case"]
        if old is None or new is None:
            what = "only in the second" if old is None else "only in the first"
        else:
            wrong, _ = recorded.differences(new, old["answers"])
            if not wrong:
                continue
            what = "differs: " + ", ".join(sorted({w.split()[2] for w in wrong}))
        groups[what, case["family"], case["recipe"]] += 1
    for (what, family, recipe), count in sorted(groups.items()):
        print(f"{what}: {family} {recipe} ({count})")


if __name__ == "__main__":
    main()
