"""Draw how the engine works: ``python tools/engine_svg.py docs/images/engine.svg``.

Three parts: the phases of a request, prefill and decode steps over time, and the rows of the groups
that are decoded together. Text outside of boxes is gray, so that it can be read on light and on
dark pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

# In pixels.
WIDTH, HEIGHT, MARGIN = 800, 838, 12
# Requests by their letters, and what belongs to none of them.
COLOR = {
    "a": "hsl(212 70% 74%)",
    "b": "hsl(28 82% 72%)",
    "c": "hsl(140 42% 68%)",
    "d": "hsl(288 46% 78%)",
    "e": "hsl(48 72% 66%)",
    "q": "hsl(180 40% 62%)",
}
BOX, FREE, LINE, GRAY, DARK = "#f7f9fc", "#ccd3db", "#8b96a3", "#717c88", "#1b2733"

PHASES = {  # with what the engine does
    "submit": ("reads the media;", "refuses what can", "never be answered"),
    "waiting": ("by priority, until", "memory and a row", "are free"),
    "prefill": ("one prompt at a time,", "interrupted between", "blocks and chunks"),
    "decode": ("all rows together,", "a token or accepted", "drafts per step"),
    "finished": ("an answer,", "or an error", "of its own"),
}


def text(
    x: float, y: float, words: str, *, size: int = 12, fill: str = GRAY, anchor: str = "middle"
) -> str:
    style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def title(y: float, words: str, legend: str = "") -> list[str]:
    aside = [text(WIDTH - MARGIN, y, legend, anchor="end")] if legend else []
    return [text(MARGIN, y, words, size=15, anchor="start"), *aside]


def box(x: float, y: float, width: float, height: float, fill: str = BOX, radius: int = 2) -> str:
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
    return f'<rect {at} fill="{fill}" stroke="{LINE}"/>'


def named(
    x: float, y: float, width: float, height: float, words: str, fill: str = BOX
) -> list[str]:
    """A box with text in its center."""
    label = text(x + width / 2, y + height / 2 + 4, words, fill=DARK)
    return [box(x, y, width, height, fill, 4), label]


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{LINE}" marker-end="url(#end)"/>'


def request(top: float) -> list[str]:
    """The phases of a request, and how it may end early."""
    pitch, width, height = 160, 104, 32
    centers = [80 + pitch * i for i in range(len(PHASES))]
    drawn, y = title(top, "A request"), top + 62
    for x, (name, lines) in zip(centers, PHASES.items(), strict=True):
        drawn += [box(x - width / 2, y, width, height, radius=5)]
        drawn += [text(x, y + 21, name, size=14, fill=DARK)]
        drawn += [text(x, y + height + 18 + 16 * i, line) for i, line in enumerate(lines)]
    for x in centers[:-1]:
        drawn.append(arrow(f"M{x + width / 2} {y + height / 2}h{pitch - width - 7}"))
    line = y - 22
    for x in centers[1:-1]:
        drawn.append(f'<path d="M{x} {y}V{line}" stroke="{LINE}"/>')
    drawn.append(arrow(f"M{centers[1]} {line}H{centers[-1]}V{y - 7}"))
    drawn.append(text(centers[2], line - 8, "cancelled, past its deadline, or failed"))
    return drawn


def step(x: float, y: float, rows: str, width: float = 14) -> list[str]:
    """A decode step of some rows."""
    height = 36 / len(rows)
    return [box(x, y + i * height, width, height, COLOR[row], 0) for i, row in enumerate(rows)]


def bracket(x: float, y: float, width: float, words: str) -> list[str]:
    path = f"M{x} {y}v6h{width}v-6"
    return [
        f'<path d="{path}" fill="none" stroke="{LINE}"/>',
        text(x + width / 2, y + 22, words),
    ]


def steps(top: float) -> list[str]:
    """Prefill and decode steps over time."""
    drawn, x, y = title(top, "Steps over time", "one color per request"), MARGIN, top + 40
    lane = "No answer is streamed: prompts first, then every step decodes all rows"
    drawn.append(text(MARGIN, y - 10, lane, anchor="start"))
    for row in "abc":
        drawn += named(x, y, 118, 36, f"prefill {row}", COLOR[row])
        x += 120
    for number in range(25):
        drawn += step(x, y, "abc" if number < 14 else "ac" if number < 21 else "c")
        x += 16
    drawn += bracket(MARGIN + 360, y + 42, 398, "decode steps of all rows")

    x, y = MARGIN, y + 110
    lane = "a is streamed, then b arrives: decode steps between the blocks of b's prompt"
    drawn.append(text(MARGIN, y - 10, lane, anchor="start"))
    drawn += named(x, y, 118, 36, "prefill a", COLOR["a"])
    x += 120
    for _ in range(6):
        drawn += step(x, y, "a")
        x += 16
    starts = [x]
    for part, blocks in (("vision tower", 4), ("language model", 5)):
        for _ in range(blocks):
            drawn.append(box(x, y, 30, 36, COLOR["b"], 4))
            drawn += step(x + 32, y, "a")
            x += 48
        drawn += bracket(starts[-1], y + 42, x - starts[-1] - 8, part)
        starts.append(x)
    for _ in range(7):
        drawn += step(x, y, "ab")
        x += 16
    return drawn


def buffers(
    x: float, y: float, width: float, rows: dict[str, float], size: int, codes: float = 0
) -> list[str]:
    """The buffers of a group, with the fraction of its slots that each row uses.

    ``codes``: how much of it is a quantized segment.
    """
    drawn = []
    for number in range(size):
        at = y + 22 * number
        drawn.append(box(x, at, width, 18, FREE))
        if number < len(rows):
            name = [*rows][number]
            drawn.append(box(x, at, width * rows[name], 18, COLOR[name]))
            if codes:
                drawn.append(box(x, at, width * codes, 18, "url(#codes)"))
            drawn.append(text(x + 14, at + 13, name, fill=DARK))
    return drawn


def rows(top: float) -> list[str]:
    """How rows leave and join, and what groups share."""
    drawn, y, width = title(top, "Rows", "gray: free slots"), top + 22, 200
    columns = [MARGIN, 298, 584]
    a, b, c, d = ("a", 0.8), ("b", 0.55), ("c", 0.9), ("d", 0.6)
    states = [
        ([a, b, c], "a group of rows", "rows in use come first"),
        ([a, c], "b leaves", "the last row takes its place"),
        ([a, c, d], "d joins", "only its row is written"),
    ]
    for x, (used, first, second) in zip(columns, states, strict=True):
        drawn += buffers(x, y, width, dict(used), 4)
        drawn += [text(x + width / 2, y + 106 + 16 * i, t) for i, t in enumerate((first, second))]
    for x in columns[1:]:
        drawn.append(arrow(f"M{x - 60} {y + 42}h42"))
    x = columns[1] + width
    drawn.append(arrow(f"M{x} {y + 53}c26 0 26 -22 7 -22"))

    y += 152
    drawn += named(MARGIN, y, 776, 26, "linear layers: once for the rows of all groups")
    shown = [
        (MARGIN, 200, dict([a, c, d]), 0, "up to 512 slots"),
        (228, 344, {"e": 0.84}, 0, "up to 4,096 slots"),
        (588, 200, {"q": 0.7}, 0.5, "quantized, and a tail"),
    ]
    for x, width, used, codes, words in shown:
        drawn += buffers(x, y + 44, width, used, 4 if len(used) > 1 else 1, codes)
        drawn.append(arrow(f"M{x + width / 2} {y + 26}v11"))
        drawn.append(text(x + width / 2, y + 44 + 22 * (4 if len(used) > 1 else 1) + 14, words))
    for x, width, *_ in shown:
        drawn += named(x, y + 160, width, 26, "attention of the group")
    return drawn


def draw_svg() -> str:
    """The drawing as SVG."""
    view = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace" stroke-width="1.2"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} {font}>',
        "<title>How the engine answers requests</title>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>',
        '<pattern id="codes" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V5" stroke="{DARK}" opacity="0.5"/>'
        "</pattern></defs>",
    ]
    parts = [*request(22), *steps(226), *rows(474)]
    return "\n".join([*head, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw how the engine works.")
    parser.add_argument("path", type=Path, help="the SVG file to write")
    parser.parse_args().path.write_text(draw_svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
