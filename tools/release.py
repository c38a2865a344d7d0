"""Build the sdist and the wheel, and test the wheel in a fresh environment: ``make wheel``.

The wheel is built from the sdist, so a file that is missing from either is detected. The files
of the wheel are compared with those under version control, and the metadata of both are checked:
README must have no link that works only in the repository. The wheel is then installed into a new
virtual environment and used from a folder outside the repository. Only files that pass are moved
to ``dist``.

By default the new environment uses the dependencies that are installed for the running Python.
``--download`` installs them from the package index instead, which also finds missing dependencies.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
# A question, its arguments and the answer of the shipped model.
QUESTIONS = (
    (["picture.png", "What is in the bottom left?"], "yellow triangle"),
    (["clip.mp4", "Which way does the cyan star move?", "--num-frames", "4"], "up"),
)


class ReleaseError(Exception):
    """A step failed; the text names the step and the reason."""


def run(command: list[str | Path], cwd: Path) -> str:
    """Output of a command.

    Raises
    ------
    ReleaseError
        If the command fails, with the end of its output.
    """
    # The installed package must be importable without the caller's environment variables.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise ReleaseError(f"{' '.join(map(str, command))} exited with {done.returncode}:\n{end}")
    return done.stdout


def version(root: Path = ROOT) -> str:
    """The version of the package, without importing it."""
    names: dict[str, str] = {}
    exec((root / "vlmfast" / "version.py").read_text(encoding="utf-8"), names)
    return names["__version__"]


def expected_files(root: Path = ROOT) -> set[str]:
    """Paths that the wheel must contain in addition to its metadata."""
    tracked = run(["git", "ls-files", "-z", "vlmfast"], root).split("\0")
    return {path for path in tracked if path}


def wheel_problems(wheel: Path, expected: set[str]) -> list[str]:
    """One line for each file that is missing from the wheel or should not be in it.

    Parameters
    ----------
    wheel : Path
    expected : set of str
        Paths without those of the metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
    info = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    found = [f"missing: {name}" for name in sorted(expected - names)]
    found += [f"not under version control: {name}" for name in sorted(names - info - expected)]
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if not any(path.partition("/")[2] == name for path in info):
            found.append(f"missing: .dist-info/{name}")
    return found


def metadata_of(file: Path) -> bytes:
    """The metadata of a wheel or an sdist."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return archive.read(name)
    with tarfile.open(file) as archive:
        (name,) = (n for n in archive.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO"))
        return archive.extractfile(name).read()


def metadata_problems(content: bytes, address: str | None) -> list[str]:
    """One line for each problem that a package index or its readers would meet.

    Parameters
    ----------
    content : bytes
        Of ``METADATA`` or ``PKG-INFO``.
    address : str or None
        Of the repository; its URLs must be listed if it is given.
    """
    from packaging.metadata import Metadata

    try:
        metadata = Metadata.from_email(content, validate=True)
    except ExceptionGroup as group:
        return [str(error) for error in group.exceptions]
    found = [
        f"{key} is missing"
        for key in ("summary", "license_expression")
        if not getattr(metadata, key)
    ]
    if metadata.description_content_type != "text/markdown":
        found.append(f"README is {metadata.description_content_type}, not text/markdown")
    found += [f"README: {link} is relative" for link in relative_links(metadata.description or "")]
    listed = metadata.project_urls or {}
    wanted = {"Source", "Documentation", "Changelog", "Issues"} if address else set()
    if set(listed) != wanted:
        found.append(f"URLs are {sorted(listed)}, not {sorted(wanted)}")
    return found


def relative_links(text: str) -> list[str]:
    """Targets of links and images in Markdown that work only in the repository."""
    from html.parser import HTMLParser

    from markdown_it import MarkdownIt

    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(v or "" for k, v in attrs if k in ("href", "src", "srcset"))

    Links().feed(MarkdownIt("commonmark").enable("table").render(text))
    return [link for link in found if hook().is_relative(link)]


def hook() -> ModuleType:
    """``hatch_build.py``, which writes the README of the package."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, built in ``folder``."""
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT], ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    for file in (sdist, wheel):
        if not file.name.startswith(f"vlmfast-{version()}"):
            raise ReleaseError(f"{file.name} does not have version {version()}")
    return sdist, wheel


def install(wheel: Path, folder: Path, download: bool) -> Path:
    """Install the wheel into a new environment in ``folder``. Returns the folder of its scripts."""
    run([sys.executable, "-m", "venv", folder], ROOT)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [scripts / "python", "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", *([] if download else ["--no-deps"]), wheel], ROOT)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run([scripts / "python", "-c", code], folder).strip())
    if not download:
        # Searched after the environment's own packages, so this wheel is imported. An editable
        # installation is not in these folders: the checkout itself stays out of the path.
        borrowed = [
            path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
        ]
        (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    code = "import vlmfast; print(vlmfast.__file__)"
    home = Path(run([scripts / "python", "-c", code], folder).strip())
    if packages.resolve() not in home.resolve().parents:
        raise ReleaseError(f"vlmfast was imported from {home}, not from the wheel")
    unmet = unmet_requirements(scripts / "python", folder)
    if unmet:
        raise ReleaseError("requirements of the wheel are not met:\n" + "\n".join(unmet))
    return scripts


def unmet_requirements(python: Path, cwd: Path) -> list[str]:
    """The lines of ``pip check`` about vlmfast; other packages are ignored."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith("vlmfast ")]


def use(scripts: Path, folder: Path) -> None:
    """Run the installed commands in ``folder``, which contains only the examples."""
    vlmfast = scripts / "vlmfast"
    printed = run([vlmfast, "--version"], folder)
    if version() not in printed.split():
        raise ReleaseError(f"vlmfast --version printed {printed.strip()!r}, not {version()}")
    for arguments, answer in QUESTIONS:
        printed = run([vlmfast, "ask", *arguments, "--recipe", "balanced"], folder)
        if printed.splitlines()[0] != answer:
            raise ReleaseError(f"vlmfast ask {arguments[0]} answered {printed!r}, not {answer!r}")
    for command in (["methods"], ["env"], ["train", "elastic", "--help"]):
        run([vlmfast, *command], folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--download", action="store_true", help="install all dependencies from the package index"
    )
    args = parser.parse_args()
    say = sys.stdout.write
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        try:
            say("building the sdist and the wheel ...\n")
            sdist, wheel = build(temporary / "dist")
            if found := wheel_problems(wheel, expected_files()):
                raise ReleaseError("\n".join([f"{wheel.name}:", *found]))
            address = hook().repository()
            for file in (sdist, wheel):
                if found := metadata_problems(metadata_of(file), address):
                    raise ReleaseError("\n".join([f"{file.name}:", *found]))
            if address is None:
                say("VLMFAST_REPOSITORY is not set: README has no links to the repository\n")
            say("installing the wheel into a fresh environment ...\n")
            scripts = install(wheel, temporary / "environment", args.download)
            say("running its commands ...\n")
            shutil.copytree(ROOT / "examples", temporary / "empty")
            use(scripts, temporary / "empty")
        except ReleaseError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            shutil.move(file, ROOT / "dist" / file.name)
            say(f"dist/{file.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
