"""Which Python the scripts take, when they make an environment, and what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.script_tree import SCRIPTS, write_program

# A Python that answers the checks of the script from variables and writes down what it is asked.
FAKE_PYTHON = """#!/usr/bin/env bash
self="$0"
case "$1" in
  --version) echo "Python 3.11.0" ;;
  -c) if [[ "$2" == *executable* ]]; then echo "$self"; else exit 1; fi ;;
  -)
    shift
    for module in "$@"; do [[ " $LACKS " == *" $module "* ]] && exit 1; done
    [[ "$self" == */venv/* && $# -gt 2 && -n "$VENV_IS_BARE" ]] && exit 1
    exit 0 ;;
  -m)
    echo "$self $*" >>"$CALLS"
    if [[ "$2" == venv ]]; then mkdir -p "$3/bin" && cp "$self" "$3/bin/python"; fi
    if [[ "$2" == pip ]]; then exit "${PIP_STATUS:-0}"; fi ;;
esac
"""
CALL = """
set -euo pipefail
source "$SCRIPTS/python_environment.sh"
PYTHON=""
prepare_python "$ROOT" "$ROOT/requirements.txt" "$ROOT/requirements-dev.txt"
echo "PYTHON=$PYTHON"
"""


@pytest.fixture
def prepare(tmp_path):
    """Calls prepare_python with only fake Pythons on the PATH; returns process and pip's calls."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("cat", "sha256sum", "cut", "cp", "mkdir", "bash", "env"):
        (programs / name).symlink_to(Path("/usr/bin") / name)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "requirements-dev.txt").write_text("pytest\n")
    calls = tmp_path / "calls"

    def run(**environ: str):
        calls.write_text("")
        base = {"PATH": str(programs), "SCRIPTS": str(SCRIPTS), "ROOT": str(tmp_path)}
        done = subprocess.run(
            ["/usr/bin/bash", "-c", CALL],
            env={**base, "LACKS": "", "VENV_IS_BARE": "", "CALLS": str(calls), **environ},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done, calls.read_text().splitlines()

    run.programs = programs
    run.root = tmp_path
    return run


def test_a_python_that_has_everything_is_taken(prepare):
    python = write_program(prepare.programs / "python3", FAKE_PYTHON)
    done, calls = prepare()
    assert done.stdout == f"PYTHON={python}\n" and calls == []


def test_else_an_environment_is_made_and_kept(prepare):
    write_program(prepare.programs / "python3", FAKE_PYTHON)
    done, calls = prepare(LACKS="torch")
    python = prepare.root / ".venv" / "bin" / "python"
    assert done.stdout == f"PYTHON={python}\n", done.stderr
    assert calls[0].endswith(f"python3 -m venv {prepare.root / '.venv'}")
    files = [f"-r {prepare.root / name}" for name in ("requirements.txt", "requirements-dev.txt")]
    assert calls[1].startswith(f"{python} -m pip install") and all(x in calls[1] for x in files)
    done, calls = prepare(LACKS="torch")
    assert done.stdout == f"PYTHON={python}\n" and calls == []


def test_changed_requirements_are_installed(prepare):
    write_program(prepare.programs / "python3", FAKE_PYTHON)
    prepare(LACKS="torch")
    (prepare.root / "requirements.txt").write_text("torch\nwandb\n")
    _, calls = prepare(LACKS="torch")
    assert len(calls) == 1 and "pip install" in calls[0]


def test_the_named_environment_is_used_before_any_other(prepare):
    write_program(prepare.programs / "python3", FAKE_PYTHON)
    mine = write_program(prepare.root / "venv" / "bin" / "python", FAKE_PYTHON)
    done, calls = prepare(FASTER_R3_VENV=str(prepare.root / "venv"))
    assert done.stdout == f"PYTHON={mine}\n" and calls == []
    done, calls = prepare(FASTER_R3_VENV=str(prepare.root / "venv"), VENV_IS_BARE="1")
    assert done.stdout == f"PYTHON={mine}\n"
    assert len(calls) == 1 and calls[0].startswith(f"{mine} -m pip install")


def test_debian_without_venv_is_told_what_to_install(prepare):
    write_program(prepare.programs / "python3", FAKE_PYTHON)
    done, calls = prepare(LACKS="torch ensurepip")
    assert done.returncode == 1 and calls == []
    assert "apt install python3-venv" in done.stderr


def test_no_python_at_all(prepare):
    done, _ = prepare()
    assert done.returncode == 1 and "no Python 3.10 or newer found" in done.stderr


def test_a_failed_install_stops_and_is_tried_again(prepare):
    write_program(prepare.programs / "python3", FAKE_PYTHON)
    done, _ = prepare(LACKS="torch", PIP_STATUS="1")
    assert done.returncode == 1 and "pip failed" in done.stderr and "PYTHON=" not in done.stdout
    done, calls = prepare(LACKS="torch")
    assert done.returncode == 0 and len(calls) == 1


def test_this_python_runs_the_project():
    # The real check, on the interpreter of these tests: it found everything to get here.
    call = 'source "$1/python_environment.sh"; python_has "$2" "${REQUIRED_MODULES[@]}"'
    command = ["bash", "-c", call, "x", str(SCRIPTS), sys.executable]
    assert subprocess.run(command, env=os.environ, timeout=30).returncode == 0
    missing = ["bash", "-c", call.replace("[@]}\"", "[@]}\" no_such_module"), *command[3:]]
    assert subprocess.run(missing, env=os.environ, timeout=30).returncode == 1
