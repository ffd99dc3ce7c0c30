"""The requirement files name what is imported, and nothing else."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("modeling", "data", "train", "tools", "validation", "scripts", "docs")
# Distribution name to import name, where the two differ.
IMPORT_NAMES = {"pillow": "PIL", "opencv-python-headless": "cv2"}
OPTIONAL = {"flash_attn", "triton"}  # the first nothing needs, the second comes with torch


def imported_names() -> set[str]:
    """Top-level names that the project's own code imports, the standard library left out."""
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names.update(alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def required_names(path: Path) -> set[str]:
    """Import names of the distributions that a requirements file names."""
    names = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"[A-Za-z0-9_.-]+", line.split("#")[0].strip())
        if match:
            names.add(IMPORT_NAMES.get(match[0], match[0].replace("-", "_")))
    return names


def test_everything_required_is_imported():
    assert required_names(ROOT / "requirements.txt") <= imported_names()


def test_everything_imported_is_required_somewhere():
    known = set(OPTIONAL)
    for path in [*ROOT.glob("requirements*.txt"), *ROOT.glob("tools/**/requirements*.txt")]:
        known |= required_names(path)
    assert imported_names() <= known
