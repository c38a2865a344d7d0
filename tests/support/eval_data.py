"""Generated data sets of a few questions in the schemas of the real ones."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import av
from PIL import Image

from vlmfast.scenes.examples import EVAL_SEED_START, image_example, video_example

IMAGES = [f"image_{i}" for i in range(1, 8)]


@cache
def drawn(number: int) -> Image.Image:
    return image_example(EVAL_SEED_START + number).image


def stored(image: Image.Image) -> dict[str, Any]:
    """An image as stored in the hub's parquet files."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def question(name: str, text: str, options: Any, answer: Any, images: int = 1, **more: Any) -> dict:
    """A row of MMMU; its k-th image is drawn with number ``10 k``."""
    row = {
        "id": name,
        "question": text,
        "options": options if isinstance(options, str) else repr(options),
        "explanation": "",
        **dict.fromkeys(IMAGES),
        "img_type": "['Tables']",
        "answer": answer,
        "topic_difficulty": "Easy",
        "question_type": "multiple-choice",
        "subfield": "Anything",
    }
    row |= {f"image_{i}": stored(drawn(10 * i)) for i in range(1, images + 1)}
    return row | more


OPEN = {"question_type": "open"}
NINE = [f"thing {i}" for i in range(9)]
MMMU = [
    question("validation_Accounting_1", "<image 1> How many?", ["1", "2", "3", "4"], "B"),
    question("validation_Accounting_2", "<image 1> Sum?", ["$1", "it's 2"], "A"),
    question("validation_Art_1", "Which?", ["<image 2>", "<image 3>", "<image 1>"], "A", 3),
    question("validation_Art_Theory_1", "<image 2> after <image 1>?", ["yes", "no"], "A", 2),
    question("validation_Math_1", "<image 1> Count, see <image 1>.", "[]", "2", **OPEN),
    question("validation_Math_2", "<image 1> Where?", [], "['left', 'on the left']", **OPEN),
    question("validation_Physics_1", "<image 1> Which thing?", NINE, "I"),
    question("validation_Physics_2", "<image 1> Any?", ["a", "b", "c"], "['B', 'C']"),
    question("validation_Music_1", "<image 1> What?", "", "circle", question_type="short-answer"),
]


# Where the questions of `interleaved` refer to their images; the last field of each is open.
_PLACED = (
    ("<image 1> {}", 1, False),
    ("{} <image 1>", 1, False),
    ("Look at <image 1> and at <image 2>. {}", 2, False),
    ("First <image 2>, then <image 1>. {}", 2, False),
    ("<image 1> {} See <image 1> again.", 1, False),
    ("<image 1> <image 2> <image 3> {}", 3, False),
    ("<image 1> {}", 1, True),
    ("In <image 1>: {} Compare <image 2>.", 2, True),
    ("<image 3> before <image 1> and <image 2>: {}", 3, False),
    ("{} Answer for <image 2>, not for <image 1>.", 2, False),
)


def interleaved(count: int) -> list[dict]:
    """Rows of MMMU whose questions refer to their images at different positions.

    The questions are those of the drawn scene in the first image.
    """
    subjects, rows = ("Math", "Art_Theory", "Physics"), []
    for number in range(count):
        text, images, is_open = _PLACED[number % len(_PLACED)]
        scene = image_example(EVAL_SEED_START + number)
        asked = [qa for qa in scene.qa if qa.type != "mc"]
        qa = asked[number % len(asked)]
        options = ["no", "left", "7"]
        options.insert(number % 4, qa.answer)
        name = f"validation_{subjects[number % 3]}_{number}"
        answer = qa.answer if is_open else "ABCD"[number % 4]
        kind = OPEN if is_open else {}
        row = question(name, text.format(qa.question), options, answer, images, **kind)
        shown = {f"image_{i + 1}": stored(drawn(number + i)) for i in range(images)}
        rows.append(row | shown)
    return rows


def write_rows(file: Path, rows: list[dict], images: list[str] = IMAGES) -> Path:
    """A parquet file as written by ``datasets``, with column types."""
    from datasets import Dataset, Features
    from datasets import Image as Picture

    file.parent.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_list(rows)
    types = Features({**table.features, **{key: Picture() for key in images}})
    table.cast(types).to_parquet(str(file))
    return file


