"""`draft-auto`: chooses how much to draft from costs and acceptance."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.core.drafting import Traffic
from vlmfast.drafters.draft_auto import DraftAuto, Governor
from vlmfast.drafters.draft_eagle import DraftEagle
from vlmfast.errors import RecipeError

LIMIT = (26, 4)


class World:
    """A model with given costs per step, tree node and draft level, and random acceptance.

    ``opening``: of the drafter; ``None`` if it need not be opened. ``traffic``: the bytes that the
    governor is told.
    """

    def __init__(
        self, step=1.0, node=0.01, level=0.05, opening=0.0, right=0.7, seed=0, traffic=None
    ) -> None:
        self.step, self.node, self.level, self.traffic = step, node, level, traffic
        self.opening, self.right, self.random = opening, right, random.Random(seed)

    def answer(self, known: dict, tokens: int, rows: int = 1, **given) -> tuple[float, list]:
        """Seconds of an answer, and the chosen sizes."""
        governor = Governor(DraftAuto(**given), LIMIT, known)
        count, seconds, sizes = 1, 0.0, []
        while count < tokens:
            nodes, depth = governor.choose(rows, count, tokens, self.traffic)
            sizes.append((nodes, depth))
            first = depth > 0 and not governor.opened and self.opening is not None
            depth = min(depth, tokens - count - 1)
            emitted = 1
            while emitted <= depth and self.random.random() < self.right:
                emitted += 1
            spent = self.step + (self.level * depth + self.node * nodes if depth else 0.0)
            spent += (self.opening or 0.0) * first
            governor.observe(
                rows, sizes[-1], nodes if depth else 1, emitted, spent, first and depth > 0
            )
            count, seconds = count + emitted, seconds + spent
        return seconds, sizes


def after_a_while(world: World, tokens: int = 60, answers: int = 12, **given):
    known: dict = {}
    for _ in range(answers):
        outcome = world.answer(known, tokens, **given)
    return (*outcome, known)


def test_drafts_that_pay_are_drafted() -> None:
    seconds, sizes, _ = after_a_while(World(right=0.85))
    assert seconds < 0.6 * 59
    assert Counter(sizes).most_common(1)[0][0] == LIMIT and set(sizes[:3]) == {(1, 0)}


@pytest.mark.parametrize(
    "world",
    [World(right=0.02), World(level=2.0), World(node=0.2)],
    ids=["never right", "slow drafter", "slow check"],
)
def test_drafts_that_do_not_pay_are_not_drafted(world: World) -> None:
    """Slower than plain decoding only by an occasional trial."""
    known: dict = {}
    for _ in range(4):
        world.answer(known, 60)
    seconds = sum(world.answer(known, 60)[0] for _ in range(20))
    assert seconds < 20 * 59 / 0.9


def test_size_follows_the_costs() -> None:
    """Where nodes are costly a small tree wins, where they are cheap a large one."""
    for world, large in ((World(node=0.03, right=0.6), False), (World(node=0.0, right=0.9), True)):
        _, sizes, _ = after_a_while(world, answers=20)
        assert (Counter(sizes[3:]).most_common(1)[0][0] == LIMIT) == large


def test_short_answers_are_not_drafted() -> None:
    known: dict = {}
    for _ in range(10):
        seconds, sizes = World(opening=5.0).answer(known, 5)
        assert set(sizes) == {(1, 0)} and seconds == 4
    assert after_a_while(World(), after=20)[1][:18] == [(1, 0)] * 18


def test_costly_draft_prefill_waits_for_a_long_answer() -> None:
    known: dict = {}
    world = World(opening=30.0)
    for _ in range(10):
        world.answer(known, 300)
    assert known["open"] == pytest.approx(30, rel=0.3)
    _, sizes = world.answer(known, 40)
    assert set(sizes) == {(1, 0)}  # at most half of its 40 tokens could be saved
    _, sizes = world.answer(known, 300)
    assert sizes[10] == (1, 0) and sizes[-3] != (1, 0)


def test_batch_sizes_are_measured_separately() -> None:
    """Measurements of one row do not apply to sixteen."""
    known: dict = {}
    for _ in range(8):
        World(right=0.85).answer(known, 60)
        World(node=0.3, level=1.0).answer(known, 60, rows=16)
    sizes = World(right=0.85).answer(known, 60)[1]
    assert Counter(sizes).most_common(1)[0][0] != (1, 0)
    assert World(node=0.3).answer(known, 60, rows=16)[1].count((1, 0)) > 50


def test_drafts_that_read_too_many_bytes_are_not_tried() -> None:
    """A chain gains at most (1 + D) S / (D T + S), which grows with the cache."""
    known: dict = {}
    short = World(level=0.99, right=1.0, opening=None, traffic=Traffic(100, 99))
    sizes = [size for _ in range(3) for size in short.answer(known, 60)[1]]
    tried = [size for size in sizes if size != (1, 0)]
    assert tried == [(4, 1)] * 2  # whether bytes decide
    assert known["bytes", 1] == pytest.approx(1.0, rel=0.1)
    governor = Governor(DraftAuto(), LIMIT, known)
    for draft, reason in (
        (99, "off: drafts would read more bytes than they can save"),
        (80, "trying"),
        (0, "trying"),
    ):
        governor.choose(1, 20, 60, Traffic(100, draft))
        assert governor.reason == reason
    # Where a session's cache has grown, the same drafter is tried, and found to pay.
    long = World(level=0.3, right=0.9, opening=None, traffic=Traffic(100, 30))
    for _ in range(3):
        seconds, _ = long.answer(known, 60)
    assert seconds < 0.75 * 59


def test_bytes_that_do_not_predict_times_are_ignored() -> None:
    known: dict = {}
    world = World(level=0.05, right=0.9, opening=None, traffic=Traffic(100, 99))
    answers = [world.answer(known, 60) for _ in range(8)]
    assert set(answers[0][1]) == {(1, 0)} and known["bytes", 1] < 0.8
    assert answers[-1][0] < 0.6 * 59


def test_bytes_are_those_of_the_model() -> None:
    """The engine counts weights and caches of all rows."""
    vlm = VLM(*build_llava(layers=2))
    seen: list[Traffic] = []

    class Spy(Governor):
        def choose(self, rows, count, limit, traffic=None):
            seen.append(traffic)
            return super().choose(rows, count, limit, traffic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftAuto, "govern", lambda self, limit, known: Spy(self, limit, known))
        requests = [
            Request("what is here ?", make_image(seed=n), recipe="draft-self:keep=0.5+draft-auto")
            for n in range(2)
        ]
        answers = vlm.ask_many(requests, max_new_tokens=12, eos_token_id=None)
    layers = vlm.model.get_decoder().layers
    weights = sum(p.nbytes for p in layers.parameters()) + vlm.model.lm_head.weight.nbytes
    caches = [traffic.step - weights for traffic in seen]
    prompts = sum(a.stats.kv_bytes for a in answers)
    assert prompts <= max(caches) <= prompts * (1 + 12 / answers[0].stats.prompt_tokens)
    assert [t.draft for t in seen] == [weights + cache // 2 for cache in caches]
    # A view of everything reads as much as a step.
    recipe = "draft-self:keep=1+draft-auto"
    given = {"max_new_tokens": 24, "eos_token_id": None}
    whole = vlm.ask("what is here ?", make_image(), recipe=recipe, **given)
    assert whole.stats.drafted == 0
    assert whole.token_ids == vlm.ask("what is here ?", make_image(), **given).token_ids


def test_reasons_are_given() -> None:
    governor, reasons = Governor(DraftAuto(), LIMIT, {}), set()
    for count in range(1, 60):
        size = governor.choose(1, count, 60)
        reasons.add(governor.reason)
        governor.observe(1, size, size[0], 1, 1.0 + size[0])
    assert reasons == {
        "off: the answer is short",
        "off: timing plain decoding",
        "trying",
        "off: drafts do not pay here",
    }


def test_chooses_among_drafters() -> None:
    assert [s.name for s in DraftAuto().choice(lambda stage: False)] == [
        "draft-ngram",
        "draft-recycle",
    ]
    assert DraftAuto().choice(lambda stage: True) == [DraftEagle()]


def test_draft_auto_in_the_engine(tiny) -> None:
    given = {"images": "examples/picture.png", "max_new_tokens": 24, "eos_token_id": None}
    wanted = tiny.ask("Describe the image.", **given)
    for recipe in ("draft-auto", "draft-ngram+draft-auto"):
        fresh, drafted = VLM(tiny.model, tiny.processor), 0
        for _ in range(3):
            got = fresh.ask("Describe the image.", recipe=recipe, strict=True, **given)
            assert got.token_ids == wanted.token_ids
            drafted += got.stats.drafted
        names = "draft-eagle" if recipe == "draft-auto" else "draft-ngram"
        assert got.stats.speculation.startswith(f"{names}: ")
        assert drafted > 0  # it has tried; on a busy machine it may have stopped by now
    with pytest.raises(RecipeError, match="draft-auto appears twice"):
        tiny.ask("what ?", recipe="draft-auto+draft-auto:after=9")
