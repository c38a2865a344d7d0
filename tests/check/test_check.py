"""``vlmfast check``: passes here, and finds planted faults in what it is given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.kernels import (
    KERNELS as KERNEL_FILES,
)
from support.engine.kernels import (
    described_kernels,
    parse_choice,
    pretend_gpu,
    use_triton,
)
from support.engine.steps import Graphs
from vlmfast import VLM, VLMFastError
from vlmfast.check import commands, kernels, model, worker
from vlmfast.check.closeness import SAFETY, deviation
from vlmfast.check.kernels import SMALL, Pair, pairs_of
from vlmfast.check.rows import Row, attempt, message_of
from vlmfast.eval.bench import prompts
from vlmfast.kernels.calls import Call, tensors
from vlmfast.kernels.catalogue import CASES, KERNELS, Case
from vlmfast.kernels.compile import files

CPU = torch.device("cpu")
F16, F32 = torch.float16, torch.float32
EPS = torch.finfo(F32).eps


# --- closeness -----------------------------------------------------------------------------------


def sums(dtype: torch.dtype = F32, terms: int = 1, allow: float = 0.0) -> Call:
    """As far as `deviation` reads it."""
    return Call(torch.sum, (torch.zeros(1, dtype=dtype),), terms=terms, allow=allow)


def test_deviation_is_a_fraction_of_the_tolerance() -> None:
    want = torch.tensor([1.0, -4.0])
    bound = SAFETY * (EPS + EPS * 3) * 4  # of float32, sums of nine terms, magnitude 4
    for times in (0.5, 2.0):
        got = want + torch.tensor([times * bound, 0.0])
        assert deviation(got, want, sums(terms=9)) == pytest.approx(times, rel=0.05)
    # Operands in half precision are rounded more.
    assert deviation(got, want, sums(F16, 9)) < 0.01
    assert deviation([got, want], [want, want], sums(terms=9)) > 1
    assert deviation(want, want, sums(terms=9)) == 0


def test_deviation_allows_for_near_ties() -> None:
    for dtype in (F32, torch.int64):
        want = torch.arange(100).to(dtype)
        got = want + (want == 7)
        assert deviation(got, want, sums(allow=0.01)) == 0
        assert deviation(got, want, sums(allow=0.005)) > 1


@pytest.mark.parametrize(
    ("got", "want", "terms"),
    [
        (torch.ones(2), torch.ones(3), 1),
        (torch.ones(2), torch.ones(2, dtype=F16), 1),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), 1),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), 1),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), 1),
        (torch.tensor([1.0, torch.inf]), torch.ones(2), 1),
        (torch.ones(2) + EPS, torch.ones(2), 0),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), 9),
        ([], [], 1),
    ],
    ids=["shape", "dtype", "nan", "want-nan", "sign", "inf", "exact", "integer", "empty"],
)
def test_deviation_is_infinite(got: Any, want: Any, terms: int) -> None:
    assert deviation(got, want, sums(terms=terms)) == torch.inf


def test_equal_infinities_are_close() -> None:
    x = torch.tensor([torch.inf, -torch.inf, 1.0])
    assert deviation({"a": x, "b": [x]}, {"b": [x.clone()], "a": x.clone()}, sums()) == 0


# --- kernels -------------------------------------------------------------------------------------


def test_every_kernel_has_cases() -> None:
    assert set(KERNELS) == set(files())
    assert set(KERNELS) <= set(KERNEL_FILES)
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kernel for case in CASES if case.checked} == set(KERNELS)


def test_cases_are_the_same_each_time() -> None:
    for case in CASES[::5]:
        pairs = zip(*(tensors(case.call(SMALL[1]).args) for _ in "ab"), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_grids() -> None:
    quick, full = (kernels.shapes(CPU, quick) for quick in (True, False))
    assert len(quick) == 2 and len(full) == 4 and set(quick) < set(full)
    cuda = [kernels.shapes(torch.device("cuda", 0), quick) for quick in (True, False)]
    assert [sum(shape.large for shape in grid) for grid in cuda] == [1, 1]
    assert {shape.dim for shape in cuda[1]} == {64, 80, 128, 256}
    assert {shape.dtype for shape in cuda[1]} == {torch.bfloat16, F16, F32}
    # Of the large shape, cases of many bytes.
    timed = {case.kernel for kernel in KERNELS for case, _ in pairs_of(kernel, [kernels.LARGE])}
    assert timed == {
        "decode_mixed", "decode_slots", "tree_verify", "gather_rows", "quantize_kv",
        "norm_rope_append", "swiglu", "few_rows",
    }  # fmt: skip


def scaled(result: Any, factor: float = 1.001) -> Any:
    """A result as a kernel with a wrong scale gives it; indices and codes are off by one."""
    if isinstance(result, torch.Tensor):
        return result * factor if result.is_floating_point() else result + 1
    if isinstance(result, dict):
        return {key: scaled(x, factor) for key, x in result.items()}
    if is_dataclass(result):
        return replace(
            result, **{f.name: scaled(getattr(result, f.name), factor) for f in fields(result)}
        )
    if isinstance(result, list | tuple):
        return [scaled(x, factor) for x in result]
    return result


def planted(pair: Pair, factor: float) -> Pair:
    """The same case of a kernel with a wrong scale."""
    case, shape = pair

    def make(*given: Any) -> Call:
        call = case.make(*given)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = call.function(*args, **kwargs)
            return found if os.environ["VLMFAST_KERNELS"] == "torch" else scaled(found, factor)

        return replace(call, function=wrong)

    return replace(case, make=make), shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_scale_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "")  # here on the references
    pairs = list(pairs_of(kernel, [SMALL[0]]))
    rows = list(kernels.check_kernel(planted(pair, 1.001) for pair in pairs))
    assert [row.passed for row in rows] == [False] * len(pairs)
    assert all(row.name == kernel and "its reference" in row.note for row in rows)
    # Control: the same cases without the fault.
    assert all(row.passed for row in kernels.check_kernel(pairs))


def test_wrong_scale_is_found_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "")
    pair = next(pairs_of("decode_mixed", [replace(SMALL[0], dtype=F16)]))
    rows = kernels.check_kernel([planted(pair, 1.05), pair])
    assert [row.passed for row in rows] == [False, True]


def made(run: Callable[[], Any]) -> Pair:
    """A case that calls ``run``."""
    return Case("swiglu", "3", lambda *_: Call(run, (), terms=1), "", True, False), SMALL[0]


def test_exceptions_are_failures_without_paths() -> None:
    def fails() -> None:
        raise RuntimeError(f"{Path.home() / 'x' / 'kernel.py'}:3: out of\nregisters")

    (row,) = kernels.check_kernel([made(fails)])
    assert row == Row("swiglu", False, note="RuntimeError: kernel.py:3: out of registers")
    assert message_of(OSError(r"C:\Users\me\a b.txt is gone")) == "OSError: a b.txt is gone"
    assert message_of(ValueError("3/4 of 8 / 2")) == "ValueError: 3/4 of 8 / 2"


# --- the current device --------------------------------------------------------------------------


def test_missing_guard_of_the_current_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU: the dispatch is asked about tensors on another one."""
    pretend_gpu(monkeypatch)
    monkeypatch.delenv("VLMFAST_KERNELS", raising=False)
    row = kernels.check_guard("device guard", lambda name, *tensors: True, 0)
    assert row.passed is False and "would run" in row.note
    # Control: the dispatch of the package, which needs no second GPU to refuse.
    assert kernels.check_guard("device guard", use_triton, 0).passed


