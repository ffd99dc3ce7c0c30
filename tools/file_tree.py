"""Writes the file tree of README.md from each file's first line: python -m tools.file_tree."""

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- file tree: begin -->", "<!-- file tree: end -->"
FOLDERS = ("modeling", "train", "data", "scripts", "tools", "validation", "docs")
COMMENTS = {".sh": "# ", ".sbatch": "# ", ".cu": "// ", ".cuh": "// "}
SUFFIXES = (".py", *COMMENTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites the tree in README.md; with --check returns 1 where it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m tools.file_tree", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = replace_tree(before, render_tree(ROOT))
    if options.check and before != after:
        print("README.md: the file tree is out of date, run python -m tools.file_tree")
        return 1
    if before != after:
        README.write_text(after, encoding="utf-8")
    return 0


def replace_tree(text: str, tree: str) -> str:
    """`text` with what stands between the two markers replaced. Raises ValueError without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n```text\n{tree}\n```\n{END}{tail}"


def render_tree(root: Path) -> str:
    """The code files of the project, folder by folder, each with what its first line says."""
    lines = []
    for top in FOLDERS:
        folders = [root / top, *sorted(path for path in (root / top).rglob("*") if path.is_dir())]
        for folder in folders:
            files = [path for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES]
            shown = [(path.name, describe(path)) for path in files if path.name != "__init__.py"]
            if shown:
                lines.append(f"{folder.relative_to(root)}/")
                width = max(len(name) for name, _ in shown)
                lines += [f"  {name:<{width}}  {text}" for name, text in shown]
    return "\n".join(lines)


def describe(path: Path) -> str:
    """The first line of a Python file's docstring, or of another file's comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text))
        if not docstring:
            raise ValueError(f"{path} does not say in a docstring what it does")
        return docstring.splitlines()[0]
    mark = COMMENTS[path.suffix]
    comments = [line for line in text.splitlines() if line.startswith(mark)]
    if not comments:
        raise ValueError(f"{path} does not say in a comment what it does")
    return comments[0][len(mark) :]


if __name__ == "__main__":
    sys.exit(main())
