"""The replay: recorded runs come out of the trainer, and a changed record is noticed.

Two runs are replayed whole, of the other two a generate and a refine step.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.tiny import CHECKPOINT, PARITY
from tools.replay_trace.__main__ import main
from tools.replay_trace.compare import Deviations, limits_for, table
from tools.replay_trace.trace import MeanRed, Trace


def replay(folder: Path, *arguments: str) -> int:
    return main([str(folder), "--checkpoint", str(CHECKPOINT), *arguments])


def changed_copy(
    name: str, target: Path, num_steps: int, change: Callable[[dict], None] | None = None
) -> Path:
    """The first steps of a trace, with some of its numbers changed."""
    folder = target / name
    shutil.copytree(PARITY / name, folder)
    shutil.copy(PARITY / "prompts40.jsonl", target)
    content = json.loads((folder / "trace.json").read_text())
    content["ranks"] = [steps[:num_steps] for steps in content["ranks"]]
    if change is not None:
        change(content)
    (folder / "trace.json").write_text(json.dumps(content))
    return folder


def verdicts(printed: str) -> dict[str, str]:
    """ok or MISSED of each kind in the printed table."""
    lines = [line for line in printed.splitlines() if " ok " in line or " MISSED " in line]
    return {line[:24].strip(): "ok" if " ok " in line else "MISSED" for line in lines}


KINDS = {
    "exact",
    "pictures (grey levels)",
    "probabilities",
    "velocities",
    "latents",
    "log-probs",
    "rewards",
    "advantages",
    "losses",
    "ratios",
    "gradient norms",
    "parameter norms",
}


def test_a_detailed_trace_passes(capsys):
    assert replay(PARITY / "trace_upstream") == 0
    printed = capsys.readouterr().out
    assert verdicts(printed) == dict.fromkeys(KINDS, "ok")
    assert "trace_upstream: 2 ranks, 6 steps, recipe upstream, pictures trace" in printed
    assert printed.rstrip().endswith("passed")


def test_an_edge_trace_passes_on_its_own_pictures(capsys):
    assert replay(PARITY / "trace_consistent_edges", "--pictures", "own") == 0
    printed = capsys.readouterr().out
    assert verdicts(printed) == dict.fromkeys(KINDS - {"velocities", "log-probs"}, "ok")
    assert "6 steps, recipe consistent, pictures own" in printed


def test_the_other_detailed_trace_passes_on_replicated_weights(tmp_path, capsys):
    assert replay(changed_copy("trace_consistent", tmp_path, 2), "--num_shard", "1") == 0
    assert verdicts(capsys.readouterr().out) == dict.fromkeys(KINDS, "ok")


def test_changed_numbers_are_missed_and_named(tmp_path, capsys):
    def change(content: dict) -> None:
        step = content["ranks"][1][1]
        step["samples"][0]["generated_ids"][3] += 1
        step["rewards"][1][0] += 1e-4
        norms = content["ranks"][0][1]["grad_norms"]  # recorded on rank 0 only
        norms["llm2vae.weight"] *= 1.001

    assert replay(changed_copy("trace_upstream_edges", tmp_path, 2, change)) == 1
    printed = capsys.readouterr().out
    missed = {"exact", "rewards", "gradient norms"}
    kinds = KINDS - {"velocities", "log-probs"}
    assert verdicts(printed) == {kind: "MISSED" if kind in missed else "ok" for kind in kinds}
    assert "rank 1 step 1 ids 0" in printed
    assert "rank 1 step 1 rewards" in printed
    assert "rank 0 step 1 llm2vae.weight" in printed
    assert printed.rstrip().endswith("FAILED")


# The parts, without a run.


def test_table_passes_at_the_limit_and_fails_above():
    limits = limits_for("trace", is_thresholded=False)
    for value, verdict in ((2e-5, True), (2.1e-5, False), (float("nan"), False)):
        found = Deviations()
        found.exact("ids", [1], [1])
        found.add("latents", value, "somewhere")
        assert table(found, limits)[1] is verdict


def test_a_run_that_compared_nothing_does_not_pass():
    assert table(Deviations(), limits_for("trace", False))[1] is False


def test_limits_of_own_pictures():
    plain, thresholded = (limits_for("own", t).by_kind for t in (False, True))
    assert plain["losses"] == plain["gradient norms"] == 1e-2
    assert plain["parameter norms"] == 1e-4
    assert thresholded["losses"] == thresholded["parameter norms"] == 1e-4


def test_deviations_keep_the_worst_and_count_all():
    first, second = Deviations(), Deviations()
    first.absolute("latents", "a", torch.zeros(2), torch.tensor([0.0, 0.5]))
    second.absolute("latents", "b", torch.zeros(2), torch.tensor([0.25, 0.0]))
    second.absolute("latents", "c", torch.zeros(2), torch.zeros(3))
    first.merge(second)
    assert first.worst["latents"] == float("inf")
    assert first.where["latents"].startswith("c: shape")
    assert first.counts["latents"] == 3
    first.relative("losses", "d", 1.0, 2.0, 1e-3)
    first.relative("losses", "e", 1e-5, 0.0, 1e-3)
    assert first.worst["losses"] == 0.5
    first.exact("f", [1, 2], [1, 3])
    first.exact_tensor("g", torch.tensor([1]), torch.tensor([1]))
    assert first.worst["exact"] == 1.0
    assert first.where["exact"] == "f: [1, 2] instead of [1, 3]"


def test_reward_is_the_mean_of_red():
    picture = Image.new("RGB", (2, 1), (255, 9, 9))
    picture.putpixel((0, 0), (0, 255, 255))
    assert MeanRed(None, 1.0, 0.0).score(picture) == 0.5
    assert MeanRed(0.5, 1.0, 0.3).score(picture) == 0.3  # above means above
    assert MeanRed(0.49, 1.0, 0.3).score(picture) == 1.0
    result = MeanRed(None, 1.0, 0.0).submit([picture], [{}])[0].result()
    assert (result.score, result.reward, result.error) == (0.5, 0.5, None)


def test_folders_that_are_no_trace_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no trace.json"):
        Trace(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_setting": 1}, r"settings that are not understood: \['new_setting'\]"),
        ({"precision": "bfloat16"}, "expected precision float32"),
        ({"lr_scheduler": "cosine"}, "a constant lr"),
        ({"data": "gone.jsonl"}, "gone.jsonl is not beside it"),
    ],
)
def test_settings_that_cannot_be_replayed_are_refused(tmp_path, change, message):
    def update(content: dict) -> None:
        content["config"] |= change

    folder = changed_copy("trace_consistent_edges", tmp_path, 1, update)
    with pytest.raises(ValueError, match=message):
        Trace(folder).train_config(CHECKPOINT, num_shard=2)
