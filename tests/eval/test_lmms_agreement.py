"""``vlmfast eval --mode lmms-eval`` and lmms-eval with the plug-in: the same answers and scores.

``make test-lmms`` runs this with the released package. The tasks are those of lmms-eval, unchanged
except for their data, which are drawn in the schemas of MMMU and Video-MME. With the environment
variable ``LMMS_REPORT``, the counts are written to that file.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmms_eval", reason="make test-lmms")

from lmms_eval.tasks.mmmu import utils as mmmu_utils
from lmms_eval.tasks.videomme import utils as videomme_utils

from support.eval_data import interleaved, many_video_questions, write_many_videos, write_rows
from vlmfast import VLM
from vlmfast.core.env import environment
from vlmfast.core.recipe import Recipe
from vlmfast.eval.commands import add_eval, run_eval
from vlmfast.eval.mmmu import MMMU
from vlmfast.eval.tasks import find_task

RECIPES = ["none", "hired:0.3;positions=keep"]
FRAMES = 3  # of each video; their files have four
DOCUMENTS = 60  # of each task
DIRECTLY = "Answer with the option's letter from the given choices directly."
TASKS = {"mmmu": "mmmu_val", "video-mme": "videomme", "video-mme-subtitles": "videomme_w_subtitle"}
TASK = """
include: {file}
task: {name}
dataset_path: parquet
dataset_kwargs:
  data_files:
    {split}: {rows}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Rows, videos and lmms-eval's tasks on them; videos are where lmms-eval looks for them.

    The model is the shipped one in float32: in bfloat16, a batch of another size may round to
    another token where two are almost as likely.
    """
    folder = tmp_path_factory.mktemp("data")
    vlm = VLM.from_pretrained("tiny", device="cpu", dtype="float32")
    vlm.model.save_pretrained(folder / "model")
    vlm.processor.save_pretrained(folder / "model")
    write_rows(folder / "mmmu" / "validation.parquet", interleaved(DOCUMENTS))
    write_many_videos(folder / "hf" / "videomme", DOCUMENTS // 3)
    own = {
        "mmmu_val": (mmmu_utils, "validation", folder / "mmmu" / "validation.parquet"),
        **dict.fromkeys(
            ("videomme", "videomme_w_subtitle"),
            (videomme_utils, "test", next((folder / "hf").rglob("*.parquet"))),
        ),
    }
    for name, (utils, split, rows) in own.items():
        file = Path(utils.__file__).with_name(f"{name}.yaml")
        text = TASK.format(file=file, name=f"{name}_drawn", split=split, rows=rows)
        (folder / f"{name}_drawn.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Counts of the tests by kind, written at the end if a file is named."""
    found: dict[str, list[dict[str, Any]]] = {"agreement": [], "control": []}
    yield found
    if file := os.environ.get("LMMS_REPORT"):
        head = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "make test-lmms",
            "environment": environment(),
            "lmms_eval": version("lmms_eval"),
            "model": "tiny, float32",
        }
        Path(file).write_text(json.dumps(head | found, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="module", params=RECIPES)
def lmms(request, data) -> tuple[str, dict[str, list[dict]]]:
    """The recipe, and lmms-eval's samples of each task in the order of its documents."""
    out = data / request.param.partition(":")[0]
    args = f"pretrained={data / 'model'},device=cpu,num_frames={FRAMES},recipe={request.param}"
    words = ["--model", "vlmfast", "--model_args", args, "--batch_size", "4", "--log_samples"]
    words += ["--tasks", ",".join(f"{name}_drawn" for name in TASKS.values())]
    words += ["--include_path", str(data), "--output_path", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "lmms_eval", *words],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(data / "hf"),
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task, name in TASKS.items():
        (file,) = out.rglob(f"*_samples_{name}_drawn.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[task] = sorted(lines, key=lambda line: line["doc_id"])
    return str(Recipe.parse(request.param.replace(";", ","))), found


@pytest.fixture(scope="module")
def ours(data) -> dict[tuple[str, str], list[dict]]:
    """The samples of ``vlmfast eval`` by task and recipe, in the order of the documents."""
    parser = ArgumentParser()
    add_eval(parser)
    common = ["--mode", "lmms-eval", "--recipe", RECIPES[1].replace(";", ","), "--device", "cpu"]
    common += ["--batch-size", "3", "--out", str(data / "out"), "--model", str(data / "model")]
    films = ["--data", str(data / "hf" / "videomme"), "--num-frames", str(FRAMES)]
    for words in (
        ["mmmu", "--data", str(data / "mmmu")],
        ["video-mme", *films],
        ["video-mme", *films, "--subtitles"],
    ):
        assert run_eval(parser.parse_args([*words, *common])) == 0
    found = {}
    for task in TASKS:
        for folder in (data / "out" / task).iterdir():
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            assert meta["options"]["mode"] == "lmms-eval-0.7.3"
            lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
            by_id = {sample["doc_id"]: sample for sample in map(json.loads, lines)}
            found[task, meta["recipe"]] = [by_id[name] for name in sorted(by_id, key=number_of)]
    return found


def number_of(name: str) -> tuple[int, ...]:
    """The position of a document in its data set."""
    return tuple(int(part) for part in name.rpartition("_")[2].split("-"))


def differences(ours: list[str], theirs: list[str]) -> int:
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_answers_and_scores_agree(lmms, ours, report, task):
    recipe, theirs = lmms
    samples = ours[task, recipe]
    assert len(samples) == len(theirs[task]) == DOCUMENTS
    assert not any("error" in sample for sample in samples)
    answers = [sample["resps"][0][0] for sample in samples]
    differing = differences(answers, [line["filtered_resps"] for line in theirs[task]])
    row = {"task": task, "recipe": recipe, "documents": DOCUMENTS, "differing": differing}
    row |= {
        "distinct": len(set(answers)),
        "score": sum(sample["score"] for sample in samples) / DOCUMENTS,
        "guessed": sum(not sample["answered"] for sample in samples),
    }
    report["agreement"].append(row)
    assert not differing
    guesses = []
    for sample, line in zip(samples, theirs[task], strict=True):
        if task == "mmmu":
            found = line["mmmu_acc"]
            assert found["id"] == sample["doc_id"]
            score = mmmu_utils.evaluate_mmmu([found])[1]["acc"]
            if not sample["answered"]:  # both guess, each by its own random numbers
                guesses.append(sample["doc_id"])
                continue
            (parsed,) = found["parsed_pred"]
            if isinstance(parsed, list):
                assert sorted(map(str, parsed)) == sorted(map(str, sample["filtered_resps"]))
            else:
                assert [parsed] == sample["filtered_resps"]
        else:
            found = line["videomme_perception_score"]
            assert found["question_id"] == sample["doc_id"]
            assert found["pred_answer"] == sample["filtered_resps"][0]
            score = found["score"]
        assert score == sample["score"], sample["doc_id"]
    assert len(guesses) < DOCUMENTS / 2
    # Answers that are all alike would not show much.
    assert row["distinct"] >= 4


def test_messages_are_those_of_lmms_eval(data):
    """Each entry, also of the test split, whose task has no messages of its own."""
    kwargs = {
        "prompt_type": "format",
        "multiple_choice_prompt": DIRECTLY,
        "open_ended_prompt": "Answer the question using a single word or phrase.",
    }
    task = MMMU(data / "mmmu", mode="lmms-eval")
    rows = interleaved(DOCUMENTS)
    for doc, row in zip(sorted(task.docs(None, 0), key=lambda d: d.seed), rows, strict=True):
        ((turn,),) = task.media(doc).values()
        images = {key: Loaded(key) for key in row if key.startswith("image_") and row[key]}
        (wanted,) = mmmu_utils.mmmu_doc_to_messages(row | images, kwargs)
        names = [f"image_{n}" for n in sorted(int(i[6:]) for i in images)]
        numbers = iter(names)
        mine = [
            {"type": "image", "url": next(numbers)} if part["type"] == "image" else part
            for part in turn["content"]
        ]
        assert mine == [
            part | {"url": part["url"].name} if part["type"] == "image" else part
            for part in wanted["content"]
        ]
    write_rows(data / "hidden" / "test.parquet", [row | {"answer": "?"} for row in rows[:10]])
    hidden = MMMU(data / "hidden", split="test", mode="lmms-eval")
    mmmu_utils.config["metadata"]["interleaved_format"] = False
    for doc, row in zip(hidden.docs(None, 0), rows, strict=False):
        assert doc.question == mmmu_utils.mmmu_doc_to_text(row)
        assert list(hidden.media(doc)) == ["images"]
    assert hidden.generation["question"]["max_new_tokens"] == 512


class Loaded:
    """An image of a row, by the name of its column."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, mode: str) -> Loaded:
        return self


def test_video_prompts_are_those_of_lmms_eval(data, monkeypatch):
    monkeypatch.setattr(videomme_utils, "base_cache_dir", str(data / "hf"))
    subtitles = {"frame_num": 32, "post_prompt": "unused"}
    films = data / "hf" / "videomme"
    for on in (False, True):
        task = find_task("video-mme", data=films, mode="lmms-eval", subtitles=on, num_frames=FRAMES)
        rows = {row["question_id"]: row for row in many_video_questions(DOCUMENTS // 3)}
        docs = task.docs(None, 0)
        for doc in random.Random(0).sample(docs, 12):
            row, media = rows[doc.doc_id], task.media(doc)
            text = (
                videomme_utils.videomme_doc_to_text_subtitle(row, subtitles)
                if on
                else videomme_utils.videomme_doc_to_text(row, {"post_prompt": f"\n{DIRECTLY}"})
            )
            assert media["question"] == text
            assert str(media["video"]) == videomme_utils.videomme_doc_to_visual(row)[0]
