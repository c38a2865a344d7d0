"""``vlmfast serve --engine vllm`` as a process, through the client of OpenAI: ``make test-vllm``.

The tests of clients in ``tests/serve`` run against the same engine with
``VLMFAST_SERVE_ENGINE=vllm``.
"""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm builds its environment")
openai = pytest.importorskip("openai")

import random_models  # noqa: E402

from support import tiny_models  # noqa: E402
from vlmfast import VLM, Recipe  # noqa: E402
from vlmfast.eval.axes import with_field  # noqa: E402
from vlmfast.scenes.files import video as clip  # noqa: E402

RECIPE, NEW_TOKENS = "hired:budget=0.3", 12
ALIASES = {"full": "none", "asks": "mmtok:budget=0.3"}
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SIZES = ((128, 96), (90, 128), (64, 64))
QUESTION = "How many shapes are in the picture?"


@dataclass
class Served:
    """A server, its client, and the same model in this process."""

    client: openai.OpenAI
    vlm: VLM
    process: subprocess.Popen[str]

    def ask(self, *media: dict[str, Any], model: str = "qwen", **body: Any) -> Any:
        content = [*media, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        fields = {key: body.pop(key) for key in tuple(body) if key not in ("stream",)}
        given = {"max_tokens": NEW_TOKENS, "temperature": 0} | fields
        extra = {key: given.pop(key) for key in tuple(given) if key not in KNOWN}
        return self.client.chat.completions.create(
            model=model, messages=messages, extra_body=extra, **given, **body
        )

    def get(self, path: str) -> str:
        address = str(self.client.base_url).removesuffix("/v1/")
        return urllib.request.urlopen(f"{address}{path}").read().decode()


KNOWN = ("max_tokens", "temperature", "stop", "stream_options", "logprobs", "top_logprobs")


def image(number: int) -> Any:
    return tiny_models.make_image(*SIZES[number], seed=number)


def sent(number: int) -> dict[str, Any]:
    file = io.BytesIO()
    image(number).save(file, "PNG")
    return part("image", "image/png", file.getvalue())


def part(kind: str, form: str, data: bytes) -> dict[str, Any]:
    url = f"data:{form};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@contextmanager
def serving(folder: Path, recipe: str, aliases: dict[str, str], *options: str) -> Iterator[Served]:
    """A server of the model in ``folder``."""
    command = [sys.executable, "-m", "vlmfast", "serve", str(folder / "model"), "--port", "0"]
    command += ["--engine", "vllm", "--recipe", recipe, "--name", "qwen", "--dtype", "float32"]
    for name, of in aliases.items():
        command += ["--alias", f"{name}={of}"]
    command += ["--", "--enforce-eager", "--max-model-len", "2048", *options]
    log = folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | VARIABLES,
        )
    try:
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert address, log.read_text()[-6000:]
        assert line.startswith("qwen is served at")
        given = {"dtype": "float32", "device": "cpu", "prefix_cache_bytes": 0}
        vlm = VLM.from_pretrained(folder / "model", **given)
        with openai.OpenAI(base_url=f"{address[0]}/v1", api_key="-", max_retries=0) as client:
            yield Served(client, vlm, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()[-6000:]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("qwen")
    random_models.build_qwen("qwen3_vl", folder / "model")
    # Normalization is that of images: tiny processors differ.
    options = ("--block-size", "32", "--no-mm-device-do-normalize")
    with serving(folder, RECIPE, ALIASES, *options) as found:
        yield found


def test_models_and_health(served: Served) -> None:
    names = ["qwen", *ALIASES]
    assert [model.id for model in served.client.models.list()] == names
    recipes = [served.client.models.retrieve(name).recipe for name in names]
    assert recipes == [RECIPE, *ALIASES.values()]
    assert '"ok"' in served.get("/health") and '"ready"' in served.get("/ready")


@pytest.mark.parametrize(
    ("body", "recipe"),
    [
        ({}, RECIPE),
        ({"recipe": "divprune:budget=0.2"}, "divprune:budget=0.2"),
        ({"recipe": "downsample:budget=0.5+visionzip:budget=0.5"}, None),
        ({"recipe": "hired:budget=0.3,positions=compact"}, None),
        ({"model": "asks"}, ALIASES["asks"]),
        ({"model": "full"}, "none"),
        ({"model": "full", "recipe": "hired:budget=0.5"}, "hired:budget=0.5"),
    ],
)
def test_answers_and_usage_are_those_of_ask(
    served: Served, body: dict[str, Any], recipe: str | None
) -> None:
    recipe = body["recipe"] if recipe is None else recipe
    changed = 0
    for number in range(len(SIZES)):
        expected = served.vlm.ask(
            QUESTION, image(number), recipe=recipe, max_new_tokens=NEW_TOKENS, top_logprobs=2
        )
        found = served.ask(sent(number), logprobs=True, top_logprobs=2, **body)
        (choice,) = found.choices
        assert choice.message.content == expected.text
        assert choice.finish_reason == expected.finish_reason
        steps = [step.logprob for step in choice.logprobs.content]
        assert steps == pytest.approx([step.logprob for step in expected.logprobs], abs=1e-3)
        usage, stats = found.usage, expected.stats
        assert usage.completion_tokens == len(expected.token_ids)
        assert usage.vlmfast["recipe"] == expected.canonical_recipe
        assert usage.vlmfast["visual_tokens_in"] == stats.visual_tokens_in
        assert usage.vlmfast["visual_tokens_kept"] == stats.visual_tokens_kept
        cached = usage.prompt_tokens_details.cached_tokens
        assert usage.vlmfast["prompt_tokens_fed"] + cached == stats.prompt_tokens
        full = served.vlm.ask(QUESTION, image(number), max_new_tokens=NEW_TOKENS)
        assert usage.prompt_tokens == full.stats.prompt_tokens
        changed += full.token_ids != expected.token_ids
    assert bool(changed) == (recipe != "none")  # the control


def test_streams_end_with_usage(served: Served) -> None:
    plain = served.ask(sent(0))
    *chunks, last = served.ask(sent(0), stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == plain.choices[0].message.content
    assert sum(map(bool, pieces)) > 2
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks) and not last.choices
    for name in ("recipe", "visual_tokens_in", "visual_tokens_kept"):
        assert last.usage.vlmfast[name] == plain.usage.vlmfast[name]
    assert last.usage.completion_tokens == plain.usage.completion_tokens


def test_a_stop_string_ends_an_answer(served: Served) -> None:
    whole = served.ask(sent(1)).choices[0].message.content
    stop = whole[len(whole) // 2]
    found = served.ask(sent(1), stop=[stop]).choices[0]
    assert found.message.content == whole.partition(stop)[0].strip() != whole
    assert found.finish_reason == "stop"


def test_responses(served: Served) -> None:
    given = [{"type": "input_image", "image_url": sent(0)["image_url"]["url"], "detail": "auto"}]
    content = [*given, {"type": "input_text", "text": QUESTION}]
    found = served.client.responses.create(
        model="qwen",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=NEW_TOKENS,
    )
    plain = served.ask(sent(0))
    assert found.output_text == plain.choices[0].message.content
    kept = plain.usage.vlmfast["visual_tokens_kept"]
    assert found.usage.vlmfast["visual_tokens_kept"] == kept


@pytest.mark.parametrize("recipe", ["none", "hired:budget=0.4", "divprune:budget=0.3"])
def test_videos(served: Served, recipe: str) -> None:
    data, _ = clip()
    found = served.ask(part("video", "video/mp4", data), recipe=recipe, num_frames=4)
    expected = served.vlm.ask(
        QUESTION, video=data, num_frames=4, recipe=recipe, max_new_tokens=NEW_TOKENS
    )
    assert found.choices[0].message.content == expected.text
    assert found.usage.vlmfast["visual_tokens_in"] == expected.stats.visual_tokens_in
    assert found.usage.vlmfast["visual_tokens_kept"] == expected.stats.visual_tokens_kept
    other = served.ask(part("video", "video/mp4", data), recipe=recipe, num_frames=2)
    assert other.usage.vlmfast["visual_tokens_in"] < expected.stats.visual_tokens_in


def test_text_without_images(served: Served) -> None:
    expected = served.vlm.ask(QUESTION, max_new_tokens=NEW_TOKENS)
    found = served.ask()
    assert found.choices[0].message.content == expected.text
    assert found.usage.vlmfast["visual_tokens_in"] == 0


def test_answers_in_a_format(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}
    found = served.ask(sent(0), response_format=form, max_tokens=60).choices[0].message.content
    assert re.fullmatch(r'\{ ?"color": ?"(red|green)" ?\}', found)


@pytest.mark.parametrize(
    ("body", "reason", "param"),
    [
        ({"recipe": "hird:0.2"}, "did you mean 'hired", "recipe"),
        ({"recipe": "snapkv:0.5"}, "snapkv acts in the cache step", "recipe"),
        ({"recipe": "/etc/passwd.yaml"}, "cannot name a recipe file", "recipe"),
        ({"trace": True}, "vLLM does not tell which tokens are kept", "trace"),
        *(
            ({field: value}, f"{field} is not supported", field)
            for field, value in {
                "mm_processor_kwargs": {"max_pixels": 10**9},
                "media_io_kwargs": {"video": {"num_frames": 9}},
                "vllm_xargs": {"a": 1},
                "chat_template": "x",
                "add_special_tokens": True,
                "return_token_ids": True,
                "kv_transfer_params": {},
            }.items()
        ),
    ],
)
def test_refusals(served: Served, body: dict[str, Any], reason: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as caught:
        served.ask(sent(0), **body)
    error = caught.value.body
    assert error["param"] == param and error["type"] == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="this server has qwen, full, asks"):
        served.ask(sent(0), model="other")


def test_prompts_beyond_the_model_are_refused(served: Served) -> None:
    content = "word " * 3000
    messages = [{"role": "user", "content": content}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.chat.completions.create(model="qwen", messages=messages, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    assert served.ask(sent(0)).choices


def test_clients_that_leave_end_their_requests(served: Served) -> None:
    with served.ask(sent(0), stream=True, max_tokens=1500) as stream:
        next(iter(stream))
    assert served.ask(sent(0)).choices
    for _ in range(100):
        running = re.search(
            r"^vllm:num_requests_running\{.*\} (\S+)$", served.get("/metrics"), re.M
        )
        if float(running[1]) == 0:
            break
    assert float(running[1]) == 0


def test_metrics_count_what_is_kept(served: Served) -> None:
    def counted(stage: str) -> float:
        found = re.search(
            rf'^vlmfast:visual_tokens_total\{{.*stage="{stage}".*\}} (\S+)$',
            served.get("/metrics"),
            re.M,
        )
        return float(found[1]) if found else 0.0

    before = counted("input"), counted("hired")
    own = served.ask(sent(2)).usage.vlmfast
    after = counted("input"), counted("hired")
    kept = own["visual_tokens_kept"]["hired"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [own["visual_tokens_in"], kept]
    assert str(Recipe.parse(RECIPE)) == own["recipe"]


def test_internvl(tmp_path: Path) -> None:
    """Images in crops; a video under ``none``."""
    random_models.build_internvl(tmp_path / "model")
    data, _ = clip()
    with serving(tmp_path, "none", {}) as served:
        changed = 0
        for recipe in ("none", "hired:budget=0.4", "mmtok:budget=0.4"):
            run = with_field(Recipe.parse(recipe), "positions", "compact")
            for number in range(len(SIZES)):
                given = {"recipe": run, "max_new_tokens": NEW_TOKENS}
                expected = served.vlm.ask(QUESTION, image(number), **given)
                found = served.ask(sent(number), recipe=recipe)
                assert found.choices[0].message.content == expected.text
                own, stats = found.usage.vlmfast, expected.stats
                assert own["visual_tokens_in"] == stats.visual_tokens_in
                assert own["visual_tokens_kept"] == stats.visual_tokens_kept
                full = served.vlm.ask(QUESTION, image(number), max_new_tokens=NEW_TOKENS)
                changed += full.token_ids != expected.token_ids
        assert changed > len(SIZES)  # the control
        film = part("video", "video/mp4", data)
        found = served.ask(film, num_frames=3)
        expected = served.vlm.ask(QUESTION, video=data, num_frames=3, max_new_tokens=NEW_TOKENS)
        assert found.choices[0].message.content == expected.text
        assert found.usage.vlmfast["visual_tokens_in"] == expected.stats.visual_tokens_in
        with pytest.raises(openai.BadRequestError, match="only images of this model"):
            served.ask(film, recipe="hired:budget=0.4", num_frames=3)
