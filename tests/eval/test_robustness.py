"""Guards of reducers, attacks on their selection, verbose images, and the task ``robustness``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vlmfast
from support import tiny_families
from support.engine.commands import attacked_tokens, loads
from support.engine.prompts import SHIFTS, jittered
from support.eval_fakes import run
from support.tiny_models import make_image
from vlmfast.api.gradients import image_of, inputs_of, pixels_of, seen_of
from vlmfast.compressors.guard import MARGIN, reserved
from vlmfast.compressors.select import best
from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.errors import ModelError, RecipeError, VLMFastError
from vlmfast.eval import robustness
from vlmfast.eval.report import write_report
from vlmfast.eval.results import Writer
from vlmfast.eval.robustness import Robustness
from vlmfast.eval.robustness_attacks import SelectionAttack, VerboseAttack, descend, noisy
from vlmfast.eval.summary import unguarded
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

GUARDED = ["hired", "visionzip", "prumerge", "prumerge-plus", "scope", "flashvid"]
RANKING = GUARDED[:4]
HIRED = "hired:budget=0.11"
ON_ATTACKED = "attack-4-hired_budget=0.11"  # the control of the full model on its images


@pytest.fixture(scope="module")
def scene() -> Image.Image:
    return image_example(EVAL_SEED_START).image


def kept(vlm: vlmfast.VLM, image: Image.Image, recipe: str) -> tuple[list[int], int]:
    """Tokens that enter the language model, and forward passes of the tower."""
    with vlm.prefix_cache.bypassed():
        answer = vlm.ask("What is it?", images=image, recipe=recipe, max_new_tokens=1)
    return answer.trace.entered.order.tolist(), answer.stats.vision_passes


def margin(attack: SelectionAttack, clean: Image.Image, image: Image.Image) -> float:
    """Mean ``z`` of the tokens kept of the clean image above that of the others."""
    kept = attack.kept(pixels_of(clean))
    with torch.no_grad():
        found = attack.scored(pixels_of(image))
    others = found.patches & ~kept
    return float(found.z[kept].mean() - found.z[others].mean())


# --- the guard -----------------------------------------------------------------------------------


def reserved_ref(scores: list[float], count: int, share: float) -> list[int]:
    """One row of `reserved`, entry by entry."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    extra = int(np.float32(count) * np.float32(share))
    largest, last = order[: count - extra], scores[order[max(count - 1, 0)]]
    near = [i for i in range(len(scores)) if i not in largest and scores[i] >= MARGIN * last]
    spread = [near[int((2 * i + 1) * len(near) // (2 * extra))] for i in range(extra)]
    return sorted(largest + spread)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.99])
def test_reserve_is_spread_near_the_threshold(share) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(40, 23, generator=generator) ** 3
    scores[::4] = scores[::4].mul(4).round()  # ties
    scores[5, 10:] = -torch.inf  # cannot be kept
    counts = torch.randint(0, 24, (40,), generator=generator)
    counts[5] = 10
    found = reserved(scores, counts, share)
    assert found.sum(1).tolist() == counts.tolist()
    for row, count, marks in zip(scores.tolist(), counts.tolist(), found, strict=True):
        assert marks.nonzero()[:, 0].tolist() == reserved_ref(row, count, share)
    assert not torch.equal(found, best(scores, counts))


def test_without_a_guard_nothing_changes() -> None:
    scores = torch.rand(3, 50, generator=torch.Generator().manual_seed(0))
    for name in GUARDED:
        stage = stage_class(name)()
        assert (stage.guard, getattr(stage, "reserve", 0.0)) == (0, 0.0)
        assert all(request.jitter == 0 for request in stage.saliencies())
        assert str(stage) == name
    for name in RANKING:
        assert torch.equal(stage_class(name)().best(scores, [5, 6, 7]), best(scores, [5, 6, 7]))


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", GUARDED)
def test_guard_keeps_the_budget(tiny, scene, name) -> None:
    plain, one = kept(tiny, scene, f"{name}:budget=0.11")
    tokens, three = kept(tiny, scene, f"{name}:budget=0.11,guard=2")
    assert len(tokens) == len(plain)
    assert (one, three) == (1, 3)
    if name in RANKING:
        spread, one = kept(tiny, scene, f"{name}:budget=0.11,reserve=0.4")
        assert len(spread) == len(plain) and spread != plain and one == 1
    everything, one = kept(tiny, scene, f"{name}:budget=1,guard=2")
    assert (len(everything), one) == (336, 1)


def test_guard_averages_the_saliency_of_jittered_views(tiny, scene) -> None:
    inputs = inputs_of(tiny, pixels_of(scene), "?")
    processor = tiny.processor.image_processor
    views = [inputs.tensors, *(jittered(inputs.tensors, i, processor) for i in range(2))]
    rows = []
    for tensors in views:
        seen = seen_of(tiny, replace(inputs, tensors=tensors), Recipe.parse("visionzip"))
        (salient,) = seen.vision.saliency.values()
        rows.append(salient[0].rows)
    seen = seen_of(tiny, inputs, Recipe.parse("visionzip:guard=2"))
    (salient,) = seen.vision.saliency.values()
    assert torch.equal(salient[0].rows, torch.stack(rows).mean(0))
    assert not torch.equal(rows[0], rows[1])


def test_jitter_of_an_image_does_not_depend_on_others() -> None:
    pixels = torch.rand(3, 5, 3, 8, 8)
    whole = jittered({"pixel_values": pixels, "image_sizes": pixels}, 1, None)
    assert whole["image_sizes"] is pixels
    for i in range(3):
        alone = jittered({"pixel_values": pixels[i : i + 1]}, 1, None)["pixel_values"]
        assert torch.equal(alone[0], whole["pixel_values"][i])
    packed = torch.rand(12, 48)  # patches cannot be shifted
    noise = jittered({"pixel_values": packed}, 0, None)["pixel_values"] - packed
    assert torch.allclose(noise, noise[:1].expand(12, -1), atol=1e-6)
    assert 0 < float(noise.std()) * 255 < 10
    assert len(set(SHIFTS)) == 4


# --- attacks -------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [HIRED, "divprune:budget=0.11"])
def test_attack_lowers_the_margin_more_than_noise(tiny, scene, recipe) -> None:
    attack = SelectionAttack(tiny, Recipe.parse(recipe))
    found, noise = attack(scene, 4, 8), noisy(scene, 4, "scene")
    change = np.asarray(found, dtype=int) - np.asarray(scene, dtype=int)
    assert (found.mode, found.size) == (scene.mode, scene.size)
    assert 0 < abs(change).max() <= 4
    assert set(np.unique(abs(np.asarray(noise, dtype=int) - scene))) <= {0, 1, 2, 3, 4}
    clean = margin(attack, scene, scene)
    assert margin(attack, scene, found) < clean - 0.4
    assert abs(margin(attack, scene, noise) - clean) < 0.2
    assert attack.changed(scene, found) > attack.changed(scene, noise)
    assert attack.changed(scene, scene) == 0


def test_optimized_pixels_are_those_that_ask_sees(tiny, scene) -> None:
    pixels = pixels_of(scene)
    assert torch.equal(pixels_of(image_of(pixels)), pixels)
    passed = inputs_of(tiny, pixels.requires_grad_(), "What is it?").tensors
    asked = tiny.inputs("What is it?", images=scene)
    assert torch.equal(passed["input_ids"], asked["input_ids"])
    step = 2 / 255  # of a pixel value, normalized: the base view is resized, and rounded in `ask`
    difference = (passed["pixel_values"] - asked["pixel_values"]).detach().abs()
    assert float(difference.max()) < 1.1 * step
    assert float(difference[:, 1:].max()) == 0  # crops are not resized


def test_descent_stays_in_the_box() -> None:
    start = torch.tensor([0.0, 3.0, 128.0, 255.0]).view(1, 1, 4)
    target = torch.tensor([-50.0, 500.0, 128.4, 251.0]).view(1, 1, 4)
    found = descend(start, 4, 40, lambda pixels, step: (pixels - target).square().sum())
    assert found.flatten().tolist() == [0.0, 7.0, 128.0, 251.0]


def test_processors_without_gradients_are_refused(tiny, scene, monkeypatch) -> None:
    inputs = tiny.adapter.inputs

    def without(text, images):
        return inputs(text, [image.detach().numpy() for image in images])

    monkeypatch.setattr(tiny.adapter, "inputs", without)
    with pytest.raises(ModelError, match="LlavaNextImageProcessor has no gradients"):
        inputs_of(tiny, pixels_of(scene).requires_grad_(), "?")


@pytest.mark.parametrize("recipe", ["snapkv", "pyramiddrop", "hired+divprune"])
def test_recipes_without_one_reducer_are_refused(recipe) -> None:
    with pytest.raises(RecipeError, match="robustness is measured for exactly one"):
        robustness.check([Recipe.parse(recipe)], False, False)


def test_verbose_images_meet_the_length_guards(tiny, scene) -> None:
    attack = VerboseAttack(tiny, max_new_tokens=40)
    clean = attack.answer(pixels_of(scene))
    image = attack(scene, 16, 5)
    assert len(clean) < len(attack.answer(pixels_of(image))) <= 40
    with torch.no_grad():
        before, after = (attack.loss(pixels_of(of), clean) for of in (scene, image))
    assert float(after) < float(before)
    answer = tiny.ask(attack.question, images=image, max_new_tokens=6)
    assert len(answer.token_ids) == answer.stats.generated_tokens == 6
    # As a server of `max_new_tokens=7` submits a request that sets no length.
    request = vlmfast.Request(attack.question, images=image)
    assert len(tiny.submit(request, default_new_tokens=7).result().token_ids) == 7


# --- families ------------------------------------------------------------------------------------

FAMILIES = tiny_families.builders()


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "qwen2_5_vl" else pytest.mark.slow) for f in FAMILIES],
)
def test_guard_and_attack_on_every_family(family) -> None:
    """Towers with a CLS token, without one, of packed patches, and without attention."""
    if family == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    vlm = vlmfast.VLM(*FAMILIES[family]())
    image = make_image(90, 44)
    plain, one = kept(vlm, image, "visionzip:keep=0.3")
    tokens, three = kept(vlm, image, "visionzip:keep=0.3,guard=2")
    assert (len(tokens), one, three) == (len(plain), 1, 3)
    attack = SelectionAttack(vlm, Recipe.parse("divprune:keep=0.3"))
    found, noise = attack(image, 8, 4), noisy(image, 8, family)
    clean, attacked = margin(attack, image, image), margin(attack, image, found)
    assert attacked < clean - 0.3
    assert attacked < margin(attack, image, noise)


