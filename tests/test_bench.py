"""The benchmarks: they compare results before they time, and refuse to report wrong ones."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vlmfast
from vlmfast.cli import main as cli
from vlmfast.eval import bench
from vlmfast.kernels import compile as offline


def script(name: str) -> Any:
    """A benchmark as a module, loaded from its file: `tests` has a folder of the same name."""
    file = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels, shapes, end_to_end = map(script, ("kernels", "shapes", "end_to_end"))
RATES = {"copy": 4e12, "matrix": 8e14, "least": 1e-6}


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")


# --- kernels: cases ------------------------------------------------------------------------------


def test_every_kernel_has_a_case() -> None:
    assert {case.file for case in kernels.CASES} == set(offline.files())
    names = [case.name for case in kernels.CASES]
    assert len(set(names)) == len(names)
    assert all(" | " not in name for name in names)
    assert {shape for case in kernels.CASES for shape in case.shapes} == set(kernels.SHAPES)


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("small", kernels.SMALL_SHAPES)
def test_every_case_runs(case: kernels.Case, small: str) -> None:
    work = case.make(kernels.SMALL_SHAPES[small])
    check = kernels.checked(work)
    assert check["passed"], check
    assert work.bytes > 0
    results = [t for t in kernels.tensors(work.run()) if t.dtype.is_floating_point]
    assert all(t.isfinite().all() for t in results)


def test_a_case_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    row = kernels.row_of(("swiglu, 1 token", "odd"), None)
    assert row["check"]["passed"], row
    assert "time" not in row


@pytest.mark.slow
def test_interpreter_runs_in_a_separate_process() -> None:
    pytest.importorskip("triton")
    pairs = [("swiglu, 1 token", "small"), ("swiglu, 1 token", "odd")]
    rows = list(kernels.spawned(pairs, True, 120))
    assert [pair for pair, _ in rows] == pairs
    assert all(row["check"]["passed"] for _, row in rows), rows


# --- kernels: comparing --------------------------------------------------------------------------


def work(run: Any = lambda: None, **more: Any) -> kernels.Work:
    return kernels.Work(run, 1000, **more)


def test_differences_are_found() -> None:
    wanted = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert kernels.compared(wanted.clone(), wanted, work())["passed"]
    assert kernels.compared({"a": [wanted]}, (wanted,), work())["passed"]
    wrong = wanted.clone()
    wrong[3] += 0.01
    found = kernels.compared(wrong, wanted, work())
    assert not found["passed"]
    assert "12.50% of it differs" in found["why"]
    assert kernels.compared(wrong, wanted, work(allow=0.2))["passed"]
    assert kernels.compared(wrong, wanted, work(tolerance=0.1))["passed"]
    assert not kernels.compared(wanted.half(), wanted, work())["passed"]
    assert not kernels.compared(wanted[1:], wanted, work())["passed"]
    assert not kernels.compared([wanted, wanted], wanted, work())["passed"]
    assert not kernels.compared((), (), work())["passed"]
    wrong[0, 0] = torch.nan
    assert not kernels.compared(wrong, wanted, work(allow=0.5))["passed"]


def test_integers_have_their_own_tolerance() -> None:
    wanted = torch.arange(10)
    off = wanted + (wanted == 4)
    assert not kernels.compared(off, wanted, work())["passed"]
    assert kernels.compared(off, wanted, work(off=1))["passed"]
    assert kernels.compared(off, wanted, work(allow=0.1))["passed"]
    assert not kernels.compared(2 * off, 2 * wanted, work(off=1))["passed"]


def test_unwritten_memory_is_found() -> None:
    def run() -> torch.Tensor:
        out = torch.empty(64)
        out[: 64 if os.environ["VLMFAST_KERNELS"] == "torch" else 63] = 1.0
        return out

    os.environ["VLMFAST_KERNELS"] = "triton"  # undone by the fixture
    assert not kernels.checked(work(run))["passed"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_reused_buffer_is_not_compared_with_itself() -> None:
    buffer = torch.zeros(4)

    def run() -> torch.Tensor:
        if os.environ["VLMFAST_KERNELS"] == "torch":
            buffer.copy_(torch.arange(4.0))
        return buffer

    os.environ["VLMFAST_KERNELS"] = "triton"
    prepare = lambda: buffer.fill_(-7)  # noqa: E731
    assert not kernels.checked(work(run, prepare=prepare))["passed"]


# --- kernels: times ------------------------------------------------------------------------------


class Clock:
    """A fake GPU clock: the time of each function is set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(kernels, "Timer", lambda: None)
        monkeypatch.setattr(kernels, "timed", self.timed)
        monkeypatch.setattr(kernels, "called", lambda run: 3e-5)

    def timed(self, timer: None, run: Any) -> dict[str, Any]:
        slow = os.environ["VLMFAST_KERNELS"] == "torch"
        self.asked.append("reference" if slow else getattr(run, "__name__", "kernel"))
        return {"captured": True, "time": 4e-5 if slow else 1e-5, "spread": [1e-5, 1e-5]}


