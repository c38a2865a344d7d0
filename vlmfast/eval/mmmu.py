"""The task ``mmmu``: college questions with images (arXiv 2311.16502)."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlmfast.errors import MediaError, VLMFastError

from .data import Rows, read_docs, row_image
from .scorers import check_mode, drawn_by, letters, versioned
from .scorers.mmmu import SUBJECTS, judge, subject_of
from .tasks import HIDDEN, Doc, check_choice, grey

if TYPE_CHECKING:
    from PIL import Image

SPLITS = ("dev", "validation", "test")
_CHOICE, _OPEN = "multiple-choice", "open"
_KINDS = {_CHOICE: _CHOICE, _OPEN: _OPEN, "short-answer": _OPEN}
_IMAGES = tuple(f"image_{i}" for i in range(1, 8))
_MARK = re.compile(r"<image (\d+)>")
_DIRECTLY = "Answer with the option's letter from the given choices directly."
_BRIEFLY = "Answer the question using a single word or phrase."


@dataclass
class MMMU:
    """Multiple-choice and open questions of 30 subjects in six disciplines.

    In official prompts images precede the text, in the order of their numbers, and the text refers
    to them unchanged. The other code bases place them within the text (`interleaved`).

    Parameters
    ----------
    data : str or Path
        A parquet file, a folder of them, or a hub id.
    split : {"validation", "dev", "test"}
        The answers of ``test`` are hidden: its runs have no score but a ``submission.json``.
    mode : {"official", "lmms-eval", "vlmevalkit"}
        Source of the prompts, parser and score.
    allow_outside : bool
        Also load images from URLs and from paths outside the folder of `data`.
    """

    data: str | Path = "MMMU/MMMU"
    split: str = "validation"
    mode: str = "official"
    allow_outside: bool = False
    _rows: Rows = field(init=False, repr=False)

    version: ClassVar[str] = "1"
    controls: ClassVar[tuple[str, ...]] = ("question-only",)

    def __post_init__(self) -> None:
        self.mode = check_mode(self.mode)
        check_choice("split", self.split, SPLITS)
        needed = ("id", "question", "options", "answer", "question_type", "image_1")
        self._rows = Rows(self.data, self.split, needed, _IMAGES)

    @property
    def name(self) -> str:
        return "mmmu" if self.split == "validation" else f"mmmu-{self.split}"

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": versioned(self.mode), "split": self.split}

    @property
    def generation(self) -> dict[str, dict[str, Any]]:
        tokens = 512 if self._bare else 128
        return {"question": {"do_sample": False, "max_new_tokens": tokens}}

    @property
    def interleaved(self) -> bool:
        """Whether prompts place images within the text."""
        return self.mode != "official" and not self._bare

    @property
    def _bare(self) -> bool:
        """lmms-eval's task of the test split: images first, and a text without instruction."""
        return self.mode == "lmms-eval" and self.split == "test"

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """All questions, or the first ``limit`` of each subject."""
        return read_docs(self._rows, self._doc, limit, seed, "subject")

    def _doc(self, number: int, row: dict[str, Any]) -> Doc:
        doc_id, kind = row["id"], _KINDS.get(row["question_type"])
        if kind is None:
            raise VLMFastError(f"{doc_id}: question_type is {row['question_type']!r}")
        options = read_options(doc_id, row["options"])
        if kind == _CHOICE and not options:
            raise VLMFastError(f"{doc_id} is a multiple-choice question without options")
        subject, answer = subject_of(doc_id), row["answer"]
        groups = {
            "discipline": SUBJECTS.get(subject, "other"),
            "subject": subject,
            "question_type": kind,
        }
        if row.get("topic_difficulty"):
            groups["topic_difficulty"] = row["topic_difficulty"]
        return Doc(
            doc_id,
            "question",
            "image",
            doc_id,
            prompt(row["question"], options, kind, self.mode, instruct=not self._bare),
            answer if isinstance(answer, str) else repr(answer),
            "question",
            number,
            tuple(groups.items()),
            options if kind == _CHOICE else (),
        )

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        """The images that the prompt refers to, or the messages that contain them."""
        row, names = self._rows.row(doc.seed), named_images(doc.question)
        if self.mode == "vlmevalkit" and not names:
            names = [name for name in _IMAGES if row.get(name) is not None]
        try:
            images = [row_image(row, name, self.data, self.allow_outside) for name in names]
        except MediaError as error:
            raise MediaError(f"{doc.doc_id}: {error}") from error
        images = [grey(image) for image in images] if control else images
        if not self.interleaved:
            return {"images": images}
        content = interleave(doc.question, dict(zip(names, images, strict=True)), self.mode)
        return {"messages": [{"role": "user", "content": content}]}

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        """The parsed answer and its score; the score is None if the target is hidden."""
        kind = dict(doc.groups)["question_type"]
        parsed, score = judge(
            text, doc.options, doc.target, kind, self.mode, guess=drawn_by(doc.doc_id)
        )
        values = parsed.answer if isinstance(parsed.answer, list) else [parsed.answer]
        found = {
            # JSON cannot represent "inf" and "nan".
            "filtered_resps": [
                v if isinstance(v, str) or math.isfinite(v) else str(v) for v in values
            ],
            "score": None if doc.target == HIDDEN else score,
            "answered": parsed.found,
        }
        return found | ({"choices": len(doc.options)} if doc.options else {})

    def submission(self, samples: Iterable[dict[str, Any]]) -> dict[str, str] | None:
        """For the split whose answers are hidden, what the authors' server takes."""
        return submission(samples) if self.split == "test" else None


