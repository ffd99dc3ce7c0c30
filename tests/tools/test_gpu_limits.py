"""What gpu_limits makes of nvidia-smi's lines; the rest of it needs a GPU."""

import sys
import time

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with PyTorch's GPU builds only")

from tools import gpu_limits  # noqa: E402


def test_a_sample_is_four_numbers():
    assert gpu_limits.parse_sample("1485, 1980, 693.83, 700.00\n") == (1485, 1980, 693.83, 700)


@pytest.mark.parametrize("line", ["", "1485, 1980, 693.83", "1485, 1980, [N/A], 700"])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError):
        gpu_limits.parse_sample(line)


def test_a_watch_takes_the_medians_of_the_settled_half(monkeypatch):
    lines = ["1980, 1980, 90, 700", "1700, 1980, 500, 700", "1480, 1980, 690, 700"]
    text = "\n".join([*lines, lines[-1]])
    script = f"import time; print({text!r}, flush=True); time.sleep(60)"
    popen = gpu_limits.subprocess.Popen

    def fake(command: list[str], **options: object):
        assert command[0] == "nvidia-smi"
        return popen([sys.executable, "-c", script], **options)

    monkeypatch.setattr(gpu_limits.subprocess, "Popen", fake)
    with gpu_limits.Watch() as watch:
        while len(watch._lines) < 4:
            time.sleep(0.01)
    expected = {"sm_mhz": 1480, "max_sm_mhz": 1980, "watts": 690, "watts_limit": 700}
    assert watch.summary() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_limits.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