# --- the task ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"eps": ()}, "eps is ''; it must be whole numbers from 1 to 255"),
        ({"eps": (0, 4)}, "eps is '0,4'"),
        ({"eps": (256,)}, "eps is '256'"),
        ({"steps": 0}, "steps is 0; it must be from 1 to"),
    ],
)
def test_invalid_options_are_refused(options, reason) -> None:
    with pytest.raises(VLMFastError, match=reason):
        Robustness(**options)


def test_guards_are_compared_with_their_base() -> None:
    guarded = str(Recipe.parse("hired:budget=0.11,reserve=0.2,guard=3"))
    assert unguarded(guarded) == "hired:budget=0.11"
    assert unguarded("hired+snapkv") == "hired+snapkv"


def evaluate(out, *more: str, task: str = "robustness") -> int:
    return run(task, "--recipe", HIRED, "--eps", 4, "--steps", 2, "--out", out, *more)


def files(folder) -> dict[str, bytes]:
    """All samples by folder."""
    found = folder.rglob("samples.jsonl")
    return {str(file.parent.relative_to(folder)): file.read_bytes() for file in found}


def stopping_after(number: int) -> Callable[..., None]:
    """`Writer.add` that is interrupted after some samples."""
    add, left = Writer.add, iter(range(number))

    def stopping(writer, *line):
        if next(left, None) is None:
            raise KeyboardInterrupt
        add(writer, *line)

    return stopping


