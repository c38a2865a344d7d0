"""Write `tiny` as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, LlavaNextProcessor, PreTrainedTokenizerFast

from vlmfast.models.tiny.build import IMAGE_SIZE, PATCH, PINPOINTS, build_model
from vlmfast.models.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID

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
    """Write a folder for ``from_pretrained`` (bf16).

    Parameters
    ----------
    state : dict of str to torch.Tensor
        Of the averaged `network.Packed`; the training heads are left out.
    """
    start = "module.model."
    model = build_model().to(torch.bfloat16)  # type: ignore[arg-type]  # its wrapper hides self
    own = {n.removeprefix(start): v for n, v in state.items() if n.startswith(start)}
    model.load_state_dict(own)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
    build_processor(tokenizer_file).save_pretrained(folder)
