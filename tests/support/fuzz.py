"""Fuzzing of every entry point with arguments of wrong types and ranges.

A seed determines a call. It may succeed; otherwise it must raise a `VLMFastError` of one line.
``Fuzz(model, processor).run(seed, count)`` makes calls and returns the violations.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig

import vlmfast
from vlmfast import VLM, Request, VLMFastError

NEW = 2
QUESTION = "what is here ?"
# Arguments whose valid values would give long answers.
LENGTHS = ("max_new_tokens", "max_length")
# Settings of Hugging Face's `generate`, its other arguments, vlmfast's own, and names of neither.
ARGUMENTS = (
    *LENGTHS,
    *sorted(vars(GenerationConfig()).keys() - LENGTHS),
    *("assistant_model", "custom_generate", "generation_config", "logits_processor"),
    *("prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer"),
    *("input_ids", "inputs_embeds", "past_key_values", "seed", "strict"),
    *("image", "vlmfast_run", "wrong_name"),
)
WORDS = ("hired", "fastv", "random", "snapkv", "kivi", "draft-ngram", "none", "hirde", "balanced")
WAYS = (
    *("ask", "ask", "ask", "question", "media", "recipe", "chat", "stream", "ask_many", "compare"),
    *("session", "messages", "attach", "attach", "tensors", "tensors", "long"),
)
ROLES = ("user", "assistant", "system", "", "tool", 3, None, ["user"])


# Valid values, so that calls pass the first check.
LEGAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([[40]], [[40, 41], [42]]),
    "begin_suppress_tokens": ([40, 41], [10**6]),
    "cache_implementation": ("static", "offloaded"),
    "do_sample": (True, 1, 0),
    "encoder_no_repeat_ngram_size": (0, 2, 1024),
    "encoder_repetition_penalty": (0.5, 2, 1e-20, 1e20),
    "eos_token_id": (2, -1, 10**6, [2, 40], torch.tensor([40]), None),
    "epsilon_cutoff": (0.01, 0.999),
    "eta_cutoff": (0.01, 0.999),
    "exponential_decay_length_penalty": ((0, 1.5), [1, 10.0]),
    "forced_bos_token_id": (40,),
    "forced_eos_token_id": (40, [40, 41]),
    "max_new_tokens": (1, 2, 10**4, 10**8),
    "max_length": (1, 60, 10**5),
    "max_time": (0, 1e-9, 5),
    "min_length": (0, 300),
    "min_new_tokens": (1, 2, 10**6),
    "min_p": (0.0, 0.1, 1),
    "no_repeat_ngram_size": (1, 2, 10**6),
    "pad_token_id": (0, -1, 10**6, None),
    "repetition_penalty": (0.5, 2, 1e-20, 1e20),
    "seed": (0, -1, 10**30),
    "sequence_bias": ({(40,): 5.0, (41, 42): -5.0}, [[[40], 1e30]]),
    "stop_strings": ("a", ["a", "bc"], "", "\u00e9", "x" * 300),
    "suppress_tokens": ([40], list(range(100)), []),
    "temperature": (1e-20, 0.7, 3, 1e30),
    "top_h": (0.1, 1.0),
    "top_k": (0, 1, 10**6, None),
    "top_p": (0, 0.1, 1),
    "typical_p": (1e-9, 0.5, 1),
    "watermarking_config": ({"bias": 2.0}, {"greenlist_ratio": 2.0}, {"seeding_scheme": "x"}),
}


def odd_image(rng: random.Random) -> Image.Image:
    mode = rng.choice(("RGB", "L", "RGBA", "P", "1", "I;16", "F", "CMYK", "LA"))
    return Image.new(mode, (rng.choice((1, 2, 40)), rng.choice((1, 3, 70))))


@dataclass
class Fuzz:
    """Draws and makes calls on one model.

    Attributes
    ----------
    answered, refused : int
        Numbers of calls that succeeded and that raised.
    """

    model: Any
    processor: Any
    answered: int = 0
    refused: int = 0
    passes: int = 0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vlm = VLM(self.model, self.processor)
        shape = (44, 60, 3)
        self.image = Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        self.model.get_decoder().register_forward_pre_hook(self._count)
        tensors = self.vlm.inputs(QUESTION, self.image)
        self.tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        self.expected = self._plain()

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def _plain(self) -> list[int]:
        return self.vlm.ask(QUESTION, self.image, max_new_tokens=NEW).token_ids

    # --- random arguments ------------------------------------------------------------------------

    def value(self, rng: random.Random) -> Any:
        """A value of any type."""
        nan, inf = float("nan"), float("inf")
        makers: tuple[Callable[[], Any], ...] = (
            lambda: rng.choice((None, True, False, 0, 1, -1, 2, 3, 7)),
            lambda: rng.choice((10**9, 10**30, -(10**12), 2**63)),
            lambda: rng.choice((0.0, 0.5, 1.0, 1.5, -0.5, 1e-320, 1e300, nan, inf, -inf)),
            lambda: rng.choice(("", " ", "3", "x", "auto", "a\nb", "\ud800", "never", "static")),
            lambda: rng.choice((b"", b"\x00\xff", bytearray(b"x"))),
            lambda: rng.choice(([], [1], [[1]], [None], [[]], ["a"], [2, 10**9], [nan], [1, [2]])),
            lambda: rng.choice(((), (1,), (1, 2.0), (3, nan), ((1,), 2.0))),
            lambda: rng.choice(({}, {"a": 1}, {(3,): 2.0}, {(): 1.0}, {"bias": "x"}, {3: 4})),
            lambda: rng.choice((object(), lambda *_: None, int, self.model, self.processor)),
            lambda: rng.choice((np.int64(2), np.float32(0.5), np.bool_(True), np.ones((2, 2)))),
            lambda: rng.choice(
                (torch.tensor(2), torch.tensor([1, 2]), torch.tensor(nan), torch.zeros(0))
            ),
        )
        return rng.choice(makers)()

    def generation(self, rng: random.Random) -> dict[str, Any]:
        """Generation arguments, mostly one odd one."""
        found: dict[str, Any] = {"max_new_tokens": NEW}
        if rng.random() < 0.3:
            found["do_sample"] = True
        for _ in range(rng.choice((1, 1, 1, 2))):
            name = rng.choice(ARGUMENTS)
            value = self.value(rng)
            if name in LEGAL and rng.random() < 0.6:
                value = rng.choice(LEGAL[name])
            if name in LENGTHS and value is None:
                continue  # the default answer would be long
            if name == "prefix_allowed_tokens_fn" and callable(value):
                # Exceptions of user functions propagate, and their results are only known after
                # prefill.
                value = lambda *_: [2, 3]  # noqa: E731
            found[name] = value
        return found

    def recipe(self, rng: random.Random) -> Any:
        if rng.random() < 0.2:
            return self.value(rng)
        parts = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            part = rng.choice(WORDS)
            for _ in range(rng.choice((0, 1, 2))):
                key = rng.choice(("", "budget=", "keep=", "positions=", "k=", "bits=", "x=", "="))
                number = rng.choice(("0.5", "1", "0", "-1", "nan", "1e9", "compact", "", "3/2"))
                part += rng.choice((":", ",", "::")) + key + number
            parts.append(part)
        return rng.choice(("+", "+", "++", " + ")).join(parts)

    def media(self, rng: random.Random) -> Any:
        makers: tuple[Callable[[], Any], ...] = (
            lambda: self.value(rng),
            lambda: odd_image(rng),
            lambda: [odd_image(rng), self.value(rng)],
            lambda: np.zeros(rng.choice(((0, 0, 3), (2, 2), (2, 2, 5), (1, 2, 3, 4, 5), (3,)))),
            lambda: np.full((4, 4, 3), rng.choice((np.nan, np.inf, -1.0, 300.0, 1j))),
            lambda: torch.full((3, 4, 4), rng.choice((0.5, float("nan"), 2e9))),
            lambda: [[self.image]],
        )
        return rng.choice(makers)()

    def question(self, rng: random.Random) -> Any:
        mark = self.vlm.adapter.image_token()
        texts = (QUESTION, mark, f"a {mark} b", "\ud800", "x" * 100_000, "\x00", " ", "e\u0301", "")
        return self.value(rng) if rng.random() < 0.4 else rng.choice(texts)

    def messages(self, rng: random.Random) -> Any:
        def part() -> Any:
            kind = rng.choice(("text", "text", "image", "video", "audio", 3, None))
            found = {"type": kind, "text": self.question(rng)}
            if kind in ("image", "video"):
                found[kind] = self.media(rng)
            return rng.choice((found, found, found, self.value(rng)))

        def turn() -> Any:
            content = rng.choice((QUESTION, [part()], [part(), part()], self.value(rng)))
            found = {"role": rng.choice((*ROLES, *["user"] * 8)), "content": content}
            return rng.choice((found, found, found, self.value(rng)))

        return rng.choice(([turn()], [turn()], [turn(), turn()], self.value(rng)))

    def odd_tensor(self, rng: random.Random, tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point():
            fill = rng.choice((-1, 0, 1, 5, 10**6, 2**40))
        else:
            fill = rng.choice((float("nan"), float("inf"), -1.0))
        changes: tuple[Callable[[], Any], ...] = (
            lambda: tensor[:0],
            lambda: tensor[0],
            lambda: tensor[..., :-1],
            lambda: tensor[..., 1:],
            lambda: tensor.flip(-1),
            lambda: tensor.mT if tensor.dim() > 1 else tensor[None],
            lambda: torch.cat([tensor, tensor]),
            lambda: tensor[None],
            lambda: tensor.double(),
            lambda: tensor.bool(),
            lambda: tensor.long(),
            lambda: tensor.to(torch.complex64),
            lambda: torch.full_like(tensor, fill),
            lambda: tensor.clone().index_fill_(-1, torch.tensor([0]), fill),
            lambda: tensor.tolist(),
            lambda: self.value(rng),
        )
        return rng.choice(changes)()

    # --- calls -----------------------------------------------------------------------------------

    def call(self, rng: random.Random) -> tuple[str, bool, Callable[[], Any]]:
        """Description, whether its error must precede any computation, and the call."""
        vlm, plain = self.vlm, {"max_new_tokens": NEW}
        way = rng.choice(WAYS)
        if way == "ask":
            given, image = self.generation(rng), rng.choice((self.image, None))
            return f"ask {given}", True, lambda: vlm.ask(QUESTION, image, **given)
        if way == "question":
            question = self.question(rng)
            return f"question {question!r:.80}", True, lambda: vlm.ask(question, **plain)
        if way == "media":
            name, media = rng.choice(("images", "video")), self.media(rng)
            given = {name: media, rng.choice(("num_frames", "fps", "timestamps")): self.value(rng)}
            if rng.random() < 0.5:
                given = {name: media}
            return f"media {given}", True, lambda: vlm.ask(QUESTION, **given, **plain)
        if way == "recipe":
            recipe = self.recipe(rng)
            return (
                f"recipe {recipe!r:.80}",
                False,
                lambda: vlm.ask(QUESTION, self.image, recipe=recipe, **plain),
            )
        if way == "chat":
            messages = self.messages(rng)
            return f"chat {messages!r:.200}", True, lambda: vlm.chat(messages, **plain)
        if way == "stream":
            given = self.generation(rng)
            return f"stream {given}", True, lambda: list(vlm.stream(QUESTION, **given))
        if way == "ask_many":
            odd = Request(self.question(rng), self.media(rng), generation=self.generation(rng))
            several = rng.choice(([odd], [QUESTION, odd], self.value(rng), [self.value(rng)]))
            size = rng.choice((2, self.value(rng)))
            return (
                f"ask_many {several!r:.200} {size!r:.40}",
                False,
                lambda: vlm.ask_many(several, batch_size=size, **plain),
            )
        if way == "compare":
            recipes = rng.choice(([self.recipe(rng)], self.value(rng)))
            return (
                f"compare {recipes!r:.80}",
                False,
                lambda: vlm.compare(QUESTION, self.image, recipes=recipes, **plain),
            )
        if way == "session":
            given, question = self.generation(rng), rng.choice((QUESTION, self.question(rng)))

            def ask() -> None:
                with vlm.session(rng.choice((self.image, None))) as session:
                    self.passes = 0
                    session.ask(question, **given)

            return f"session {question!r:.40} {given}", True, ask
        if way == "messages":
            messages = rng.choice((self.messages(rng), self.value(rng)))

            def put() -> None:
                with vlm.session() as session:
                    session.messages = messages

            return f"messages {messages!r:.80}", True, put
        if way == "attach":
            given = self.generation(rng)
            return f"attach {given}", True, lambda: self.generate(given)
        if way == "tensors":
            name = rng.choice(list(self.tensors))
            given = plain | {name: self.odd_tensor(rng, self.tensors[name])}
            return f"tensors {name} {given[name]!r:.200}", True, lambda: self.generate(given)
        bound = self.value(rng)
        frames = [self.image] * 3
        return (
            f"long {bound!r:.40}",
            False,
            lambda: vlm.ask(QUESTION, video=frames, max_kv_tokens=bound, progress=False, **plain),
        )

    def generate(self, given: dict[str, Any]) -> Any:
        with vlmfast.attach(self.model, self.processor):
            return self.model.generate(**{**self.tensors, **given})

    def run(self, seed: int, count: int) -> list[str]:
        """Make calls and return the violations, one entry each."""
        for number in range(count):
            self.one(f"{seed}-{number}")
        return self.wrong

    def one(self, seed: str) -> None:
        what, early, call = self.call(random.Random(seed))
        what = f"{seed}: {what}".encode(errors="replace").decode()
        self.passes = 0
        try:
            call()
            self.answered += 1
        except VLMFastError as error:
            self.refused += 1
            if "\n" in str(error) or not str(error).strip() or len(str(error)) > 1000:
                self.wrong.append(f"{what}: not one line: {str(error)[:400]!r}")
            if early and self.passes:
                self.wrong.append(f"{what}: refused after {self.passes} forward passes: {error}")
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            lines = str(error)[:200]
            self.wrong.append(
                f"{what}: {type(error).__name__} {lines!r} at {frame.filename}:{frame.lineno}"
            )
        if self._plain() != self.expected:
            self.wrong.append(f"{what}: the model answers otherwise afterwards")
