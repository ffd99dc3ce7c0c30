"""Feature maps of the autoencoder on a GPU: bf16, channels last, small operators fused in Triton.

cuDNN's fast convolutions want channels last in memory, and PyTorch adds their biases in a pass of
its own. Here a convolution leaves its bias, and a sum its addition, to whatever reads the result
next: a norm, another sum, a change of size. That adds them while it reads, rounded as PyTorch
rounds them. A sum is written while the moments for the norm behind it are taken.

Moments are joined in another order than in PyTorch, so norms can differ from its in the last place
of fp32, before they are rounded.

Shape letters: B pictures, C channels, h and w pixels, G groups of a norm.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from modeling.bagel.fused_ops import num_blocks, power_of_2


@dataclass(frozen=True)
class Tile:
    """How much a program does: `numbers` at once, up to `steps` times, by `warps`.

    With several `stages`, loads run so many steps ahead.
    """

    numbers: int
    steps: int
    warps: int
    stages: int = 1


READ_TILE = Tile(2048, 16, 2, stages=3)
NORM_TILE = Tile(2048, 8, 4, stages=3)
RESIZE_TILE = Tile(4096, 1, 4)
MIN_PROGRAMS = 256
"""Programs of a picture, as long as there is work for them; the number of pictures is left out, so
that it cannot change what a picture's moments round to."""
PARTS_AT_ONCE = 256


@triton.jit
def _bias_row(bias_ptr, channel, C: tl.constexpr):
    """A bias as autocast casts it, or zero."""
    if bias_ptr is None:
        bias = 0.0
    else:
        bias = tl.load(bias_ptr + channel, mask=channel < C, other=0.0)
        bias = bias.to(tl.bfloat16)[None, :]
    return bias


@triton.jit
def _biased(x_ptr, bias_ptr, bias, at, inside):
    """Numbers of a convolution's result with its bias.

    PyTorch rounds the fp32 sum of two bf16 numbers, which gives the bits of their bf16 sum.
    """
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        x += bias
    return x


@triton.jit
def _inside(pixel, channel, pixels, C: tl.constexpr, WIDTH: tl.constexpr):
    inside = (pixel < pixels)[:, None]
    if C < WIDTH:
        inside = inside & (channel < C)[None, :]
    return inside


@triton.jit(do_not_specialize=["plane", "steps"])
def _read_kernel(
    left_ptr,
    left_bias_ptr,
    right_ptr,
    right_bias_ptr,
    out_ptr,
    mean_ptr,
    square_ptr,
    plane,
    steps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds up one part of a picture's `plane` pixels, writes it if asked to, takes its moments.

    These are, for each channel, the mean and the sum of squared deviations from it. Every place of
    the tile keeps its own while the tile moves (Welford, 1962); they are joined at the end (Chan,
    Golub & LeVeque, 1979).
    """
    picture, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    left_bias = _bias_row(left_bias_ptr, channel, C)
    right_bias = _bias_row(right_bias_ptr, channel, C)
    left_ptr += picture * plane * C
    if right_ptr is not None:
        right_ptr += picture * plane * C
    if out_ptr is not None:
        out_ptr += picture * plane * C
    first = part * steps * ROWS
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        pixel = first + step * ROWS + row
        at = pixel[:, None] * C + channel[None, :]
        inside = _inside(pixel, channel, plane, C, WIDTH)
        x = _biased(left_ptr, left_bias_ptr, left_bias, at, inside)
        if right_ptr is not None:
            x += _biased(right_ptr, right_bias_ptr, right_bias, at, inside)
        if out_ptr is not None:
            tl.store(out_ptr + at, x, mask=inside)
        x = x.to(tl.float32)
        apart = tl.where(inside, x - mean, 0.0)
        mean += apart * (1.0 / (step + 1))
        squares += apart * (x - mean)
    pixels = tl.minimum(plane - first, steps * ROWS)
    count = ((pixels - row + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    joined = tl.sum(mean * count, axis=0) / pixels
    apart = mean - joined[None, :]
    squares += apart * apart * count
    at = (picture * tl.num_programs(1) + part) * C + channel
    tl.store(mean_ptr + at, joined, mask=channel < C)
    tl.store(square_ptr + at, tl.sum(squares, axis=0), mask=channel < C)


@triton.jit(do_not_specialize=["plane", "parts", "pixels"])
def _join_kernel(
    part_mean_ptr,
    part_square_ptr,
    mean_ptr,
    scale_ptr,
    plane,
    parts,
    pixels,
    eps,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Mean and inverse deviation of one group of SIZE channels, from parts of `pixels` each.

    Moments are joined as Chan, Golub & LeVeque (1979) join two.
    """
    picture, group = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    start = picture.to(tl.int64) * parts * C + group * SIZE
    total = tl.zeros((AT_ONCE, WIDTH), tl.float32)
    for first in tl.range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < parts)[:, None] & (lane < SIZE)[None, :]
        at = start + part[:, None] * C + lane[None, :]
        count = tl.minimum(plane - part * pixels, pixels)[:, None]
        total += tl.load(part_mean_ptr + at, mask=there, other=0.0) * count
    mean = tl.sum(total) / (plane * SIZE)
    total = tl.zeros((AT_ONCE, WIDTH), tl.float32)
    for first in tl.range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < parts)[:, None] & (lane < SIZE)[None, :]
        at = start + part[:, None] * C + lane[None, :]
        count = tl.minimum(plane - part * pixels, pixels)[:, None]
        apart = tl.load(part_mean_ptr + at, mask=there, other=mean) - mean
        total += tl.load(part_square_ptr + at, mask=there, other=0.0) + apart * apart * count
    at = picture * tl.num_programs(1) + group
    tl.store(mean_ptr + at, mean)
    tl.store(scale_ptr + at, tl.rsqrt(tl.sum(total) / (plane * SIZE) + eps))


