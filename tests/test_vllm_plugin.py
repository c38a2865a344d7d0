"""The parts of the vLLM plug-in that need no vLLM: its entry point, its plan, its reduction."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tiny_models
from vlmfast import VLM, ModelError, Recipe, RecipeError, VLMFastError, exact_count

PLUGIN = Path(__file__).parents[1] / "plugins" / "vllm"
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


def test_positions_follow_each_other(
    plugin: ModuleType, vlm: VLM, caplog: pytest.LogCaptureFixture
) -> None:
    from vlmfast_vllm.recipes import Plan

    with caplog.at_level("INFO"):
        plan = Plan.of(config_of(vlm, "hired:budget=0.5+divprune:0.5"))
    assert {stage.positions for stage in plan.stages} == {"compact"}
    shown = "hired:positions=compact,budget=0.5+divprune:keep=0.5,positions=compact"
    assert caplog.messages == [f"vlmfast_recipe: {shown}"]
    assert Plan.of(config_of(vlm, shown)).recipe == plan.recipe


def test_plan_counts_as_the_library_does(plugin: ModuleType, vlm: VLM) -> None:
    from vlmfast_vllm.recipes import Plan

    recipe = "hired:budget=0.5+divprune:0.5"
    plan = Plan.of(config_of(vlm, recipe))
    for size in ((64, 64), (31, 200), (90, 45)):
        assert plan.count(size) == exact_count(recipe, vlm.image_layout(size))
        assert plan.count(size) < len(plan.image(size))


@pytest.mark.parametrize("recipe", [None, "none", ""])
def test_plug_in_is_off_without_a_recipe(plugin: ModuleType, vlm: VLM, recipe: Any) -> None:
    from vlmfast_vllm.recipes import Plan

    assert Plan.of(config_of(vlm, recipe)) is None


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("mmtok:0.2", "reads the question"),
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
    from vlmfast_vllm.recipes import Plan

    with pytest.raises(VLMFastError, match=reason):
        Plan.of(config_of(vlm, recipe))


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
    from vlmfast_vllm.recipes import Plan

    config = config_of(vlm, "divprune:0.2")
    values = {**vars(config), **change, "model_type": "llava_next"}
    with pytest.raises(RecipeError, match=reason):
        Plan(SimpleNamespace(**values), Recipe.parse("divprune:0.2"))


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
    from vlmfast_vllm.recipes import Plan
    from vlmfast_vllm.reduction import Reduction

    from vlmfast.api.encoding import encode_image
    from vlmfast.core.contexts import VisionContext

    adapter, images = vlm.adapter, [tiny_models.make_image(80, 60), tiny_models.make_image(31, 90)]
    plan = Plan.of(config_of(vlm, recipe))
    blocks = [SimpleNamespace(self_attn=Attention(b.self_attn)) for b in adapter.vision_blocks()]
    built = torch.nn.ModuleList()
    for own, block in zip(adapter.vision_blocks(), blocks, strict=True):
        holder = torch.nn.Module()
        holder.self_attn = block.self_attn
        holder.own = own
        built.append(holder)
    tower = SimpleNamespace(vision_model=SimpleNamespace(encoder=SimpleNamespace(layers=built)))
    reduction = Reduction(plan, tower, adapter.projector(), ranks=1)
    features, tensors, seen_all = [], [], None
    with torch.no_grad():
        for image in images:
            given = vlm.inputs("What?", images=image)
            sizes = [(image.height, image.width)]
            handles = [
                own.register_forward_pre_hook(_feed(holder), with_kwargs=True)
                for own, holder in zip(adapter.vision_blocks(), built, strict=True)
            ]
            with reduction.watching() as seen:
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

        reduced = reduction.reduced(
            features,
            seen_all,
            [given["pixel_values"].shape[1] for given in tensors],
            [(image.height, image.width) for image in images],
            lambda i: {key: tensors[i][key] for key in ("pixel_values", "image_sizes")},
        )
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


def test_split_heads_are_refused(plugin: ModuleType, vlm: VLM) -> None:
    from vlmfast_vllm.recipes import Plan
    from vlmfast_vllm.reduction import Reduction

    plan = Plan.of(config_of(vlm, "divprune:0.2"))
    with pytest.raises(ModelError, match="tensor_parallel_size=1"):
        Reduction(plan, None, None, ranks=2)


def test_other_token_numbers_are_an_error(plugin: ModuleType, vlm: VLM) -> None:
    from vlmfast_vllm.recipes import Plan
    from vlmfast_vllm.reduction import Reduction, Seen

    plan = Plan.of(config_of(vlm, "divprune:0.2"))
    layers = SimpleNamespace(encoder=SimpleNamespace(layers=[]))
    reduction = Reduction(plan, SimpleNamespace(vision_model=layers), None, ranks=1)
    with pytest.raises(ModelError, match="vLLM made 5 tokens"):
        reduction.reduced([torch.zeros(5, 8)], Seen(), [5], [(64, 64)], dict)
