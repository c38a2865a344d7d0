"""What the plug-in adds to a request of vLLM, in launches and host reads, counted without a GPU.

The plug-in's own code runs on a pretended GPU, see `vlmfast.check.launches`. Stand-ins take the
place of vLLM's model: what they do is not counted, and vLLM is not needed. A request has one image,
of a size that came before. ``make vllm-launches`` writes the result file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

# Triton is imported, and compiles nothing.
os.environ |= {"VLMFAST_KERNELS": "triton", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from support import tiny_families, tiny_models  # noqa: E402
from vlmfast import VLM  # noqa: E402
from vlmfast.check.devices import Watch, pretended  # noqa: E402
from vlmfast.check.launches import Cost, counted_kernels  # noqa: E402
from vlmfast.eval.results import write_json  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "vllm-launches.json"
CUDA, DTYPE = torch.device("cuda:0"), torch.bfloat16
GRID = (1, 48, 48)  # patches of an image of Qwen2.5-VL: 576 tokens
SIZE = (64, 64)  # of an image of LLaVA-NeXT
TEXT, BEFORE = tuple(range(12)), 4  # of a prompt, and how much of it stands before the image
RECIPES = (
    "none",
    "grid:budget=0.2",
    "downsample:budget=0.2",
    "random:budget=0.2",
    "divprune:budget=0.2",
    "mmtok:budget=0.2",
    "hired:budget=0.2",
    "visionzip:budget=0.2",
    "scope:budget=0.2",
    "flashvid:budget=0.2",
    "balanced",
)


@contextmanager
def without_vllm() -> Iterator[None]:
    """Inside the block, modules of the plug-in import stand-ins of vLLM's."""
    names = ("", ".distributed", ".multimodal", ".multimodal.inputs", ".multimodal.processing")
    stubs: dict[str, Any] = {f"vllm{name}": ModuleType("vllm") for name in names}
    stubs["vllm.distributed"].tensor_model_parallel_all_gather = lambda heads, dim: heads
    stubs["vllm.multimodal.inputs"].MultiModalFieldConfig = None
    stubs["vllm.multimodal.processing"].PromptReplacement = None
    stubs["vllm.multimodal.processing"].PromptUpdateDetails = None
    utils = stubs["vllm.multimodal.utils"] = ModuleType("vllm.multimodal.utils")
    utils.copy_mm_embedding_modality = lambda source, target: target
    with mock.patch.dict(sys.modules, stubs):
        yield


class Whole(nn.Module):
    """Returns what it is given, as a part of a tower that is not counted."""

    def forward(self, *args: Any, **given: Any) -> Any:
        return args[0] if args else given["query"]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE).to(CUDA)


# --- Qwen2.5-VL ----------------------------------------------------------------------------------


class Stock:
    """What the plug-in takes from vLLM's Qwen2.5-VL."""

    watch: Watch

    def __init__(self, *, vllm_config: Any, prefix: str) -> None:
        self.config = vllm_config.model_config.hf_config
        text, vision = self.config.get_text_config(), self.config.vision_config
        self.visual = SimpleNamespace(
            device=CUDA,
            dtype=DTYPE,
            blocks=[
                SimpleNamespace(attn=SimpleNamespace(attn=Whole())) for _ in range(vision.depth)
            ],
            merger=SimpleNamespace(ln_q=Whole()),
            input_norm=lambda pixels, dtype: pixels.to(dtype),
        )
        words = nn.Embedding(len(TEXT), text.hidden_size, dtype=DTYPE)
        self.language_model = SimpleNamespace(embed_input_ids=nn.Module.to(words, CUDA))

    def _parse_and_validate_multimodal_inputs(self, **given: Any) -> Any:
        return {"images": {"type": "pixel_values", **given}}

    def _process_image_input(self, given: Any) -> list[Tensor]:
        vision, (grid,) = self.config.vision_config, given["image_grid_thw"].tolist()
        patches, heads = grid[0] * grid[1] * grid[2], vision.num_heads
        with self.watch.paused():
            for block in self.visual.blocks:
                head = drawn(1, patches, heads, vision.hidden_size // heads)
                block.attn.attn(query=head, key=head)
            self.visual.merger.ln_q(drawn(patches, vision.hidden_size))
            tokens = patches // vision.spatial_merge_size**2
            return [drawn(tokens, self.config.get_text_config().hidden_size)]

    def embed_input_ids(self, *args: Any, **given: Any) -> None:
        """Of vLLM."""

    def forward(self, *args: Any, **given: Any) -> None:
        """Of vLLM."""


def configured(config: Any) -> Any:
    """What vLLM tells a model that it loads."""
    multimodal = SimpleNamespace(mm_encoder_tp_mode="weights", video_pruning_rate=None)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, multimodal_config=multimodal),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=None, cudagraph_mm_encoder=False, compile_mm_encoder=False
        ),
        scheduler_config=SimpleNamespace(
            max_num_encoder_input_tokens=1 << 14, encoder_cache_size=1 << 14
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )


