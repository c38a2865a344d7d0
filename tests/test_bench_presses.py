"""`benchmarks/compare_presses.py`: logs, their continuation and their joining, without kvpress."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_script import script
from closeness import apart, close, network
from tiny_families import llava_around
from vlmfast import VLM

texts, compare = script("texts"), script("compare_presses")
SETTINGS = {"weights": "w", "dtype": "float32", "follow": 4, "machine": "m"}
PREFIX, FOLLOW = 120, 12


class Letters:
    """A tokenizer of letters."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        assert not add_special_tokens

        return SimpleNamespace(input_ids=[2 + ord(letter) % 50 for letter in text])


def row(part: str, prompt: str, method: str, keep: float, **more: Any) -> dict[str, Any]:
    slots = [int(keep * 100), 20, int(keep * 100)]
    found = {"part": part, "prompt": prompt, "method": method, "keep": keep, "prefix": 1000}
    scores = {"kl": 0.0, "top1": 1.0, "nll": 2.0} if part == "text" else {"found": [True] * 10}
    return found | {"slots": slots} | scores | more


@pytest.fixture
def every() -> list[Any]:
    return [
        texts.Text([1, 2, 3], 2),
        texts.Text([1, 2, 4], 2),
        texts.Text([5, 6], 2, (([7], [8]),)),
    ]


