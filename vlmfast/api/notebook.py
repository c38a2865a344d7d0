"""Answers and comparisons as HTML for notebooks."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmfast.core.display import escaped, html_table

if TYPE_CHECKING:
    from vlmfast.engine.stats import Trace

# Pixels of an overlay: of one image, of one among others, in a table.
_SIDE, _SMALL, _SMALLEST = 288, 128, 96
_MOST = 4  # images or frames of an answer that are shown


def answer_html(text: str, trace: Trace, about: str) -> str:
    """An answer with its overlays, above a line ``about`` it."""
    side = _SIDE if len(trace.images) == 1 else _SMALL
    return _lines(text) + _kept_tokens(trace, side, _MOST) + _lines(about)


def comparisons_html(rows: Sequence[dict[str, str]], traces: Sequence[Trace | None]) -> str:
    """A table of texts, and of the overlays of answers."""
    kept = ["" if of is None else _kept_tokens(of, _SMALLEST, 1) for of in traces]
    cells = [[*map(_lines, row.values()), last] for row, last in zip(rows, kept, strict=True)]
    return html_table(cells, [*rows[0], "kept tokens"])


def _lines(text: str) -> str:
    """Escaped ``text`` with its line breaks."""
    return f'<div style="white-space:pre-wrap;margin:.25em 0">{escaped(text)}</div>'


def _kept_tokens(trace: Trace, side: int, most: int) -> str:
    """Overlays of at most ``most`` images, embedded as JPEG; empty where a trace has no images."""
    if not trace.images or trace.layout is None:
        return ""
    from .overlays import thumbnails

    drawn, parts = thumbnails(trace, side, most), []
    for number, image in enumerate((panel for panels in drawn for panel in panels), 1):
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=85)
        source = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            f'<img src="data:image/jpeg;base64,{source}" alt="kept visual tokens, image {number}" '
            f'width="{image.width}" height="{image.height}" '
            'style="display:inline-block;max-width:none;margin:.25em .5em .25em 0">'
        )
    shown, total = len(drawn), len(trace.images)
    note = "" if shown == total else _lines(f"{shown} of {total} images")
    return f"<div>{''.join(parts)}</div>{note}"