def read_options(doc_id: str, text: Any) -> tuple[str, ...]:
    """The options of a question, which the data set has as the text of a Python list.

    Raises
    ------
    VLMFastError
        When it is no list, or has more options than there are letters.
    """
    value = text
    if isinstance(text, str):
        try:
            value = ast.literal_eval(text) if text.strip() else []
        except (ValueError, SyntaxError) as error:
            raise VLMFastError(f"{doc_id}: options are no list: {text!r}") from error
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise VLMFastError(f"{doc_id}: options are no list: {text!r}")
    if len(value) > 26:
        raise VLMFastError(f"{doc_id} has {len(value)} options; at most 26 are allowed")
    return tuple(str(option) for option in value)


def prompt(
    question: str, options: tuple[str, ...], kind: str, mode: str, *, instruct: bool = True
) -> str:
    """Format a question as in the code base ``mode``; lmms-eval's also without instruction."""
    named = list(zip(letters(len(options)), options, strict=True)) if kind == _CHOICE else []
    if mode == "vlmevalkit":
        lines = "".join(f"{letter}. {text}\n" for letter, text in named)
        ask = f"Options:\n{lines}Please select the correct answer from the options above. \n"
        return f"Question: {question}\n" + (ask if named else "")
    if mode == "lmms-eval":
        lines = "\n".join(f"{letter}. {text}" for letter, text in named)
        ask = (_DIRECTLY if named else _BRIEFLY) if instruct else ""
        return f"{question}\n{lines}\n\n{ask}" if named else f"{question}\n\n{ask}"
    lines = "".join(f"({letter}) {text}\n" for letter, text in named)
    return f"{question}\n{lines}\n{_DIRECTLY}" if named else f"{question}\n{_BRIEFLY}"


def named_images(text: str) -> list[str]:
    """``image_1`` for each ``<image 1>`` in the text, without duplicates, sorted by number."""
    return [f"image_{i}" for i in sorted({int(i) for i in _MARK.findall(text)})]


def interleave(text: str, images: dict[str, Image.Image], mode: str) -> list[dict[str, Any]]:
    """A prompt with its images within the text, as the code base ``mode`` places them.

    VLMEvalKit replaces each ``<image 1>`` by that image, and puts all images before a text without
    marks. lmms-eval replaces the n-th mark by the n-th image, whatever the mark's number, and shows
    each image once: with more marks than images, the text between the superfluous ones is lost.

    Parameters
    ----------
    text : str
    images : dict of str to PIL.Image.Image
        By ``image_1`` and so on, in ascending order.
    mode : {"lmms-eval", "vlmevalkit"}

    Returns
    -------
    list of dict
        Content entries in Hugging Face's chat schema.
    """
    shown = {name: {"type": "image", "image": image} for name, image in images.items()}
    texts, numbers = _MARK.split(text)[::2], _MARK.findall(text)
    if mode == "vlmevalkit":
        first, *others = ({"type": "text", "text": part} for part in texts)
        if not others:
            return [*shown.values(), first]
        named = [shown[f"image_{number}"] for number in numbers]
        return [first, *chain.from_iterable(zip(named, others, strict=True))]
    texts = [part.strip() for part in "<image>".join(texts).split("<image>")]
    content: list[dict[str, Any]] = []
    for index, image in enumerate(shown.values()):
        if index < len(texts) - 1 and texts[index]:
            content.append({"type": "text", "text": texts[index]})
        content.append(image)
    return [*content, {"type": "text", "text": texts[-1]}]


def submission(samples: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Letters and unmodified open answers by id, in the format of the authors' server."""
    return {
        s["doc_id"]: s["filtered_resps"][0] if s.get("choices") else s["resps"][0][0]
        for s in samples
        if s["resps"]
    }
