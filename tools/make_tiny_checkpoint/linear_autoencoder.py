"""An autoencoder set by construction: exact for pictures that are flat in cells of 8 x 8 pixels.

The FLUX architecture ends encoder and decoder in a group norm, which takes the level of a flat
picture away, and a small network needs long to be trained around that. Its weights can be written
down instead, so that the whole is linear:

* Every residual branch is zero, downsampling is a mean of 2 x 2, upsampling copies.
* A signal s travels as the two channels (s, -s) of one norm group, so the group's mean is 0. It is
  so small that the norm's epsilon outweighs its variance: the norm only multiplies by a constant.
* swish(u) - swish(-u) = u, so the last convolution gets the signal back.

The latent is the mean color of a cell, spread over all 16 channels by orthonormal columns.
Shape letters: z latent channels (16), C channels.
"""

import torch
from torch import Tensor, nn

from modeling.autoencoder import (
    LATENT_SCALE,
    LATENT_SHIFT,
    NORM_EPS,
    AttnBlock,
    AutoEncoder,
    Downsample,
    ResBlock,
    Upsample,
    VaeConfig,
)
from tools.reward_service.scoring import PALETTE

SIGNAL = 2e-5  # size of the signal in front of a norm whose epsilon is 1e-6 = (50 * SIGNAL)^2
RGB = range(3)


@torch.no_grad()
def build_autoencoder(config: VaeConfig) -> AutoEncoder:
    """The autoencoder, its latents of about unit variance over flat pictures in GenEval's colors.

    Raises ValueError unless all levels have two channels in each norm group or more.
    """
    if set(config.channel_mults) != {1} or config.channels < 64:
        raise ValueError(f"{config}: expected levels of one width, 64 channels or more")
    model = AutoEncoder(config)
    for module in model.modules():
        if isinstance(module, ResBlock):
            _set_zero(module.conv2)
        elif isinstance(module, AttnBlock):
            _set_zero(module.proj_out)
        elif isinstance(module, Downsample):
            _set_identity(module.conv)
            module.conv.weight[:, :, :2, :2] = module.conv.weight[:, :, 1:2, 1:2] / 4
            module.conv.weight[:, :, 2] = 0
            module.conv.weight[:, :, :, 2] = 0
        elif isinstance(module, Upsample):
            _set_identity(module.conv)
    mean, basis, scale = _latent_basis(config.z_channels)
    # latent = scale * basis @ (rgb - mean), which the fixed scale and shift must yield.
    mix = scale * basis / LATENT_SCALE
    _write_pairs(model.encoder.conv_in, torch.eye(3), torch.zeros(3))
    _read_pairs(model.encoder.norm_out, model.encoder.conv_out, mix, LATENT_SHIFT - mix @ mean)
    unmix = basis.T / scale * LATENT_SCALE
    _write_pairs(model.decoder.conv_in, unmix, mean - unmix.sum(1) * LATENT_SHIFT)
    _read_pairs(model.decoder.norm_out, model.decoder.conv_out, torch.eye(3), torch.zeros(3))
    return model.eval().requires_grad_(False)


def _latent_basis(z_channels: int) -> tuple[Tensor, Tensor, float]:
    """Mean color [3], orthonormal columns [z, 3] of equal entries, and their scale."""
    colors = torch.tensor(list(PALETTE.values())) / 127.5 - 1
    variance = colors.var(dim=0, unbiased=False).sum().item()
    channel = torch.arange(z_channels)
    # Walsh functions: the sign alternates every channel, every two, every four.
    columns = [1 - 2 * ((channel >> bit) & 1) for bit in RGB]
    basis = torch.stack(columns, dim=1).float() / z_channels**0.5
    return colors.mean(dim=0), basis, (z_channels / variance) ** 0.5


def _set_zero(conv: nn.Conv2d) -> None:
    conv.weight.zero_()
    conv.bias.zero_()


def _set_identity(conv: nn.Conv2d) -> None:
    _set_zero(conv)
    nn.init.dirac_(conv.weight)


def _write_pairs(conv: nn.Conv2d, mix: Tensor, offset: Tensor) -> None:
    """Makes `conv` write signal i of mix [3, inputs] @ x + offset as channels 2 i and 2 i + 1."""
    center = conv.weight.shape[-1] // 2
    for i in RGB:
        for channel, sign in ((2 * i, SIGNAL), (2 * i + 1, -SIGNAL)):
            conv.weight[channel] = 0
            conv.weight[channel, :, center, center] = sign * mix[i]
            conv.bias[channel] = sign * offset[i]


def _read_pairs(norm: nn.GroupNorm, conv: nn.Conv2d, mix: Tensor, offset: Tensor) -> None:
    """Makes `conv` compute mix [outputs, 3] @ signals + offset from the pairs behind `norm`."""
    center = conv.weight.shape[-1] // 2
    norm.weight.fill_(NORM_EPS**0.5 / SIGNAL)
    norm.bias.zero_()
    _set_zero(conv)
    for i in RGB:
        conv.weight[: len(mix), 2 * i, center, center] = mix[:, i]
        conv.weight[: len(mix), 2 * i + 1, center, center] = -mix[:, i]
    conv.bias[: len(mix)] = offset
