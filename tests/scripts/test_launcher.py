"""The launcher and the Slurm file, with stubs of torchrun, srun and scontrol that print."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.scripts.script_tree import (
    SCRIPTS,
    arguments_of,
    make_tree,
    trainer_arguments,
    write_program,
)
from train.config import FLAGS, parse_args

LAUNCHER = Path("scripts/train_faster_r3_geneval.sh")
SBATCH = Path("scripts/slurm/train_faster_r3.sbatch")
STUB = """#!/usr/bin/env bash
printf 'ARG<%s>\\n' "$@"
echo "ENV<$WANDB_MODE|$OMP_NUM_THREADS|$PYTHONPATH|$REWARD_API_KEY>"
echo "to stderr" >&2
[[ -z "${STUB_ERROR:-}" ]] || printf 'error: %s\\n' "$STUB_ERROR" "a later one" >&2
[[ -z "${STUB_STATUS:-}" ]] || echo "a long traceback" >&2
exit "${STUB_STATUS:-0}"
"""


@pytest.fixture
def launch(tmp_path):
    """Runs the launcher of a tree in an empty environment with a stub torchrun."""
    tree = make_tree(tmp_path / "a tree")
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "torchrun", STUB)

    def run(*arguments: str, script: Path = LAUNCHER, **environ: str):
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(tree / script), *arguments],
            env={"PATH": path, "HOME": str(tmp_path), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )

    run.folder = tmp_path
    run.tree = tree
    run.programs = programs
    return run


def test_defaults_reach_torchrun_and_the_trainer(launch):
    done = launch(MODEL_PATH="/models/bagel", EXP_NAME="first")
    assert done.returncode == 0, done.stderr
    arguments = arguments_of(done.stdout)
    names = ["--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port"]
    assert arguments[:10:2] == names
    assert arguments[1:10:2] == ["1", "0", "8", "localhost", "29509"]
    assert arguments[10] == str(launch.tree / "train" / "online_rl.py")
    config = parse_args(trainer_arguments(done.stdout), environ={})
    val = config.paths.val_data_path
    expected = parse_args([], environ={}).replace(
        model_path="/models/bagel",
        exp_name="first",
        train_data_path=str(launch.tree / "data/rl_train/train_geneval.jsonl"),
        val_data_path=val,
        nnodes=1,
        node_rank=0,
        nproc_per_node=8,
        master_port=29509,
    )
    assert config == expected


def test_every_variable_of_the_interface_is_passed(launch):
    done = launch(MODEL_PATH="/m")
    passed = {word[2:].split("=")[0] for word in trainer_arguments(done.stdout)}
    not_passed = set(FLAGS) - passed
    # Flags without a variable, and the key that must not show in `ps`.
    assert passed <= set(FLAGS)
    assert "reward_api_key" in not_passed and len(passed) == 66


def test_every_variable_is_explained(launch):
    done = launch(MODEL_PATH="/m")
    passed = {word[2:].split("=")[0].upper() for word in trainer_arguments(done.stdout)}
    guide = (SCRIPTS.parent / "training.md").read_text()
    first_cells = [line.split("|")[1] for line in guide.splitlines() if line.startswith("|")]
    explained = {name for cell in first_cells for name in cell.replace(",", " ").split()}
    assert passed - explained == set()


def test_variables_and_extra_flags_win_in_that_order(launch):
    done = launch(
        "--lr", "3e-6", "--image_size=256",
        MODEL_PATH="/a folder/it's", LR="1e-6", GROUP_SIZE="8", R3_RECIPE="consistent",
        MASTER_PORT="1234", R3_FUSE_FLOW="0",
    )  # fmt: skip
    config = parse_args(trainer_arguments(done.stdout), environ={})
    assert config.paths.model_path == "/a folder/it's"
    assert config.optimizer.lr == 3e-6 and config.images.image_size == 256
    assert config.rl.group_size == 8 and config.switches.recipe == "consistent"
    assert config.switches.fuse_flow is False
    assert arguments_of(done.stdout)[9] == "1234"


def test_output_goes_to_the_terminal_and_to_the_run_folder(launch):
    first = launch(MODEL_PATH="/m", EXP_NAME="e", WANDB_PROJECT="p", LOG_DIR="logs of mine")
    launch(MODEL_PATH="/m", EXP_NAME="e", WANDB_PROJECT="p", LOG_DIR="logs of mine")
    log = (launch.folder / "logs of mine" / "p" / "e" / "console.log").read_text()
    assert "to stderr" in first.stdout and log.count("to stderr") == 2
    assert log.startswith(first.stdout)


@pytest.mark.parametrize("status", ["1", "3"])
def test_exit_status_of_torchrun_is_kept(launch, status):
    assert launch(MODEL_PATH="/m", STUB_STATUS=status).returncode == int(status)


def test_first_error_of_the_trainer_is_the_last_line(launch):
    run = {"MODEL_PATH": "/m", "EXP_NAME": "e"}
    launch(**run, STUB_STATUS="1", STUB_ERROR="of an earlier run")
    done = launch(**run, STUB_STATUS="1", STUB_ERROR="--lr 'fast': expected a number")
    log = (launch.folder / "output" / "R3" / "e" / "console.log").read_text()
    line = "error: --lr 'fast': expected a number"
    assert done.stderr.splitlines()[-1] == log.splitlines()[-1] == line
    done = launch(**run, STUB_STATUS="4")
    assert done.stderr.splitlines()[-1] == "error: torchrun ended with status 4"
    assert launch(**run).stderr == ""


RANKS = """#!/usr/bin/env bash
trap 'echo "torchrun was told"; exit 9' TERM
rank() {
  trap 'echo "rank $1 saves"; sleep 0.3; exit 0' TERM
  echo "rank $1 runs"
  for ((i = 0; i < 300; i++)); do sleep 0.1; done
  exit 5
}
rank 0 & first=$!
rank 1 & second=$!
wait "$first" && wait "$second"
"""


def test_a_sigterm_reaches_the_ranks_and_their_status_counts(launch):
    write_program(launch.programs / "torchrun", RANKS)
    path = f"{launch.programs}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", str(launch.tree / LAUNCHER)],
        env={"PATH": path, "HOME": str(launch.folder), "MODEL_PATH": "/m", "EXP_NAME": "e"},
        cwd=launch.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert sorted(lines[1:]) == ["rank 0 runs\n", "rank 1 runs\n"]
        process.terminate()
        rest, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert sorted(rest.splitlines()) == ["rank 0 saves", "rank 1 saves"]
    log = (launch.folder / "output" / "R3" / "e" / "console.log").read_text()
    assert log == "".join(lines) + rest


def test_validation_prompts_default_to_the_first_eight(launch):
    done = launch(MODEL_PATH="/m")
    config = parse_args(trainer_arguments(done.stdout), environ={})
    written = (launch.folder / config.paths.val_data_path).read_text().splitlines()
    assert written == (launch.tree / "data/rl_test/test_geneval.jsonl").read_text().splitlines()[:8]
    assert len(written) == 8
    done = launch(MODEL_PATH="/m", VAL_DATA_PATH="mine.jsonl")
    assert parse_args(trainer_arguments(done.stdout), {}).paths.val_data_path == "mine.jsonl"


def test_missing_test_prompts_are_refused(launch):
    (launch.tree / "data" / "rl_test" / "test_geneval.jsonl").unlink()
    done = launch(MODEL_PATH="/m")
    assert done.returncode == 2 and "set VAL_DATA_PATH" in done.stderr
    assert launch(MODEL_PATH="/m", VAL_DATA_PATH="mine.jsonl").returncode == 0


def test_environment_of_the_ranks(launch):
    line = next(x for x in launch(MODEL_PATH="/m").stdout.splitlines() if x.startswith("ENV<"))
    wandb_mode, threads, path, key = line[4:-1].split("|")
    assert wandb_mode == "offline" and 1 <= int(threads) <= 4
    assert path.split(":")[0] == str(launch.tree) and key == ""
    given = {"WANDB_MODE": "online", "OMP_NUM_THREADS": "7", "REWARD_API_KEY": "k-123"}
    done = launch(MODEL_PATH="/m", **given)
    assert f"ENV<online|7|{launch.tree}|k-123>" in done.stdout.splitlines()


def test_api_key_is_not_printed_by_the_launcher(launch):
    for form in (["--reward_api_key", "k-123"], ["--reward_api_key=k-123"]):
        done = launch(*form, MODEL_PATH="/m")
        running = next(x for x in done.stdout.splitlines() if x.startswith("Running"))
        assert "k-123" not in running and "redacted" in running


def test_run_folder_has_the_date_by_default(launch):
    done = launch(MODEL_PATH="/m")
    (folder,) = (launch.folder / "output" / "R3").iterdir()
    assert folder.name.startswith("faster_r3_20") and (folder / "console.log").is_file()
    assert parse_args(trainer_arguments(done.stdout), {}).paths.exp_name == folder.name


@pytest.mark.parametrize(
    "environ, words",
    [
        ({}, "MODEL_PATH is required"),
        ({"MODEL_PATH": ""}, "MODEL_PATH is required"),
        ({"MODEL_PATH": "/m", "NNODES": "two"}, "NNODES is 'two', expected a whole number"),
        ({"MODEL_PATH": "/m", "NPROC_PER_NODE": "0"}, "must be at least 1"),
        ({"MODEL_PATH": "/m", "NODE_RANK": "1"}, "NODE_RANK is 1, expected less than NNODES (1)"),
        ({"MODEL_PATH": "/m", "NNODES": "2"}, "EXP_NAME is required with NNODES=2"),
        ({"MODEL_PATH": "/m", "R3_SOURCE_TREE": "/no"}, "/no/train/online_rl.py is missing (R3_SO"),
        ({"MODEL_PATH": "/m", "TORCHRUN": "/no/torchrun"}, "TORCHRUN=/no/torchrun is no program"),
        ({"MODEL_PATH": "/m", "LOG_DIR": "/dev/null/x"}, "LOG_DIR: cannot create"),
    ],
)
def test_launches_that_cannot_work_are_refused(launch, environ, words):
    done = launch(**environ)
    assert done.returncode == 2 and words in done.stderr and "ARG<" not in done.stdout


def test_another_source_tree_runs_its_own_trainer(launch):
    tree = make_tree(launch.folder / "other tree")
    done = launch(MODEL_PATH="/m", R3_SOURCE_TREE=str(tree))
    assert arguments_of(done.stdout)[10] == str(tree / "train" / "online_rl.py")
    assert f"|{tree}|" in done.stdout
    config = parse_args(trainer_arguments(done.stdout), {})
    assert config.switches.source_tree == str(tree)
    assert config.paths.train_data_path.startswith(str(launch.tree))


def test_second_node_logs_to_its_own_file(launch):
    done = launch(MODEL_PATH="/m", EXP_NAME="e", NNODES="2", NODE_RANK="1", MASTER_ADDR="head")
    assert arguments_of(done.stdout)[1:8:2] == ["2", "1", "8", "head"]
    assert (launch.folder / "output" / "R3" / "e" / "console_node1.log").is_file()


def test_slurm_file_starts_a_launcher_on_every_machine(launch):
    write_program(launch.programs / "scontrol", "#!/usr/bin/env bash\nprintf 'head\\nother\\n'\n")
    srun = '#!/usr/bin/env bash\nshift 2\nfor n in 0 1; do SLURM_NODEID=$n "$@" || exit; done\n'
    write_program(launch.programs / "srun", srun)
    slurm = {
        "SLURM_SUBMIT_DIR": str(launch.tree),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
    }
    done = launch("--lr", "1", script=SBATCH, MODEL_PATH="/m", **slurm)
    assert done.returncode == 0, done.stderr
    words = arguments_of(done.stdout)
    ranks = [words[i + 1] for i, word in enumerate(words) if word == "--node_rank"]
    assert ranks == ["0", "1"] and words[7] == "head" and words[9] == "20077"
    assert words.count("--lr") == 2 and words.count("--auto_resume=True") == 2
    assert words.count("--exp_name=faster_r3_77") == 2
    refused = launch(script=SBATCH, MODEL_PATH="/m", **{**slurm, "SLURM_SUBMIT_DIR": "/no"})
    assert refused.returncode == 2 and "submit from the repository" in refused.stderr
