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
(folder / "made").write_text(" ".join(sys.argv[2:]))
"""
CURVE = """
import os, sys
print("CURVE", *sys.argv[1:])
sys.exit(int(os.environ.get("STUB_VERDICT", "0")))
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
    (tools / "learning_curve.py").write_text(CURVE)
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
    assert (output / "tiny_bagel" / "made").read_text() == "--seed 0"
    assert config.seeds.global_seed == 4396 and config.seeds.data_seed == 42
    assert "CURVE" not in done.stdout
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


@pytest.mark.parametrize(
    "arguments, seed", [("--learn", 0), ("--learn --seed 2", 2), ("--seed 08 --learn", 8)]
)
def test_learning_takes_all_seeds_from_one_and_is_judged(quickstart, arguments, seed):
    done = quickstart(*arguments.split())
    assert done.returncode == 0, done.stderr
    output = quickstart.folder / "output"
    assert done.stdout.splitlines()[-1] == f"CURVE {output / 'R3' / 'quick'}"
    assert (output / f"tiny_bagel_seed{seed}" / "made").read_text() == f"--seed {seed}"
    config = parse_args(trainer_arguments(done.stdout), environ={})
    assert config.paths.model_path == str(output / f"tiny_bagel_seed{seed}")
    assert config.seeds.global_seed == seed
    # Far enough apart that no two runs draw the same prompts, since a step adds its number.
    assert config.seeds.data_seed == 1000 * seed > config.schedule.total_steps or seed == 0
    assert config.schedule.total_steps % 20 == 0 and config.schedule.total_steps <= 1000
    assert config.switches.recipe == "consistent" and config.optimizer.lr > 0


def test_learning_yields_to_the_caller_too(quickstart):
    done = quickstart("--learn", "--weight_decay", "0.1", LR="0", TOTAL_STEPS="40", DATA_SEED="5")
    config = parse_args(trainer_arguments(done.stdout), environ={})
    assert config.optimizer.lr == 0 and config.optimizer.weight_decay == 0.1
    assert config.schedule.total_steps == 40
    assert config.seeds.data_seed == 5 and config.seeds.global_seed == 0


def test_the_verdict_is_the_status(quickstart):
    assert quickstart("--learn", STUB_VERDICT="1").returncode == 1


@pytest.mark.parametrize(
    "arguments", ["--seed 1", "--learn --seed", "--learn --seed x", "--learn --seed -1"]
)
def test_a_seed_that_cannot_work_is_refused_at_once(quickstart, arguments):
    done = quickstart(*arguments.split())
    assert done.returncode == 2 and "expected --learn --seed N" in done.stderr
    assert not (quickstart.folder / "output").exists()
