"""vlmfast inside the released lmms-eval: ``make test-lmms`` runs this in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lmms_eval", reason="make test-lmms")

from lmms_eval import models
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages

from support.paths import DATA, ROOT
from vlmfast.errors import MediaError, RecipeError, VLMFastError
from vlmfast.eval.likelihood import likelihoods
from vlmfast.eval.lmms_model import VLMFast, VLMFastSimple, chat_of, content_of, generation_of
from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

TASK = """
task: drawn_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.json
test_split: test
output_type: multiple_choice
doc_to_visual: !function utils.visual
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: exact_match
metadata:
  - version: 0.0
"""
UTILS = """
from vlmfast.scenes.examples import image_example


def visual(doc):
    return [image_example(doc["seed"]).image]
"""


def questions() -> list[dict]:
    """Each with the right answer among others, two of which have several tokens.

    The key of every third one is wrong, so that the accuracy of a good model is not 1.
    """
    rows = []
    for seed in range(EVAL_SEED_START, EVAL_SEED_START + 4):
        for number, qa in enumerate(image_example(seed).qa[:3]):
            others = {"no", "the red circle", "purple", "left of it"} - {qa.answer}
            choices = sorted(others)[:3]
            choices.insert(number, qa.answer)
            key = number if len(rows) % 3 else number + 1
            rows.append({"seed": seed, "question": qa.question, "choices": choices, "answer": key})
    return rows


@pytest.mark.parametrize("recipe", ["none", "hired:0.3;positions=keep"])
def test_multiple_choice_end_to_end(tmp_path, tiny, recipe):
    """The released program, offline, chooses the most likely option, and so do we."""
    rows = questions()
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "drawn_choices.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "utils.py").write_text(UTILS)
    words = ["--model", "vlmfast", "--model_args", f"pretrained=tiny,device=cpu,recipe={recipe}"]
    words += ["--tasks", "drawn_choices", "--include_path", str(tmp_path), "--batch_size", "8"]
    words += ["--output_path", str(tmp_path / "out"), "--log_samples", "--force_simple"]
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
    (samples,) = (tmp_path / "out").rglob("*_samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    right, exact = [], []
    for row, line in zip(rows, lines, strict=True):
        found = likelihoods(tiny, choices_of(row), recipe.replace(";", ","), batch_size=8)
        for one, (value, greedy) in zip(found, line["filtered_resps"], strict=True):
            # lmms-eval saves them as texts; batches of bfloat16 differ by rounding.
            assert abs(float(value) + one.logprob) < 0.05 * (1 - one.logprob)
            assert greedy in (str(one.greedy), one.greedy)
        best = max(range(4), key=lambda number: found[number].logprob)
        right.append(best == row["answer"])
        exact.append(found[row["answer"]].greedy)
    results = json.loads(file.read_text())["results"]["drawn_choices"]
    assert results["acc,none"] == sum(right) / len(rows)
    assert results["exact_match,none"] == sum(exact) / len(rows)
    assert 0.5 < sum(right) / len(rows) < 1  # the least likely option would be right less often


def choices_of(row: dict) -> list[tuple[list[dict], str]]:
    content = [{"type": "image", "image": image_example(row["seed"]).image}]
    content.append({"type": "text", "text": row["question"]})
    return [([{"role": "user", "content": content}], choice) for choice in row["choices"]]


def test_entry_point_is_found():
    assert models.get_model("vlmfast") is VLMFast
    assert models.get_model("vlmfast", force_simple=True) is VLMFastSimple


@pytest.mark.parametrize("first", ["lmms_eval.protocol", "lmms_eval.models", "vlmfast.eval.lmms"])
def test_entry_point_is_found_whatever_is_imported_first(first):
    """`lmms_eval.protocol` loads the entry points in the middle of its own import."""
    code = (
        f"import sys, importlib; importlib.import_module({first!r})\n"
        "from lmms_eval import models\n"
        "print(models.get_model('vlmfast').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["VLMFast"], done.stderr[-2000:]
    assert "Failed to load" not in done.stderr + done.stdout


def test_manifest_imports_nothing_of_lmms_eval():
    code = (
        "import sys, vlmfast.eval.lmms\n"
        "print([name for name in sys.modules if name.startswith('lmms_eval')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


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

    asked, ask_many = [], model.vlm.ask_many

    def recorded(requests, **kwargs):
        made = list(requests)
        asked.extend(made)
        return ask_many(made, **kwargs)

    monkeypatch.setattr(model.vlm, "ask_many", recorded)
    (found,) = model.generate_until([instance(messages, max_new_tokens=5, until=["zzz"])])
    ((turn,),) = [request.messages for request in asked]
    assert [part["type"] for part in turn["content"]] == ["text", "image", "text", "image"]
    assert asked[0].generation["max_new_tokens"] == 5
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


def test_arguments_without_effect_are_named_once(tiny, caplog):
    model = VLMFast("tiny", device="cpu")
    model.task_dict = {"a task": {"test": [{}]}}

    def messages(doc):
        return [{"role": "user", "content": [{"type": "text", "text": "What is shown?"}]}]

    def named():
        return [one.getMessage() for one in caplog.records if one.name.startswith("vlmfast")]

    read = {"max_new_tokens": 2, "image_aspect_ratio": "original", "num_beams": 1}
    model.generate_until([instance(messages, **read)])
    assert not named()
    more = read | {"repetition_penalty": 2.0, "max_gen_toks": 5}
    for _ in range(2):
        model.generate_until([instance(messages, **more)] * 2)
    assert named() == ["generation arguments without effect: repetition_penalty, max_gen_toks"]


def test_videos_are_supported_and_audio_is_refused():
    def of(kind):
        content = [{"type": kind, "url": "x.mp4"}, {"type": "text", "text": "?"}]
        return ChatMessages(messages=[{"role": "user", "content": content}])

    (turn,) = chat_of(of("video"), 7)
    assert turn["content"][0] == {"type": "video", "video": "x.mp4", "num_frames": 7}
    with pytest.raises(MediaError, match="a message has audio"):
        chat_of(of("audio"), 7)
    image, video = (ROOT / "examples" / name for name in ("picture.png", "clip.mp4"))
    assert content_of(str(video), 7) == {"type": "video", "video": str(video), "num_frames": 7}
    assert content_of(str(image), 7) == {"type": "image", "image": str(image)}
    with pytest.raises(MediaError, match="a dict of array, sampling_rate"):
        content_of({"array": [], "sampling_rate": 16000}, 7)


def test_unsupported_arguments_are_refused():
    with pytest.raises(VLMFastError, match="no model_args depth; it has pretrained"):
        VLMFast("tiny", depth=3)
    for wrong in ("auto", 0, "1.5"):
        with pytest.raises(VLMFastError, match=r"batch_size is .*; it must be a whole number"):
            VLMFast("tiny", batch_size=wrong)
    with pytest.raises(RecipeError, match="did you mean 'hired'"):
        VLMFast("tiny", "hirde")
    with pytest.raises(VLMFastError, match="num_beams is 3"):
        generation_of({"num_beams": 3})


def test_copied_file_matches_the_released_version():
    from importlib.metadata import version

    table = json.loads((DATA / "lmms_scores.json").read_text())
    assert version("lmms_eval") == table["lmms_eval"]


# --- log-likelihoods and rounds ------------------------------------------------------------------


@pytest.fixture(scope="module")
def simple() -> VLMFastSimple:
    model = VLMFastSimple("tiny", device="cpu", dtype="float32", batch_size=3)
    model.task_dict = {"a task": {"test": questions()}}
    return model


def visuals(doc: dict) -> list:
    return [image_example(doc["seed"]).image]


def of_choice(doc_id: int, text: str, continuation) -> Instance:
    """A request as lmms-eval makes them for an option of a multiple-choice question."""
    args = (text, continuation, visuals, doc_id, "a task", "test")
    return Instance("loglikelihood", args, 0, {"task": "a task", "doc_id": doc_id, "repeats": 1})


def test_loglikelihoods_are_losses_in_the_order_of_the_requests(simple):
    """`test_likelihood` compares them with Hugging Face's logits."""
    rows = simple.task_dict["a task"]["test"][:3]
    requests = [
        of_choice(doc_id, row["question"], f" {choice}")
        for doc_id, row in enumerate(rows)
        for choice in row["choices"]
    ]
    found = [result.text for result in simple.loglikelihood(requests)]
    alone = [one for row in rows for one in likelihoods(simple.vlm, choices_of(row), batch_size=1)]
    assert [greedy for _, greedy in found] == [one.greedy for one in alone]
    for (value, _), one in zip(found, alone, strict=True):
        assert value == pytest.approx(-one.logprob, abs=1e-3)
    assert len({round(value, 2) for value, _ in found}) > 6


