"""vlmfast inside VLMEvalKit: ``make test-kit`` runs this in its own environment."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vlmeval") is None:
    pytest.skip("make test-kit", allow_module_level=True)

import pandas as pd
import vlmeval
from vlmeval.dataset.image_mcq import MMMUDataset

from support.eval_data import interleaved, write_rows
from support.paths import ROOT
from vlmfast import VLM
from vlmfast.errors import MediaError, RecipeError, VLMFastError
from vlmfast.eval.mmmu import MMMU, read_options
from vlmfast.eval.runner import evaluate
from vlmfast.eval.vlmevalkit_model import VLMFast, content_of
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

RUN = Path(vlmeval.__file__).parents[1] / "run.py"
DOCUMENTS = 60
RECIPE = "hired:0.3,positions=keep"


def script() -> str:
    """The file that the page shows, with the shipped model."""
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(# run_vlmfast\.py\n.*?)```", text, re.S).group(1)
    given = 'pretrained="llava-hf/llava-1.5-7b-hf", recipe="balanced"'
    own = f'pretrained="tiny", device="cpu", dtype="float32", recipe="{RECIPE}", max_new_tokens=128'
    assert given in block
    return block.replace(given, own).replace('"run.py"', repr(str(RUN)))


def write_tsv(folder: Path, rows: list[dict]) -> None:
    """MMMU as VLMEvalKit stores it, with the paths of images that are not compressed again."""
    table = []
    for number, row in enumerate(rows):
        paths = []
        for name in (key for key in sorted(row) if re.fullmatch(r"image_\d", key) and row[key]):
            paths.append(folder / f"{number}_{name}.png")
            paths[-1].write_bytes(row[name]["bytes"])
        line = {
            "index": number,
            "image_path": str(list(map(str, paths))) if len(paths) > 1 else str(paths[0]),
            "question": row["question"],
            "answer": row["answer"],
            "category": "Math",
            "split": "validation",
        }
        options = read_options(row["id"], row["options"])
        if row["question_type"] == "multiple-choice":
            line |= dict(zip("ABCD", options, strict=False))
        table.append(line)
    pd.DataFrame(table).to_csv(folder / "MMMU_DEV_VAL.tsv", sep="\t", index=False)


def test_answers_and_scores_agree(tmp_path):
    """VLMEvalKit's own program, prompts and scores, and those of ``vlmfast eval``."""
    rows = interleaved(DOCUMENTS)
    write_rows(tmp_path / "mmmu" / "validation.parquet", rows)
    kit = tmp_path / "kit"
    kit.mkdir()
    write_tsv(kit, rows)
    digest = hashlib.md5((kit / "MMMU_DEV_VAL.tsv").read_bytes()).hexdigest()
    own_data = (
        "from vlmeval.dataset.image_mcq import MMMUDataset\n"
        f"MMMUDataset.DATASET_MD5['MMMU_DEV_VAL'] = {digest!r}\n"
    )
    (tmp_path / "run_vlmfast.py").write_text(own_data + script(), encoding="utf-8")
    words = ["--model", "llava-balanced", "--data", "MMMU_DEV_VAL", "--judge", "exact_matching"]
    done = subprocess.run(
        [sys.executable, tmp_path / "run_vlmfast.py", *words, "--work-dir", tmp_path / "out"],
        cwd=RUN.parent,
        env={**os.environ, "LMUData": str(kit), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = {file.name: file for file in (tmp_path / "out").rglob("*_MMMU_DEV_VAL*.xlsx")}
    theirs = pd.read_excel(files["llava-balanced_MMMU_DEV_VAL.xlsx"], keep_default_na=False)
    scored = pd.read_excel(
        files["llava-balanced_MMMU_DEV_VAL_exact_matching_result.xlsx"], keep_default_na=False
    )

    vlm = VLM.from_pretrained("tiny", device="cpu", dtype="float32")
    task = MMMU(tmp_path / "mmmu", mode="vlmevalkit-0.3rc1")
    run = evaluate(vlm, task, RECIPE, out=tmp_path / "ours", batch_size=4)
    ours = [run.samples[row["id"]] for row in rows]
    assert list(theirs["index"]) == list(scored["index"]) == list(range(DOCUMENTS))
    answers = [sample["resps"][0][0] for sample in ours]
    assert [str(text) for text in theirs["prediction"]] == answers
    assert list(scored["hit"]) == [sample["score"] for sample in ours]
    assert len(set(answers)) >= 4
    # A control: the images at other positions have other answers.
    moved = MMMU(tmp_path / "mmmu", mode="official")
    other = evaluate(vlm, moved, RECIPE, out=tmp_path / "other", batch_size=4)
    others = [other.samples[row["id"]]["resps"][0][0] for row in rows]
    assert sum(a != b for a, b in zip(answers, others, strict=True)) >= 10


def test_images_are_placed_as_in_its_messages(tmp_path):
    rows = interleaved(20)
    write_rows(tmp_path / "validation.parquet", rows)
    task = MMMU(tmp_path, mode="vlmevalkit")
    docs = sorted(task.docs(None, 0), key=lambda doc: doc.seed)
    for doc in docs:
        ((turn,),) = task.media(doc).values()
        names = re.findall(r"<image (\d)>", doc.question)
        given = [{"type": "image", "value": f"image {i}"} for i in range(1, 4)]
        split = MMMUDataset.split_MMMU([*given, {"type": "text", "value": doc.question}])
        assert [part["type"] for part in turn["content"]] == [part["type"] for part in split]
        texts = [part["text"] for part in turn["content"] if part["type"] == "text"]
        assert texts == [part["value"] for part in split if part["type"] == "text"]
        shown = [part["value"] for part in split if part["type"] == "image"]
        assert shown == [f"image {name}" for name in names]


@pytest.fixture(scope="module")
def model() -> VLMFast:
    return VLMFast("tiny", device="cpu", dtype="float32", nframe=2, max_new_tokens=12)


def test_conversations_and_videos(model, tmp_path):
    image = tmp_path / "scene.png"
    image_example(EVAL_SEED_START).image.save(image)
    questions = ["Describe it.", "What is in the middle?"]
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "image", "value": str(image)},
                {"type": "text", "value": questions[0]},
            ],
        }
    ]
    first = model.chat(json.loads(json.dumps(turns)))
    assert first == model.generate(turns[0]["content"])
    arguments = {"do_sample": False, "max_new_tokens": 12}
    assert first == model.vlm.ask(questions[0], str(image), **arguments).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": questions[1]}]
    with model.vlm.session(str(image)) as session:
        asked = [session.ask(question, **arguments).text for question in questions]
    assert [first, model.chat(turns)] == asked
    video = str(ROOT / "examples" / "clip.mp4")
    found = model.generate([{"type": "video", "value": video}, {"type": "text", "value": "What?"}])
    assert found == model.vlm.ask("What?", video=video, num_frames=2, **arguments).text


def test_wrong_arguments_are_refused():
    with pytest.raises(VLMFastError, match="nframe is 0; it must be at least 1"):
        VLMFast("tiny", nframe=0)
    with pytest.raises(RecipeError, match="did you mean 'hired'"):
        VLMFast("tiny", "hirde", device="cpu")
    with pytest.raises(MediaError, match="a message has audio; supported are text"):
        content_of({"type": "audio", "value": "x.wav"}, 2)
