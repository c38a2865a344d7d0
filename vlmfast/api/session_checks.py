"""Checks that the parts of a session file are consistent with each other and with the model.

A checksum detects damage but not forgery, since a forged file can have a valid checksum. Every part
is therefore checked against the model, the recipe and the other parts before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.protocols import DecodeStage, EncodeStage, tower_stages
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ItemGeometry
from vlmfast.engine.prefill import Seen
from vlmfast.engine.prefixes import parts
from vlmfast.engine.stats import Trace, frames_of
from vlmfast.kernels.quantize_kv import Segment
from vlmfast.media import MAX_PIXELS, MAX_VIDEO_PIXELS
from vlmfast.models.base import Adapter

__all__ = ["capacity", "check_cache", "check_images", "check_messages", "check_seen", "need"]

_FREE = 2048  # free slots that a loaded cache reserves at most
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def need(condition: object, what: str) -> None:
    """Raise ``ValueError`` if a condition is false."""
    if not condition:
        raise ValueError(what)


def _whole(value: Any, what: str, low: int, high: int) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    need(fine, f"{what} is {str(value)[:40]}, which is not a whole number from {low} to {high}")


def _tensor(
    value: Any,
    what: str,
    shape: Sequence[int | None],
    dtype: torch.dtype | Sequence[torch.dtype],
    low: float | None = None,
    high: float | None = None,
    *,
    finite: bool = True,
) -> None:
    """Check a tensor's shape (None: any length), dtype and range."""
    need(isinstance(value, Tensor), f"{what} is not a tensor")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    need(value.dtype in dtypes, f"{what} is {value.dtype}")
    fits = value.dim() == len(shape) and all(
        b is None or a == b for a, b in zip(value.shape, shape, strict=True)
    )
    need(fits, f"{what} has the shape {tuple(value.shape)}, not {tuple(shape)}")
    if not value.numel():
        return
    if finite and value.is_floating_point():
        need(bool(value.isfinite().all()), f"{what} contains values that are not finite")
    if low is not None:
        need(bool((value >= low).all()), f"{what} contains values below {low}")
    if high is not None:
        need(bool((value <= high).all()), f"{what} contains values above {high}")


# --- conversation ---------------------------------------------------------------------------------


def check_messages(messages: Any, history: Any) -> None:
    """Check that questions and answers alternate; none in a session without history."""
    need(isinstance(history, bool), "history is neither true nor false")
    need(isinstance(messages, list), "messages are not a list")
    need(history or not messages, "there are messages in a session without history")
    need(len(messages) % 2 == 0, "the messages do not end with an answer")
    for number, turn in enumerate(messages):
        fine = isinstance(turn, dict) and turn.keys() == {"role", "content"}
        fine = fine and turn["role"] == ("user", "assistant")[number % 2]
        need(fine and isinstance(turn["content"], str), f"messages[{number}] is not a turn")
        need(number % 2 or turn["content"].strip(), f"messages[{number}] is an empty question")


# --- images -------------------------------------------------------------------------------------


def check_images(known: Any, adapter: Adapter) -> None:
    """Check images and videos as far as possible without a blank prompt of the same sizes."""
    for part in known.media:
        fine = isinstance(part, dict) and part.get("type") in ("image", "video", "text")
        need(fine and all(isinstance(of, str) for of in part.values()), "media are not a turn")
    need(known.sizes, "there are no sizes of images")
    total = 0
    for size in known.sizes:
        for side in size:
            _whole(side, "a side of an image", 1, MAX_PIXELS)
        need(size[0] * size[1] <= MAX_PIXELS, f"an image of {size} is too large")
        total += size[0] * size[1]
    need(total <= MAX_VIDEO_PIXELS, "the images are too large together")
    need(not known.frames or len(known.frames) == len(known.sizes), "frames and sizes differ")
    for entry in known.frames:
        for number in entry:
            _whole(number, "a number of a frame", -1, len(known.sizes))
    videos = [
        (video, index, len(times))
        for video, times in enumerate(known.times)
        for index in range(len(times))
    ]
    framed = [entry for entry in known.frames if entry != (-1, 0, 1)]
    need(framed == videos, "the frames of videos and their times differ")
    need(not known.images, "there are images in the file")
    need(not known.digests, "there are digests of images in the file")
    for at in known.prefix:
        _whole(at, "an id of the prompt", 0, max(adapter.vocabulary, *adapter.placeholders()))


