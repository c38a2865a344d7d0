"""Patches of drawn layouts, encoded once by the vision tower and kept in memory-mapped files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from build import Pocket
from objects import Objects
from scenes import KINDS, WORDS, Layout, draw, layout, seed_of
from torch.utils.data import DataLoader, Dataset

from vlmfast.core.files import make_folder, replace_text, replacing

SHARD = 32  # layouts in a file
BACKGROUND = -1  # label
COVERED = 0.4  # share of a patch that an object must cover to be its label


class Patches:
    """Encoded layouts of one part (`scenes.seed_of`).

    Parameters
    ----------
    folder : Path
    part : {"train", "check", "test"}
    pocket : Pocket
    objects : Objects

    Raises
    ------
    SystemExit
        If the folder has patches of other images.
    """

    def __init__(self, folder: Path, part: str, pocket: Pocket, objects: Objects) -> None:
        self.folder, self.part, self.pocket, self.objects = folder, part, pocket, objects
        self.drawings = objects.drawings("train")
        self.classes = list(dict.fromkeys([*objects.names, *WORDS]))
        facts = {"part": part, "size": pocket.size, "classes": self.classes}
        note = folder / "patches.json"
        if note.exists() and json.loads(note.read_text(encoding="utf-8")) != facts:
            raise SystemExit(f"{folder} has patches of other images; remove it")
        make_folder(folder)
        replace_text(note, json.dumps(facts))
        self._shards: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            while self._open(kind):
                pass

    def count(self, kind: str) -> int:
        """Layouts of a kind that are encoded."""
        return SHARD * len(self._shards[kind])

    def layout(self, kind: str, number: int) -> Layout:
        return layout(seed_of(self.part, kind, number), kind, self.drawings, self.pocket.size)

    def features(self, kind: str, number: int) -> np.ndarray:
        """Output of the tower, float16, shape (frames * patches, width)."""
        return self._shards[kind][number // SHARD][0][number % SHARD]

    def labels(self, kind: str, number: int) -> np.ndarray:
        """Index in `classes` of what a patch shows, or -1, int16, shape (frames * patches,)."""
        return self._shards[kind][number // SHARD][1][number % SHARD]

    def fill(self, kind: str, count: int, workers: int = 0) -> None:
        """Encode at least ``count`` layouts of a kind.

        Parameters
        ----------
        kind : {"scene", "word", "video"}
        count : int
        workers : int
            Processes that draw; with 0 this one draws.
        """
        missing = range(len(self._shards[kind]), -(-count // SHARD))
        made = loader(lambda number: self.drawn(kind, number), missing, workers)
        for number, drawn in zip(missing, made, strict=True):
            self._encode(kind, number, *drawn)
            self._open(kind)

    def _paths(self, kind: str, number: int) -> tuple[Path, Path]:
        names = (f"{kind}-{number:05d}-{what}.npy" for what in ("labels", "features"))
        labels, features = (self.folder / name for name in names)
        return labels, features

    def _open(self, kind: str) -> bool:
        """Open the next file of a kind, if there is one."""
        labels, features = self._paths(kind, len(self._shards[kind]))
        if not features.exists():  # written last
            return False
        pair = np.load(features, mmap_mode="r"), np.load(labels, mmap_mode="r")
        self._shards[kind].append(pair)
        return True

    def drawn(self, kind: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and labels of the layouts of a file.

        Returns
        -------
        pixels : torch.Tensor
            As the tower takes them, shape (layouts * frames, 3, size, size).
        labels : torch.Tensor
            int16, shape (layouts, frames * patches).
        """
        images, labels = [], []
        for at in range(number * SHARD, (number + 1) * SHARD):
            of = self.layout(kind, at)
            frames, owners = draw(of, self.objects)
            labels.append(patch_labels(of, owners, self.pocket.side, self.classes))
            images += frames
        pixels = self.pocket.processor.image_processor(images, return_tensors="pt").pixel_values
        return pixels, torch.from_numpy(np.stack(labels))

    def _encode(self, kind: str, number: int, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        rows = torch.cat([self._forward(some) for some in pixels.split(SHARD)])
        shape = (SHARD, labels.shape[1], -1)
        encoded = rows.reshape(shape).to("cpu", torch.float16).numpy()
        for path, array in zip(self._paths(kind, number), (labels.numpy(), encoded), strict=True):
            with replacing(path) as file:
                np.save(file, array)

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the projector receives from the model, shape (images, patches, width)."""
        pocket = self.pocket
        device = next(pocket.tower.parameters()).device
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            output = pocket.tower(pixels.to(device), output_hidden_states=True)
        layer = pocket.model.config.vision_feature_layer
        return output.hidden_states[layer][:, 1:].float()


class _Made(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


def loader(make: Callable[[int], Any], numbers: Sequence[int], workers: int) -> DataLoader:
    """What ``make`` returns for each number, made ahead by processes if ``workers`` is not 0."""
    # They share what the function holds, models as well, and use no GPU.
    context = "fork" if workers else None
    return DataLoader(
        _Made(make),
        sampler=numbers,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
    )


def patch_labels(of: Layout, owners: np.ndarray, side: int, classes: Sequence[str]) -> np.ndarray:
    """Index in ``classes`` of what covers most of each patch, or -1.

    Parameters
    ----------
    of : Layout
    owners : np.ndarray
        As `scenes.draw` returns them, shape (frames, size, size).
    side : int
        Patches in a row.
    classes : sequence of str

    Returns
    -------
    np.ndarray
        int16, shape (frames * side**2,).
    """
    frames, size = owners.shape[:2]
    edge = size // side
    cut = owners.reshape(frames, side, edge, side, edge)
    labels = np.full((frames, side, side), BACKGROUND, np.int16)
    names = {k + 1: at.name for k, at in enumerate(of.frames[0])} | {255: of.word}
    best = np.full(labels.shape, COVERED)
    for owner in np.unique(owners):
        if owner == 0:
            continue
        share = (cut == owner).mean((2, 4))
        labels[share > best] = classes.index(names[int(owner)])
        best = np.maximum(best, share)
    return labels.reshape(-1)
