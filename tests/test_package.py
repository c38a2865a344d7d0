"""The package: cost of its import and public names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vlmfast

ROOT = Path(vlmfast.__file__).parent.parent
HEAVY = ("transformers", "PIL", "timm", "decord", "av", "open_clip", "triton", "torchvision")


def python(code: str) -> str:
    """Stdout of ``code`` in a fresh interpreter that finds this package."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that ``code`` loads."""
    out = python(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return {name.partition(".")[0] for name in json.loads(out.splitlines()[-1])}


def test_import_is_light() -> None:
    assert not loaded_after("import vlmfast") & set(HEAVY)


def test_parsing_recipes_is_light() -> None:
    code = "import vlmfast; vlmfast.Recipe.parse('hired:0.2'); vlmfast.methods()"
    # Some releases of torch import triton.
    assert not loaded_after(code) & (set(HEAVY) - {"triton"})


def test_help_is_light() -> None:
    code = "from vlmfast.cli import main\nassert main([]) == 0"
    assert not loaded_after(code) & {*HEAVY, "torch", "numpy"}


def test_import_adds_little_to_torch() -> None:
    # The minimum of several processes that have imported torch alone: a busy machine must not fail.
    code = (
        "import os, time, torch\n"
        "for _ in range(3):\n"
        "    if not os.fork():\n"
        "        start = time.perf_counter()\n"
        "        import vlmfast\n"
        "        print(time.perf_counter() - start, flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    assert min(map(float, python(code).split())) < 0.3


def test_public_names() -> None:
    for name in vlmfast.__all__:
        assert getattr(vlmfast, name) is not None
    assert set(vlmfast.__all__) <= set(dir(vlmfast))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = vlmfast.nonsense


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", ["vlmfast.overlay", "import vlmfast.api.overlays"])
def test_overlay_is_a_function_not_a_module(first: str) -> None:
    """The module of that name must not shadow the function, in any order of access."""
    check = "assert callable(vlmfast.overlay); "
    code = (
        f"import vlmfast; {first}; {check * 2}from vlmfast import overlay; assert callable(overlay)"
    )
    python(code)


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
