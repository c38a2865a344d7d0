"""Forged session files are rejected when loaded, or give a session that answers."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_families import build_qwen2_5_vl
from tiny_models import build_llava, make_image
from vlmfast import VLM, VLMFastError
from vlmfast.core import snapshot

ASK = {"max_new_tokens": 6}
RECIPES = {
    "none": None,
    "hired": "hired:0.4",
    "mustdrop": "mustdrop",
    "snapkv": "snapkv:keep=0.5,window=8",
    "kivi": "kivi:group=8,residual=16",
    "lookm": "lookm:0.7",
    "zipcache": "zipcache:page=4",
    "streamingllm": "streamingllm:0.4",
    "h2o": "h2o:0.5",
}
OTHERS = [None, True, -1, 0, 1, 7, 10**12, 10**30, 0.5, "", "x", [], [3], {}, float("nan")]


def saved(vlm: VLM, recipe: str | None, path: Path) -> tuple[dict, dict]:
    with vlm.session(images=make_image(), recipe=recipe) as session:
        session.ask("what is here ?", **ASK)
        session.save(path)
    metadata, tensors = snapshot.read(path, "a session")
    metadata.pop("digest")
    return metadata, tensors


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[VLM, dict, dict]]:
    path = tmp_path_factory.mktemp("sessions") / "a.session"
    llava, qwen = VLM(*build_llava()), VLM(*build_qwen2_5_vl())
    found = {name: (llava, *saved(llava, recipe, path)) for name, recipe in RECIPES.items()}
    for name in ("none", "kivi", "lookm", "divprune"):
        recipe = RECIPES.get(name, "divprune:0.4" if name == "divprune" else None)
        found[f"qwen {name}"] = (qwen, *saved(qwen, recipe, path))
    return found


def entries(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Container and key of every value in nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        found.append((value, key))
        if isinstance(child, dict | list):
            entries(child, found)
    return found


def forge_value(rng: random.Random, about: Any) -> str:
    """Change, remove or add one value of the state."""
    container, key = rng.choice(entries(about, []))
    how = rng.randrange(8)
    if how == 0:
        del container[key]
        return "taken away"
    if how == 1 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
        return "twice"
    if how == 1 and isinstance(container, dict):
        container["more"] = 1
        return "added"
    if how == 2 and isinstance(container[key], int):
        container[key] += rng.choice((-1, 1))
        return "counted wrong"
    if how == 3:
        other, another = rng.choice(entries(about, []))
        container[key] = copy.deepcopy(other[another])
        return "from elsewhere"
    container[key] = rng.choice(OTHERS)
    return "another"


def forge_tensor(rng: random.Random, tensors: dict[str, torch.Tensor]) -> str:
    """Change the shape, type, length or one value of a tensor."""
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    how = rng.randrange(7)
    if how == 0:
        del tensors[name]
        return "missing"
    if how == 1:
        tensors[name] = tensor[..., None].contiguous()
    elif how == 2:
        tensors[name] = tensor.to(rng.choice((torch.float64, torch.int8, torch.bool, torch.int64)))
    elif how == 3 and tensor.dim():
        axis = rng.randrange(tensor.dim())
        tensors[name] = tensor.narrow(axis, 0, max(tensor.shape[axis] - 1, 0)).contiguous()
    elif how == 4 and tensor.dim():
        tensors[name] = torch.cat([tensor, tensor], rng.randrange(tensor.dim()))
    elif how == 5:
        tensors[name] = tensors[rng.choice(sorted(tensors))].clone()
    elif tensor.numel():
        tensor = tensor.clone()
        tensor.view(-1)[rng.randrange(tensor.numel())] = (
            rng.choice((float("nan"), float("inf"), -1e30, 5.0))
            if tensor.is_floating_point()
            else rng.choice((-1, 0, 1, 100, 127))
            if tensor.dtype in (torch.uint8, torch.int8, torch.bool)
            else rng.choice((-(2**31), -1, 0, 5, 10**6, 2**31 - 1))
        )
        tensors[name] = tensor
    return "tensor"


def outcome(vlm: VLM, path: Path) -> str:
    """Return whether loading a file fails or gives a session that answers."""
    try:
        session = vlm.load_session(path)
    except VLMFastError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    with session:
        # Long enough for every method to change the cache.
        assert len(session.ask("is there more, and what ?", max_new_tokens=4).token_ids) > 0
        assert session.bytes < 1 << 24
        assert len(session.ask("all ?", restore=True, max_new_tokens=2).token_ids) > 0
    return "answers"


@pytest.mark.parametrize(
    "seeds",
    [range(39), pytest.param(range(39, 2150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_forged_sessions_are_rejected_or_answer(sessions, tmp_path, seeds) -> None:
    seen = Counter()
    for seed in seeds:
        rng = random.Random(f"forged {seed}")
        name = sorted(sessions)[seed % len(sessions)]
        vlm, metadata, tensors = sessions[name]
        metadata, tensors = dict(metadata), dict(tensors)
        if rng.random() < 0.5:
            about = json.loads(metadata["session"])
            forge_value(rng, about)
            metadata["session"] = json.dumps(about)
        else:
            forge_tensor(rng, tensors)
        path = tmp_path / "forged.session"
        snapshot.write(path, metadata, tensors)
        try:
            seen[outcome(vlm, path)] += 1
        except Exception as error:
            error.add_note(f"{name}, seed {seed}")
            raise
    assert seen.keys() == {"refused", "answers"} and seen["refused"] > seen["answers"]


def test_valid_sessions_are_read(sessions, tmp_path) -> None:
    for vlm, metadata, tensors in sessions.values():
        snapshot.write(tmp_path / "a", metadata, tensors)
        assert outcome(vlm, tmp_path / "a") == "answers"


def changed(state: Any, path: list, value: Any) -> Any:
    """A packed state with one value replaced at a path of keys; dicts are packed as pairs."""
    at = state
    for key in path[:-1]:
        at = within(at)[key]
    for name in ("dict", "fields"):
        if name in at and name == "dict":
            next(pair for pair in at["dict"] if pair[0] == path[-1])[1] = value
        elif name in at:
            at["fields"][path[-1]] = value
    return state


def within(value: Any) -> Any:
    if isinstance(value, dict) and "dict" in value:
        return dict(value["dict"])
    return value["fields"] if isinstance(value, dict) and "fields" in value else value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["caches", 0, "layers", 0, "held"], 10**6, "held is 1000000"),
        (["caches", 0, "layers", 0, "shift"], [10**9], "shift is"),
        (["caches", 0, "layers", 0, "stored"], [[3]], "stored is not of its segments"),
        (["caches", 0, "steps"], -1, "steps is -1"),
        (["consumed", "ids"], [10**9], "an id of the conversation"),
        (["consumed", "ids"], [1, 2, 3], "about other images"),
        (["caches"], [None] * 9, "many caches"),
        (["pictures", "digests"], {"tuple": ["x"]}, "digests of images"),
        (["caches", 0, "track"], True, "track does not fit the recipe"),
        (["caches", 0, "logical"], [1], "logical is not"),
        (["caches", 0, "ids"], [10**9] * 30, "an id of the cache"),
        (["pictures", "sizes"], [{"tuple": [10**6, 10**6]}], "is too large"),
        (["pictures", "sizes"], [{"tuple": [64, 128]}], "id|geometry|features|tokens"),
        (["pictures", "head"], "USER: <image><image>", "in another prompt"),
        (["messages"], [{"dict": [["role", "user"]]}], "do not end with an answer"),
        (["history"], 1, "history is neither"),
    ],
)
def test_rejection_messages(sessions, tmp_path, path, value, reason) -> None:
    vlm, metadata, tensors = sessions["none"]
    state = changed(json.loads(metadata["session"]), path, value)
    snapshot.write(tmp_path / "a", {**metadata, "session": json.dumps(state)}, tensors)
    with pytest.raises(VLMFastError, match=f"a cannot be used: .*({reason})"):
        vlm.load_session(tmp_path / "a")


def test_forged_capacity_does_not_allocate_memory(sessions, tmp_path) -> None:
    vlm, metadata, tensors = sessions["none"]
    honest = tmp_path / "honest"
    snapshot.write(honest, metadata, tensors)
    with vlm.load_session(honest) as session:
        expected = session.ask("is there more ?", **ASK).token_ids
    state = json.loads(metadata["session"])
    changed(state, ["caches", 0, "layers", 0, "capacity"], 10**12)
    snapshot.write(tmp_path / "a", {**metadata, "session": json.dumps(state)}, tensors)
    with vlm.load_session(tmp_path / "a") as session:
        assert session.bytes < 1 << 22
        assert session.ask("is there more ?", **ASK).token_ids == expected


KEYS = ("kind", "version", "recipe", "model", "session")
VALUES = (None, "", "x", "[]", "{}", "2", "null", "[" * 100_000)
HONEST = ("version", "2")


@pytest.mark.parametrize(
    ("key", "value"), [pair for pair in itertools.product(KEYS, VALUES) if pair != HONEST]
)
def test_forged_metadata_is_rejected(sessions, tmp_path, key, value) -> None:
    vlm, metadata, tensors = sessions["none"]
    assert metadata[key] != value
    metadata = dict(metadata)
    if value is None:
        del metadata[key]
    else:
        metadata[key] = value
    snapshot.write(tmp_path / "a", metadata, tensors)
    with pytest.raises(VLMFastError) as caught:
        vlm.load_session(tmp_path / "a")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
