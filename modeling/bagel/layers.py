"""Small building blocks: RMSNorm, rotary embedding, position tables, timestep and image connectors.

Shape letters: S packed tokens, D hidden, N heads, H head size.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")
TIMESTEP_FEATURES = 256
MAX_PERIOD = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32, in the input's type."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # F.rms_norm rounds elsewhere, so the formula is spelled out: normalise in fp32,
        # round to the input's type, then scale.
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; on a GPU from pinned memory, for which nothing waits.

    A plain copy makes the host wait until all that was launched before it has run.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def once_per_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps what `make(*settings, device)` returns, so that a forward does not launch it again.

    What is made inside a graph capture is not kept: it lies in the graph's memory pool, and is
    computed only when the graph runs. A captured forward reads the kept tensor if an eager one
    came before it, as one does wherever this project captures, and otherwise computes its own.
    """
    kept: dict[tuple, Tensor] = {}

    @wraps(make)
    def look_up(*arguments: object) -> Tensor:
        tensor = kept.get(arguments)
        if tensor is None:
            tensor = make(*arguments)
            if not is_capturing(tensor.device):
                kept[arguments] = tensor
        return tensor

    return look_up


class FoundByTrying(Generic[T]):
    """What was found by trying on a device, once for each key."""

    def __init__(self) -> None:
        self._found: dict[tuple, T] = {}

    def get(self, key: tuple, device: torch.device, find: Callable[[], T]) -> T | None:
        """What `find` gave for the key at first; it may wait for the device.

        None inside a graph capture, where nothing can be tried, if the key did not come before.
        """
        if key not in self._found:
            if is_capturing(device):
                return None
            self._found[key] = find()
        return self._found[key]


def scattered(num_rows: int, size: int, device: torch.device) -> Tensor:
    """Numbers below `size` all over each row, int64 [num_rows, size]: for inputs to try.

    Each comes once a row, unless `size` is a multiple of 7919, which is prime.
    """
    places = torch.arange(size, device=device)
    rows = torch.arange(num_rows, device=device)[:, None]
    return (places * 7919 + rows * 104729) % size


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device is being recorded into a graph instead of run."""
    # A build without CUDA cannot be asked.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def rotary_table(rope_ids: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, half-rotation layout).

    Args:
        rope_ids: int64 [S].
        head_size: H.
        theta: base of the frequencies.

    Returns:
        Two fp32 tensors [S, 1, H].
    """
    angles = rope_ids[:, None, None] * _rotary_frequencies(head_size, theta, rope_ids.device)
    return angles.cos(), angles.sin()


@once_per_device
def _rotary_frequencies(head_size: int, theta: float, device: torch.device) -> Tensor:
    """The frequency of each feature of a head, those of the two halves alike: fp32 [H]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (exponents / head_size))
    return torch.cat((frequencies, frequencies))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [S, N, H] in the type of x."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def sincos_table(side: int, size: int) -> Tensor:
    """Fixed 2-D position table: half the features for the column, half for the row.

    Each half holds all sines before all cosines (base 10000, computed in float64).

    Returns:
        fp32 [side * side, size]; row `r * side + c` belongs to grid cell (r, c).
    """
    quarter = size // 4
    frequencies = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies[None, :]
    axis = torch.cat((angles.sin(), angles.cos()), dim=-1)
    columns = axis[None, :, :].expand(side, side, size // 2)
    rows = axis[:, None, :].expand(side, side, size // 2)
    return torch.cat((columns, rows), dim=-1).reshape(side * side, size).float()


class PositionTable(nn.Module):
    """A frozen sin-cos table; rebuilt for its size, never loaded from a checkpoint."""

    def __init__(self, side: int, size: int):
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, size), requires_grad=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids int64 [T] -> [T, D]."""
        return self.pos_embed[position_ids]


def timestep_features(t: Tensor) -> Tensor:
    """Sinusoidal features of t [T] in 0..1, cosines first: fp32 [T, 256]."""
    angles = t.float()[:, None] * _timestep_frequencies(t.device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@once_per_device
def _timestep_frequencies(device: torch.device) -> Tensor:
    half = TIMESTEP_FEATURES // 2
    exponents = torch.arange(half, dtype=torch.float32, device=device) / half
    return torch.exp(-math.log(MAX_PERIOD) * exponents)


class TimestepEmbedder(nn.Module):
    """Sinusoidal features, Linear, SiLU, Linear."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(TIMESTEP_FEATURES, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
        )

    def forward(self, t: Tensor) -> Tensor:
        """t fp32 [T] in 0..1 -> [T, D] in the type of the weights."""
        return self.mlp(timestep_features(t).to(self.mlp[0].weight.dtype))


class Connector(nn.Module):
    """Maps image-encoder features into the decoder: Linear, tanh-GELU, Linear."""

    def __init__(self, vit_size: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(vit_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """features [T, D_vit] -> [T, D]."""
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))
