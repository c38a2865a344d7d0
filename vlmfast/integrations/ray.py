"""Batch inference with Ray Data: one model for each actor. Ray itself is not imported here.

>>> dataset.map_batches(
...     Answerer,
...     fn_constructor_kwargs={"model": "tiny", "recipe": "balanced"},
...     batch_size=32,
...     compute=ray.data.ActorPoolStrategy(size=2),
...     max_restarts=-1,
...     max_task_retries=-1,
... )

With the last two arguments Ray starts an actor that died again, and repeats its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vlmfast.api.answer import Answer, Request
from vlmfast.api.vlm import VLM
from vlmfast.errors import VLMFastError, is_out_of_memory


class Answerer:
    """Answers a question about an image in each row of a batch.

    A row that cannot be answered gets an ``error`` and no answer; the other rows do not change.

    Parameters
    ----------
    model : str
        As in `VLM.from_pretrained`: a name, because every actor loads its own model.
    recipe : str, optional
    image, question : str
        Columns of the images (paths, bytes or arrays) and of the questions.
    answer, error : str
        Columns that are added: the text or ``None``, and the reason or ``None``.
    batch_size : int
        Answers that are decoded together.
    device, dtype : optional
        As in `VLM.from_pretrained`.
    threads : int, optional
        Of PyTorch, in each actor; with several actors on one machine, its cores over theirs.
    **generation
        As in `VLM.ask`.

    Raises
    ------
    VLMFastError
        For a model that cannot be loaded, or a recipe that is not valid.
    """

    def __init__(
        self,
        model: str = "tiny",
        recipe: str | None = None,
        *,
        image: str = "image",
        question: str = "question",
        answer: str = "answer",
        error: str = "error",
        batch_size: int = 8,
        device: str | None = None,
        dtype: str = "auto",
        threads: int | None = None,
        **generation: Any,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.vlm = VLM.from_pretrained(model, device=device, dtype=dtype)
        self.recipe = self.vlm.recipe(recipe)
        self.image, self.question, self.answer, self.error = image, question, answer, error
        self.batch_size, self.generation = batch_size, generation

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """The batch with the answers.

        Raises
        ------
        VLMFastError
            If a column is missing.
        """
        for name in (self.image, self.question):
            if name not in batch:
                raise VLMFastError(
                    f"the dataset has no column {name!r}; it has {', '.join(map(repr, batch))}"
                )
        pairs = zip(batch[self.image], batch[self.question], strict=True)
        requests = [self._request(*pair) for pair in pairs]
        found = self._answers(requests)
        texts = [one.text if isinstance(one, Answer) else None for one in found]
        errors = [None if isinstance(one, Answer) else str(one) for one in found]
        return {**batch, self.answer: _column(texts), self.error: _column(errors)}

    def _request(self, image: Any, question: Any) -> Request | VLMFastError:
        if image is None or (isinstance(image, float) and np.isnan(image)):
            return VLMFastError(f"the row has no image in column {self.image!r}")
        if not isinstance(question, str):
            return VLMFastError(f"the row has no text in column {self.question!r}")
        image = str(image) if isinstance(image, str) else image
        return Request(str(question), images=image, recipe=self.recipe)

    def _answers(self, requests: Sequence[Request | VLMFastError]) -> list[Any]:
        """Answers and errors in the order of the rows."""
        found: list[Any] = list(requests)
        asked = [i for i, one in enumerate(requests) if isinstance(one, Request)]
        for i, one in zip(asked, self._ask([requests[i] for i in asked]), strict=True):
            found[i] = one
        return found

    def _ask(self, requests: Sequence[Any]) -> list[Any]:
        """Ask requests together, or in halves where the memory is too small for all of them."""
        if not requests:
            return []
        try:
            found: list[Any] = self.vlm.ask_many(
                requests,
                batch_size=min(self.batch_size, len(requests)),
                errors="keep",
                **self.generation,
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            found = [error] * len(requests)
        errors = {i: one for i, one in enumerate(found) if isinstance(one, Exception)}
        short = [i for i, one in errors.items() if is_out_of_memory(one)]
        if len(requests) == 1 and short:
            return [VLMFastError(f"the memory is too small for this row: {found[0]}")]
        half = len(short) // 2 if len(short) == len(requests) else len(short)
        for part in (short[:half], short[half:]):
            for i, one in zip(part, self._ask([requests[i] for i in part]), strict=True):
                found[i] = one
        return found


def _column(values: list[str | None]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