def write_plain(file: Path, rows: list[dict]) -> Path:
    """A parquet file not written by ``datasets``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


# --- Video-MME -----------------------------------------------------------------------------------

VIDEOS = {"aaaaaaaaaa1": "short", "bbbbbbbbbb2": "medium", "cccccccccc3": "long"}
OPTIONS = ["A. Apples.", "B. Candles.", "C. Berries.", "D. The three kinds are of the same number."]


def video_question(video: str, number: int, **more: Any) -> dict:
    index = list(VIDEOS).index(video) + 1
    return {
        "video_id": f"{index:03d}",
        "duration": VIDEOS[video],
        "domain": "Knowledge" if number % 2 else "Multilingual",
        "sub_category": "Humanity & History" if number % 2 else "Multilingual",
        "url": f"https://example.org/{video}",
        "videoID": video,
        "question_id": f"{index:03d}-{number}",
        "task_type": ("Counting Problem", "OCR Problems", "Action Reasoning")[number - 1],
        "question": f"Which is it, number {number}?",
        "options": OPTIONS,
        "answer": "CAD"[number - 1],
        **more,
    }


VIDEO_MME = [video_question(video, number) for video in VIDEOS for number in (1, 2, 3)]

WHITE = '<font color="white" size=".72c">{}</font>'
SUBTITLES = "\n\n".join(
    [
        f"1\n00:00:00,000 --> 00:00:00,400\n{WHITE.format('first words')}",
        f"2\n00:00:00,400 --> 00:00:00,500\n{WHITE.format('never on screen')}",
        "3\n00:00:01,000 --> 00:00:01,400\nwithout a font",
        f"4\n00:00:01,400 --> 00:00:02,000\n{WHITE.format('last words')}\nin two lines",
        "",
    ]
)


def write_video(file: Path, number: int) -> Path:
    """A video of 2 seconds: four drawn frames at 2 fps."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=2)
        frames = video_example(EVAL_SEED_START + number).frames
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return file


def many_video_questions(videos: int) -> list[dict]:
    """Three questions about each of many videos, with different answers."""
    rows = []
    for index in range(videos):
        scene = video_example(EVAL_SEED_START + index)
        for number in (1, 2, 3):
            qa = scene.qa[number % len(scene.qa)]
            row = video_question(list(VIDEOS)[index % 3], number)
            texts = [f"{word}." for word in ("Left", "Nothing", "Red")]
            texts.insert((index + number) % 4, f"{qa.answer}.")
            row |= {
                "video_id": f"{index:03d}",
                "videoID": f"video_{index:05d}",
                "question_id": f"{index:03d}-{number}",
                "question": qa.question,
                "options": [f"{x}. {text}" for x, text in zip("ABCD", texts, strict=True)],
                "answer": "ABCD"[(index + number) % 4],
            }
            rows.append(row)
    return rows


def write_many_videos(folder: Path, videos: int) -> Path:
    """As `write_video_mme`, with the rows of `many_video_questions`; every second has subtitles."""
    rows = many_video_questions(videos)
    write_rows(folder / "videomme" / "test-00000-of-00001.parquet", rows, [])
    (folder / "subtitle").mkdir()
    for number, name in enumerate(dict.fromkeys(row["videoID"] for row in rows)):
        write_video(folder / "data" / f"{name}.mp4", number)
        if number % 2:
            (folder / "subtitle" / f"{name}.srt").write_text(SUBTITLES, encoding="utf-8")
    return folder


def write_video_mme(folder: Path, missing: tuple[str, ...] = ()) -> Path:
    """The layout of the hub repository after its archives are unpacked."""
    write_rows(folder / "videomme" / "test-00000-of-00001.parquet", VIDEO_MME, [])
    for number, name in enumerate(VIDEOS):
        if name not in missing:
            write_video(folder / "data" / f"{name}.mp4", number)
    (folder / "subtitle").mkdir()
    (folder / "subtitle" / f"{next(iter(VIDEOS))}.srt").write_text(SUBTITLES, encoding="utf-8")
    return folder


# --- POPE ----------------------------------------------------------------------------------------

POPE = [
    {
        "id": str(number),
        "question_id": str(number % 4 + 1),
        "question": f"Is there a {thing} in the image?",
        "answer": ("yes", "no")[number % 2],
        "image_source": f"drawn_{number % 2}",
        "image": stored(drawn(number % 2)),
        "category": category,
    }
    for category in ("adversarial", "popular", "random")
    for number, thing in enumerate(("circle", "dog", "square", "car"))
]
