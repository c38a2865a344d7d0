"""Use the wheels in a fresh environment: ``python tools/release.py dist/*.whl``, by ``make wheel``.

They are installed into a new virtual environment and asked from a folder outside the repository,
vlmfast first, and then with the plug-in for vLLM; vLLM is not. By default they use the
dependencies that are installed for the running Python; ``--download`` installs them from the
package index, which also finds missing ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A question, its arguments and the answer of the shipped model.
QUESTIONS = (
    (["picture.png", "What is in the bottom left?"], "yellow triangle"),
    (["clip.mp4", "Which way does the cyan star move?", "--num-frames", "4"], "up"),
)
PLUG_IN = """
from importlib.metadata import entry_points
(found,) = entry_points(group="vllm.general_plugins", name="vlmfast")
print(found.load().__module__)
"""


class Environment:
    """A new virtual environment in a folder, which has a copy of the examples."""

    def __init__(self, folder: Path, download: bool) -> None:
        self.folder, self.download = folder, download
        shutil.copytree(ROOT / "examples", folder / "examples")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        (self.packages,) = (folder / "venv" / "lib").glob("*/site-packages")
        if not download:
            # Searched after the environment's own; an editable installation is not in them.
            own = [path for path in sys.path if path.endswith("-packages")]
            (self.packages / "borrowed.pth").write_text("\n".join(own), encoding="utf-8")

    def run(self, *command: str | Path, code: int | None = 0) -> str:
        """Output of a program of the environment, which must not find the checkout."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        first, *words = command
        done = subprocess.run(
            [self.folder / "venv" / "bin" / first, *words],
            cwd=self.folder / "examples", env=env, capture_output=True, text=True,
        )  # fmt: skip
        said = done.stdout + done.stderr
        if code is not None and done.returncode != code:
            raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{said}")
        return done.stdout if code == 0 else said

    def install(self, wheel: Path) -> None:
        more = [] if self.download else ["--no-deps"]
        self.run("python", "-m", "pip", "install", "--quiet", *more, wheel)
        unmet = self.run("python", "-m", "pip", "check", code=None).splitlines()
        if ours := [line for line in unmet if line.startswith("vlmfast")]:
            raise SystemExit("\n".join(ours))


def use(python: Environment) -> None:
    """Run the commands of vlmfast."""
    found = Path(python.run("python", "-c", "import vlmfast; print(vlmfast.__file__)").strip())
    if python.packages not in found.parents:
        raise SystemExit(f"vlmfast was imported from {found}, not from the wheel")
    for arguments, answer in QUESTIONS:
        printed = python.run("vlmfast", "ask", *arguments, "--recipe", "balanced")
        if printed.splitlines()[0] != answer:
            raise SystemExit(f"vlmfast ask {arguments[0]} answered {printed!r}, not {answer!r}")
    for words in (["methods"], ["env"], ["train", "elastic", "--help"]):
        python.run("vlmfast", *words)


def use_plug_in(python: Environment) -> None:
    """Load the plug-in as vLLM does, and be refused without vLLM."""
    if (module := python.run("python", "-c", PLUG_IN).strip()) != "vlmfast_vllm":
        raise SystemExit(f"the entry point for vLLM is of {module}")
    said = python.run("vlmfast", "serve", "tiny", "--engine", "vllm", code=2)
    if "--engine vllm needs vLLM: pip install vllm" not in said:
        raise SystemExit(f"without vLLM the server says {said!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("plug_in", type=Path)
    parser.add_argument("--download", action="store_true", help="install all dependencies anew")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        python = Environment(Path(name).resolve(), args.download)
        for wheel, check in ((args.wheel, use), (args.plug_in, use_plug_in)):
            python.install(wheel.resolve())
            check(python)


if __name__ == "__main__":
    main()
