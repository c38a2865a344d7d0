"""Batched sampling gives the same tokens, bit for bit, as sampling each row alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from support.engine.commands import seeds_no_absent_gpus
from support.engine.draws import (
    Parameters,
    Sampler,
    Sampling,
    entropy,
    gumbel,
    gumbels,
    processed,
    processed_alone,
    scores_of,
    while_choosing,
)
from support.models import shared
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.errors import ModelError

pytestmark = pytest.mark.cold


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_no_absent_gpus(monkeypatch)


V = 29
PARTS = {
    "repetition_penalty": lambda value: RepetitionPenaltyLogitsProcessor(value),
    "remove_invalid": lambda value: InfNanRemoveLogitsProcessor(),
    "temperature": lambda value: TemperatureLogitsWarper(value),
    "top_k": lambda value: TopKLogitsWarper(value),
    "top_p": lambda value: TopPLogitsWarper(value),
    "min_p": lambda value: MinPLogitsWarper(value),
    "typical_p": lambda value: TypicalLogitsWarper(value),
    "normalize": lambda value: LogitNormalization(),
}


def processors(settings: dict[str, Any]) -> LogitsProcessorList:
    return LogitsProcessorList([PARTS[name](settings[name]) for name in PARTS if name in settings])


def sampler(
    settings: dict[str, Any] | LogitsProcessorList,
    prompt: list[int],
    *,
    seed: int | None = None,
    criteria: list = (),
    **config: Any,
) -> Sampler:
    own = settings if isinstance(settings, list) else processors(settings)
    config = GenerationConfig(**{"do_sample": True} | config)
    return Sampler(torch.tensor([prompt]), own, StoppingCriteriaList(criteria), config, seed)


def huggingface(rows: list[Sampler], logits: Tensor) -> list[Tensor]:
    """The scores of each row from its own processors."""
    return [
        row.processors(row.ids, scores[None].to(torch.float32, copy=True))
        for row, scores in zip(rows, logits, strict=True)
    ]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    got = [score for block in got for score in block.split(1)]
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(got, wanted, strict=True)
    )


def together(rows: list[Sampler], logits: Tensor) -> list[Tensor]:
    batch = Sampling(rows)
    scores = scores_of(batch, logits)
    assert not processed_alone(batch), "nothing was processed together"
    return scores


def logits_of(rows: int, size: int, seed: int, kind: str) -> Tensor:
    made = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4
    if kind == "ties":
        made = made.round()
    elif kind == "flat":
        made = torch.full_like(made, 1.5)
    elif kind == "infinite":
        made[:, :: 1 + seed % 3] = -math.inf
        made[:, -1] = 2.0
    return made


# --- parameters ----------------------------------------------------------------------------------

row_settings = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.3, 4.0),
        "remove_invalid": st.just(True),
        "temperature": st.floats(1e-3, 50.0),
        "top_k": st.integers(1, V + 4),
        "top_p": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0)),
        "min_p": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0)),
        "typical_p": st.floats(0.01, 0.99),
        "normalize": st.just(True),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(row_settings, min_size=1, max_size=5),
    st.integers(1, V),
    st.integers(0, 10**6),
    st.sampled_from(["random", "ties", "flat", "infinite"]),
)
def test_batched_scores_equal_hugging_face(
    chosen: list[dict], size: int, seed: int, kind: str
) -> None:
    logits = logits_of(len(chosen), size, seed, kind)
    rows = [
        sampler(settings, [(seed + i * k) % size for k in range(1 + i)])
        for i, settings in enumerate(chosen)
    ]
    before = logits.clone()
    assert same(together(rows, logits), huggingface(rows, logits))
    assert torch.equal(logits, before)


SETTINGS = {
    "repetition_penalty": 1.3,
    "temperature": 0.7,
    "top_k": 6,
    "top_p": 0.8,
    "min_p": 0.05,
    "typical_p": 0.6,
}


@pytest.mark.parametrize("size", [5003, 40_001])
def test_large_vocabularies_in_a_batch(size: int) -> None:
    """Also where PyTorch splits a long row among threads."""
    chosen = [SETTINGS, {}, {"typical_p": 0.9}, {"top_p": 0.95}, SETTINGS | {"normalize": True}]
    logits = logits_of(len(chosen), size, 3, "random")
    rows = [sampler(settings, [1, 2, 3]) for settings in chosen]
    assert same(together(rows, logits), huggingface(rows, logits))


def test_entropy_is_batch_invariant() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        normalized = logits_of(32, 70_001, 1, "infinite").log_softmax(-1)
        terms = normalized * normalized.exp()
        wanted = torch.cat([-row[None].nansum(-1, keepdim=True) for row in terms])
        assert torch.equal(entropy(normalized), wanted)
        # The control: the last bits of a sum depend on the order of its terms.
        assert not torch.equal(-terms.flip(-1).nansum(-1, keepdim=True), wanted)
    finally:
        torch.set_num_threads(before)


def test_scores_are_float32_for_any_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        logits = logits_of(2, V, 5, "random").to(dtype)
        rows = [sampler(SETTINGS, [1, 2]), sampler({}, [3])]
        assert same(together(rows, logits), huggingface(rows, logits))


def test_division_on_gpu_uses_the_reciprocal(monkeypatch) -> None:
    """As PyTorch does on a GPU when a tensor is divided by a Python number."""

    class Cuda:
        type = "cuda"

    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    rows = [Parameters(temperature=0.7, repetition_penalty=1.3)]
    logits = logits_of(1, 5003, 0, "random")
    seen = torch.ones(1, 5003, dtype=torch.bool)
    one, other = (1 / torch.tensor(number) for number in (1.3, 0.7))
    wanted = torch.where(logits < 0, logits * 1.3, logits * one) * other
    assert torch.equal(processed(rows, logits, seen, Cuda()), wanted)
    divided = torch.where(logits < 0, logits * 1.3, logits / 1.3) / 0.7
    assert not torch.equal(wanted, divided)


class Own(LogitsProcessor):
    """A user-defined processor that modifies its input in place."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        scores[:, int(ids[0, -1])] = -math.inf
        return scores