def case(run: Any, **more: Any) -> kernels.Case:
    return kernels.Case("none", "made up", "A", lambda s: work(run, flop=10**9, **more))


def right() -> torch.Tensor:
    return torch.ones(4)


def wrong() -> torch.Tensor:
    return torch.ones(4) * (1 if os.environ["VLMFAST_KERNELS"] == "torch" else 2)


def two() -> torch.Tensor:
    return 2 * torch.ones(4)


def test_correct_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    clock = Clock(monkeypatch)
    others = {
        "as good": kernels.Other(right),
        "another result": kernels.Other(two),
        "other storage": kernels.Other(two, same=False),
        "not here": kernels.Other(lambda: 1 / 0),
    }
    row = kernels.measured(case(right, others=others), "A", RATES)
    assert set(row["others"]) == {"as good", "other storage"}
    assert clock.asked == ["right", "right", "two", "reference"]
    assert row["floor"] == 1e9 / 8e14
    table = kernels.markdown({"made up | A": row})
    assert "(4.00x)" in table
    assert "as good" in table
    assert "another result" not in table
    assert "ZeroDivisionError" in row["check"]["others"]["not here"]


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "triton")
    clock = Clock(monkeypatch)
    row = kernels.measured(case(wrong), "A", RATES)
    assert clock.asked == []
    assert "time" not in row
    assert "made up" not in kernels.markdown({"made up | A": row | {"time": 1.0}})
    assert "WRONG" in kernels.verdict(row)
    assert "not timed" in kernels.verdict(row)


def test_kernel_targets() -> None:
    stats = {"time": 1e-5, "bytes": 24 * 10**6, "machine": RATES}
    coded = {"time": 1e-5, "others": {"SDPA in bf16": {"time": 2e-5}}}
    rows = {"col_stats, 64 rows | B": stats, "decode, 4 bit | E": coded}
    assert [line[:5] for line in kernels.aims(rows)] == ["PASS:", "MISS:"]
    assert set(rows) <= {f"{case.name} | {s}" for case in kernels.CASES for s in case.shapes}
    assert kernels.aims({key: {"error": "broken"} for key in rows}) == []


CHILD = """
import json, sys, time
for name, shape in json.load(sys.stdin):
    if name == "dies":
        sys.exit(7)
    if name == "hangs":
        time.sleep(60)
    row = {"check": {"passed": True, "error": 0.0}}
    row |= {"fatal": True, "error": "CUDA error"} if name == "breaks" else {}
    print(json.dumps({"pair": [name, shape], "row": row}), flush=True)
    if "fatal" in row:
        break
"""


@pytest.mark.slow
def test_broken_case_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(kernels, "__file__", str(script))
    names = ["dies", "one", "breaks", "two", "hangs", "three"]
    rows = {pair[0]: row for pair, row in kernels.spawned([(n, "A") for n in names], False, 5)}
    assert list(rows) == names
    assert [name for name, row in rows.items() if "error" in row] == ["dies", "breaks", "hangs"]
    assert "exited with 7" in rows["dies"]["error"]


