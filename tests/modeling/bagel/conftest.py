"""Fixtures that several tests of the model share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """New memory is NaN, or the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