class Cooler(TemperatureLogitsWarper):
    pass


UNKNOWN = {
    "a processor of another kind": [NoRepeatNGramLogitsProcessor(2)],
    "a warper of another kind": [EpsilonLogitsWarper(1e-3)],
    "another order": [TopKLogitsWarper(4), TemperatureLogitsWarper(0.5)],
    "twice": [TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)],
    "a class derived from a known one": [Cooler(0.5)],
    "another filter value": [TopKLogitsWarper(4, filter_value=-1e3)],
    "tokens that are kept": [TopPLogitsWarper(0.1, min_tokens_to_keep=3)],
    "a user's own": [Own(), TemperatureLogitsWarper(0.5)],
    "more ids ignored than the prompt has": [RepetitionPenaltyLogitsProcessor(2.0, 9)],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_custom_processors_run_per_row(name: str) -> None:
    logits = logits_of(3, V, 2, "random")
    chosen = [SETTINGS, LogitsProcessorList(UNKNOWN[name]), {"top_k": 3}]
    rows = [sampler(settings, [4, 9, 4]) for settings in chosen]
    wanted = huggingface(rows, logits)
    batch = Sampling(rows)
    before = logits.clone()
    assert same(scores_of(batch, logits), wanted)
    assert processed_alone(batch) == [1]
    assert torch.equal(logits, before)
    assert not torch.equal(wanted[1][0], logits[1]) or name.startswith("more ids")


def test_top_k_respects_min_tokens_to_keep() -> None:
    logits = logits_of(1, V, 2, "random")
    row = sampler(LogitsProcessorList([TopKLogitsWarper(2, min_tokens_to_keep=5)]), [1])
    got = together([row], logits)
    assert same(got, huggingface([row], logits)) and int(got[0].isfinite().sum()) == 5