@pytest.fixture
def few(tiny, monkeypatch):
    """Two questions about two scenes, and one description."""
    docs = Robustness.docs
    short = {kind: {**of, "max_new_tokens": 8} for kind, of in Robustness.generation.items()}
    monkeypatch.setattr(Robustness, "generation", short)
    attacked_tokens(monkeypatch, 8)
    loads(monkeypatch, lambda *_: tiny)

    def first(task, limit, seed):
        found = docs(task, 1, seed)
        return list({doc.media_id: doc for doc in found}.values())[:2]

    monkeypatch.setattr(Robustness, "docs", first)


@pytest.mark.slow
def test_every_perturbation_is_run(tmp_path, few, capsys) -> None:
    assert evaluate(tmp_path, "--json", str(tmp_path / "found.json")) == 0
    measured = json.loads((tmp_path / "found.json").read_text())["tasks"]
    runs = measured["robustness"]["recipes"]
    own = [f"{HIRED}{control}" for control in ("", "@noise-4", "@attack-4")]
    assert list(runs) == ["none", "none@noise-4", *own, f"none@{ON_ATTACKED}"]
    assert all(run["samples"] == 2 for run in runs.values())
    noise, attack = (runs[name]["metrics"]["changed"] for name in own[1:])
    assert attack > noise
    assert runs[own[2]]["gaps_image"].keys() == {HIRED}
    lengths = measured["robustness-verbose"]["recipes"]
    controls = ("", "@noise-4", "@verbose-4")
    assert set(lengths) == {f"{recipe}{of}" for recipe in ("none", HIRED) for of in controls}
    assert {run["metrics"]["longest"] for run in lengths.values()} == {8}
    assert f"| `{own[2]}` (cls) |" in capsys.readouterr().out
    # The report reads the same from the folder, and compares each run with the clean images.
    text, _ = write_report(tmp_path, tmp_path)
    assert f"| `{own[2]}` (cls) | `{HIRED}` (cls) |" in text
    tasks = json.loads((tmp_path / "report.json").read_text())["tasks"]
    for task, found in tasks.items():
        assert found["recipes"] == measured[task]["recipes"]


