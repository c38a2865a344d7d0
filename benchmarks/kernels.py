"""Check and time every kernel at its shapes: ``python benchmarks/kernels.py``.

Cases and shapes are those of `vlmfast.kernels.catalogue`, in bfloat16.

For each case and shape the kernel's result is first compared with that of its PyTorch reference
(``VLMFAST_KERNELS=torch``). If they differ, the row has no time. Otherwise the kernel is timed as
the replay of a CUDA graph, with the L2 cache flushed before every replay.
The reference and equivalent PyTorch functions, whose results are compared too, are timed in the
same way. Bytes are the minimum that the task moves, and operations are those of its matrix
products. Both are compared with the bandwidth of a large copy and the rate of a large matrix
product, measured in the same process.

============  =====================================================================================
``time``      median of the replays, on the device
``floor``     the larger of bytes over copy bandwidth and operations over matrix rate; the table
              shows the fraction of it that is reached
============  =====================================================================================

The rows run in another process, which is replaced after a case that fails, crashes or hangs. Rows
are written immediately, and ``--missing`` runs those that are not in the result file. It needs a
GPU; ``vlmfast check`` compares kernels with their references without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import harness
import torch
from torch import Tensor
from torch.nn import functional

from vlmfast.eval.results import write_json
from vlmfast.kernels import catalogue
from vlmfast.kernels.calls import Call, references, tensors
from vlmfast.kernels.catalogue import SHAPES, Case
from vlmfast.kernels.quantize_kv import Segment

START_S = 120.0  # seconds in which a process must start
# Allowed relative error of a row, by the dtype of a result.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}

CASES = [case for case in catalogue.CASES if case.timed]
STORED = "works on other storage, not compared"
ATTENTION = ("decode_mixed", "decode_slots", "tree_verify")  # only their first result is compared


# --- what PyTorch has for the same work ----------------------------------------------------------


def other_of(call: Call) -> tuple[str, Callable[[], Any] | None]:
    """A PyTorch function that does the work of a call: its name, and what runs it."""
    name, make = OTHERS.get(call.function.__name__, ("", None))
    return name, None if make is None else make(*call.args)


def is_coded(call: Call) -> bool:
    """Whether the kernel reads codes, in whose place the other function reads their values."""
    lists = [given for given in call.args if isinstance(given, list | tuple)]
    return any(isinstance(part, Segment) for given in lists for part in given)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, **how: Any) -> Tensor:
    """PyTorch's attention with a backend that does not store the attention map."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel([*ways, SDPBackend.EFFICIENT_ATTENTION]):
        return functional.scaled_dot_product_attention(
            query, key, value, *mask, enable_gqa=query.shape[1] != key.shape[1], **how
        )