def test_processor_that_changes_the_dtype() -> None:
    """Its row cannot be stored in one tensor with the others, which must not change."""

    class Double(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores.double()

    logits = logits_of(3, V, 2, "random")
    rows = [
        sampler(settings, [1], output_scores=True)
        for settings in ({"temperature": 0.3}, LogitsProcessorList([Double()]), {})
    ]
    wanted = huggingface(rows, logits)
    torch.manual_seed(5)
    Sampling(rows).take(logits)
    assert [row.scores[0].dtype for row in rows] == [torch.float32, torch.float64, torch.float32]
    torch.manual_seed(5)
    drawn = [int(torch.multinomial(scores.softmax(-1), 1)) for scores in wanted]
    assert [row.tokens for row in rows] == [[token] for token in drawn]


# --- tokens that a repetition penalty counts -----------------------------------------------------


@pytest.mark.parametrize(
    "ignored", [None, 0, 2, torch.tensor([0]), torch.tensor([2]), torch.tensor([3])], ids=str
)
def test_repetition_penalty_counts_prompt_and_answer(ignored: Any) -> None:
    """Prompt and answer, in batches of changing rows."""
    if isinstance(ignored, Tensor):
        try:
            RepetitionPenaltyLogitsProcessor(1.5, ignored)
        except ValueError:
            pytest.skip("this release of transformers takes a number only")

    def row(prompt: list[int], **settings: Any) -> Sampler:
        penalty = RepetitionPenaltyLogitsProcessor(1.5, ignored)
        return sampler(LogitsProcessorList([penalty]), prompt, do_sample=False, **settings)

    rows = [row([1, 2, 3]), sampler({}, [7], do_sample=False), row([4, 4, 28]), row([0, 5, 6])]
    companies = [[0], [0, 1, 2], [0, 1, 2], [3, 1, 2], [2], [3, 2, 0], [3, 2, 0], [2, 0, 1, 3]]
    batch, alone = Sampling([]), Sampling([rows[2]])
    for step, company in enumerate(companies):
        if company == companies[step - 1]:  # a row that sampled a token outside the batch meanwhile
            alone.take(logits_of(1, V, step + 50, "random"))
        now = [rows[number] for number in company]
        logits = logits_of(len(now), V, step, "random")
        wanted = huggingface(now, logits)
        batch = batch.of(now)
        assert same(scores_of(batch, logits), wanted)
        batch.take(logits)
        assert [r.tokens[-1] for r in now] == [int(score.argmax()) for score in wanted]
    assert [len(r.tokens) for r in rows] == [6, 4, 9, 4]
    assert rows[0].ids[0].tolist() == [1, 2, 3, *rows[0].tokens]
    # The control: a sampled token affects later scores.
    alone = Sampling([row([1, 2, 3])])
    alone.take(logits_of(1, V, 0, "random"))
    logits = logits_of(1, V, 0, "random")
    assert not same(scores_of(alone, logits), huggingface([row([1, 2, 3])], logits))


@pytest.mark.parametrize("outside", [V, V + 100])
def test_ids_outside_the_vocabulary(outside: int) -> None:
    """As in Hugging Face: ignored or rejected, depending on the release."""
    logits = logits_of(2, V, 2, "random")
    rows = [sampler({"repetition_penalty": 1.5}, [1, outside, 2]), sampler(SETTINGS, [1])]
    try:
        wanted = huggingface(rows, logits)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            Sampling(rows).take(logits)
        return
    for _ in range(2):
        batch = Sampling(rows)
        assert same(scores_of(batch, logits), wanted)
        assert processed_alone(batch) == [0]


# --- tokens --------------------------------------------------------------------------------------


def one_by_one(rows: list[Sampler], logits: Tensor) -> list[int]:
    """Tokens sampled row by row as in Hugging Face's loop, or by the seed."""
    taken = []
    for row, scores in zip(rows, huggingface(rows, logits), strict=True):
        if row.sampled and row.seed is None:
            taken.append(int(torch.multinomial(scores.softmax(-1), 1)))
        elif row.sampled:
            taken.append(
                int((scores + gumbel(row.seed, row.ids.shape[1], scores.shape[1])).argmax())
            )
        else:
            taken.append(int(scores.argmax()))
    return taken


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(row_settings, st.sampled_from(["greedy", "drawn", "seeded"])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([7, V, 1009]),
    st.integers(0, 10**6),
)
def test_batched_tokens_equal_single_rows(chosen: list[tuple], size: int, seed: int) -> None:
    """The state of torch's generator is the same afterwards."""
    rows = [
        sampler(
            settings,
            list(range(1 + number)),
            do_sample=way != "greedy",
            seed=seed * number if way == "seeded" else None,
        )
        for number, (settings, way) in enumerate(chosen)
    ]
    for step in range(2):
        logits = logits_of(len(rows), size, seed + step, "random")
        torch.manual_seed(seed)
        wanted = one_by_one(rows, logits)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        got = Sampling(rows).take(logits)
        assert torch.equal(torch.get_rng_state(), after)
        assert got.tolist() == wanted == [row.tokens[-1] for row in rows]


def test_batched_noise_equals_single_rows() -> None:
    for size in (1, 7, 261, 5003, 40_001):
        seeds = [-5, 0, 2**63, 10**30, 17]
        positions = [0, 4, 4, 2**20, 1]
        wanted = torch.stack(
            [gumbel(seed, position, size) for seed, position in zip(seeds, positions, strict=True)]
        )
        assert torch.equal(gumbels(seeds, positions, size), wanted)
        assert not torch.equal(gumbels(seeds, positions[::-1], size), wanted)


def test_scores_are_stored_on_request() -> None:
    """As copies: a captured step overwrites its logits."""
    logits = logits_of(3, V, 4, "random")
    rows = [
        sampler(SETTINGS, [1], output_scores=True, return_dict_in_generate=True),
        sampler(SETTINGS, [1]),
        sampler({}, [1], output_logits=True, return_dict_in_generate=True),
    ]
    wanted, raw = huggingface(rows, logits), logits.clone()
    Sampling(rows).take(logits)
    logits.zero_()
    assert [len(row.scores) for row in rows] == [1, 0, 0]
    assert [len(row.raw) for row in rows] == [0, 0, 1]
    assert same(rows[0].scores, wanted[:1]) and torch.equal(rows[2].raw[0], raw[2:])


# --- stopping ------------------------------------------------------------------------------------


class Counts(StoppingCriteria):
    """Records its inputs and stops after a number of calls."""

    def __init__(self, after: int = 99) -> None:
        self.shown: list[tuple] = []
        self.after = after

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append((input_ids[0].tolist(), [score.clone() for score in scores]))
        return torch.tensor([len(self.shown) >= self.after])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.integers(1, 12),
    st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    st.integers(1, 9),
)
def test_stopping_criteria_equal_hugging_face(
    tokens: list[int], longest: int, ends: list[int] | None, after: int
) -> None:
    def criteria() -> StoppingCriteriaList:
        eos = [] if ends is None else [EosTokenCriteria(torch.tensor(ends))]
        return StoppingCriteriaList([MaxLengthCriteria(longest), *eos, Counts(after)])

    own, asked = criteria(), criteria()
    row = sampler({}, [1, 2], criteria=own, do_sample=False)
    for token in tokens:
        logits = torch.zeros(1, 10)
        logits[0, token] = 1.0
        Sampling([row]).take(logits)
        wanted = bool(asked(row.ids, (logits,)).all())
        assert row.is_done() == wanted
        if wanted:
            break
    assert str(own[-1].shown) == str(asked[-1].shown)