def qwen(watch: Watch) -> Callable[[str], dict[str, Cost]]:
    """Counts requests of Qwen2.5-VL: encoding, the step that prefills, one that decodes."""
    with without_vllm():
        from vlmfast_vllm.processing import note_key
        from vlmfast_vllm.qwen import Reduced
        from vlmfast_vllm.travel import Note, rows

    class Counted(Reduced, Stock):
        pass

    config = tiny_families.build_qwen2_5_vl()[0].config
    config.vlmfast_recipe = "none"
    Stock.watch = watch
    model = Counted(vllm_config=configured(config))

    def count(recipe: str) -> dict[str, Cost]:
        plan = model.plans.of(recipe)
        note = Note(plan.text, BEFORE, TEXT if plan.asks else (), tag=hash(recipe) & 0xFFFF)
        given = {
            "image_grid_thw": torch.tensor([GRID]),
            "pixel_values": torch.rand(GRID[1] * GRID[2], config.vision_config.patch_size**2),
            note_key("image"): rows([note]),
        }
        (kept,) = found = counted(watch, costs := [], lambda: model.embed_multimodal(**given))
        ids = torch.zeros(len(TEXT) + len(kept), dtype=torch.int64)
        at = torch.arange(len(ids))
        at = (at >= BEFORE) & (at < BEFORE + len(kept))  # of the host, as in vLLM
        positions = torch.arange(len(ids)).repeat(3, 1).to(CUDA)

        def step() -> None:
            model.embed_input_ids(ids, found, is_multimodal=at)
            model.forward(ids, positions)

        counted(watch, costs, step)
        counted(watch, costs, lambda: model.forward(ids[:1], positions[:, :1]))
        return dict(zip(("encode", "prefill", "decode"), costs, strict=True))

    return count


# --- LLaVA-NeXT ----------------------------------------------------------------------------------


class Block(Whole):
    """A block of a tower, with one projection for queries, keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Whole()
        self.self_attn.num_heads_per_partition, self.self_attn.scale = heads, 0.125


def llava(watch: Watch) -> Callable[[str], dict[str, Cost]]:
    """Counts requests of LLaVA-NeXT, whose steps the plug-in leaves alone."""
    from vlmfast_vllm.crops import Crops
    from vlmfast_vllm.recipes import plans_of
    from vlmfast_vllm.reduction import Reduction

    vlm = VLM(*tiny_models.build_llava_next())
    config, vision = vlm.model.config, vlm.model.config.vision_config
    config.vlmfast_recipe = "none"
    plans = plans_of(config, Crops)
    blocks = nn.ModuleList(
        Block(vision.num_attention_heads) for _ in range(vision.num_hidden_layers)
    )
    tower = SimpleNamespace(vision_model=SimpleNamespace(encoder=SimpleNamespace(layers=blocks)))
    projector = nn.Module.to(vlm.adapter.projector(), CUDA, DTYPE)
    reduction = Reduction(plans.family, tower, projector, lambda heads: heads)
    words = nn.Module.to(nn.Embedding(len(TEXT), config.text_config.hidden_size, dtype=DTYPE), CUDA)

    def count(recipe: str) -> dict[str, Cost]:
        plan, media, costs = plans.of(recipe), plans.family.media(SIZE), []
        (item,) = media.items
        views, width = item.views[1] - item.views[0], vision.hidden_size
        patches = (vision.image_size // vision.patch_size) ** 2
        pixels = {
            "pixel_values": torch.rand(1, views, 3, vision.image_size, vision.image_size).to(CUDA),
            "image_sizes": torch.tensor([SIZE]),
        }
        features = drawn(len(media), config.text_config.hidden_size)

        def encoded() -> None:
            if not plan.stages:
                return
            with reduction.watching([plan]) as seen, watch.paused():
                for block in blocks:
                    block.self_attn.qkv_proj(drawn(views, 1 + patches, 3 * width))
                    block(drawn(views, 1 + patches, width))
                projector(drawn(views, patches, width))
            text = features[:0]
            if plan.asks:
                text = words(torch.tensor(TEXT, device=CUDA))
            reduction.reduced(plan, media, features, seen, 0, lambda: pixels, text, BEFORE)

        counted(watch, costs, encoded)
        return {"encode": costs[0]}

    return count


# --- all -----------------------------------------------------------------------------------------


def counted(watch: Watch, costs: list[Cost], work: Callable[[], Any]) -> Any:
    """The result of ``work``, whose cost is added to ``costs``."""
    watch.counts.clear()
    found = work()
    costs.append(Cost.of(watch.counts))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the counts")
    args = parser.parse_args(argv)
    os.environ.pop("VLMFAST_KERNELS", None)  # it was for the import of Triton
    found: dict[str, Any] = {}
    with torch.no_grad(), pretended(kernels=True) as watch, counted_kernels(watch):
        for name, count in (("qwen2_5_vl", qwen(watch)), ("llava_next", llava(watch))):
            for recipe in RECIPES:
                runs = [recipe, f"{recipe},positions=compact"]
                for run in runs if name == "qwen2_5_vl" and ":" in recipe else runs[:1]:
                    count(run)  # the first image of its size
                    costs = {part: asdict(cost) for part, cost in count(run).items()}
                    found.setdefault(run, {})[name] = costs
    write_json(args.out, {"grid": list(GRID), "size": list(SIZE), "recipes": found})


if __name__ == "__main__":
    main()
