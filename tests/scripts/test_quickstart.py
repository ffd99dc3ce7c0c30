"""The quickstart script around stubs: order of the parts, settings, and no service left behind."""

import os
import subprocess
import sys

import pytest

from tests.scripts.script_tree import make_tree, trainer_arguments, write_program
from train.config import parse_args

MAKER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "made").touch()
"""
SERVICE = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["HOME"])
(folder / "service.pid").write_text(str(os.getpid()))
if (folder / "service.broken").exists():
    sys.exit("no port for me")
pathlib.Path(sys.argv[sys.argv.index("--port-file") + 1]).write_text("4321\\n")
time.sleep(60)
"""
TORCHRUN = """#!/usr/bin/env bash
printf 'ARG<%s>\\n' "$@"
echo "SERVICE_RUNS<$(kill -0 "$(<"$HOME/service.pid")" && echo yes)>"
exit "${STUB_STATUS:-0}"
"""


@pytest.fixture
def quickstart(tmp_path):
    """Runs quickstart.sh of a tree with stub tools, on the interpreter of these tests."""
    tree = make_tree(tmp_path / "a tree")
    (tree / "requirements.txt").write_text("")
    tools = tree / "tools"
    tools.mkdir()
    (tools / "make_tiny_checkpoint.py").write_text(MAKER)
    (tools / "reward_service.py").write_text(SERVICE)
    (tools / "summarize_run.py").write_text("import sys\nprint('TABLE', *sys.argv[1:])\n")
    python = f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n'
    write_program(tmp_path / "venv" / "bin" / "python", python)
    write_program(tmp_path / "torchrun", TORCHRUN)

    def run(*arguments: str, **environ: str):
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "FASTER_R3_VENV": str(tmp_path / "venv"),
            "TORCHRUN": str(tmp_path / "torchrun"),
            "EXP_NAME": "quick",
            **environ,
        }
        script = tree / "scripts" / "quickstart.sh"
        return subprocess.run(
            ["bash", str(script), *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    run.folder = tmp_path
    return run


def service_is_gone(folder) -> bool:
    """Whether the stub service that wrote its number has ended."""
    try:
        os.kill(int((folder / "service.pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_the_parts_run_in_order_and_the_service_is_stopped(quickstart):
    done = quickstart()
    assert done.returncode == 0, done.stderr
    output = quickstart.folder / "output"
    assert "SERVICE_RUNS<yes>" in done.stdout and service_is_gone(quickstart.folder)
    assert done.stdout.splitlines()[-1] == f"TABLE {output / 'R3' / 'quick'}"
    assert (output / "tiny_bagel" / "made").is_file()
    config = parse_args(trainer_arguments(done.stdout), environ={})
    assert config.rewards.reward_url == "http://127.0.0.1:4321"
    assert config.paths.model_path == str(output / "tiny_bagel")
    assert config.schedule.total_steps == 8 and config.schedule.save_every == 8
    assert config.switches.recipe == "consistent" and config.processes.device == "cpu"
    assert config.processes.nproc_per_node == 2 and config.images.image_size == 64
    assert config.rl.group_size == 4 and config.samples_per_rank == 2
    prompts = (output / "quickstart_train.jsonl").read_text().splitlines()
    assert len(prompts) == 5 and all('"colors"' in line for line in prompts)


def test_variables_and_flags_of_the_caller_win(quickstart):
    done = quickstart(
        "--image_size", "32", TOTAL_STEPS="12", R3_RECIPE="upstream", REWARD_URL="http://a:1"
    )  # fmt: skip
    config = parse_args(trainer_arguments(done.stdout), environ={})
    assert config.schedule.total_steps == 12 and config.schedule.eval_freq == 12
    assert config.switches.recipe == "upstream" and config.images.image_size == 32
    assert config.rewards.reward_url == "http://a:1"
    assert not (quickstart.folder / "service.pid").exists()


def test_the_checkpoint_of_an_earlier_run_is_taken_again(quickstart):
    quickstart()
    made = quickstart.folder / "output" / "tiny_bagel" / "made"
    made.unlink()
    assert quickstart().returncode == 0 and not made.exists()


def test_a_failed_trainer_is_named_and_its_status_kept(quickstart):
    done = quickstart(STUB_STATUS="3")
    assert done.returncode == 3 and "console.log" in done.stderr and "TABLE" not in done.stdout
    assert service_is_gone(quickstart.folder)


def test_a_service_that_does_not_start_is_shown(quickstart):
    (quickstart.folder / "service.broken").touch()
    done = quickstart()
    assert done.returncode == 1 and "no port for me" in done.stderr
    assert "ARG<" not in done.stdout