@triton.jit(do_not_specialize=["plane", "steps"])
def _normalise_kernel(
    x_ptr,
    x_bias_ptr,
    mean_ptr,
    scale_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    plane,
    steps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_SWISH: tl.constexpr,
):
    """One part of a picture of `plane` pixels, by the moments of its groups."""
    picture, row, channel = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = channel < C
    group = picture * GROUPS + channel // (C // GROUPS)
    mean = tl.load(mean_ptr + group, mask=real, other=0.0)[None, :]
    scale = tl.load(scale_ptr + group, mask=real, other=0.0)
    weight = tl.load(weight_ptr + channel, mask=real, other=0.0).to(tl.float32)
    factor = (scale * weight)[None, :]
    bias = tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    x_bias = _bias_row(x_bias_ptr, channel, C)
    x_ptr += picture.to(tl.int64) * plane * C
    out_ptr += picture.to(tl.int64) * plane * C
    first = tl.program_id(1) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        pixel = first + step * ROWS + row
        at = pixel[:, None] * C + channel[None, :]
        inside = _inside(pixel, channel, plane, C, WIDTH)
        x = _biased(x_ptr, x_bias_ptr, x_bias, at, inside).to(tl.float32)
        y = (x - mean) * factor + bias
        if HAS_SWISH:
            y = y / (1.0 + tl.exp(-y))
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["height", "width", "down", "across", "steps"])
def _resize_kernel(
    left_ptr,
    left_bias_ptr,
    right_ptr,
    right_bias_ptr,
    out_ptr,
    height,
    width,
    down,
    across,
    steps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Adds up part of a picture, writes each pixel FACTOR x FACTOR times, zeros where it ends.

    The picture is `down` x `across` pixels before they are repeated, `height` x `width` of them
    read.
    """
    picture, row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, WIDTH)
    left_bias = _bias_row(left_bias_ptr, channel, C)
    right_bias = _bias_row(right_bias_ptr, channel, C)
    left_ptr += picture * height * width * C
    if right_ptr is not None:
        right_ptr += picture * height * width * C
    out_ptr += picture * down * across * (FACTOR * FACTOR * C)
    first = tl.program_id(1) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        pixel = first + step * ROWS + row
        y, x = pixel // across, pixel % across
        inside = _inside(pixel, channel, down * across, C, WIDTH)
        there = inside & ((y < height) & (x < width))[:, None]
        at = (y * width + x)[:, None] * C + channel[None, :]
        value = _biased(left_ptr, left_bias_ptr, left_bias, at, there)
        if right_ptr is not None:
            value += _biased(right_ptr, right_bias_ptr, right_bias, at, there)
        value = tl.where(there, value, 0.0)
        for i in tl.static_range(FACTOR):
            for j in tl.static_range(FACTOR):
                target = (y * FACTOR + i) * across * FACTOR + x * FACTOR + j
                place = target[:, None] * C + channel[None, :]
                tl.store(out_ptr + place, value, mask=inside)


@dataclass(frozen=True)
class Term:
    """A tensor [B, C, h, w] in bf16, channels last; a bias [C] that is still to be added to it."""

    x: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class _Moments:
    """Mean and sum of squared deviations [B, parts, C] in fp32 of parts of `pixels` pixels."""

    means: Tensor
    squares: Tensor
    pixels: int


class FusedMap:
    """A feature map [B, C, h, w] in bf16: the sum of one term or two, written when it has to be.

    It offers what the autoencoder's layers do with a map. None of that changes a map for whoever
    holds it; a sum once written, and its moments, are kept.
    """

    def __init__(self, *terms: Term) -> None:
        self._terms = terms
        self._moments: _Moments | None = None

    @classmethod
    def of(cls, x: Tensor) -> "FusedMap":
        """The map of a tensor [B, C, h, w] of any dtype and memory format."""
        return cls(Term(x.to(torch.bfloat16, memory_format=torch.channels_last)))

    @property
    def shape(self) -> torch.Size:
        """[B, C, h, w]."""
        return self._terms[0].x.shape

    def tensor(self) -> Tensor:
        """The map [B, C, h, w] in bf16, channels last."""
        if len(self._terms) > 1 or self._terms[0].bias is not None:
            out = torch.empty_like(self._terms[0].x)
            self._moments = _read(self._terms, out)
            self._terms = (Term(out),)
        return self._terms[0].x

    def convolved(self, conv: nn.Conv2d) -> "FusedMap":
        """The result of a convolution, whose weights are cast as autocast casts them."""
        weight = conv.weight.to(torch.bfloat16, memory_format=torch.channels_last)
        x = F.conv2d(self.tensor(), weight, None, conv.stride, conv.padding)
        return FusedMap(Term(x.contiguous(memory_format=torch.channels_last), conv.bias))

    def normalised(self, norm: nn.GroupNorm, has_swish: bool) -> "FusedMap":
        """The norm, then y * sigmoid(y) if asked for: in fp32, rounded once."""
        term = self._added()
        if self._moments is None:
            self._moments = _read(self._terms, None)
        return FusedMap(Term(_normalise(term, self._moments, norm, has_swish)))

    def doubled(self) -> "FusedMap":
        """Every pixel as 2 x 2 pixels."""
        height, width = self.shape[2:]
        return FusedMap(Term(_resize(self._terms, height, width, 2)))

    def padded(self) -> "FusedMap":
        """A column of zeros more on the right, a row more at the bottom."""
        height, width = self.shape[2:]
        return FusedMap(Term(_resize(self._terms, height + 1, width + 1, 1)))

    def __add__(self, other: "FusedMap") -> "FusedMap":
        return FusedMap(self._added(), other._added())

    def _added(self) -> Term:
        """The map in one term, written first if it is a sum."""
        return Term(self.tensor()) if len(self._terms) > 1 else self._terms[0]


def _shape(tile: Tile, channels: int) -> dict[str, int]:
    """What kernels are told of a tile: channels, pixels, stages and warps."""
    width = power_of_2(channels)
    rows = max(1, tile.numbers // width)
    tiled = {"C": channels, "WIDTH": width, "ROWS": rows}
    return tiled | {"STAGES": tile.stages, "num_warps": tile.warps}


def _num_steps(tile: Tile, rows: int, pixels: int) -> int:
    return max(1, min(tile.steps, pixels // (rows * MIN_PROGRAMS)))


def _operands(terms: tuple[Term, ...]) -> list[Tensor | None]:
    """Tensor and bias of two terms; None where there is but one."""
    operands = [operand for term in terms for operand in (term.x, term.bias)]
    return operands + [None] * (4 - len(operands))


def _read(terms: tuple[Term, ...], out: Tensor | None) -> _Moments:
    """The moments of a map, which goes to `out` if there is one."""
    pictures, channels, height, width = terms[0].x.shape
    plane, shape = height * width, _shape(READ_TILE, channels)
    steps = _num_steps(READ_TILE, shape["ROWS"], plane)
    pixels = steps * shape["ROWS"]
    parts = num_blocks(plane, pixels)
    size = (2, pictures, parts, channels)
    means, squares = torch.empty(size, dtype=torch.float32, device=terms[0].x.device)
    _read_kernel[(pictures, parts)](*_operands(terms), out, means, squares, plane, steps, **shape)
    return _Moments(means, squares, pixels)


def _normalise(term: Term, moments: _Moments, norm: nn.GroupNorm, has_swish: bool) -> Tensor:
    pictures, channels, height, width = term.x.shape
    plane, groups = height * width, norm.num_groups
    size = channels // groups
    joined = torch.empty(2, pictures, groups, dtype=torch.float32, device=term.x.device)
    _join_kernel[(pictures, groups)](
        moments.means,
        moments.squares,
        *joined,
        plane,
        moments.means.shape[1],
        moments.pixels,
        norm.eps,
        C=channels,
        SIZE=size,
        WIDTH=power_of_2(size),
        AT_ONCE=PARTS_AT_ONCE,
    )
    out, shape = torch.empty_like(term.x), _shape(NORM_TILE, channels)
    steps = _num_steps(NORM_TILE, shape["ROWS"], plane)
    _normalise_kernel[(pictures, num_blocks(plane, steps * shape["ROWS"]))](
        term.x,
        term.bias,
        *joined,
        norm.weight,
        norm.bias,
        out,
        plane,
        steps,
        **shape,
        GROUPS=groups,
        HAS_SWISH=has_swish,
    )
    return out


def _resize(terms: tuple[Term, ...], down: int, across: int, factor: int) -> Tensor:
    x = terms[0].x
    pictures, channels, height, width = x.shape
    size = (pictures, channels, down * factor, across * factor)
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    shape = _shape(RESIZE_TILE, channels)
    steps = _num_steps(RESIZE_TILE, shape["ROWS"], down * across)
    _resize_kernel[(pictures, num_blocks(down * across, steps * shape["ROWS"]))](
        *_operands(terms), out, height, width, down, across, steps, **shape, FACTOR=factor
    )
    return out
