"""What bench_rollout makes of its figures; the figures themselves need a GPU."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from modeling.bagel.flow import FlowResult, StochasticStep
from modeling.bagel.text_decode import DecodedText
from tools import bench_rollout
from tools.bench_rollout import (
    TARGETS,
    EditingController,
    differences,
    floors,
    print_table,
    sizes,
    verdicts,
)
from train.records import Sample, says_no_edit

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


def rolled(operations: list[str]) -> tuple[list[Sample], FlowResult]:
    thought, picture = DecodedText((1, 2), (0.5,)), Image.new("RGB", (4, 4))
    samples = [Sample(thought, "", 1.0, operation, picture) for operation in operations]
    x = torch.zeros(len(operations), 3, 64)
    return samples, FlowResult(x, StochasticStep(x, x, x[..., 0], 0.9, 0.1))


def test_final_latents_are_compared_where_they_become_pictures():
    operations = ["make it red", "No further edit needed."]
    reference = rolled(operations)
    assert differences(rolled(operations), reference) == []
    for changed, expected in ((0, ["latents"]), (1, [])):
        samples, flow = rolled(operations)
        latents = flow.latents.clone()
        latents[changed] += 1
        assert differences((samples, replace(flow, latents=latents)), reference) == expected
    samples, flow = rolled(operations)
    scored = replace(flow.stochastic, log_prob=flow.stochastic.log_prob - 1)
    other = (samples, replace(flow, stochastic=scored))
    assert differences(other, reference) == ["log_prob"]  # of those that declined, too


def test_every_reflection_has_its_edit_but_those_that_decline():
    controller = object.__new__(EditingController)
    thoughts = [DecodedText((), ())] * 3
    assert len(set(controller.edit_operations(thoughts))) == 3
    controller.declined = (1,)
    said = [says_no_edit(operation) for operation in controller.edit_operations(thoughts)]
    assert said == [False, True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert bench_rollout.main(["--samples", "1"]) == 2
    assert "no GPU" in capsys.readouterr().err
