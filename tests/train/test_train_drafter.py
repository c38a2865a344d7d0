"""`vlmfast train drafter`: answers, teacher, rows, losses, and the training loop."""

from __future__ import annotations

import argparse
import json
import random

import pytest
import torch
from PIL import Image

import vlmfast.train.drafters as drafters
from support.closeness import apart, close
from support.engine.commands import answers_at_once, held_out
from support.engine.draws import Drafting, Teacher, accepted, unroll
from vlmfast import VLM, VLMFastError
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.tree import Tree
from vlmfast.core.weights import SHIPPED, load_weights
from vlmfast.drafters.draft_eagle.stage import DraftEagle
from vlmfast.drafters.draft_vispec.stage import DraftVispec
from vlmfast.scenes.vocabulary import EVAL_SEED_START
from vlmfast.train.drafters import DrafterTrainer, drawn, teach
from vlmfast.train.stages import TrainingError, training_class


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Generates few answers at a time."""
    answers_at_once(monkeypatch, 2)


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu", dtype="float32")


def arguments(out, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    drafters.add_arguments(parser)
    quick = "--samples 3 --held-out 2 --batch 2 --lr 1e-3 --steps 4 --answer-tokens 12"
    quick = [*quick.split(), "--dtype", "float32"]
    return parser.parse_args(["--out", str(out), *quick, *flags])


def training(tiny: VLM, *flags: str):
    """The training of a kind of drafter, and an untrained module."""
    args = arguments("nowhere", *flags)
    torch.manual_seed(0)
    text = tiny.adapter.config.get_text_config()
    sizes = {**tiny.adapter.sizes(), "vocabulary": text.vocab_size, "kv_heads": 2}
    made = training_class(drafters.KINDS[args.kind])(args, sizes)
    return made, made.stage.build(sizes | made.config())


@pytest.fixture(scope="module")
def lesson(tiny: VLM):
    """A description of a generated image."""
    messages = drawn(5)
    assert messages[0]["content"][1]["text"].startswith("Describe")
    lesson = teach(
        tiny, messages, tiny.chat(messages).token_ids, [DraftEagle(), DraftEagle(kind="eagle3")]
    )
    assert len(lesson.answer) > 8
    return lesson


def target_answer(tiny: VLM, number: int) -> list[int]:
    return tiny.chat(drawn(number), max_new_tokens=12).token_ids


# --- answers -------------------------------------------------------------------------------------


def test_answers_are_generated_by_the_target_and_cached(tiny: VLM, tmp_path) -> None:
    args = arguments(tmp_path)
    answers = drafters.Answers(tiny, drawn, tmp_path, args)
    assert [answers[n] for n in (1, 2)] == [target_answer(tiny, n) for n in (1, 2)]
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["00000000.jsonl", "00000001.jsonl"]
    # Answers on disk are used as they are.
    (tmp_path / "00000000.jsonl").write_text("[1, 2]\n" * 2)
    assert drafters.Answers(tiny, drawn, tmp_path, args)[1] == [1, 2]
    (tmp_path / "00000000.jsonl").write_text("[1, 2]\n")
    with pytest.raises(TrainingError, match="1 lines, not 2"):
        drafters.Answers(tiny, drawn, tmp_path, args)[1]
    with pytest.raises(TrainingError, match=r"sampled=0.0, not 0.5.*--answers"):
        drafters.Answers(tiny, drawn, tmp_path, arguments(tmp_path, "--sampled", "0.5"))


def test_sampled_answers_are_reproducible(tiny: VLM, tmp_path) -> None:
    args = arguments(tmp_path, "--sampled", "1")

    def generated(folder: str) -> list[list[int]]:
        answers = drafters.Answers(tiny, drawn, tmp_path / folder, args)
        return [answers[n] for n in range(4, 6)]

    first = generated("a")
    torch.rand(7)
    assert generated("b") == first != [target_answer(tiny, n) for n in range(4, 6)]
    number = held_out(1)  # held-out answers are greedy
    answers = drafters.Answers(tiny, drawn, tmp_path / "b", args)
    assert answers[number] == target_answer(tiny, number)


def test_prompts_are_drawn_outside_the_evaluation() -> None:
    kinds = (
        {len(drawn(n)) for n in range(40)},
        {drawn(n)[0]["content"][0]["type"] for n in range(9)},
    )
    assert kinds == ({1, 3}, {"image", "video"})
    with pytest.raises(ValueError, match="evaluation"):
        drawn(EVAL_SEED_START)


def test_held_out_conversations_are_not_trained_on(tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    data = [
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "x"}],
        }
        for q in "abcdef"
    ]
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = ("--data", str(tmp_path / "data.json"), "--media", str(tmp_path))
    trainer = DrafterTrainer(arguments(tmp_path / "out", *flags))

    def asked(numbers) -> set[str]:
        return {trainer.prompt(n)[0]["content"][-1]["text"] for n in numbers}

    assert asked(range(12)) == set("abcd")
    assert asked(map(held_out, range(4))) == set("ef")
    with pytest.raises(TrainingError, match="too few"):
        DrafterTrainer(arguments(tmp_path / "out", *flags, "--held-out", "6"))


# --- teacher and rows ----------------------------------------------------------------------------


def test_teacher_logits_predict_the_next_token(tiny: VLM, lesson) -> None:
    n = lesson.prompt
    assert torch.equal(lesson.logits.argmax(-1), lesson.answer[1:])
    head = tiny.adapter.logits
    width = lesson.features.shape[1]
    close(head(lesson.features[n:-1]), lesson.logits, terms=width)
    assert not torch.equal(head(lesson.features[n - 1 : -2]).argmax(-1), lesson.answer[1:])
    assert torch.equal(lesson.embeds[n:], tiny.adapter.embed(lesson.answer))
    assert lesson.aux_hidden_states.shape == (len(lesson.embeds), 3, 256)
    assert not torch.equal(lesson.aux_hidden_states[:, 1], lesson.aux_hidden_states[:, 2])


KINDS = [
    ("--kind", "eagle"),
    ("--kind", "eagle3"),
    ("--kind", "vispec"),
]


def drafter_of(tiny: VLM, stage, module):
    """The stage's drafter, one token wide, with the weights of ``module``."""
    target = Target(
        embed=tiny.adapter.embed,
        logits=tiny.adapter.logits,
        width=256,
        depth=6,
        vocabulary=512,
        trained=module,
    )
    return stage.open(target)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("flags", KINDS)
