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

from support.engine.kept import beginning, consumed
from support.tiny_families import build_qwen2_5_vl
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, VLMFastError
from vlmfast.api.session_file import read_content, write_content

ASK = {"max_new_tokens": 6}
VIDEO = {"video": [make_image(seed=seed) for seed in range(4)], "fps": 2.0}
OTHERS = [None, True, -1, 0, 1, 7, 10**12, 10**30, 0.5, "", "x", [], [3], {}, float("nan")]
Session = tuple[VLM, dict[str, str], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    path = tmp_path_factory.mktemp("sessions") / "a.session"
    image, found = {"images": make_image()}, {}
    for name, build, media in (
        ("llava", build_llava, image),
        ("llava_next", build_llava_next, image),
        ("qwen", build_qwen2_5_vl, image),
        ("video", build_qwen2_5_vl, VIDEO),
        ("text", build_llava, {}),
    ):
        vlm = VLM(*build())
        with vlm.session(**media, recipe="lookm:0.7") as session:
            session.ask("what is here ?", **ASK)
            session.save(path)
        found[name] = (vlm, *read_content(path))
    return found


def entries(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Container and key of every value in nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        found.append((value, key))
        if isinstance(child, dict | list):
            entries(child, found)
    return found


def forge_value(rng: random.Random, about: Any) -> None:
    """Change, remove or add one value of the state."""
    container, key = rng.choice(entries(about, []))
    how = rng.randrange(8)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif how == 1:
        container["more"] = 1
    elif how == 2 and isinstance(container[key], int):
        container[key] += rng.choice((-1, 1))
    elif how == 3:
        other, another = rng.choice(entries(about, []))
        container[key] = copy.deepcopy(other[another])
    else:
        container[key] = rng.choice(OTHERS)


def forge_tensor(rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    """Change the shape, type, length or one value of a tensor, remove it or add one."""
    name = rng.choice([*tensors, "more"])
    tensor = tensors.pop(name, torch.zeros(2, 3))
    how, axis = rng.randrange(6), rng.randrange(tensor.dim())
    if how == 1:
        tensor = tensor[..., None].contiguous()
    elif how == 2:
        tensor = tensor.to(rng.choice((torch.float64, torch.int8, torch.bool, torch.bfloat16)))
    elif how == 3:
        tensor = tensor.narrow(axis, 0, tensor.shape[axis] - 1).contiguous()
    elif how == 4:
        tensor = torch.cat([tensor, tensor], axis)
    elif how == 5:
        value = rng.choice((float("nan"), float("inf"), -1e30, 5.0))
        tensor.view(-1)[rng.randrange(tensor.numel())] = value
    if how:
        tensors[name] = tensor


def outcome(vlm: VLM, path: Path) -> str:
    """Return whether loading a file fails or gives a session that answers."""
    try:
        session = vlm.load_session(path)
    except VLMFastError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    with session:
        assert len(session.ask("is there more, and what ?", max_new_tokens=4).token_ids) > 0
        assert session.bytes < 1 << 24
        if beginning(session):
            session.ask("all ?", restore=True, max_new_tokens=2)
    return "answers"


@pytest.mark.parametrize(
    "seeds",
    [range(60), pytest.param(range(60, 2150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_forged_sessions_are_rejected_or_answer(sessions, tmp_path, seeds) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"forged {seed}")
        name = sorted(sessions)[seed % len(sessions)]
        vlm, metadata, tensors = sessions[name]
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        about = json.loads(metadata["session"])
        if rng.random() < 0.7:
            forge_value(rng, about)
        else:
            forge_tensor(rng, tensors)
        path = tmp_path / "forged.session"
        write_content(path, {**metadata, "session": json.dumps(about)}, tensors)
        try:
            seen[outcome(vlm, path)] += 1
        except Exception as error:
            error.add_note(f"{name}, seed {seed}")
            raise
    assert seen.keys() == {"refused", "answers"} and seen["refused"] > seen["answers"]


TIMES = ("media", "times", 0)
MANY = [[1, 1]] * 10**5


@pytest.mark.parametrize(
    ("name", "path", "value", "reason"),
    [
        ("llava", (), [], "its parts are others"),
        ("llava", ("more",), 1, "its parts are others"),
        ("llava", ("history",), 1, "history is neither"),
        ("llava", ("history",), False, "opened with history=False"),
        ("llava", ("messages",), [{"role": "user"}], r"messages\[0\] must have the role user"),
        ("llava", ("messages", 0, "content"), "a <image>", "contains <image>"),
        ("llava", ("messages", 0, "more"), 1, r"messages\[0\].*'more'"),
        ("llava", ("consumed", "text"), None, "the conversation has no text"),
        ("llava", ("consumed", "ids"), [10**9], "1000000000 is no id of a text"),
        ("llava", ("consumed", "ids"), [True], "True is no id of a text"),
        ("llava", ("consumed", "ids"), [4], "image tokens in the conversation"),
        ("llava", ("media",), None, "pixels of no image"),
        ("llava", ("media", "content"), [{"type": "audio"}], "media are not a turn"),
        ("llava", ("media", "content", 0, "path"), "/etc/passwd", "media are not a turn"),
        ("llava", ("media", "content"), [{"type": "image"}] * 2, "in another prompt"),
        ("llava", ("media", "sizes"), [], "0 images have"),
        ("llava", ("media", "sizes"), MANY, "100000 images have"),
        ("llava", ("media", "sizes"), [["x", 10**12]], "must be a height and a width"),
        ("llava", ("media", "sizes"), [[10**6, 10**6]], "is too large"),
        ("llava", ("media", "sizes"), [[1, 10**7]], "is too narrow"),
        ("llava", ("media", "sizes"), [[2, 2]] * 2, "2 images have"),
        ("qwen", ("media", "sizes"), [[2, 2]] * 2, "frames and sizes differ"),
        ("llava", ("media", "frames"), [[0, 0, 1]], "frames and times differ"),
        ("llava", ("media", "frames"), [[-1.0, False, True]], "frames are not whole numbers"),
        ("llava_next", ("media", "sizes"), [[8, 320]], r"pixel_values is .*, not torch.float32 "),
        ("qwen", ("media", "sizes"), [[300, 30]], r"pixel_values is .*, not torch.float32 "),
        ("video", (*TIMES, "fps"), float("nan"), "fps must be a finite number"),
        ("video", (*TIMES, "indices"), [0, 1, 1, 3], "indices: must ascend"),
        ("video", (*TIMES, "timestamps_s"), [0], "give one of both for each frame"),
    ],
)
def test_rejection_messages(sessions, tmp_path, name, path, value, reason) -> None:
    vlm, metadata, tensors = sessions[name]
    whole = {"session": json.loads(metadata["session"])}
    *above, last = ("session", *path)
    at: Any = whole
    for key in above:
        at = at[key]
    at[last] = value
    write_content(tmp_path / "a", {**metadata, "session": json.dumps(whole["session"])}, tensors)
    with pytest.raises(VLMFastError, match=f"a cannot be used: .*({reason})"):
        vlm.load_session(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda of: {}, "1 images have 0 values"),
        (lambda of: {"more": of}, "not the pixels of its images"),
        (lambda of: {"pixel_values": of.byte()}, "not the pixels of its images"),
        (lambda of: {"pixel_values": of.flatten()[:100].clone()}, "1 images have 100 values"),
        (lambda of: {"pixel_values": of.double()}, "pixel_values is torch.float64"),
        (lambda of: {"pixel_values": torch.cat([of, of], -1)}, "pixel_values is torch.float32"),
        (lambda of: {"pixel_values": of / 0}, "not finite"),
    ],
)
def test_rejected_pixels(sessions, tmp_path, change, reason) -> None:
    vlm, metadata, tensors = sessions["llava"]
    write_content(tmp_path / "a", metadata, change(tensors["pixel_values"]))
    with pytest.raises(VLMFastError, match=f"a cannot be used: .*{reason}"):
        vlm.load_session(tmp_path / "a")


def test_ids_that_no_message_has_said_are_not_read(sessions, tmp_path) -> None:
    """The control: a session that had consumed them would read them."""
    vlm, metadata, tensors = sessions["llava"]
    with vlm.session(images=make_image(), recipe="lookm:0.7", history=True) as session:
        wanted = session.ask("is there more ?", **ASK).stats.prompt_tokens
        head = consumed(session, [7] * 20)
        assert session.ask("is there more ?", **ASK).stats.prompt_tokens > wanted
    about = json.loads(metadata["session"])
    about |= {"messages": [], "consumed": {"text": head, "ids": [7] * 20}}
    write_content(tmp_path / "a", {**metadata, "session": json.dumps(about)}, tensors)
    with vlm.load_session(tmp_path / "a") as session:
        assert session.ask("is there more ?", **ASK).stats.prompt_tokens == wanted


KEYS = ("kind", "version", "recipe", "model", "session")
VALUES = (None, "", "x", "[]", "{}", "1", "null", "[" * 100_000)


@pytest.mark.parametrize(("key", "value"), itertools.product(KEYS, VALUES))
def test_forged_metadata_is_rejected(sessions, tmp_path, key, value) -> None:
    vlm, metadata, tensors = sessions["llava"]
    forged = {**metadata, key: value} if value is not None else dict(metadata)
    if value is None:
        del forged[key]
    write_content(tmp_path / "a", forged, tensors)
    with pytest.raises(VLMFastError) as caught:
        vlm.load_session(tmp_path / "a")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