def test_target_may_be_a_function_and_an_empty_option_is_refused(simple):
    row = simple.task_dict["a task"]["test"][0]
    text = row["choices"][0]
    one, other = (
        simple.loglikelihood([of_choice(0, row["question"], target)])
        for target in (text, lambda doc: doc["choices"][0])
    )
    assert one == other
    with pytest.raises(VLMFastError, match="answer 0 is empty"):
        simple.loglikelihood([of_choice(0, row["question"], " ")])


ROUNDS = ("Describe it.", "What is in the middle?", "What color is it?")


def rounds_of(doc: dict, round_idx=None, previous_output=None, previous_round_info=None):
    """A conversation in which each round sees those before it; the first doc ends earlier."""
    asked = round_idx or 0
    turns = [{"type": "image", "url": visuals(doc)[0]}, {"type": "text", "text": ROUNDS[0]}]
    messages = [{"role": "user", "content": turns}]
    for question, answer in zip(ROUNDS[1:], previous_output or (), strict=False):
        for role, text in (("assistant", answer), ("user", question)):
            messages.append({"role": role, "content": [{"type": "text", "text": text}]})
    if round_idx is None:
        return messages
    assert previous_round_info == (None if asked == 1 else f"round {asked - 1}")
    ended = asked == len(ROUNDS) - (doc["seed"] == EVAL_SEED_START)
    return (None if ended else messages), ended, previous_output, f"round {asked}"


