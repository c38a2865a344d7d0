"""The runner: every sample exactly once, also after interruptions."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch

from support.eval_fakes import FakeVLM, meta
from support.interrupts import interrupted, lines_of
from vlmfast.core import files as files_module
from vlmfast.core import journal
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError, VLMFastError
from vlmfast.eval import results as store
from vlmfast.eval.axes import (
    method_of,
    share_of,
    shrinks_cache,
    takes_budget,
    with_budget,
    with_share,
)
from vlmfast.eval.results import Writer, read, slug
from vlmfast.eval.runner import evaluate, weights_sha256
from vlmfast.eval.shapes import Shapes

LIMIT = 2
DOCS = 21 * LIMIT
FIELDS = {
    "doc_id", "type", "modality", "picture", "prompt_hash", "target", "resps", "filtered_resps",
    "score", "visual_tokens_in", "equivalent_tokens", "kv_bytes", "kv_bytes_full",
}  # fmt: skip


def lines(path: Path) -> list[str]:
    return (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The lines of an undisturbed run."""
    return lines(evaluate(FakeVLM(), "shapes", out=tmp_path_factory.mktemp("o"), limit=LIMIT).path)


def test_written_files_and_their_contents(tmp_path):
    vlm = FakeVLM()
    run = evaluate(
        vlm, "shapes", "random:budget=0.5", tmp_path, LIMIT, model="tiny", command="vlmfast eval"
    )
    assert run.path == tmp_path / "shapes" / "random_budget=0.5"
    assert sorted(p.name for p in run.path.iterdir()) == [
        "meta.json",
        "samples.jsonl",
        "timings.jsonl",
    ]
    samples = [json.loads(line) for line in lines(run.path)]
    assert len(samples) == DOCS == len(vlm.asked)
    assert [s["doc_id"] for s in samples] == [doc.doc_id for doc in Shapes().docs(LIMIT, 0)]
    for s in samples:
        assert set(s) == FIELDS
        assert len(s["prompt_hash"]) == 64
        assert s["filtered_resps"][0] in (s["resps"][0][0], s["resps"][0][0].lower().rstrip("."))
        assert 0 <= s["score"] <= 1
        assert s["equivalent_tokens"] == s["visual_tokens_in"] / 2
        assert s["kv_bytes"] == s["kv_bytes_full"] / 2
    for line in (run.path / "timings.jsonl").read_text().splitlines():
        times = json.loads(line)
        assert {"doc_id", "ttft_s", "time_vision_s", "time_prefill_s"} <= set(times)
    about = json.loads((run.path / "meta.json").read_text())
    assert about["recipe"] == "random:budget=0.5"
    assert (about["method"], about["budget"]) == ("random", 0.5)
    assert {"python", "torch", "transformers", "vlmfast"} <= set(about["versions"])
    assert about["generation"]["question"] == {"do_sample": False, "max_new_tokens": 16}
    for key in ("date", "device", "command", "model", "seed", "task_version", "schema"):
        assert about[key] is not None, key


def test_questions_reach_the_model_unchanged(tmp_path):
    vlm = FakeVLM()
    evaluate(vlm, "shapes", "grid:budget=0.5", tmp_path, 1)
    for doc, (question, args) in zip(Shapes().docs(1, 0), vlm.asked, strict=True):
        assert question == doc.question
        assert str(args["recipe"]) == "grid:budget=0.5"
        assert args["do_sample"] is False
        assert args["max_new_tokens"] == (128 if doc.kind == "caption" else 16)
        if doc.modality == "image":
            assert args["images"].size == (128, 128)
            assert args["video"] is None
        else:
            assert len(args["video"]) == args["num_frames"] == 4


def test_larger_limit_adds_and_smaller_limit_selects(tmp_path):
    few = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1)
    vlm = FakeVLM()
    more = evaluate(vlm, "shapes", out=tmp_path, limit=3)
    assert len(few.samples) == 21
    assert len(more.samples) == 63
    assert len(vlm.asked) == 42
    assert len(more.meta["resumed"]) == 1
    again = evaluate(vlm, "shapes", out=tmp_path, limit=1)
    assert again.samples == few.samples
    assert set(again.timings) == set(few.samples)


