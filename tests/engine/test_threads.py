"""Several threads, and the thread and model state that the engine changes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from support.engine import turns
from support.engine.prompts import switched
from support.models import shared
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request, attach

pytestmark = pytest.mark.cold

QUESTION = "what is here ?"


def again(model: nn.Module, *, seed: int = 1, **shared: Any) -> nn.Module:
    """Another model with other weights on the same config objects."""
    for name, value in shared.items():
        setattr(model.config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = type(model)(model.config).eval()
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), model.parameters(), strict=True):
            parameter.copy_(value * 0.9)
    return made


@pytest.fixture(scope="module")
def pair() -> tuple[VLM, VLM]:
    """Two models on one config object."""
    model, processor = build_llava(layers=2)
    other = again(model)
    assert other.config is model.config
    return VLM(model, processor), VLM(other, processor)


def free(model: nn.Module) -> bool:
    """Whether another thread could run ``model``."""
    locks = turns.locks_of(model)

    def probe() -> bool:
        taken = [lock for lock in locks if lock.acquire(blocking=False)]
        for lock in taken:
            lock.release()
        return len(taken) == len(locks)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(probe).result()


# --- locks ---------------------------------------------------------------------------------------


def test_models_with_shared_config_share_a_lock(pair) -> None:
    one, two = (vlm.model for vlm in pair)
    assert free(one) and free(two)
    with switched(one):
        assert not free(one) and not free(two)
        with switched(two):  # the same thread may enter
            assert not free(one)
        assert not free(two)
    assert free(one) and free(two)
    with pytest.raises(KeyError), switched(two):
        raise KeyError
    assert free(one)


def test_unrelated_models_do_not_share_a_lock() -> None:
    """The control: equal but distinct configs."""
    one, two = build_llava()[0], build_llava()[0]
    assert one.config.text_config == two.config.text_config
    with switched(one):
        assert free(two)


def test_one_shared_subconfig_shares_the_lock() -> None:
    """A model that shares its text config with one model and its vision config with another."""
    left, right = build_llava(layers=2)[0], build_llava(layers=2)[0]
    bridge = build_llava(layers=2)[0]
    bridge.config.text_config = left.config.text_config
    bridge.config.vision_config = right.config.vision_config
    with switched(left):
        assert free(right) and not free(bridge)
    with switched(right):
        assert free(left) and not free(bridge)
    with switched(bridge):
        assert not free(left) and not free(right)
    assert free(left) and free(right) and free(bridge)


def test_locks_are_freed_with_their_configs() -> None:
    gc.collect()
    before = turns.locked_configs()
    model = build_llava()[0]
    with switched(model):
        pass
    assert len(turns.locked_configs() - before) == 2
    del model
    gc.collect()
    assert not turns.locked_configs() - before


def test_a_model_that_cannot_be_restored_keeps_no_lock(monkeypatch) -> None:
    vlm = VLM(*build_llava(layers=2))
    config = vlm.model.config.text_config
    wanted, own = answers(vlm, 1), type(config).__setattr__

    def restored(self: Any, name: str, value: Any) -> None:
        if self is config and value == "sdpa":
            raise ArithmeticError("no restoring")
        own(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(type(config), "__setattr__", restored)
        with pytest.raises(ArithmeticError, match="no restoring"):
            answers(vlm, 1)
    assert free(vlm.model)
    assert answers(vlm, 1) == wanted


def answers(vlm: VLM, count: int) -> list[list[int]]:
    return [
        vlm.ask(
            QUESTION, make_image(seed=number % 4), max_new_tokens=3, eos_token_id=None
        ).token_ids
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_models_with_shared_config_in_two_threads(pair, count: int) -> None:
    wanted = [answers(vlm, 4) for vlm in pair]
    assert wanted[0] != wanted[1]
    start = threading.Barrier(2)

    def work(vlm: VLM) -> list[list[int]]:
        start.wait()
        return answers(vlm, count)

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(work, pair))
    for mine, known in zip(got, wanted, strict=True):
        assert mine == [known[number % 4] for number in range(count)]


class Once(LogitsProcessor):
    """Calls a function when the first token is sampled."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        act, self.act = self.act, None
        if act is not None:
            act()
        return scores


