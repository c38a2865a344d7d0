"""The package: cost of its import and public names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vlmfast
from support import fresh
from support.paths import ROOT

HEAVY = ("transformers", "PIL", "timm", "decord", "av", "open_clip", "triton", "torchvision")


def python(code: str) -> str:
    """Stdout of ``code`` in a fresh interpreter that finds this package."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(line: str) -> set[str]:
    """Top-level names in a line of JSON."""
    return {name.partition(".")[0] for name in json.loads(line)}


SHOW = "import json, sys; print(json.dumps(sorted(sys.modules)))"
OVERLAY = "assert callable(vlmfast.overlay)"
AFTER_TORCH = {  # what runs in processes that have imported torch alone, and its last line
    "torch": SHOW,
    "import": f"import vlmfast; {SHOW}",
    "recipes": f"import vlmfast; vlmfast.Recipe.parse('hired:0.2'); vlmfast.methods(); {SHOW}",
    # The module of that name must not shadow the function, in any order of access.
    "overlay": f"import vlmfast; vlmfast.overlay; {OVERLAY}; {OVERLAY}; "
    "from vlmfast import overlay; assert callable(overlay); print('right')",
    "overlays": f"import vlmfast; import vlmfast.api.overlays; {OVERLAY}; {OVERLAY}; "
    "from vlmfast import overlay; assert callable(overlay); print('right')",
    **dict.fromkeys(
        ("time 1", "time 2", "time 3"),
        "import time; start = time.perf_counter(); import vlmfast; "
        "print(time.perf_counter() - start)",
    ),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Lines of `AFTER_TORCH`."""
    done = {name: fresh.run(code) for name, code in AFTER_TORCH.items()}
    assert not any(each.returncode for each in done.values()), done
    return {name: each.stdout.strip() for name, each in done.items()}


def test_import_is_light(printed: dict[str, str]) -> None:
    assert "torch" in loaded(printed["torch"]) and "vlmfast" in loaded(printed["import"])
    assert not (loaded(printed["import"]) - loaded(printed["torch"])) & set(HEAVY)


def test_parsing_recipes_is_light(printed: dict[str, str]) -> None:
    # Some releases of torch import triton.
    new = loaded(printed["recipes"]) - loaded(printed["torch"])
    assert not new & (set(HEAVY) - {"triton"})


def test_help_and_media_are_light() -> None:
    out = python(
        f"import vlmfast.media\nfrom vlmfast.cli import main\nassert main([]) == 0\n{SHOW}"
    )
    assert not loaded(out.splitlines()[-1]) & {*HEAVY, "torch", "numpy", "httpcore2"}


def test_import_adds_little_to_torch(printed: dict[str, str]) -> None:
    # The minimum of several processes: a busy machine must not fail.
    assert min(float(printed[f"time {n}"]) for n in (1, 2, 3)) < 0.3


def test_public_names() -> None:
    for name in vlmfast.__all__:
        assert getattr(vlmfast, name) is not None
    assert set(vlmfast.__all__) <= set(dir(vlmfast))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vlmfast.nonsense


@pytest.mark.parametrize("first", ["overlay", "overlays"])
def test_overlay_is_a_function_not_a_module(printed: dict[str, str], first: str) -> None:
    assert printed[first] == "right"


def test_errors_are_value_errors() -> None:
    for error in (vlmfast.RecipeError, vlmfast.MediaError, vlmfast.ModelError):
        assert issubclass(error, vlmfast.VLMFastError)
    assert issubclass(vlmfast.VLMFastError, ValueError)


# --- examples ------------------------------------------------------------------------------------


def test_example_image_is_that_of_the_command() -> None:
    """``vlmfast examples`` writes it."""
    from vlmfast.media import load_image
    from vlmfast.scenes.files import image

    content, example = image()
    for source in (ROOT / "examples" / "picture.png", content):
        assert np.array_equal(np.asarray(load_image(source)), np.asarray(example.image))


@pytest.mark.parametrize("decoder", ["decord", "av"])
def test_example_video_is_that_of_the_command(decoder: str, tmp_path: Path) -> None:
    pytest.importorskip(decoder)
    from vlmfast.media import load_video
    from vlmfast.scenes.files import video

    content, example = video()
    (tmp_path / "clip.mp4").write_bytes(content)
    for folder in (ROOT / "examples", tmp_path):
        loaded = load_video(folder / "clip.mp4", num_frames=4, decoder=decoder)
        assert len(loaded) == len(example.frames) == 4
        for got, frame in zip(loaded.frames, example.frames, strict=True):
            assert np.array_equal(np.asarray(got), np.asarray(frame))


def test_written_video_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from vlmfast.media import load_video
    from vlmfast.scenes.examples import EVAL_SEED_START, video_example
    from vlmfast.scenes.files import lossless_video

    frames = video_example(EVAL_SEED_START + 100).frames
    (tmp_path / "clip.mp4").write_bytes(lossless_video(frames))
    got = load_video(tmp_path / "clip.mp4").frames
    assert all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(got, frames, strict=True)
    )


def test_example_questions_are_known_to_the_generator() -> None:
    """The generator knows the answers to the questions of `make ask`."""
    from vlmfast.scenes import files

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for example in (files.image()[1], files.video()[1]):
        assert any(f'"{qa.question}"' in makefile for qa in example.qa)
