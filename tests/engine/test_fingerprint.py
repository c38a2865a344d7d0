"""The fingerprint of weights: any change that changes what a model computes changes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, CLIPVisionConfig, PreTrainedConfig

from support.engine.kept import (
    KEPT,
    PLACES,
    WHOLE,
    fingerprint,
    sampled,
    samples_read,
    structures_read,
    tensors_in,
)
from support.tiny_models import build_llava, make_image
from vlmfast import VLM


@dataclass
class Limits:
    """A dataclass with an array, as settings of a module may be."""

    top: float = 1.0
    scales: np.ndarray = field(default_factory=lambda: np.ones(3, np.float16))


class Lora(nn.Module):
    """A linear layer with two adapters, which has the attributes of PEFT's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(24, 24)
        self.lora = nn.ModuleDict({name: nn.Linear(24, 24) for name in ("one", "two")})
        self._active_adapter = ["one"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"one": 1.0, "two": 0.5}

    def set_adapter(self, name: str) -> None:
        self._active_adapter = [name]


class Net(nn.Module):
    """A convolution, a normalization with buffers, an adapter layer, and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.lora = Lora()
        self.wide = nn.Linear(128, 96)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)
        self.shift, self.grid, self.table = 0.5, (2, 2), torch.ones(300)
        self.levels = {"one": [1, 2], "two": [(3, np.float32(4.0))]}
        self.array, self.words = np.ones(300), np.array(["a", "b"])
        self.limits, self.sizes = Limits(), SimpleNamespace(rows=2, columns=[3])
        self.rule, self.others = torch.tanh, [nn.Linear(2, 2)]
        self.config = PreTrainedConfig(alpha=1, names=["a"], inner=PreTrainedConfig(beta=1))
        self.register_buffer("empty", torch.zeros(0))
        self.decoder = nn.Linear(4, 4)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def optimized(model: Net) -> None:
    weight = model.wide.weight.requires_grad_()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1e-3).step()


def loaded(model: Net) -> None:
    state = model.state_dict()
    state["conv.weight"] = state["conv.weight"] * 1.5
    model.load_state_dict(state)


def replaced(model: Net) -> None:
    model.wide.weight = nn.Parameter(model.wide.weight * 0.5, requires_grad=False)


def swapped(model: Net) -> None:
    """The same data at the same address, read in another order."""
    model.lora.base_layer.weight.data = model.lora.base_layer.weight.data.T


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda m: m.wide.weight.mul_(0.5),
    "through data": lambda m: m.wide.weight.data.mul_(0.5),
    "bias through data": lambda m: m.wide.bias.data.mul_(0.5),
    "half of the entries": lambda m: m.wide.weight.data[:, ::2].zero_(),
    "a scalar": lambda m: m.scale.data.fill_(3.0),
    "a buffer": lambda m: m.norm.running_mean.data.add_(1),
    "new data": lambda m: setattr(m.wide.weight, "data", m.wide.weight.data * 2),
    "transposed": swapped,
    "a parameter replaced": replaced,
    "a parameter removed": lambda m: m.wide.register_parameter("bias", None),
    "load_state_dict": loaded,
    "an optimizer": optimized,
    "dtype": lambda m: m.to(torch.bfloat16),
}
# What modules compute with besides their weights.
SETTINGS: dict[str, Callable[[Net], Any]] = {
    "set_adapter": lambda m: m.lora.set_adapter("two"),
    "adapters off": lambda m: setattr(m.lora, "_disable_adapters", True),
    "merged": lambda m: m.lora.merged_adapters.append("one"),
    "scaling": lambda m: m.lora.scaling.update(one=2.0),
    "eps": lambda m: setattr(m.norm, "eps", 0.1),
    "a number": lambda m: setattr(m, "shift", 0.25),
    "another type": lambda m: setattr(m, "shift", "0.5"),
    "a tuple": lambda m: setattr(m, "grid", (2, 3)),
    "within containers": lambda m: m.levels["one"].append(3),
    "a scalar of NumPy": lambda m: m.levels["two"].__setitem__(0, (3, np.float32(5.0))),
    "another key": lambda m: m.levels.update(three=m.levels.pop("two")),
    "a tensor that is no buffer": lambda m: setattr(m, "table", m.table * 2),
    "such a tensor through data": lambda m: m.table.data.mul_(2),
    "an array": lambda m: setattr(m, "array", m.array * 2),
    "an array in place": lambda m: m.array.__imul__(2),
    "an array of text": lambda m: setattr(m, "words", np.array(["a", "c"])),
    "a field of a dataclass": lambda m: setattr(m.limits, "top", 2.0),
    "an array in a dataclass": lambda m: m.limits.scales.fill(2),
    "a namespace": lambda m: setattr(m.sizes, "rows", 3),
    "a list in a namespace": lambda m: m.sizes.columns.append(4),
    "a function": lambda m: setattr(m, "rule", torch.sigmoid),
    "an activation": lambda m: setattr(m, "act", nn.SiLU().eval()),
    "a module in a list": lambda m: m.others[0].weight.data.mul_(2),
    "a setting of the config": lambda m: setattr(m.config, "alpha", 2),
    "an item in the config": lambda m: m.config.names.append("b"),
    "dropout": lambda m: setattr(m.drop, "p", 0.2),
    "a new attribute": lambda m: setattr(m.wide, "gain", 2.0),
}
CHANGES |= SETTINGS
IN_PLACE = (
    "such a tensor through data",
    "a module in a list",
    "an array in place",
    "an array in a dataclass",
)


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_noticed(change: str) -> None:
    """Also where structures of earlier calls are used, which makes no difference."""
    model, kept = net(), {}
    before = fingerprint(model, kept=kept)
    assert before is not None
    assert fingerprint(model) == before == fingerprint(model, kept=kept)
    CHANGES[change](model)
    after = fingerprint(model, kept=kept)
    assert after is not None
    assert after != before
    assert fingerprint(model) == after == fingerprint(model, kept=kept)


@pytest.mark.parametrize("change", SETTINGS)
def test_settings_count_whatever_else_does_not(change: str) -> None:
    """They are no weights: an open session, or a captured step, depends on them as well."""
    for given in ({"values": True}, {"addresses": True}, {"values": True, "training": True}):
        model = net()
        before = fingerprint(model, **given)
        CHANGES[change](model)
        in_place = change in IN_PLACE
        assert (fingerprint(model, **given) == before) == (in_place and "addresses" in given)


def test_settings_that_are_back_give_the_old_fingerprint() -> None:
    model, kept = net(), {}
    before = fingerprint(model, kept=kept)
    for change in ({"shift": 0.25, "rule": torch.sin}, {"shift": 0.5, "rule": torch.tanh}):
        for name, value in change.items():
            setattr(model, name, value)
        found = fingerprint(model, kept=kept)
    assert found == before


def test_functions_that_are_gone_are_no_others() -> None:
    """One that was made later may have the address of an earlier one."""
    model, found = net(), set()
    for scale in range(20):
        model.rule = lambda x, scale=scale: x * scale
        found.add(fingerprint(model))
    assert len(found) == 20


def test_states_of_one_call_do_not_count() -> None:
    """What ``generate`` leaves, and what the engine switches meanwhile."""
    model = net()
    before = fingerprint(model)
    model.rope_deltas, model.gradient_checkpointing = torch.ones(2), True
    model.config._attn_implementation = "eager"
    model.config.use_cache = False
    assert fingerprint(model) == before


def test_structures_of_models_that_are_gone_are_not_kept() -> None:
    kept: dict[Any, Any] = {}
    for _ in range(20):
        fingerprint(nn.Linear(2, 2).eval(), kept=kept)
    assert len(kept) == KEPT


def test_an_unchanged_model_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later requests compare objects and read elements of tensors, whatever they ask."""
    made, transfers = structures_read(monkeypatch), samples_read(monkeypatch)
    vlm = VLM(*build_llava())
    image = make_image(60, 44)
    questions = ("what is here ?", "is there more ?")
    with vlm.session(images=image) as session:
        for _ in range(2):
            made.clear()
            transfers.clear()
            for question in questions:
                vlm.ask(question, image, max_new_tokens=2)
                session.ask(question, max_new_tokens=2)
    assert made == []
    # A session looks again before it stores its conversation.
    assert len(transfers) == 2 * (1 + 2)


