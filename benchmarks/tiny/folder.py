"""Write `tiny` as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from architecture import IMAGE_SIZE, PATCH, PINPOINTS, build_model
from bpe import BOS_ID, EOS_ID, PAD_ID
from torch import Tensor
from transformers import GenerationConfig, LlavaNextProcessor, PreTrainedTokenizerFast

from vlmfast.errors import VLMFastError


class ExportError(VLMFastError):
    """The checkpoint does not contain this model."""


# Text parts are joined verbatim. An image part becomes its placeholder and a newline. The tokenizer
# adds the <s>.
CHAT_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'assistant' -%}{{ ' ASSISTANT: ' }}"
    "{%- elif m['role'] == 'user' -%}{{ 'USER: ' if loop.first else '</s>USER: ' }}"
    "{%- else -%}{{ raise_exception('tiny knows the roles user and assistant only') }}"
    "{%- endif -%}"
    "{%- if m['content'] is string -%}{{ m['content'] }}"
    "{%- else -%}{%- for part in m['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<image>\n' }}"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- else -%}{{ raise_exception('tiny takes text and image parts; a clip is its frames, each '"
    " + 'behind the text frame 1, frame 2 and so on') }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}"
)


def build_processor(tokenizer_file: str | Path) -> LlavaNextProcessor:
    """Build the processor around a saved ``tokenizer.json``."""
    from transformers import LlavaNextImageProcessor

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
        model_max_length=4096,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    images = LlavaNextImageProcessor(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_grid_pinpoints=PINPOINTS,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        do_convert_rgb=True,
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
    )


def export_state(state: dict[str, Tensor], tokenizer_file: str | Path, folder: str | Path) -> None:
    """Write a folder for ``from_pretrained`` (bf16), replacing ``folder`` atomically.

    Parameters
    ----------
    state : dict of str to torch.Tensor
        Of the averaged `network.Packed`; the training heads are left out.
    """
    folder, start = Path(folder), "module.model."
    model = build_model().to(torch.bfloat16)  # type: ignore[arg-type]  # its wrapper hides self
    own = {n.removeprefix(start): v for n, v in state.items() if n.startswith(start)}
    report = model.load_state_dict(own, strict=False)
    missing = [n for n in report.missing_keys if n != "lm_head.weight"]  # tied to the embedding
    if missing or report.unexpected_keys:
        raise ExportError(f"missing {missing}, unexpected {report.unexpected_keys}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    draft.chmod(0o755)
    model.save_pretrained(draft)
    build_processor(tokenizer_file).save_pretrained(draft)
    for file in draft.iterdir():  # safetensors makes files readable for their owner only
        file.chmod(0o644)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(draft, folder)
    shutil.rmtree(old, ignore_errors=True)


def export(checkpoint: str | Path, folder: str | Path) -> None:
    """Export the averaged weights of a training folder's ``checkpoint.pt``."""
    checkpoint = Path(checkpoint)
    if checkpoint.is_dir():
        checkpoint = checkpoint / "checkpoint.pt"
    if not checkpoint.is_file():
        raise ExportError(f"no checkpoint at {checkpoint}")
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    export_state(state["average"], checkpoint.with_name("tokenizer.json"), folder)