def overlapped(one: VLM, two: VLM, seconds: float) -> list[int]:
    """The answer of ``two`` while ``one`` is switched; ``one`` ends meanwhile if it can."""
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with switched(one.model):
            inside.set()
            leave.wait(seconds)

    def end() -> None:
        leave.set()
        thread.join()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    processor = LogitsProcessorList([Once(end)])
    given = {"max_new_tokens": 6, "eos_token_id": None, "recipe": "h2o:0.5"}
    return two.ask(QUESTION, make_image(seed=0), logits_processor=processor, **given).token_ids


def test_lock_is_held_during_the_answer(pair) -> None:
    """The control: with separate locks one model ends the switch of the other."""
    one, two = pair
    wanted = two.ask(
        QUESTION, make_image(seed=0), max_new_tokens=6, eos_token_id=None, recipe="h2o:0.5"
    ).token_ids
    assert overlapped(one, two, seconds=0.05) == wanted
    with turns.separate_locks(*pair):
        assert overlapped(one, two, seconds=60) != wanted


# --- the current device --------------------------------------------------------------------------


class Devices:
    """Replaces ``torch.cuda.device`` and records the current devices per thread."""

    def __init__(self) -> None:
        self.current: dict[int, list[torch.device]] = {}
        self.entered = 0

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        stack = self.current.setdefault(threading.get_ident(), [])
        stack.append(device)
        self.entered += 1
        try:
            yield
        finally:
            stack.pop()

    def here(self) -> list[torch.device]:
        return self.current.get(threading.get_ident(), [])