class Gpus:
    """Two stand-ins: what runs outside its device reads other memory."""

    def __init__(self) -> None:
        self.current = 0

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def case(self, *, guarded: bool) -> Pair:
        """A kernel whose tensors are on device 0."""

        def run() -> torch.Tensor:
            if guarded and self.current != 0:
                raise VLMFastError("x: tensors on cuda:0, but the current device is cuda:1")
            return torch.full((3,), 1.0 if self.current == 0 else 7.0)

        return made(run)


def test_kernel_without_a_guard_is_found_on_several_gpus() -> None:
    gpus = Gpus()
    row = kernels.check_elsewhere("swiglu", *gpus.case(guarded=False), gpus.on(1))
    assert row.passed is False and "not on that of its tensors" in row.note
    # Controls: with the guard, and on its own device.
    assert kernels.check_elsewhere("swiglu", *gpus.case(guarded=True), gpus.on(1)).passed
    assert kernels.check_elsewhere("swiglu", *gpus.case(guarded=False), gpus.on(0)).passed


# --- processes -----------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time
device, quick, *names = sys.argv[1:]
if {broken!r}:
    sys.exit("no module named /home/me/triton")
print("a line of a library")
for name in names:
    print(json.dumps({{"begins": name}}), flush=True)
    if name == "crash":
        os._exit(3)
    if name == "hang":
        time.sleep(60)
    variables = [os.environ[key] for key in ("VLMFAST_KERNELS", "TRITON_INTERPRET")]
    row = {{"name": name, "passed": True, "about": " ".join([device, quick, *variables])}}
    print(json.dumps({{"row": row}}))
    print(json.dumps({{"ends": name}}), flush=True)
    if name == "spoils":
        sys.exit(1)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Row]]:
    """Runs a stand-in for the process that checks kernels."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*names: str, broken: bool = False, device: str = "cpu", **more: Any) -> list[Row]:
        (tmp_path / "fake_worker.py").write_text(FAKE.format(broken=broken), encoding="utf-8")
        given = {"quick": True, "module": "fake_worker", **more}
        lines = list(worker.spawned(names, torch.device(device), **given))
        return commands.collected(lines)[0]

    return run


def test_crash_is_a_failure_of_its_kernel(fake) -> None:
    rows = fake("first", "crash", "spoils", "last")
    assert [(row.name, row.passed) for row in rows] == [
        ("first", True), ("crash", False), ("spoils", True), ("last", True),
    ]  # fmt: skip
    assert "ended with 3" in rows[1].note
    assert rows[0].about == "cpu 1 triton 1"
    assert fake("first", device="cuda:0")[0].about == "cuda:0 1 triton 0"


def test_hang_is_a_failure_of_its_kernel(fake) -> None:
    rows = fake("first", "hang", seconds=2.0)
    assert [(row.name, row.passed) for row in rows] == [("first", True), ("hang", False)]
    assert rows[1].note == "did not end in time"


def test_process_that_cannot_start_fails_all(fake) -> None:
    rows = fake("first", "last", broken=True)
    assert [(row.name, row.passed) for row in rows] == [("first", False), ("last", False)]
    assert rows[0].note == "the process ended with 1: no module named triton"


def test_a_kernel_in_its_own_process() -> None:
    """The real one, in the interpreter."""
    rows, rate, reason = commands.collected(worker.spawned(["swiglu"], CPU, quick=True))
    if reason is not None:
        pytest.skip(reason)
    assert rate is None and {row.name for row in rows} == {"swiglu"} and len(rows) > 2
    assert all(row.passed and row.seconds is None for row in rows)


# --- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu")


@pytest.fixture(scope="module")
def reference(vlm: VLM) -> model.Reference:
    return model.Reference(vlm, prompts(2))


@pytest.fixture
def fresh(vlm: VLM) -> VLM:
    return VLM(vlm.model, vlm.processor)


def repeated(step, state) -> Callable[[], None]:
    """A stand-in for a captured step: runs it again."""
    return step


def stale(step, state) -> Callable[[], None]:
    """A capture that keeps its first inputs: each replay gives the same output."""
    step()
    return lambda: None


class StaleWhenReused:
    """A capture that sees new inputs for as many replays as the first two answers take."""

    def __init__(self, replays: int) -> None:
        self.left = replays

    def __call__(self, step, state) -> Callable[[], None]:
        def replay() -> None:
            self.left -= 1
            if self.left >= 0:
                step()

        return replay


def captured(reference: model.Reference, vlm: VLM, record) -> Row:
    return attempt("capture and reuse", model.check_capture, reference, vlm, record)


def test_captures_pass(reference, fresh: VLM) -> None:
    row = captured(reference, fresh, repeated)
    assert row.passed, row
    assert row.about == "1 captured, 3 reused"


def test_stale_capture_is_found(reference, fresh: VLM) -> None:
    row = captured(reference, fresh, stale)
    assert row.passed is False and "differs from token" in row.note


def test_capture_that_is_stale_when_reused_is_found(reference, fresh: VLM) -> None:
    replays = sum(map(len, reference.tokens)) + 2
    row = captured(reference, fresh, StaleWhenReused(replays))
    assert row.passed is False and row.note.startswith("when reused: answer")


def test_captures_that_are_not_reused_are_found(reference, fresh: VLM) -> None:
    class Forgetful(Graphs):
        def put(self, graphs) -> None:
            pass

    fresh.adapter.kept["graphs"] = Forgetful(record=repeated)
    row = captured(reference, fresh, repeated)
    assert row.passed  # `check_capture` brings its own
    short = model.Reference.__new__(model.Reference)
    short.vlm, short.asked, short.referee, short.tokens = fresh, [], reference.referee, []
    row = captured(short, VLM(fresh.model, fresh.processor), repeated)
    assert row.passed is False and "none was reused" in row.note


@pytest.mark.slow
def test_all_checks_of_a_model_pass(vlm: VLM) -> None:
    rows = {row.name: row for row in model.check_model(vlm, quick=True, others=[nullcontext()])}
    assert {name: row.passed for name, row in rows.items()} == {
        "Hugging Face generate": True,
        "decoding=auto": True,
        "decoding=eager": True,
        "capture and reuse": None,
        "second thread": True,
        "another current GPU": True,
        "memory": True,
    }
    assert all(row.seconds is None and row.share is None for row in rows.values())


@contextmanager
def other_weights(vlm: VLM) -> Iterator[None]:
    """As if a thread read other memory."""
    weight = vlm.model.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(kept.roll(1, 0))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_wrong_answers_of_a_thread_are_found(reference, vlm: VLM) -> None:
    row = attempt("second thread", model.check_thread, reference, vlm, other_weights(vlm))
    assert row.passed is False and row.note.startswith("answer 0 differs from token 0")
    assert attempt("second thread", model.check_thread, reference, vlm, nullcontext()).passed


def test_wrong_decoding_is_found(reference, vlm: VLM) -> None:
    with other_weights(vlm):
        row = attempt("decoding=auto", model.check_decoding, reference, vlm)
    assert row.passed is False
    assert attempt("decoding=auto", model.check_decoding, reference, vlm).passed


def test_growing_memory_is_found() -> None:
    kept: list[torch.Tensor] = []

    def ask(grows: bool) -> None:
        x = torch.zeros(1 << 16)  # 256 kB; eight of them are beyond the slack
        if grows:
            kept.append(x)

    def measure() -> int:
        return sum(x.nbytes for x in kept)

    row = model.check_memory("memory", lambda: ask(True), measure)
    assert row.passed is False and "grows" in row.note
    assert model.check_memory("memory", lambda: ask(False), measure).passed


def test_bytes_in_use_counts_each_storage_once() -> None:
    x = torch.zeros(1 << 20)
    views = [x[1:], x.view(2, -1)]
    with_x = model.bytes_in_use(CPU)
    del x, views
    assert with_x - model.bytes_in_use(CPU) == 4 << 20


# --- warm-up -------------------------------------------------------------------------------------


def test_warmup_captures_what_a_question_needs(fresh: VLM) -> None:
    graphs = fresh.adapter.kept["graphs"] = Graphs(record=repeated)
    fresh.adapter.decoding = "graph"
    assert fresh.warmup() > 0
    assert graphs.captured == 1
    assert fresh.prefix_cache.stats().entries == 0
    fresh.ask("What is here?", prompts(1)[0][0], max_new_tokens=4)
    assert graphs.captured == 1 and graphs.reused == 1
    # Another recipe has other buffers; its own image prepares it.
    assert fresh.warmup("h2o:0.7", prompts(1)[0][0], max_new_tokens=3) > 0
    with pytest.raises(VLMFastError, match="unknown"):
        fresh.warmup("no-such-method")


# --- the report ----------------------------------------------------------------------------------


def test_report_names_the_setting() -> None:
    good, bad = Row("swiglu", True, error=0.1), Row("decode_mixed", False, note="differs")
    report = commands.Report("cpu", "", [good, bad, replace(bad, name="merge")], [])
    assert not report.passed and report.setting == "VLMFAST_KERNELS=-decode_mixed,-merge"
    parse_choice(report.setting.partition("=")[2])  # is valid
    report = commands.Report("cpu", "", [good], [Row("memory", False)])
    assert not report.passed and report.setting is None
    report = commands.Report("cpu", "", [good, Row("device guard", None)], [])
    assert report.passed and report.setting is None
    found = json.dumps(report.to_dict())
    assert str(Path.home()) not in found and '"kernels"' in found


def test_summary_has_a_row_per_kernel() -> None:
    rows = [
        Row("swiglu", True, "a", error=0.1),
        Row("swiglu", True, "b", error=0.3, seconds=0.5, bytes=8, share=0.2),
        Row("pool", True, "c", error=0.2),
        Row("pool", False, "d", "differs"),
        Row("pool", False, "e", "differs more"),
        Row("merge", None, note="not here"),
    ]
    merged = commands.summary(rows)
    assert merged[0] == Row("swiglu", True, "2 cases", "", 0.3, 0.5, 8, 0.2)
    assert merged[1] == Row("pool", False, "2 of 3 cases failed", "d: differs; and 1 more")
    assert merged[2] == rows[-1]


# --- reports -------------------------------------------------------------------------------------


def test_env_shows_how_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    pretend_gpu(monkeypatch)
    for value, said in (
        ("", "triton"),
        ("-pool,-swiglu", "triton without cell_average, cell_mix, resample, swiglu"),
        ("torch", "torch"),
        ("-x", "'x' is not a kernel"),
    ):
        monkeypatch.setenv("VLMFAST_KERNELS", value)
        assert said in described_kernels(gpu)
    monkeypatch.delenv("VLMFAST_KERNELS")
    pretend_gpu(monkeypatch, (7, 0))
    assert described_kernels(gpu).startswith("torch: compute capability 7.0")


def test_rows_are_json() -> None:
    row = Row("swiglu", True, str(SMALL[0]), error=0.5)
    assert Row(**json.loads(json.dumps(asdict(row)))) == row
