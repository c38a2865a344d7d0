"""The benchmark of the server: its results, and what they are sensitive to."""

from __future__ import annotations

import base64
import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from support.bench_script import script
from vlmfast import VLM
from vlmfast.media import load_video

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")
pytest.importorskip("httpx2")
if not Path("/proc/self/status").is_file():
    pytest.skip("memory of processes is read from /proc", allow_module_level=True)

harness, servers, serve = script("harness"), script("servers"), script("serve")
inside, shapes = script("inside_vllm"), script("shapes")

# A server whose behaviour is known. It refuses an image that it has seen before.
FAKE = """
import hashlib, json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how = {"pause": 0.01, "pieces": 6, "long": 80, "salt": "", "kept": 0, "stall": 0, "status": 200} | {
    "sequential": False, "error": False, "usage": True, "prompt": 9
} | json.loads(sys.argv[1])
seen, kept, lock, until = set(), [], threading.Lock(), [0.0]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = request["messages"]
        images = [p[p["type"]]["url"] for p in message["content"] if p["type"] != "text"]
        again = bool(seen & set(images)) or len(set(images)) < len(images)
        seen.update(images)
        self.send_response(400 if again else how["status"])
        self.end_headers()
        if again or how["status"] != 200:
            self.wfile.write(b"the image was seen before" if again else b"no")
        elif how["sequential"]:
            with lock:
                self.answer(request, images)
        else:
            self.answer(request, images)

    def answer(self, request, images):
        kept.append(b"x" * how["kept"])
        if len(images) > 1:
            until[0] = time.monotonic() + how["stall"]
            time.sleep(how["stall"])
        self.send({"role": "assistant", "content": ""})
        name = hashlib.sha256((how["salt"] + images[0]).encode()).hexdigest()
        most = request.get("max_tokens") or request["max_completion_tokens"]
        count = min(most, how["pieces" if most < 1000 else "long"])
        for number in range(count):
            time.sleep(max(how["pause"], until[0] - time.monotonic()))
            self.send({"content": f" {name[number % 64]}"})
            if how["error"]:
                self.wfile.write(b'data: {"error": {"message": "broken"}}\\n\\n')
                return
        usage = {"completion_tokens": count, "prompt_tokens": how["prompt"]}
        usage = usage if how["usage"] else None
        self.send({}, usage=usage)
        self.wfile.write(b"data: [DONE]\\n\\n")

    def send(self, delta, **more):
        event = {"choices": [{"index": 0, "delta": delta}], **more}
        self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        self.wfile.flush()

    def log_message(self, *given):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"a fake is served at http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """How each server behaves, by its name; they are started in place of real ones."""
    file = tmp_path / "fake.py"
    file.write_text(FAKE)
    behaviours: dict[str, dict[str, Any]] = {}

    def specs(args: Any, *given: str) -> list[Any]:
        names = [*args.recipes, *([serve.TRANSFORMERS] if args.transformers else [])]
        return [
            servers.Spec(
                name,
                (str(file), json.dumps(behaviours.get(name, {}))),
                f"fake {name}",
                is_own=name != serve.TRANSFORMERS,
            )
            for name in names
        ]

    monkeypatch.setattr(serve, "specs", specs)
    return behaviours


LITTLE = ["--clients", "1", "4", "--requests", "8", "--rounds", "2"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "IMAGES", 3)
    monkeypatch.setattr(serve, "MEMORY_REQUESTS", (6, 9))


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "serve.json"
    assert serve.main([*LITTLE, "--threads", "1", *options, "--out", str(out)]) == 0
    text = out.read_text()
    assert str(servers.ROOT) not in text and sys.prefix not in text
    return json.loads(text)


def row_of(report: dict[str, Any], what: str) -> dict[str, Any]:
    (found,) = [row for row in report["rows"] if what in row["what"]]
    return found


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_vlmfast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--recipes", "none", "--no-transformers", "--only", "throughput"]
    report = run(tmp_path, *own, "--clients", "1", "2", "--requests", "3", "--rounds", "1")
    assert report["command"].startswith("python benchmarks/serve.py --clients 1")
    assert {"date", "device", "environment", "dtype", "threads", "load_average"} <= set(report)
    (about,) = report["servers"].values()
    assert about["command"].startswith("vlmfast serve tiny --recipe none --device ")
    assert [(of["server"], of["clients"]) for of in report["loads"]] == [("none", 1), ("none", 2)]
    for of in report["loads"]:
        (sample,) = of["rounds"]
        assert sample["answers"] == 3 and 3 * 5 < sample["tokens"] < 3 * 64
        assert of["answers_per_s"]["median"] == pytest.approx(3 / sample["seconds"])
        assert 0 < of["ttft_ms"]["p50"] <= of["ttft_ms"]["p99"] < of["total_ms"]["p99"]
        assert 0 <= of["gap_ms"]["p50"] < of["total_ms"]["p50"] < 1e3 * sample["seconds"]
    one, two = (of["rounds"][0]["tokens"] for of in report["loads"])
    assert abs(one - two) <= 0.2 * one  # the same scenes
    assert row_of(report, "2 clients over 1")["median"] > 0
    assert "| none, 2 clients | " in capsys.readouterr().out


def test_memory_that_grows_is_reported(
    fakes: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MEMORY_REQUESTS", (20, 40))
    fakes["balanced"] = {"kept": 4_000_000}
    report = run(tmp_path, "--only", "memory", "--no-transformers")
    assert row_of(report, "`none`")["verdict"] == "ok"
    grown = row_of(report, "`balanced`")
    assert grown["verdict"] == "missed" and grown["median"] > 1.3
    assert row_of(report, "`balanced`")["what"].startswith("resident memory after 40 requests")


def test_a_stall_is_reported(fakes: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    fakes["balanced"] = {"stall": 1.0}
    report = run(tmp_path, "--only", "gap", "--no-transformers", "--rounds", "1")
    smooth, stalled = (row_of(report, f"`{name}`") for name in ("none", "balanced"))
    assert stalled["median"] > 10 and stalled["median"] > 2 * smooth["median"]


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"status": 503}, "throughput: ServerFailed: status 503: no"),
        ({"error": True}, "an error in a stream"),
        ({"usage": False}, "an answer without text or usage"),
        ({"pieces": 0}, "an answer without text or usage"),
    ],
)
def test_an_own_server_that_fails_ends_the_run(
    fakes: dict[str, dict[str, Any]], tmp_path: Path, behaviour: dict[str, Any], message: str
) -> None:
    fakes["none"] = behaviour
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, "--only", "throughput", "--recipes", "none", "--no-transformers")


def test_a_stream_that_ends_early_is_no_gap(
    fakes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    fakes["none"] = {"long": servers.BEFORE + 2, "sequential": True}
    with pytest.raises(SystemExit, match="ended before the other answer"):
        run(tmp_path, "--only", "gap", "--recipes", "none", "--no-transformers")


# --- requests and servers ------------------------------------------------------------------------


def images_of(bodies: list[bytes]) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
        for body in bodies
        for part in json.loads(body)["messages"][0]["content"]
        if part["type"] == "image_url"
    ]


def test_requests_have_the_same_scenes_and_other_images() -> None:
    scenes = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    requests = serve.Requests(scenes, "m")
    first, second = requests.bodies(3, 7), requests.bodies(3, 7)
    images = images_of(first + second)
    assert len({image.tobytes() for image in images}) == 6
    assert [image.getpixel((4, 4)) for image in images[:3]] == [
        image.getpixel((4, 4)) for image in images[3:]
    ]
    assert images[0].getpixel((4, 4)) != images[1].getpixel((4, 4))
    assert scenes[0].getpixel((0, 0)) == (255, 0, 0)
    (several,) = requests.bodies(1, 7, images=2)
    assert len(images_of([several])) == 2 and json.loads(several)["max_tokens"] == 7


def test_vllm_runs_the_same_recipes_in_its_own_environment() -> None:
    recipes = ["none", "hired:budget=0.2"]
    argv = ["--vllm", sys.executable, "--recipes", *recipes, "--dtype", "float32"]
    with_caches, without = (
        serve.vllm_specs(serve.parse([*argv, *more]), Path("exported"), "name")
        for more in ([], ["--no-caches"])
    )
    assert [spec.name for spec in with_caches] == ["vllm serve", "vllm serve, hired:budget=0.2"]
    stock, reduced = (spec.command for spec in with_caches)
    assert "--hf-overrides" not in stock
    override = json.loads(reduced[reduced.index("--hf-overrides") + 1])
    assert override == {"vlmfast_recipe": "hired:budget=0.2"}
    for spec in (*with_caches, *without):
        assert spec.python == sys.executable and not spec.is_own
        assert spec.command[spec.command.index("--served-model-name") + 1] == "name"
    assert all("--no-enable-prefix-caching" in spec.command for spec in without)
    assert not any("--no-enable-prefix-caching" in spec.command for spec in with_caches)
    ports = [spec.command[spec.command.index("--port") + 1] for spec in with_caches]
    assert len(set(ports)) == 2


def test_a_model_without_end(tmp_path: Path) -> None:
    folder = serve.endless(serve.TINY, tmp_path / "endless")
    names = {file.name for file in serve.TINY.iterdir()}
    assert {file.name for file in folder.iterdir()} == names
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["suppress_tokens"] == [2] and settings["eos_token_id"] == 2


# --- statistics ----------------------------------------------------------------------------------


def an_answer(text: str, begin: float, *times: float) -> Any:
    return servers.Answer(begin, list(times), times[-1] + 0.5, text, len(times))


def loads(seconds: list[float], texts: str) -> list[Any]:
    """One load for each round, with one answer for each text."""
    answers = [an_answer(text, 0.0, 1.0, 2.0) for text in texts]
    return [servers.Load(of, answers) for of in seconds]


def test_ratios_are_within_rounds() -> None:
    found = {
        ("none", 1): loads([10.0, 20.0, 40.0], "abcd"),
        ("none", 4): loads([5.0, 5.0, 40.0], "abcd"),
        (serve.TRANSFORMERS, 1): loads([10.0, 10.0, 10.0], "abcx"),
        (serve.TRANSFORMERS, 4): loads([10.0, 20.0, 10.0], "abcd"),
    }
    own, other = serve.scaling(found)
    assert own.ratios == [2.0, 4.0, 1.0] and own.bound == 1.7 and own.verdict == "ok"
    assert other.ratios == [1.0, 0.5, 1.0] and other.verdict == ""
    one, four = serve.against(found)
    assert one.ratios == [1.0, 0.5, 0.25] and one.verdict == "missed"
    assert four.ratios == [2.0, 4.0, 0.25] and four.verdict == "ok"
    assert [row.ratios for row in serve.equality(found)] == [[0.75] * 3, [1.0] * 3]
    # Of vLLM, with the server of the same recipe.
    recipes = found | {
        ("fast", 1): loads([5.0] * 3, "abcd"),
        ("vllm serve, fast", 1): loads([10.0] * 3, "abcx"),
    }
    (row,) = (row for row in serve.against(recipes) if "vllm" in row.what)
    assert row.what == "answers per second, `fast` over `vllm serve, fast`, 1 client"
    assert row.ratios == [2.0] * 3 and row.bound is None
    (row,) = (row for row in serve.equality(recipes) if "vllm" in row.what)
    assert row.ratios == [0.75] * 3
    # The control: answers of another recipe are not compared.
    assert not serve.equality({("balanced", c): of for (_, c), of in found.items()})


def test_summary() -> None:
    found = serve.summary("none", 4, loads([10.0, 20.0, 40.0], "abcd"))
    rates = [4 / 10, 4 / 20, 4 / 40]
    assert found["answers_per_s"]["median"] == statistics.median(rates)
    assert found["tokens_per_s"]["median"] == 2 * statistics.median(rates)
    assert found["ttft_ms"]["p99"] == 1000 and found["gap_ms"]["p50"] == 1000
    assert found["total_ms"]["p50"] == 2500
    assert found["rounds"][2] == {"seconds": 40.0, "answers": 4, "tokens": 8}


# --- inside vLLM ---------------------------------------------------------------------------------


def test_parts_inside_vllm_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, started = tmp_path / "fake.py", []
    file.write_text(FAKE)

    def servers_of(part: str, *given: Any) -> list[Any]:
        started.append(part)
        prompts = {inside.VLLM: 112, **({inside.EVS: 32} if part == "videos" else {})}
        prompts |= dict.fromkeys(map(inside.vllm_name, inside.RECIPES), 34)
        return [
            servers.Spec(
                name, (str(file), json.dumps({"pause": 0.002, "prompt": of})), f"fake {name}"
            )
            for name, of in prompts.items()
        ]

    monkeypatch.setattr(inside, "servers_of", servers_of)
    monkeypatch.setattr(inside, "saved", lambda *given: {"model": "fake", "visual_tokens": 100})
    monkeypatch.setattr(inside, "version", lambda python: "0")
    monkeypatch.setattr(inside, "SIDES", dict.fromkeys(inside.NAMES, 32))
    monkeypatch.setattr(inside, "FRAMES", 2)
    python = tmp_path / "python"
    python.touch()
    common = ["--vllm", str(python), "--requests", "3", "--rounds", "1", "--only"]
    one = run(tmp_path, *common, "videos")
    both = run(tmp_path, *common, "videos", "tiny")
    assert started == ["videos", "tiny"] and list(both["parts"]) == started
    assert both["parts"]["videos"] == one["parts"]["videos"]
    videos, tiny = both["parts"].values()
    ours = {inside.vllm_name(recipe): 22 for recipe in inside.RECIPES}
    assert videos["kept"] == {inside.VLLM: 100, inside.EVS: 20, **ours}
    assert tiny["kept"] == {inside.VLLM: 100, **ours}
    answers = {(of["server"], of["clients"]): of["rounds"][0]["answers"] for of in tiny["loads"]}
    assert answers == {(name, n): max(3, 2 * n) for name in tiny["kept"] for n in (1, 4)}
    assert len(tiny["rows"]) == 4 and len(videos["rows"]) == 6
    shown = capsys.readouterr().out
    assert f"answers per second, `{inside.EVS}` over `{inside.VLLM}`, 4 clients: " in shown
    with pytest.raises(SystemExit, match="was measured with"):
        run(tmp_path, *common, "tiny", "--clients", "1")


def test_only_answers_under_load_are_bounded() -> None:
    name = inside.vllm_name(inside.RECIPES[0])
    found = {
        (server, clients): loads([10.0 / factor, 20.0 / factor], "ab")
        for server, factor in ((inside.VLLM, 1.0), (name, 1.25))
        for clients in (1, 16)
    }
    one, many = inside.rows("images", found)
    assert one.ratios == many.ratios == [1.25, 1.25]
    assert one.verdict == "" and many.verdict == "missed"
    assert [row.verdict for row in inside.rows("videos", found)] == ["", ""]


def test_vllm_itself_has_no_plug_in() -> None:
    args = serve.parse(["--vllm", sys.executable, "--only", "videos"])
    stock, pruned, *ours = inside.servers_of("videos", args, Path("folder"), "model")
    for spec in (stock, pruned):
        assert spec.variables["VLLM_PLUGINS"] == "" and "--hf-overrides" not in spec.command
    rate = pruned.command[pruned.command.index("--video-pruning-rate") + 1]
    assert float(rate) == 1 - inside.SHARE and "--video-pruning-rate" not in stock.command
    for spec, recipe in zip(ours, inside.RECIPES, strict=True):
        assert "VLLM_PLUGINS" not in spec.variables and "--video-pruning-rate" not in spec.command
        assert json.dumps({"vlmfast_recipe": recipe}) in spec.command
    assert len(inside.servers_of("images", args, Path("folder"), "model")) == 1 + len(ours)


@pytest.mark.parametrize("only", [["images"], ["images", "gap", "--vllm", sys.executable]])
def test_parts_inside_vllm_stand_alone(only: list[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["--only", *only])


def test_videos_of_requests_differ() -> None:
    requests = servers.Requests([Image.new("RGB", (32, 32), "red")], "m", 3, ignore_eos=True)
    seen = set()
    for body in requests.bodies(2, 7):
        content = json.loads(body)["messages"][0]["content"]
        assert json.loads(body)["ignore_eos"] is True
        data = base64.b64decode(content[0]["video_url"]["url"].partition(",")[2])
        frames = [np.asarray(frame) for frame in load_video(data).frames]
        assert len(frames) == 3 and len({frame.tobytes() for frame in frames}) == 3
        seen.add(frames[0].tobytes())
    assert len(seen) == 2


@pytest.mark.slow
def test_flops_of_the_small_qwen() -> None:
    """Those of its comment, by PyTorch, whose attention computes what a causal one leaves out."""
    model, processor = shapes.small_qwen(torch.float32, 896, 336)
    model.set_attn_implementation("eager")
    vlm, image = VLM(model, processor), Image.new("RGB", (896, 896))
    with FlopCounterMode(display=False) as counter:
        model(**harness.padded(vlm, "What?", [image]), logits_to_keep=1)
    flops = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    name = f"{type(model).__name__}.model"
    assert flops[f"{name}.visual"] == pytest.approx(112.3e9, rel=0.01)
    assert flops[f"{name}.language_model"] == pytest.approx(119.6e9 + 10.3e9, rel=0.01)