def _whole(segments: Sequence[Segment], *parts: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Keys and values of segments and then ``parts``, in one tensor each."""
    coded = [segment.dequantize(parts[0][0].dtype) for segment in segments]
    return [torch.cat(of, 2) for of in zip(*coded, *parts, strict=True)]


def _decode(
    query: Tensor, segments: Sequence[Segment], keys: Tensor, values: Tensor, *_: Any
) -> Callable[[], Any]:
    return partial(fused_attention, query, *_whole(segments, (keys, values)))


def _tree(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *more: Any
) -> Callable[[], Any]:
    own_keys, own_values, ancestors, _, segments, _ = more
    keys, values = _whole(segments, (keys, values), (own_keys, own_values))
    nodes, groups = query.shape[2], query.shape[1] // keys.shape[1]
    seen = (ancestors >> torch.arange(nodes, device=query.device)) & 1 != 0
    # The query heads of a KV head as rows, so that no key is repeated.
    rows = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
    mask = torch.cat([seen.new_ones(nodes, keys.shape[2] - nodes), seen], 1).repeat(groups, 1)
    return lambda: fused_attention(rows, keys, values, mask).view(query.shape)


def _slots(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, counts: Tensor, *more: Any
) -> Callable[[], Any]:
    start, _, newest = more[:3]
    new = start[..., None] + torch.arange(newest, device=query.device)
    index = torch.cat([slots, new], 2)[..., None].expand(-1, -1, -1, keys.shape[3])
    return lambda: fused_attention(query, keys.gather(2, index), values.gather(2, index))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> Callable[[], Any] | None:
    if bias is not None:  # PyTorch would store a map, whose dtype rounds the bias
        return None
    return partial(fused_attention, query, key, value, is_causal=True)


def _top_k(scores: Tensor, k: int, first: None) -> Callable[[], Any]:
    return lambda: scores.topk(k).indices.sort(-1).values


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Callable[[], Any]:
    def unfused() -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, eps), total

    return unfused


def _products(x: Tensor, weights: Sequence[Tensor], biases: Any) -> Callable[[], Any]:
    return lambda: [functional.linear(x, weight) for weight in weights]


def _gated(x: Tensor, weights: Sequence[Tensor], biases: Any) -> Callable[[], Any]:
    def gated() -> Tensor:
        gate, up = (functional.linear(x, weight) for weight in weights)
        return functional.silu(gate) * up

    return gated


OTHERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "biased_attention": ("SDPA", _attention),
    "decode_mixed": ("SDPA in bf16", _decode),
    "decode_slots": ("gather, SDPA in bf16", _slots),
    "gated_linear": ("modules", _gated),
    "linears": ("modules", _products),
    "residual_norm": ("add, rms_norm", _norm),
    "top_k": ("topk, sort", _top_k),
    "tree_verify": ("SDPA with a mask in bf16", _tree),
}


# --- comparing -----------------------------------------------------------------------------------


def compared_part(call: Call, result: Any) -> list[Tensor]:
    """The tensors of a result that are compared."""
    return list(tensors(result))[: 1 if call.function.__name__ in ATTENTION else None]


def compared(got: Any, wanted: Any, allow: float = 0.0) -> dict[str, Any]:
    """``passed``, the largest relative ``error`` of a tensor, and ``why`` if it failed."""
    pairs = list(zip_longest(tensors(got), tensors(wanted)))
    kinds = [[None if t is None else (*t.shape, t.dtype) for t in pair] for pair in pairs]
    if not pairs or any(a != b for a, b in kinds):
        return {"passed": False, "why": f"other tensors than the reference: {kinds}"}
    worst = 0.0
    for number, (a, b) in enumerate(pairs):
        error, far = difference(a, b)
        worst = max(worst, error)
        if not far <= allow:
            why = f"tensor {number}: {far:.2%} of it differs, relative error {error:.1e}"
            return {"passed": False, "error": error, "why": why}
    return {"passed": True, "error": worst}


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Relative error of the whole tensor, and the fraction of rows beyond the tolerance."""
    if not a.numel():
        return 0.0, 0.0
    if not a.dtype.is_floating_point:
        far = (a != b).double().mean().item()
        return far, far
    tolerance = TOLERANCE[b.dtype]
    a, b = (x.double().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (a, b))
    if not bool(a.isfinite().all()):
        return math.inf, 1.0
    size, off = b.norm(dim=1), (a - b).norm(dim=1)
    far = (off > tolerance * size.clamp(min=size.mean())).double().mean().item()
    return (off.norm() / size.norm().clamp(min=1e-300)).item(), far


def checked(call: Call) -> dict[str, Any]:
    """Compare the kernel with the reference, and so PyTorch's function for values of its format."""
    wanted = compared_part(call, call.reference())
    found = compared(compared_part(call, call.result()), wanted, call.allow)
    name, other = other_of(call)
    found["others"] = {}
    if other is not None and is_coded(call):
        found["others"][name] = STORED
    elif other is not None:
        try:
            match = compared(other(), wanted, call.allow)
        except Exception as error:  # not supported by this device or version
            found["others"][name] = harness.line(error, 160)
        else:
            found["others"][name] = "same" if match["passed"] else match["why"]
    return found


# --- timing --------------------------------------------------------------------------------------


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture ``run`` in a CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], Any]) -> dict[str, Any]:
    """Median and quartiles of the replays, or of eager calls if a call is slow or not captured."""
    from triton.testing import do_bench

    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"captured": False}
    if time.perf_counter() - begin < 0.2:  # launches are negligible for slower calls
        try:
            run = captured(run)
            found["captured"] = True
        except Exception as error:  # it synchronizes
            found["not captured"] = harness.line(error)
            torch.cuda.synchronize()
    quantiles = do_bench(run, rep=200, quantiles=[0.5, 0.25, 0.75])
    found["time"], *found["spread"] = (ms / 1e3 for ms in quantiles)
    return found


def machine(n: int = 8192) -> dict[str, float]:
    """Bytes per second of a copy (reads plus writes), operations per second of a matrix product.

    ``least``: seconds of an almost empty graph.
    """
    x = torch.randn(1 << 28, device="cuda")
    y, one = torch.empty_like(x), torch.zeros(1, device="cuda")
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return {
        "copy": 2 * x.nbytes / timed(lambda: y.copy_(x))["time"],
        "matrix": 2 * n**3 / timed(lambda: a @ b)["time"],
        "least": timed(lambda: one.add_(1))["time"],
    }


