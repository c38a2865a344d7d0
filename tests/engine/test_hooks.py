"""Hooks and ``forward`` methods of the user's act as in Hugging Face's ``generate``.

They are put on any module, the model itself included, before an answer or in the middle of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import vlmfast
from support import tiny_families
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.steps import (
    capture_towers,
    captured_tower,
    compile_steps,
    fuse_steps,
    graphs_of,
    steps_taken,
)
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, ModelError, Request

BUILD = tiny_families.builders()
IMAGE, LENGTH = make_image(64, 56, seed=1), 6

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def built(family: str = "llava", **more: Any) -> VLM:
    if family == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    return VLM(*BUILD[family](), **more)


def generated(vlm: VLM, question: str = "what ?", images: Any = IMAGE, **more: Any) -> list[int]:
    inputs = vlm.inputs(question, images=images)
    given = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, **more}
    ids = vlm.model.generate(**inputs, **given)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def asked(vlm: VLM, question: str = "what ?", images: Any = IMAGE, **more: Any) -> list[int]:
    given = {"max_new_tokens": LENGTH, "eos_token_id": None, **more}
    return vlm.ask(question, images, **given).token_ids


def negated(module: nn.Module, args: Any, output: Any) -> Any:
    output.logits = -output.logits
    return output


def replaced(module: nn.Module, args: Any, output: Any) -> Any:
    return type(output)(logits=-output.logits)


def from_second_on(module: nn.Module, args: Any, kwargs: dict, output: Any) -> None:
    if kwargs["input_ids"].shape[1] == 1:
        output.logits.mul_(-1)


def rolled(module: nn.Module, args: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state.roll(3, -1)
    return output


@contextmanager
def forward_of(module: nn.Module, change: Callable[[Any], Any]) -> Any:
    """A ``forward`` around the model's own, with its name, as patches of research code are."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return change(own(*args, **kwargs))

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def on_all(model: nn.Module) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return negated(module, args, output) if module is model else None

    return register_module_forward_hook(hook)


