"""What the tests of the shell scripts share: programs of one's own, and trees to run them in."""

import shutil
import stat
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def write_program(path: Path, text: str) -> Path:
    """Writes an executable file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_tree(tree: Path) -> Path:
    """A source tree with the scripts, ten prompts of each kind and an empty trainer."""
    shutil.copytree(SCRIPTS, tree / "scripts")
    (tree / "train").mkdir()
    (tree / "train" / "online_rl.py").touch()
    for name in ("rl_train/train_geneval.jsonl", "rl_test/test_geneval.jsonl"):
        path = tree / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(
                f'{{"tag": "{"colors" if number % 2 else "counting"}", "prompt": "{number}"}}\n'
                for number in range(10)
            )
        )
    return tree


def arguments_of(output: str) -> list[str]:
    """The arguments in the output of a program that prints each as ARG<...>."""
    return [line[4:-1] for line in output.splitlines() if line.startswith("ARG<")]


def trainer_arguments(output: str) -> list[str]:
    """The arguments after the trainer's file."""
    arguments = arguments_of(output)
    entry = next(i for i, word in enumerate(arguments) if word.endswith("train/online_rl.py"))
    return arguments[entry + 1 :]