@pytest.fixture
def sides(every: list[Any]) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Complete logs of both sides, in which SnapKV is worse in kvpress."""
    found: dict[str, Any] = {}
    for side, method, kl in (("vlmfast", "snapkv", (0.1, 0.2)), ("kvpress", "SnapKV", (0.3, 0.3))):
        rows = []
        for number, text in enumerate(every):
            rows.append(row(text.part, text.digest, "none", 1))
            more = {"found": [False, True]} if text.questions else {"kl": kl[number]}
            for keep in texts.KEEPS:
                rows.append(row(text.part, text.digest, method, keep, **more))
        found[side] = SETTINGS, rows
    return found


# --- texts ----------------------------------------------------------------------------------------


def test_texts_do_not_depend_on_how_many_there_are() -> None:
    few = texts.read_texts(Letters(), {1000: 1, 2000: 1}, 5)
    many = texts.read_texts(Letters(), {1000: 3, 2000: 2}, 5)
    assert [(text.prefix, len(text.ids)) for text in few] == [(1000, 1005), (2000, 2005)]
    assert [text.digest for text in many[:2]] == [text.digest for text in few]
    assert len({text.digest for text in many}) == 5


def test_later_texts_lie_between_the_others() -> None:
    most = texts.PLACES + texts.BETWEEN
    found = texts.read_texts(Letters(), dict.fromkeys(texts.PREFIXES, most), 16)
    assert len({text.digest for text in found}) == len(found) == 4 * most
    # None is read after the same tokens as another, whatever their prefixes.
    assert len({tuple(text.ids[-15:]) for text in found}) == len(found)
    with pytest.raises(SystemExit, match=r"1000:20 must be one of .* and at most 19 texts"):
        texts.read_texts(Letters(), {1000: most + 1}, 16)


def test_passkeys_are_at_ten_depths() -> None:
    (text,) = texts.passkey_texts(Letters(), {1000: 1})
    assert len(text.ids) == text.prefix == 1000
    places = []
    for question, answer in text.questions:
        line = [*question, *answer]
        at = [n for n in range(1000) if text.ids[n : n + len(line)] == line]
        assert len(at) == 1
        places += at
    assert places == sorted(places)
    assert len(places) == 10
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) - min(gaps) < 10  # names differ in length
    assert len({tuple(answer) for _, answer in text.questions}) == 10


def test_scores_equal_their_definitions() -> None:
    torch.manual_seed(0)
    full, own = torch.randn(2, 7, 3000, dtype=torch.float64).mul(3).unbind()
    ids = list(range(7))
    expected, log = full.log_softmax(-1), own.log_softmax(-1)
    found = texts.compared(full.float(), own.float(), ids)
    kl = (expected.exp() * (expected - log)).sum(-1).mean()
    nll = -log[range(7), ids].mean()
    largest = float(log.abs().max())
    close(torch.tensor(found["kl"]), kl, dtype=torch.float32, terms=3000, scale=largest)
    close(torch.tensor(found["nll"]), nll, dtype=torch.float32, terms=3000, scale=largest)
    assert found["top1"] == float((full.argmax(-1) == own.argmax(-1)).double().mean())
    assert texts.compared(full.float(), full.float(), ids)["top1"] == 1


# --- logs -----------------------------------------------------------------------------------------


def test_log_continues_without_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = texts.Log(path, SETTINGS)
    log.add(**row("text", "a", "snapkv", 0.5))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"part": "text", "prom')
    again = texts.Log(path, SETTINGS)
    assert again.rows == log.rows
    assert not again.missing(part="text", prompt="a", method="snapkv", keep=0.5)
    assert again.missing(part="text", prompt="a", method="snapkv", keep=0.2)
    again.add(**row("text", "b", "snapkv", 0.5))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [SETTINGS, *again.rows]


# --- joining --------------------------------------------------------------------------------------


def test_both_sides_are_joined(sides: Any, every: list[Any]) -> None:
    report = texts.joined(sides["vlmfast"], sides["kvpress"], every)
    (line,) = (
        line
        for line in report["lines"]
        if (line["side"], line["method"], line["keep"], line["prefix"])
        == ("vlmfast", "snapkv", 0.5, None)
    )
    assert line["kl"] == pytest.approx(0.15)
    assert line["slots"] == 0.5  # of the long layers
    assert (line["documents"], line["passkey texts"], line["passkeys"]) == (2, 1, 0.5)
    assert [pair["keep"] for pair in report["pairs"]] == list(texts.KEEPS)
    for pair in report["pairs"]:
        assert (pair["kl"], pair["documents"]) == (pytest.approx(-0.15), 2)
        assert (pair["least"], pair["most"]) == (pytest.approx(-0.2), pytest.approx(-0.1))


def test_text_that_one_side_lacks_is_refused(sides: Any, every: list[Any]) -> None:
    lost = sides["kvpress"][1].pop()
    with pytest.raises(SystemExit, match=f"kvpress has not measured SnapKV.*{lost['prompt']}"):
        texts.joined(sides["vlmfast"], sides["kvpress"], every)


def test_unequal_slots_are_refused(sides: Any, every: list[Any]) -> None:
    sides["kvpress"][1][1]["slots"][0] += 1
    with pytest.raises(SystemExit, match=r"snapkv keeps .* slots, SnapKV"):
        texts.joined(sides["vlmfast"], sides["kvpress"], every)


# --- vlmfast's side -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vlm() -> VLM:
    model, processor = llava_around("clip_vision_model", "gemma3_text")
    return VLM(model.requires_grad_(False), processor)


@pytest.fixture(scope="module")
def text() -> Any:
    torch.manual_seed(0)
    return texts.Text(torch.randint(5, 30, (PREFIX + FOLLOW,)).tolist(), PREFIX)


@pytest.mark.parametrize("method", compare.METHODS)
def test_layers_without_a_window_are_compressed(
    vlm: VLM, text: Any, tmp_path: Path, method: str
) -> None:
    """With ``all layers``, those with a window too; each has an effect on the logits."""
    name = method.replace("window=64,", "window=8,")
    name = name.replace("snapkv, all", "snapkv:window=8, all")
    name = {"snapkv": "snapkv:window=8", "cake": "cake:window=8"}.get(name, name)
    run = compare.Run(vlm, texts.Log(tmp_path / "log.jsonl", SETTINGS))
    full, own = run.prefill(text, "none", 1), run.prefill(text, name, 0.5)
    (kept, _), (whole, _) = run.size(own), run.size(full)
    for window, few, all_ in zip(vlm.adapter.windows, kept, whole, strict=True):
        assert (few < all_) is (window is None or method.endswith(compare.ALL))
    (found,), (expected,) = run.logits(text, own), run.logits(text, full)
    assert found.shape == expected.shape == (FOLLOW, expected.shape[1])
    terms, scale = network(vlm.model, PREFIX), float(expected.abs().max())
    close(found[0], expected[0], terms=terms, scale=scale)  # the prefill is not affected
    apart(found[1:], expected[1:], terms=terms, scale=scale)
    (again,) = run.logits(text, own)  # the cache stays as it is
    assert torch.equal(again, found)


@torch.no_grad()
def test_streamingllm_numbers_the_slots_of_layers_with_a_window(
    vlm: VLM, text: Any, tmp_path: Path
) -> None:
    """All layers are compressed, and the keys of each are rotated by its own tables."""
    run = compare.Run(vlm, texts.Log(tmp_path / "log.jsonl", SETTINGS))
    # A recipe that keeps all, so that all layers hold all slots.
    full, _ = run.prefill(text, "snapkv, all layers", 1)
    compressed, _ = run.prefill(text, "streamingllm, all layers", 0.5)
    for number, (own, of) in enumerate(
        zip(compressed.group.cache.layers, full.group.cache.layers, strict=True)
    ):
        whole, count = of.max_lengths[0], own.max_lengths[0]
        assert count == int(0.5 * whole) > 4
        kept = torch.tensor([*range(4), *range(whole - count + 4, whole)])
        # The last slot keeps its id, and the others precede it without gaps.
        delta = (whole - count + torch.arange(count) - kept).expand(len(of.keys[0]), -1)
        keys, scale = of.keys[0][:, kept], float(of.keys[0].abs().max())
        expected = vlm.adapter.rotate(keys, delta, number)
        close(own.keys[0][:, :count], expected, terms=8, scale=scale)
        other = next(
            i for i, w in enumerate(vlm.adapter.windows) if w != vlm.adapter.windows[number]
        )
        apart(expected, vlm.adapter.rotate(keys, delta, other), terms=8, scale=scale)


@pytest.mark.slow
def test_only_missing_rows_are_measured(
    vlm: VLM, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "METHODS", ("h2o:decode=false", "streamingllm"))
    asked = texts.Text(text.ids[:PREFIX], PREFIX, (([6, 7], [8, 9]), ([6], [7])))
    log = texts.Log(tmp_path / "log.jsonl", SETTINGS)
    run = compare.Run(vlm, log)
    for one in (text, asked):
        run.scores(one)
        run.cost(one)
    rows = [(row["part"], row["method"], row["keep"]) for row in log.rows]
    names = ("h2o:decode=false", "streamingllm")
    scored = [("none", 1), *((name, keep) for keep in texts.KEEPS for name in names)]
    cost = [("none", 1), *((name, texts.COST) for name in names)]
    parts = {"text": scored, "cost": cost, "passkeys": scored}
    assert rows[:7] == [("text", *of) for of in scored]
    times = {"text": 1, "cost": 2 * texts.ROUNDS, "passkeys": 1}
    assert sorted(rows) == sorted((p, *of) for p in parts for of in parts[p] * times[p])
    monkeypatch.setattr(compare.Run, "prefill", None)  # nothing is prefilled again
    for one in (text, asked):
        again = compare.Run(vlm, texts.Log(tmp_path / "log.jsonl", SETTINGS))
        again.scores(one)
        again.cost(one)


def test_cost_is_a_median_of_ratios_within_rounds() -> None:
    walls = {"none": (1.0, 2.0, 4.0), "snapkv": (1.5, 2.0, 8.0)}
    rows = [
        {"part": "cost", "prompt": "p", "method": name, "keep": 1, "prefix": 9, "round": turn}
        | {"wall": wall, "peak": turn, "bytes": 7, "load": turn}
        for name, found in walls.items()
        for turn, wall in enumerate(found)
    ]
    full, own = texts._costs("vlmfast", rows)
    assert (full["over full"], full["wall"]) == (1.0, 2.0)
    assert (own["over full"], own["wall"], own["peak"], own["load"]) == (1.5, 2.0, 1, 2)


def test_drafters_give_the_plain_answer(vlm: VLM, text: Any, tmp_path: Path) -> None:
    log = texts.Log(tmp_path / "log.jsonl", SETTINGS)
    compare.Run(vlm, log).drafts(text, 8)
    assert [row["method"] for row in log.rows] == ["none", *compare.DRAFTERS]
    assert all(row["same"] and row["tokens"] == 8 for row in log.rows)
    assert [line["same"] for line in texts._drafts(log.rows)] == [1] * 5
