"""The kernel of top tokens on the CPU, thread by thread, against what torch.topk does on a GPU."""

import pytest
import torch

from modeling.bagel.top_tokens import SOURCE, TopSizes, run, tied_rows
from tests.modeling.bagel.cuda_kernels import HostKernel

INF, NAN = float("inf"), float("nan")
SIZES = [
    TopSizes(rows=1, vocab=512, count=33, blocks=1, warps=1),
    TopSizes(rows=1, vocab=2000, count=1000, blocks=3, warps=2),
    TopSizes(rows=2, vocab=1016, count=1016, blocks=3, warps=3),
    TopSizes(rows=3, vocab=840, count=50, blocks=7, warps=2),
    # Threads with two eights, some, and none at all; a block without any.
    TopSizes(rows=4, vocab=2000, count=257, blocks=6, warps=1),
    TopSizes(rows=2, vocab=264, count=200, blocks=12, warps=1),
]


def normal(sizes: TopSizes) -> torch.Tensor:
    return torch.randn(sizes.rows, sizes.vocab)


def of(sizes: TopSizes, *values: float) -> torch.Tensor:
    """Rows of some values, at random."""
    return torch.tensor(values)[torch.randint(len(values), (sizes.rows, sizes.vocab))]


def with_a_few(sizes: TopSizes, *values: float) -> torch.Tensor:
    """Normal ones, of which one in 20 is one of some values instead."""
    rows = normal(sizes)
    return torch.where(torch.rand_like(rows) < 0.05, of(sizes, *values), rows)


LOGITS = {
    "normal": normal,
    "one sign": lambda sizes: -normal(sizes).abs() - 3,
    "ties": lambda sizes: normal(sizes).round(),
    "made up": lambda sizes: tied_rows(sizes, torch.device("cpu")),
    "all equal": lambda sizes: of(sizes, 2.5),
    "nan": lambda sizes: with_a_few(sizes, NAN),
    "nan only": lambda sizes: of(sizes, NAN),
    "infinities": lambda sizes: with_a_few(sizes, INF, -INF, NAN),
    "nothing possible": lambda sizes: of(sizes, -INF),
    "subnormal": lambda sizes: normal(sizes) * 1e-39,
    "zeros": lambda sizes: of(sizes, 0.0, -0.0),
    "zeros in front": lambda sizes: of(sizes, 0.0, -0.0, *range(-40, 0)),
    "ascending": lambda sizes: normal(sizes).sort().values,
    "descending": lambda sizes: normal(sizes).sort(descending=True).values,
    "every exponent": lambda sizes: torch.ldexp(
        normal(sizes), torch.randint(-130, 127, (sizes.rows, sizes.vocab))
    ),
}


def top(row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and tokens of the largest in a row [V], step by step as on a GPU."""
    bits = row.view(torch.int16).int() & 0xFFFF
    keys = torch.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    keys[row.isnan()] = 0xFFFF
    last = keys.sort(descending=True).values[count - 1]
    tokens = torch.cat([(keys > last).nonzero()[:, 0], (keys == last).nonzero()[:, 0]])[:count]
    order = row[tokens].sort(stable=True, descending=True).indices
    return row[tokens[order]], tokens[order]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def compiled(request, tmp_path_factory):
    sizes = request.param
    assert sizes.unsupported() is None
    folder = tmp_path_factory.mktemp("top_tokens")
    return sizes, HostKernel(SOURCE, sizes.macros(), sizes.rows * sizes.blocks, folder)


@pytest.mark.parametrize("name", LOGITS)
def test_the_largest_are_those_of_topk(compiled, poisoned_memory, name):
    sizes, kernel = compiled
    torch.manual_seed(len(name))
    logits = LOGITS[name](sizes).bfloat16()
    before = logits.clone()
    values, tokens = run(kernel, sizes, logits)
    assert torch.equal(logits.view(torch.int16), before.view(torch.int16))
    for row, found_values, found_tokens in zip(logits, values, tokens, strict=True):
        expected_values, expected_tokens = top(row, sizes.count)
        assert torch.equal(found_tokens, expected_tokens)
        assert torch.equal(found_values.view(torch.int16), expected_values.view(torch.int16))


def test_ties_come_in_the_order_of_the_row():
    row = torch.tensor([1.0, 3, 2, 3, 2, 2, 1]).bfloat16()
    assert top(row, 4)[1].tolist() == [1, 3, 2, 4]
    zeros = torch.tensor([-0.0, 0.0, -0.0, 1.0, 0.0]).bfloat16()
    assert top(zeros, 5)[1].tolist() == [3, 1, 4, 0, 2]
    assert top(torch.cat([zeros, -zeros[3:4]]), 6)[1].tolist() == [3, 0, 1, 2, 4, 5]
