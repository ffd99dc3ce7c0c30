"""CUDA C++ in tests: compiled for a GPU, and compiled for and run on the CPU (cuda_on_host/)."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from modeling.bagel.cuda_source import CudaSourceError, compile_source

HOST = Path(__file__).parent / "cuda_on_host"
FLAGS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared")
NO_SPILLS = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def compile_log(source: Path, macros: Mapping[str, int], arch: str) -> str:
    """The log of a compilation; skips the test where there is no NVRTC."""
    try:
        _, log = compile_source(source, macros, arch)
    except CudaSourceError as error:
        if "not found" in str(error) or "has no CUDA" in str(error):
            pytest.skip(f"needs NVRTC: {error}")
        raise
    return log


class HostKernel:
    """Stands in for a CudaKernel: that of a source's name."""

    def __init__(self, source: Path, macros: Mapping[str, int], num_blocks: int, folder: Path):
        """Compiles in a folder that may be written to."""
        self._num_blocks = num_blocks
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        # basics.cuh is the one for the host.
        for file in (*source.parent.iterdir(), *HOST.iterdir()):
            shutil.copy(file, folder)
        library = folder / f"{source.stem}.so"
        given = {**macros, "SOURCE": f'"{source.name}"', "KERNEL": source.stem}
        defined = [f"-D{name}={value}" for name, value in given.items()]
        program = str(folder / "run_on_host.cpp")
        subprocess.run([compiler, *FLAGS, *defined, "-o", str(library), program], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, work: ctypes.Structure) -> None:
        assert self._library.run_on_host(ctypes.byref(work), self._num_blocks) == 0, "threads wait"