def separate(out: Path, delay: float, last: int) -> None:
    """A run that never finishes its question number ``last``."""
    vlm = FakeVLM(delay=delay)
    vlm.fail = lambda question: len(vlm.asked) == last and signal.pause()
    evaluate(vlm, "shapes", out=out, limit=LIMIT)


def start(out: Path, delay: float, last: int = 0) -> ForkProcess:
    process = get_context("fork").Process(target=separate, args=(out, delay, last))
    process.start()
    return process


def wait_for_lines(process: ForkProcess, file: Path, number: int) -> None:
    while not file.exists() or file.read_bytes().count(b"\n") < number:
        assert process.is_alive(), "the run has ended"
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [(12,), pytest.param((5, 20), marks=pytest.mark.slow)])
def test_killed_and_resumed_run_equals_an_undisturbed_one(tmp_path, whole, kills):
    file, done = tmp_path / "shapes" / "none" / "samples.jsonl", 0
    for number in kills:
        # However late the kill comes, the last answer is never written before it.
        process = start(tmp_path, 0.03, last=DOCS - done)
        wait_for_lines(process, file, number)
        process.kill()
        process.join()
        done = len(lines(file.parent))
        assert number <= done < DOCS
    process = start(tmp_path, 0)
    process.join()
    assert process.exitcode == 0
    assert lines(file.parent) == whole
    timings = [json.loads(line) for line in (file.parent / "timings.jsonl").open()]
    assert {t["doc_id"] for t in timings} == {json.loads(line)["doc_id"] for line in whole}
    assert len(read(file.parent).meta["resumed"]) == len(kills)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"session": True}, {"batch_size": 3}], ids=str)
def test_run_interrupted_at_some_lines_equals_an_undisturbed_one(tmp_path, more):
    def run(name, vlm):
        return evaluate(vlm, "shapes", out=tmp_path / name, limit=1, **more)

    whole = run("whole", FakeVLM())
    files = (str(Path(store.__file__).parent), files_module.__file__, journal.__file__)
    found = lines_of(lambda: run("other", FakeVLM()), *files)
    assert len(found) > 300
    for number, line in enumerate(random.Random(0).sample(found, 40)):
        vlm, name = FakeVLM(), str(number)
        with pytest.raises(KeyboardInterrupt):
            interrupted(lambda vlm=vlm, name=name: run(name, vlm), line)
        samples = tmp_path / name / "shapes" / whole.path.name / "samples.jsonl"
        kept = len(lines(samples.parent)) if samples.exists() else 0
        again = FakeVLM()
        resumed = run(name, again)
        assert lines(resumed.path) == lines(whole.path), line
        assert set(resumed.timings) == set(whole.timings), line
        if not more:
            assert len(vlm.asked) - 1 <= kept <= len(vlm.asked), line
            assert len(again.asked) == 21 - kept, line


@pytest.mark.cases(4)
@pytest.mark.parametrize("cut", range(1, 12))
def test_torn_last_line_is_rerun(tmp_path, whole, cut):
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT)
    for name in ("samples.jsonl", "timings.jsonl"):
        data = (run.path / name).read_bytes()
        (run.path / name).write_bytes(data[: -17 * cut])
    before = len(lines(run.path)) - 1
    assert len(read(run.path).samples) == before
    vlm = FakeVLM()
    run = evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT)
    assert len(vlm.asked) == DOCS - before
    assert lines(run.path) == whole
    assert set(run.timings) == set(run.samples)


def test_zeros_after_the_last_line_are_discarded(tmp_path, whole):
    """A possible file-system state after a power failure."""
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT)
    text = "\n".join(whole[:-1]) + "\n"
    (run.path / "samples.jsonl").write_bytes(text.encode() + bytes(100))
    assert lines(evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT).path) == whole


def test_concurrent_runs_are_refused(tmp_path):
    with (
        Writer(tmp_path / "shapes" / "none", meta()),
        pytest.raises(VLMFastError, match="another run is writing"),
        Writer(tmp_path / "shapes" / "none", meta()),
    ):
        pass
    with Writer(tmp_path / "shapes" / "none", meta()):
        pass


