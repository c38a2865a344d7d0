"""The task ``pope``: whether an image contains an object (arXiv 2305.10355)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vlmfast.errors import MediaError, VLMFastError

from .data import Rows, read_docs, row_image
from .scorers import check_mode, judged, versioned
from .scorers.pope import parse
from .tasks import Doc, grey

_ASK = {
    "official": "{}",
    "lmms-eval": "{}\nAnswer the question using a single word or phrase.",
    "vlmevalkit": "{} Please answer yes or no.",
}


@dataclass
class POPE:
    """Yes-or-no questions, half of them about absent objects.

    Absent objects were sampled uniformly (``random``), from frequent objects (``popular``) or from
    objects that often occur together with those in the image (``adversarial``).

    Parameters
    ----------
    data : str or Path
        A parquet file, a folder of them, or a hub id.
    mode : {"official", "lmms-eval", "vlmevalkit"}
        Source of the prompts, parser and score.
    allow_outside : bool
        Also load images from URLs and from paths outside the folder of `data`.
    """

    data: str | Path = "lmms-lab/POPE"
    mode: str = "official"
    allow_outside: bool = False
    _rows: Rows = field(init=False, repr=False)

    name: ClassVar[str] = "pope"
    version: ClassVar[str] = "1"
    controls: ClassVar[tuple[str, ...]] = ("question-only",)

    def __post_init__(self) -> None:
        self.mode = check_mode(self.mode)
        needed = ("question_id", "question", "answer", "category", "image")
        self._rows = Rows(self.data, "test", needed, ("image",))

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": versioned(self.mode)}

    @property
    def generation(self) -> dict[str, dict[str, Any]]:
        return {"question": {"do_sample": False, "max_new_tokens": 128}}

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """All questions, or the first ``limit`` of each category."""
        return read_docs(self._rows, self._doc, limit, seed, "category")

    def _doc(self, number: int, row: dict[str, Any]) -> Doc:
        doc_id = f"{row['category']}-{row['question_id']}"
        target = str(row["answer"]).strip().lower()
        if target not in ("yes", "no"):
            raise VLMFastError(f"{doc_id}: answer is {row['answer']!r}; it must be yes or no")
        return Doc(
            doc_id,
            "question",
            "image",
            str(row.get("image_source") or doc_id),
            _ASK[self.mode].format(row["question"].strip()),
            target,
            "question",
            number,
            (("category", row["category"]),),
        )

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        try:
            image = row_image(self._rows.row(doc.seed), "image", self.data, self.allow_outside)
        except MediaError as error:
            raise MediaError(f"{doc.doc_id}: {error}") from error
        return {"images": grey(image) if control else image}

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        return judged(parse(text, self.mode), doc.target)
