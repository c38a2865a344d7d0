"""Measure what `import vlmfast` adds to `import torch`: ``python benchmarks/import_time.py``.

Uses fresh, interleaved processes and medians. Exits with 1 if the difference exceeds the limit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from vlmfast.eval.bench import turns

LIMIT_S = 0.3
_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    """Time of ``statement`` in a fresh interpreter, without the interpreter's start."""
    command = [sys.executable, "-c", _TIMED.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(runs: int = 5) -> dict[str, float]:
    """Median seconds of both imports and their difference."""
    found: dict[str, list[float]] = {"import torch": [], "import torch; import vlmfast": []}
    for statement, _ in turns(list(found), runs):
        found[statement].append(seconds(statement))
    base, total = map(statistics.median, found.values())
    return {"torch_s": base, "torch_and_vlmfast_s": total, "added_s": total - base}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args(argv)


def main() -> int:
    result = measure(parse().runs)
    print(f"import torch             {result['torch_s']:.3f} s")
    print(f"import torch, vlmfast    {result['torch_and_vlmfast_s']:.3f} s")
    print(f"added                    {result['added_s']:+.3f} s (limit {LIMIT_S} s)")
    return 0 if result["added_s"] <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