def multi_round(doc_id: int, *args) -> Instance:
    return Instance(
        "generate_until_multi_round",
        ("the text", *args, doc_id, "a task", "test"),
        0,
        {"task": "a task", "doc_id": doc_id, "repeats": 1},
    )


def test_rounds_equal_chat_and_sessions():
    model = VLMFast("tiny", device="cpu", dtype="float32", batch_size=2)
    rows = [{"seed": EVAL_SEED_START + number} for number in range(3)]
    model.task_dict = {"a task": {"test": rows}}
    arguments = {"max_new_tokens": 12, "do_sample": False}
    found = model.generate_until_multi_round(
        [multi_round(doc_id, rounds_of, arguments) for doc_id in range(3)]
    )
    assert [len(texts) for texts in found] == [2, 3, 3]
    for row, texts in zip(rows, found, strict=True):
        with model.vlm.session(visuals(row)) as session:
            asked = [session.ask(question, **arguments).text for question in ROUNDS[: len(texts)]]
        assert texts == asked
        messages = chat_of(ChatMessages(messages=rounds_of(row, previous_output=texts[:1])), 2)
        assert texts[1] == model.vlm.chat(messages, **arguments).text
    # A control: without the earlier rounds the answers differ.
    alone = [model.vlm.ask(ROUNDS[2], visuals(row), **arguments).text for row in rows[1:]]
    assert alone != [texts[2] for texts in found[1:]]


def test_rounds_of_the_simple_interface(simple):
    """Each round has its own text and images; the task may change the earlier answers."""

    def text(doc, round_idx=None, previous_output=None, previous_round_info=None):
        ended = round_idx == 2
        changed = [*previous_output[:-1], previous_output[-1].upper()]
        return visuals(doc), f"{ROUNDS[1]}", ended, changed, None

    row = simple.task_dict["a task"]["test"][0]
    arguments = {"max_new_tokens": 8, "do_sample": False}
    request = Instance(
        "generate_until_multi_round",
        (ROUNDS[0], arguments, visuals, text, 0, "a task", "test"),
        0,
        {"task": "a task", "doc_id": 0, "repeats": 1},
    )
    (found,) = simple.generate_until_multi_round([request])
    asked = [simple.vlm.ask(one, visuals(row), **arguments).text.upper() for one in ROUNDS[:2]]
    assert found == asked
