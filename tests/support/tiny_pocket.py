"""The scripts of ``benchmarks/pocket``, and small parts for their tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from support.paths import ROOT
from support.tiny_families import tokenizer

FOLDER = ROOT / "benchmarks" / "pocket"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
SCRIPTS = (
    *("parts", "objects", "scenes", "build"),
    *("patches", "train", "evidence", "counting"),
)
with pytest.MonkeyPatch.context() as patched:
    patched.syspath_prepend(FOLDER)
    modules = map(importlib.import_module, SCRIPTS)
    parts, objects, scenes, build, *others = modules
    patches, train, evidence, counting = others
SIZE, PATCH = 48, 8
COLOURS = {
    "cat": (250, 0, 0),
    "dog": (0, 250, 0),
    "cup": (0, 0, 250),
    "car": (250, 250, 0),
    "key": (250, 0, 250),
    "bus": (0, 250, 250),
}


def make_objects(folder: Path) -> Any:
    """Squares of one colour each, in two styles."""
    files: dict[str, dict[str, Path]] = {}
    for name, colour in COLOURS.items():
        for style in ("google", "twitter"):
            image = Image.new("RGBA", (64, 64))
            margin = 2 if style == "google" else 4
            ImageDraw.Draw(image).rectangle((margin, margin, 64 - margin, 64 - margin), colour)
            path = folder / f"{name}-{style}.png"
            image.save(path)
            files.setdefault(name, {})[style] = path
    return objects.Objects(files)


def make_tokenizer() -> Any:
    return tokenizer("<unused0>")


def make_tower(kind: str = "dinov2", **more: Any) -> Any:
    from transformers import AutoConfig, AutoModel

    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    torch.manual_seed(1)
    return AutoModel.from_config(AutoConfig.for_model(kind, **{**config, **more})).eval()


def make_decoder() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(2)
    return Gemma3ForCausalLM(config).eval()


def make_pocket(**tower: Any) -> Any:
    torch.manual_seed(0)
    return build.assemble(make_tower(**tower), make_decoder(), make_tokenizer(), SIZE)


def save_parts(folder: Path) -> Path:
    """A folder as ``parts.py`` writes it."""
    make_tower().save_pretrained(folder / "tower")
    make_decoder().save_pretrained(folder / "decoder")
    make_tokenizer().save_pretrained(folder / "decoder")
    for name in ("GEMMA_TERMS.html", "NOTICE.md"):
        (folder / "decoder" / name).write_text(f"{name} of the decoder\n")
    return folder
