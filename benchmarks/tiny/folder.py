"""Write `tiny` as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from architecture import SHIPPED
from torch import Tensor
from transformers import LlavaNextForConditionalGeneration

PROCESSOR = (
    *("chat_template.jinja", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)


def export_state(state: dict[str, Tensor], folder: Path) -> None:
    """Write a folder for ``from_pretrained`` (bf16), replacing ``folder`` atomically.

    Parameters
    ----------
    state : dict of str to torch.Tensor
        Of the averaged `network.Packed`; the training heads are left out.
    """
    start = "module.model."
    model = LlavaNextForConditionalGeneration.from_pretrained(SHIPPED, dtype=torch.bfloat16)
    model.load_state_dict(
        {n.removeprefix(start): v for n, v in state.items() if n.startswith(start)}
    )
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    draft.chmod(0o755)
    model.save_pretrained(draft)
    for name in PROCESSOR:
        shutil.copy(SHIPPED / name, draft)
    for file in draft.iterdir():  # safetensors makes files readable for their owner only
        file.chmod(0o644)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(draft, folder)
    shutil.rmtree(old, ignore_errors=True)
