"""Cases of the largest logits in one launch: the real vocabulary against torch.topk."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from modeling.bagel.cuda_source import CudaKernel
from modeling.bagel.fused_ops import num_multiprocessors
from modeling.bagel.top_tokens import TopSizes, compile_kernel, is_supported, run, tied_rows
from tools.operator_cases import Case, draw, poisoned

VOCAB = 152064
COUNTS = (1000, 50)
KINDS = ("normal", "tiny", "few values", "all equal", "nan", "infinities", "zeros", "tied")


def top_cases() -> Iterator[Case]:
    """Logits of all kinds in 1 to 4 rows; on Hopper only."""
    device = torch.device("cuda")
    if not is_supported(device):
        print("the largest logits are left to torch.topk on this GPU")
        return
    for rows, count in product((1, 2, 3, 4), COUNTS):
        sizes = TopSizes.of(rows, VOCAB, count, num_multiprocessors(device))
        kernel = compile_kernel(sizes)
        for kind in KINDS:
            yield top_case(kernel, sizes, kind, device)


def top_case(kernel: CudaKernel, sizes: TopSizes, kind: str, device: torch.device) -> Case:
    """Values and tokens by the kernel and by torch.topk."""
    logits = draw_logits(sizes, kind, device)

    def take() -> list[Tensor]:
        poisoned(sizes.rows, sizes.count)  # freed at once: the values take its memory
        return list(run(kernel, sizes, logits))

    return Case(
        f"top {sizes.count} of {sizes.rows}, {kind}",
        take,
        lambda: list(torch.topk(logits, sizes.count)),
        logits.nbytes,
        kernel=partial(run, kernel, sizes, logits),
    )


def draw_logits(sizes: TopSizes, kind: str, device: torch.device) -> Tensor:
    """bf16 logits [B, V] of one of `KINDS`."""
    if kind == "tied":
        return tied_rows(sizes, device)
    shape = (sizes.rows, sizes.vocab)
    logits = draw(shape, "tiny" if kind == "tiny" else "normal", sizes.rows)
    if kind == "few values":
        return logits.round()
    if kind == "all equal":
        return torch.full_like(logits, -1.5)
    if kind == "zeros":  # of both signs, behind the few that are above 3
        return torch.where(logits > 3, logits, logits * 0)
    other = draw(shape, "normal", sizes.rows + 1)  # one in 740 is above 3
    if kind == "nan":
        return logits.masked_fill(other > 3, float("nan"))
    if kind == "infinities":
        return logits.masked_fill(other > 3, float("inf")).masked_fill(other < 0, -float("inf"))
    return logits
