"""The image autoencoder (FLUX format): pictures to latents at an eighth of the size, and back.

Legend: B images, C channels, h and w pixels, z latent channels (16).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from modeling.fused_maps import FusedMap

FILE_NAME = "ae.safetensors"
LATENT_SCALE = 0.3611
LATENT_SHIFT = 0.1159
NORM_GROUPS = 32
NORM_EPS = 1e-6
MAX_NAMES_SHOWN = 8

Shape = tuple[int, ...]
Map: TypeAlias = "Tensor | FusedMap"
"""A feature map [B, C, h, w]. Layers take both kinds and return the kind that they are given."""


@dataclass(frozen=True)
class VaeConfig:
    """Structure of an autoencoder; level i has `channels * channel_mults[i]` channels."""

    channels: int
    channel_mults: tuple[int, ...]
    num_blocks: int
    z_channels: int
    image_channels: int

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Shape]) -> "VaeConfig":
        """Derives the structure from the names and shapes of a checkpoint's tensors.

        Raises ValueError for a missing tensor, or for widths that are no multiple of the first.
        """
        channels, image_channels = _conv_shape(shapes, "encoder.conv_in.weight")
        _, z_channels = _conv_shape(shapes, "decoder.conv_in.weight")
        first_convs = _numbered(shapes, "encoder.down.{}.block.0.conv1.weight")
        widths = [_conv_shape(shapes, name)[0] for name in first_convs]
        num_blocks = len(_numbered(shapes, "encoder.down.0.block.{}.conv1.weight"))
        if channels % NORM_GROUPS or any(width % channels for width in widths) or not widths:
            raise ValueError(
                f"autoencoder levels of {widths} channels: expected multiples of the first "
                f"layer's {channels}, and that of {NORM_GROUPS} (--model_path)"
            )
        mults = tuple(width // channels for width in widths)
        return cls(channels, mults, num_blocks, z_channels, image_channels)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, full resolution first."""
        return tuple(self.channels * mult for mult in self.channel_mults)


def _conv_shape(shapes: Mapping[str, Shape], name: str) -> tuple[int, int]:
    """Output and input channels of the convolution `name`."""
    if name not in shapes or len(shapes[name]) != 4:
        raise ValueError(
            f"autoencoder tensor {name} is {shapes.get(name, 'missing')}, "
            "expected a convolution (--model_path)"
        )
    return shapes[name][0], shapes[name][1]


def _numbered(shapes: Mapping[str, Shape], pattern: str) -> list[str]:
    """The names `pattern` yields for 0, 1, 2 ... as far as they exist."""
    names = []
    while (name := pattern.format(len(names))) in shapes:
        names.append(name)
    return names


def _is_fused(x: Tensor) -> bool:
    """Whether layers on the way of x are fused: under bf16 autocast on a GPU."""
    is_bf16 = torch.get_autocast_dtype("cuda") == torch.bfloat16
    return x.is_cuda and torch.is_autocast_enabled("cuda") and is_bf16


def _to_map(x: Tensor) -> Map:
    if not _is_fused(x):
        return x
    # Imported late: Triton comes with PyTorch's GPU builds only.
    from modeling.fused_maps import FusedMap

    return FusedMap.of(x)


def _to_tensor(x: Map) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


def _normalised(x: Map, norm: nn.GroupNorm, has_swish: bool = True) -> Map:
    """The norm of x [B, C, h, w], times its own sigmoid if asked for."""
    if not isinstance(x, Tensor):
        return x.normalised(norm, has_swish)
    x = norm(x)
    return x * torch.sigmoid(x) if has_swish else x


def _padded(x: Map) -> Map:
    """x [B, C, h, w] with a column of zeros more on the right, and a row more at the bottom."""
    return F.pad(x, (0, 1, 0, 1)) if isinstance(x, Tensor) else x.padded()


def _doubled(x: Map) -> Map:
    """Every pixel of x as 2 x 2 pixels, [B, C, h, w] -> [B, C, 2 h, 2 w]."""
    if not isinstance(x, Tensor):
        return x.doubled()
    # Not F.interpolate: autocast would have that write fp32.
    doubled = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return doubled.flatten(4).flatten(2, 3)


