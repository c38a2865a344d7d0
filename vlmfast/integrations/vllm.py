"""``vlmfast export --for vllm``: a checkpoint that vLLM loads and prompts as this library does.

Two things differ from a folder that transformers saves. vLLM looks for the weights of a CLIP or
SigLIP tower under ``vision_tower.vision_model``. And its chat route adds no special tokens to a
rendered template, so the template must write BOS itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmfast.core.files import (
    make_folder,
    open_to_read,
    read_text,
    readable,
    replace_bytes,
    replace_text,
    replacing,
)
from vlmfast.errors import ModelError, VLMFastError

FAMILIES = ("llava", "llava_next", "llava_onevision")
_TEMPLATE, _BOS = "chat_template.jinja", "{{- bos_token -}}"
_TOWER, _INDEX = "vision_tower.", "model.safetensors.index.json"
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")


def export(model: str | Path, out: str | Path) -> list[Path]:
    """Write a copy of a checkpoint that vLLM loads.

    Parameters
    ----------
    model : str or Path
        A folder, or ``"tiny"``.
    out : str or Path
        A new or empty folder.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    VLMFastError
        `ModelError` for a checkpoint that is no local folder, of another family, or without
        safetensors or a chat template; also if ``out`` is not empty or cannot be written.
    """
    folder, out = folder_of(model), Path(out)
    config = _json(folder / "config.json")
    if config.get("model_type") not in FAMILIES:
        raise ModelError(
            f"{model} is a {config.get('model_type')!r} model; --for vllm exports "
            f"{', '.join(FAMILIES)}"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"{folder} has no safetensors to export")
    templates = _templates(folder)
    make_folder(out)
    if any(out.iterdir()):
        raise VLMFastError(f"{out} is not empty; --for vllm writes a new folder")
    written = []
    for shard in shards:
        replace_bytes(out / shard.name, [_renamed(shard)])
        written.append(out / shard.name)
    for file in sorted(folder.iterdir()):
        if file.suffix in _COPIED and file.name not in (_INDEX, *templates):
            _copy(file, out / file.name)
            written.append(out / file.name)
    if (folder / _INDEX).exists():
        index = _json(folder / _INDEX)
        index["weight_map"] = {new_name(key): file for key, file in index["weight_map"].items()}
        replace_text(out / _INDEX, json.dumps(index, indent=1) + "\n")
        written.append(out / _INDEX)
    for name, text in templates.items():
        replace_text(out / name, text)
        written.append(out / name)
    return written


def folder_of(model: str | Path) -> Path:
    """The folder of a checkpoint.

    Raises
    ------
    ModelError
        If it is not on this machine.
    """
    folder = Path(__file__).parents[1] / "weights" / "tiny" if model == "tiny" else Path(model)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{model} is no folder of a checkpoint and not 'tiny'; download a hub id first, with "
            "'hf download'"
        )
    return folder


def new_name(key: str) -> str:
    """The name that vLLM expects of a weight."""
    head, tower, rest = key.partition(_TOWER)
    if not tower or rest.startswith("vision_model.") or (head and not head.endswith("model.")):
        return key
    return f"{head}{tower}vision_model.{rest}"


def with_bos(template: str) -> str:
    """A chat template that writes BOS exactly once, at the beginning."""
    return template if "bos_token" in template else _BOS + template


def _renamed(shard: Path) -> bytes:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    try:
        tensors = {new_name(key): tensor for key, tensor in load_file(shard).items()}
    except SafetensorError as error:
        raise ModelError(f"{shard} is damaged: {error}") from error
    return save(tensors, {"format": "pt"})


def _templates(folder: Path) -> dict[str, str]:
    """By name, the new text of every file in which the checkpoint stores its chat template."""
    has_bos = bool(_json(folder / "tokenizer_config.json").get("bos_token"))
    add: Callable[[str], str] = with_bos if has_bos else str
    found = {}
    if (folder / _TEMPLATE).exists():
        found[_TEMPLATE] = add(read_text(folder / _TEMPLATE))
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            continue
        values = _json(folder / name)
        if isinstance(values.get("chat_template"), str):
            values["chat_template"] = add(values["chat_template"])
            found[name] = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    if not found:
        raise ModelError(f"{folder} has no chat template to export")
    return found


def _copy(file: Path, to: Path) -> None:
    with readable(file, ModelError):
        source = open_to_read(file)
    with source, replacing(to) as copy:
        shutil.copyfileobj(source, copy)


def _json(path: Path) -> dict[str, Any]:
    with readable(path, ModelError):
        return json.loads(read_text(path))