def test_a_request_reads_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes and images that are not stored yet are looked up with one fingerprint."""
    transfers, vlm = samples_read(monkeypatch), VLM(*build_llava())
    for seed in range(2):
        transfers.clear()
        answer = vlm.ask("what is here ?", make_image(60, 44, seed=seed), max_new_tokens=2)
        assert answer.stats.cached_tokens == 0
        read = [tensor for tensors in transfers for tensor in tensors]
        assert len(read) == len({*map(id, read)})
        assert {*map(id, vlm.model.parameters())} <= {*map(id, read)}


def test_inference_tensors_have_no_version_counter() -> None:
    with torch.inference_mode():
        model = net()
        before = fingerprint(model)
        model.wide.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="version counter"):
        _ = model.wide.weight._version
    assert fingerprint(model) not in (None, before)


def test_skipped_modules_do_not_count() -> None:
    model = net()
    before = fingerprint(model, skip=[model.decoder])
    whole = fingerprint(model)
    model.decoder.weight.data.mul_(2)
    model.decoder.train()
    assert fingerprint(model, skip=[model.decoder]) == before
    model.decoder.eval()
    assert fingerprint(model) != whole


@pytest.mark.parametrize("which", ["training", "hook", "pre-hook", "forward", "global hook"])
def test_what_is_not_determined_by_weights_has_none(which: str) -> None:
    model = net()
    known = fingerprint(model)

    def hook(*args: Any) -> None:
        """A hook of the user's."""

    handles = {
        "training": lambda: model.lora.train(),
        "hook": lambda: model.wide.register_forward_hook(hook),
        "pre-hook": lambda: model.wide.register_forward_pre_hook(hook),
        "forward": lambda: setattr(model.wide, "forward", hook),
        "global hook": lambda: nn.modules.module.register_module_forward_hook(hook),
    }
    handle = handles[which]()
    try:
        assert fingerprint(model) is None
    finally:
        if which == "training":
            model.eval()
        elif which == "forward":
            del model.wide.forward
        else:
            handle.remove()
    assert fingerprint(model) == known