def check_consumed(consumed: Any, known: Any, adapter: Adapter) -> None:
    """Check what the model has consumed of a conversation.

    Parameters
    ----------
    consumed : vlmfast.api.conversation.Consumed
    known : vlmfast.api.session.Images, optional
    """
    prefix = [] if known is None else known.prefix
    for at in consumed.ids:
        _whole(at, "an id of the conversation", 0, max(adapter.vocabulary, *adapter.placeholders()))
    need(consumed.ids[: len(prefix)] == prefix, "the conversation is about other images")
    rest = torch.tensor(consumed.ids[len(prefix) :], dtype=torch.int64)
    need(not bool(adapter.visual(rest).any()), "there are image tokens in the conversation")


def check_seen(
    known: Any, adapter: Adapter, recipe: Recipe, tensors: dict[str, Tensor], length: int
) -> None:
    """Check the encoded images against the processor's output for blank ones.

    Parameters
    ----------
    known : vlmfast.api.session.Images
    tensors : dict of str to Tensor
        Of blank images of the same sizes, with the ids of a prompt around them.
    length : int
        Number of these ids before the question.
    """
    ids = tensors["input_ids"][0]
    need(known.prefix == ids[:length].tolist(), "the ids of the prompt are those of another one")
    own = {key: of for key, of in tensors.items() if key not in ("input_ids", "attention_mask")}
    pixels = {key for key in own if key.startswith("pixel_values")}
    need(known.tensors.keys() == own.keys() - pixels, "tensors of the processor are missing")
    inside = tower_stages(recipe)
    need(known.pixels.keys() == (pixels if inside else set()), "pixels are missing")
    for key, of in (known.tensors | known.pixels).items():
        _tensor(of, key, own[key].shape, own[key].dtype)
        fixed = key not in pixels and not of.is_floating_point()
        need(not fixed or torch.equal(of, own[key].to(of.device)), f"{key} is that of other images")
    items = adapter.items(tensors, known.sizes, known.frames)
    seen: Seen = known.seen
    vision = seen.vision
    need(tuple(vision.items) == tuple(items), "the geometry is that of other images")
    visual = adapter.visual(ids[:length])
    order = visual.nonzero().flatten().cpu()
    position = adapter.positions(tensors)[:, :length].cpu()
    need(known.stats.visual_tokens_in == len(order), "visual tokens are counted wrong")
    tokens, rows = seen.tokens, len(seen.tokens.layout)
    whole = rows == len(order)
    need(whole or (inside and 0 < rows < len(order)), f"there are {rows} visual tokens")
    _tensor(tokens.features, "features", (rows, adapter.width), adapter.dtype)
    for level in tokens.extra:
        _tensor(level, "features of a level", (rows, adapter.width), adapter.dtype)
    _check_layout(tokens.layout, items, order, position, "layout")
    _check_trace(known.trace, adapter, items, order, position)
    if not inside:
        _same_layout(tokens.layout, known.trace.layout)
    need(all(isinstance(of, dict) for of in seen.notes.values()), "notes are not by method")
    need(seen.notes.keys() <= {part.name for part in parts(recipe)}, "notes of other methods")
    _check_vision(seen, recipe, adapter, items)


