"""Thresholds of `gpu_hour.py`, as data, and their verdicts.

Memory-bound work is compared with its floor: the fewest bytes that it moves, over the copy
bandwidth measured in the same run. So one threshold serves every GPU. They are estimates from
reading the compiled code, and not measurements.

=======  ===========================================================================================
PASS     the threshold is met
MISS     it is not met, or the row was not measured: too slow, to be tuned
FAIL     an error or a wrong result, to be fixed first
=======  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Floor over the time of a decode step at batch 1 with 2,944 tokens, at least.
STEP_OF_FLOOR = {"llava-next-7b": 0.75, "qwen2.5-vl-7b": 0.70}
SHORT_CACHE = 1.8  # times that a step of 16 rows is faster with a fifth of the keys and values
RAGGED = 0.7  # tokens per second with different answer lengths, over those with equal ones
TTFT = 2.5  # times that the first token of hired:0.2 is earlier
# Seconds, at most.
SECOND_REQUEST = 0.5
CAPTURE, PREFILL = 0.15, 0.08
IDLE_BYTES = 2e9  # reserved and not allocated after 20 requests, at most


@dataclass(frozen=True)
class Limit:
    """Threshold of a row of `kernels.py`.

    Parameters
    ----------
    row : str
        Case and shape.
    floors : float, optional
        Time in floors, at most: bytes over the measured copy bandwidth.
    seconds : float, optional
        Time, at most.
    over_least : float, optional
        Time in addition to that of an almost empty graph, at most.
    faster_than : str, optional
        Name of a function of PyTorch in the same row, or another row; with a comma and the name of
        a function, that of another row.
    times : float
        Least ratio of that one's time to this one's.
    """

    row: str
    floors: float | None = None
    seconds: float | None = None
    over_least: float | None = None
    faster_than: str | None = None
    times: float = 1.0


# 2.9 and 2.3 floors are 8 and 9 us on an H200, where latency and not bandwidth decides.
LIMITS = (
    Limit("decode, bf16 | B", floors=1.5),
    Limit("decode, bf16 | C", floors=2.9),
    Limit("decode, bf16 | D", floors=2.3),
    Limit("decode, 4 bit | B", floors=3.0),
    Limit("decode, 2 bit groups | B", faster_than="decode, 4 bit | B"),
    Limit("decode, 4 bit | E", faster_than="SDPA in bf16", times=2.5),
    Limit("decode, 4 bit, 16 at once | B", faster_than="decode, bf16, 16 at once | B", times=2.0),
    Limit("tree of 60, bf16 | B", floors=2.5),
    Limit("tree of 60, bf16 | B", faster_than="SDPA with a mask in bf16"),
    Limit("residual_norm, 1 token | A", over_least=2e-6),
    Limit("rotate_append, 1 row | A", over_least=2e-6),
    Limit("swiglu, 1 token | A", over_least=2e-6),
    Limit("col_stats, 64 rows | B", floors=2.0),
    Limit("col_stats, all rows | B", faster_than="attention, causal | B, SDPA", times=0.5),
    Limit("attention, causal | B", faster_than="SDPA", times=1 / 1.2),
    Limit("gather_rows, states | B", floors=2.0),
    Limit("quantize, 4 bit | B", seconds=60e-6),
    Limit("max_min, a sixth of 576 | A", seconds=0.5e-3),
    Limit("cover, a sixth of 576 | A", seconds=1e-3),
    Limit("cover, 644 of 1464 | B", seconds=8e-3),
)

Row = dict[str, Any]
# Field of `Limit` -> the measured value in its unit.
MEASURES: dict[str, Callable[[Row], float]] = {
    "floors": lambda row: row["time"] * row["machine"]["copy"] / row["bytes"],
    "seconds": lambda row: row["time"],
    "over_least": lambda row: row["time"] - row["machine"]["least"],
}


def verdict(limit: Limit, rows: dict[str, Row]) -> tuple[Any, str, str]:
    """What was measured, the threshold as text, and ``PASS``, ``MISS`` or ``FAIL``.

    Parameters
    ----------
    limit : Limit
    rows : dict of str to dict
        Of the result file of `kernels.py`.
    """
    row = rows.get(limit.row, {})
    if "error" in row or not row.get("check", {"passed": True})["passed"]:
        return row.get("error") or row["check"]["why"], "no error, the reference's result", "FAIL"
    if limit.faster_than is not None:
        text = f">= {limit.times:.3g} x as fast as {limit.faster_than}"
        other = _time(limit.faster_than, limit.row, rows)
        value = other / row["time"] if "time" in row and other is not None else None
        passed = value is not None and value >= limit.times
    else:
        name, most = next((n, m) for n in MEASURES if (m := getattr(limit, n)) is not None)
        text = f"{name} <= {most:g}"
        value = MEASURES[name](row) if "time" in row else None
        passed = value is not None and value <= most
    return "not measured" if value is None else value, text, "PASS" if passed else "MISS"


def _time(name: str, own: str, rows: dict[str, Row]) -> float | None:
    """Seconds of the row ``name``, or of a function of PyTorch in a row, by default in ``own``."""
    if name in rows:
        return rows[name].get("time")
    row, _, other = name.rpartition(", ")
    if row not in rows:
        row, other = own, name
    return rows.get(row, {}).get("others", {}).get(other, {}).get("time")