def test_closing_the_rows_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(kernels, "__file__", str(script))
    rows = kernels.spawned([("one", "A"), ("hangs", "A")], False, 60)
    assert next(rows)[0] == ("one", "A")
    rows.close()  # ends the process; otherwise this would wait for it


def test_no_time_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 2
    assert "cannot measure times" in capsys.readouterr().err
    assert kernels.main(["--check", "--kernel", "swiglu", "--shapes", "odd"]) == 0
    assert "no times measured" in capsys.readouterr().out


# --- end to end ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job() -> end_to_end.Job:
    args = end_to_end.parse(["--model", "tiny-shape", "--device", "cpu"])
    return end_to_end.prepared("tiny-shape", torch.device("cpu"), torch.float32, args)


@pytest.fixture(scope="module")
def judge(job: end_to_end.Job) -> end_to_end.Judge:
    return end_to_end.Judge.of(job)


def test_prompt_has_the_announced_length(job: end_to_end.Job) -> None:
    ids = job.vlm().inputs(job.question, images=job.image)["input_ids"]
    assert ids.shape[1] == shapes.MODELS["tiny-shape"].prompt


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
    check = judge.check("none", end_to_end.own(job, "random:0.5"), 1)
    assert not check["passed"]
    assert check["error"] > 3 * check["allowed"]


def test_attention_is_restored(job: end_to_end.Job, judge: end_to_end.Judge) -> None:
    assert job.model.config._attn_implementation == "sdpa"
    assert judge.own < judge.allowed


def test_watch_records_round_times() -> None:
    watch = end_to_end.Watch(torch.device("cpu"), 2)
    counts = []
    for _ in range(6):
        assert not watch(torch.zeros(1, 3, dtype=torch.int64), None).any()
        counts.append(len(watch.times))
    assert counts == [0, 1, 1, 2, 2, 2]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [
        "--model", "tiny-shape", "--device", "cpu", "--batches", "1,2", "--recipe", "none",
        "--recipe", "hired:0.2", "--no-hf", "--new-tokens", "3", "--repeats", "1",
        "--out", str(tmp_path / "out.json"),
    ]  # fmt: skip