def test_hooks_can_be_part_of_it() -> None:
    """Each registration is another one, also of the same function."""
    model, found = net(), []
    for _ in range(2):
        handle = model.wide.register_forward_hook(_watch)
        found += [fingerprint(model, hooks=True), fingerprint(model, hooks=True)]
        handle.remove()
    assert found[0] == found[1] != found[2] == found[3]
    assert fingerprint(model, hooks=True) == fingerprint(model) not in found


def test_forward_of_a_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the caller's own class belongs to it; one put on another class may do anything."""
    model = net()
    before = fingerprint(model)
    monkeypatch.setattr(Lora, "forward", _watch)
    assert fingerprint(model) not in (None, before)
    monkeypatch.setattr(nn.GELU, "forward", _watch)
    assert fingerprint(model) is None != fingerprint(model, hooks=True)
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_training_mode_can_be_part_of_it() -> None:
    model, found = net(), set()
    for trains in ([], [model.drop], [model.drop, model.lora]):
        for part in trains:
            part.train()
        assert (fingerprint(model) is None) == bool(trains)
        found.add(fingerprint(model, training=True))
    assert None not in found and len(found) == 3


def test_values_stay_on_another_device_or_at_another_address() -> None:
    model = net()
    other = copy.deepcopy(model)
    assert fingerprint(model) != fingerprint(other)
    assert fingerprint(model, values=True) == fingerprint(other, values=True)
    other.wide.weight.data.mul_(0.5)
    assert fingerprint(model, values=True) != fingerprint(other, values=True)


def _watch(*args: Any) -> None:
    """A hook of the user's."""


def test_hooks_of_the_library_do_not_matter() -> None:
    """transformers leaves hooks on modules once hidden states were requested."""
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    before = fingerprint(model)
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16), output_hidden_states=True, output_attentions=True)
    assert fingerprint(model) == before is not None
    harmless = FunctionType(_watch.__code__, {"__name__": "transformers.hooks"})
    with nn.modules.module.register_module_forward_hook(harmless):  # on all modules
        assert fingerprint(model) == before


def test_compiled_modules_have_one() -> None:
    model = nn.Sequential(nn.Linear(24, 24)).eval()
    compiled = torch.compile(model, backend="eager")
    before = fingerprint(compiled)
    assert before is not None
    model[0].weight.data.mul_(0.5)
    assert fingerprint(compiled) not in (None, before)
    model.train()
    assert fingerprint(compiled) is None


class Packed(Tensor):
    """A tensor subclass of two tensors, as quantized weights are."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise NotImplementedError(f"{function}")


def test_parts_of_tensor_subclasses_count() -> None:
    codes, scale = torch.arange(96, dtype=torch.int8), torch.ones(1)
    model = nn.Module().eval()
    model.register_buffer("weight", Packed(codes, scale))
    before = fingerprint(model)
    assert before is not None
    scale.data.mul_(2)
    middle = fingerprint(model)
    codes.data.add_(1)
    assert len({before, middle, fingerprint(model)}) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_every_layout_and_dtype_is_read(dtype: torch.dtype) -> None:
    """Strided, expanded, empty and scalar tensors, and samples stay inside of each."""
    full = torch.arange(5000).remainder(7).reshape(50, 100).to(dtype)
    views = [full, full[::2, 1::3], full[0].expand(40, 100), full[:, :0], full[3, 3], full.T]
    model = nn.Module().eval()
    for at, view in enumerate(views):
        model.register_buffer(f"view{at}", view)
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) != before  # other addresses
    full.data.copy_(full.roll(1))
    assert fingerprint(model) not in (None, before)


@pytest.mark.parametrize("size", [*range(14, 40), 127, 511, 1023, 4096, 4099])
def test_samples_are_spread_over_the_whole_tensor(size: int) -> None:
    flat = torch.arange(size, dtype=torch.int64).reshape(1, -1)
    chosen = sampled(flat)
    if flat.nbytes < WHOLE:
        assert chosen.tolist() == list(range(size))
        return
    gaps = chosen.diff()
    assert len(chosen) == PLACES
    assert int(gaps[0]) % 2 == 1
    assert bool((gaps == gaps[0]).all())
    assert 0 <= int(chosen.min()) < int(chosen.max()) < size
    assert int(chosen.max()) > 0.3 * size  # of a large one, 7/8
    assert size < 1000 or int(chosen.max()) > 0.8 * size


def test_one_transfer_reads_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.numel()) or cpu(self))
    model = net()
    model.norm.to(torch.bfloat16)
    assert fingerprint(model) is not None
    assert len(transfers) == 1


def test_shared_modules_are_read_once() -> None:
    model = net()
    model.again = model.wide
    model.ring = SimpleNamespace(model=model)  # not a module: ignored
    model.levels["ring"] = model.levels
    assert sum(tensor is model.wide.weight for tensor in tensors_in(model, model.wide)) == 1
    assert fingerprint(model) == fingerprint(model)