def test_training_drafts_equal_the_stage(tiny: VLM, lesson, flags, shift: int) -> None:
    """Training uses the same rows as generation, at the start and in the middle of an answer."""
    made, module = training(tiny, *flags)
    kind = {"kind": "eagle3"} if flags[1] == "eagle3" else {}
    # Embeddings are larger than features, which must have an effect too.
    module.fc.weight.data[:, 256:] *= 30
    stage = DraftVispec if flags[1] == "vispec" else DraftEagle
    stage = stage(top_k=1, depth=4, nodes=5, **kind)
    n, depth = lesson.prompt, 4
    ids = lesson.answer.tolist()
    module.eval()
    with torch.no_grad():
        drafts = made.draft(module, lesson, Teacher(tiny.adapter), depth, "all").tolist()
    drafter = drafter_of(tiny, stage, module)
    # A control: features of the previous token.
    features, aux_hidden_states = (
        x.roll(shift, 0) for x in (lesson.features, lesson.aux_hidden_states)
    )
    if flags[1] != "eagle3":
        aux_hidden_states = None
    prompt = lesson.layout.select(torch.arange(n))
    read_ids = [1] * n
    drafter.prefill(
        Read(
            read_ids,
            prompt,
            lesson.embeds[:n],
            features[:n],
            None if aux_hidden_states is None else aux_hidden_states[:n],
        )
    )
    budget = Budget(5, depth)
    found = [list(drafter.propose(ids[0], budget).tokens[1:])]
    # Two tokens are accepted, and a third follows.
    path = slice(n, n + 3)
    round_ = Round(
        Tree((ids[0], ids[1], ids[2]), (-1, 0, 1)),
        [0, 1, 2],
        ids[1:4],
        lesson.logits[:3],
        features[path],
        None if aux_hidden_states is None else aux_hidden_states[path],
    )
    drafter.extend(round_)
    found.append(list(drafter.propose(ids[3], budget).tokens[1:]))
    assert (found == [drafts[0], drafts[3]]) is (shift == 0)