def _check_layout(
    layout: TokenLayout,
    items: Sequence[ItemGeometry],
    order: Tensor,
    position: Tensor,
    what: str,
) -> None:
    """Check a layout: each row is a different placeholder of the prompt, in ascending order."""
    n = len(layout)
    views = max(item.views[1] for item in items)
    tiles = max(item.views[1] - item.views[0] for item in items)
    across = [max(i.patches[a] * max(i.tiles[a], 1) for i in items) for a in (0, 1)]
    frames = max(len(items), *(item.frame[1] for item in items)) + 1
    _tensor(layout.kind, f"{what}.kind", (n,), torch.uint8, int(Kind.IMAGE), int(Kind.SPECIAL))
    _tensor(layout.item, f"{what}.item", (n,), torch.int32, 0, len(items) - 1)
    _tensor(layout.tile, f"{what}.tile", (n,), torch.int32, -1, tiles - 1)
    _tensor(layout.view, f"{what}.view", (n,), torch.int32, -1, views - 1)
    _tensor(layout.grid, f"{what}.grid", (n, 3), torch.int32, -1)
    bounds = torch.tensor([frames, *across])
    need(bool((layout.grid.cpu() < bounds).all()), f"{what}.grid lies outside of the images")
    _tensor(layout.box, f"{what}.box", (n, 4), torch.float32, finite=False)
    _tensor(layout.order, f"{what}.order", (n,), torch.int64)
    at = layout.order.cpu()
    need(bool((at.diff() > 0).all()), f"{what}.order does not ascend")
    need(bool(torch.isin(at, order).all()), f"{what}.order names no image tokens")
    _tensor(layout.position, f"{what}.position", (len(position), n), torch.int64, 0)
    top = int(position.max())
    need(bool((layout.position <= top).all()), f"{what}.position lies after the images")
    _tensor(layout.weight, f"{what}.weight", (n,), torch.float32, 0)
    need(bool((layout.weight > 0).all()), f"{what}.weight is not above 0")
    _tensor(layout.protected, f"{what}.protected", (n,), torch.bool)


def _same_layout(one: TokenLayout, other: TokenLayout) -> None:
    for name in ("kind", "item", "tile", "view", "grid", "order", "position"):
        same = torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu())
        need(same, f"{name} differs between the tokens and their trace")


def _check_trace(
    trace: Trace,
    adapter: Adapter,
    items: Sequence[ItemGeometry],
    order: Tensor,
    position: Tensor,
) -> None:
    need(trace.layout is not None and trace.entered is not None, "the trace has no layout")
    assert trace.layout is not None and trace.entered is not None
    _check_layout(trace.layout, items, order, position, "trace.layout")
    need(len(trace.layout) == len(order), "the trace has other tokens")
    _check_layout(trace.entered, items, order, position, "trace.entered")
    _tensor(trace.depth, "trace.depth", (len(order),), torch.int64, 0, adapter.depth)
    need(trace.layers == adapter.depth, f"trace.layers is {trace.layers}")
    need(not trace.images, "there are images in the trace")
    # Files of earlier versions have none.
    need(trace.frames in ([], frames_of(items)), "the trace has other frames")
    for entry in trace.stages:
        need(isinstance(entry[0], str), "trace.stages names no stage")
        _whole(entry[1], "trace.stages", 0, adapter.depth)


