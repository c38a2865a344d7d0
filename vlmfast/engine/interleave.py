"""Interleaved prefill: other work between the blocks of a forward pass.

A long prompt occupies the model for many times as long as a decode step. Its forward pass cannot be
split by tokens under every recipe, and the vision tower runs on all images at once. It is therefore
interrupted before each block of the tower and each layer of the language model, where requests can
be cancelled and other sequences can be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from vlmfast.core.contexts import PrefillContext, VisionContext, current_context
from vlmfast.models.base import Adapter


@contextmanager
def interleaved(adapter: Adapter, between: Callable[[], None]) -> Iterator[None]:
    """Call ``between`` before each block of tower and language model, in passes over a prompt.

    Parameters
    ----------
    between : callable
        May run decode steps, and raise to end the forward pass.
    """
    device = adapter.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        context = kwargs.get("vlmfast_context") or current_context.get()
        if not isinstance(context, PrefillContext | VisionContext):
            return  # a decode step that `between` runs
        if stream is not None and torch.cuda.current_stream(device) != stream:
            return  # a forward pass that is being captured
        token = current_context.set(None)
        try:
            between()
        finally:
            current_context.reset(token)

    with ExitStack() as hooks:
        for block in (*adapter.vision_blocks(), *adapter.decoder.layers):
            hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        yield