PLACES = {
    "the model": lambda m: m.register_forward_hook(negated),
    "another output": lambda m: m.register_forward_hook(replaced),
    "with its arguments": lambda m: m.register_forward_hook(from_second_on, with_kwargs=True),
    "a forward": lambda m: forward_of(m, lambda output: negated(m, (), output)),
    "a global hook": on_all,
    "around the language model": lambda m: m.base_model.register_forward_hook(rolled),
    "the language model": lambda m: m.get_decoder().register_forward_hook(rolled),
    "the head": lambda m: m.get_output_embeddings().register_forward_hook(lambda m, a, out: -out),
    "the embedding": lambda m: m.get_input_embeddings().register_forward_hook(
        lambda m, a, out: out.roll(1, -1)
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", sorted(BUILD))
def test_hooks_act_as_in_generate(family) -> None:
    vlm = built(family)
    plain = generated(vlm)
    for place, put in PLACES.items():
        with put(vlm.model):
            wanted = generated(vlm)
            assert asked(vlm) == wanted != plain, place
    assert asked(vlm) == plain


def test_hooks_act_in_every_entry_point() -> None:
    vlm = built()
    questions = ("what ?", "what is here ?", "and what is left of it ?")
    plain = [generated(vlm, question) for question in questions]
    reduced = [asked(vlm, question, recipe="divprune:0.5") for question in questions]
    with vlm.model.get_output_embeddings().register_forward_hook(lambda m, a, out: -out):
        less = [asked(vlm, question, recipe="divprune:0.5") for question in questions]
    with vlm.model.register_forward_hook(negated):
        wanted = [generated(vlm, question) for question in questions]
        assert all(a != b for a, b in zip(wanted, plain, strict=True))
        requests = [Request(question, IMAGE) for question in questions]
        given = {"max_new_tokens": LENGTH, "eos_token_id": None}
        answers = vlm.ask_many(requests, batch_size=3, **given)
        assert [answer.token_ids for answer in answers] == wanted
        *_, last = vlm.stream("what ?", IMAGE, **given)
        assert last.token_ids == wanted[0]
        assert asked(vlm, prefill_chunk_size=16) == wanted[0]
        assert asked(vlm, recipe="draft-ngram") == wanted[0]
        with vlm.session(IMAGE) as session:
            assert session.ask("what ?", **given).token_ids == wanted[0]
        requests = [Request(question, IMAGE, recipe="divprune:0.5") for question in questions]
        answers = vlm.ask_many(requests, batch_size=3, **given)
        assert [answer.token_ids for answer in answers] == less != reduced
        with vlmfast.attach(vlm.model, vlm.processor):
            assert generated(vlm) == wanted[0]
    assert asked(vlm) == plain[0]


def test_hooks_see_what_hugging_face_gives() -> None:
    vlm, seen = built(), []
    model = vlm.model
    parts = (model, model.base_model)
    hooks = [
        part.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((module, args, kwargs)), with_kwargs=True
        )
        for part in parts
    ]
    try:
        plain = generated(vlm)
        theirs = [*seen]
        seen.clear()
        assert asked(vlm) == plain
        own = [*seen]
    finally:
        for hook in hooks:
            hook.remove()
    assert [module for module, *_ in own] == [module for module, *_ in theirs] != []
    for (_, args, given), (module, others, expected) in zip(own, theirs, strict=True):
        assert torch.equal(given["input_ids"], expected["input_ids"])
        assert given["position_ids"].tolist() == expected["position_ids"].tolist()
        assert given["use_cache"] is True and args == others == ()
        if module is model:
            assert given["logits_to_keep"] == expected["logits_to_keep"] == 1


def test_hooks_that_always_run() -> None:
    vlm, ran = built(), []

    def fail(*_: Any) -> None:
        raise LookupError("a part failed")

    with (
        vlm.model.register_forward_hook(lambda *_: ran.append(1), always_call=True),
        vlm.model.get_decoder().layers[1].register_forward_hook(fail),
    ):
        for ask in (generated, asked):
            with pytest.raises(LookupError, match="a part failed"):
                ask(vlm)
    assert ran == [1, 1]
    assert asked(vlm) == generated(vlm) and "forward" not in vars(vlm.model.base_model)


def test_forward_of_a_subclass_is_called() -> None:
    model, processor = build_llava()

    class Own(type(model)):
        def forward(self, input_ids: Any = None, pixel_values: Any = None, **more: Any) -> Any:
            return negated(self, (), super().forward(input_ids, pixel_values, **more))

    plain = asked(VLM(model, processor))
    model.__class__ = Own
    vlm = VLM(model, processor)
    assert asked(vlm) == generated(vlm) != plain


def test_what_hooks_have_computed_is_not_reused() -> None:
    """A hook may do something else at any time, and another question begins as the last one."""
    vlm, scale, answers = built(), [1.0], []
    for module in (vlm.adapter.decoder.layers[1], vlm.adapter.tower()):

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return output * scale[0]
            output.hidden_states = tuple(
                level if level is None else level * scale[0] for level in output.hidden_states
            )
            return output

        asked(vlm)
        with module.register_forward_hook(hook):
            for scale[0] in (1.0, -1.0, 0.5):
                answers.append(generated(vlm))
                assert asked(vlm) == answers[-1]
    assert len({tuple(answer) for answer in answers}) == 5


@pytest.mark.parametrize("wrapper", ["peft", "accelerate"])
def test_hooks_in_wrapped_models(wrapper) -> None:
    vlm = built()
    if wrapper == "accelerate":
        accelerate.cpu_offload(vlm.model, execution_device=torch.device("cpu"))
    else:
        config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
        vlm = VLM(peft.get_peft_model(vlm.model, config).eval(), vlm.processor)
    plain, base = asked(vlm), vlm.adapter.model
    for put in (PLACES["the model"], PLACES["around the language model"], PLACES["the head"]):
        with put(base):
            assert asked(vlm) == generated(vlm) != plain
    with vlm.model.register_forward_hook(negated):  # those of PEFT are not called either
        assert asked(vlm) == generated(vlm)
        assert (asked(vlm) == plain) is (wrapper == "peft")


@pytest.mark.parametrize("part", ["model", "mlp", "around"])
def test_forward_of_a_class_is_called(monkeypatch, part) -> None:
    """Also where a fused step would compute what the class did before."""
    vlm = built()
    fuse_steps(monkeypatch)
    plain, decoder = asked(vlm), vlm.adapter.decoder
    modules = {"model": vlm.model, "mlp": decoder.layers[0].mlp, "around": vlm.model.base_model}
    kind = type(modules[part])
    own = kind.forward

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = own(module, *args, **kwargs)
        return -output if isinstance(output, Tensor) else negated(module, args, output)

    monkeypatch.setattr(kind, "forward", forward)
    if part == "around":
        with pytest.raises(ModelError, match="model has a forward of its own"):
            asked(vlm)
    else:
        assert asked(vlm) == generated(vlm) != plain


# --- refusals -------------------------------------------------------------------------------------


def darker(module: nn.Module, args: Any, kwargs: dict) -> Any:
    if kwargs.get("pixel_values") is None:
        return None
    return args, {**kwargs, "pixel_values": kwargs["pixel_values"] * 0.2}


def in_place(module: nn.Module, args: Any, kwargs: dict) -> None:
    if kwargs.get("pixel_values") is not None:
        kwargs["pixel_values"].mul_(0.2)


def other_text(module: nn.Module, args: Any, kwargs: dict) -> Any:
    return args, {**kwargs, "input_ids": kwargs["input_ids"].roll(1, -1)}


@pytest.mark.parametrize("change", [darker, in_place, other_text])
def test_changed_inputs_are_refused(change) -> None:
    """vlmfast has encoded the images before it calls the model."""
    vlm = built()
    what = "input_ids" if change is other_text else "pixel_values"
    for module, name in ((vlm.model, "the model"), (vlm.model.base_model, "model")):
        with module.register_forward_pre_hook(change, with_kwargs=True):
            message = f"a hook or forward of {name} changes {what}, which is not supported"
            with pytest.raises(ModelError, match=message) as found:
                asked(vlm)
            assert "\n" not in str(found.value)
    assert asked(vlm) == generated(vlm)


def test_forwards_that_cannot_be_called_are_refused() -> None:
    vlm = built()
    with (
        forward_of(vlm.model.base_model, lambda output: output),
        pytest.raises(ModelError, match="model has a forward of its own, which is not supported"),
    ):
        asked(vlm)
    vlm.model.forward = lambda **kwargs: None
    with pytest.raises(ModelError, match="the forward of the model does not call that of Llava"):
        asked(vlm)
    del vlm.model.forward
    assert asked(vlm) == generated(vlm)


# --- hooks that come in the middle of an answer ---------------------------------------------------


class Later:
    """A stopping criterion that puts a hook on a module after three tokens, and removes it."""

    def __init__(self, prompt: int, register: Callable[[], Any]) -> None:
        self.prompt, self.register, self.handle = prompt, register, None

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        new = ids.shape[1] - self.prompt
        if new == 3:
            self.handle = self.register()
        elif new == 8 and self.handle is not None:
            self.handle.remove()
        return torch.zeros(len(ids), dtype=torch.bool)


def ways(monkeypatch: pytest.MonkeyPatch, way: str, vlm: VLM) -> None:
    """Run the decode steps of a model as on CUDA, by stand-ins."""
    if way == "fused":
        fuse_steps(monkeypatch)
    elif way == "captured":
        captured_by_stand_in(vlm, monkeypatch)
    elif way == "compiled":
        vlm.adapter.decoding = "compile"
        compile_steps(vlm)


def ran_that_way(way: str, vlm: VLM, steps: list) -> bool:
    if way == "captured":
        return graphs_of(vlm).captured > 0
    return way == "modules" or bool(steps)


def swapped(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0].roll(1, -1), *output[1:]) if isinstance(output, tuple) else output.roll(1, -1)