WAYS: dict[str, Callable[[VLM], Any]] = {
    "ask": lambda vlm: vlm.ask(QUESTION, make_image(), max_new_tokens=3),
    "stream": lambda vlm: list(vlm.stream(QUESTION, make_image(), max_new_tokens=3)),
    "ask_many": lambda vlm: vlm.ask_many([Request(QUESTION, make_image())] * 3, max_new_tokens=3),
    "session": lambda vlm: [
        vlm.session(images=make_image()).ask(QUESTION, max_new_tokens=3) for _ in range(2)
    ],
    "long video": lambda vlm: vlm.ask(
        QUESTION, video=[make_image()] * 3, num_frames=3, max_new_tokens=3, max_kv_tokens=64
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_model_device_is_current(monkeypatch, way: str) -> None:
    vlm = turns.renewed(shared(build_llava, layers=2))
    devices, seen = Devices(), []

    def look(module: nn.Module, args: tuple) -> None:
        seen.append((threading.get_ident(), devices.here()[-1:]))

    watched = vlm.adapter.decoder.layers[0], next(iter(vlm.adapter.vision_blocks()))
    second = torch.device("cuda", 1)
    with watched[0].register_forward_pre_hook(look), watched[1].register_forward_pre_hook(look):
        WAYS[way](vlm)
        assert len(seen) > 3 and not devices.entered  # the control: nothing on a CPU
        seen.clear()
        monkeypatch.setattr(type(vlm.model), "device", property(lambda self: second))
        monkeypatch.setattr(torch.cuda, "device", devices)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        with turns.computing_on(second):
            WAYS[way](vlm)
    assert len(seen) > 3 and all(current == [second] for _, current in seen)
    elsewhere = {thread for thread, _ in seen} - {threading.get_ident()}
    assert bool(elsewhere) == (way == "stream")
    assert not any(devices.current.values())  # and restored


class Captures:
    """Replaces CUDA graphs and streams and records how a capture is begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modes: list[str] = []
        self.runs = 0

        class Graph:
            def replay(self) -> None:
                pass

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        @contextmanager
        def graph(captured: Graph, *, capture_error_mode: str = "global") -> Iterator[None]:
            self.modes.append(capture_error_mode)
            yield

        @contextmanager
        def stream(current: Stream) -> Iterator[None]:
            yield

        for name, fake in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": Stream,
            "graph": graph,
            "stream": stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_graph_capture_is_thread_local(monkeypatch) -> None:
    captures = Captures(monkeypatch)
    state = {("position",): torch.zeros(1), ("keys",): torch.zeros(1)}

    def step() -> None:
        for tensor in state.values():
            tensor += 1

    turns.captured_step(step, lambda: state)()
    assert captures.modes == ["thread_local"]
    # One warm-up step and one recorded step; the state that a step advances is restored.
    assert [float(tensor) for tensor in state.values()] == [0.0, 2.0]
    made, _ = turns.captured_tower(lambda: ("made", {}, {}, []))
    assert made[0] == "made" and captures.modes == ["thread_local"] * 2


# --- gradient checkpointing ----------------------------------------------------------------------


def checkpointing(model: nn.Module) -> list[str]:
    """Modules with gradient checkpointing."""
    return [
        name
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False)
    ]


@pytest.fixture(scope="module")
def own() -> VLM:
    return VLM(*build_llava(layers=4))


@pytest.fixture
def training(own: VLM) -> VLM:
    """A model in training mode, with gradient checkpointing and without dropout."""
    own.model.gradient_checkpointing_enable()
    own.model.train()
    return own


def test_answers_of_a_model_in_training_mode(training: VLM) -> None:
    vlm = training
    plain = shared(build_llava, layers=4)
    before = checkpointing(vlm.model)
    assert any("language_model" in name for name in before)
    assert any("vision_tower" in name for name in before)
    given = {"max_new_tokens": 6, "eos_token_id": None}
    inputs = plain.inputs(QUESTION, make_image())
    # Without a cache: with checkpointing, Hugging Face's layers get none.
    wanted = vlm.model.generate(**inputs, **given, use_cache=False)[0, -6:].tolist()
    assert vlm.ask(QUESTION, make_image(), **given).token_ids == wanted
    # The control: another image.
    assert vlm.ask(QUESTION, make_image(seed=1), **given).token_ids != wanted
    for recipe in ("pyramiddrop", "h2o:0.5", "hired:0.5"):
        wanted = plain.ask(QUESTION, make_image(), recipe=recipe, **given).token_ids
        assert vlm.ask(QUESTION, make_image(), recipe=recipe, **given).token_ids == wanted
    with attach(vlm.model, vlm.processor):
        got = vlm.model.generate(**inputs, **given)[0, -6:].tolist()
    assert got == plain.ask(QUESTION, make_image(), **given).token_ids
    assert checkpointing(vlm.model) == before and vlm.model.training


def test_gradient_checkpointing_is_restored_after_an_exception(training: VLM) -> None:
    before = checkpointing(training.model)

    def fail() -> None:
        assert not checkpointing(training.model)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        training.ask(
            QUESTION,
            make_image(),
            max_new_tokens=3,
            logits_processor=LogitsProcessorList([Once(fail)]),
        )
    assert checkpointing(training.model) == before


def test_gradient_checkpointing_is_restored_after_an_answer(training: VLM) -> None:
    model, inputs = training.model, training.inputs(QUESTION, make_image())

    def passes() -> int:
        """Number of runs of the first layer in one training step."""
        count = [0]
        layer = training.adapter.decoder.layers[0].self_attn
        handle = layer.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        handle.remove()
        return count[0]

    assert passes() == 2
    training.ask(QUESTION, make_image(), max_new_tokens=2)
    assert passes() == 2
    model.gradient_checkpointing_disable()  # the control
    assert passes() == 1


# --- the caller's thread -------------------------------------------------------------------------


def test_ask_runs_in_the_calling_thread(pair) -> None:
    """Interrupts reach the caller, and its autocast and thread state apply."""
    vlm, seen = pair[0], []

    def look(module: nn.Module, args: tuple) -> None:
        seen.append(
            (
                threading.get_ident(),
                torch.is_autocast_enabled("cpu"),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
            )
        )

    handle = vlm.adapter.decoder.layers[0].register_forward_pre_hook(look)
    here = threading.get_ident()
    vlm.ask(QUESTION, make_image(), max_new_tokens=3, eos_token_id=None)
    assert set(seen) == {(here, False, False, False)}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        vlm.ask(QUESTION, make_image(), max_new_tokens=3, eos_token_id=None)
        assert torch.is_inference_mode_enabled()
    assert set(seen) == {(here, True, False, False)}
    seen.clear()
    list(vlm.stream(QUESTION, make_image(), max_new_tokens=3, eos_token_id=None))
    ((there, *state),) = set(seen)
    assert there != here and state == [False, False, False]  # the control: a thread of its own
    handle.remove()


def test_keyboard_interrupt_ends_an_answer(pair) -> None:
    vlm = pair[0]

    def interrupt() -> None:
        raise KeyboardInterrupt

    wanted = answers(vlm, 1)
    processor = LogitsProcessorList([Once(interrupt)])
    with pytest.raises(KeyboardInterrupt):
        vlm.ask(QUESTION, make_image(), max_new_tokens=3, logits_processor=processor)
    assert free(vlm.model) and answers(vlm, 1) == wanted
