"""Run by test_compiled_kernels.py: compiles all Triton kernels for an H200, describes them in JSON.

No GPU is asked: a stand-in takes the driver's place, launches end behind the compiler, and tensors
are "meta", types and shapes without memory. Sizes are those of the released model.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from modeling.bagel import few_rows, fused_attention, fused_ops, many_rows
from modeling.bagel.cublas_order import split_product
from modeling.bagel.exact_sampling import Tempering, draw_nucleus
from modeling.bagel.fused_sampling import draw_tokens
from modeling.bagel.sampling import SamplingConfig
from modeling.fused_maps import FusedMap

Cases = dict[str, Callable[[], object]]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 3584, 18944, 28, 4, 128, 152064
KV = KV_HEADS * HEAD
EPS = 1e-6
MULTIPROCESSORS = 132
SLOTS = 6000
"""Positions of a cache, all rows together."""
FEW = (1, 4, 9, 17, 32)
"""Rows of a product: every tile, and numbers that Triton specialises on or not."""


class OfflineDriver:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operator_cases(rows: int) -> Cases:
    x, wide, norm = empty(rows, HIDDEN), empty(rows, INNER), empty(HIDDEN)
    key, table = empty(rows, KV), empty(rows, 1, HEAD, dtype=torch.float32)
    cached = empty(SLOTS, KV_HEADS, HEAD)
    heads = partial(
        fused_ops.qk_norm_rope_store,
        (x, key, key),
        (empty(HEAD), empty(HEAD)),
        (table, table),
        empty(rows, dtype=torch.int64),
        (empty(rows, HEADS, HEAD), cached, cached),
        EPS,
    )
    return {
        f"rms_norm of {rows}": partial(fused_ops.rms_norm, x, norm, EPS, x),
        f"add_rms_norm of {rows}": partial(fused_ops.add_rms_norm, x, x, norm, EPS, x, x),
        f"silu_mul of {rows}": partial(fused_ops.silu_mul, wide, wide),
        f"qk_norm_rope_store of {rows}, early": partial(heads, True),
        f"qk_norm_rope_store of {rows}, late": partial(heads, False),
    }


def attention_cases() -> Cases:
    cached, rows, capacity = empty(SLOTS, KV_HEADS, HEAD), empty(4, dtype=torch.int32), SLOTS // 4
    found = {}
    for queries in (1, 2):
        q = empty(4 * queries, HEADS, HEAD)
        found[f"few_queries_attention of {queries}"] = partial(
            fused_attention.few_queries_attention, q, [(cached, cached)], rows, rows, capacity, q
        )
    q = empty(4096, HEADS, HEAD)
    for name, blanks in (("", None), (" with blanks", empty(4, 2, dtype=torch.int32))):
        found[f"image_attention{name}"] = partial(
            fused_attention.image_attention, q, cached, cached, rows, rows, q, blanks
        )
    return found


def few_row_cases(rows: int) -> Cases:
    x, long = empty(rows, HIDDEN), empty(rows, INNER)
    weights = {
        "square": (x, empty(HIDDEN, HIDDEN)),
        "long": (long, empty(HIDDEN, INNER)),
        "vocabulary": (x, empty(VOCAB, HIDDEN)),
    }
    assert all(few_rows.fits(rows, weight) for _, weight in weights.values())
    up, norm = empty(INNER, HIDDEN), empty(HIDDEN)
    heads = [empty(size, HIDDEN) for size in (HIDDEN, KV, KV)]
    biases = [empty(size) for size in (HIDDEN, KV, KV)]
    squares = empty(HIDDEN // few_rows.PART, rows, dtype=torch.float32)
    weighed = few_rows.WeighedRows(x, squares, EPS)
    return {
        **{
            f"{name} product of {rows}": partial(few_rows.linear, *pair)
            for name, pair in weights.items()
        },
        f"weigh of {rows}": partial(few_rows.weigh, x, norm, EPS),
        **{
            f"add_product of {rows}, {name}": partial(
                few_rows.add_product, x, *weights[name], norm, EPS
            )
            for name in ("square", "long")
        },
        f"project_heads of {rows}": partial(few_rows.project_heads, weighed, heads, biases),
        f"swiglu of {rows}": partial(few_rows.swiglu, weighed, up, up),
        f"ordered product of {rows}": partial(few_rows.linear, *weights["long"], 7),
        f"ordered heads of {rows}": partial(few_rows.project_heads, x, heads, biases, 2),
        f"ordered swiglu of {rows}": partial(few_rows.swiglu, x, up, up),
        f"split product of {rows}": partial(split_product, x, heads[0], biases[0], 2),
    }


def many_row_cases() -> Cases:
    """4,096 rows leave tiles over for the kernel of narrow ones, on as many multiprocessors."""
    many_rows._num_programs = lambda device: MULTIPROCESSORS
    found: Cases = {}
    for rows in (1026, 4096):
        wide = empty(INNER, HIDDEN)
        found[f"many_rows.swiglu of {rows}"] = partial(
            many_rows.swiglu, empty(rows, HIDDEN), wide, wide
        )
    for name, rows, inner, bias in (
        ("o", 4096, HIDDEN, None),
        ("q", 4096, HIDDEN, empty(HIDDEN)),
        ("down", 4104, INNER, None),
    ):
        assert all(many_rows._share_tiles(rows, HIDDEN, empty(0).device))
        found[f"many_rows.linear of {rows}, {name}"] = partial(
            many_rows.linear, empty(rows, inner), empty(HIDDEN, inner), bias
        )
        if bias is None:
            found[f"many_rows.add_linear of {rows}, {name}"] = partial(
                many_rows.add_linear, empty(rows, HIDDEN), empty(rows, inner), empty(HIDDEN, inner)
            )
    return found


def sampling_cases(rows: int) -> Cases:
    logits, config = empty(rows, VOCAB), SamplingConfig(True, 0.9, 0, 0.9)
    found: Cases = {f"draw_tokens of {rows}": partial(draw_tokens, logits, config)}
    for name, tempering in (
        ("plain", Tempering(1, 1.0, False)),
        ("by a factor", Tempering(0.9, 1 / 0.9, False)),
        ("divided", Tempering(0.9, 1 / 0.9, True)),
    ):
        found[f"draw_nucleus of {rows}, {name}"] = partial(
            draw_nucleus, logits, config, None, torch.topk, tempering
        )
    return found


def convolved(channels_in: int, channels: int) -> FusedMap:
    conv = torch.nn.Conv2d(channels_in, channels, 1, device="meta")
    return FusedMap.of(empty(4, channels_in, 512, 512)).convolved(conv)


def map_cases(channels: int) -> Cases:
    """Maps with a bias to add, sums of two, and a map that is complete."""
    norm = torch.nn.GroupNorm(32, channels, device="meta")
    found: Cases = {}
    for name, new in (
        ("map with bias", lambda: convolved(channels, channels)),
        ("sum", lambda: convolved(channels, channels) + convolved(channels, channels)),
        ("map", lambda: FusedMap.of(empty(4, channels, 512, 512))),
    ):
        for has_swish in (False, True):
            case = f"norm of {name} of {channels}{' and swish' if has_swish else ''}"
            found[case] = lambda new=new, has_swish=has_swish: new().normalised(norm, has_swish)
        found[f"doubled {name} of {channels}"] = lambda new=new: new().doubled()
        found[f"padded {name} of {channels}"] = lambda new=new: new().padded()
    return found


def all_cases() -> Cases:
    found: Cases = {}
    for rows in (1, 4):
        found |= sampling_cases(rows)
    for rows in (1, 4, 4096):
        found |= operator_cases(rows)
    for rows in FEW:
        found |= few_row_cases(rows)
    found |= many_row_cases()
    for channels in (128, 256, 512):
        found |= map_cases(channels)
    found["map of a picture"] = convolved(128, 3).tensor
    return found | attention_cases()


def declared_kernels() -> set[str]:
    """Triton functions of modeling/ that no other one calls, by module and name."""
    root = Path(few_rows.__file__).parents[2]
    functions, called = set(), set()
    for path in sorted((root / "modeling").rglob("*.py")):
        if "@triton.jit" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            module = importlib.import_module(name)
            functions |= {each for each in vars(module).values() if isinstance(each, JITFunction)}
    for function in functions:
        names = function.fn.__code__.co_names
        called |= {full_name(function.fn.__globals__.get(name)) for name in names}
    return {full_name(function) for function in functions} - called


def full_name(function: object) -> str:
    if not isinstance(function, JITFunction):
        return ""
    return f"{function.fn.__module__}.{function.fn.__name__}"


def stack_bytes(cubin: bytes) -> int | None:
    """Bytes a thread keeps on its stack, where spilled registers go; None without the tool."""
    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return int(usage.stdout.split("STACK:")[1].split()[0])


def compile_all() -> list[dict]:
    """One record for each kernel of each case. Raises RuntimeError naming the case that fails."""
    records, launched = [], []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args, grid, warmup, **options):
        launched.append((self, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    driver.set_active(OfflineDriver())
    for case, work in all_cases().items():
        launched.clear()
        try:
            work()
        except Exception as error:
            raise RuntimeError(f"{case} does not compile") from error
        if not launched:
            raise RuntimeError(f"{case} launches no kernel")
        for function, compiled in launched:
            records.append(
                {
                    "case": case,
                    "kernel": full_name(function),
                    "shared_bytes": compiled.metadata.shared,
                    "stack_bytes": stack_bytes(compiled.asm["cubin"]),
                    "has_wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
                }
            )
    return records


if __name__ == "__main__":
    compiled_kernels = compile_all()
    json.dump({"declared": sorted(declared_kernels()), "compiled": compiled_kernels}, sys.stdout)
