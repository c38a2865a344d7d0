"""Every family against Hugging Face, and against a dense reference that drops nothing and masks.

The reference takes the decoder inputs of Hugging Face's own forward (embeddings, rotary ids,
deepstack features) and runs the decoder's layers over prompt and answer in one forward pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import pytest
import torch

import vlmfast
from support import closeness, tiny_families
from support.engine.driven import Driven, answer_logits, entered
from support.engine.prompts import Inputs, switched
from support.engine.storage import compressed, storage_of
from support.families import BUILD, CASES, Rank, built, start, sums
from support.paths import ROOT
from support.reference import TOKENS, Dense
from vlmfast import VLM, ModelError, RecipeError, VLMFastError
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage, EncodeStage, InEncoderStage, PrefillStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ColumnRequest, StatRequest
from vlmfast.core.tree import Tree
from vlmfast.models import families
from vlmfast.testing import check_family
from vlmfast.train.stages import run as train

PROTOCOLS = ("none", "encode", "prefill", "cache", "draft")
MEASURED: dict[tuple[str, str], float] = {}
DOCS = ROOT / "docs" / "results" / "families.md"


PICTURED = [
    "three images",
    "a video",
    pytest.param("one image", marks=pytest.mark.slow),
    pytest.param("an image and a video", marks=pytest.mark.slow),
]


# Families compared with the dense reference in every run. The kit checks all of them; the others
# share most of their code with one of these.
FIRST = (*tiny_families.FIRST, "lfm2_vl")
APART = ("smolvlm", "glm4v", "glm4v_moe")  # images or videos, not both in one prompt
NOT_RUN = {
    **{name: {"equality: an image and a video"} for name in APART},
    # Its processor needs an image, and tokenizes the whole prompt at once.
    "paligemma": {"equality: no image", "session: three images", "session: a video"},
}


EACH = [pytest.param(n, marks=[] if n in FIRST else pytest.mark.slow) for n in BUILD]


@pytest.fixture(scope="module", params=EACH)
def vlm(request) -> VLM:
    return built(request.param)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", BUILD)
def test_families_pass_the_kit(name):
    report = check_family(*BUILD[name]())
    assert report.of == name and report.names(ran=False) == NOT_RUN.get(name, set())


def served(vlm: VLM, case: str) -> str:
    """``case``, or its replacement in a family that does not support it."""
    refused = NOT_RUN.get(vlm.adapter.config.model_type, ())
    others = {"an image and a video": "a video", "no image": "one image"}
    return others[case] if f"equality: {case}" in refused else case


@lru_cache(maxsize=len(CASES))  # of one family at a time
def dense_of(vlm: VLM, case: str) -> Dense:
    return Dense(vlm, start(vlm, **CASES[case]).inputs.tensors)


@lru_cache(maxsize=len(CASES))
def undropped(vlm: VLM, case: str) -> torch.Tensor:
    """Logits while nothing is dropped, after the prompt and `TOKENS`."""
    return dense_of(vlm, case)()


# --- equality ----------------------------------------------------------------------------------


def equal(vlm: VLM, run: Driven, protocol: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equality within float tolerance; the largest difference goes to the table in the docs, as a
    fraction of the largest logit."""
    difference = closeness.close(got, expected, terms=sums(vlm, run)) / float(expected.abs().max())
    key = vlm.adapter.config.model_type, protocol
    MEASURED[key] = max(MEASURED.get(key, 0.0), difference)


def close(
    vlm: VLM,
    run: Driven,
    protocol: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    control: torch.Tensor,
) -> None:
    equal(vlm, run, protocol, got, expected)
    # Control: dropping nothing differs.
    closeness.apart(got, control, terms=sums(vlm, run))


# --- nothing dropped -----------------------------------------------------------------------------


