"""The parts of the vLLM plug-in that need no vLLM: its entry point, its plan, its reduction."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support import tiny_families, tiny_models
from support.paths import ROOT
from vlmfast import VLM, ModelError, Recipe, RecipeError, VLMFastError, exact_count

PLUGIN = ROOT / "plugins" / "vllm"
if not PLUGIN.is_dir():
    pytest.skip("the plug-in is not part of this distribution", allow_module_level=True)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    import vlmfast_vllm

    return vlmfast_vllm


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*tiny_models.build_llava_next())


def config_of(vlm: VLM, recipe: Any) -> Any:
    config = type(vlm.model.config).from_dict(vlm.model.config.to_dict())
    config.vlmfast_recipe = recipe
    return config


def test_entry_point_leads_to_register(plugin: ModuleType) -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"vlmfast": "vlmfast_vllm:register"}
    assert callable(plugin.register)
    assert (
        project["version"]
        == tomllib.loads(f'v = "{__import__("vlmfast").__version__}"')["v"].partition(".dev")[0]
    )


def test_importing_the_plug_in_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import vlmfast_vllm; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(PLUGIN), "PATH": ""},
    )
    assert done.stdout.strip() == "['__future__', 'vlmfast_vllm']"


def test_register_names_models_and_can_be_repeated(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[str, str] = {}
    fake = SimpleNamespace(
        ModelRegistry=SimpleNamespace(register_model=lambda name, path: models.update({name: path}))
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    plugin.register()
    once = dict(models)
    plugin.register()
    assert models == once == plugin.ARCHITECTURES
    for path in models.values():
        module, _, name = path.partition(":")
        file = PLUGIN / (module.replace(".", "/") + ".py")
        assert f"class {name}(" in file.read_text()


def plans_of(vlm: VLM, recipe: Any) -> Any:
    from vlmfast_vllm.crops import Crops
    from vlmfast_vllm.recipes import plans_of

    return plans_of(config_of(vlm, recipe), Crops)


def test_positions_follow_each_other(
    plugin: ModuleType, vlm: VLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        plans = plans_of(vlm, "hired:budget=0.5+divprune:0.5")
    assert {stage.positions for stage in plans.of().stages} == {"compact"}
    shown = "hired:positions=compact,budget=0.5+divprune:keep=0.5,positions=compact"
    assert caplog.messages == [f"vlmfast_recipe: {shown}"]
    assert plans.of(shown) is plans.of()  # of one key in vLLM's caches


def test_recipes_of_requests_are_kept_by_their_text(plugin: ModuleType, vlm: VLM) -> None:
    from vlmfast_vllm import recipes

    plans = plans_of(vlm, "none")
    assert plans.of().text == "none" and not plans.of().stages
    plan = plans.of("grid:0.3")
    assert plans.of("grid:0.3") is plan and not plan.asks and plans.of("mmtok:0.3").asks
    for number in range(recipes.MAX_PLANS):
        plans.of(f"random:0.3,seed={number}")
    again = plans.of("grid:0.3")
    assert again is not plan and again.text == plan.text


def test_plan_counts_as_the_library_does(plugin: ModuleType, vlm: VLM) -> None:
    recipe = "hired:budget=0.5+divprune:0.5"
    plans = plans_of(vlm, recipe)
    for size in ((64, 64), (31, 200), (90, 45)):
        media = plans.family.media(size)
        assert plans.of().counts(media) == (exact_count(recipe, vlm.image_layout(size)),)
        assert plans.of().count(media) < len(media) == plans.of("none").count(media)


def test_plug_in_is_off_without_a_recipe(plugin: ModuleType, vlm: VLM) -> None:
    assert plans_of(vlm, None) is None


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("clip-relevance:0.2", "runs another model"),
        ("elastic:branch=pool", "trained"),
        ("tome:0.5", "tome acts in the in-encoder step"),
        ("hired:0.2+snapkv:0.5", "snapkv acts in the cache step"),
        ("hired:0.2", "the content of the crops"),
        ("hired:budget=0.2,positions=keep", "vLLM numbers tokens without gaps"),
        ("hired:budget=0.5+divprune:0.5, positions = keep", "vLLM numbers tokens without gaps"),
        ("hired:budget=0.2,guard=2", "guard=2 needs more forward passes"),
        ("flashvid:0.2,proportional_attention=true", "proportional_attention=false"),
        ("prumerge:0.2", "vLLM builds only blocks 0 to 2"),
        ("prumerge", "vLLM builds only blocks 0 to 2"),
        ("hierd:0.2", "hired"),
        ("other.yaml", "must be the text of a recipe"),
        (5, "must be the text of a recipe"),
    ],
)
def test_recipes_that_vllm_cannot_run_are_refused(
    plugin: ModuleType, vlm: VLM, recipe: Any, reason: str
) -> None:
    with pytest.raises(VLMFastError, match=reason):
        plans_of(vlm, recipe)
    with pytest.raises(VLMFastError, match=reason):
        plans_of(vlm, "none").of(recipe)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vision_feature_layer": [-2, -1]}, "several vision layers"),
        ({"vision_config": SimpleNamespace(model_type="pixtral")}, "of type pixtral"),
    ],
)
def test_models_that_it_does_not_support_are_refused(
    plugin: ModuleType, vlm: VLM, change: dict[str, Any], reason: str
) -> None:
    from vlmfast_vllm.crops import Crops

    config = config_of(vlm, "divprune:0.2")
    values = {**vars(config), **change, "model_type": "llava_next"}
    with pytest.raises(RecipeError, match=reason):
        Crops(SimpleNamespace(**values))


def alone(heads: torch.Tensor) -> torch.Tensor:
    """Of one rank."""
    return heads


class Attention(torch.nn.Module):
    """A block's attention as vLLM builds it: one projection for queries, keys and values."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        parts = (own.q_proj, own.k_proj, own.v_proj)
        self.qkv_proj = torch.nn.Linear(parts[0].in_features, 3 * parts[0].out_features)
        self.qkv_proj.weight.data = torch.cat([p.weight.data for p in parts])
        self.qkv_proj.bias.data = torch.cat([p.bias.data for p in parts])
        self.num_heads_per_partition, self.scale = own.num_heads, own.scale


