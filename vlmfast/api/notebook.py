"""Answers, models and sessions as HTML for notebooks."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vlmfast.core.display import (
    Cost,
    bar,
    block,
    escaped,
    html_costs,
    html_table,
    lines,
    paragraph,
    unwrapped,
)

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.engine.stats import Stats, Trace

# Pixels of an overlay: of one image, of one among others, in a table.
_SIDE, _SMALL, _SMALLEST = 288, 128, 96
_MOST = 4  # images or frames of an answer that are shown


class Answered(Protocol):
    """What is shown of an `Answer`."""

    text: str
    trace: Trace


class Compared(Protocol):
    """What is shown of a `Comparison`."""

    recipe: str
    agreement: float | None
    error: str | None

    @property
    def answer(self) -> Answered | None: ...

    def costs(self) -> list[Cost]: ...


def answer_html(
    text: str, stats: Stats, trace: Trace, about: list[str], full: Stats | None = None
) -> str:
    """An answer with its overlays and costs.

    Parameters
    ----------
    text : str
    stats, trace
        Of the answer.
    about : list of str
        Facts for the last line.
    full : Stats, optional
        The full model's for the same request.
    """
    images = kept_tokens(trace, _SIDE if len(trace.images) == 1 else _SMALL, _MOST)
    last = paragraph(" · ".join(about), faint=True)
    return block(paragraph(text, large=True), images, html_costs(stats.costs(full)), last)


def comparisons_html(rows: Sequence[Compared]) -> str:
    """A table of `Comparison` rows: overlays, costs and answers."""
    names = list(dict.fromkeys(cost.name for row in rows for cost in row.costs()))
    head = ["recipe", "answer", "agreement", *names, "kept tokens"]
    cells = []
    for row in rows:
        recipe, costs = unwrapped(escaped(row.recipe)), {cost.name: cost for cost in row.costs()}
        if row.answer is None:
            cells.append([recipe, lines(f"refused: {row.error}")])
            continue
        numbers = [_number(costs.get(name)) for name in names]
        kept = unwrapped(kept_tokens(row.answer.trace, _SMALLEST, 1))
        cells.append([recipe, lines(row.answer.text), f"{row.agreement:.0%}", *numbers, kept])
    return block(html_table(cells, head))


def refusal_html(recipe: str, reason: str) -> str:
    return block(paragraph(f"{recipe}: refused", large=True), paragraph(reason))


def _number(cost: Cost | None) -> str:
    if cost is None:
        return ""
    return unwrapped(escaped(cost.brief)) + ("" if cost.fraction is None else bar(cost.fraction))


def kept_tokens(trace: Trace, side: int, most: int) -> str:
    """Overlays of at most ``most`` images; an empty text where the trace has no images."""
    if not trace.images or trace.layout is None:
        return ""
    from .overlays import thumbnails

    drawn = thumbnails(trace, side, most)
    panels = [panel for image in drawn for panel in image]
    return images_html(panels, "kept visual tokens") + _note(len(drawn), len(trace.images))


def _note(shown: int, total: int) -> str:
    return "" if shown == total else paragraph(f"{shown} of {total} images", faint=True)


def images_html(images: list[Image.Image], what: str) -> str:
    """Images beside each other, embedded as JPEG."""
    parts = []
    for number, image in enumerate(images, 1):
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=85)
        source = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            f'<img src="data:image/jpeg;base64,{source}" alt="{escaped(what)}, image {number}" '
            f'width="{image.width}" height="{image.height}" '
            'style="display:inline-block;max-width:none;margin:.25em .5em .25em 0">'
        )
    return f"<div>{''.join(parts)}</div>"


def facts_html(title: str, facts: dict[str, str]) -> str:
    """A table of names and texts under a title."""
    rows = [[escaped(name), escaped(text)] for name, text in facts.items()]
    return block(paragraph(title, large=True), html_table(rows))


def session_html(
    title: str, stats: Stats, images: list[Image.Image], messages: list[dict], about: list[str]
) -> str:
    """A session's images, costs and conversation.

    Parameters
    ----------
    title : str
    stats : Stats
        Of opening it.
    images : list of PIL.Image.Image
    messages : list of dict
        The conversation.
    about : list of str
        Facts for the last line.
    """
    small = [image.copy() for image in images[:_MOST]]
    for image in small:
        image.thumbnail((_SMALL, _SMALL))
    shown = images_html(small, "session") + _note(len(small), len(images)) if small else ""
    talk = html_table([[escaped(turn["role"]), lines(turn["content"])] for turn in messages])
    last = paragraph(" · ".join(about), faint=True)
    parts = [shown, html_costs(stats.costs()), talk if messages else "", last]
    return block(paragraph(title, large=True), *parts)
