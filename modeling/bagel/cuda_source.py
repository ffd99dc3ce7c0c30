"""Compiles CUDA C++ with NVRTC, which comes with PyTorch's GPU builds, and launches the result."""

import ctypes
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import torch

ARCH = "sm_90a"
"""Of GPUs that kernels are built for: compute capability 9, with what only that has."""
LOG_LINES = 20
_MAX_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of the driver."""


class CudaSourceError(RuntimeError):
    """CUDA C++ that cannot be compiled, loaded or launched here; the message says why."""


def compile_source(path: Path, macros: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    """Compiles CUDA C++ for one architecture.

    Args:
        path: the program, which may include the .cuh files beside it, and nothing else.
        macros: values of its macros.
        arch: such as sm_90a.

    Returns:
        Machine code (a cubin) and the log, in which ptxas tells of registers and spills.

    Raises:
        CudaSourceError: there is no NVRTC, or it finds errors.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    headers = sorted(path.parent.glob("*.cuh"))
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        path.read_bytes(),
        path.name.encode(),
        len(headers),
        _texts(header.read_bytes() for header in headers),
        _texts(header.name.encode() for header in headers),
    )
    if created != 0:
        raise CudaSourceError(f"NVRTC refuses {path.name} (error {created})")
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
        options += [f"-D{key}={value}" for key, value in macros.items()]
        given = _texts(option.encode() for option in options)
        result = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
        if result != 0:
            shown = "\n".join(log.splitlines()[:LOG_LINES])
            raise CudaSourceError(f"{path.name} for {arch}, NVRTC error {result}: {shown}")
        return _read(nvrtc, "CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _texts(texts: Iterable[bytes]) -> ctypes.Array:
    given = list(texts)
    return (ctypes.c_char_p * len(given))(*given)


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC of the CUDA version that PyTorch was built with."""
    if torch.version.cuda is None:
        raise CudaSourceError("this build of PyTorch has no CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    wheels = [str(p) for folder in sys.path for p in Path(folder).glob(f"nvidia/*/lib/{name}")]
    for path in [name, *wheels]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaSourceError(f"{name} is not found; it comes with PyTorch's GPU builds")


class CudaKernel:
    """A kernel on the current device, whose blocks run all at once."""

    def __init__(
        self, cubin: bytes, name: str, num_blocks: int, num_threads: int, shared_bytes: int
    ):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._num_blocks = num_blocks
        self._num_threads = num_threads
        self._shared_bytes = shared_bytes
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin))
        self._check(
            self._driver.cuModuleGetFunction(
                ctypes.byref(self._function), module, name.encode()
            )
        )
        self._check(
            self._driver.cuFuncSetAttribute(
                self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes
            )
        )

    def launch(self, argument: ctypes.Structure) -> None:
        """Launches the kernel with its one argument, a structure, on the current stream.

        The launch is cooperative: no block starts unless all can run, so that they may wait for
        each other.
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._check(
            self._driver.cuLaunchCooperativeKernel(
                self._function,
                *(self._num_blocks, 1, 1),
                *(self._num_threads, 1, 1),
                self._shared_bytes,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                arguments,
            )
        )

    def _check(self, result: int) -> None:
        if result != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            raise CudaSourceError(f"CUDA driver: {(text.value or b'unknown').decode()} ({result})")


def build_kernel(
    path: Path, macros: Mapping[str, int], num_blocks: int, num_threads: int, shared_bytes: int
) -> CudaKernel:
    """Compiles and loads the kernel of a program's name for the current device.

    Raises:
        CudaSourceError: that is not possible.
    """
    cubin, _ = compile_source(path, macros, ARCH)
    return CudaKernel(cubin, path.stem, num_blocks, num_threads, shared_bytes)
