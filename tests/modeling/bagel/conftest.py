"""Fixtures that several tests of the model share."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import modeling.bagel.execution
from modeling.bagel.config import LlmConfig
from modeling.bagel.execution import Execution, build_execution
from modeling.bagel.switches import Switches


@pytest.fixture
def execution_on_gpu(monkeypatch) -> Callable[[str, bool], Execution]:
    """The execution of a tiny model that a grade gives on a GPU, text decode fused or not."""
    monkeypatch.setattr(modeling.bagel.execution, "CudaBackend", SimpleNamespace)
    config = LlmConfig(256, 512, 2, 2, 1, vocab_size=800)

    def build(grade: str, is_fused: bool) -> Execution:
        switches = Switches(execution=grade, fused_decode=is_fused, fused_decode_streams=False)
        return build_execution(switches, config, torch.device("cuda"), torch.bfloat16)

    return build


@pytest.fixture
def poisoned_memory():
    """New memory is NaN, or the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