LATER: dict[str, Callable[[Any], Any]] = {
    "layer": lambda m: m.get_decoder().layers[1].register_forward_hook(swapped),
    "attention": lambda m: m.get_decoder().layers[2].self_attn.register_forward_hook(swapped),
    "projection": lambda m: m.get_decoder().layers[0].mlp.down_proj.register_forward_hook(swapped),
    "norm": lambda m: (
        m.get_decoder()
        .layers[0]
        .input_layernorm.register_forward_pre_hook(lambda module, args: (args[0].roll(1, -1),))
    ),
    "head": lambda m: m.get_output_embeddings().register_forward_hook(lambda m, a, out: -out),
    "model": lambda m: m.register_forward_hook(negated),
    "all": lambda m: register_module_forward_hook(
        lambda module, args, out: -out if module is m.get_output_embeddings() else None
    ),
}


FIRST = ("layer", "model")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "places"),
    [
        ("fused", FIRST),
        ("captured", FIRST),
        *(
            pytest.param(way, tuple(LATER), marks=SLOW)
            for way in ("modules", "fused", "captured", "compiled")
        ),
    ],
)
def test_hooks_are_seen_at_the_next_step(monkeypatch, way, places) -> None:
    vlm = built()
    given = {"max_new_tokens": 12}
    plain = generated(vlm, **given)
    prompt = vlm.inputs("what ?", images=IMAGE)["input_ids"].shape[1]
    for place in places:
        put = LATER[place]
        later = Later(prompt, lambda put=put: put(vlm.model))
        wanted = generated(vlm, **given, stopping_criteria=[later])
        assert wanted[:3] == plain[:3] and wanted != plain, place
        with monkeypatch.context() as patch:
            ways(patch, way, vlm)
            steps = steps_taken(patch, vlm)
            assert asked(vlm, **given) == plain
            later = Later(prompt, lambda put=put: put(vlm.model))
            assert asked(vlm, **given, stopping_criteria=[later]) == wanted, place
            assert asked(vlm, **given) == plain
            assert ran_that_way(way, vlm, steps), place


