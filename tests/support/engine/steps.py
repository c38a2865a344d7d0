"""Steps that are captured or fused, and towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmfast import VLM
from vlmfast.core import buffers
from vlmfast.engine import forward, fused, kv_layer, tower
from vlmfast.engine.calls import step_modules
from vlmfast.engine.fused import fusable, fused_step
from vlmfast.engine.fused_kinds import kind_of
from vlmfast.engine.graphs import Graphs, StepGraphs, rounded
from vlmfast.engine.tower import _SHAPES as SHAPES
from vlmfast.engine.tower import Record, Towers

__all__ = [
    "SHAPES",
    "Graphs",
    "Towers",
    "fusable",
    "fused_step",
    "kind_of",
    "rounded",
    "step_modules",
]


# --- captured towers -----------------------------------------------------------------------------


def capture_towers(patch: pytest.MonkeyPatch, patches: int | None = None) -> None:
    """Capture the towers of models with a `captured_tower` without CUDA.

    ``patches``: of how many an image may consist, instead of what the engine allows.
    """
    patch.setattr(tower, "_captures", lambda adapter: "towers" in adapter.kept)
    if patches is not None:
        patch.setattr(tower, "_PATCHES", patches)


def captured_tower(vlm: VLM, record: Record) -> Towers:
    """The passes of a model's tower, captured by ``record``."""
    towers = vlm.adapter.kept["towers"] = Towers(record=record)
    return towers


def kept_passes(towers: Towers) -> int:
    """How many captured passes are kept."""
    return len(towers._kept)


# --- steps that are not run module by module -----------------------------------------------------


def graphs_of(vlm: VLM) -> Graphs:
    """The captured steps of a model."""
    return vlm.adapter.kept["graphs"]


def idle(graphs: Graphs) -> list[StepGraphs]:
    """Buffers that wait for rows, with their captured steps; the oldest first."""
    return graphs._idle


def captured_sizes(vlm: VLM) -> list[tuple[int, int]]:
    """Rows, and tokens of each, of all captured steps that wait for rows."""
    return [key[:2] for steps in graphs_of(vlm)._idle for key in steps._replays]


def sizes_of_steps(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows of each captured step that runs: of its input, logits, hidden and auxiliary states."""
    sizes, run = list[tuple[int, ...]](), StepGraphs.run

    def noted(steps: StepGraphs, call: Any, aux_layers: tuple, *given: torch.Tensor) -> Any:
        output = run(steps, call, (0,), *given)
        found = given[0], output.logits, output.hidden, output.aux_hidden_states
        sizes.append(tuple(map(len, found)))
        return output

    patch.setattr(StepGraphs, "run", noted)
    return sizes


def small_buffers(patch: pytest.MonkeyPatch) -> None:
    """Keys and values have few free slots, so that buffers grow during an answer."""
    patch.setattr(kv_layer, "FREE_SLOTS", 8)
    patch.setattr(buffers, "_SMALLEST", 64)


def fuse_steps(patch: pytest.MonkeyPatch) -> None:
    """Run fused steps, whose kernels have references, without CUDA."""
    patch.setattr(fused, "use_triton", lambda *_: True)


def compile_steps(vlm: VLM, dynamic: bool | None = None) -> None:
    """Compile the decoder of a model, whose ``decoding`` is ``"compile"``, to Python."""
    torch._dynamo.reset()
    compiled = torch.compile(vlm.adapter.decoder, backend="eager", dynamic=dynamic)
    vlm.adapter.kept["compiled"] = compiled


def steps_taken(patch: pytest.MonkeyPatch, vlm: VLM) -> list[int]:
    """Grows with each step that is fused, or that a compiled decoder runs."""
    steps, step = list[int](), fused.fused_step
    patch.setattr(forward, "fused_step", lambda *given: steps.append(1) or step(*given))
    if (compiled := vlm.adapter.kept.get("compiled")) is not None:
        run = compiled.forward
        patch.setattr(
            compiled, "forward", lambda *given, **more: steps.append(1) or run(*given, **more)
        )
    return steps