@pytest.mark.parametrize("view", ["all", "pool", "text", "select"])
def test_compressed_drafts_equal_the_stage(tiny: VLM, lesson, view: str) -> None:
    made, module = training(tiny, "--compressor")
    n = lesson.prompt
    with torch.no_grad():
        drafts = made.draft(module, lesson, Teacher(tiny.adapter), 4, view).tolist()
        whole = made.draft(module, lesson, Teacher(tiny.adapter), 4, "all").tolist()
    drafter = drafter_of(tiny, DraftEagle(visual=view, top_k=1, depth=4, nodes=5), module)
    prompt = lesson.layout.select(torch.arange(n))
    drafter.prefill(Read([1] * n, prompt, lesson.embeds[:n], lesson.features[:n]))
    found = list(drafter.propose(int(lesson.answer[0]), Budget(5, 4)).tokens[1:])
    assert found == drafts[0]
    assert (drafts == whole) is (view == "all")


def test_drafted_rows_attend_to_earlier_true_rows() -> None:
    """Against a full mask, built row by row."""
    torch.manual_seed(0)
    rows, first, count, steps = 9, 4, 5, 3
    attend = Drafting(first)
    made = [torch.randn(3, 1, 2, rows if not s else count - s, 8) for s in range(steps)]
    outputs = [attend(*qkv) for qkv in made]
    where = [(0, r) for r in range(rows)]
    where += [(s, first + i) for s in range(1, steps) for i in range(count - s)]
    seen = torch.tensor(
        [
            [(s2 == 0 and p2 <= p) or (s > 0 and 0 < s2 <= s and p2 == p) for s2, p2 in where]
            for s, p in where
        ]
    )
    q, k, v = torch.cat(made, dim=3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    terms = 8 + len(seen)  # per logit, and per row
    close(torch.cat(outputs, dim=2), want, terms=terms)
    seen[-1, first + 2] ^= True
    other = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    apart(torch.cat(outputs, dim=2), other, terms=terms)


@pytest.mark.parametrize(
    ("drafted", "rounds", "total"),
    [
        # The answer is 5 6 7 8 9; rows follow 5, 6, 7 and 8.
        ([[6, 7], [0, 0], [0, 0], [9, 0]], 2, 3),  # 6 7, then 8 comes; 9
        ([[0, 7], [7, 8], [0, 0], [0, 0]], 2, 2),  # none, 6 comes; 7 8, 9 comes
        ([[0, 0], [0, 8], [0, 0], [0, 0]], 4, 0),  # tokens after a wrong one do not count
        ([[6, 7], [0, 0], [0, 0], [9, 9]], 2, 3),  # no token follows the end
    ],
)
def test_accepted_counts(drafted, rounds: int, total: int) -> None:
    answer = torch.tensor([5, 6, 7, 8, 9])
    assert accepted(torch.tensor(drafted), answer) == (rounds, total)


# --- losses --------------------------------------------------------------------------------------


def test_perfect_drafter_has_zero_feature_loss(tiny: VLM, lesson) -> None:
    made, module = training(tiny, "--kind", "eagle", "--noise", "0", "--ttt", "1", "--soft", "0")
    target = Teacher(tiny.adapter)
    n = lesson.prompt

    def loss() -> float:
        return float(made.learn(module, lesson, target, random.Random(0), 0.0)[0].detach())

    first = loss()
    right = torch.zeros(1, len(lesson.embeds) - 2, 256)
    right[0, -(len(lesson.answer) - 1) :] = lesson.features[n:-1]
    module.run = lambda rows, position, attend: right
    assert loss() == 0 < first
    module.run = lambda rows, position, attend: right.roll(1, 1)
    assert loss() > 0


def test_forward_passes_read_previous_drafts(tiny: VLM, lesson) -> None:
    """Gradients of the second forward pass alone reach the outputs of the first."""
    made, module = training(tiny, "--kind", "eagle", "--ttt", "2")
    known = made.known(module, lesson, lesson.features, "all")
    n = lesson.prompt
    steps = list(unroll(module, known, 3, lambda s, _: lesson.embeds[n + s : -1]))
    assert [len(step) for step in steps] == [len(lesson.answer) - k for k in (1, 2, 3)]
    grad = torch.autograd.grad(steps[1].sum(), steps[0])[0]
    assert bool((grad[:-1].abs().sum(-1) > 0).all()) and float(grad[-1].abs().sum()) == 0


def test_eagle3_learns_its_own_vocabulary(tiny: VLM, lesson) -> None:
    made, module = training(tiny, "--kind", "eagle3", "--draft-vocabulary", "20")
    answer_ids = [7, 300] * 30 + list(range(100, 118)) * 2 + [50]
    made.begin(module, lambda number: [9, *answer_ids])
    assert module.vocabulary().tolist() == [7, *range(100, 118), 300]
    student = torch.randn(2, 20)
    teacher = torch.zeros(2, 512)
    teacher[0, 50], teacher[1, 300] = 9, 9  # the first is not in the drafter's vocabulary
    both, _ = made.pass_loss(module, None, student, None, teacher)
    one, _ = made.pass_loss(module, None, student[1:], None, teacher[1:])
    close(both, one, terms=20 + 20)  # both distributions


def test_compressor_and_gate_are_trained(tiny: VLM, lesson) -> None:
    made, module = training(tiny, "--compressor", "--gate-from", "0.5")
    target = Teacher(tiny.adapter)
    module.compressor.gate.outer.weight.data.normal_()

    def learned(seed: int, progress: float) -> set[str]:
        module.zero_grad()
        made.learn(module, lesson, target, random.Random(seed), progress)[0].backward()
        grads = {k: p.grad for k, p in module.compressor.named_parameters() if p.grad is not None}
        return {key.partition(".")[0] for key, grad in grads.items() if float(grad.abs().sum())}

    late = set().union(*(learned(seed, 0.9) for seed in range(4)))
    assert late == {"conv", "resample", "gate"}
    early = [learned(seed, 0.1) for seed in range(8)]
    assert set() in early and {"conv"} in early  # one variant per step


# --- training loop -------------------------------------------------------------------------------


def state(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    return trainer.module.state_dict()


def same(a: DrafterTrainer, b: DrafterTrainer) -> bool:
    return all(torch.equal(value, state(b)[key]) for key, value in state(a).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--compressor", "--gate-from", "0.3"),
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in KINDS[1:]),
    ],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, flags) -> None:
    def trainer(folder: str, *more: str) -> DrafterTrainer:
        return DrafterTrainer(
            arguments(tmp_path / folder, "--sampled", "0.5", "--eval-every", "1", *flags, *more)
        )

    flags = (*flags, "--steps", "2")
    whole = trainer("a")
    whole.train()
    trainer("b", "--stop-after", "1").train()
    rest = trainer("b")
    assert rest.step == 1 and not same(rest, whole)
    rest.train()
    assert same(rest, whole)
    lines = [(tmp_path / f / "log.jsonl").read_text().splitlines() for f in "ab"]
    noted = [[json.loads(x)["accepted"] for x in records if "accepted" in x] for records in lines]
    assert noted[0] == noted[1] and len(noted[0]) == 2
    with pytest.raises(TrainingError, match=r"ttt=.*--fresh"):
        trainer("b", "--ttt", "1")