@pytest.mark.parametrize(
    "recipe",
    [
        "hired:budget=0.3",
        "visionzip:0.4",
        "scope:0.3",
        "hired:budget=0.4,saliency=received",
        "scope:0.3,saliency=norm",
        "random:0.3",
        "hired:budget=0.6+divprune:0.5",
    ],
)
def test_reduction_keeps_the_features_that_the_library_keeps(
    plugin: ModuleType, vlm: VLM, recipe: str
) -> None:
    """Statistics are recorded as in vLLM, from a tower with joined projections."""
    from vlmfast_vllm.reduction import Reduction

    from vlmfast.api.encoding import encode_image
    from vlmfast.core.contexts import VisionContext

    adapter, images = vlm.adapter, [tiny_models.make_image(80, 60), tiny_models.make_image(31, 90)]
    plans = plans_of(vlm, recipe)
    blocks = [SimpleNamespace(self_attn=Attention(b.self_attn)) for b in adapter.vision_blocks()]
    built = torch.nn.ModuleList()
    for own, block in zip(adapter.vision_blocks(), blocks, strict=True):
        holder = torch.nn.Module()
        holder.self_attn = block.self_attn
        holder.own = own
        built.append(holder)
    tower = SimpleNamespace(vision_model=SimpleNamespace(encoder=SimpleNamespace(layers=built)))
    reduction = Reduction(plans.family, tower, adapter.projector(), alone)
    features, tensors, seen_all = [], [], None
    with torch.no_grad():
        for image in images:
            given = vlm.inputs("What?", images=image)
            sizes = [(image.height, image.width)]
            handles = [
                own.register_forward_pre_hook(_feed(holder), with_kwargs=True)
                for own, holder in zip(adapter.vision_blocks(), built, strict=True)
            ]
            with reduction.watching([plans.of()]) as seen:
                feeds = adapter.vision_blocks()[len(built) - 2].register_forward_hook(
                    lambda module, args, output, seen=seen: seen.output.append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
                found = adapter.encode(given, VisionContext(items=adapter.geometry(sizes)))
                feeds.remove()
            for handle in handles:
                handle.remove()
            features.append(found.features[0])
            tensors.append(given)
            if seen_all is None:
                seen_all = seen
            else:
                for block, value in seen.projections.items():
                    seen_all.projections[block] = torch.cat([seen_all.projections[block], value])
                seen_all.inputs += seen.inputs
                seen_all.output += seen.output

        reduced, first = [], 0
        for image, rows, given in zip(images, features, tensors, strict=True):
            own = {key: given[key] for key in ("pixel_values", "image_sizes")}
            reduced.append(
                reduction.reduced(
                    plans.of(),
                    plans.family.media((image.height, image.width)),
                    rows,
                    seen_all,
                    first,
                    lambda own=own: own,
                    rows[:0],
                    0,
                )
            )
            first += given["pixel_values"].shape[1]
    for image, rows, whole in zip(images, reduced, features, strict=True):
        wanted = encode_image(adapter, image, Recipe.parse(recipe)).features
        assert len(rows) < len(whole)
        torch.testing.assert_close(rows, wanted)


def _feed(holder: torch.nn.Module) -> Any:
    """Run a joined projection on the input of a block's attention."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        holder.self_attn.qkv_proj(module.layer_norm1(hidden))

    return hook


def test_other_token_numbers_are_an_error(plugin: ModuleType, vlm: VLM) -> None:
    from vlmfast_vllm.reduction import Reduction, Seen

    plans = plans_of(vlm, "divprune:0.2")
    layers = SimpleNamespace(encoder=SimpleNamespace(layers=[]))
    reduction = Reduction(plans.family, SimpleNamespace(vision_model=layers), None, alone)
    media, rows = plans.family.media((64, 64)), torch.zeros(5, 8)
    with pytest.raises(ModelError, match="vLLM made 5 tokens"):
        reduction.reduced(plans.of(), media, rows, Seen(), 0, dict, rows[:0], 0)


@pytest.mark.slow
def test_launches_are_counted_as_recorded(tmp_path: Path) -> None:
    """With kept positions the host waits only where the method itself does."""
    pytest.importorskip("triton")
    recorded = PLUGIN.parents[1] / "benchmarks" / "results" / "vllm-launches.json"
    found = tmp_path / "found.json"
    command = [sys.executable, str(PLUGIN / "launches.py"), "--out", str(found)]
    subprocess.run(command, check=True, cwd=PLUGIN.parents[1])
    counts = json.loads(found.read_text())
    assert counts == json.loads(recorded.read_text())
    for recipe in ("grid:budget=0.2", "divprune:budget=0.2", "scope:budget=0.2"):
        kept = counts["recipes"][recipe]["qwen2_5_vl"]
        assert {kind for cost in kept.values() for kind in cost["reads"]} == {"copy to device"}
        renumbered = counts["recipes"][f"{recipe},positions=compact"]["qwen2_5_vl"]
        assert renumbered["encode"]["reads"]["copy to host"] == 1  # the control


# --- Qwen ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def qwen(request: Any) -> VLM:
    return VLM(*tiny_families.builders()[request.param]())


def grids_of(vlm: VLM) -> Any:
    from vlmfast_vllm.grids import Grids
    from vlmfast_vllm.recipes import Plans

    return Plans(Grids(vlm.model.config), "none")


@pytest.mark.parametrize("recipe", ["none", "grid:0.4", "divprune:0.4", "mmtok:0.4"])
def test_grids_are_counted_and_placed_as_by_the_library(
    plugin: ModuleType, qwen: VLM, recipe: str
) -> None:
    """A plan knows a grid alone; the library has pixels and Hugging Face's rotary ids."""
    plans, frames = grids_of(qwen), [tiny_models.make_image(64, 48, seed=i) for i in range(5)]
    plan = plans.of(recipe)
    for media in ({"images": [tiny_models.make_image(60, 44)]}, {"video": frames}):
        answer = qwen.ask("What?", **media, recipe=recipe, max_new_tokens=1)
        kind = "video" if "video" in media else "image"
        tensors = qwen.inputs("What?", **media)
        (grid,) = tensors[f"{kind}_grid_thw"].tolist()
        seconds = tensors.get("second_per_grid_ts", [1.0])[0]
        own = plans.family.media(kind, grid, float(seconds))
        kept = list(answer.stats.visual_tokens_kept.values())
        assert plan.count(own) == (kept[-1] if kept else answer.stats.visual_tokens_in)
        shown = answer.trace.layout
        rows = shown.visual.nonzero().flatten()
        assert torch.equal(shown.grid[rows], own.layout.grid) and len(rows) == len(own)
        steps = own.step[:, None] == own.step[None] if own.runs > 1 else torch.ones(1, 1).bool()
        first = torch.where(steps, shown.position[:, None, rows], 10**6).amin(-1).amin(0)
        first = first if own.runs > 1 else shown.position[:, rows].min()
        assert torch.equal(own.places, shown.position[:, rows] - first)


def test_runs_are_counted_where_steps_are_apart(plugin: ModuleType, qwen: VLM) -> None:
    plans = grids_of(qwen)
    video = plans.family.media("video", (3, 8, 8))
    stepwise = qwen.model.config.model_type == "qwen3_vl"
    assert plans.of("grid:0.25").counts(video) == ((4, 4, 4) if stepwise else (12,))
    # Of all steps together, the sum alone is known, or all are numbered together.
    for recipe in ("divprune:0.25", "grid:0.25,positions=compact"):
        assert plans.of(recipe).counts(video) == (None if stepwise else (12,))
    assert plans.of("divprune:0.25").count(video) == 12


def test_renumbered_tokens_are_those_of_the_library(plugin: ModuleType, qwen: VLM) -> None:
    from vlmfast.core.layout import Numbering

    plans, adapter = grids_of(qwen), qwen.adapter
    assert plans.of("grid:0.3,positions=compact").compact and not plans.of("grid:0.3").compact
    tensors = qwen.inputs("What?", images=tiny_models.make_image(64, 48))
    ids, position = tensors["input_ids"][0], adapter.positions(tensors)
    visual = adapter.visual(ids)
    first, stop = visual.nonzero().flatten()[[0, -1]].tolist()
    media = plans.family.media("image", tensors["image_grid_thw"][0].tolist())
    draw = torch.Generator().manual_seed(0)
    for share in (0.1, 0.3, 0.7, 1.0):
        n = max(1, int(share * len(media)))
        kept = torch.randperm(len(media), generator=draw)[:n].sort().values
        rows = torch.cat([(~visual).nonzero().flatten(), kept + first]).sort().values
        wanted = adapter.compact(Numbering.of(position, visual.long()), rows)
        places, (extent,) = plans.family.compacted(media, kept)
        base = position[:, first - 1 : first] + 1
        assert torch.equal(places + base, wanted[:, first : first + n])
        assert (base + extent)[0] == wanted[0, first + n]  # the text after it
        shrunk = extent < media.extent
        assert shrunk or share > 0.1
    assert extent == media.extent and stop - first + 1 == len(media)


def test_text_moves_when_what_stands_before_it_is_known(plugin: ModuleType) -> None:
    from vlmfast_vllm.shifts import BITS, CHAINS, Shifts

    shifts = Shifts(torch.device("cpu"))
    first = shifts.chain(None, 11)
    second = shifts.chain(first, 22)
    assert shifts.chain(None, 11) is first and shifts.known(11) is None
    given = torch.tensor([5, (first.number << BITS) + 50, (second.number << BITS) + 90])

    def moved() -> list[int]:
        positions = given.expand(3, -1).clone()
        shifts.apply(positions)
        assert (positions == positions[0]).all()
        return positions[0].tolist()

    assert moved() == [5, 50, 90]
    shifts.know(22, 3)  # a prompt with this image alone was encoded
    assert moved() == [5, 50, 87]
    shifts.know(11, 4)
    assert moved() == [5, 46, 83] and shifts.known(11) == 4
    kept = shifts.chain(None, 33)
    for tag in range(100, 100 + 2 * CHAINS):
        shifts.apply(torch.full((3, 1), kept.number << BITS))  # a long answer goes on
        last = shifts.chain(None, tag)
    assert first.number == second.number == 0 and shifts.chain(None, 33) is kept
    numbers = {kept.number, last.number}
    assert len(numbers) == 2 and 0 not in numbers
    shifts.know(tag, 7)
    assert [int(shifts.table[chain.number]) for chain in (kept, last)] == [0, 7]


def test_text_is_numbered_around_media(plugin: ModuleType) -> None:
    from vlmfast_vllm.grids import numbered, runs_of

    # Text, an image of 2 x 3 tokens of which 4 are left, text, a whole one of 1 x 2, text.
    tokens = [1, 1, 9, 9, 9, 9, 1, 9, 9, 1]
    assert runs_of(tokens, 9, 0, 10) == [(2, 4), (7, 2)] and runs_of(tokens, 9, 3, 6) == [(3, 3)]
    whole = torch.tensor([[0, 0], [0, 0], [0, 1]])
    ids = numbered(len(tokens), [(2, 4, 3, None), (7, 2, 2, whole)])
    assert ids[0].tolist() == [0, 1, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    assert ids[2].tolist() == [0, 1, 2, 2, 2, 2, 5, 6, 7, 8, 9]
    assert numbered(2, [(1, 1, 5, None)])[0].tolist() == [0, 1, 6]
    assert numbered(3, [])[1].tolist() == [0, 1, 2, 3]


def test_batches_hold_as_much_as_one_may(plugin: ModuleType) -> None:
    from vlmfast_vllm.travel import batches

    sizes = [3, 3, 2, 9, 1, 4]
    found = [sizes[items] for items in batches(sizes, 6)]
    assert found == [[3, 3], [2], [9], [1, 4]]
    assert [sizes[items] for items in batches(sizes, 100)] == [sizes]


def test_notes_travel_in_rows(plugin: ModuleType) -> None:
    from vlmfast_vllm.travel import Note, rows

    notes = [
        Note("none"),
        Note("hired:budget=0.2", 2, (5, 6, 7), (9, 8, 9)),
        Note("é", 1, (4,), (), 2**56 - 1),
    ]
    assert [Note.of(row) for row in rows(notes)] == notes
