"""The benchmarks: they compare results before they time, and refuse to report wrong ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vlmfast
from support.bench_script import script
from vlmfast.cli import main as cli
from vlmfast.eval import bench
from vlmfast.kernels import compile as offline
from vlmfast.kernels.calls import Call, Shape
from vlmfast.kernels.catalogue import Case

kernels, shapes, end_to_end = map(script, ("kernels", "shapes", "end_to_end"))
RATES = {"copy": 4e12, "matrix": 8e14, "least": 1e-6}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")


# --- kernels: cases ------------------------------------------------------------------------------


SMALL = [
    Shape(4, 2, 16, 48, 64, 96, batch=1, dtype=torch.bfloat16, large=True),
    Shape(2, 2, 24, 37, 40, 72, batch=1, dtype=torch.bfloat16, large=True),
]


def test_every_kernel_has_a_case() -> None:
    assert {case.kernel for case in kernels.CASES} == set(offline.files())
    assert all(" | " not in case.name for case in kernels.CASES)
    assert {shape for case in kernels.CASES for shape in case.timed} == set(kernels.SHAPES)


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("small", SMALL, ids=["small", "odd"])
def test_every_case_runs(case: Case, small: Shape) -> None:
    call = case.call(small)
    check = kernels.checked(call)
    assert check["passed"], check
    assert set(check["others"].values()) <= {"same", kernels.STORED}
    assert call.moved() > 0
    results = [t for t in kernels.tensors(call.run()) if t.dtype.is_floating_point]
    assert all(t.isfinite().all() for t in results)


# --- kernels: comparing --------------------------------------------------------------------------


def test_differences_are_found() -> None:
    wanted = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert kernels.compared(wanted.clone(), wanted)["passed"]
    assert kernels.compared({"a": [wanted]}, (wanted,))["passed"]
    wrong = wanted.clone()
    wrong[3] += 0.01
    found = kernels.compared(wrong, wanted)
    assert not found["passed"]
    assert "12.50% of it differs" in found["why"]
    assert kernels.compared(wrong, wanted, 0.2)["passed"]
    assert not kernels.compared(wanted.half(), wanted)["passed"]
    assert not kernels.compared(wanted[1:], wanted)["passed"]
    assert not kernels.compared([wanted, wanted], wanted)["passed"]
    assert not kernels.compared((), ())["passed"]
    wrong[0, 0] = torch.nan
    assert not kernels.compared(wrong, wanted, 0.5)["passed"]
    whole = torch.arange(10)
    off = whole + (whole == 4)
    assert not kernels.compared(off, whole)["passed"]
    assert kernels.compared(off, whole, 0.1)["passed"]


def test_reused_buffer_is_not_compared_with_itself() -> None:
    def run(buffer: torch.Tensor) -> torch.Tensor:
        if os.environ["VLMFAST_KERNELS"] == "torch":
            buffer.copy_(torch.arange(4.0))
        return buffer

    os.environ["VLMFAST_KERNELS"] = "triton"
    call = Call(run, (torch.zeros(4),), written=(0,))
    assert not kernels.checked(call)["passed"]


# --- kernels: times ------------------------------------------------------------------------------


class Clock:
    """A fake GPU clock: the time of each function is set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(kernels, "timed", self.timed)

    def timed(self, run: Any) -> dict[str, Any]:
        slow = os.environ["VLMFAST_KERNELS"] == "torch"
        self.asked.append("reference" if slow else getattr(run, "__name__", "kernel"))
        return {"captured": True, "time": 4e-5 if slow else 1e-5, "spread": [1e-5, 1e-5]}


def case(run: Any) -> Case:
    def make(*_: Any) -> Call:
        return Call(run, (), bytes=1000, flop=10**9)

    return Case("none", "made up", make, "A", True, False)


def right() -> torch.Tensor:
    return torch.ones(4)


def wrong() -> torch.Tensor:
    return torch.ones(4) * (1 if os.environ["VLMFAST_KERNELS"] == "torch" else 2)


def two() -> torch.Tensor:
    return 2 * torch.ones(4)


def broken() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("other", "told"),
    [(right, "same"), (two, "tensor 0: 100.00% of it differs"), (broken, "ZeroDivisionError")],
)
def test_correct_kernel_is_timed(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[], Any], told: str
) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    clock = Clock(monkeypatch)
    monkeypatch.setitem(kernels.OTHERS, "right", ("PyTorch's own", lambda: other))
    row = kernels.measured(case(right), "A", RATES)
    assert told in row["check"]["others"]["PyTorch's own"]
    fair = told == "same"
    assert clock.asked == ["run", *(["right"] if fair else []), "reference"]
    assert row["floor"] == 1e9 / 8e14
    shown = kernels.verdict(row)
    assert "reference 4.00x" in shown and ("PyTorch's own 1.00x" in shown) == fair


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    clock = Clock(monkeypatch)
    row = kernels.measured(case(wrong), "A", RATES)
    assert clock.asked == []
    assert "time" not in row
    assert "WRONG" in kernels.verdict(row) and "not timed" in kernels.verdict(row)