def _check_vision(
    seen: Seen, recipe: Recipe, adapter: Adapter, items: Sequence[ItemGeometry]
) -> None:
    """Check the tower's statistics: all that the recipe's stages need, in one shape per kind."""
    vision = seen.vision
    views = max(item.views[1] for item in items)
    tower = len(adapter.vision_blocks())
    for stage in recipe.acting(EncodeStage):
        for layer, asked in stage.vision_stats(tower).items():
            lacking = asked.rows != "keys" and layer not in vision.rows
            need(not lacking, f"statistics of the tower's layer {layer} are missing")
            lacking = asked.keys and layer not in vision.keys
            need(not lacking, f"keys of the tower's layer {layer} are missing")
        for request in stage.saliencies():
            need(request.key in vision.saliency, f"the saliency {request.key} is missing")
        if stage.wants_cls and adapter.projects_cls() and not stage.saliencies():
            need(vision.cls is not None, "the CLS tokens are missing")
    inside = bool(tower_stages(recipe))
    for name in ("rows", "keys"):
        found = getattr(vision, name)
        for layer, of in found.items():
            _whole(layer, f"a layer of {name}", 0, tower - 1)
            _tensor(of, name, (None, None, None), torch.float32)
            need(inside or of.shape[0] == views, f"{name} are of {of.shape[0]} views, not {views}")
            patches = of.shape[2] if name == "rows" else of.shape[1]
            most = max(item.patches[0] * item.patches[1] for item in items)
            need(inside or patches >= most, f"{name} are of {patches} patches, not {most}")
            need(of.numel(), f"{name} are empty")
            like = next(iter(found.values()))
            need(inside or of.shape[0] == like.shape[0], f"{name} differ in shape")
        need(name == "keys" or all(bool((of >= 0).all()) for of in found.values()), f"{name} < 0")
    if vision.cls is not None:
        _tensor(vision.cls, "cls", (views, adapter.width), (adapter.dtype, torch.float32))
    if vision.skipped is not None:
        need(inside, "views are missing")
        _tensor(vision.skipped, "skipped", (views,), torch.bool)
    for key, of in vision.saliency.items():
        need(isinstance(key, str) and len(of) == len(items), "saliency is of other images")
        for one, item in zip(of, items, strict=True):
            need(one.source in ("cls", "received", "norm"), f"saliency comes from {one.source}")
            each, patches = item.views[1] - item.views[0], item.patches[0] * item.patches[1]
            need(one.rows.dim() == 3 and one.rows.shape[1] >= 1, "saliency has no heads")
            _tensor(one.rows, "saliency", (each, None, patches), torch.float32, 0)
            need((one.keys is None) == key.endswith("/none"), "keys of the saliency are missing")
            if one.keys is not None:
                _tensor(one.keys, "saliency keys", (each, patches, None), torch.float32)
                like = one.keys if of[0].keys is None else of[0].keys
                need(one.keys.shape[2] == like.shape[2] > 0, "saliency keys differ")


# --- the cache ------------------------------------------------------------------------------------


def check_cache(
    frozen: dict[str, Any], adapter: Adapter, recipe: Recipe, known: Any, top: int
) -> None:
    """Check a frozen cache, as `session_file.frozen` returns it.

    Parameters
    ----------
    known : vlmfast.api.session.Images, optional
    top : int
        The largest rotary id of the prompt up to its last image.
    """
    text = adapter.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    ids, prefix = frozen["ids"], [] if known is None else known.prefix
    need(isinstance(ids, list) and ids, "the cache is empty")
    for at in ids:
        _whole(at, "an id of the cache", 0, max(adapter.vocabulary, *adapter.placeholders(), 0))
    consumed = len(ids)
    if known is not None:
        need(ids[: len(prefix)] == prefix, "the cache is that of another prompt")
    rest = torch.tensor(ids[len(prefix) :])
    need(not bool(adapter.visual(rest).any()), "there are image tokens among the text")
    need(frozen["logical"] == [consumed], "logical is not the number of ids")
    (compressed,) = frozen["compressed"]
    _whole(compressed, "compressed", 0, consumed)
    _whole(frozen["steps"], "steps", 0, consumed)
    stages = recipe.acting(DecodeStage) if known is not None else []
    need(frozen["track"] is bool(stages), "track does not fit the recipe")
    need(
        frozen["attention_mass"] is any(stage.attention_mass for stage in stages),
        "mass does not fit the recipe",
    )
    depth = adapter.depth
    _tensor(frozen["length"], "length", (depth, 1, heads), torch.int64, 0)
    _tensor(frozen["prompt"], "prompt", (depth, heads), torch.int64, 0, consumed)
    need(isinstance(frozen["layers"], list), "layers are not a list")
    need(len(frozen["layers"]) == depth, f"{len(frozen['layers'])} layers, the model has {depth}")
    axes = 1 if known is None else len(known.trace.layout.position)
    position = frozen["position"]
    shape = (1, 1) if position.dim() == 2 else (3, 1, 1)
    need(position.dim() == 2 or axes == 3, "the position has no axes")
    _tensor(position, "position", shape, torch.int64, 0, top + 1 + consumed - len(prefix))
    window = adapter.window
    need(window is None or int(position.max()) < window, "the position is outside the window")
    for at, (layer, length) in enumerate(zip(frozen["layers"], frozen["length"], strict=True)):
        _check_layer(layer, length[0], f"layers[{at}]", frozen, adapter, at, (heads, dim))
    _check_notes(frozen["notes"], recipe, depth, heads, dim, consumed)


