"""The task ``video-mme``: questions about videos of seconds to an hour (arXiv 2405.21075)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlmfast.errors import MediaError, VLMFastError
from vlmfast.media import load_video, open_video

from .data import Rows, find_video, read_docs, read_subtitles, spoken, within
from .scorers import check_mode, judged, versioned
from .scorers.video_mme import parse_choice
from .tasks import Doc, grey

if TYPE_CHECKING:
    from vlmfast.media import VideoInfo

_SELECT = (
    "Select the best answer to the following multiple-choice question based on the video{}. "
    "Respond with only the letter (A, B, C, or D) of the correct option."
)
_AND = " and the subtitles"
_LISTED = "This video's subtitles are listed below:"
_BEST = "The best answer is:"
_SPOKEN = 32  # frames whose subtitles are in lmms-eval's prompts
_GROUPS = ("duration", "domain", "sub_category", "task_type")


@dataclass
class VideoMME:
    """Three questions with four options about each of 900 videos.

    Parameters
    ----------
    data : str or Path
        A parquet file, a folder of them, or a hub id.
    videos : str or Path, optional
        Folder of ``<videoID>.mp4``, or with such a folder ``data``, ``video`` or ``videos`` in it,
        and of ``subtitle/<videoID>.srt``; by default ``data`` if it is a folder. A question
        without its video is a failed sample.
    subtitles : bool
        Put the subtitles at the selected frames before the question.
    num_frames : int
        Evenly spaced frames of each video, including both ends, for vlmevalkit without them.
    mode : {"official", "lmms-eval", "vlmevalkit"}
        Source of the prompts, parser and score.
    allow_outside : bool
        Also load videos and subtitles whose links or ids lead outside their folder.
    """

    data: str | Path = "lmms-lab/Video-MME"
    videos: str | Path | None = None
    subtitles: bool = False
    num_frames: int = 32
    mode: str = "official"
    allow_outside: bool = False
    _rows: Rows = field(init=False, repr=False)
    _reported: bool = field(default=False, init=False, repr=False)

    version: ClassVar[str] = "1"
    controls: ClassVar[tuple[str, ...]] = ("question-only",)

    def __post_init__(self) -> None:
        self.mode = check_mode(self.mode)
        if self.num_frames < 1:
            raise VLMFastError(f"num_frames is {self.num_frames}; it must be at least 1")
        if self.videos is None and Path(self.data).exists():
            self.videos = self.data if Path(self.data).is_dir() else Path(self.data).parent
        if self.videos is None:
            raise VLMFastError("video-mme needs the folder of its videos: --videos DIR")
        if not Path(self.videos).is_dir():
            raise VLMFastError(f"videos {self.videos} is not a folder")
        needed = ("videoID", "question_id", "question", "options", "answer", *_GROUPS)
        self._rows = Rows(self.data, "test", needed)

    @property
    def name(self) -> str:
        return "video-mme-subtitles" if self.subtitles else "video-mme"

    @property
    def options(self) -> dict[str, Any]:
        mode = versioned(self.mode)
        return {"mode": mode, "num_frames": self.num_frames, "subtitles": self.subtitles}

    @property
    def generation(self) -> dict[str, dict[str, Any]]:
        return {"question": {"do_sample": False, "max_new_tokens": 16}}

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """All questions, or the first ``limit`` of each duration; reports missing videos."""
        docs = read_docs(self._rows, self._doc, limit, seed, "duration")
        if not self._reported:
            self._reported = True
            self._report_missing(dict.fromkeys(doc.media_id for doc in docs))
        return docs

    def _report_missing(self, names: dict[str, None]) -> None:
        missing = [name for name in names if find_video(self.videos, name) is None]
        if missing:
            print(
                f"{len(missing)} of {len(names)} videos are not in {self.videos}: "
                + ", ".join(missing),
                file=sys.stderr,
            )

    def _doc(self, number: int, row: dict[str, Any]) -> Doc:
        doc_id, options = row["question_id"], row["options"]
        if not isinstance(options, list | tuple) or len(options) != 4:
            raise VLMFastError(f"{doc_id}: options must be a list of four texts, not {options!r}")
        if row["answer"] not in ("A", "B", "C", "D"):
            raise VLMFastError(f"{doc_id}: answer is {row['answer']!r}; it must be A, B, C or D")
        return Doc(
            doc_id,
            "question",
            "video",
            row["videoID"],
            row["question"],
            row["answer"],
            "question",
            number,
            tuple((name, row[name]) for name in _GROUPS),
            tuple(options),
        )

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        """The selected frames with their times, and the prompt, which may contain their subtitles.

        In the mode lmms-eval the file instead of its frames, as in its messages.
        """
        path = find_video(self.videos, doc.media_id)
        if path is None:
            raise MediaError(f"video {doc.media_id} of {doc.doc_id} is not in {self.videos}")
        path = self._own(path, doc, "video")
        said = self._transcript(doc, path)
        question = prompt(doc.question, doc.options, self.mode, self.subtitles, said)
        if self.mode == "lmms-eval" and control is None:
            return {"video": path, "num_frames": self.num_frames, "question": question}
        video = load_video(path, select=self._frames)
        if control:
            video = replace(video, frames=[grey(frame) for frame in video])
        return {"video": video, "num_frames": len(video), "question": question}

    def _transcript(self, doc: Doc, path: Path) -> str | None:
        """The subtitles at the selected frames; None without a file, or if subtitles are off."""
        assert self.videos is not None  # see `__post_init__`
        file = Path(self.videos, "subtitle", f"{doc.media_id}.srt")
        if not self.subtitles or not file.is_file():
            return None
        file = self._own(file, doc, "subtitles")
        select: Any = {"select": self._frames}
        if self.mode == "lmms-eval":  # whatever the model sees
            select = {"num_frames": _SPOKEN}
        with open_video(path, **select) as video:
            return spoken(read_subtitles(file), video.indices, video.info, self.mode)

    def _own(self, path: Path, doc: Doc, what: str) -> Path:
        """Check that links of a file stay inside the folder."""
        assert self.videos is not None  # see `__post_init__`
        path = path.absolute()
        return within(
            Path(self.videos).absolute(), path, f"{doc.doc_id}: its {what}", self.allow_outside
        )

    def _frames(self, info: VideoInfo) -> list[int]:
        import numpy as np

        n = self.num_frames
        if self.mode == "vlmevalkit":
            step = info.frames / (n + 1)
            return sorted({int(i * step) for i in range(1, n + 1)})
        return sorted(set(np.linspace(0, info.frames - 1, n, dtype=int).tolist()))

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        return judged(parse_choice(text, doc.options, self.mode), doc.target)


def prompt(
    question: str, options: tuple[str, ...], mode: str, subtitles: bool, said: str | None
) -> str:
    """Format a question as in the code base ``mode``.

    Parameters
    ----------
    subtitles : bool
    said : str, optional
        Subtitles, or None if the video has none: the authors' prompt then has no subtitles, and
        lmms-eval's contains a remark.
    """
    asked = "\n".join([question, *options])
    if mode == "vlmevalkit":
        select = "\nThese are the frames of a video. "
        select += f"{_LISTED}\n{said or ''}\n" if subtitles else ""
        return f"{select}{_SELECT.format('')}\nQuestion: {asked}\nAnswer: "
    if mode == "lmms-eval":
        select = f"{_SELECT.format(_AND)}\n{asked}\n"
        if not subtitles:
            return f"{select}\nAnswer with the option's letter from the given choices directly."
        said = "No subtitles available" if said is None else said
        return f"{_LISTED} \n{said}\n{select}{_BEST}"
    if subtitles and said:
        return f"{_LISTED}\n{said}\n{_SELECT.format(_AND)}\n{asked}\n{_BEST}"
    return f"{_SELECT.format('')}\n{asked}\n{_BEST}"