def test_max_time_stops() -> None:
    late, early = MaxTimeCriteria(1e-9, 0.0), MaxTimeCriteria(1e9)
    for criterion, wanted in ((late, True), (early, False)):
        row = sampler({}, [1], criteria=[criterion])
        row.tokens.append(1)
        assert row.is_done() == wanted == bool(criterion(row.ids, None))


def test_exceeding_max_positions_warns(monkeypatch) -> None:
    warned = []
    monkeypatch.setattr(
        "transformers.generation.stopping_criteria.logger.warning_once", warned.append
    )
    row = sampler({}, [1, 2], criteria=[MaxLengthCriteria(9, max_position_embeddings=3)])
    for expected in (0, 1):
        row.tokens.append(1)
        assert not row.is_done() and len(warned) == expected


# --- reads from the device -----------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Counts operations that synchronize with the device."""

    WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__")
    WAITS += ("__float__", "__index__", "__iter__", "unique", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.WAITS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Passes(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def reads_of_a_step(vlm: VLM, rows: int, monkeypatch, **generation: Any) -> list[list[str]]:
    """Device reads of every step while it samples tokens, as long as all rows are active."""
    steps = while_choosing(monkeypatch, Reads)
    requests = [Request(f"what is {number} ?", make_image(seed=number)) for number in range(rows)]
    vlm.ask_many(requests, batch_size=rows, **{"max_new_tokens": 6} | generation)
    return [reads.seen for going_on, reads in steps if going_on == rows]


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return shared(build_llava)


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.2, "max_time": 1e6},
        {"do_sample": True, "seed": 4, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
        {"do_sample": True, "min_p": 0.1, "typical_p": 0.9},
    ],
    ids=["greedy", "penalty", "seeded", "drawn"],
)
def test_one_device_read_per_step(vlm: VLM, monkeypatch, generation: dict) -> None:
    steps = reads_of_a_step(vlm, 8, monkeypatch, **generation)
    assert len(steps) >= 3 and all(step == ["tolist"] for step in steps)