def _check_layer(
    layer: dict[str, Any],
    length: Tensor,
    what: str,
    frozen: dict[str, Any],
    adapter: Adapter,
    at: int,
    sizes: tuple[int, int],
) -> None:
    heads, dim = sizes
    window = adapter.windows[at]
    (consumed,), (compressed,) = frozen["logical"], frozen["compressed"]
    longest = layer["held"]
    _whole(longest, f"{what}.held", 0, consumed)
    need(longest == int(length.max()), f"{what}.held is not its length")
    _whole(layer["capacity"], f"{what}.capacity", longest, 1 << 62)
    for name in ("shift", "gap"):
        need(len(layer[name]) == 1, f"{what}.{name} is not of one row")
        _whole(layer[name][0], f"{what}.{name}", -consumed if name == "shift" else 0, consumed)
    even = bool((length == length[0]).all())
    need(isinstance(layer["even"], bool) and layer["even"] <= even, f"{what}.even is wrong")
    buffers = layer["buffers"]
    wanted = {"keys", "values"}
    wanted |= {"order"} if frozen["track"] else set()
    wanted |= {"attention_mass"} if frozen["attention_mass"] else set()
    free = {"bias"} | ({"rank"} if window is not None else set())
    need(wanted <= buffers.keys() <= wanted | free, f"{what} has other buffers")
    row = (1, heads, longest)
    for name, dtype, low, high in (
        ("order", torch.int64, None, consumed - 1),
        ("rank", torch.int32, None, None),
        ("attention_mass", torch.float32, 0, None),
        ("bias", torch.float32, None, None),
    ):
        if name in buffers:
            _tensor(buffers[name], f"{what}.{name}", row, dtype, low, high)
    for name in ("keys", "values"):
        _tensor(buffers[name], f"{what}.{name}", (*row, dim), adapter.dtype)
    segments, stored = layer["segments"], layer["stored"]
    need(len(segments) == len(stored), f"{what}.stored is not of its segments")
    for segment, count in zip(segments, stored, strict=True):
        need(isinstance(segment, Segment), f"{what} has a segment that is none")
        _check_segment(segment, count, what, adapter, heads, dim)
    if not frozen["track"]:  # the last ids can be removed one by one
        need(int(length.min()) >= consumed - compressed, f"{what} has too few slots")
    if compressed == 0 and not frozen["track"]:
        need(not segments and longest == consumed and even, f"{what} is not whole")


def _check_segment(
    segment: Segment, count: Any, what: str, adapter: Adapter, heads: int, dim: int
) -> None:
    bits, group = segment.bits, segment.group
    need(bits in (2, 4, 8), f"{what} has a segment of {bits} bits")
    need(segment.key_codes.dim() == 4, f"{what} has a segment of another shape")
    slots = segment.key_codes.shape[2]
    _whole(group, f"{what}: group of a segment", 0, max(slots, 1))
    need(not group or slots % group == 0, f"{what} has a segment that is no multiple of its group")
    groups = slots // group if group else 1
    packed, row = dim * bits // 8, (1, heads)
    channels = segment.value_step.shape[-1] if segment.value_step.dim() else 0
    need(channels and dim % channels == 0, f"{what} has a segment of {channels} groups of channels")
    floats = (torch.float16, torch.float32, adapter.dtype)
    for name, shape, dtype in (
        ("key_codes", (*row, slots, packed), torch.uint8),
        ("value_codes", (*row, slots, packed), torch.uint8),
        ("key_step", (*row, groups, dim), floats),
        ("key_min", (*row, groups, dim), floats),
        ("value_step", (*row, slots, channels), floats),
        ("value_min", (*row, slots, channels), floats),
        ("value_scale", (*row, dim), floats),
        ("order", (*row, slots), torch.int32),
        ("bias", (*row, slots), torch.float32),
    ):
        of = getattr(segment, name)
        if of is not None or name not in ("value_scale", "bias"):
            _tensor(of, f"{what}.{name}", shape, dtype)
    _tensor(segment.lengths, f"{what}.lengths", row, torch.int64, 0, slots)
    need(isinstance(count, list) and len(count) == 1, f"{what}.stored is not of one row")
    _whole(count[0], f"{what}.stored", 0, slots)
    need(count[0] == int(segment.lengths.max()), f"{what}.stored is not its length")
    need(not group or count[0] % group == 0, f"{what}.stored is no multiple of its group")


