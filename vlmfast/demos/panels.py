"""Format answers for the page: chats, counters, drawings and the trace file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlmfast.api.overlays import overlay
from vlmfast.api.vlm import Answer
from vlmfast.engine.stats import Stats, Trace

from .remote import RemoteAnswer
from .talk import FULL, RECIPE, RESTORED, Conversation, Turn

AGAIN = "Looked again at full detail: "
_PAPER = (255, 255, 255)


def chat(talk: Conversation | None, side: str) -> list[dict[str, str]]:
    """One side of a conversation as chat messages."""
    if talk is None:
        return []
    messages = []
    new = [] if talk.current is None or talk.current in talk.turns else [talk.current]
    for turn in [*talk.turns, *new]:
        messages.append({"role": "user", "content": turn.question})
        if side in turn.texts:
            messages.append({"role": "assistant", "content": turn.texts[side] or "…"})
        if side == RECIPE and RESTORED in turn.texts:
            text = AGAIN + (turn.texts[RESTORED] or "…")
            messages.append({"role": "assistant", "content": text})
    return messages


def counters(turn: Turn | None) -> list[tuple[str, str, str]]:
    """Rows (counter, full model, recipe) with the cost of a turn."""
    full = turn and turn.answers.get(FULL)
    shown = turn and turn.shown
    agree = turn and turn.agreement
    rows = [(what, text_of(full), text_of(shown)) for what, text_of in _COUNTED.items()]
    return [*rows, ("Agreement with the full model", "–" if full is None else "100 %", _per(agree))]


def table(rows: list[tuple[str, str, str]]) -> str:
    """The counters as HTML."""
    body = "".join(
        f'<tr><th scope="row">{html.escape(what)}</th>'
        f"<td>{html.escape(full)}</td><td>{html.escape(shown)}</td></tr>"
        for what, full, shown in rows
    )
    return (
        '<table class="counters"><caption>Cost of the last answers</caption><thead><tr>'
        '<th scope="col">Counter</th><th scope="col">Full model</th><th scope="col">Recipe</th>'
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def message(text: str, *, error: bool = False) -> str:
    """A line above the answers that screen readers announce."""
    role, kind = ("alert", "note error") if error else ("status", "note")
    return f'<div role="{role}" class="{kind}">{html.escape(text)}</div>'


def slider(full: Answer, shown: Answer) -> tuple[Image.Image, Image.Image]:
    """Input and kept tokens, drawn in the same way and at the same size."""
    before, after = (_views(answer) for answer in (full, shown))
    if len(before) == len(after):  # else the recipe chose other frames
        pairs = (_alike(pair) for pair in zip(before, after, strict=True))
        before, after = zip(*pairs, strict=True)
    return tuple(_alike((_grid(before), _grid(after))))


def depths(answer: Answer) -> list[tuple[Image.Image, str]]:
    """Visual tokens in the language model, at the first layer and wherever their number changes."""
    trace = answer.trace
    if trace.layout is None:
        return []
    whole = _living(replace(trace, entered=trace.layout), torch.ones_like(trace.depth))
    everything = _grid(_views(replace(answer, trace=whole)))
    drawn = [(everything, f"from the vision tower: {len(trace.depth)} tokens")]
    for layer in sorted({0, *(layer for _, layer in trace.stages)} & set(range(trace.layers))):
        alive = trace.depth > layer
        image = _grid(_views(replace(answer, trace=_living(trace, alive))))
        drawn.append((image, f"layer {layer}: {int(alive.sum())} of {len(alive)} tokens"))
    return drawn


def frame_strip(answer: Answer) -> list[tuple[Image.Image, str]]:
    """Each frame with its tokens that are kept up to the last layer."""
    trace = answer.trace
    if trace.layout is None:
        return []
    item, stayed = trace.layout.item, trace.depth == trace.layers
    strip = []
    for index, image in enumerate(_views(answer)):
        mine = item == index
        kept, total = int(stayed[mine].sum()), int(mine.sum())
        strip.append((image, f"frame {index + 1}: {kept} of {total} tokens"))
    return strip


def write_trace(talk: Conversation, turn: Turn, folder: Path) -> Path:
    """Write recipes, answers, statistics and traces of a turn to a JSON file.

    Answers of a server have no ids of tokens.
    """
    answers = {
        side: {
            "recipe": answer.recipe,
            "answer": answer.text,
            **({} if isinstance(answer, RemoteAnswer) else {"token_ids": answer.token_ids}),
            "stats": answer.stats.to_dict(),
            "trace": answer.trace.to_dict(),
        }
        for side, answer in turn.answers.items()
    }
    name = Path(talk.media.path or "").name
    about = {"file": name, "question": turn.question, "recipe": str(talk.recipe)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    path.write_text(json.dumps({**about, "answers": answers}, indent=1), encoding="utf-8")
    return path


def plots() -> list[tuple[str, str]]:
    """Plots of the measured accuracy: path and caption."""
    folder = Path(__file__).parent / "results"
    if not folder.is_dir():  # a clone
        folder = Path(__file__).parents[2] / "docs" / "results"
    found = {
        folder / "shapes.png": "accuracy against the fraction of visual tokens",
        folder / "cache" / "shapes-cache.png": "accuracy against the bytes of the KV cache",
    }
    return [(str(path), caption) for path, caption in found.items() if path.is_file()]


# --- counters ------------------------------------------------------------------------------------


def _tokens(stats: Stats) -> str:
    steps = [f"{kept} ({name})" for name, kept in stats.visual_tokens_kept.items()]
    return " → ".join([str(stats.visual_tokens_in), *steps])


def _kv(stats: Stats) -> str:
    share = f" ({_per(stats.kv_bytes / stats.kv_bytes_full)})" if stats.kv_bytes_full else ""
    return f"{stats.kv_bytes / 1e6:.3g} MB{share}"


def _drafts(stats: Stats) -> str:
    if stats.drafted and not stats.rounds:  # a server counts the drafts only
        return f"{stats.accepted} of {stats.drafted}"
    if stats.drafted:
        return f"{stats.mean_accepted:.2f} tokens per forward pass"
    return stats.speculation and f"nothing drafted ({stats.speculation})"


def _reused(stats: Stats) -> str:
    return f"{stats.prompt_reused} of {stats.prompt_reused + stats.prompt_fed}"


def _of(show: Any) -> Any:
    return lambda answer: "–" if answer is None else show(answer.stats) or "–"


def _per(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.0%}".replace("%", " %")


_COUNTED = {
    "Visual tokens": _of(_tokens),
    "Visual tokens, mean over layers": _of(lambda stats: f"{stats.equivalent_tokens:.1f}"),
    "Time to the first token": _of(lambda stats: f"{stats.ttft_s * 1e3:,.1f} ms"),
    "Tokens per second": _of(lambda s: f"{s.tokens_per_s:.0f}" if s.tokens_per_s else ""),
    "KV cache": _of(_kv),
    "Accepted drafts": _of(_drafts),
    "Prompt tokens reused from the cache": _of(lambda s: _reused(s) if s.prompt_fed else ""),
}


def _living(trace: Trace, alive: Tensor) -> Trace:
    """The trace of a model that drops only the tokens that are not ``alive``."""
    return replace(trace, depth=alive.long() * trace.layers)


def _views(answer: Answer) -> list[Image.Image]:
    """One drawing for each image or frame: its crops if the model encoded any."""
    trace, drawn = answer.trace, []
    if trace.layout is None:
        return []
    for index, image in enumerate(trace.images):
        crops = (trace.layout.tile[trace.layout.item == index] > 0).any()
        layout, entered = (
            part.select((part.item == index) & ((part.tile > 0) | ~crops))
            for part in (trace.layout, trace.entered)
        )
        rows = torch.isin(trace.layout.order, layout.order)
        # Without the base view, the crops are laid out like any other image.
        layout, entered = (
            part.replace(item=torch.zeros_like(part.item), tile=torch.zeros_like(part.tile))
            for part in (layout, entered)
        )
        part = replace(
            trace, layout=layout, entered=entered, depth=trace.depth[rows], images=[image]
        )
        drawn += overlay(replace(answer, trace=part, recipe="kept"))  # short enough for a line
    return drawn


def _grid(images: Sequence[Image.Image]) -> Image.Image:
    """One image, or several in two columns."""
    columns = 1 if len(images) == 1 else 2
    width, height = (max(image.size[axis] for image in images) for axis in (0, 1))
    lines = -(-len(images) // columns)
    canvas = Image.new("RGB", (width * columns, height * lines), _PAPER)
    for number, image in enumerate(images):
        canvas.paste(image, (number % columns * width, number // columns * height))
    return canvas


def _alike(pair: tuple[Image.Image, Image.Image]) -> list[Image.Image]:
    size = tuple(max(side) for side in zip(*(image.size for image in pair), strict=True))
    return [_padded(image, size) for image in pair]


def _padded(image: Image.Image, size: tuple[int, ...]) -> Image.Image:
    canvas = Image.new("RGB", size, _PAPER)
    canvas.paste(image, (0, 0))
    return canvas
