"""Runs operator cases: first against the eager twins, then, if all hold, timed."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench

from tools.operator_cases import (
    DISTRIBUTIONS,
    Case,
    cases,
    every_silu_case,
    fast_cases,
    same_bits,
)

COPY_BYTES = 2 * 2**31


def copy_rate() -> float:
    """Bytes a second of a large device-to-device copy, read and written."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return COPY_BYTES / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)


def check(case: Case) -> dict:
    """Whether a case holds, and where not how far off it is."""
    results, expected = case.run(), case.twin()
    if case.reference is not None:
        return check_error(case, results, expected)
    holds = all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
    record = {"name": case.name, "passed": holds}
    if not holds:
        wrong = sum(
            int((a.view(torch.int16) != b.view(torch.int16)).sum())
            for a, b in zip(results, expected, strict=True)
        )
        record["wrong_values"] = wrong
        print(f"{case.name}: {wrong} values differ")
    return record


def check_error(case: Case, results: list[Tensor], twins: list[Tensor]) -> dict:
    """Whether errors against fp32 are at most a fifth above those of the twin; NaN never is."""
    wide = case.reference()
    errors, limits = [], []
    for out, twin, exact in zip(results, twins, wide, strict=True):
        size = exact.norm()
        errors.append(((out.float() - exact).norm() / size).item())
        limits.append(1.2 * ((twin.float() - exact).norm() / size).item() + 1e-5)
    holds = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    if not holds:
        print(f"{case.name}: relative errors {errors}, allowed {limits}")
    return {"name": case.name, "passed": holds, "errors": errors, "allowed": limits}


def measure(case: Case, rate: float) -> dict:
    """Median time of the fused and the eager form, and the share of the card's bandwidth."""
    fused = do_bench(case.kernel or case.run, return_mode="median")
    eager = do_bench(case.twin, return_mode="median")
    share = case.num_bytes / (fused * 1e-3) / rate
    print(f"{case.name:<34}{fused * 1e3:>9.1f} us  eager {eager * 1e3:>9.1f} us  {share:>6.1%}")
    return {"name": case.name, "fused_ms": fused, "eager_ms": eager, "bandwidth_share": share}


def main(
    description: str,
    rows: tuple[int, ...],
    timed_rows: tuple[int, ...],
    more: Callable[[], Iterator[Case]] = lambda: iter(()),
) -> int:
    """Checks all cases of `rows` and `more`, times those of `timed_rows` and `more`.

    Returns 1 if any case fails.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU: the kernels run interpreted in the tests", file=sys.stderr)
        return 2
    with torch.no_grad():
        checked = [check(every_silu_case())]
        checked += [check(case) for case in cases(rows, DISTRIBUTIONS)]
        checked += [check(case) for case in chain(fast_cases(rows), more())]
        failed = [record["name"] for record in checked if not record["passed"]]
        print(f"{len(checked)} cases, {len(failed)} failed")
        timed = []
        if not failed:
            rate = copy_rate()
            print(f"copy {rate / 1e12:.2f} TB/s; outputs are filled with NaN in every timed call")
            timed = [measure(case, rate) for case in cases(timed_rows, ("normal",))]
            timed += [measure(case, rate) for case in chain(fast_cases(timed_rows), more())]
    if args.json:
        args.json.write_text(json.dumps({"checked": checked, "timed": timed}, indent=1))
    return 1 if failed else 0
