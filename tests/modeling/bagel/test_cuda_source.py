"""Compiling CUDA C++ without a GPU: headers, macros, errors that say what is wrong."""

import pytest

from modeling.bagel import cuda_source
from modeling.bagel.cuda_source import CudaSourceError, compile_source

SOURCE = """#include "number.cuh"
extern "C" __global__ void fill(int* out) { out[threadIdx.x] = number(); }
"""
HEADER = """#pragma once
__device__ int number() { return NUMBER; }
"""


@pytest.fixture
def source(tmp_path):
    try:
        cuda_source._nvrtc()
    except CudaSourceError as error:
        pytest.skip(f"needs NVRTC: {error}")
    (tmp_path / "number.cuh").write_text(HEADER)
    (tmp_path / "fill.cu").write_text(SOURCE)
    return tmp_path / "fill.cu"


def test_source_becomes_machine_code_for_the_architecture(source):
    cubin, log = compile_source(source, {"NUMBER": 7}, "sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert "fill" in log and "sm_90a" in log


def test_macros_are_part_of_the_program(source):
    first, second = (compile_source(source, {"NUMBER": n}, "sm_90a")[0] for n in (7, 8))
    assert first != second


def test_an_error_names_the_place_and_the_architecture(source):
    with pytest.raises(CudaSourceError, match=r"fill.cu for sm_90a(?s:.*)number.cuh(?s:.*)NUMBER"):
        compile_source(source, {}, "sm_90a")


def test_an_unknown_architecture_is_an_error(source):
    with pytest.raises(CudaSourceError, match="sm_1"):
        compile_source(source, {"NUMBER": 7}, "sm_1")


def test_a_build_without_cuda_has_no_compiler(source, monkeypatch):
    monkeypatch.setattr(cuda_source.torch.version, "cuda", None)
    cuda_source._nvrtc.cache_clear()
    with pytest.raises(CudaSourceError, match="no CUDA"):
        compile_source(source, {"NUMBER": 7}, "sm_90a")
    cuda_source._nvrtc.cache_clear()