def test_row_with_too_many_errors_ends_alone(tmp_path, few, monkeypatch, capsys) -> None:
    def fails(*args, **more):
        raise VLMFastError("no gradient")

    monkeypatch.setattr(SelectionAttack, "__call__", fails)
    found = tmp_path / "found.json"
    code = evaluate(tmp_path / "out", "--max-errors", "0", "--json", str(found))
    assert code == ExitCode.CUT_SHORT
    tasks = json.loads(found.read_text())["tasks"]
    assert f"{HIRED}@verbose-4" in tasks["robustness-verbose"]["recipes"]  # the last rows
    failed = tasks["robustness"]["failed"]
    assert set(failed) == {f"{HIRED}@attack-4", f"none@{ON_ATTACKED}"}
    assert not failed.keys() & tasks["robustness"]["recipes"].keys()
    assert all("no gradient" in reason for reason in failed.values())
    assert "no gradient" in capsys.readouterr().out
    text, _ = write_report(tmp_path / "out", tmp_path)
    assert "### No result" in text and "no gradient" in text
    # The full model is what all rows are compared with.
    monkeypatch.setattr(Robustness, "media", fails)
    with pytest.raises(VLMFastError, match="none: 1 samples failed, more than 0"):
        evaluate(tmp_path / "other", "--max-errors", "0")


@pytest.mark.slow
def test_interrupted_run_equals_an_undisturbed_one(tmp_path, few, monkeypatch) -> None:
    assert evaluate(tmp_path / "whole") == 0
    whole = files(tmp_path / "whole")
    for number in (3, 9):
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "add", stopping_after(number))
            with pytest.raises(KeyboardInterrupt):
                evaluate(tmp_path / "again")
        assert 0 < len(files(tmp_path / "again")) < len(whole)
    assert evaluate(tmp_path / "again") == 0
    assert files(tmp_path / "again") == whole


def test_other_arguments_are_refused(tmp_path) -> None:
    with pytest.raises(VLMFastError, match="--session is not for robustness"):
        evaluate(tmp_path, "--session")
    with pytest.raises(VLMFastError, match="task shapes has no option eps"):
        evaluate(tmp_path, task="shapes")
    with pytest.raises(SystemExit):
        evaluate(tmp_path, "--eps", "2,x")
