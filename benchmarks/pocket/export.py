"""Write trained weights alone: ``python benchmarks/pocket/export.py RUN PARTS FOLDER``.

Projector and adapter of the last checkpoint of ``train.py`` in bfloat16, the curve, and the notices
that the decoder's terms ask for. ``build.py`` takes such a folder as its ``--run``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import build
from checkpoints import CURVE, save_weights
from parts import terms

from vlmfast.core.files import replace_text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write trained weights alone.")
    parser.add_argument("run", type=Path, help="folder of train.py")
    parser.add_argument("parts", type=Path, help="folder of parts.py")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    _, state = build.read_trained(args.run)
    path = save_weights(args.folder, state)
    replace_text(args.folder / "GEMMA_TERMS.txt", terms(args.parts / "decoder") + "\n")
    replace_text(args.folder / "NOTICE.md", build.NOTICE)
    if (curve := args.run / CURVE).exists():
        replace_text(args.folder / CURVE, curve.read_text(encoding="utf-8"))
    print(f"made {path}, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
