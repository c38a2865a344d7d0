"""``vlmfast completion``: the scripts, run in the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vlmfast.cli import main
from vlmfast.cli.commands import COMMANDS
from vlmfast.core.recipe import PRESETS
from vlmfast.core.registry import stage_names

# Complete the last of the words, as readline does.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
name=$(complete -p vlmfast | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$name vlmfast "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from contextlib import redirect_stdout

    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in ("bash", "zsh", "fish"):
        found[shell] = folder / f"vlmfast.{shell}"
        with found[shell].open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return found


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vlmfast me", {"methods"}),
        ("vlmfast ask --max-", {"--max-new-tokens", "--max-kv-tokens"}),
        ("vlmfast ask x q --recipe hi", {"hired"}),
        ("vlmfast compare --recipe ba", {"balanced"}),
        ("vlmfast eval --recipe cac", {"cache"}),
        ("vlmfast methods pyramid", {"pyramiddrop", "pyramidkv"}),
        ("vlmfast methods --where c", {"cache"}),
        ("vlmfast train el", {"elastic"}),
        ("vlmfast reproduce pyr", {"pyramiddrop"}),
        ("vlmfast train elastic --gate", {"--gate-from"}),
        ("vlmfast bench --drafter draft-e", {"draft-eagle"}),
    ],
)
def test_bash_completes(scripts: dict[str, Path], line: str, expected: set[str]) -> None:
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(scripts["bash"]), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_knows_commands_options_and_methods(scripts: dict[str, Path], shell: str) -> None:
    text = scripts[shell].read_text()
    dashes = "" if shell == "fish" else "--"
    for word in (*COMMANDS, *PRESETS, *stage_names(), f"{dashes}max-kv-tokens"):
        assert word in text
    if path := shutil.which(shell):
        done = subprocess.run(
            [path, "-n", str(scripts[shell])], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["completion", "cmd"])
    assert leaving.value.code == 2
    assert "bash" in capsys.readouterr().err
