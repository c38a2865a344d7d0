"""``vllm serve`` with the plug-in answers the client of OpenAI as `VLM.ask`: ``make test-vllm``."""

from __future__ import annotations

import base64
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm builds its environment")
openai = pytest.importorskip("openai")

from vlmfast import VLM, Recipe  # noqa: E402
from vlmfast.eval.axes import with_field  # noqa: E402
from vlmfast.integrations.vllm import export  # noqa: E402
from vlmfast.scenes.examples import EVAL_SEED_START, image_example  # noqa: E402

RECIPE, NEW_TOKENS = "hired:budget=0.2", 12
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def server(folder: Path, log: Path) -> Iterator[openai.OpenAI]:
    """A client of a server under the recipe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", port]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--max-model-len", "2048"]
    command += ["--dtype", "float32", "--enforce-eager"]
    command += ["--hf-overrides", f'{{"vlmfast_recipe": "{RECIPE}"}}']
    command += ["--trust-request-mm-kwargs"]
    with log.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=out,
            env=os.environ | VARIABLES,
        )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        with client:
            end = time.monotonic() + 400
            while not listening(client):
                assert running.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(1)
            yield client
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def listening(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.APIConnectionError:
        return False
    return True


def test_answers_are_those_of_ask(tmp_path: Path) -> None:
    export("tiny", tmp_path / "tiny")
    vlm = VLM.from_pretrained(tmp_path / "tiny", dtype="float32", device="cpu")
    with server(tmp_path / "tiny", tmp_path / "log") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        for number in range(5):
            example = image_example(EVAL_SEED_START + number)
            question, image = example.qa[0].question, example.image.convert("RGB")
            full = vlm.ask(question, image, max_new_tokens=1)
            for recipe in (None, "divprune:0.4", "mmtok:0.3", "none"):
                found = asked(client, question, image, recipe)
                # vLLM counts positions itself, without gaps.
                renumbered = with_field(Recipe.of(recipe or RECIPE), "positions", "compact")
                answer = vlm.ask(question, image, recipe=renumbered, max_new_tokens=NEW_TOKENS)
                assert found.choices[0].message.content.strip() == answer.text
                (kept,) = answer.stats.visual_tokens_kept.values() or [full.stats.visual_tokens_in]
                dropped = full.stats.visual_tokens_in - kept
                assert found.usage.prompt_tokens == full.stats.prompt_tokens - dropped
        with pytest.raises(openai.BadRequestError, match="snapkv acts in the cache step"):
            asked(client, question, image, "snapkv:0.5")


def asked(client: openai.OpenAI, question: str, image: Any, recipe: str | None) -> Any:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    data = base64.b64encode(encoded.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    kwargs = {"mm_processor_kwargs": {"vlmfast_recipe": recipe}} if recipe else {}
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=NEW_TOKENS,
        extra_body=kwargs,
    )