@pytest.mark.slow
def test_training_lowers_the_loss_and_freezes_the_target(tmp_path) -> None:
    flags = ("--steps", "8", "--lr", "3e-3", "--noise", "0")
    trainer = DrafterTrainer(arguments(tmp_path, *flags))
    before = {k: v.clone() for k, v in trainer.vlm.model.state_dict().items()}

    def loss() -> float:
        return float(sum(loss.detach() for loss, _ in trainer.losses()))

    first = loss()
    trainer.train()
    after = trainer.vlm.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    trainer.step = 0
    assert loss() < 0.7 * first
    # Weights are loaded as they were written, and another training can start from them.
    sizes, signature = trainer.vlm.adapter.sizes(), trainer.vlm.adapter.signature()
    load_weights(DraftEagle(weights=str(tmp_path / "weights")), sizes, signature)
    init = ("--init", str(tmp_path / "weights"))
    other = DrafterTrainer(arguments(tmp_path / "vispec", "--kind", "vispec", *init))
    key = "layer.mlp.up_proj.weight"
    # They are stored in bfloat16.
    assert torch.equal(state(other)[key], state(trainer)[key].bfloat16().float())
    with pytest.raises(TrainingError, match="contains another drafter"):
        DrafterTrainer(arguments(tmp_path / "three", "--kind", "eagle3", *init))
    # ViSpec has no compressor, which those of eagle may have.
    init = ("--init", str(SHIPPED / "tiny-draft-eagle"))
    other = DrafterTrainer(arguments(tmp_path / "shipped", "--kind", "vispec", *init))
    shipped = load_weights(DraftEagle(), sizes, signature)
    assert torch.equal(state(other)[key], shipped.state_dict()[key])
    assert any(name.startswith("compressor.") for name in shipped.state_dict())