@pytest.mark.slow
def test_run_resumes_where_it_stopped(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(command[-1])
    measure, names = end_to_end.part, []

    def part(job: Any, judge: Any, name: str, batch: int, args: Any) -> dict[str, Any]:
        names.append((name, batch))
        if len(names) == 2:
            raise RuntimeError("did not work")
        if len(names) == 3:
            raise KeyboardInterrupt
        return measure(job, judge, name, batch, args)

    monkeypatch.setattr(end_to_end, "part", part)
    with pytest.raises(KeyboardInterrupt):
        end_to_end.main(command)
    report = json.loads(out.read_text())
    assert list(report["parts"]) == ["none | 1", "hired:0.2 | 1"]
    assert report["parts"]["hired:0.2 | 1"]["failed"] == "RuntimeError: did not work"
    assert end_to_end.main(command) == 0
    assert names[3:] == [("none", 2), ("hired:0.2", 2), ("hired:0.2", 1)]
    report = json.loads(out.read_text())
    assert {"driver", "device", "date", "command", "environment", "settings"} <= set(report)
    for row in report["parts"].values():
        assert row["check"]["passed"]
        assert row["rate"] > 0
        assert row["first"] > row["parts"]["prefill"] > 0
    assert "x none)" in capsys.readouterr().out
    assert end_to_end.main(command) == 0
    assert len(names) == 6
    assert end_to_end.main([*command, "--decoding", "eager"]) == 2
    assert "use --fresh" in capsys.readouterr().err


def test_run_ends_at_its_time_limit(command: list[str]) -> None:
    assert end_to_end.main([*command, "--minutes", "0"]) == end_to_end.UNFINISHED


def row(rate: float, *, passed: bool = True, kv: int = 10**9) -> dict[str, Any]:
    return {
        "check": {"passed": passed, "error": 1e-3, "allowed": 1e-2},
        "first": 1 / rate,
        "rate": rate,
        "memory": 10**10,
        "parts": {"prefill": 0.5 / rate, "kv_bytes": kv, "visual_tokens": 576.0},
    }


def test_no_ratio_with_a_wrong_result() -> None:
    report = {
        "settings": {"model": "llava-1.5-7b"},
        "weights": 13 * 10**9,
        "machine": RATES,
        "parts": {"hf sdpa | 1": row(50), "none | 1": row(250), "hired:0.2 | 1": row(260)},
    }
    assert "(5.00x HF)" in end_to_end.markdown(report)
    assert [line[:5] for line in end_to_end.aims(report)] == ["PASS:", "PASS:", "PASS:"]
    spoiled = copy.deepcopy(report)
    spoiled["parts"]["none | 1"]["check"]["passed"] = False
    table = end_to_end.markdown(spoiled)
    assert "WRONG" in table
    assert "5.00x" not in table
    assert "none)" not in table
    assert end_to_end.aims(spoiled) == []


def test_targets_of_the_larger_model() -> None:
    parts = {"none | 1": row(100), "hired:0.2 | 1": row(300), "none | 16": row(400)}
    parts["zipvl | 16"] = row(600, kv=2 * 10**8)
    report = {"settings": {"model": "llava-next-7b"}, "weights": 10**10, "parts": parts}
    lines = end_to_end.aims(report)
    assert [line[:5] for line in lines] == ["PASS:", "MISS:", "MISS:"]
    assert "1.50, aim 1.80" in lines[2]
    assert "20% of the KV" in lines[2]


# --- ask.py --------------------------------------------------------------------------------------


def test_towers_have_the_shapes_of_their_names(ask: Any) -> None:
    """Parameters of CLIP ViT-L/14-336, SigLIP-so400m/14-384 without head, Qwen2.5-VL's tower."""
    wanted = {"clip-vit-l-14-336": 304e6, "siglip-so400m-14-384": 412e6, "qwen2.5-vl": 669e6}
    for name, expected in wanted.items():
        of = ask.TOWERS[name]
        matrices = 3 if of.kind == "qwen2_5_vl" else 2  # its MLP is gated
        block = 4 * of.width**2 + matrices * of.width * of.mlp
        embedding = 3 * of.patch**2 * of.width * (2 if of.kind == "qwen2_5_vl" else 1)
        if of.kind == "qwen2_5_vl":  # four patches enter its merger
            embedding += 4 * of.width * (4 * of.width + 3584)
        assert of.layers * block + embedding == pytest.approx(expected, rel=0.02)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with small models of each kind."""
    module = script("ask")
    text_of = module.text_of
    small = {"vocab_size": 512, "intermediate_size": 64}
    monkeypatch.setattr(module, "text_of", lambda layers, **more: text_of(layers, **more) | small)
    return module


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
        ask.TOWERS,
        name,
        ask.TOWERS[name]._replace(layers=layers, width=width, heads=2, mlp=32, side=side),
    )
    args = ask.parse(["--models", ask.SHAPED, "--tower", name, "--layers", "1", "--device", "cpu"])
    args.model, args.frames = ask.SHAPED, frames
    vlm, media = ask.load(args)
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


def test_clips(ask: Any) -> None:
    import numpy as np
    from PIL import Image

    image = Image.new("RGB", (64, 64))
    moving, static = ask.clip_of(image, 4, True), ask.clip_of(image, 4, False)
    assert len(moving) == len(static) == 4
    assert all(np.array_equal(frame, static[0]) for frame in static)
    assert len({frame.tobytes() for frame in moving}) == 4


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


def test_drawn_image_is_deterministic() -> None:
    image = bench.drawn(96)
    assert image.size == (96, 96)
    assert len(image.getcolors(96 * 96)) > 10
    assert bench.drawn(96).tobytes() == image.tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere peaks cannot be forgotten")
def test_peak_memory_is_of_the_last_run() -> None:
    device = torch.device("cpu")
    large = torch.ones(50_000_000)
    before = bench.peak(device)
    del large
    bench.forget_peak(device)
    assert bench.peak(device) < before - 10**8