CHILD = """
import os, time
def child(pairs):
    pairs.send("ready")
    for name, shape in iter(pairs.recv, None):
        if name == "dies":
            os._exit(7)
        if name == "hangs":
            time.sleep(60)
        pairs.send({"error": "broken"} if name == "breaks" else {"process": os.getpid()})
"""


@pytest.mark.slow
def test_broken_case_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child_of_kernels.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "START_S", 10.0)
    from child_of_kernels import child

    names = ["dies", "one", "two", "breaks", "three", "hangs", "four", "hangs"]
    rows = kernels.spawned([(name, "A") for name in names], 5, child)
    found = [next(rows)[1] for _ in names[:-1]]
    rows.close()  # ends the process; otherwise this would wait for it
    failed = [name for name, row in zip(names, found, strict=False) if "error" in row]
    assert failed == ["dies", "breaks", "hangs"]
    assert "exited with 7" in found[0]["error"] and "no answer after 5 s" in found[5]["error"]
    assert found[1]["process"] == found[2]["process"] != found[4]["process"]


def test_no_time_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 2
    assert "vlmfast check" in capsys.readouterr().err


# --- end to end ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job() -> end_to_end.Job:
    args = end_to_end.parse(["--model", "tiny-shape", "--device", "cpu"])
    return end_to_end.prepared("tiny-shape", torch.device("cpu"), torch.float32, args)


@pytest.fixture(scope="module")
def judge(job: end_to_end.Job) -> end_to_end.Judge:
    return end_to_end.Judge.of(job)


@pytest.mark.cases(3)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", [end_to_end.HF, end_to_end.STATIC, "none", "hired:0.2"])
def test_every_variant_passes_the_check(
    job: end_to_end.Job, judge: end_to_end.Judge, name: str, batch: int
) -> None:
    check = judge.check(name, end_to_end.variant(job, name), batch)
    assert check["passed"], check
    assert f"{batch} requests" in check["compared"]
    assert ("PyTorch references" in check["compared"]) == (name == "hired:0.2")


def test_different_computation_is_refused(job: end_to_end.Job, judge: end_to_end.Judge) -> None:
    assert job.model.config._attn_implementation == "sdpa" and judge.own < judge.allowed
    check = judge.check("none", end_to_end.own(job, "random:0.5"), 1)
    assert not check["passed"]
    assert check["error"] > 3 * check["allowed"]