def test_another_state_of_adapters_is_another_model(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    vlm = FakeVLM()
    vlm.model = wrapped = peft.get_peft_model(model, config)
    wrapped.add_adapter("other", config)
    for change in (
        wrapped.disable_adapter_layers,
        lambda: wrapped.set_adapter("other"),
        lambda: wrapped.base_model.model[0].set_scale("default", 2),
    ):
        evaluate(vlm, "shapes", out=tmp_path, limit=1)
        change()
        with pytest.raises(VLMFastError, match="different runs: weights_sha256 is"):
            evaluate(vlm, "shapes", out=tmp_path, limit=2)
        wrapped.enable_adapter_layers()
        wrapped.set_adapter("default")


def test_renamed_model_is_the_same_model(tmp_path):
    evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1, model="tiny")
    evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1, model="copy/of/tiny")


def other(key: str, value: object):
    """Changes ``meta.json``."""

    def change(path: Path) -> None:
        file = path / "meta.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return change


def damaged_line(path: Path) -> None:
    found = lines(path)
    found[3] = found[3][:20]
    (path / "samples.jsonl").write_text("\n".join(found) + "\n")


REFUSED = {
    "weights": (other("weights_sha256", "f00"), "different runs: weights_sha256 is"),
    "seed": (other("seed", 1), "different runs: seed is"),
    "task": (other("task_version", "0"), "different runs: task_version is"),
    "generation": (other("generation", {"a": 1}), "different runs: generation is"),
    "options": (other("options", {"mode": "a"}), "options is .* in the one"),
    "recipe": (other("recipe", "grid"), 'recipe is "grid" in the one and "none"'),
    "session": (other("session", True), "session is true in the one and null in the other"),
    "no meta": (lambda path: (path / "meta.json").unlink(), r"no meta\.json"),
    "line": (damaged_line, "line 4 is damaged"),
    **{
        f"meta {text!r}": (
            lambda path, text=text: (path / "meta.json").write_text(text),
            r"meta\.json (is|cannot be read)",
        )
        for text in ("", "{", "[]", '{"schema": 1}')
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_folder_of_another_run_or_with_damage_is_refused(tmp_path, what):
    change, message = REFUSED[what]
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1)
    change(run.path)
    with pytest.raises(VLMFastError, match=message):
        evaluate(FakeVLM(), "shapes", out=tmp_path, limit=2)
    assert len(lines(run.path)) == 21
    if what in ("weights", "seed", "task", "generation"):  # also next to it
        with pytest.raises(VLMFastError, match=message):
            evaluate(FakeVLM(), "shapes", "random", tmp_path, 2)
        assert not (tmp_path / "shapes" / "random").exists()


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(VLMFastError, match="cannot be written"):
        evaluate(FakeVLM(), "shapes", out=tmp_path / "file", limit=1)


def test_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(VLMFastError, match=r"cannot be written: No space left"):
        evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1)


def test_failing_sample_is_recorded_and_the_run_continues(tmp_path):
    def fail(question):
        return question.startswith("What does the sign")

    run = evaluate(FakeVLM(fail=fail), "shapes", out=tmp_path, limit=LIMIT)
    failed = [s for s in run.samples.values() if "error" in s]
    assert len(run.samples) == DOCS
    assert len(failed) >= LIMIT
    for s in failed:
        assert "cannot read the image" in s["error"]
        assert s["score"] == 0.0
        assert s["resps"] == []
        assert s["doc_id"] not in run.timings
    vlm = FakeVLM()
    evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT)
    assert not vlm.asked


def test_too_many_failing_samples_end_the_run(tmp_path):
    vlm = FakeVLM(fail=lambda _: True)
    with pytest.raises(VLMFastError, match=r"4 samples failed, more than 3 .*cannot read"):
        evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT, max_errors=3)
    assert len(vlm.asked) == 4
    assert len(lines(tmp_path / "shapes" / "none")) == 4
    with pytest.raises(VLMFastError, match="4 samples failed"):
        evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT, max_errors=3)
    assert len(vlm.asked) == 4
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, max_errors=4)
    assert len(run.samples) == DOCS


