"""What the engine knows of a model's modules: found once, and again where something has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from support import tiny_families
from support.engine.prompts import TEXT, VISION, switched
from support.tiny_models import build_llava, make_image
from vlmfast import VLM

BUILD = tiny_families.builders()
QUESTION = "what is here ?"


def implementations(model: nn.Module) -> list[str]:
    """The names that the parts of a model, and the parts of its config, have for attention."""
    configs = [of.config for of in model.modules() if isinstance(of, PreTrainedModel)]
    for config in configs:  # the configs of parts follow
        configs += [part for key in config.sub_configs if (part := getattr(config, key))]
    return [config._attn_implementation for config in configs]


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", sorted(BUILD))
def test_attention_is_switched_where_hugging_face_would(family: str) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    model, _ = BUILD[family]()
    before = implementations(model)
    with switched(model):
        inside = implementations(model)
    assert implementations(model) == before
    assert {TEXT, VISION} <= set(inside)
    model.set_attn_implementation({"text_config": TEXT, "vision_config": VISION})
    assert inside == implementations(model) != before


def test_parts_get_back_what_each_of_them_had() -> None:
    model, _ = build_llava(layers=1)
    for text, vision in (("eager", "sdpa"), ("sdpa", "eager")):
        model.set_attn_implementation({"text_config": text, "vision_config": vision})
        before = implementations(model)
        with switched(model):
            assert implementations(model) != before
        assert implementations(model) == before


def test_attention_that_is_changed_between_requests_stays() -> None:
    vlm = VLM(*build_llava(layers=1))
    image, found = make_image(), []
    for name in ("sdpa", "eager", "sdpa"):
        vlm.model.set_attn_implementation(name)
        found.append(vlm.ask(QUESTION, image, max_new_tokens=3).token_ids)
        assert set(implementations(vlm.model)) == {name}
    assert found[0] == found[1] == found[2]


@contextmanager
def walks() -> Iterator[list[nn.Module]]:
    """The modules from which a walk over all of their parts begins, or goes on."""
    found: list[nn.Module] = []
    named = nn.Module.named_modules

    def noted(self: nn.Module, *args: Any, **more: Any) -> Any:
        found.append(self)
        return named(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", noted)
        yield found


@pytest.mark.parametrize("recipe", ["none", "hired:0.5", "fastv:keep=0.5,k=1"])
def test_no_request_but_the_first_walks_over_all_modules(recipe: str) -> None:
    vlm = VLM(*build_llava(layers=2), prefix_cache_bytes=0)
    given = {"recipe": recipe, "max_new_tokens": 3}
    with walks() as first:
        wanted = vlm.ask(QUESTION, make_image(), **given)
    with walks() as later:
        found = vlm.ask(QUESTION, make_image(), **given)
    assert found.token_ids == wanted.token_ids
    assert len(first) > sum(1 for _ in vlm.model.modules())
    assert later == []


class Seen(nn.Identity):
    """Notes how it is called, in the way of modules of Hugging Face that recompute layers."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.gradient_checkpointing = inside, True
        self.calls: list[bool] = []

    def forward(self, *args: Any, **more: Any) -> Any:
        self.calls.append(self.gradient_checkpointing)
        return self.inside(*args, **more)


def by_attribute(layer: Any, part: nn.Module) -> None:
    layer.mlp = part


def by_name(layer: Any, part: nn.Module) -> None:
    layer._modules["mlp"] = part


def by_all(layer: Any, part: nn.Module) -> None:
    layer._modules = {**layer._modules, "mlp": part}


@pytest.mark.parametrize("put", [by_attribute, by_name, by_all])
def test_modules_that_are_put_into_a_model_are_seen(put: Callable[[Any, nn.Module], None]) -> None:
    vlm = VLM(*build_llava(layers=2))
    before = vlm.ask(QUESTION, make_image(), max_new_tokens=3)
    layer = vlm.adapter.decoder.layers[1]
    own = layer.mlp
    part = Seen(own)
    put(layer, part)
    with walks() as found:
        after = vlm.ask(QUESTION, make_image(seed=1), max_new_tokens=3)
    assert vlm.model in found
    assert part.calls == [False] * 3  # checkpointing is suspended
    assert part.gradient_checkpointing
    put(layer, own)
    assert vlm.ask(QUESTION, make_image(), max_new_tokens=3).token_ids == before.token_ids
    assert len(part.calls) == 3 and after.token_ids
