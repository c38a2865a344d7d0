"""The SVG of ``tools/house.py``: rooms are boxes on floors, and arrows lead down to imports.

Arrows that follow from other arrows are left out. All arrows to a room have its color and join into
one line. The order on each floor is the best of many, so that few lines cross, and it is the same
in every run.
"""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise
from statistics import fmean
from xml.sax.saxutils import escape

from house import Graph, find_floors

# In pixels: the drawing, its left margin, a row of boxes, the gaps between rows and between boxes,
# the width of a letter, and the distance of the arrows that leave a box.
WIDTH, MARGIN, HEIGHT, GAP, SPACE, LETTER, PORT = 1000, 48, 30, 54, 26, 8.5, 10
STARTS = 200

Point = tuple[str, int]  # a room at its floor, or at a floor above, the line that leads to it
Link = tuple[Point, Point]


def find_links(rooms: Graph) -> list[Link]:
    """Links from points to points one floor below, without arrows that others imply.

    All arrows to a room join into one line, which has a point on each floor that it passes.
    """
    floors, below, links = find_floors(rooms), {}, set()
    for room, floor in floors.items():
        implied = set().union(*(below[other] for other in rooms[room]))
        below[room] = rooms[room] | implied
        for other in rooms[room] - implied:
            steps = [(other, at) for at in range(floor - 1, floors[other] - 1, -1)]
            links |= {*pairwise([(room, floor), *steps])}
    return sorted(links)


def lay_out(size: dict[Point, float], links: list[Link]) -> dict[Point, float]:
    """Horizontal centers of the points, with few crossings and straight lines.

    ``size`` has the width of each point: that of its box, or 0 for a line that passes a floor.
    """
    near = {p: [a if p == b else b for a, b in links if p in (a, b)] or [p] for p in size}
    # Lines count more than boxes, so that they get straight.
    weights = {p: [1 + 3 * (not size[p]) + 3 * (not size[q]) for q in near[p]] for p in size}
    rows = [[p for p in size if p[1] == floor] for floor in sorted({p[1] for p in size})]
    pairs = [pair for pair in combinations(links, 2) if pair[0][0][1] == pair[1][0][1]]
    # The order: from random starts, sort each row by the mean of the neighbors, and take the best.
    chance, found = random.Random(0), []
    for start in range(STARTS):
        x = {p: chance.random() for p in size}
        for row in (rows + rows[::-1]) * 3:
            wish = {p: fmean(x[q] for q in near[p]) for p in row}
            x |= {p: i - (len(row) - 1) / 2 for i, p in enumerate(sorted(row, key=wish.get))}
        crossings = sum((x[a] - x[c]) * (x[b] - x[d]) < 0 for (a, b), (c, d) in pairs)
        found.append((crossings, start, [sorted(row, key=x.get) for row in rows]))
    # The centers: as near to the mean of the neighbors as order and space allow.
    rows, x = min(found)[2], dict.fromkeys(size, WIDTH / 2)
    for row in (rows + rows[::-1]) * 60:
        ends = [*accumulate(size[p] + SPACE for p in row)]
        shift = {p: end - SPACE - size[p] / 2 for p, end in zip(row, ends, strict=True)}
        wish = [fmean([x[q] for q in near[p]], weights[p]) - shift[p] for p in row]
        # Keep order and space: half-way between moving the right and the left of two neighbors.
        moved = zip(row, accumulate(wish, max), [*accumulate(wish[::-1], min)][::-1], strict=True)
        last = max(MARGIN, WIDTH - MARGIN / 2 - ends[-1] + SPACE)
        x |= {p: min(max((a + b) / 2, MARGIN), last) + shift[p] for p, a, b in moved}
    return x


def draw_svg(rooms: Graph, about: dict[str, str]) -> str:
    """The drawing as SVG. ``about`` describes rooms for the text that a viewer shows on hover."""
    floors, links = find_floors(rooms), find_links(rooms)
    points = sorted({*floors.items(), *(point for link in links for point in link)})
    size = {p: len(p[0]) * LETTER + 24 if floors[p[0]] == p[1] else 0 for p in points}
    top, x = max(floors.values()), lay_out(size, links)
    y = {floor: 8 + (top - floor) * (HEIGHT + GAP) for floor in range(1, top + 1)}
    color = {room: f"hsl({i * 137.5 % 360:.0f} 45% 53%)" for i, room in enumerate(sorted(rooms))}
    down = {p: sorted((b for a, b in links if a == p), key=x.get) for p in points}
    lean = dict.fromkeys(points, 0.0)  # pixels to the right while a line passes half a gap
    for p in (p for p in points if not size[p]):
        aside = x[down[p][0]] - fmean(x[a] for a, b in links if b == p)
        lean[p] = max(-12, min(12, aside / 6))
    lines, boxes = [], []
    for floor, at in y.items():
        band = f'y="{at - 8}" width="{WIDTH}" height="{HEIGHT + 16}" rx="8" opacity="0.12"'
        lines.append(f'<rect {band}/><text x="18" y="{at + 20}">{floor}</text>')
    for a, b in links:
        start = x[a] + lean[a] / 2 + (down[a].index(b) - (len(down[a]) - 1) / 2) * PORT
        end, y1, y2 = x[b] - lean[b] / 2, y[a[1]] + HEIGHT, y[b[1]]
        line = f"M{start:.1f} {y1}C{start + lean[a]:.1f} {y1 + GAP / 2} {end - lean[b]:.1f} "
        line += f"{y1 + GAP / 2} {end:.1f} {y2 - 5 if size[b] else y2}"
        line += "" if size[b] else f"L{end + lean[b]:.1f} {y2 + HEIGHT}"
        lines.append(f'<path d="{line}" fill="none" stroke="{color[b[0]]}"/>')
        if size[b]:
            lines.append(f'<path d="M{end:.1f} {y2}l-4 -7h8z" fill="{color[b[0]]}"/>')
    for room, p in sorted(zip(floors, floors.items(), strict=True)):
        imported = ", ".join(sorted(rooms[room])) or "nothing"
        said = f"{room}: {about.get(room, '')} Imports: {imported}."
        box = f'x="{x[p] - size[p] / 2:.1f}" y="{y[p[1]]}" width="{size[p]}" height="{HEIGHT}"'
        boxes += [
            f"<g><title>{escape(said)}</title>",
            f'<rect {box} rx="5" fill="#f7f9fc" stroke="{color[room]}"/>',
            f'<text x="{x[p]:.1f}" y="{y[p[1]] + 20}" fill="#1b2733">{room}</text></g>',
        ]
    caption = "Arrows lead from a room to what it imports. Those that others imply are left out."
    height = y[1] + HEIGHT + GAP
    view = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} {font}>',
        '<g text-anchor="middle" fill="#7a8591" stroke-width="1.5">',
        f'<text x="{WIDTH / 2}" y="{height - 18}">{caption}</text>',
    ]
    return "\n".join([*head, *lines, *boxes, "</g>", "</svg>", ""])
