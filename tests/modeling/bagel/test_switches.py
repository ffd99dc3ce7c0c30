"""The switch table: defaults, refusals, and what is said about switches without effect."""

import dataclasses
import logging

import pytest

from modeling.bagel import switches as module
from modeling.bagel.switches import (
    FUSION_SWITCHES,
    SWITCH_TABLE,
    TRAINER_SWITCHES,
    Switches,
    explain_inactive,
    log_inactive_once,
    read_switches,
)


def test_empty_environment_gives_the_defaults():
    assert read_switches({}) == Switches()
    assert read_switches({"R3_RECIPE": "", "PATH": "/bin"}) == Switches()


def test_table_and_dataclass_name_the_same_fields():
    fields = [field.name for field in dataclasses.fields(Switches)]
    assert sorted(fields) == sorted(switch.attribute for switch in TRAINER_SWITCHES)
    assert all(switch.help for switch in SWITCH_TABLE)


def test_values_are_parsed():
    read = read_switches(
        {
            "R3_RECIPE": "consistent",
            "R3_LOAD_CONCURRENCY": "2",
            "R3_SOURCE_TREE": "/some where",
            "R3_ATTENTION": "dense",
            "R3_FUSED_DECODE": "0",
            "R3_FUSE_FLOW": "False",
            "R3_FUSED_TRAIN_OPS": "true",
            "R3_EXECUTION": "fast",
        }
    )
    assert (read.recipe, read.attention, read.execution) == ("consistent", "dense", "fast")
    assert read.load_concurrency == 2 and read.source_tree == "/some where"
    assert (read.fused_decode, read.fuse_flow, read.fused_train_ops) == (False, False, True)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("R3_RECIPE", "Upstream", "one of upstream, consistent"),
        ("R3_ATTENTION", "sdpa", "one of auto, dense, flex, flash"),
        ("R3_EXECUTION", "quick", "one of auto, eager, exact, fast"),
        ("R3_LOAD_CONCURRENCY", "0", "an integer of at least 1"),
        ("R3_LOAD_CONCURRENCY", "two", "an integer of at least 1"),
        ("R3_LOAD_CONCURRENCY", "\u00b2", "an integer of at least 1"),
        ("R3_FUSE_FLOW", "2", "0 or 1"),
    ],
)
def test_unknown_value_is_refused_with_the_allowed_ones(name, value, allowed):
    with pytest.raises(ValueError) as error:
        read_switches({name: value})
    assert str(error.value) == f"{name} (--{name.lower()}) is {value!r}, expected {allowed}"


def test_unknown_name_is_refused_with_the_closest_known_one():
    with pytest.raises(ValueError, match="R3_RECEIPE is no switch.*did you mean R3_RECIPE"):
        read_switches({"R3_RECEIPE": "upstream"})
    with pytest.raises(ValueError, match="R3_ZZZZZZ is no switch.*known: .*R3_FUSE_FLOW"):
        read_switches({"R3_ZZZZZZ": "1"})


def test_variables_of_the_reward_server_are_known():
    read = read_switches({"R3_REWARD_GPUS": "4", "R3_REWARD_BIND": "0.0.0.0:1"})
    assert read == Switches()


def test_execution_grade_depends_on_the_device():
    assert Switches().execution_on("cpu") == "eager"
    assert Switches().execution_on("cuda") == "exact"
    assert Switches(execution="fast").execution_on("cuda") == "fast"
    assert Switches(execution="eager").execution_on("cuda") == "eager"


def test_a_fusion_is_active_only_when_built_on_and_on_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "BUILT_FUSIONS", frozenset({"R3_FUSE_FLOW"}))
    assert Switches().is_active("R3_FUSE_FLOW", "cuda")
    assert not Switches().is_active("R3_FUSE_FLOW", "cpu")
    assert not Switches(fuse_flow=False).is_active("R3_FUSE_FLOW", "cuda")
    assert not Switches(execution="eager").is_active("R3_FUSE_FLOW", "cuda")
    assert not Switches().is_active("R3_FUSED_DECODE", "cuda")
    with pytest.raises(ValueError, match="no fusion switch"):
        Switches().is_active("R3_RECIPE", "cuda")


def test_on_a_cpu_one_line_names_all_fusions():
    (line,) = explain_inactive(Switches(), "cpu")
    assert all(name in line for name in FUSION_SWITCHES) and "needs a GPU" in line
    lines = explain_inactive(Switches(execution="exact", attention="flash"), "cpu")
    assert "R3_EXECUTION=exact" in lines[0] and "R3_ATTENTION=flash" in lines[1]


def test_off_switches_and_asked_for_eager_are_not_mentioned(monkeypatch):
    assert explain_inactive(Switches(execution="eager"), "cpu") == []
    assert explain_inactive(Switches(execution="eager"), "cuda") == []
    monkeypatch.setattr(module, "BUILT_FUSIONS", frozenset(FUSION_SWITCHES) - {"R3_FUSE_FLOW"})
    assert explain_inactive(Switches(fuse_flow=False), "cuda") == []
    (line,) = explain_inactive(Switches(), "cuda")
    assert line.startswith("R3_FUSE_FLOW: on") and "not built yet" in line


def test_attention_backend_that_is_not_built_is_named_on_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "BUILT_FUSIONS", frozenset(FUSION_SWITCHES))
    monkeypatch.setattr(module, "BUILT_ATTENTION", frozenset({"auto", "flex"}))
    (line,) = explain_inactive(Switches(attention="flash"), "cuda")
    assert "R3_ATTENTION=flash" in line and "auto, flex" in line


def test_every_line_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "_already_said", set())
    monkeypatch.setattr(logging.getLogger("faster_r3"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="faster_r3"):
        log_inactive_once(Switches(), "cpu")
        log_inactive_once(Switches(), "cpu")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_modes_that_run_say_nothing_on_a_gpu(mode):
    lines = explain_inactive(Switches(execution=mode), "cuda")
    assert not any("R3_EXECUTION" in line for line in lines)


@pytest.mark.parametrize(
    ("attention", "device", "backend"),
    [
        ("auto", "cpu", "dense"),
        ("flex", "cpu", "dense"),
        ("auto", "cuda", "flex"),
        ("flash", "cuda", "flex"),
        ("dense", "cuda", "dense"),
    ],
)
def test_attention_that_runs(attention, device, backend):
    assert Switches(attention=attention).attention_on(device) == backend