@pytest.mark.cases(12)
@pytest.mark.parametrize("case", CASES)
def test_none_equals_hugging_face(vlm, case):
    case = served(vlm, case)
    run = start(vlm, **CASES[case])
    tensors = run.inputs.tensors
    expected = vlm.model.generate(
        **tensors,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = expected.sequences[0, tensors["input_ids"].shape[1] :].tolist()
    got = answer_logits(vlm, run, tokens[:-1])
    equal(vlm, run, "none", got, torch.cat(expected.logits))
    # Control: other tokens change the logits far beyond the tolerance.
    control = answer_logits(vlm, start(vlm, **CASES[case]), TOKENS[:5])
    closeness.apart(got[1:], control[1:], terms=sums(vlm, run))
    answer = vlm.ask("what is here ?", **CASES[case], max_new_tokens=6, do_sample=False)
    assert answer.token_ids == tokens
    visual = vlm.adapter.visual(tensors["input_ids"])
    assert answer.stats.visual_tokens_in == int(visual.sum())
    assert bool(visual.any()) == (case != "no image")
    # The reference of the tests below agrees.
    closeness.close(dense_of(vlm, case)(tokens=tokens[:-1]), got, terms=sums(vlm, run))


def test_layout_locates_the_tokens(vlm):
    case = served(vlm, "an image and a video")
    run = start(vlm, **CASES[case])
    answer_logits(vlm, run, [])
    layout = run.prompt.layout.select(run.prompt.layout.patches)
    images = layout.select(layout.kind == 1)
    assert images.item.unique().tolist() == ([0] if case == "an image and a video" else [])
    assert layout.select(layout.kind == 2).item.min() == len(images.item.unique())
    assert layout.item.diff().min() >= 0  # items are in the order of the prompt
    box = layout.box
    assert bool((box[:, :2] < box[:, 2:]).all()) and box.min() >= 0 and box.max() <= 1
    for item in layout.item.unique():
        for tile in layout.select(layout.item == item).tile.unique():
            of = layout.select((layout.item == item) & (layout.tile == tile))
            assert len(of.grid[:, 1:].unique(dim=0)) == len(of)  # one token at each grid position


# --- one method of each protocol ------------------------------------------------------------------


def layers_of(vlm: VLM) -> tuple[int, int]:
    """Two layers before which this model may drop, by the attention of those before them."""
    first = max(vlm.adapter.min_drop_layer, 1)
    return next(at for at in (first, 2) if at - 1 not in vlm.adapter.state_layers), 3


@pytest.mark.cases(18)
@pytest.mark.parametrize("case", PICTURED)
@pytest.mark.parametrize("policy", ["keep", "compact"])
@pytest.mark.parametrize(
    "method", ["random", "hired", pytest.param("grid", marks=pytest.mark.slow)]
)
def test_encode_stages_equal_the_dense_reference(vlm, case, policy, method):
    case = served(vlm, case)
    run = start(vlm, f"{method}:keep=0.4,positions={policy}", **CASES[case])
    got = answer_logits(vlm, run, TOKENS)
    alive = entered(run)
    assert int((~alive[0]).sum()) > 1
    expected = dense_of(vlm, case)(alive, numbered=alive if policy == "compact" else None)
    close(vlm, run, "encode", got, expected, undropped(vlm, case))


@pytest.mark.cases(24)
@pytest.mark.parametrize("case", PICTURED)
@pytest.mark.parametrize("policy", ["keep", "compact"])
@pytest.mark.parametrize("method", ["rank", "fastv", "random+rank"])
def test_prefill_stages_equal_the_dense_reference(vlm, case, policy, method):
    case = served(vlm, case)
    first, second = layers_of(vlm)
    at = 2  # a layer with attention in every family
    recipe = {
        "rank": Rank((first, second), policy),
        "fastv": f"fastv:0.4,k={at},positions={policy}",
        "random+rank": Recipe.of("random:0.6") + Rank((first, second), policy),
    }[method]
    run = start(vlm, recipe, **CASES[case])
    got = answer_logits(vlm, run, TOKENS)
    alive = entered(run)
    rows = [int(of.sum()) + len(TOKENS) for of in alive]
    states = vlm.adapter.state_layers
    assert run.cache.lengths() == [0 if i in states else n for i, n in enumerate(rows)]
    assert rows[0] >= rows[first] >= rows[second] < rows[0]
    numbered = None
    if policy == "compact":
        drop = at if method == "fastv" else first
        # Random keeps its ids; a layer is renumbered by the drops at it and before it.
        numbered = [None if layer < drop else alive[layer] for layer in range(len(alive))]
    expected = dense_of(vlm, case)(alive, numbered=numbered)
    close(vlm, run, "prefill", got, expected, undropped(vlm, case))


def readable(stored: list[KV | None], size: int) -> list[torch.Tensor]:
    """By layer the slots that cache stages keep, bool (H, S)."""
    masks = []
    for kv in stored:
        if kv is None:  # a state keeps everything
            masks.append(torch.ones(1, size, dtype=torch.bool))
            continue
        masks.append(torch.zeros(len(kv.order), size, dtype=torch.bool))
        for head, (order, n) in enumerate(zip(kv.order, kv.lengths, strict=True)):
            masks[-1][head, order[:n]] = True
    return masks


@pytest.mark.cases(11)
@pytest.mark.parametrize("case", PICTURED)
def test_cache_stages_equal_the_dense_reference(vlm, case):
    case = served(vlm, case)
    run = start(vlm, "snapkv:keep=0.5,window=4", **CASES[case])
    with compressed() as kept:
        got = answer_logits(vlm, run, TOKENS)
    dense = dense_of(vlm, case)
    read = readable(storage_of(run, kept), dense.size)
    assert 0 < read[1].sum() < 0.7 * read[1].numel()
    assert any(bool((of[0] != of[-1]).any()) for of in read)  # heads differ
    close(vlm, run, "cache", got, dense(read=read), undropped(vlm, case))


@pytest.mark.cases(12)
@pytest.mark.parametrize("case", ["no image", *PICTURED])
def test_tree_logits_equal_the_dense_reference(vlm, case):
    """Checking a tree equals decoding each of its paths alone."""
    if vlm.adapter.state_layers:
        pytest.skip("states cannot be rolled back, so drafts are refused")
    case = served(vlm, case)
    recipe = () if case == "no image" else Rank(layers_of(vlm))
    run = start(vlm, recipe, **CASES[case])
    wrong = [token + 1 for token in TOKENS]
    tree = Tree.of_paths(TOKENS[0], [TOKENS[1:5], [TOKENS[1], *wrong[2:4]], wrong[1:3]])
    paths = [tree.path(node) for node in range(len(tree)) if not tree.children[node]]
    taken = [tree.tokens[node] for node in paths[-1][:2]]
    with torch.no_grad(), switched(vlm.model):
        first = run.start(20)
        run.decoder.run_decode_stages()
        logits = run.decoder.verify([tree]).logits[0]
        # The accepted part of a path stays, and decoding continues after it.
        run.decoder.accept([paths[-1][:2]])
        rows = [run.next(torch.tensor([[token]])) for token in wrong[5:]]
    dense = dense_of(vlm, case)
    alive = dense.everything() if case == "no image" else entered(run)
    assert len(paths) == 3
    for path in paths:
        expected = dense(alive, [tree.tokens[node] for node in path])
        equal(vlm, run, "draft", first, expected[:1])
        equal(vlm, run, "draft", logits[path], expected[1:])
    # Control: where two paths diverge, their logits are far apart.
    closeness.apart(logits[paths[0][2]], logits[paths[1][2]], terms=sums(vlm, run))
    expected = dense(alive, taken + wrong[5:])
    equal(vlm, run, "draft", torch.cat(rows), expected[-len(rows) :])


def test_table_in_the_docs_is_complete():
    """``VLMFAST_WRITE_TABLE=1`` and a run of this whole file rewrite it."""
    rows = [
        f"| `{name}` | "
        + " | ".join(f"{x:.1e}" if (x := MEASURED.get((name, of))) else "–" for of in PROTOCOLS)
        + " |"
        for name in sorted(BUILD)
    ]
    refused = {(name, "draft") for name in tiny_families.STATES}
    head = ["| `model_type` | " + " | ".join(PROTOCOLS) + " |", "|---" * 6 + "|"]
    text = DOCS.read_text()
    before, _, rest = text.partition("<!-- equality -->\n")
    table, _, after = rest.partition("<!-- end -->")
    if os.environ.get("VLMFAST_WRITE_TABLE"):
        assert len(MEASURED) == len(BUILD) * len(PROTOCOLS) - len(refused)
        table = "\n".join([*head, *rows]) + "\n"
        DOCS.write_text(f"{before}<!-- equality -->\n{table}<!-- end -->{after}")
    written = {
        cells[0].strip(" `"): [cell.strip() for cell in cells[1:]]
        for cells in (line.strip("| ").split("|") for line in table.splitlines()[2:])
    }
    assert set(written) == set(BUILD)
    # The numbers on the page; they were checked against their tolerances when measured.
    for name, row in written.items():
        for protocol, of in zip(PROTOCOLS, row, strict=True):
            assert of == "–" if (name, protocol) in refused else 0 < float(of) < 1e-5


# --- specific to a family -------------------------------------------------------------------------


def test_deepstack_features_are_dropped_with_their_tokens():
    vlm = built("qwen3_vl")
    run = start(vlm, "random:0.4", **CASES["one image"])
    answer_logits(vlm, run, [])
    prompt, full = run.prompt, start(vlm, **CASES["one image"])
    answer_logits(vlm, full, [])
    kept = torch.isin(full.prompt.layout.order, prompt.layout.order[prompt.layout.visual])
    kept = kept[full.prompt.layout.visual]
    assert len(prompt.extra) == 2 and 0 < int(kept.sum()) < len(kept)
    for cut, whole in zip(prompt.extra, full.prompt.extra, strict=True):
        assert torch.equal(cut, whole[kept])
    with pytest.raises(RecipeError, match="layer 1 is out of range, this model can drop before"):
        answer_logits(vlm, start(vlm, "fastv:k=1", **CASES["one image"]), [])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llava_next"])
def test_statistics_equal_eager_attention(name):
    seen = {}

    @dataclass(frozen=True)
    class Look(PrefillStage):
        name: ClassVar[str] = "test-look"

        def layers(self, depth):
            return (3,)

        def text_stats(self, depth):
            rows = StatRequest("last"), StatRequest("window", 40), StatRequest("columns")
            return dict(enumerate(rows))

        def select_tokens(self, step, layer):
            seen.update(step.stats)

    @dataclass(frozen=True)
    class Sums(CacheStage):
        name: ClassVar[str] = "test-sums"

        def text_stats(self, depth):
            return {0: ColumnRequest("window", 40, want=("sum", "max", "entropy", "sumsq"))}

        def compress(self, step, layer, kv, stats):
            if stats is not None:
                seen["cache"] = stats
            return kv

    vlm = built(name)
    run = start(vlm, (Look(), Sums()), **CASES["three images"])
    answer_logits(vlm, run, [])
    tensors = run.inputs.tensors
    with torch.no_grad():
        vlm.model.set_attn_implementation("eager")
        maps = vlm.model(**tensors, output_attentions=True, use_cache=False).attentions
        vlm.model.set_attn_implementation("sdpa")
    terms = sums(vlm, run)
    expected = [maps[0][0, :, -1:], maps[1][0, :, -40:], maps[2][0].sum(1, keepdim=True)]
    for layer, rows in enumerate(expected):
        closeness.close(seen[layer], rows, terms=terms)
    heads = vlm.model.config.get_text_config().num_key_value_heads
    rows = maps[0][0, :, -40:].unflatten(0, (heads, -1))
    stats = seen["cache"]
    closeness.close(stats.sum, rows.sum(2), terms=terms)
    closeness.close(stats.max, rows.amax(2), terms=terms)
    closeness.close(stats.sumsq, rows.square().sum(2), terms=terms)
    entropy = -torch.xlogy(rows, rows + 1e-10).sum(2)
    closeness.close(stats.entropy, entropy, terms=terms)
    assert torch.equal(stats.nnz[0], (rows[0, 0] > 0).sum(0))
    blocks = bool((maps[1][0, 0].triu(1) > 0).any())
    assert blocks == (name == "gemma3")


@pytest.mark.parametrize("name", ["llava_next_video", "llava_onevision"])
def test_vision_statistics_cover_images_and_frames(name):
    """The tower runs twice, over images and over frames; a view is a row of both together."""
    seen = {}

    @dataclass(frozen=True)
    class Look(EncodeStage):
        name: ClassVar[str] = "test-look"
        positions: str = "keep"

        def vision_stats(self, depth):
            return {1: StatRequest("columns")}

        def reduce(self, tokens, stats, request):
            seen.update(rows=stats.rows[1], items=stats.items)
            return tokens

    vlm = built(name)
    run = start(vlm, Look(), **CASES["an image and a video"])
    answer_logits(vlm, run, [])
    tensors = run.inputs.tensors
    tower = vlm.model.get_encoder(modality="image")
    vlm.model.set_attn_implementation("eager")
    with torch.no_grad():
        pixels = tensors["pixel_values"][0], tensors["pixel_values_videos"][0]
        maps = [tower(of, output_attentions=True).attentions[1].sum(2) for of in pixels]
    vlm.model.set_attn_implementation("sdpa")
    maps = torch.cat(maps)[..., -16:]
    assert seen["rows"].shape == maps.shape
    config = vlm.model.config.vision_config
    width, views = config.hidden_size, maps.shape[-1]
    layer = 3 * width + config.intermediate_size + views
    closeness.close(seen["rows"], maps, terms=2 * layer)  # the second layer's maps
    assert [item.views for item in seen["items"]] == [(0, 5), (5, 6), (6, 7), (7, 8), (8, 9)]


# --- bad input ------------------------------------------------------------------------------------


def test_every_family_has_an_adapter():
    assert set(BUILD) | {"llava", "llava_next"} <= set(families())


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", [name for name in BUILD if name not in ("llava", "llava_next")])
def test_processor_of_another_family_is_refused(name):
    model, _ = BUILD[name]()
    other = "qwen2_5_vl" if name != "qwen2_5_vl" else "gemma3"
    _, processor = BUILD[other]()
    with pytest.raises(ModelError, match=rf"does not belong to a {name} model; supported are \w+"):
        VLM(model, processor)


def test_unsupported_models_are_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    _, processor = BUILD["internvl"]()
    text = LlamaForCausalLM(
        LlamaConfig(**{**tiny_families.TEXT, "vocab_size": 64, "num_hidden_layers": 1})
    )
    supported = r"'llama' is not supported; supported are .*qwen2_5_vl, .*; nearest are llava; "
    with pytest.raises(ModelError, match=f"{supported}docs/extending.md shows how to add a"):
        VLM(text, processor)
    model, processor = BUILD["qwen2_5_vl"]()
    with pytest.raises(ModelError, match="on the meta device; load its weights first"):
        VLM(model.to("meta"), processor)


def test_unsupported_checkpoints_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vipllava"}')
    reason = (
        r"is a 'vipllava' model, which is not supported; supported are .*; nearest are llava; "
        r"docs/extending.md shows how to add a family"
    )
    with pytest.raises(ModelError, match=reason):
        VLM.from_pretrained(tmp_path)
    assert (DOCS.parents[1] / "extending.md").is_file()


def test_unknown_kinds_of_layers_are_refused():
    """Llama 4's, for example, attend within chunks: as layers with full attention they would
    compute something else."""
    model, processor = BUILD["llava"]()
    model.config.text_config.layer_types = ["chunked_attention", *["full_attention"] * 3]
    reason = "llama has chunked_attention layers, which are not supported; supported are conv, full"
    with pytest.raises(ModelError, match=reason):
        VLM(model, processor)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_padding_has_no_effect(name, side):
    """The padding side has no effect; a processor that pads is told not to."""
    vlm = built(name)
    expected = vlm.ask("what ?", **CASES["one image"], max_new_tokens=4).token_ids
    vlm.processor.tokenizer.padding_side = side
    assert vlm.ask("what ?", **CASES["one image"], max_new_tokens=4).token_ids == expected
    tokenizer = vlm.processor.tokenizer
    call = type(tokenizer).__call__

    class Pads(type(tokenizer)):
        def __call__(self, *args, **kwargs):
            return call(self, *args, **{**kwargs, "padding": "max_length", "max_length": 200})

    tokenizer.__class__ = Pads
    with pytest.raises(ModelError, match="padded the prompt"):
        vlm.ask("what ?", **CASES["one image"], max_new_tokens=4)


def test_unsupported_tower_sizes_are_refused():
    vlm = built("internvl")
    vlm.processor.image_processor.size = {"height": 48, "width": 48}
    with pytest.raises(ModelError, match="48x48 pixels, and the vision tower takes 32x32"):
        vlm.ask("what ?", **CASES["one image"])


def test_unsupported_media_are_refused():
    vlm = built("smolvlm")
    with pytest.raises(ModelError, match="takes images or one video"):
        vlm.ask("what ?", **CASES["an image and a video"])
    for name in ("internvl", "gemma3", "llava_onevision"):
        with pytest.raises(ModelError, match=f"which prompts of {name} do not allow"):
            built(name).ask("what ?", **CASES["a video"], max_kv_tokens=4000, progress=False)
    vlm = built("gemma3")

    class Crops(type(vlm.processor)):
        def __call__(self, *args, **kwargs):
            batch = super().__call__(*args, **kwargs)
            batch["pixel_values"] = torch.cat([batch["pixel_values"]] * 2)
            return batch

    vlm.processor.__class__ = Crops
    with pytest.raises(ModelError, match="do_pan_and_scan"):
        vlm.ask("what ?", **CASES["one image"])


def test_a_prompt_that_attends_to_itself_is_prefilled_at_once():
    vlm = built("paligemma")
    given = {**CASES["one image"], "max_new_tokens": 6}
    wanted = vlm.ask("what ?", **given)
    for _ in range(2):
        again = vlm.ask("what ?", **given, prefill_chunk_size=16)
        assert again.token_ids == wanted.token_ids
        assert again.stats.prompt_reused == 0 and again.stats.prefill_chunks <= 1
        assert again.stats.prompt_tokens > 32


@pytest.mark.parametrize("name", ["paligemma", "lfm2_vl"])
def test_training_equals_the_dense_reference(name):
    """Answers are causal where prompts are not; states are read in one forward pass."""
    vlm = built(name)
    run = start(vlm, **CASES["one image"])
    tensors = run.inputs.tensors
    whole = torch.cat([tensors["input_ids"], torch.tensor([TOKENS])], 1)
    answered = {**tensors, "input_ids": whole}
    inputs = Inputs(answered, run.inputs.sizes, "q", run.inputs.frames, answer=len(TOKENS))
    logits, _, _ = train(vlm, inputs, None)
    logits.sum().backward()
    expected = Dense(vlm, tensors)()[:-1]
    closeness.close(logits.detach(), expected, terms=sums(vlm, run))


def test_views_that_are_not_supported_are_refused():
    vlm = built("lfm2_vl")
    inputs = vlm.inputs("what ?", **CASES["one image"])
    with vlmfast.attach(vlm.model, vlm.processor):
        for key, wrong in (
            ("pixel_values", inputs["pixel_values"][..., 1:]),
            ("spatial_shapes", inputs["spatial_shapes"] + 1),
            ("pixel_attention_mask", inputs["pixel_attention_mask"][:, 1:]),
        ):
            with pytest.raises(VLMFastError, match=f"{key}.* must "):
                vlm.model.generate(**{**inputs, key: wrong}, max_new_tokens=1)
    model, processor = BUILD["ovis2"]()
    model.config.vision_config.tokenize_function = "gumbel_argmax"
    with pytest.raises(ModelError, match="supported are softmax, st_argmax"):
        VLM(model, processor)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", EACH)
def test_stages_unsupported_by_a_tower(name):
    """Work inside the tower: an answer, or an error that names what the tower lacks."""
    vlm = built(name)
    for case in ("one image", "a video"):
        media = CASES[case]
        pooled = name in ("llava_next_video", "llava_onevision") and case == "a video"
        if (name.startswith("llava") and not pooled) or name == "paligemma":
            assert vlm.ask("what ?", **media, recipe=Between(), max_new_tokens=2).token_ids
        else:
            with pytest.raises(RecipeError, match="one visual token for each of its patches"):
                vlm.ask("what ?", **media, recipe=Between())
        if name == "fast_vlm":
            with pytest.raises(RecipeError, match="its vision tower ends in convolutions"):
                vlm.ask("what ?", **media, recipe=Between(whole=True))
        elif name in ("mistral3", "lfm2_vl"):
            with pytest.raises(RecipeError, match="belongs to whole images"):
                vlm.ask("what ?", **media, recipe=Between(whole=True))
        else:
            recipe = Between(whole=True)
            assert vlm.ask("what ?", **media, recipe=recipe, max_new_tokens=2).token_ids


@dataclass(frozen=True)
class Between(InEncoderStage):
    name: ClassVar[str] = "test-between"
    whole: bool = False

    @property
    def cells(self):
        return self.whole

    def blocks(self, depth):
        return (1,)

    def on_block(self, step, index, hidden):
        return hidden, None


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", EACH)
def test_saved_model_is_found_by_its_type(name, tmp_path):
    vlm = built(name)
    expected = vlm.ask("what ?", **CASES["one image"], max_new_tokens=4).token_ids
    vlm.model.save_pretrained(tmp_path)
    vlm.processor.save_pretrained(tmp_path)
    loaded = VLM.from_pretrained(tmp_path, device="cpu")
    assert len(loaded.ask("what ?", **CASES["one image"], max_new_tokens=4).token_ids) == 4
    # The same pixels: a loaded processor may resize with another library.
    again = VLM(loaded.model, vlm.processor)
    assert again.ask("what ?", **CASES["one image"], max_new_tokens=4).token_ids == expected
    identity = [vlm.adapter.sizes(), vlm.adapter.signature(), vlm.adapter.bytes_per_token()]
    assert identity == [
        loaded.adapter.sizes(), loaded.adapter.signature(), loaded.adapter.bytes_per_token()
    ]  # fmt: skip
    assert vlm.adapter.sizes()["family"] == name
