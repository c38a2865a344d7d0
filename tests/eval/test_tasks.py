"""Evaluation tasks: prompts, media, and malformed data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from support import media_fixtures as fx
from support.engine.commands import frames_of
from support.eval_data import (
    MMMU,
    NINE,
    OPTIONS,
    POPE,
    SUBTITLES,
    VIDEO_MME,
    VIDEOS,
    drawn,
    question,
    stored,
    video_question,
    write_plain,
    write_rows,
    write_video_mme,
)
from support.eval_fakes import FakeVLM, run
from vlmfast.errors import MediaError, VLMFastError
from vlmfast.eval import mmmu, video_mme
from vlmfast.eval.data import read_subtitles, spoken
from vlmfast.eval.report import write_report
from vlmfast.eval.results import read
from vlmfast.eval.runner import evaluate
from vlmfast.eval.summary import summarise
from vlmfast.eval.tasks import find_task
from vlmfast.media import VideoInfo


@pytest.fixture(scope="module")
def college(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mmmu")
    write_rows(folder / "All" / "validation-00000-of-00001.parquet", MMMU)
    hidden = [row | {"id": row["id"].replace("validation", "test"), "answer": "?"} for row in MMMU]
    write_rows(folder / "All" / "test-00000-of-00001.parquet", hidden)
    return folder


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> Path:
    return write_video_mme(tmp_path_factory.mktemp("video-mme"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pope")
    return write_rows(folder / "test-00000-of-00003.parquet", POPE, ["image"])


def rows_file(tmp_path: Path, *rows: dict) -> Path:
    return write_plain(tmp_path / "validation.parquet", list(rows))


# --- prompts -------------------------------------------------------------------------------------

DIRECTLY = "Answer with the option's letter from the given choices directly."


@pytest.mark.parametrize(
    ("mode", "choice", "open_"),
    [
        (
            "official",
            f"Q <image 1>?\n(A) it's\n(B) 2\n\n{DIRECTLY}",
            "Q <image 1>?\nAnswer the question using a single word or phrase.",
        ),
        (
            "lmms-eval",
            f"Q <image 1>?\nA. it's\nB. 2\n\n{DIRECTLY}",
            "Q <image 1>?\n\nAnswer the question using a single word or phrase.",
        ),
        (
            "vlmevalkit",
            "Question: Q <image 1>?\nOptions:\nA. it's\nB. 2\n"
            "Please select the correct answer from the options above. \n",
            "Question: Q <image 1>?\n",
        ),
    ],
)
def test_mmmu_prompts(mode, choice, open_):
    options = ("it's", "2")
    assert mmmu.prompt("Q <image 1>?", options, "multiple-choice", mode) == choice
    assert mmmu.prompt("Q <image 1>?", (), "open", mode) == open_


BOTH = "Which is it?\nA. x\nB. y"
ONLY = "Respond with only the letter (A, B, C, or D) of the correct option."
SELECT = "Select the best answer to the following multiple-choice question based on the video"
LISTED = "This video's subtitles are listed below:"


@pytest.mark.parametrize(
    ("mode", "subtitles", "spoken_text", "text"),
    [
        ("official", False, None, f"{SELECT}. {ONLY}\n{BOTH}\nThe best answer is:"),
        (
            "official", True, "one\ntwo",
            f"{LISTED}\none\ntwo\n{SELECT} and the subtitles. {ONLY}\n{BOTH}\nThe best answer is:",
        ),
        ("official", True, None, f"{SELECT}. {ONLY}\n{BOTH}\nThe best answer is:"),
        ("lmms-eval", False, None, f"{SELECT} and the subtitles. {ONLY}\n{BOTH}\n\n{DIRECTLY}"),
        (
            "lmms-eval", True, "one",
            f"{LISTED} \none\n{SELECT} and the subtitles. {ONLY}\n{BOTH}\nThe best answer is:",
        ),
        (
            "lmms-eval", True, None,
            f"{LISTED} \nNo subtitles available\n{SELECT} and the subtitles. {ONLY}\n{BOTH}\n"
            "The best answer is:",
        ),
        (
            "vlmevalkit", False, None,
            f"\nThese are the frames of a video. {SELECT}. {ONLY}\nQuestion: {BOTH}\nAnswer: ",
        ),
        (
            "vlmevalkit", True, "one",
            f"\nThese are the frames of a video. {LISTED}\none\n{SELECT}. {ONLY}\n"
            f"Question: {BOTH}\nAnswer: ",
        ),
    ],
)  # fmt: skip
def test_video_mme_prompts(mode, subtitles, spoken_text, text):
    assert video_mme.prompt("Which is it?", ("A. x", "B. y"), mode, subtitles, spoken_text) == text


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("official", ""),
        ("lmms-eval", "\nAnswer the question using a single word or phrase."),
        ("vlmevalkit", " Please answer yes or no."),
    ],
)
def test_pope_prompts(objects, mode, suffix):
    doc = find_task("pope", data=objects, mode=mode).docs(1, 0)[0]
    assert doc.question == "Is there a circle in the image?" + suffix


# --- mmmu ----------------------------------------------------------------------------------------


def test_mmmu_docs(college):
    task = find_task("mmmu", data=college)
    docs = {doc.doc_id: doc for doc in task.docs(None, 0)}
    assert list(docs) == [row["id"] for row in MMMU]
    art = dict(docs["validation_Art_Theory_1"].groups)
    assert (art["discipline"], art["subject"]) == ("Art and Design", "Art_Theory")
    assert docs["validation_Music_1"].options == ()
    assert dict(docs["validation_Music_1"].groups)["question_type"] == "open"
    assert docs["validation_Accounting_2"].options == ("$1", "it's 2")
    assert docs["validation_Physics_1"].options == tuple(NINE)
    assert "(I) thing 8\n" in docs["validation_Physics_1"].question
    assert docs["validation_Math_2"].target == "['left', 'on the left']"
    # The first of each subject; a larger limit adds to these.
    assert [doc.doc_id for doc in task.docs(1, 0)] == [i for i in docs if i.endswith("_1")]
    assert find_task("mmmu", data=college, split="test").docs(None, 0)[0].target == "?"


def shown(task, docs, name: str) -> list:
    return task.media(docs[name])["images"]


@pytest.mark.parametrize("write", [write_rows, write_plain])
@pytest.mark.parametrize("group", [100, 2])
def test_images_are_loaded_by_number(tmp_path, write, group):
    """From files whose rows are in one group, or in several."""
    file = write(tmp_path / "x.parquet", MMMU)
    pq.write_table(pq.read_table(file), file, row_group_size=group)
    task = find_task("mmmu", data=file)
    docs = {doc.doc_id: doc for doc in task.docs(None, 0)}
    for name, numbers in {
        "validation_Art_1": (1, 2, 3),  # in the options only
        "validation_Art_Theory_1": (1, 2),  # the second is named first
        "validation_Math_1": (1,),  # named twice, shown once
        "validation_Accounting_1": (1,),  # an earlier row
    }.items():
        images = shown(task, docs, name)
        for image, number in zip(images, numbers, strict=True):
            assert np.array_equal(image, drawn(10 * number)), name
    blank = task.media(docs["validation_Art_1"], "question-only")["images"]
    assert [p.getextrema() for p in blank] == [((128, 128),) * 3] * 3


def test_mmmu_judge(college):
    task = find_task("mmmu", data=college)
    docs = {doc.doc_id: doc for doc in task.docs(None, 0)}

    def judged(name, text):
        found = task.judge(docs[f"validation_{name}"], text)
        return found["score"], found["answered"]

    assert judged("Accounting_1", "B") == (1.0, True)
    assert judged("Physics_1", "(I)") == (1.0, True)
    assert judged("Physics_2", "C") == (1.0, True)
    assert judged("Math_2", "It is on the left.") == (1.0, True)
    assert judged("Music_1", "a circle") == (1.0, True)
    assert judged("Accounting_1", "")[1] is False
    assert judged("Music_1", "") == (0.0, False)
    empty = [task.judge(doc, "") for doc in docs.values() if doc.options]
    assert empty == [task.judge(doc, "") for doc in docs.values() if doc.options]
    assert json.dumps(task.judge(docs["validation_Math_1"], "inf, nan, 1e999"), allow_nan=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (question("validation_Art_1", "?", "['a', 'b'", "A"), r"_Art_1: options are no list: \"\["),
        (question("validation_Art_1", "?", "{'a': 1}", "A"), "options are no list"),
        (question("validation_Art_1", "?", "'a'", "A"), "options are no list"),
        (question("validation_Art_1", "?", "print(1)", "A"), "options are no list"),
        (question("validation_Art_1", "?", "[]", "A"), "multiple-choice question without options"),
        (question("validation_Art_1", "?", [str(i) for i in range(27)], "A"), "has 27 options"),
        (question("1", "?", ["a"], "A"), "id '1' is not of the form"),
        (question("validation_Art_1", "?", ["a"], "A", question_type="essay"), "question_type is"),
    ],
)
def test_invalid_mmmu_rows_raise(tmp_path, row, message):
    with pytest.raises(VLMFastError, match=message):
        find_task("mmmu", data=rows_file(tmp_path, row)).docs(None, 0)


def test_list_answer(tmp_path):
    rows = [question(f"validation_Art_{i}", "?", ["a", "b"], ["B", "A"]) for i in (1, 2)]
    task = find_task("mmmu", data=rows_file(tmp_path, *rows))
    doc, _ = task.docs(None, 0)
    assert doc.target == "['B', 'A']"
    assert task.judge(doc, "A")["score"] == 1.0


def test_options_as_list(tmp_path):
    row = question("validation_Art_1", "?", "", "B") | {"options": ["a", "b"]}
    assert find_task("mmmu", data=rows_file(tmp_path, row)).docs(None, 0)[0].options == ("a", "b")


def test_duplicate_ids_raise(tmp_path):
    row = question("validation_Art_1", "?", ["a"], "A")
    with pytest.raises(VLMFastError, match="has the id 'validation_Art_1' twice"):
        find_task("mmmu", data=rows_file(tmp_path, row, row)).docs(None, 0)


def test_damaged_or_missing_image_fails_only_its_sample(tmp_path):
    rows = [question(f"validation_Art_{i}", "<image 1>?", ["a", "b"], "A") for i in (1, 2, 3)]
    rows[0]["image_1"] = {"bytes": rows[0]["image_1"]["bytes"][:300], "path": None}
    rows[1]["question"] = "<image 2>?"
    file = write_rows(tmp_path / "validation.parquet", rows)
    run = evaluate(FakeVLM(), find_task("mmmu", data=file), out=tmp_path / "o", batch_size=2)
    errors = [s.get("error") for s in run.samples.values()]
    assert "validation_Art_1" in errors[0]
    assert errors[1] == "validation_Art_2: image_2 is empty"
    assert errors[2] is None


# --- sources of data -----------------------------------------------------------------------------


def test_missing_columns_raise(tmp_path):
    rows = [{key: value for key, value in MMMU[0].items() if key not in ("options", "answer")}]
    for write in (write_rows, write_plain):
        with pytest.raises(VLMFastError, match="no column 'options', 'answer'; it has id, ques"):
            find_task("mmmu", data=write(tmp_path / "x.parquet", rows)).docs(None, 0)


def test_unreadable_data_raises(tmp_path):
    (tmp_path / "validation.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(VLMFastError, match=r"cannot read .*parquet") as error:
        find_task("mmmu", data=tmp_path / "validation.parquet").docs(None, 0)
    assert "\n" not in str(error.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        VLMFastError, match=r"no parquet file of split 'validation'.* found no parq"
    ):
        find_task("mmmu", data=empty).docs(None, 0)
    with pytest.raises(VLMFastError, match=r"no parquet file of split 'dev'.*found validation"):
        find_task("mmmu", data=tmp_path, split="dev").docs(None, 0)


def test_hub_data_are_downloaded(college, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, **kwargs):
        asked.append((name, kwargs["repo_type"], kwargs["allow_patterns"]))
        return str(college)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    docs = find_task("mmmu").docs(None, 0)
    patterns = ["validation*.parquet", "*/validation*.parquet"]
    assert asked == [("MMMU/MMMU", "dataset", patterns)]
    assert docs == find_task("mmmu", data=college).docs(None, 0)

    def gone(*args, **kwargs):
        raise ConnectionError("the hub is not there\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    with pytest.raises(VLMFastError, match=r"cannot read lmms-lab/POPE: the hub is not there$"):
        find_task("pope").docs(None, 0)


def test_missing_pyarrow_raises(college, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(VLMFastError, match=r"needs pyarrow.*pip install 'vlmfast\[eval\]'"):
        find_task("mmmu", data=college).docs(None, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mmmu", {"split": "train"}, "split is 'train'; it must be one of dev, validation, test"),
        ("mmmu", {"mode": "mine"}, "mode 'mine' must be one of official, lmms-eval, vlmevalkit"),
        ("mmmu", {"num_frames": 3}, "task mmmu has no option num_frames; it has data, split, mode"),
        ("shapes", {"data": "x"}, "task shapes has no option data; it has none"),
        ("video-mme", {}, "needs the folder of its videos: --videos DIR"),
        ("video-mme", {"videos": "nowhere"}, "videos nowhere is not a folder"),
        ("video-mme", {"videos": ".", "num_frames": 0}, "num_frames is 0"),
        ("video_mme", {}, "unknown task 'video_mme'.*video-mme"),
    ],
)
def test_invalid_task_options_raise(name, options, message):
    with pytest.raises(VLMFastError, match=message):
        find_task(name, **options)


def test_limit_and_seed(objects):
    task = find_task("pope", data=objects)
    assert [doc.doc_id for doc in task.docs(1, 0)] == ["adversarial-1", "popular-1", "random-1"]
    assert len(task.docs(None, 0)) == 12
    with pytest.raises(VLMFastError, match="limit is 0"):
        task.docs(0, 0)
    with pytest.raises(VLMFastError, match="seed is 1"):
        task.docs(None, 1)


def test_pope_docs_and_judge(objects, tmp_path):
    task = find_task("pope", data=objects)
    docs = task.docs(None, 0)
    assert {doc.media_id for doc in docs} == {"drawn_0", "drawn_1"}
    assert np.array_equal(task.media(docs[1])["images"], drawn(1))
    assert task.judge(docs[1], "No, there is none.")["score"] == 1.0
    rows = [POPE[0] | {"answer": "maybe"}]
    with pytest.raises(VLMFastError, match="adversarial-1: answer is 'maybe'"):
        find_task("pope", data=write_plain(tmp_path / "test.parquet", rows)).docs(None, 0)


# --- video-mme -----------------------------------------------------------------------------------

FIRST, SECOND, THIRD = VIDEOS
INFO = VideoInfo(frames=4, fps=2.0, duration_s=2.0, width=8, height=8)


def test_video_mme_docs(films):
    task = find_task("video-mme", data=films)
    docs = task.docs(None, 0)
    assert len(docs) == 9
    assert dict(docs[4].groups) == {
        "duration": "medium",
        "domain": "Multilingual",
        "sub_category": "Multilingual",
        "task_type": "OCR Problems",
    }
    assert [doc.media_id for doc in task.docs(1, 0)] == list(VIDEOS)
    assert docs[0].options == tuple(OPTIONS)


@pytest.mark.parametrize(
    ("mode", "number", "frames"),
    [("official", 3, 3), ("official", 32, 4), ("lmms-eval", 2, 2), ("vlmevalkit", 3, 3)],
)
def test_frame_sampling(films, mode, number, frames):
    task = find_task("video-mme", data=films, num_frames=number, mode=mode)
    media = task.media(task.docs(None, 0)[0])
    if mode == "lmms-eval":  # the file itself, as in its messages
        assert media["video"] == films / "data" / "aaaaaaaaaa1.mp4"
        assert media["num_frames"] == number == frames
    else:
        assert len(media["video"]) == media["num_frames"] == frames
    assert frames_of(task, VideoInfo(100, 2.0, 50.0, 8, 8))[-1] == (
        75 if mode == "vlmevalkit" else 99
    )
    assert task.media(task.docs(None, 0)[0], "question-only")["video"][0].getextrema()[0][0] == 128


@pytest.mark.parametrize(
    ("mode", "spoken_text"),
    [
        ("official", "first words\nwithout a font\nlast words in two lines"),
        # Two frames per second: a span that ends within half a second has no frame.
        ("lmms-eval", "never on screen\nlast words"),
        # The subtitle begins before a frame and ends after it: no frame is at 0.0 s or 1.0 s.
        ("vlmevalkit", "last words in two lines"),
    ],
)
def test_subtitles_per_mode(tmp_path, mode, spoken_text):
    file = tmp_path / "x.srt"
    file.write_text(SUBTITLES, encoding="utf-8")
    assert spoken(read_subtitles(file), [0, 2, 3], INFO, mode) == spoken_text


STYLED = {
    "tags": ('1\n{0}\n<i>one</i> <b><font color="#E5E5E5">two</font></b>\n', "one two"),
    "text that is no tag": ("1\n{0}\n1 < 2 and 4 > 3 <3 {{x}}\n", "1 < 2 and 4 > 3 <3 {x}"),
    "overrides": ("1\n{0}\n{{\\an8}}{{\\i1}}one{{\\i0}}\\Ntwo<br/>three\n", "one two three"),
    "entities": ("1\n{0}\nQ&amp;A &lt;x&gt;&nbsp;z\n", "Q&A <x> z"),
    "two speakers at once": ("1\n{0}\n- one\n\n2\n{0}\n- two\n", "- one\n- two"),
    "twice": ("1\n{0}\none\n\n2\n{0}\none\n", "one"),
    "overlap": ("1\n{0}\none\n\n2\n00:00:00,200 --> 00:00:09,000\ntwo\n", "one\ntwo"),
    "no numbers": ("{0}\none\n\n{1}\ntwo\n", "one"),
    "no empty lines": ("1\n{0}\none\n2\n{1}\ntwo", "one"),
    "empty lines within": ("1\n{0}\none\n \nmore\n\n\n2\n{1}\ntwo", "one more"),
    "a number as text": ("1\n{0}\n42", "42"),
    "no numbers but as text": ("{0}\n42\n{1}\ntwo\n", "42"),
    "old lines": ("1\r{0}\rone\r\r2\r{1}\rtwo\r", "one"),
    "an arrow": ("1\n{0}\na --> b\n", "a --> b"),
    "web": (
        "WEBVTT\n\nNOTE --\nnot said\n\nname\n00:00.500 --> 00:01.500 align:start line:0\n"
        "<v Ann><c.yellow>one</c> <00:00:01.000>two</v>\n\nNOTE nor this\n",
        "one two",
    ),
}


@pytest.mark.parametrize(("text", "shown"), STYLED.values(), ids=STYLED)
def test_subtitles_of_every_style_are_read_as_players_show_them(tmp_path, text, shown):
    spans = "00:00:00,500 --> 00:00:01,500", "00:01:00,000 --> 00:01:01,000"
    file = tmp_path / "x.srt"
    file.write_text(text.format(*spans), encoding="utf-8", newline="")
    found = read_subtitles(file)
    assert spoken(found, [2], INFO, "official") == shown
    assert spoken(found, [2], INFO, "vlmevalkit") == shown.partition("\n")[0]
    assert spoken(found, [0], INFO, "official") == ""


def test_lmms_eval_keeps_the_last_of_a_span(tmp_path):
    white, span = '<font color="white" size=".72c">{}</font>', (0.0, 1.0)
    both = [(*span, white.format(text)) for text in ("one", "two")]
    assert spoken(both, [1], INFO, "lmms-eval") == "two"
    assert spoken(both, [1], INFO, "official") == "one\ntwo"


def test_lmms_eval_subtitles_are_in_set_order(tmp_path):
    """In the order of a Python set for lmms-eval, in file order for the others."""
    many = [(i / 2, i / 2 + 0.5, f'<font color="white" size=".72c">{i}</font>') for i in range(40)]
    frames, info = [33, 1, 8], VideoInfo(40, 2.0, 20.0, 8, 8)
    assert spoken(many, frames, info, "official") == "1\n8\n33"
    assert spoken(many, frames, info, "lmms-eval") == "\n".join(map(str, set(frames)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_subtitle_encodings_with_bom(tmp_path, encoding):
    file = tmp_path / "x.srt"
    file.write_bytes("1\r\n00:00:01,000 --> 00:00:02,500\r\nÄh, 你好\r\n\r\n".encode(encoding))
    assert read_subtitles(file) == [(1.0, 2.5, "Äh, 你好")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("1\n00:00:01,000 --> 00:00:02,500\nÄh\n".encode("latin-1"), "x.srt are not UTF-8"),
        ("1\n00:00:01,000 --> 00:00:02,500\n你好\n".encode("gb18030"), "x.srt are not UTF-8"),
        (b"1\nnow --> 00:00:02,500\nWell\n", "'now' is not a time"),
        (b"1\n00:00:02,500 --> then\nWell\n", "'then' is not a time"),
        ("1\n00:00:01,000 --> 00:00:02,500\nWell\n".encode("utf-16-le"), "neither SRT nor WebVTT"),
        (b"[Script Info]\nTitle: x\n", "neither SRT nor WebVTT"),
    ],
)
def test_unreadable_subtitles_raise(tmp_path, data, message):
    (tmp_path / "x.srt").write_bytes(data)
    with pytest.raises(MediaError, match=message):
        read_subtitles(tmp_path / "x.srt")


def test_empty_subtitles(tmp_path):
    (tmp_path / "x.srt").touch()
    assert read_subtitles(tmp_path / "x.srt") == []
    assert spoken([], [0], INFO, "official") == ""


def test_subtitles_in_prompts(tmp_path):
    folder = write_video_mme(tmp_path)
    (folder / "subtitle" / f"{SECOND}.srt").touch()
    latin = "1\n0:0:1,0 --> 0:0:2,0\nÄ".encode("latin-1")
    (folder / "subtitle" / f"{THIRD}.srt").write_bytes(latin)
    task = find_task("video-mme", data=folder, subtitles=True)
    first, _, _, second, _, _, third, *_ = task.docs(None, 0)
    text = "This video's subtitles are listed below:\nfirst words\nwithout a font\nlast words"
    assert task.media(first)["question"].startswith(text)
    assert "subtitles" not in task.media(second)["question"]
    with pytest.raises(MediaError, match="not UTF-8"):
        task.media(third)


def test_missing_videos_are_reported(tmp_path, capsys):
    folder = write_video_mme(tmp_path / "data", missing=(SECOND,))
    task = find_task("video-mme", data=folder, num_frames=2)
    capsys.readouterr()
    run = evaluate(FakeVLM(), task, out=tmp_path / "o")
    assert capsys.readouterr().err == f"1 of 3 videos are not in {folder}: {SECOND}\n"
    errors = {s["doc_id"]: s["error"] for s in run.samples.values() if "error" in s}
    assert list(errors) == ["002-1", "002-2", "002-3"]
    assert errors["002-1"] == f"video {SECOND} of 002-1 is not in {folder}"
    text, _ = write_report(tmp_path / "o", tmp_path / "o")
    assert "3 samples of `none` failed and count as wrong" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": OPTIONS[:3]}, "001-1: options must be a list of four texts"),
        ({"options": "['A', 'B', 'C', 'D']"}, "001-1: options must be a list of four texts"),
        ({"answer": "E"}, "001-1: answer is 'E'"),
    ],
)
def test_invalid_video_mme_rows_raise(tmp_path, change, message):
    file = write_plain(tmp_path / "test.parquet", [video_question(FIRST, 1, **change)])
    with pytest.raises(VLMFastError, match=message):
        find_task("video-mme", data=file).docs(None, 0)


def test_video_folder(films, tmp_path):
    file = write_plain(tmp_path / "test.parquet", VIDEO_MME[:1])
    task = find_task("video-mme", data=file, videos=films)
    assert len(task.media(task.docs(None, 0)[0])["video"]) == 4
    (tmp_path / f"{FIRST}.mp4").write_bytes((films / "data" / f"{FIRST}.mp4").read_bytes())
    task = find_task("video-mme", data=file)
    assert len(task.media(task.docs(None, 0)[0])["video"]) == 4


# --- end to end ----------------------------------------------------------------------------------


def samples(folder: Path) -> dict:
    return read(folder).samples


def test_hidden_answers_have_no_score(college, tmp_path):
    task = find_task("mmmu", data=college, split="test")
    run = evaluate(FakeVLM(), task, out=tmp_path)
    assert {s["score"] for s in run.samples.values()} == {None}
    answers = json.loads((run.path / "submission.json").read_text())
    assert list(answers) == list(run.samples)
    assert answers["test_Physics_1"] in "ABCDEFGHI"
    raw = run.samples["test_Music_1"]["resps"][0][0]
    assert answers["test_Music_1"] == raw
    text, files = write_report(tmp_path, tmp_path)
    assert "so the runs have no scores" in text
    assert [file.name for file in files] == ["report.md", "report.json"]  # nothing to plot


@pytest.mark.parametrize("subtitles", [pytest.param(False, marks=pytest.mark.slow), True])
def test_video_mme_with_the_shipped_model(films, tmp_path, subtitles):
    flags = ["--subtitles"] if subtitles else []
    run("video-mme", "--data", films, "--out", tmp_path, "--num-frames", 4, *flags)
    name = "video-mme-subtitles" if subtitles else "video-mme"
    found = samples(tmp_path / name / "none")
    assert len(found) == 9
    assert not any("error" in s for s in found.values())
    meta = json.loads((tmp_path / name / "none" / "meta.json").read_text())
    assert meta["data"] == films.name
    assert {"model_revision", "dtype", "device", "versions", "batch_size", "command"} <= set(meta)
    assert meta["options"] == {"mode": "official", "num_frames": 4, "subtitles": subtitles}
    text, _ = write_report(tmp_path, tmp_path / "r")
    assert "videomme_perception_score" in text and "score_over_all" in text
    for name in ("short", "medium", "long", "Multilingual", "OCR Problems"):
        assert f"| {name} | 3 |" in text or name == "Multilingual", name


def test_empty_output_is_wrong(college, objects, tmp_path):
    class Silent(FakeVLM):
        def ask(self, *args, **kwargs):
            answer = super().ask(*args, **kwargs)
            answer.text = ""
            return answer

    first, again = (
        evaluate(Silent(), find_task("mmmu", data=college), out=tmp_path / str(i)) for i in (1, 2)
    )
    assert first.samples == again.samples
    assert not any(s["answered"] for s in first.samples.values())
    found = summarise(first)["metrics"]["fallbacks"]
    assert found == sum("choices" in s for s in first.samples.values()) == 6
    pope = evaluate(Silent(), find_task("pope", data=objects), out=tmp_path / "p")
    assert {s["filtered_resps"][0] for s in pope.samples.values()} == {"yes"}


def test_guesses_do_not_count_as_agreement(college, tmp_path):
    class Mumbling(FakeVLM):
        """Gives an answer that cannot be parsed, different for each recipe."""

        def ask(self, *args, recipe=None, **kwargs):
            answer = super().ask(*args, recipe=recipe, **kwargs)
            answer.text = f"hm {recipe}"
            return answer

    task = find_task("mmmu", data=college)
    full, other = (evaluate(Mumbling(), task, r, tmp_path) for r in (None, "random"))
    choice = [s for s in full.samples.values() if "choices" in s]
    assert all(s["filtered_resps"] == other.samples[s["doc_id"]]["filtered_resps"] for s in choice)
    assert summarise(other, full)["loyalty"] == 0.0
    assert summarise(full, full)["loyalty"] == 1.0


# --- paths in data -------------------------------------------------------------------------------


@pytest.fixture
def data_root(tmp_path):
    """An image in the data folder, one outside it, and a link from the first to the second."""
    (tmp_path / "data").mkdir()
    for name, number in (("data/inside.png", 1), ("outside.png", 2)):
        (tmp_path / name).write_bytes(stored(drawn(number))["bytes"])
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "data" / "circle.png").symlink_to("circle.png")
    return tmp_path


def task_of(data_root, value, **options):
    row = question("validation_Art_1", "<image 1> What?", ["a", "b"], "A", 0, image_1=value)
    write_plain(data_root / "data" / "validation.parquet", [row])
    task = find_task("mmmu", data=data_root / "data", **options)
    return task, task.docs(None, 0)[0]


@pytest.mark.parametrize("value", ["inside.png", "./inside.png", "../data/inside.png"])
@pytest.mark.parametrize("form", [lambda path: path, lambda path: {"bytes": None, "path": path}])
def test_paths_are_relative_to_the_data(data_root, value, form):
    task, doc = task_of(data_root, form(value))
    (image,) = task.media(doc)["images"]
    assert image.tobytes() == drawn(1).tobytes() != drawn(2).tobytes()


@pytest.mark.parametrize("value", ["../outside.png", "link.png", "{}/outside.png"])
def test_paths_outside_the_data_need_a_flag(data_root, value):
    value = value.format(data_root)
    task, doc = task_of(data_root, value)
    message = f"^{doc.doc_id}: image_1 is .*outside|link.png, which is not in .*--allow-outside"
    with pytest.raises(MediaError, match=message) as caught:
        task.media(doc)
    assert "--allow-outside" in str(caught.value) and "\n" not in str(caught.value)
    task, doc = task_of(data_root, value, allow_outside=True)
    (image,) = task.media(doc)["images"]
    assert image.tobytes() == drawn(2).tobytes()


@pytest.mark.parametrize("value", ["circle.png", "a\0b.png", "x" * 5000])
def test_invalid_paths_raise(data_root, value):
    for allowed in (False, True):
        task, doc = task_of(data_root, value, allow_outside=allowed)
        with pytest.raises(MediaError, match=r"^validation_Art_1: "):
            task.media(doc)


def test_urls_in_data_need_a_flag(data_root, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fx.web_server(stored(drawn(3))["bytes"]) as address:
        url = f"{address}/image?key=secret"
        task, doc = task_of(data_root, url)
        with pytest.raises(
            MediaError, match=r"image_1 is the URL .*; use --allow-outside"
        ) as caught:
            task.media(doc)
        assert "secret" not in str(caught.value)
        task, doc = task_of(data_root, url, allow_outside=True)
        (image,) = task.media(doc)["images"]
    assert image.tobytes() == drawn(3).tobytes()


def test_pope_images_outside_the_data_need_a_flag(data_root):
    row = {**POPE[0], "image": "../outside.png"}
    write_plain(data_root / "data" / "test.parquet", [row])
    for allowed in (False, True):
        task = find_task("pope", data=data_root / "data", allow_outside=allowed)
        doc = task.docs(None, 0)[0]
        if allowed:
            assert task.media(doc)["images"].tobytes() == drawn(2).tobytes()
        else:
            with pytest.raises(MediaError, match="--allow-outside"):
                task.media(doc)


@pytest.mark.parametrize("how", ["link", "id", "subtitles"])
def test_videos_outside_the_data_need_a_flag(films, tmp_path, how):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    film, name = (films / "data" / f"{FIRST}.mp4").read_bytes(), FIRST
    (elsewhere / "film.mp4").write_bytes(film)
    if how == "link":
        (folder / f"{FIRST}.mp4").symlink_to(elsewhere / "film.mp4")
    elif how == "id":
        name = "../elsewhere/film"
    else:
        (folder / f"{FIRST}.mp4").write_bytes(film)
        (elsewhere / "film.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nHello\n\n")
        (folder / "subtitle").mkdir()
        (folder / "subtitle" / f"{FIRST}.srt").symlink_to(elsewhere / "film.srt")
    row = {**video_question(FIRST, 1), "videoID": name}
    write_plain(folder / "test.parquet", [row])
    for allowed in (False, True):
        options = {"subtitles": how == "subtitles", "allow_outside": allowed}
        task = find_task("video-mme", data=folder, num_frames=2, **options)
        doc = task.docs(None, 0)[0]
        if allowed:
            assert len(task.media(doc)["video"]) == 2
        else:
            with pytest.raises(MediaError, match=r"^001-1: its .* which is not in .*--allow-out"):
                task.media(doc)
