"""vlmfast inside the released lmms-eval: ``make test-lmms`` runs this in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmms_eval", reason="make test-lmms")

from lmms_eval import models
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages

from vlmfast import VLM
from vlmfast.errors import MediaError, RecipeError, VLMFastError
from vlmfast.eval.lmms import VLMFast, chat_of, generation_of
from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

TASK = """
task: drawn_scenes
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.json
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_messages: !function utils.messages
doc_to_target: answer
process_results: !function utils.results
metric_list:
  - metric: right
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  max_new_tokens: 8
  temperature: 0
  do_sample: false
metadata:
  - version: 0.0
"""
UTILS = """
from vlmfast.scenes.examples import image_example


def visual(doc):
    return [image_example(doc["seed"]).image]


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def messages(doc, lmms_eval_specific_kwargs=None):
    content = [{"type": "image", "url": visual(doc)[0]}, {"type": "text", "text": doc["question"]}]
    return [{"role": "user", "content": content}]


def results(doc, results):
    return {"right": float(results[0].strip().lower() == doc["answer"].lower())}
"""


def questions() -> list[dict]:
    rows = []
    for seed in range(EVAL_SEED_START, EVAL_SEED_START + 3):
        rows += [
            {"seed": seed, "question": qa.question, "answer": qa.answer}
            for qa in image_example(seed).qa[:4]
        ]
    return rows


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu")


@pytest.mark.parametrize("recipe", ["none", "hired:0.3;positions=keep"])
def test_task_end_to_end(tmp_path, tiny, recipe):
    """The released program, offline: its answers and score equal ours."""
    rows = questions()
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "drawn_scenes.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "utils.py").write_text(UTILS)
    words = ["--model", "vlmfast", "--model_args", f"pretrained=tiny,device=cpu,recipe={recipe}"]
    words += ["--tasks", "drawn_scenes", "--include_path", str(tmp_path), "--batch_size", "1"]
    words += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "lmms_eval", *words],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("*_results.json")
    found = json.loads(file.read_text())
    answers = [
        tiny.ask(
            row["question"],
            image_example(row["seed"]).image,
            recipe=recipe.replace(";", ","),
            do_sample=False,
            max_new_tokens=8,
        ).text
        for row in rows
    ]
    right = [a.strip().lower() == r["answer"].lower() for a, r in zip(answers, rows, strict=True)]
    assert 0 < sum(right) < len(rows)
    assert found["results"]["drawn_scenes"]["right,none"] == sum(right) / len(rows)
    (samples,) = (tmp_path / "out").rglob("*_samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    assert [line["filtered_resps"] for line in lines] == answers
    assert found["throughput"]["total_gen_tokens"] > len(rows)


def test_entry_point_is_found():
    assert models.get_model("vlmfast") is VLMFast


def instance(messages, **arguments) -> Instance:
    """A request as lmms-eval makes them for chat models: six fields."""
    args = ("the text", lambda doc: messages(doc), arguments, 0, "a task", "test")
    return Instance("generate_until", args, 0, {"task": "a task", "doc_id": 0, "repeats": 1})


def test_images_are_placed_where_the_message_has_them(tiny, monkeypatch):
    model = VLMFast("tiny", device="cpu", num_frames=2)
    model.task_dict = {"a task": {"test": [{"seed": EVAL_SEED_START}]}}

    def messages(doc):
        image = {"type": "image", "url": image_example(doc["seed"]).image}
        texts = [{"type": "text", "text": text} for text in ("In this", "what is in the middle?")]
        return [{"role": "user", "content": [texts[0], image, texts[1], image]}]

    asked = []
    chat = model.vlm.chat
    monkeypatch.setattr(model.vlm, "chat", lambda m, **k: (asked.append((m, k)), chat(m, **k))[1])
    (found,) = model.generate_until([instance(messages, max_new_tokens=5, until=["zzz"])])
    (((turn,), arguments),) = asked
    assert [part["type"] for part in turn["content"]] == ["text", "image", "text", "image"]
    assert arguments["max_new_tokens"] == 5
    assert found.token_counts.input_tokens > 2 * 336
    assert 0 < found.token_counts.output_tokens <= 5
    assert not model.generate_until([])


def test_answers_are_cut_at_stop_strings(tiny):
    model = VLMFast("tiny", device="cpu")
    model.task_dict = {"a task": {"test": [{"seed": EVAL_SEED_START}]}}

    def messages(doc):
        content = [
            {"type": "image", "url": image_example(doc["seed"]).image},
            {"type": "text", "text": CAPTION_QUESTION},
        ]
        return [{"role": "user", "content": content}]

    (whole,) = model.generate_until([instance(messages, max_new_tokens=20)])
    (cut,) = model.generate_until([instance(messages, max_new_tokens=20, until=" ")])
    assert cut.text == whole.text.split(" ")[0] != whole.text


def test_videos_are_supported_and_audio_is_refused():
    def of(kind):
        content = [{"type": kind, "url": "x.mp4"}, {"type": "text", "text": "?"}]
        return ChatMessages(messages=[{"role": "user", "content": content}])

    ((turn),) = chat_of(of("video"), 7)
    assert turn["content"][0] == {"type": "video", "video": "x.mp4", "num_frames": 7}
    with pytest.raises(MediaError, match="a message has audio"):
        chat_of(of("audio"), 7)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ({"max_new_tokens": 1024, "do_sample": False}, [])),
        ({"temperature": 0, "do_sample": True}, ({"max_new_tokens": 1024, "do_sample": False}, [])),
        (
            {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3, "until": "x"},
            (
                {"max_new_tokens": 3, "do_sample": True, "temperature": 0.5, "top_p": 0.9},
                ["x"],
            ),
        ),
    ],
)
def test_generation_arguments_are_mapped(arguments, expected):
    assert generation_of(arguments) == expected


def test_unsupported_arguments_are_refused():
    with pytest.raises(VLMFastError, match="no model_args depth; it has pretrained"):
        VLMFast("tiny", depth=3)
    with pytest.raises(VLMFastError, match="batch_size is 4"):
        VLMFast("tiny", batch_size=4)
    with pytest.raises(RecipeError, match="did you mean 'hired'"):
        VLMFast("tiny", "hirde")
    with pytest.raises(VLMFastError, match="num_beams is 3"):
        generation_of({"num_beams": 3})


def test_copied_file_matches_the_released_version():
    from importlib.metadata import version

    table = json.loads((Path(__file__).parent / "data" / "lmms_scores.json").read_text())
    assert version("lmms_eval") == table["lmms_eval"]
