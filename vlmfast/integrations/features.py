"""Folders of encoded images: ``manifest.jsonl``, and one safetensors file for each image.

The first line of the manifest describes the model and the recipe, every other line an image. A
folder stays valid if the process is killed: files are replaced atomically, lines are only appended
after the file that they describe, and readers drop an incomplete last line. The same images,
model and recipe give the same bytes, interrupted or not.

A file holds ``image_embeds`` (1, K, D), as vLLM and SGLang take the features of an image, ``kept``
(K,) and ``position_ids`` (P, K), as in `vlmfast.api.encoding.EncodedImage`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlmfast.api.encoding import check_encodable, encode_image
from vlmfast.api.vlm import VLM
from vlmfast.core.files import make_folder, read_bytes, readable, replace_bytes
from vlmfast.core.journal import Journal, read_lines
from vlmfast.engine.features import settings_of_files
from vlmfast.errors import MediaError, VLMFastError
from vlmfast.eval.runner import stage_weights, weights_sha256

MANIFEST, FORMAT = "manifest.jsonl", "vlmfast-features/2"
_OF_MODEL = ("model", "weights_sha256", "settings_sha256", "stage_weights")
_HEADER = ("format", "layout", *_OF_MODEL, "recipe", "dtype")
_ENTRY = ("source", "source_sha256", "size", "tokens", "kept", "file", "bytes", "sha256")


@dataclass(frozen=True)
class Features:
    """A folder of encoded images that is read.

    Parameters
    ----------
    folder : Path
    header : dict
        The model, its weights and settings, the recipe and the dtype.
    entries : list of dict
        Images in the order in which they were encoded: ``source``, ``source_sha256``, ``size``
        (height, width), ``tokens`` before and ``kept`` after the recipe, ``file``, its ``bytes``
        and ``sha256``.
    """

    folder: Path
    header: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.entries)

    def load(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of one image.

        Raises
        ------
        VLMFastError
            If its file is missing, was cut short or has other content than when it was written.
        """
        from safetensors.torch import load

        return load(_checked(self.folder, self.entries[index]))


def open_features(folder: str | Path, vlm: VLM | None = None) -> Features:
    """Open a folder that `encode_files` wrote.

    Parameters
    ----------
    folder : str or Path
    vlm : VLM, optional
        The model that the features are for.

    Raises
    ------
    VLMFastError
        If it is not such a folder, is damaged, or was written by a model with other weights or
        settings, or another processor.
    """
    folder = Path(folder)
    header, *entries = _read(folder)
    if vlm is not None and (found := weights_sha256(vlm)) != header["weights_sha256"]:
        raise VLMFastError(
            f"{folder / MANIFEST} belongs to the model {header['model']} with the weights "
            f"{header['weights_sha256'][:12]}, not to this one with {str(found)[:12]}"
        )
    if vlm is not None:
        settings = settings_of_files(vlm.adapter, language=False)
        if settings != header["settings_sha256"]:
            raise VLMFastError(
                f"{folder / MANIFEST} was written with other settings of the model, its adapters "
                "or its processor; use those, or encode the images again"
            )
    return Features(folder, header, entries)


def encode_files(
    vlm: VLM,
    files: Sequence[str | Path],
    recipe: Any,
    out: str | Path,
    *,
    model: str = "",
    done: Callable[[int], None] = lambda number: None,
) -> Features:
    """Encode images into a folder; images that are there already are not encoded again.

    Parameters
    ----------
    vlm : VLM
    files : sequence of str or Path
    recipe : str, Stage or Recipe
    out : str or Path
    model : str
        Name of the model in the manifest.
    done : callable
        Called with the number of images so far, after each.

    Raises
    ------
    VLMFastError
        For a recipe whose work features do not carry (`check_encodable`), an image that cannot be
        read, a folder that cannot be written, or one of another model, recipe or dtype.
    """
    out, recipe = Path(out), vlm.recipe(recipe)
    check_encodable(recipe)
    header = {
        "format": FORMAT,
        "layout": "image_embeds",
        "model": model,
        "weights_sha256": weights_sha256(vlm),
        "settings_sha256": settings_of_files(vlm.adapter, language=False),
        "stage_weights": stage_weights(vlm, recipe),
        "recipe": str(recipe),
        "dtype": str(vlm.adapter.dtype).removeprefix("torch."),
    }
    make_folder(out)
    with Journal(out / MANIFEST, header, _ENTRY) as journal:
        known = {(e["source"], e["source_sha256"]): e for e in journal.lines}
        for number, file in enumerate(map(Path, files), start=1):
            with readable(file, MediaError):
                content = read_bytes(file)
            digest = hashlib.sha256(content).hexdigest()
            entry = known.get((str(file), digest))
            if entry is None or not _is_whole(out, entry):
                new = _encoded(vlm, str(file), content, digest, recipe, out)
                if entry is not None and entry != new:
                    raise VLMFastError(
                        f"{out / entry['file']} was damaged, and encoding {file} again gives other "
                        "features, as on another machine; use another folder"
                    )
                if entry is None:
                    journal.append(new)
                    known[str(file), digest] = new
            done(number)
    return open_features(out)


def _encoded(
    vlm: VLM, source: str, content: bytes, digest: str, recipe: Any, out: Path
) -> dict[str, Any]:
    """Encode one image into a file; the entry that describes it."""
    from safetensors.torch import save

    try:
        image = encode_image(vlm.adapter, content, recipe)
    except MediaError as error:
        raise MediaError(f"{source}: {error}") from error
    tensors = {
        "image_embeds": image.features[None],
        "kept": image.kept,
        "position_ids": image.position_ids,
    }
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    name = f"{digest}.safetensors"
    replace_bytes(out / name, [data])
    return {
        "source": source,
        "source_sha256": digest,
        "size": list(image.size),
        "tokens": image.tokens,
        "kept": len(image.kept),
        "file": name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


# --- manifests -----------------------------------------------------------------------------------


def _read(folder: Path) -> list[dict[str, Any]]:
    """The header and the entries."""
    path = folder / MANIFEST
    found, _ = read_lines(path)
    if not found:
        raise VLMFastError(f"{folder} has no {MANIFEST} with features; 'vlmfast encode' writes one")
    for number, line in enumerate(found, start=1):
        missing = [key for key in (_HEADER if number == 1 else _ENTRY) if key not in line]
        if missing or (number == 1 and line["format"] != FORMAT):
            what = f"no {missing[0]}" if missing else f"the format {line['format']!r}, not {FORMAT}"
            raise VLMFastError(f"{path}: line {number} is damaged: it has {what}")
    return found


def _is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    try:
        _checked(folder, entry)
    except VLMFastError:
        return False
    return True


def _checked(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """The content of a file, checked against the manifest."""
    name = str(entry["file"])
    path = folder / name
    if Path(name).name != name:
        raise VLMFastError(f"{folder / MANIFEST} names {name!r}, which is outside its folder")
    with readable(path):
        data = read_bytes(path)
    if len(data) != entry["bytes"]:
        raise VLMFastError(
            f"{path} was cut short: it has {len(data)} bytes of {entry['bytes']}; repeat 'vlmfast "
            "encode'"
        )
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise VLMFastError(
            f"{path} is damaged: its sha256 is not that of {MANIFEST}; repeat 'vlmfast encode'"
        )
    return data