class Conv(nn.Conv2d):
    """A convolution of either kind of map."""

    def forward(self, x: Map) -> Map:
        return super().forward(x) if isinstance(x, Tensor) else x.convolved(self)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS, channels, eps=NORM_EPS)


def _conv1(channels_in: int, channels_out: int) -> Conv:
    return Conv(channels_in, channels_out, kernel_size=1)


def _conv3(channels_in: int, channels_out: int) -> Conv:
    return Conv(channels_in, channels_out, kernel_size=3, padding=1)


class ResBlock(nn.Module):
    """Two normalised 3x3 convolutions and a shortcut, [B, C_in, h, w] -> [B, C_out, h, w]."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = _conv3(channels_in, channels_out)
        self.norm2 = _norm(channels_out)
        self.conv2 = _conv3(channels_out, channels_out)
        if channels_in != channels_out:
            self.nin_shortcut = _conv1(channels_in, channels_out)
        else:
            self.nin_shortcut = nn.Identity()

    def forward(self, x: Map) -> Map:
        # First, as it may have to write x: a fused map takes its moments meanwhile.
        shortcut = self.nin_shortcut(x)
        hidden = self.conv1(_normalised(x, self.norm1))
        hidden = self.conv2(_normalised(hidden, self.norm2))
        return shortcut + hidden


class AttnBlock(nn.Module):
    """Single-head attention among all positions of an image, [B, C, h, w] -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q = _conv1(channels, channels)
        self.k = _conv1(channels, channels)
        self.v = _conv1(channels, channels)
        self.proj_out = _conv1(channels, channels)

    def forward(self, x: Map) -> Map:
        hidden = _normalised(x, self.norm, has_swish=False)
        # [B, C, h, w] -> [B, one head, h * w, C]
        q, k, v = (
            _to_tensor(project(hidden)).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        mixed = mixed.squeeze(1).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(_to_map(mixed))


class Middle(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Map) -> Map:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    """Halves height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv(channels, channels, kernel_size=3, stride=2)

    def forward(self, x: Map) -> Map:
        # Padding is on the right and the bottom only, which Conv2d cannot express.
        return self.conv(_padded(x))


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv3(channels, channels)

    def forward(self, x: Map) -> Map:
        return self.conv(_doubled(x))


class Level(nn.Module):
    """Residual blocks of one resolution; subclasses name the change of size that follows."""

    def __init__(self, channels_in: int, channels_out: int, num_blocks: int) -> None:
        super().__init__()
        sizes = [channels_in] + [channels_out] * (num_blocks - 1)
        self.block = nn.ModuleList(ResBlock(size, channels_out) for size in sizes)

    def forward(self, x: Map) -> Map:
        for block in self.block:
            x = block(x)
        return x


class DownLevel(Level):
    """Residual blocks, then half the size except at the last level."""

    def __init__(self, channels_in: int, channels_out: int, num_blocks: int, is_last: bool) -> None:
        super().__init__(channels_in, channels_out, num_blocks)
        self.downsample = nn.Identity() if is_last else Downsample(channels_out)

    def forward(self, x: Map) -> Map:
        return self.downsample(super().forward(x))


class UpLevel(Level):
    """Residual blocks, then twice the size except at the last level."""

    def __init__(self, channels_in: int, channels_out: int, num_blocks: int, is_last: bool) -> None:
        super().__init__(channels_in, channels_out, num_blocks)
        self.upsample = nn.Identity() if is_last else Upsample(channels_out)

    def forward(self, x: Map) -> Map:
        return self.upsample(super().forward(x))


class Encoder(nn.Module):
    """[B, 3, h, w] -> [B, 2 z, h/8, w/8]: means, then log-variances."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths, last = config.widths, len(config.widths) - 1
        inputs = (config.channels, *widths[:-1])
        self.conv_in = _conv3(config.image_channels, config.channels)
        self.down = nn.ModuleList(
            DownLevel(inputs[i], widths[i], config.num_blocks, is_last=i == last)
            for i in range(len(widths))
        )
        self.mid = Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = _conv3(widths[-1], 2 * config.z_channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv_in(_to_map(x))
        for level in self.down:
            hidden = level(hidden)
        return _to_tensor(self.conv_out(_normalised(self.mid(hidden), self.norm_out)))


class Decoder(nn.Module):
    """[B, z, h/8, w/8] -> [B, 3, h, w]. `up` counts from full resolution, so it runs backwards."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths = config.widths
        inputs = (*widths[1:], widths[-1])
        self.conv_in = _conv3(config.z_channels, widths[-1])
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList(
            UpLevel(inputs[i], widths[i], config.num_blocks + 1, is_last=i == 0)
            for i in range(len(widths))
        )
        self.norm_out = _norm(widths[0])
        self.conv_out = _conv3(widths[0], config.image_channels)

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.mid(self.conv_in(_to_map(z)))
        for level in reversed(self.up):
            hidden = level(hidden)
        return _to_tensor(self.conv_out(_normalised(hidden, self.norm_out)))


class AutoEncoder(nn.Module):
    """Encoder and decoder around normalised latents, 0.3611 * (mean - 0.1159)."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    @property
    def downsample(self) -> int:
        """Pixels along one side of a latent cell."""
        return 2 ** (len(self.config.channel_mults) - 1)

    def encode(self, image: Tensor) -> Tensor:
        """Pictures [B, 3, h, w] in [-1, 1] -> latents [B, z, h/8, w/8]: the mean, nothing drawn.

        Raises ValueError if a side is no multiple of `downsample`.
        """
        if image.shape[-2] % self.downsample or image.shape[-1] % self.downsample:
            raise ValueError(
                f"image of {image.shape[-1]} x {image.shape[-2]} pixels: "
                f"the autoencoder needs multiples of {self.downsample}"
            )
        mean = self.encoder(image)[:, : self.config.z_channels]
        return LATENT_SCALE * (mean - LATENT_SHIFT)

    def decode(self, latent: Tensor) -> Tensor:
        """Latents [B, z, h/8, w/8] -> pictures [B, 3, h, w] in about [-1, 1], not clamped."""
        return self.decoder(latent / LATENT_SCALE + LATENT_SHIFT)


def load_autoencoder(path: Path | str, device: torch.device | str) -> AutoEncoder:
    """Loads a frozen fp32 autoencoder from a checkpoint folder, or from the file itself.

    Raises ValueError as `check_autoencoder` does, before anything is allocated.
    """
    model, file = check_autoencoder(path), _weight_file(path)
    tensors = load_file(file, device=str(device))
    model.load_state_dict({name: x.float() for name, x in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False)


def check_autoencoder(path: Path | str) -> AutoEncoder:
    """The autoencoder on the meta device, its structure read from the file's header.

    Raises ValueError naming missing, unexpected and misshapen tensors.
    """
    file = _weight_file(path)
    shapes = _read_shapes(file)
    with torch.device("meta"):
        model = AutoEncoder(VaeConfig.from_shapes(shapes))
    _check_shapes({name: tuple(x.shape) for name, x in model.state_dict().items()}, shapes, file)
    return model


def _weight_file(path: Path | str) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _read_shapes(file: Path) -> dict[str, Shape]:
    if not file.is_file():
        raise ValueError(f"autoencoder {file} does not exist (--model_path)")
    try:
        with safe_open(file, framework="pt") as header:
            names = header.keys()
            return {name: tuple(header.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {error} (--model_path)") from error


def _check_shapes(wanted: dict[str, Shape], found: dict[str, Shape], file: Path) -> None:
    misshapen = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "misshapen": misshapen,
    }
    if any(faults.values()):
        counts = "; ".join(
            f"{len(names)} {fault}: {', '.join(names[:MAX_NAMES_SHOWN])}"
            for fault, names in faults.items()
            if names
        )
        raise ValueError(f"{file} is not the autoencoder it looks like (--model_path): {counts}")
