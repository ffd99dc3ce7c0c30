"""What bench_rollout makes of its figures; the figures themselves need a GPU."""

import pytest
import torch

from tools import bench_rollout
from tools.bench_rollout import TARGETS, floors, print_table, sizes, verdicts

RESULTS = {
    "eager": {"refine/decode_ms_per_token": 7.0, "generate/rollout_s": 2.0},
    "exact": {"refine/decode_ms_per_token": 1.54, "generate/rollout_s": 0.9},
    "fast": {"refine/decode_ms_per_token": 1.14, "generate/rollout_s": 1.1},
}


def test_figures_are_held_against_the_targets_of_their_mode():
    found = verdicts(RESULTS, TARGETS[6])
    assert found["refine/decode_ms_per_token"] == pytest.approx({"exact": 0.1, "fast": -0.05})
    assert found["generate/rollout_s"] == pytest.approx({"exact": -0.1, "fast": 0.1})
    assert verdicts(RESULTS, {}) == {}


def test_the_table_names_misses_and_floors(capsys):
    print_table(RESULTS, {"decode_ms_per_token": 0.9}, verdicts(RESULTS, TARGETS[6]))
    header, decode, rollout = capsys.readouterr().out.splitlines()
    assert header.split() == ["figure", "eager", "exact", "fast", "floor", "target"]
    assert decode.split()[:5] == ["refine/decode_ms_per_token", "7", "1.54", "1.14", "0.9"]
    assert decode.endswith("exact missed by +10% fast met, -5%")
    assert rollout.endswith("exact met, -10% fast missed by +10%")


def test_floors_are_the_bytes_and_operations_of_the_real_widths():
    six, more = floors(sizes(6), 4), floors(sizes(28), 4)
    assert six["decode_ms_per_token"] == pytest.approx(0.904, abs=1e-3)
    assert more["decode_ms_per_token"] == pytest.approx(3.289, abs=1e-3)
    assert more["flow_ms_per_forward"] == pytest.approx(six["flow_ms_per_forward"] * 28 / 6)
    one = floors(sizes(6), 1)
    assert one["flow_ms_per_forward"] == pytest.approx(six["flow_ms_per_forward"] / 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert bench_rollout.main(["--samples", "1"]) == 2
    assert "no GPU" in capsys.readouterr().err
