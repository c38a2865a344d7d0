"""``vlmfast check``: what is checked, in which order, and what it found."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from vlmfast.core.env import environment
from vlmfast.kernels._triton import limitation
from vlmfast.kernels.catalogue import KERNELS

from .rows import Row

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast check``."""
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes and prompts, for a minute on two cores"
    )
    parser.add_argument(
        "--launches",
        action="store_true",
        help="instead: count what a request launches on a GPU and what the host reads; needs none",
    )
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="RECIPE",
        dest="recipes",
        help="with --launches: recipe to count; may be given several times (default: none)",
    )
    parser.add_argument(
        "--image-size",
        type=size,
        metavar="WIDTHxHEIGHT",
        help="with --launches: of the image in pixels (default: 672x672)",
    )


def size(text: str) -> tuple[int, int]:
    """Width and height of an image: ``672x672``."""
    width, _, height = text.partition("x")
    if not all(part.isascii() and part.isdigit() and int(part) for part in (width, height)):
        raise ArgumentTypeError(f"{text!r} is no size; WIDTHxHEIGHT, such as 672x672, is allowed")
    return int(width), int(height)


@dataclass(frozen=True)
class Report:
    """What was found.

    Parameters
    ----------
    device : str
        Name of the GPU, or ``cpu``.
    how : str
        How the kernels ran.
    kernels, model : list of Row
    copy_rate : float or None
        Bytes per second of a large copy, on CUDA alone.
    """

    device: str
    how: str
    kernels: list[Row]
    model: list[Row]
    copy_rate: float | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(row.passed is not False for row in (*self.kernels, *self.model))

    @property
    def failed(self) -> list[str]:
        """Kernel files that failed, in alphabetical order."""
        return sorted({row.name for row in self.kernels if row.passed is False} & set(KERNELS))

    @property
    def setting(self) -> str | None:
        """The setting that turns off the kernels that failed."""
        if not self.failed:
            return None
        return f"VLMFAST_KERNELS={','.join(f'-{name}' for name in self.failed)}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, without paths, host or user names."""
        return {
            "passed": self.passed,
            "setting": self.setting,
            "device": self.device,
            "how": self.how,
            "copy_bytes_per_s": self.copy_rate,
            "kernels": [asdict(row) for row in self.kernels],
            "model": [asdict(row) for row in self.model],
            "environment": environment(),
        }


def check(vlm: VLM, *, quick: bool = False) -> Report:
    """Check the kernels and a model on the model's device."""
    from .model import check_model
    from .worker import spawned

    device = vlm.adapter.device
    cuda = device.type == "cuda"
    reason = None if device.type == "cpu" else limitation(device)
    if reason is None:
        kernels, copy_rate, reason = collected(spawned(KERNELS, device, quick=quick))
    else:
        kernels, copy_rate = [], None
    how = "compiled for this GPU"
    if not cuda:
        how = "in Triton's interpreter; on this device their PyTorch references answer"
    if reason is not None:
        kernels = [Row("all kernels", None, note=reason)]
        how = "not checked: their PyTorch references run here"
    others = [torch.cuda.device(i) for i in range(torch.cuda.device_count()) if i != device.index]
    model = check_model(vlm, quick=quick, others=others if cuda else (), copy_rate=copy_rate)
    name = torch.cuda.get_device_name(device) if cuda else device.type
    return Report(name, how, kernels, list(model), copy_rate)


def collected(lines: Iterable[dict[str, Any]]) -> tuple[list[Row], float | None, str | None]:
    """Rows, copy rate, and the reason if nothing could be checked, of `worker.spawned`."""
    rows, copy_rate, reason = [], None, None
    for line in lines:
        if "row" in line:
            rows.append(Row(**line["row"]))
        copy_rate = line.get("copy_rate", copy_rate)
        reason = line.get("missing", reason)
    return rows, copy_rate, reason


def summary(rows: Iterable[Row]) -> list[Row]:
    """One row per kernel: its failures, or the largest deviation and the slowest timed case."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    merged = []
    for name, group in found.items():
        wrong = [row for row in group if row.passed is False]
        if wrong:
            more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            about = f"{len(wrong)} of {len(group)} cases failed"
            first = ": ".join(part for part in (wrong[0].about, wrong[0].note) if part)
            merged.append(Row(name, False, about, first + more))
        elif len(group) == 1:
            merged.append(group[0])
        else:
            errors = [row.error for row in group if row.error is not None]
            timed = [row for row in group if row.seconds is not None]
            last = max(timed, key=lambda row: row.seconds or 0.0, default=group[0])
            merged.append(
                Row(
                    name,
                    True,
                    f"{len(group)} cases",
                    error=max(errors, default=None),
                    seconds=last.seconds,
                    bytes=last.bytes,
                    share=last.share,
                )
            )
    return merged