# --- notes of methods ----------------------------------------------------------------------------


def _check_notes(
    notes: Any, recipe: Recipe, depth: int, heads: int, dim: int, consumed: int
) -> None:
    """Check the notes of methods that work in decode; for others only the types."""
    need(isinstance(notes, dict), "notes are not by method")
    known = {part.name: part for part in parts(recipe)}
    decoding = {stage.name for stage in recipe.acting(DecodeStage)}
    for name, note in notes.items():
        need(name in known and isinstance(note, dict), f"notes of {str(name)[:40]} are not its own")
        if name in decoding and name in _NOTES:
            sizes = (depth, heads, dim, consumed)
            _NOTES[name](note, next(stage for stage in recipe if stage.name == name), *sizes)
    for name in decoding & _NEEDED:
        need(name in notes, f"notes of {name} are missing")


def _by_layer(note: dict, depth: int, what: str, whole: bool = True) -> None:
    for layer in note:
        _whole(layer, f"a layer in the notes of {what}", 0, depth - 1)
    need(not whole or not note or len(note) == depth, f"notes of {what} lack a layer")


def _kivi(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    _by_layer(note, depth, "kivi")
    for of in note.values():
        need(of.keys() <= {"apart", "dtype"}, "notes of kivi have other entries")
        _whole(of.get("apart"), "notes of kivi", 0, 0 if consumed == 0 else consumed)
        need(of.get("dtype", torch.float16) in _FLOATS, "notes of kivi have no dtype of floats")


def _h2o(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    _by_layer(note, depth, "h2o", whole=False)
    for of in note.values():
        need(isinstance(of, tuple) and len(of) == 2, "notes of h2o are not two")
        _whole(of[0], "notes of h2o", 1, consumed)
        _tensor(of[1], "notes of h2o", (heads,), torch.int64, 0, of[0])


def _streamingllm(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    _by_layer(note, depth, "streamingllm", whole=False)
    for of in note.values():
        sinks = stage.sinks
        _whole(of.budget, "notes of streamingllm", sinks, consumed)
        _tensor(of.keys, "notes of streamingllm", (heads, sinks, dim), torch.float32)
        shape = (heads, sinks)
        _tensor(of.delta, "notes of streamingllm", shape, torch.int64, -2 * consumed, consumed)


def _zipcache(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    _by_layer(note, depth, "zipcache")
    for of in note.values():
        _tensor(of, "notes of zipcache", (heads, dim), _FLOATS)
        need(bool((of > 0).all()), "notes of zipcache contain a scale that is not above 0")


def _zipvl(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    scales = {key: of for key, of in note.items() if isinstance(key, tuple)}
    need(
        scales.keys() == {("scale", layer) for layer in range(depth)}, "notes of zipvl lack scales"
    )
    for of in scales.values():
        _tensor(of, "notes of zipvl", (heads, dim), _FLOATS)
        need(bool((of > 0).all()), "notes of zipvl contain a scale that is not above 0")


def _cake(note: dict, stage: Any, depth: int, heads: int, dim: int, consumed: int) -> None:
    for name in ("kept", "windows"):
        found = note.get(name)
        if found is not None or note.get("kept"):
            need(isinstance(found, list) and len(found) == depth, f"notes of cake lack {name}")
            for of in found or ():
                _whole(of, "notes of cake", 0, consumed)


_NOTES: dict[str, Callable[..., None]] = {
    "kivi": _kivi,
    "h2o": _h2o,
    "streamingllm": _streamingllm,
    "zipcache": _zipcache,
    "zipvl": _zipvl,
    "cake": _cake,
}
_NEEDED = {"zipvl"}


def capacity(stated: int, length: int) -> int:
    """Slots to allocate for a loaded buffer: its former capacity, with a bound on free slots."""
    return min(stated, length + _FREE)
