"""The README's file tree: written from the files themselves, and refused where one is silent."""

import pytest

from tools import file_tree
from tools.file_tree import BEGIN, END, describe, main, render_tree, replace_tree


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with a README, in place of this one."""
    (tmp_path / "train").mkdir()
    (tmp_path / "scripts" / "slurm").mkdir(parents=True)
    (tmp_path / "train" / "__init__.py").touch()
    (tmp_path / "train" / "loop.py").write_text('"""Runs the loop.\n\nAt length."""\n')
    (tmp_path / "train" / "a.py").write_text('"""Comes first."""\n')
    (tmp_path / "scripts" / "slurm" / "go.sh").write_text("#!/bin/sh\n# Goes.\n# More.\n")
    (tmp_path / "README.md").write_text(f"# Title\n{BEGIN}\nold\n{END}\nend\n")
    monkeypatch.setattr(file_tree, "ROOT", tmp_path)
    monkeypatch.setattr(file_tree, "README", tmp_path / "README.md")
    return tmp_path


def test_tree_lists_files_with_their_first_line(project):
    assert render_tree(project).splitlines() == [
        "train/",
        "  a.py     Comes first.",
        "  loop.py  Runs the loop.",
        "scripts/slurm/",
        "  go.sh  Goes.",
    ]


def test_check_sees_an_old_tree_and_writing_mends_it(project, capsys):
    assert main(["--check"]) == 1 and "out of date" in capsys.readouterr().out
    assert main([]) == 0 and main(["--check"]) == 0
    text = (project / "README.md").read_text()
    assert text.startswith("# Title\n") and text.endswith("\nend\n") and "old" not in text


def test_a_file_that_says_nothing_is_refused(tmp_path):
    silent = tmp_path / "silent.py"
    silent.write_text("x = 1\n")
    with pytest.raises(ValueError, match="does not say in a docstring"):
        describe(silent)
    script = tmp_path / "silent.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="does not say in a comment"):
        describe(script)


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        replace_tree("# Title\n", "tree")
