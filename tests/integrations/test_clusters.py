"""Ray Data and Ray Serve with real actors: ``make test-ray``."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="make test-ray builds its environment")
pytest.importorskip("ray.serve")

from support.paths import ROOT  # noqa: E402
from vlmfast import VLM  # noqa: E402
from vlmfast.integrations.ray import Answerer  # noqa: E402
from vlmfast.scenes.examples import EVAL_SEED_START, image_example  # noqa: E402

ROWS, RECIPE, PATIENCE, STARTS = 48, "hired:budget=0.3", 300, 6
QUESTIONS = ("What is in the bottom left?", "Describe the image.")


class Noted(Answerer):
    """Leaves a file with its process id, so that a test can kill it while it works."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)

    def __call__(self, batch: Any) -> Any:
        (self.folder / f"{os.getpid()}.began").touch()
        found = super().__call__(batch)
        (self.folder / f"{os.getpid()}.{time.monotonic_ns()}").touch()
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Workers of a busy machine take longer to start than Ray's defaults allow.
    slow = {"worker_register_timeout_seconds": 400, "agent_register_timeout_ms": 300_000}
    options = {
        "num_cpus": 4,
        "include_dashboard": False,
        "logging_level": "error",
        "object_store_memory": 150 << 20,
        "_system_config": slow,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}},
    }
    for left in range(STARTS - 1, -1, -1):
        try:
            ray.init(**options)
            break
        except Exception:  # Ray waits 30 seconds for its own processes, and raises this class
            ray.shutdown()
            if not left:
                raise
    yield ray
    ray.shutdown()


def _path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "tests")])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, paths = tmp_path_factory.mktemp("images"), []
    for number in range(4):
        paths.append(str(folder / f"{number}.png"))
        image_example(EVAL_SEED_START + number).image.convert("RGB").save(paths[-1])
    return paths


def rows_of(images: list[str]) -> list[dict[str, Any]]:
    rows = [
        {"id": i, "image": images[i % len(images)], "question": QUESTIONS[i % 2]}
        for i in range(ROWS)
    ]
    rows[5]["image"] = None
    rows[9]["image"] = str(Path(images[0]).with_name("missing.png"))
    return rows


def test_all_rows_once_although_an_actor_is_killed(
    cluster: Any, images: list[str], tmp_path: Path
) -> None:
    import threading

    killed: list[int] = []

    def kill() -> None:
        """Kill the first actor that has begun a batch."""
        while not killed:
            began = sorted(tmp_path.glob("*.began"))
            for file in began[:1]:
                killed.append(int(file.stem))
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.005)

    rows = rows_of(images)
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    found = (
        cluster.data.from_items(rows, override_num_blocks=8)
        .map_batches(
            Noted,
            fn_constructor_kwargs={
                "folder": str(tmp_path),
                "recipe": RECIPE,
                "threads": 1,
                "dtype": "float32",
                "max_new_tokens": 12,
            },
            batch_size=6,
            compute=cluster.data.ActorPoolStrategy(size=2),
            num_cpus=1,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .take_all()
    )
    thread.join(PATIENCE)
    assert sorted(row["id"] for row in found) == list(range(ROWS))
    survivors = {int(file.stem) for file in tmp_path.glob("*.began")}
    assert killed and len(survivors) >= 2
    by_id = {row["id"]: row for row in found}
    assert "no image" in by_id[5]["error"] and by_id[5]["answer"] is None
    assert "missing.png" in by_id[9]["error"]
    vlm = VLM.from_pretrained("tiny", dtype="float32", device="cpu")
    for i in (0, 1, 2, 3, 6):
        row = rows[i]
        answer = vlm.ask(row["question"], images=row["image"], recipe=RECIPE, max_new_tokens=12)
        assert by_id[i]["answer"] == answer.text and by_id[i]["error"] is None


def test_served_app_streams_an_answer(cluster: Any, images: list[str]) -> None:
    import base64

    import httpx2
    from ray import serve

    spec = importlib.util.spec_from_file_location("ray_serve", ROOT / "examples" / "ray_serve.py")
    example = sys.modules["ray_serve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # By value: the replica's process does not know this module.
    cluster.cloudpickle.register_pickle_by_value(example)
    port = 18_000 + os.getpid() % 1000
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(example.deployment(cpus=0.5).bind())
    image = base64.b64encode(Path(images[0]).read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": QUESTIONS[1]},
    ]
    body = {
        "model": "tiny",
        "recipe": RECIPE,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    with httpx2.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False
    ) as client:
        deadline = time.monotonic() + PATIENCE
        while client.get("/ready").status_code != 200:  # while the model is loading
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    serve.shutdown()
    assert lines[-1] == "[DONE]"
    pieces = [
        choice["delta"].get("content") or ""
        for line in lines[:-1]
        for choice in json.loads(line)["choices"]
    ]
    assert sum(map(bool, pieces)) > 3
    vlm = VLM.from_pretrained("tiny", device="cpu")
    answer = vlm.ask(QUESTIONS[1], images=images[0], recipe=RECIPE, max_new_tokens=24)
    assert "".join(pieces).strip() == answer.text.strip()