def measured(case: Case, shape: str, rates: dict[str, float]) -> dict[str, Any]:
    """One row: the comparison, and times if it passed."""
    call = case.call(replace(SHAPES[shape], device=torch.device(harness.DEVICE)))
    moved = call.moved()
    row = {"file": case.kernel, "bytes": moved, "flop": call.flop, "check": checked(call)}
    if not row["check"]["passed"]:
        return row
    row |= timed(call.run)
    row["bandwidth"] = moved / row["time"]
    row["rate"] = call.flop / row["time"]
    row["floor"] = max(moved / rates["copy"], call.flop / rates["matrix"])
    row["machine"] = rates
    name, other = other_of(call)
    # Functions with a different result are not timed.
    fair = row["check"]["others"].get(name) in ("same", STORED)
    row["others"] = {name: timed(other)} if other is not None and fair else {}
    with references():
        row["reference"] = timed(call.run)
    return row


# --- the benchmark -------------------------------------------------------------------------------


Pair = tuple[str, str]  # of a case's name and a shape


def row_of(pair: Pair, rates: dict[str, float]) -> dict[str, Any]:
    """`measured`; for an exception, a row with the error."""
    case = next(case for case in CASES if case.name == pair[0])
    begin = time.perf_counter()
    try:
        row = measured(case, pair[1], rates)
    except Exception as error:
        row = {"file": case.kernel, "error": harness.line(error, 400)}
    return row | {"took": time.perf_counter() - begin}


def child(pipe: Any) -> None:
    """Answer each pair that comes with its row."""
    rates = machine()
    pipe.send("ready")
    for pair in iter(pipe.recv, None):
        pipe.send(row_of(pair, rates))
        gc.collect()
        torch.cuda.empty_cache()


def spawned(
    pairs: list[Pair], seconds: float, target: Callable[..., None] = child
) -> Iterator[tuple[Pair, dict]]:
    """Yield rows from another process, which is replaced if a case fails, crashes or hangs.

    ``seconds``: time limit of a row.
    """
    process = None
    try:
        for pair in pairs:
            try:
                process = process or harness.Child(target, seconds=START_S)
                row = process.ask(pair, seconds)
            except harness.ChildFailed as error:
                row = {"error": str(error)}
            if "error" in row and process is not None:
                process.close()
                process = None
            yield pair, row
    finally:
        if process is not None:
            process.close()


def verdict(row: dict[str, Any]) -> str:
    """Status of a row: the error, or the times; a ratio above 1 means that the kernel is faster."""
    if "error" in row:
        return f"BROKEN  {row['error']}"
    if not row["check"]["passed"]:
        return f"WRONG   {row['check']['why']}; not timed"
    now = row["time"]
    others = [f"{name} {of['time'] / now:.2f}x" for name, of in row["others"].items()]
    reference = f"reference {row['reference']['time'] / now:.2f}x"
    shown = f"{1e6 * now:,.1f} us, {row['floor'] / now:.0%} of the floor"
    return f"ok      {', '.join([shown, reference, *others])}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__, minutes=9.0, out=None)
    add = parser.add_argument
    add("--kernel", action="append", help="file, or part of a case's name; all by default")
    add("--shapes", default=",".join(SHAPES), help="%(default)s by default")
    add("--missing", action="store_true", help="run only rows that are not in the result file")
    add("--row-seconds", type=float, default=120.0, help="time limit of a row (%(default)s)")
    return parser.parse_args(argv, argparse.Namespace(device=harness.DEVICE))


def chosen(args: argparse.Namespace) -> list[Pair]:
    return [
        (case.name, shape)
        for case in CASES
        if not args.kernel or any(k == case.kernel or k in case.name for k in args.kernel)
        for shape in case.timed
        if shape in args.shapes.split(",")
    ]


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("no GPU; `vlmfast check` compares kernels without one", file=sys.stderr)
        return 2
    os.environ["VLMFAST_KERNELS"] = "triton"
    about = harness.begin("kernels.py", argv, args)
    out = harness.path_of(args, "kernels", about["device"])
    report: dict[str, Any] = {"rows": {}}
    if out.is_file():
        report = json.loads(out.read_text(encoding="utf-8"))
    report |= about
    have = report["rows"] if args.missing else {}
    todo = [pair for pair in chosen(args) if "time" not in have.get(" | ".join(pair), {})]
    rows, end = spawned(todo, args.row_seconds), time.perf_counter() + 60 * args.minutes
    fresh: dict[str, dict[str, Any]] = {}
    for pair, row in rows:
        key = " | ".join(pair)
        fresh[key] = report["rows"][key] = row | {"date": report["date"]}
        print(f"{key:42} {verdict(row)}", file=sys.stderr)
        write_json(out, report)
        if time.perf_counter() > end:
            break
    rows.close()
    late = len(todo) - len(fresh)
    rates = next((row["machine"] for row in fresh.values() if "machine" in row), None)
    print(f"\n{about['device']}: {rates}")
    bad = [key for key, row in fresh.items() if "error" in row or not row["check"]["passed"]]
    print(f"{len(fresh) - len(bad)} of {len(fresh)} agree", *bad, sep="\n  ")
    if late:
        print(f"{late} rows were left for another run with --missing", file=sys.stderr)
    return 1 if bad or late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
