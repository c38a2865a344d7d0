"""A whole model on this machine: answers token by token, captures, threads, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vlmfast.api.vlm import VLM
from vlmfast.core.recipe import Recipe
from vlmfast.engine.graphs import Graphs, Record
from vlmfast.eval.bench import Referee, prompts

from .rows import Row, attempt

NEW_TOKENS = 24
_SLACK = 1 << 20  # bytes by which memory may grow over `_QUESTIONS` questions
_QUESTIONS = 8

Prompt = tuple[Image.Image, str]


class Reference:
    """Answers of Hugging Face's ``generate`` to a few prompts, and the comparison with them.

    Parameters
    ----------
    vlm : VLM
    asked : list of (image, question)
    """

    def __init__(self, vlm: VLM, asked: Sequence[Prompt]) -> None:
        self.vlm, self.asked, self.referee = vlm, asked, Referee(vlm)
        self.tokens = [self._generate(*prompt) for prompt in asked]

    def _generate(self, image: Image.Image, question: str) -> list[int]:
        inputs = self.vlm.inputs(question, images=image)
        given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        with torch.no_grad():
            tokens = self.vlm.model.generate(**inputs, **given)
        return tokens[0, inputs["input_ids"].shape[1] :].tolist()

    def compare(self, name: str, answers: Sequence[list[int]], about: str = "") -> Row:
        """Whether ``answers`` are those of the reference; near ties may be decided otherwise."""
        ties, wrong = 0, []
        for number, (want, got) in enumerate(zip(self.tokens, answers, strict=True)):
            prompt = self.asked[number]

            def asking(vlm: VLM, recipe: Recipe, prompt: Prompt = prompt, **given: Any) -> Any:
                return vlm.ask(prompt[1], images=prompt[0], recipe=recipe, **given)

            found = self.referee.judge(asking, Recipe(), want, got, number)
            if found is not None and found.bug:
                wrong.append(f"answer {number} differs from token {found.at} on")
            ties += found is not None
        note = "; ".join(wrong) or (f"{ties} near ties decided otherwise" if ties else "")
        about = about or f"{len(answers)} answers, {sum(map(len, answers))} tokens"
        return Row(name, not wrong, about, note)


def answers_of(vlm: VLM, asked: Sequence[Prompt]) -> list[list[int]]:
    """Greedy answers, each as if it were the first question."""
    with vlm.prefix_cache.bypassed():
        return [
            vlm.ask(question, images=image, max_new_tokens=NEW_TOKENS, do_sample=False).token_ids
            for image, question in asked
        ]


def check_decoding(name: str, reference: Reference, vlm: VLM) -> Row:
    """Whether a model answers as the reference."""
    return reference.compare(name, answers_of(vlm, reference.asked))


def check_capture(name: str, reference: Reference, vlm: VLM, record: Record | None) -> Row:
    """Whether captured steps, and their reuse by later questions, give the reference's answers.

    Parameters
    ----------
    vlm : VLM
        One that has not answered yet.
    record : callable, optional
        As in `Graphs`; CUDA graphs by default.
    """
    graphs = vlm.adapter.kept["graphs"] = Graphs(record=record)
    vlm.adapter.decoding = "graph"
    twice = [*reference.asked, *reference.asked]
    answers = answers_of(vlm, twice)
    about = f"{graphs.captured} captured, {graphs.reused} reused"
    half = len(reference.asked)
    first = reference.compare(name, answers[:half], about)
    again = reference.compare(name, answers[half:], about)
    if not (graphs.captured and graphs.reused):
        return Row(name, False, about, "no step was captured, or none was reused")
    if first.passed and not again.passed:
        return Row(name, False, about, f"when reused: {again.note}")
    return first


def check_thread(
    name: str, reference: Reference, vlm: VLM, current: AbstractContextManager[Any]
) -> Row:
    """Whether another thread gets the same answers.

    Parameters
    ----------
    current : context manager
        Entered in that thread; it may make another GPU the current one.
    """

    def answered() -> list[list[int]]:
        with current:
            return answers_of(vlm, reference.asked)

    with ThreadPoolExecutor(1) as pool:
        return reference.compare(name, pool.submit(answered).result())


def check_memory(name: str, ask: Callable[[], Any], measure: Callable[[], int]) -> Row:
    """Whether memory grows with the number of questions.

    Parameters
    ----------
    ask : callable
        Asks one question; its answer is dropped.
    measure : callable
        Bytes in use.
    """
    for _ in range(2):  # workspaces, captures and buffers of the first questions remain
        ask()
    before = measure()
    for _ in range(_QUESTIONS):
        ask()
    after = measure()
    about = f"{before / 1e6:.1f} MB, {after / 1e6:.1f} MB after {_QUESTIONS} questions"
    grown = after - before > _SLACK
    return Row(name, not grown, about, "memory grows with every question" if grown else "")


def bytes_in_use(device: torch.device) -> int:
    """Bytes of tensors: those allocated on a GPU, else those that Python objects refer to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    # By type: `isinstance` would ask lazy objects for their class, and other subclasses have plain
    # tensors inside, or no memory.
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for x in tensors
        if x.layout is torch.strided and x.device.type == device.type
        for storage in [x.untyped_storage()]
    }
    return sum(storages.values())


