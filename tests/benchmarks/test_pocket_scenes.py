"""The layouts of `benchmarks/pocket`: their questions have the answers that the images show."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.tiny_pocket import COLOURS, make_objects, scenes

SIZE = 96


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_objects(tmp_path_factory.mktemp("objects"))


def make(kind: str, number: int) -> scenes.Layout:
    drawings = {name: ["google", "twitter"] for name in COLOURS}
    return scenes.layout(scenes.seed_of("train", kind, number), kind, drawings, SIZE)


def shown(image: Image.Image) -> dict[str, tuple[float, float]]:
    """Name of every object in an image, by its colour, with the middle of its pixels (x, y)."""
    pixels, found = np.asarray(image), {}
    for name, colour in COLOURS.items():
        rows, columns = np.nonzero((pixels == colour).all(-1))
        if len(rows) > 60:  # more than a stripe or a blob has of exactly this colour
            found[name] = (columns.mean(), rows.mean())
    return found


def cell(x: float, y: float) -> str:
    return scenes.CELLS[int(3 * y / SIZE) * 3 + int(3 * x / SIZE)]


def test_seeds_are_disjoint() -> None:
    last = 2**28 - 1
    ends = [
        scenes.seed_of(part, kind, number)
        for part in scenes.PARTS
        for kind in scenes.KINDS
        for number in (0, last)
    ]
    assert sorted(set(ends)) == ends


@pytest.mark.parametrize("kind", scenes.KINDS)
def test_a_seed_always_gives_the_same_images(drawn: Any, kind: str) -> None:
    first, again = (scenes.draw(make(kind, 3), drawn) for _ in range(2))
    assert make(kind, 3) == make(kind, 3) != make(kind, 4)
    assert make(kind, 3).kind == kind
    assert [image.tobytes() for image in first[0]] == [image.tobytes() for image in again[0]]
    assert (first[1] == again[1]).all()
    assert len(first[0]) == (scenes.FRAMES if kind == "video" else 1)


def test_answers_about_scenes_are_what_the_images_show(drawn: Any) -> None:
    counts: Counter[int] = Counter()
    for number in range(40):
        of = make("scene", number)
        (image,), _ = scenes.draw(of, drawn)
        found = {name: cell(*middle) for name, middle in shown(image).items()}
        counts[len(found)] += 1
        for type_ in scenes.TYPES["scene"]:
            asked = scenes.question(of, type_, random.Random(number))
            if type_ == "what":
                assert asked.text == f"What is in the {found[asked.answer]}?"
            elif type_ == "empty":
                assert asked.answer == "nothing"
                assert asked.text[len("What is in the ") : -1] not in found.values()
            elif type_ == "where":
                assert asked.answer == found[asked.text[len("Where is the ") : -1]]
            elif type_ == "count":
                assert int(asked.answer) == len(found)
            else:
                order = sorted(found, key=lambda name: scenes.CELLS.index(found[name]))
                assert asked.answer == ", ".join(order)
    assert set(counts) == {1, 2, 3, 4}


def test_answers_about_videos_are_what_the_frames_show(drawn: Any) -> None:
    ways: set[str] = set()
    for number in range(24):
        of = make("video", number)
        images, _ = scenes.draw(of, drawn)
        first, last = shown(images[0]), shown(images[-1])
        moved = {
            name: (last[name][0] - x, last[name][1] - y)
            for name, (x, y) in first.items()
            if name in last and abs(last[name][0] - x) + abs(last[name][1] - y) > SIZE / 3
        }
        ((name, (right, down)),) = moved.items()
        way = ("right" if right > 0 else "left") if abs(right) > abs(down) else ""
        way = way or ("down" if down > 0 else "up")
        asked = {t: scenes.question(of, t, random.Random(0)) for t in scenes.TYPES["video"]}
        assert asked["moves"].answer == name
        assert asked["way"] == scenes.Question("way", f"Which way does the {name} move?", way)
        assert int(asked["count"].answer) == len(first)
        ways.add(way)
    assert ways == {"right", "left", "down", "up"}


def test_words_are_written_where_no_object_is(drawn: Any) -> None:
    words = set()
    for number in range(12):
        of = make("word", number)
        (image,), (owner,) = scenes.draw(of, drawn)
        rows, columns = np.nonzero(owner == 255)
        assert of.row * SIZE / 3 - 2 < rows.mean() < (of.row + 1) * SIZE / 3 + 2
        assert abs(columns.mean() - SIZE / 2) < 2
        plate = np.asarray(image)[owner == 255]
        assert len(np.unique(plate, axis=0)) > 1  # ink on it
        assert all(scenes.CELLS.index(cell(*at)) // 3 != of.row for at in shown(image).values())
        words.add(scenes.question(of, "read", random.Random(0)).answer)
    assert words <= set(scenes.WORDS) and len(words) > 6


def test_owners_are_the_pixels_of_the_objects(drawn: Any) -> None:
    of = make("scene", 1)
    (image,), (owner,) = scenes.draw(of, drawn)
    for number, at in enumerate(of.frames[0], 1):
        pixels = np.asarray(image)[owner == number].astype(int)
        assert np.abs(pixels - COLOURS[at.name]).max() < 130  # edges are blended
        assert (np.abs(pixels - COLOURS[at.name]).max(1) == 0).mean() > 0.7