def test_epochs_contain_each_sample_once(tmp_path) -> None:
    trainer = DrafterTrainer(arguments(tmp_path, "--samples", "9"))
    epochs = [[trainer.number(e * 9 + i) for i in range(9)] for e in range(3)]
    assert epochs[0] == list(range(9)) != epochs[1] != epochs[2]
    assert all(sorted(epoch) == epochs[0] for epoch in epochs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--init", "nowhere"), "--init nowhere"),
        (("--compressor", "--queries", "0"), "--queries is 0; it must be at least 2"),
        (("--compressor", "--queries", "1"), "--queries is 1; it must be at least 2"),
        (("--kind", "eagle3", "--draft-vocabulary", "99999"), "--draft-vocabulary is 99999; .*"),
        (("--kind", "eagle3", "--draft-vocabulary", "-1"), "--draft-vocabulary is -1; it must"),
    ],
)
def test_invalid_options_raise(tmp_path, flags, message) -> None:
    with pytest.raises(VLMFastError, match=message):
        DrafterTrainer(arguments(tmp_path, *flags))


@pytest.mark.parametrize(
    "flags",
    [
        ("--samples", "0"),
        ("--held-out", "0"),
        ("--answer-tokens", "1"),
        ("--sampled", "2"),
        ("--ttt", "0"),
        ("--clip", "0"),
        ("--noise", "nan"),
    ],
)
def test_numbers_out_of_range_are_usage_errors(tmp_path, capsys, flags) -> None:
    with pytest.raises(SystemExit):
        arguments(tmp_path, *flags)
    assert f"argument {flags[0]}: " in capsys.readouterr().err


# --- shipped drafter -----------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [DraftEagle(), DraftVispec()], ids=lambda stage: stage.name)
def test_shipped_drafter_acceptance(tiny: VLM, stage) -> None:
    adapter = tiny.adapter
    module = load_weights(stage, adapter.sizes(), adapter.signature())
    flags = ["--compressor"] if module.compressor else []
    kind = "eagle" if isinstance(stage, DraftEagle) else "vispec"
    made, untrained = training(tiny, "--kind", kind, *flags)
    target, asked = Teacher(adapter), [drawn(held_out(number)) for number in range(1000, 1003)]
    lessons = [teach(tiny, own, tiny.chat(own).token_ids, [stage]) for own in asked]

    def mean(module) -> float:
        rounds = total = 0
        for lesson in lessons:
            with torch.no_grad():
                drafts = made.draft(module, lesson, target, 4, made.views()[0])
            more = accepted(drafts, lesson.answer)
            rounds, total = rounds + more[0], total + more[1]
        return total / rounds

    assert mean(module) > 1.5 > 0.3 > mean(untrained)
    assert (SHIPPED / f"tiny-{stage.name}" / "model.safetensors").stat().st_size < 4e6