def check_rate(name: str, vlm: VLM, prompt: Prompt, copy_rate: float) -> Row:
    """Time of a decode step on a GPU, as a share of the time that reading the weights takes."""
    answer = None
    for _ in range(2):  # the first one captures
        answer = vlm.ask(
            prompt[1], images=prompt[0], max_new_tokens=64, do_sample=False, eos_token_id=None
        )
    assert answer is not None
    seconds = answer.stats.tpot_s
    head = vlm.model.get_output_embeddings()
    parts = {id(p): p for part in (vlm.adapter.decoder.layers, head) for p in part.parameters()}
    moved = sum(p.nbytes for p in parts.values())
    share = moved / seconds / copy_rate
    return Row(name, True, "one row, 64 tokens", "", None, seconds, moved, share)


def check_model(
    vlm: VLM,
    *,
    quick: bool = False,
    record: Record | None = None,
    others: Sequence[AbstractContextManager[Any]] = (),
    copy_rate: float | None = None,
) -> Iterator[Row]:
    """All checks of a model.

    Parameters
    ----------
    vlm : VLM
    quick : bool
        Two prompts instead of six.
    record : callable, optional
        As in `Graphs`; captures are checked with it, and on CUDA without it.
    others : sequence of context managers
        Each makes another GPU the current one.
    copy_rate : float, optional
        Bytes per second of a large copy; a decode step is timed with it.
    """
    device = vlm.adapter.device

    def fresh(decoding: str) -> VLM:
        return VLM(vlm.model, vlm.processor, decoding=decoding)

    asked = prompts(2 if quick else 6)
    made: list[Reference] = []

    def reference(name: str) -> Row:
        made.append(Reference(vlm, asked))
        tokens = sum(map(len, made[0].tokens))
        return Row(name, True, f"{len(asked)} answers, {tokens} tokens")

    yield (row := attempt("Hugging Face generate", reference))
    if not row.passed:
        return
    (known,) = made
    yield attempt("decoding=auto", check_decoding, known, vlm)
    yield attempt("decoding=eager", check_decoding, known, fresh("eager"))
    if record is not None or device.type == "cuda":
        yield attempt("capture and reuse", check_capture, known, fresh("auto"), record)
    else:
        yield Row("capture and reuse", None, note="CUDA graphs need a GPU")
    yield attempt("second thread", check_thread, known, vlm, nullcontext())
    for other in others:
        yield attempt("another current GPU", check_thread, known, vlm, other)
    yield attempt(
        "memory",
        check_memory,
        lambda: answers_of(vlm, asked[:1]),
        lambda: bytes_in_use(device),
    )
    if copy_rate is not None:
        yield attempt("decode step", check_rate, vlm, asked[0], copy_rate)