def test_internal_errors_are_not_recorded_as_samples(tmp_path):
    class Broken(FakeVLM):
        def ask(self, *args, **kwargs):
            if len(self.asked) == 5:
                raise RuntimeError("a defect")
            return super().ask(*args, **kwargs)

    with pytest.raises(RuntimeError, match="a defect"):
        evaluate(Broken(), "shapes", out=tmp_path, limit=1)
    assert len(lines(tmp_path / "shapes" / "none")) == 5


def test_controls_have_separate_folders(tmp_path):
    full = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1)
    vlm = FakeVLM()
    blank = evaluate(vlm, "shapes", out=tmp_path, limit=1, control="question-only")
    assert blank.path.name == blank.name == "none@question-only"
    assert set(blank.samples) == set(full.samples)
    images = [args["images"] for _, args in vlm.asked if args["images"]]
    assert all(p.getextrema() == ((128, 128),) * 3 for p in images)
    with pytest.raises(VLMFastError, match="controls: question-only, background-only"):
        evaluate(vlm, "shapes", out=tmp_path, limit=1, control="answer-only")


def test_sessions_have_separate_folders(tmp_path):
    alone = evaluate(FakeVLM(), "shapes", "lookm", tmp_path, 1)
    vlm = FakeVLM()
    asked = evaluate(vlm, "shapes", "lookm", tmp_path, 1, session=True)
    assert asked.path.name == asked.name == "lookm@session"
    assert (asked.variant, alone.variant) == ("session", None)
    assert len(vlm.asked) == 21
    for doc, sample in alone.samples.items():
        turn = asked.samples[doc].pop("turn")
        assert asked.samples[doc] == sample  # the fake ignores how it is called
        assert isinstance(turn, int)
        assert "turn" not in sample


def test_session_asks_all_questions_of_an_image(tmp_path):
    vlm = FakeVLM()
    run = evaluate(vlm, "shapes", None, tmp_path, 8, session=True)
    samples = list(run.samples.values())
    images = [s["picture"] for s in samples]
    turns = {p: [s["turn"] for s in samples if s["picture"] == p] for p in images}
    assert all(of == list(range(len(of))) for of in turns.values())
    assert len(turns) > 10
    # One image at a time, and no question type always comes first.
    assert [p for p, q in zip(images, [None, *images], strict=False) if p != q] == list(turns)
    assert len({(s["modality"], s["type"]) for s in samples if s["turn"] == 0}) > 8


def test_interrupted_session_resumes(tmp_path):
    whole = evaluate(FakeVLM(), "shapes", out=tmp_path / "a", limit=LIMIT, session=True)
    run = evaluate(FakeVLM(), "shapes", out=tmp_path / "b", limit=LIMIT, session=True)
    kept = 7  # in the middle of an image
    middle = json.loads(lines(run.path)[kept])
    assert middle["turn"] > 0
    (run.path / "samples.jsonl").write_text("\n".join(lines(run.path)[:kept]) + "\n")
    vlm = FakeVLM()
    run = evaluate(vlm, "shapes", out=tmp_path / "b", limit=LIMIT, session=True)
    assert lines(run.path) == lines(whole.path)
    # The first question about that image is asked again, since later ones depend on it.
    assert len(vlm.asked) == DOCS - kept + 1
    again = FakeVLM()
    evaluate(again, "shapes", out=tmp_path / "b", limit=LIMIT, session=True)
    assert not again.asked


def test_unopenable_session_fails_for_each_question(tmp_path):
    class Closed(FakeVLM):
        def session(self, **kwargs):
            raise MediaError("cannot read the image")

    run = evaluate(Closed(), "shapes", out=tmp_path, limit=1, session=True, max_errors=21)
    assert all(s["error"] == "cannot read the image" for s in run.samples.values())
    assert len(run.samples) == 21


def test_prompt_hash_depends_on_prompt_and_arguments(tmp_path):
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=3)
    prompts = {}
    for doc in Shapes().docs(3, 0):
        prompts.setdefault(doc.question, set()).add(run.samples[doc.doc_id]["prompt_hash"])
    assert all(len(hashes) == 1 for hashes in prompts.values())
    assert len(set().union(*prompts.values())) == len(prompts)


