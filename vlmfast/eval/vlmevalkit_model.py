"""vlmfast as a model of VLMEvalKit; it needs the package ``vlmeval``.

``docs/evaluation.md`` shows how to add it to ``vlmeval/config.py``.
"""

from __future__ import annotations

from typing import Any

from vlmeval.vlm.base import BaseModel

from vlmfast.core.params import check_keys
from vlmfast.errors import MediaError, VLMFastError


class VLMFast(BaseModel):
    """A model under a recipe.

    VLMEvalKit asks its questions one after another. To decode in batches, evaluate with
    ``vlmfast eval --mode vlmevalkit --batch-size N``, or with lmms-eval.

    Parameters
    ----------
    pretrained : str
        ``tiny``, a local folder, or a hub id.
    recipe : str
    device, dtype, revision : str, optional
    nframe : int
        Frames of each video; VLMEvalKit replaces it by that of the data set.
    max_new_tokens : int
    **generation
        Further arguments of `VLM.chat`; decoding is greedy by default.

    Raises
    ------
    VLMFastError
        As `VLM.from_pretrained`, `Recipe.parse` and `VLM.chat` do.
    """

    # Names that VLMEvalKit reads.
    INTERLEAVE = True
    VIDEO_LLM = True
    is_api = False

    def __init__(
        self,
        pretrained: str = "tiny",
        recipe: str = "none",
        device: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        nframe: int = 32,
        max_new_tokens: int = 1024,
        **generation: Any,
    ) -> None:
        from vlmfast.api.vlm import VLM

        super().__init__()
        if nframe < 1:
            raise VLMFastError(f"nframe is {nframe}; it must be at least 1")
        self.nframe = nframe
        kwargs: dict[str, Any] = {} if revision is None else {"revision": revision}
        self.vlm = VLM.from_pretrained(pretrained, device=device, dtype=dtype, **kwargs)
        self.recipe = self.vlm.recipe(recipe)
        self.generation = {"do_sample": False, "max_new_tokens": max_new_tokens} | generation

    def generate_inner(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        """The answer to a question; its texts, images and videos form one turn of the user.

        Some data sets name roles of texts (``system``, or ``assistant`` for the start of an
        answer). As in VLMEvalKit's own models of Hugging Face, they are part of the question.
        """
        return self._answer([{"role": "user", "content": message}])

    def chat_inner(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        """The answer to the last turn of a conversation."""
        return self._answer(message)

    def _answer(self, turns: list[dict[str, Any]]) -> str:
        messages = [
            turn | {"content": [content_of(part, self.nframe) for part in turn["content"]]}
            for turn in turns
        ]
        return self.vlm.chat(messages, recipe=self.recipe, **self.generation).text


def content_of(part: dict[str, Any], num_frames: int) -> dict[str, Any]:
    """Convert a part of VLMEvalKit's messages for `VLM.chat`.

    Raises
    ------
    MediaError
        For kinds other than text, image and video.
    VLMFastError
        For unknown keys.
    """
    kind, value = part["type"], part["value"]
    check_keys(f"a message's {kind}", part, ("type", "value", "role"))
    if kind == "video":
        return {"type": "video", "video": value, "num_frames": num_frames}
    if kind in ("text", "image"):
        return {"type": kind, kind: value}
    raise MediaError(f"a message has {kind}; supported are text, images and videos")
