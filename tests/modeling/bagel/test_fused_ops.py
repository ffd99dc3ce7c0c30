"""The Triton kernels under the interpreter, in a process of its own, against their eager twins.

The interpreter rounds to bf16 otherwise than a GPU does, so values are fp32 here: what is held is
the arithmetic, the order of sums, indexing and masking. Bits of bf16 are compared on a GPU by
`tools.fuse_flow` and `tools.fuse_decode`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with PyTorch's GPU builds only")

ROOT = Path(__file__).resolve().parents[3]


CHECKS = (
    "norms",
    "reduction_order",
    "norms_of_joined_rows",
    "swiglu",
    "heads",
    "stack",
    "many_row_stack",
    "side_stack",
    "joint_stack",
    "joined_bits",
    "fast_stack",
    "ordered_stack",
    "few_queries",
    "whole_images",
    "blank_ranges",
    "many_row_products",
    "many_row_linears",
    "bits_of_cublas",
    "bits_of_linears",
    "few_row_products",
    "order_of_cublas",
    "few_row_norms",
    "sampling",
    "exact_sampling_steps",
    "exact_sampling_draws",
    "edges_of_nuclei",
    "first_of_equals",
    "map_norms",
    "resized_maps",
    "whole_autoencoder",
)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_kernels(check):
    command = [sys.executable, str(Path(__file__).with_name("interpreted_kernels.py")), check]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env={**environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checked" in result.stdout
