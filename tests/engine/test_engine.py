"""What the engine does between a request and its answer; `test_families` compares the logits."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from support.closeness import apart, close, network, tower
from support.engine.driven import answer_logits, harmless
from support.engine.prompts import switched
from support.engine.turns import renewed
from support.families import CASES, Rank, make_image, start, sums
from support.models import shared
from support.reference import TOKENS
from support.tiny_models import build_llava, build_llava_next
from vlmfast import VLM, RecipeError, Request
from vlmfast.core.params import positions_param
from vlmfast.core.protocols import EncodeStage, InEncoderStage, PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest

pytestmark = pytest.mark.cold

FAMILIES = {"llava": build_llava, "llava_next": build_llava_next}


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request) -> VLM:
    return shared(FAMILIES[request.param], layers=4)


@pytest.fixture(scope="module", params=[*FAMILIES, "tiny"])
def every(request) -> VLM:
    """Both families with random weights, and the shipped model, in float32."""
    if request.param == "tiny":
        return VLM.from_pretrained("tiny", device="cpu", dtype=torch.float32)
    return shared(FAMILIES[request.param], layers=4)


@dataclass(frozen=True)
class Shorten(EncodeStage):
    """Keeps every third token of each image."""

    name: ClassVar[str] = "test-shorten"
    positions: str = positions_param()

    def select_tokens(self, tokens, geometry, stats, request):
        return torch.arange(0, len(tokens), 3)


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", list(CASES)[:4])
@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "min_new_tokens": 6, "eos_token_id": [2, 17, 18, 19, 20, 21]},
    ],
    ids=["greedy", "sample", "penalties", "eos list"],
)
def test_tokens_equal_hugging_face(every, case, generation):
    tensors = every.inputs("what is here ?", **CASES[case])
    torch.manual_seed(3)
    expected = every.model.generate(**tensors, max_new_tokens=12, **generation)
    expected = expected[0, tensors["input_ids"].shape[1] :].tolist()
    torch.manual_seed(3)
    answer = every.ask("what is here ?", **CASES[case], max_new_tokens=12, **generation)
    assert answer.token_ids == expected
    assert answer.stats.visual_tokens_in == int(
        (tensors["input_ids"] == every.adapter.image_token_id).sum()
    )


def test_two_drops_at_one_layer_and_none_at_all(vlm):
    """A second stage at a layer gets the rows the first one kept; keeping all changes nothing."""
    both = start(vlm, (Rank(at=(2,)), Half()), images=[make_image(0)])
    answer_logits(vlm, both, [])
    n = both.stats.visual_tokens_in
    assert both.stats.visual_tokens_per_layer == [n, n, n // 2 // 2, n // 2 // 2]

    @dataclass(frozen=True)
    class KeepAll(PrefillStage):
        name: ClassVar[str] = "test-all"

        def layers(self, depth):
            return (1,)

        def select_tokens(self, step, layer):
            return torch.arange(len(step.layout))

    run = start(vlm, KeepAll(), images=[make_image(0)])
    expected = answer_logits(vlm, start(vlm, images=[make_image(0)]), TOKENS)
    close(answer_logits(vlm, run, TOKENS), expected, terms=sums(vlm, run))


@dataclass(frozen=True)
class Half(PrefillStage):
    name: ClassVar[str] = "test-half"

    def layers(self, depth):
        return (2,)

    def select_tokens(self, step, layer):
        visual = step.layout.visual.nonzero().flatten()
        gone = visual[len(visual) // 2 :]
        left = torch.ones(len(step.layout), dtype=torch.bool)
        left[gone] = False
        return left.nonzero().flatten()


def test_invalid_drops_and_layers_are_refused(vlm):
    @dataclass(frozen=True)
    class DropsText(PrefillStage):
        name: ClassVar[str] = "test-text"
        at: int = 1

        def layers(self, depth):
            return (self.at,)

        def select_tokens(self, step, layer):
            return torch.arange(1, len(step.layout))

    with pytest.raises(RecipeError, match="test-text must keep every text token"):
        vlm.ask("what ?", make_image(0), recipe=DropsText())
    with pytest.raises(RecipeError, match="test-text: layer 9 is out of range"):
        vlm.ask("what ?", make_image(0), recipe=DropsText(at=9))
    assert vlm.ask("what ?", make_image(0), max_new_tokens=3).token_ids  # still usable


def test_attention_without_a_step_raises(vlm):
    """A silent fallback would ignore padding; calling the function from outside is an error."""
    with switched(vlm.model), pytest.raises(RuntimeError, match="outside a vlmfast call"):
        vlm.model(**vlm.inputs("what ?", make_image(0)))


def test_stats_and_trace_are_consistent(vlm):
    answer = vlm.ask(
        "what ?", make_image(0), recipe=(Shorten(), Rank()), max_new_tokens=5, min_new_tokens=5
    )
    stats, depth = answer.stats, answer.trace.depth
    n = stats.visual_tokens_in
    kept = stats.visual_tokens_kept["test-shorten"]
    assert kept == len(range(0, n, 3))
    assert stats.visual_tokens_per_layer == [kept, kept // 2, kept // 2, kept // 2 // 2]
    assert stats.equivalent_tokens == sum(stats.visual_tokens_per_layer) / 4
    assert [int((depth > layer).sum()) for layer in range(4)] == stats.visual_tokens_per_layer
    config = vlm.model.config.text_config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4
    text = stats.prompt_tokens - kept
    assert stats.kv_bytes == per_token * (sum(stats.visual_tokens_per_layer) + 4 * text)
    assert stats.kv_bytes_full == per_token * 4 * (text + n)
    assert stats.generated_tokens == 5 == len(answer.token_ids)
    assert 0 < stats.time_prefill_s < stats.ttft_s < stats.time_total_s
    assert stats.time_draft_s == stats.time_verify_s == 0
    assert stats.tokens_per_s == 1 / stats.tpot_s
    d, m = config.hidden_size, config.intermediate_size
    assert stats.flops_prefill == sum(
        4 * k * d * d + 2 * k * k * d + 3 * k * d * m for k in stats.visual_tokens_per_layer
    )
    assert len(answer.trace.to_dict()["tokens"]) == n


def test_length_limits_and_stop_strings(vlm):
    full = vlm.ask("what ?", make_image(0), max_new_tokens=12, min_new_tokens=12)
    assert len(full.token_ids) == 12
    words = [vlm.processor.tokenizer.decode([t]) for t in full.token_ids]
    stop = next(w.strip() for w in words[2:] if w.strip())
    cut = vlm.ask("what ?", make_image(0), max_new_tokens=12, stop_strings=[stop])
    assert len(cut.token_ids) < len(full.token_ids)
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert stop in cut.text
    config = copy.deepcopy(vlm.model.generation_config)
    config.stop_strings, config.max_new_tokens = [stop], 12
    assert vlm.ask("what ?", make_image(0), generation_config=config).token_ids == cut.token_ids
    off = {"generation_config": config, "stop_strings": None}
    assert vlm.ask("what ?", make_image(0), **off).token_ids == full.token_ids
    length = vlm.inputs("what ?", make_image(0))["input_ids"].shape[1]
    assert vlm.ask("what ?", make_image(0), max_length=length + 5).token_ids == full.token_ids[:5]


@dataclass(frozen=True)
class MergePairs(InEncoderStage):
    """Merges neighbours in a row of patches, everywhere or nowhere."""

    name: ClassVar[str] = "test-pairs"
    block: int = 1
    merge: bool = True

    def blocks(self, depth):
        return (self.block,)

    def on_block(self, step, index, hidden):
        if not self.merge:
            return hidden, None
        v, n, d = hidden.shape
        pairs = hidden[:, 1:].reshape(v, n // 2, 2, d).mean(2)
        source = torch.cat([torch.zeros(1), torch.arange(n - 1) // 2 + 1]).long()
        return torch.cat([hidden[:, :1], pairs], dim=1), source.expand(v, n)


def test_merging_inside_the_tower(vlm):
    """Merged rows stay merged, keep their place in the image and count their sources."""
    run = start(vlm, MergePairs(), images=[make_image(0), make_image(1)])
    answer_logits(vlm, run, [])
    layout = run.prompt.layout.select(run.prompt.layout.patches)
    sources = run.trace.layout.patches.sum()
    assert layout.weight.sum() == sources  # letterboxed halves leave weight 1
    assert set(layout.weight.unique().tolist()) <= {1.0, 2.0}
    assert run.stats.visual_tokens_kept["test-pairs"] == len(layout) + int(
        (run.prompt.layout.kind == 3).sum()
    )
    assert (layout.grid[:, 2] % 2 == 0).sum() > 0.6 * len(layout)
    before, after = run.trace.layout.box[:16], layout.box[:8]  # the first image's first view
    assert torch.equal(after[:, 0], before[::2, 0])
    assert torch.equal(after[:, 2], before[1::2, 2])

    # The tower's arithmetic, by hand: block 0, the merge, the rest.
    encoder = vlm.model.get_encoder(modality="image")
    pixels = run.inputs.tensors["pixel_values"]
    views = pixels.flatten(0, 1) if pixels.dim() == 5 else pixels
    with torch.no_grad():
        hidden = encoder.pre_layrnorm(encoder.embeddings(views[:1]))
        blocks = encoder.encoder.layers
        hidden = blocks[0](hidden, attention_mask=None)
        hidden, _ = MergePairs().on_block(None, 1, hidden)
        for block in blocks[1:-1]:
            hidden = block(hidden, attention_mask=None)
        expected = vlm.model.base_model.multi_modal_projector(hidden[:, 1:])[0]
    first = (run.prompt.layout.view == 0).nonzero().flatten()
    close(run.prompt.embeds[first], expected, terms=tower(vlm.model))
    apart(run.prompt.embeds[first], expected.flip(0), terms=tower(vlm.model))


def test_in_encoder_stages_at_range_limits(vlm):
    run = start(vlm, MergePairs(merge=False), images=[make_image(0)])
    expected = answer_logits(vlm, start(vlm, images=[make_image(0)]), TOKENS)
    close(answer_logits(vlm, run, TOKENS), expected, terms=sums(vlm, run))
    for block in (0, 3, 9):  # the last block of the tower does not reach the projector
        with pytest.raises(RecipeError, match=f"vision block {block} is out of range"):
            vlm.ask("what ?", make_image(0), recipe=MergePairs(block))
    assert not any(block._forward_pre_hooks for block in vlm.adapter.vision_blocks())


def test_attention_can_be_requested_before_a_layer_runs(vlm):
    """Attention requested before a layer runs equals the attention when it runs."""
    seen = {}

    @dataclass(frozen=True)
    class Ahead(PrefillStage):
        name: ClassVar[str] = "test-ahead"
        drop: bool = False

        def layers(self, depth):
            return (1, 2)

        def text_stats(self, depth):
            return {1: StatRequest("last", ahead=True), 2: StatRequest("last", ahead=True)}

        def select_tokens(self, step, layer):
            seen[layer] = step.stats[layer]
            return Half().select_tokens(step, layer) if self.drop else None

    @dataclass(frozen=True)
    class After(Ahead):
        name: ClassVar[str] = "test-after"

        def layers(self, depth):
            return (2, 3)

        def text_stats(self, depth):
            return {1: StatRequest("last"), 2: StatRequest("last")}

        def select_tokens(self, step, layer):
            seen[-(layer - 1)] = step.stats[layer - 1]

    answer_logits(vlm, start(vlm, Ahead(), images=[make_image(0)]), [])
    answer_logits(vlm, start(vlm, After(), images=[make_image(0)]), [])
    for layer in (1, 2):
        close(seen[layer], seen[-layer], terms=network(vlm.model, seen[layer].shape[-1]))
    full = seen[2]
    answer_logits(vlm, start(vlm, Ahead(drop=True), images=[make_image(0)]), [])
    assert seen[2].shape[-1] < full.shape[-1]  # sees what the first drop kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES)
def test_half_precision_is_bitwise_equal(build, dtype):
    half = VLM(*build(dtype=dtype))
    tensors = half.inputs("what is here ?", make_image(0))
    expected = half.model.generate(
        **tensors, max_new_tokens=16, output_logits=True, return_dict_in_generate=True
    )
    run = start(half, images=[make_image(0)])
    tokens = expected.sequences[0, tensors["input_ids"].shape[1] :].tolist()
    got = answer_logits(half, run, tokens[:-1])
    assert torch.equal(got.float(), torch.cat(expected.logits))
    assert half.ask("what is here ?", make_image(0), max_new_tokens=16).token_ids == tokens


@dataclass(frozen=True)
class Breaks(PrefillStage):
    """Raises in the middle of a prefill."""

    name: ClassVar[str] = "test-breaks"

    def layers(self, depth):
        return (1, 2)

    def select_tokens(self, step, layer):
        if layer == 2:
            raise KeyError("in the middle")
        return Half().select_tokens(step, layer)


def test_model_is_restored_after_an_exception(vlm):
    inputs = vlm.inputs("what ?", make_image(0))
    before = vlm.model.generate(**inputs, max_new_tokens=4)
    with pytest.raises(KeyError, match="in the middle"):
        vlm.ask("what ?", make_image(0), recipe=(MergePairs(), Breaks()))
    assert vlm.model.config.text_config._attn_implementation == "sdpa"
    assert vlm.model.config.vision_config._attn_implementation == "sdpa"
    assert not any(layer._forward_pre_hooks for layer in vlm.adapter.decoder.layers)
    assert not any(block._forward_pre_hooks for block in vlm.adapter.vision_blocks())
    assert not vlm.adapter.projector()._forward_pre_hooks
    assert torch.equal(vlm.model.generate(**inputs, max_new_tokens=4), before)


def test_unsupported_stages_are_refused(vlm):
    @dataclass(frozen=True)
    class Drafts(Stage):
        name: ClassVar[str] = "test-drafts"
        protocol: ClassVar[str] = "guess"

    with pytest.raises(RecipeError, match="test-drafts is a guess stage"):
        vlm.ask("what ?", make_image(0), recipe=Drafts())


def test_text_only_prompts_pass_every_stage(vlm):
    expected = vlm.ask("what ?", max_new_tokens=5).token_ids
    recipe = (MergePairs(), Shorten(), Rank())
    assert vlm.ask("what ?", recipe=recipe, max_new_tokens=5).token_ids == expected


def test_unused_last_tower_block_is_skipped(monkeypatch):
    """LLaVA uses the last block but one; Hugging Face runs the last block too."""
    vlm = VLM(*build_llava(), prefix_cache_bytes=0)
    blocks, ran = vlm.adapter.vision_blocks(), []
    mlp = type(blocks[0].mlp)
    forward = mlp.forward
    counted = harmless(lambda own, x: ran.append(own) or forward(own, x))
    monkeypatch.setattr(mlp, "forward", counted)

    def ask() -> int:
        ran.clear()
        vlm.ask("what ?", make_image(0), max_new_tokens=1)
        return len(ran)

    assert ask() == len(blocks) - 1
    assert "forward" not in vars(blocks[-1])
    read = []
    with blocks[-1].register_forward_hook(lambda module, args, output: read.append(output)):
        assert ask() == len(blocks)
        vlm.model(**vlm.inputs("what ?", make_image(0)))
    assert torch.equal(*read) and ask() == len(blocks) - 1


def test_answers_in_inference_mode_do_not_affect_later_ones(vlm):
    with torch.inference_mode():
        inside = [vlm.ask("what ?", make_image(0), max_new_tokens=4, recipe="snapkv:window=0.1")]
        inside += vlm.ask_many([Request("what ?", make_image(0))], max_new_tokens=4)
        with vlm.session(make_image(0)) as session:
            inside.append(session.ask("what ?", max_new_tokens=4))
    outside = [vlm.ask("what ?", make_image(0), max_new_tokens=4, recipe="snapkv:window=0.1")]
    outside += vlm.ask_many([Request("what ?", make_image(0))], max_new_tokens=4)
    with vlm.session(make_image(0)) as session:
        outside.append(session.ask("what ?", max_new_tokens=4))
    assert [a.token_ids for a in inside] == [a.token_ids for a in outside]


def test_compiled_model_can_be_wrapped(vlm):
    compiled = VLM(torch.compile(vlm.model, backend="eager"), vlm.processor)
    expected = vlm.ask("what ?", make_image(0), max_new_tokens=4).token_ids
    assert compiled.ask("what ?", make_image(0), max_new_tokens=4).token_ids == expected


def test_no_argument_of_transformers_is_deprecated():
    """The decoder's cache has another name in later versions, which drop the former one."""
    vlm = renewed(shared(build_llava))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is deprecated and will be removed", FutureWarning)
        for recipe in ("none", "fastv:0.5", "zipvl", "draft-layerskip", "pyramiddrop"):
            vlm.ask("what ?", make_image(0), recipe=recipe, max_new_tokens=3, prefill_chunk_size=16)
        frames = [make_image(i) for i in range(6)]
        given = {"max_kv_tokens": 150, "max_new_tokens": 3, "progress": False}
        vlm.ask("what ?", video=frames, num_frames=6, **given)
        with vlm.session(images=make_image(0)) as session:
            session.ask("what ?", max_new_tokens=3)