def test_replaced_forward_of_a_layer_is_seen_at_the_next_step(monkeypatch) -> None:
    vlm = built()
    fuse_steps(monkeypatch)
    layer = vlm.adapter.decoder.layers[1]
    plain = asked(vlm)
    with forward_of(layer.mlp, lambda output: output.roll(1, -1)):
        assert asked(vlm) == generated(vlm) != plain
    assert asked(vlm) == plain == generated(vlm)


@pytest.mark.slow
def test_compiled_steps_rotate_by_their_own_positions() -> None:
    """Layers renumbered in prefill rotate by hooks, which what was compiled before has not."""
    plain, vlm = built(), built(decoding="compile")
    compile_steps(vlm)
    recipe = "pyramiddrop:layers=1,positions=compact"
    for given in ({}, {"recipe": recipe, "max_new_tokens": 12}):
        assert asked(vlm, **given) == asked(plain, **given)


def test_captured_tower_has_no_hooks(monkeypatch) -> None:
    """A replay would not call them."""
    capture_towers(monkeypatch)
    vlm, seen = built(prefix_cache_bytes=0), []

    def repeated(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return run(), lambda: None

    towers = captured_tower(vlm, repeated)
    block = vlm.adapter.vision_blocks()[0]
    with block.register_forward_hook(lambda *_: seen.append(1)):
        for count in range(1, 4):
            asked(vlm)
            assert len(seen) == count
    for _ in range(3):
        asked(vlm)
    assert towers.replayed == 2 and len(seen) == 3


def test_user_code_is_recognized_by_where_it_is_defined() -> None:
    from vlmfast.core.calls import is_of

    model, _ = build_llava()

    def users(*args: Any) -> None:
        """Code of the user's."""

    named = functools.wraps(model.forward)(users)
    assert named.__module__.startswith("transformers.")
    wrappers = (
        functools.partial,
        torch.no_grad(),
        lambda call: torch.compile(call, backend="eager"),
    )
    for call in (users, named, [].append, *(wrap(named) for wrap in wrappers)):
        assert not is_of(call)
    for call in (model.forward, *(wrap(model.forward) for wrap in wrappers)):
        assert is_of(call), inspect.unwrap(call)
