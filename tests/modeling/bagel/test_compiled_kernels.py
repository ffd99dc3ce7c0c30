"""The Triton kernels through the compiler for an H200, on any machine: Triton brings ptxas.

The interpreter runs kernels that a GPU's compiler refuses, or for which a GPU has not the memory.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with PyTorch's GPU builds only")

ROOT = Path(__file__).resolve().parents[3]
MAX_SHARED_BYTES = 227 * 1024
"""Of one block at compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""
MAX_STACK_BYTES = 64
"""ptxas may keep a dozen registers on the stack so that more warps fit; a tile spills kilobytes."""
WGMMA_CASES = {
    "image_attention": {"_image_kernel"},
    "vocabulary product": {"_linear_kernel"},
    "many_rows.swiglu": {"_swiglu_kernel"},
    "many_rows.linear": {"_linear_kernel", "_tail_kernel"},
}
"""Large products by what their cases begin with, and the kernels that each case launches."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What was compiled, from an empty cache: a kernel found there might be an older one's."""
    command = [sys.executable, str(Path(__file__).with_name("compiled_kernels.py"))]
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_no_kernel_is_left_out(report):
    assert {record["kernel"] for record in report["compiled"]} == set(report["declared"])


def test_shared_memory_fits_into_a_block(report):
    sizes = [(record["case"], record["shared_bytes"]) for record in report["compiled"]]
    assert [(case, size) for case, size in sizes if size > MAX_SHARED_BYTES] == []
    assert any(size > 0 for _, size in sizes)


def test_registers_are_not_spilled(report):
    sizes = [(record["case"], record["stack_bytes"]) for record in report["compiled"]]
    if any(size is None for _, size in sizes):
        pytest.skip("this Triton comes without cuobjdump")
    assert [(case, size) for case, size in sizes if size > MAX_STACK_BYTES] == []


@pytest.mark.parametrize("start", WGMMA_CASES)
def test_large_products_take_warpgroups(report, start):
    found = {}
    for record in report["compiled"]:
        if record["case"].startswith(start):
            kernel = record["kernel"].rpartition(".")[2]
            found.setdefault(record["case"], {})[kernel] = record["has_wgmma"]
    assert found and all(kernels.keys() == WGMMA_CASES[start] for kernels in found.values()), found
    assert all(all(kernels.values()) for kernels in found.values()), found