def test_random_numbers_do_not_depend_on_earlier_samples(tmp_path):
    class Drawing(FakeVLM):
        def ask(self, *args, **kwargs):
            answer = super().ask(*args, **kwargs)
            answer.text = str(torch.rand(()).item())
            return answer

    torch.manual_seed(7)
    state = torch.get_rng_state()
    run = evaluate(Drawing(), "shapes", out=tmp_path, limit=1)
    assert torch.equal(torch.get_rng_state(), state)
    text = (run.path / "samples.jsonl").read_text()
    (run.path / "samples.jsonl").write_text("\n".join(text.splitlines()[:9]) + "\n")
    torch.rand(13)
    evaluate(Drawing(), "shapes", out=tmp_path, limit=1)
    assert (run.path / "samples.jsonl").read_text() == text
    assert len({tuple(s["filtered_resps"]) for s in run.samples.values()}) == 21


def test_slow_lines_reach_the_disk_at_once_and_fast_ones_within_a_second(tmp_path, monkeypatch):
    now, synced = [0.0], []
    # Only of the module: event loops of other threads would wait for hours by such a clock.
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fsync = {"fsync": lambda _: synced.append(now[0])}
    monkeypatch.setattr(journal, "os", SimpleNamespace(**{**vars(os), **fsync}))
    for pause, syncs in ((0.0625, 6), (1.5, 100)):
        with journal.Journal(tmp_path / str(pause)) as lines:
            synced.clear()
            for i in range(100):
                now[0] += pause
                lines.append({"doc_id": str(i)})
            assert len(synced) == syncs


def test_folder_names_of_other_recipes_differ():
    recipes = ["p:layers=1/2", "p:layers=1-2", "a:w=/x/y", "a:w=x/y", f"a:w={'x' * 300}"]
    names = [slug(recipe) for recipe in recipes]
    assert len(set(names)) == len(recipes)
    assert all(len(name) < 100 and "/" not in name for name in names)


def test_method_of_a_recipe():
    assert method_of(Recipe.parse("none")) == ("none", None)
    assert method_of(Recipe.parse("hired:0.3")) == ("hired", None)
    assert method_of(Recipe.parse("hired:budget=0.3")) == ("hired", 0.3)
    alpha = "hired:alpha=0.1,budget=0.2"
    assert method_of(Recipe.parse(alpha)) == ("hired:alpha=0.1", 0.2)
    both = ("downsample+scope", 0.11)  # budgets multiply
    assert method_of(Recipe.parse("downsample:budget=0.33+scope:budget=0.33")) == both
    assert method_of(Recipe.parse("downsample:0.3+scope:budget=0.33")) == (both[0], 0.33)


def test_budgets_and_shares_a_recipe_accepts():
    words = {"hired": (1, 0), "lookm": (0, 1), "kivi": (0, 1), "hired+lookm": (1, 1)}
    # A reducer that also changes the cache stays a reducer.
    words |= {"mustdrop": (1, 0), "fastkv": (0, 1), "zipvl": (0, 1), "none": (0, 0)}
    for word, (budget, shrinks) in words.items():
        recipe = Recipe.parse(word)
        assert (takes_budget(recipe), shrinks_cache(recipe)) == (budget, shrinks), word
    assert share_of(Recipe.parse("random:0.5+lookm:0.3")) == 0.3
    assert share_of(Recipe.parse("random+kivi")) is None
    assert str(with_share(Recipe.parse("random:0.5+lookm"), 0.3)) == "random:0.5+lookm:0.3"


def test_with_budget_sets_the_budget():
    assert str(with_budget(Recipe.parse("hired:alpha=0.1"), 0.2)) == "hired:budget=0.2,alpha=0.1"
    with pytest.raises(VLMFastError, match="out of range"):
        with_budget(Recipe.parse("hired"), 1.5)


def test_weight_hash_depends_on_the_values():
    class Holder:
        def __init__(self, model):
            self.model = model

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))  # a 0-d buffer too
    before = weights_sha256(Holder(model))
    assert before == weights_sha256(Holder(model))
    assert before != weights_sha256(Holder(model.to(torch.bfloat16)))
    model = model.float()
    with torch.no_grad():
        model[0].bias[0] += 1
    assert before != weights_sha256(Holder(model))
    assert weights_sha256(FakeVLM()) is None
