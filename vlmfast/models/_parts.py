"""Parts of a vision tower and of a language model, found by what they do.

Transformers puts any vision tower and any language model into a LLaVA, and they name their parts
differently. `tower_parts` and `decoder_parts` build the same architecture without weights, on
PyTorch's meta device, run it once and record which modules attend and on which tensors. The names
of these modules are those of the real ones. This takes milliseconds and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModel

from vlmfast.errors import ModelError, check_memory, one_line

from .rope import rotary_by_length

# No "flash", "sdpa" or "/" in this name: transformers tests for such substrings.
_PROBE = "vlmfast_probe"
_TOKENS = 4  # of the prompt that a language model reads
_VIEWS = 2  # images that a tower sees
_DTYPE = torch.bfloat16  # some layers of experts take no other


@dataclass(frozen=True)
class TowerParts:
    """Where the parts of a vision tower are.

    Parameters
    ----------
    blocks : str
        Name of the list of its blocks.
    attention : tuple of str
        Of each block, the name in it of the module that attends.
    specials : int
        Rows before the patches of an image: the CLS token and registers.
    rows_alone : bool
        Whether its blocks take nothing but these rows; others also take positions of them, or add
        a bias to their attention.
    """

    blocks: str
    attention: tuple[str, ...]
    specials: int
    rows_alone: bool

    def blocks_of(self, tower: nn.Module) -> list[nn.Module]:
        return list(tower.get_submodule(self.blocks).children())


@dataclass(frozen=True)
class DecoderParts:
    """Where the parts of a language model are.

    Parameters
    ----------
    attention : tuple of str
        Of each layer, the name in it of the module that attends; empty if it holds a state.
    attention_norm : tuple of str
        The module whose output that module takes; empty where it takes the layer's own input.
    norm : str
        The module after the last layer; empty if there is none.
    windows : tuple of int or None
        The sliding window of each layer.
    calls : tuple of Call
        How each layer calls its attention; of no use where it holds a state.
    """

    attention: tuple[str, ...]
    attention_norm: tuple[str, ...]
    norm: str
    windows: tuple[int | None, ...]
    calls: tuple[Call | None, ...]


@dataclass(frozen=True)
class _Attending:
    """One call of Transformers' attention interface."""

    module: nn.Module
    key: Tensor
    passed: bool  # an argument of the language model
    masked: bool  # by a mask that Transformers did not make: there is none for this interface
    causal: bool
    sinks: bool
    window: int | None


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of a module, with tensors on the meta device."""

    args: tuple
    given: Mapping[str, Any]


@dataclass
class _Run:
    """What is seen of one run. Tensors are kept, so that no two of them have the same id."""

    attending: list[_Attending] = field(default_factory=list)
    rows: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)  # shapes of outputs
    inputs: dict[nn.Module, int] = field(default_factory=dict)  # ids of first arguments
    args: dict[nn.Module, tuple] = field(default_factory=dict)
    given: dict[nn.Module, Mapping[str, Any]] = field(default_factory=dict)
    makers: dict[int, nn.Module] = field(default_factory=dict)  # by id of their first output
    tensors: list[Tensor] = field(default_factory=list)


_run: ContextVar[_Run | None] = ContextVar("vlmfast_probe", default=None)


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    run = _run.get()
    assert run is not None
    run.attending.append(
        _Attending(
            module,
            key,
            passed="vlmfast_context" in kwargs,
            masked=attention_mask is not None,
            causal=getattr(module, "is_causal", True),
            sinks=kwargs.get("s_aux") is not None,
            window=kwargs.get("sliding_window"),
        )
    )
    return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_PROBE, _record)


@contextmanager
def recording(attention: nn.Module) -> Iterator[list[_Attending]]:
    """Inside the block, a module attends to nothing, and what it is called with is listed."""
    config: Any = attention.config
    run = _Run()
    before, token = config._attn_implementation, _run.set(run)
    config._attn_implementation = _PROBE
    try:
        yield run.attending
    finally:
        config._attn_implementation = before
        _run.reset(token)


def tower_parts(kind: str, config: Any, pixels_per_side: int | None = None) -> TowerParts:
    """The parts of a vision tower that Transformers builds from ``config``.

    Parameters
    ----------
    kind : str
        Its name in errors.
    config : transformers.PreTrainedConfig
    pixels_per_side : int, optional
        Of the views that it gets; by default those of its config. Some towers take others, too.

    Raises
    ------
    ModelError
        If its patches are no square raster, or its blocks do not attend by Transformers' attention
        interface, once each.
    """
    side, edge = _side(config, kind, pixels_per_side)
    shape = _VIEWS, getattr(config, "num_channels", 3), edge, edge
    pixels = torch.empty(shape, device="meta", dtype=_DTYPE)
    twin, run = _probed(config, kind, "vision tower", pixels, output_hidden_states=True)
    name, attention = _blocks(twin, run, kind, "vision tower")
    blocks = list(twin.get_submodule(name).children())
    shapes = {run.rows.get(block, ()) for block in blocks}
    rows = {shape[1] for shape in shapes if len(shape) == 3 and shape[0] == _VIEWS}
    if len(shapes) > 1 or len(rows) != 1 or (specials := rows.pop() - side * side) < 0:
        made = " and ".join(map(str, sorted(shapes)))
        raise ModelError(
            f"{kind} as vision tower is not supported: for {_VIEWS} images of {side} x {side} "
            f"patches its blocks give tensors of shape {made}, and each image needs one row for "
            "each patch"
        )
    more = [[*run.args[block][1:], *run.given[block].values()] for block in blocks]
    rows_alone = not any(isinstance(value, Tensor) for value in tree_leaves(more))
    rows_alone = rows_alone and not any(call.masked for call in run.attending)
    return TowerParts(name, attention, specials, rows_alone)


def _side(config: Any, kind: str, image: int | None) -> tuple[int, int]:
    """Patches in a row of an image, and pixels."""
    image = getattr(config, "image_size", None) if image is None else image
    patch = getattr(config, "patch_size", None)
    if not isinstance(image, int) or not isinstance(patch, int):
        raise ModelError(
            f"{kind} as vision tower is not supported: its config has image_size={image} and "
            f"patch_size={patch}; a square raster needs one int each"
        )
    return image // patch, image


def decoder_parts(decoder: nn.Module, config: Any) -> DecoderParts:
    """The parts of a language model that Transformers builds from ``config``.

    Raises
    ------
    ModelError
        If its layers do not attend by Transformers' attention interface, once each and causally,
        take no rotary tables, or do not pass arguments on to their attention.
    """
    kind = type(decoder).__name__
    embeds = torch.empty(1, _TOKENS, config.hidden_size, device="meta", dtype=_DTYPE)
    twin, run = _probed(
        config, kind, "language model", inputs_embeds=embeds, use_cache=False, vlmfast_context=0
    )
    name, attention = _blocks(twin, run, kind, "language model", every=False)
    layers = list(twin.get_submodule(name).children())
    calls = run.attending
    lacks = {
        "a list of layers named 'layers'": name != "layers",
        "a module 'rotary_emb'": not hasattr(twin, "rotary_emb"),
        "layers that take rotary tables": not all(
            "position_embeddings" in run.given.get(layer, {}) for layer in layers
        ),
        "layers that pass arguments on": not all(call.passed for call in calls),
        "a layer index in its attention": not all(
            hasattr(call.module, "layer_idx") for call in calls
        ),
        "attention that is causal": not all(call.causal for call in calls),
        "attention without a mask of its own": any(call.masked for call in calls),
        "attention without sinks": any(call.sinks for call in calls),
    }
    if missing := [lack for lack, found in lacks.items() if found]:
        raise ModelError(f"{kind} as language model is not supported: it lacks {missing[0]}")
    names = {module: of for of, module in twin.named_modules()}
    norms = []
    for number, (layer, inner) in enumerate(zip(layers, attention, strict=True)):
        start = f"{name}.{number}."
        maker = run.makers.get(run.inputs.get(layer.get_submodule(inner), 0))
        before = "" if maker is None or not inner else names[maker]
        norms.append(before.removeprefix(start) if before.startswith(start) else "")
    last = [
        of
        for of, module in twin.named_children()
        if run.inputs.get(module) is not None and run.makers.get(run.inputs[module]) is layers[-1]
    ]
    by_module = {call.module: call for call in calls}
    attending = [
        layer.get_submodule(inner) if inner or layer in by_module else None
        for layer, inner in zip(layers, attention, strict=True)
    ]
    return DecoderParts(
        attention,
        tuple(norms),
        last[0] if last else "",
        tuple(None if of is None else by_module[of].window for of in attending),
        tuple(None if of is None else Call(run.args[of], run.given[of]) for of in attending),
    )


def _probed(config: Any, kind: str, role: str, *args: Any, **given: Any) -> tuple[nn.Module, _Run]:
    """A model without weights after one run, and what was seen of it."""
    config = copy.deepcopy(config)  # it is changed, and the user's has their attention
    try:
        with torch.device("meta"):
            own = {"attn_implementation": _PROBE, "trust_remote_code": False}
            twin = AutoModel.from_config(config, dtype=_DTYPE, **own).eval()
        # Tables by length would be read on the host.
        rotary = rotary_by_length(twin) if hasattr(twin, "rotary_emb") else nullcontext()
        with rotary, _watched(twin) as run, torch.no_grad():
            twin(*args, **given)
    except Exception as error:  # whatever its code raises without what it needs
        check_memory(error)
        raise ModelError(f"{kind} as {role} is not supported: {one_line(error)}") from error
    return twin, run


@contextmanager
def _watched(twin: nn.Module) -> Iterator[_Run]:
    run = _Run()

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        run.args[module], run.given[module] = args, kwargs
        first = args[0] if args else kwargs.get("hidden_states")
        if isinstance(first, Tensor):
            run.tensors.append(first)
            run.inputs[module] = id(first)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            run.tensors.append(first)
            run.makers[id(first)] = module  # of nested modules, the outermost
            run.rows[module] = tuple(first.shape)

    with ExitStack() as hooks:
        for module in twin.modules():
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        hooks.callback(_run.reset, _run.set(run))
        yield run


def _blocks(
    twin: nn.Module, run: _Run, kind: str, role: str, every: bool = True
) -> tuple[str, tuple[str, ...]]:
    """The longest list of modules that attend once each, and the names of what attends in them.

    Without ``every``, some of them may not attend at all.
    """
    names = {module: name for name, module in twin.named_modules()}
    calls = [names[call.module] for call in run.attending if call.module in names]
    best: tuple[str, tuple[str, ...]] = "", ()
    for name, module in twin.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) <= len(best[1]):
            continue
        starts = [f"{name}.{number}." for number in range(len(module))]
        within = [[call for call in calls if call.startswith(start)] for start in starts]
        if not any(within) or any(len(of) > 1 or (every and not of) for of in within):
            continue
        pairs = zip(within, starts, strict=True)
        inner = tuple("".join(of).removeprefix(start) for of, start in pairs)
        best = name, inner
    if not best[1]:
        raise ModelError(
            f"{kind} as {role} is not supported: it has no list of blocks that attend by "
            "Transformers' attention interface, once each"
        )
    return best