def test_watch_records_round_times() -> None:
    watch = end_to_end.Watch(torch.device("cpu"), 2)
    counts = []
    for _ in range(6):
        assert not watch(torch.zeros(1, 3, dtype=torch.int64), None).any()
        counts.append(len(watch.times))
    assert counts == [0, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_command_measures_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = "--model tiny-shape --device cpu --batches 1,2 --recipe none --recipe hired:0.2 --no-hf"
    command = [*argv.split(), "--new-tokens", "3", "--repeats", "1", "--out", str(out)]
    assert end_to_end.main(command) == 0
    report = json.loads(out.read_text())
    assert list(report["parts"]) == ["none | 1", "hired:0.2 | 1", "none | 2", "hired:0.2 | 2"]
    assert {"driver", "device", "date", "command", "environment", "settings"} <= set(report)
    for row in report["parts"].values():
        assert row["check"]["passed"]
        assert row["rate"] > 0
        assert row["first"] > row["parts"]["prefill"] > 0
    assert "| hired:0.2, 2 | " in capsys.readouterr().out


# --- ask.py --------------------------------------------------------------------------------------


def test_towers_have_the_shapes_of_their_names() -> None:
    """Parameters of CLIP ViT-L/14-336, SigLIP-so400m/14-384 without head, Qwen2.5-VL's tower."""
    wanted = {"clip-vit-l-14-336": 304e6, "siglip-so400m-14-384": 412e6, "qwen2.5-vl": 669e6}
    for name, expected in wanted.items():
        of = shapes.TOWERS[name]
        matrices = 3 if of.kind == "qwen2_5_vl" else 2  # its MLP is gated
        block = 4 * of.width**2 + matrices * of.width * of.mlp
        embedding = 3 * of.patch**2 * of.width * (2 if of.kind == "qwen2_5_vl" else 1)
        if of.kind == "qwen2_5_vl":  # four patches enter its merger
            embedding += 4 * of.width * (4 * of.width + 3584)
        assert of.layers * block + embedding == pytest.approx(expected, rel=0.02)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with small models of each kind."""
    small = {"vocab_size": 512, "intermediate_size": 64}
    monkeypatch.setattr(shapes, "TEXT", shapes.TEXT | small)
    return script("ask")


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "grid"), [
    ("clip-vit-l-14-336", (2, 16, 42)), ("siglip-so400m-14-384", (2, 16, 42)),
    ("qwen2.5-vl", (4, 32, 56)),
])  # fmt: skip
@pytest.mark.parametrize("frames", [0, 2])
def test_parts_of_the_time_to_the_first_token(
    ask: Any, monkeypatch: pytest.MonkeyPatch, name: str, grid: tuple[int, int, int], frames: int
) -> None:
    layers, width, side = grid
    monkeypatch.setitem(
        shapes.TOWERS,
        name,
        shapes.TOWERS[name]._replace(layers=layers, width=width, heads=2, mlp=32, side=side),
    )
    args = ask.parse(["--tower", name, "--layers", "1", "--device", "cpu"])
    vlm, image = ask.load(ask.SHAPED, args)
    media = {"images": image}
    if frames:
        media = {"video": ask.clip_of(image, frames, True), "num_frames": frames}
    full = ask.run_huggingface(vlm, media, ask.QUESTION, 3)
    same = ask.run_vlmfast(vlm, media, ask.QUESTION, 3, "none")
    assert same["tokens"] == full["tokens"]
    assert same["visual_tokens"] == full["visual_tokens"] > 0
    for found in (full, same):
        assert all(found[part] >= 0 for part in (*ask.PARTS, "prefill", "tpot"))
        assert found["vision"] > 0
        assert found["vision"] + found["prefill"] < found["ttft"]
    reduced = ask.run_vlmfast(vlm, media, ask.QUESTION, 3, "divprune:0.5")
    assert reduced["visual_tokens"] < full["visual_tokens"] and reduced["stages"] > 0
    rows = {
        variant: {part: {"median": of[part]} for part in ("ttft", *ask.PARTS, "prefill", "tpot")}
        | {"ratio": {"ttft": 1.5}}
        for variant, of in ((ask.HF, full), ("none", same))
    }
    head, _, *lines = ask.parts_table("a model", rows).splitlines()
    assert [cell.strip() for cell in head.strip("| ").split("|")] == [
        "a model", "TTFT", "media", "tower", "stages", "prefill", "decode, per token"
    ]  # fmt: skip
    assert "(1.50x)" not in lines[0] and "(1.50x)" in lines[1]


# --- vlmfast bench -------------------------------------------------------------------------------


def test_bench_command(random_llava_next: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--model", str(random_llava_next), "--device", "cpu", "--new-tokens", "4"]
    argv += ["--repeats", "2", "--recipe", "hired:0.3"]
    assert cli(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    *lines, blank, tower = lines
    assert [line.split()[0] for line in lines] == ["recipe", "none", "hired:0.3"]
    assert blank == ""
    assert tower == (
        "vision tower: CLIPVisionModel, 4 blocks, width 64, 0M parameters, 32 x 32 pixels"
    )
    for column in ("TTFT", "media", "tower", "stages", "prefill", "tokens/s", "agreement"):
        assert column in lines[0]
    for column in ("KV cache", "peak memory"):
        assert column in lines[0]
    assert "x)" not in lines[1]
    assert lines[2].count("x)") == 4
    assert cli([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    full, fewer = told["rows"]
    assert {"date", "environment", "device", "driver"} <= set(told)
    assert full["agreement"] == 1.0
    assert fewer["kv_bytes"] < full["kv_bytes"]
    assert fewer["visual_tokens"] < full["visual_tokens"] == full["visual_tokens_in"]
    assert len(full["samples"]["ttft_s"]) == 2
    assert told["tower"] in tower
    for row in told["rows"]:
        for one in zip(*(row["samples"][f"{part}_s"] for part in ("ttft", "vision", "prefill")),
                       strict=True):  # fmt: skip
            assert one[1] > 0 and one[2] > 0 and one[1] + one[2] < one[0]


def test_bench_refuses_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "--recipe", "nonsense:0.2"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_answers_have_one_length(random_vlm: vlmfast.VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    ask = vlmfast.VLM.ask

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(self, *args, **kwargs)
        lengths.append(len(answer.token_ids))
        return answer

    monkeypatch.setattr(vlmfast.VLM, "ask", spy)
    asked = {"images": bench.drawn(64), "max_new_tokens": 3, "do_sample": False}
    config = random_vlm.model.generation_config
    first = random_vlm.ask(bench.QUESTION, **asked).token_ids[0]
    monkeypatch.setattr(config, "eos_token_id", first)
    random_vlm.ask(bench.QUESTION, **asked)
    assert lengths == [3, 1]
    rows = bench.bench(random_vlm, ["grid:0.5"], new_tokens=3, repeats=1)
    assert lengths[2:] == [3] * 4
    assert config.eos_token_id == first
    assert [row.recipe for row in rows] == ["none", "grid:0.5"]


def test_spread_of_samples() -> None:
    assert bench.spread([5.0, 1.0, 4.0, 2.0, 3.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    assert bench.spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0}


def test_provenance_names_command_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "facts", lambda: {"date": "today", "device": "a GPU"})
    about = bench.provenance("ask.py", ["--recipe", "a b"], "cpu")
    assert about["command"] == "python benchmarks/ask.py --recipe 'a b'"
    assert (about["date"], about["device"]) == ("today", "cpu")
    assert bench.provenance("ask.py", [], "cuda:0")["device"] == "a GPU"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere peaks cannot be forgotten")
def test_peak_memory_is_of_the_last_run() -> None:
    device = torch.device("cpu")
    large = torch.ones(50_000_000)
    before = bench.peak(device)
    del large
    bench.forget_peak(device)
    assert bench.peak(device) < before - 10**8