def test_custom_criterion_is_read_per_row(vlm: VLM, monkeypatch) -> None:
    """The control: further reads are counted."""
    steps = reads_of_a_step(vlm, 8, monkeypatch, stopping_criteria=[Passes()])
    assert len(steps) >= 3 and all(len(step) == 9 for step in steps)


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_end_their_row_alone(bad: float) -> None:
    """Rows in one batch draw the same tokens, whatever the scores of the others are."""
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    seeds, wrong = (None, None, 7, None), logits.clone()
    wrong[1] = bad
    if bad is torch.nan:
        wrong[2, 3] = bad
    kept = []
    for scores in (logits, wrong):
        rows = [sampler({}, [1], seed=seed) for seed in seeds]
        torch.manual_seed(1)
        Sampling(rows).take(scores)
        kept.append(rows)
    fine, found = kept
    failed = {1, 2} if bad is torch.nan else {1}
    for number, row in enumerate(found):
        assert (row.error is not None) == (number in failed)
        if number not in failed:
            assert row.tokens == fine[number].tokens
    assert isinstance(found[1].error, ModelError) and "not finite" in str(found[1].error)
    assert not any(row.error for row in fine)


def test_sampling_from_weights_that_are_nan_is_one_error() -> None:
    vlm = VLM.from_pretrained("tiny", device="cpu", dtype="float32")
    image = make_image(32, 32)
    before = vlm.ask("What is here?", images=image, do_sample=True, seed=1, max_new_tokens=3)
    head = vlm.model.get_output_embeddings().weight
    with torch.no_grad():
        kept = head[5].clone()
        head[5] = torch.nan
        for seed in (None, 1):
            with pytest.raises(ModelError, match="none can be sampled"):
                vlm.ask("What is here?", images=image, do_sample=True, seed=seed)
        head[5] = kept
    after = vlm.ask("What is here?", images=image, do_sample=True, seed=1, max_new_tokens=3)
    assert after.token_ids == before.token_ids
