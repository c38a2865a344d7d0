"""Prompts of lmms-eval's and VLMEvalKit's modes that place images within the text."""

from __future__ import annotations

import json

import pytest

from support.eval_data import MMMU, OPEN, drawn, interleaved, question, write_plain
from vlmfast import VLM
from vlmfast.errors import VLMFastError
from vlmfast.eval.lmms_generation import cut, generation_of, unread
from vlmfast.eval.mmmu import interleave
from vlmfast.eval.runner import evaluate
from vlmfast.eval.scorers import MODES, check_mode, versioned
from vlmfast.eval.tasks import find_task, metrics

IMAGES = {f"image_{i}": f"<{i}>" for i in (1, 2)}


def written(text: str, mode: str, images=IMAGES) -> list[str]:
    """Texts and images of a prompt in their order."""
    return [part.get("text", part.get("image")) for part in interleave(text, images, mode)]


@pytest.mark.parametrize(
    ("text", "lmms", "kit"),
    [
        ("a <image 1> b <image 2> c", ["a", "<1>", "b", "<2>", "c"], None),
        ("<image 1> b <image 2>", ["<1>", "b", "<2>", ""], ["", "<1>", " b ", "<2>", ""]),
        # lmms-eval orders images by their numbers.
        ("<image 2> b <image 1> c", ["<1>", "b", "<2>", "c"], ["", "<2>", " b ", "<1>", " c"]),
        ("a", ["<1>", "<2>", "a"], ["<1>", "<2>", "a"]),
    ],
)  # fmt: skip
def test_images_are_placed_as_upstream(text, lmms, kit):
    assert written(text, "lmms-eval") == lmms
    kit = kit or ["a ", "<1>", " b ", "<2>", " c"]
    assert written(text, "vlmevalkit") == kit


def test_repeated_marks_lose_text_in_lmms_eval_only():
    one = {"image_1": "<1>"}
    text = "<image 1> Count, see <image 1>. Now."
    assert written(text, "lmms-eval", one) == ["<1>", ". Now."]
    assert written(text, "vlmevalkit", one) == ["", "<1>", " Count, see ", "<1>", ". Now."]


def test_modes_are_named_by_version():
    assert [versioned(mode) for mode in MODES] == [
        "official",
        "lmms-eval-0.7.3",
        "vlmevalkit-0.3rc1",
    ]
    assert [check_mode(versioned(mode)) for mode in MODES] == list(MODES)
    for other in ("lmms-eval-0.6.0", "official-1", "lmms-eval-"):
        with pytest.raises(VLMFastError, match=r"or lmms-eval-0\.7\.3, vlmevalkit-0\.3rc1$"):
            check_mode(other)


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mmmu")
    rows = [*MMMU, *(row | {"id": f"{row['id']}00"} for row in interleaved(3))]
    rows.append(question("validation_Math_9", "<image 1> or <image 2>?", [], "2", 2, **OPEN))
    write_plain(folder / "validation.parquet", rows)
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["lmms-eval-0.7.3", "vlmevalkit"])
def test_media_are_messages(vlm, folder, mode):
    task = find_task("mmmu", data=folder, mode=mode)
    docs = {doc.doc_id: doc for doc in task.docs(None, 0)}
    media = task.media(docs["validation_Math_9"])
    ((turn,),) = media.values()
    shown = [part["image"] for part in turn["content"] if part["type"] == "image"]
    assert [image.tobytes() for image in shown] == [drawn(10 * i).tobytes() for i in (1, 2)]
    ((grey,),) = task.media(docs["validation_Math_9"], "question-only").values()
    pixels = [part["image"].getextrema()[0] for part in grey["content"] if part["type"] == "image"]
    assert pixels == [(128, 128)] * 2
    with pytest.raises(VLMFastError, match="place images within the text, and sessions need them"):
        evaluate(vlm, task, session=True)


@pytest.mark.slow
def test_batches_equal_single_questions_and_results_name_the_version(vlm, folder, tmp_path):
    task = find_task("mmmu", data=folder, mode="lmms-eval")
    runs = [evaluate(vlm, task, out=tmp_path / str(n), batch_size=n) for n in (1, 3)]
    alone, batched = ([run.samples[name] for name in run.samples] for run in runs)
    assert alone == batched
    assert len(alone) == 13
    assert not any("error" in sample for sample in alone)
    hashes = {sample["prompt_hash"] for sample in alone}
    assert len(hashes) == 13
    meta = json.loads((tmp_path / "1" / "mmmu" / "none" / "meta.json").read_text())
    assert meta["options"]["mode"] == "lmms-eval-0.7.3"
    assert "stop_strings" not in meta["generation"]["question"]
    # Runs from before modes had a version can still be read.
    former = meta | {"options": {"mode": "lmms-eval", "split": "validation"}}
    assert metrics(former, alone) == metrics(meta, alone) != {}


@pytest.mark.parametrize(
    ("arguments", "changes", "stops"),
    [
        ({}, {}, []),
        ({"temperature": 0, "do_sample": True, "until": None}, {}, []),
        # A blank line is lmms-eval's default; a task's own strings are kept.
        ({"until": ["\n\n"]}, {}, []),
        ({"until": "\n\n"}, {}, []),
        ({"until": ["\n\n", "\n", "</s>"], "top_k": 9}, {}, ["\n", "</s>"]),
        ({"max_new_tokens": 3}, {"max_new_tokens": 3}, []),
        ({"temperature": 0.5, "top_p": 0.9, "until": "x"},
         {"do_sample": True, "temperature": 0.5, "top_p": 0.9}, ["x"]),
    ],
)  # fmt: skip
def test_generation_arguments_are_mapped(arguments, changes, stops):
    expected = {"max_new_tokens": 1024, "do_sample": False} | changes
    expected |= {"stop_strings": stops} if stops else {}
    assert generation_of(arguments) == (expected, stops)


def test_answers_are_cut_at_the_first_stop_string():
    answer = "Two bars.\n\nThe answer is B.\nDone"
    assert cut(answer, []) == answer
    assert cut(answer, ["\nDone"]) == "Two bars.\n\nThe answer is B."
    assert cut(answer, ["\nDone", "\n"]) == "Two bars."


def test_arguments_of_tasks_without_effect():
    usual = {"until": ["\n\n"], "do_sample": False, "image_aspect_ratio": "original"}
    assert unread(usual) == []
    assert unread(usual | {"repetition_penalty": 2.0}) == ["repetition_penalty"]


@pytest.mark.parametrize("mode", ["official", "lmms-eval", "vlmevalkit"])
def test_tasks_end_no_answer_at_a_blank_line(mode, folder):
    for task in (find_task("mmmu", data=folder, mode=mode), find_task("pope", mode=mode)):
        assert "stop_strings" not in task.generation["question"]
