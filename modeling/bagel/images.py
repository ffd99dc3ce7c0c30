"""Pictures to tensors, patches and position ids, and decoded tensors back to pictures."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvf

from modeling.bagel.config import ImageSize

MAX_PIXELS = 14 * 14 * 9 * 1024
WHITE = (255, 255, 255, 255)
MODES_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
MAX_16_BIT = 65535


@dataclass(frozen=True)
class ImageTransform:
    """Resizes a picture to sides that are multiples of `stride`, and scales it to [-1, 1].

    The longest side is brought to at most `max_size`, the shortest to at least `min_size`; where
    they contradict each other, `max_size` wins. All in pixels. Raises ValueError for sizes that
    no picture can meet.
    """

    max_size: int
    min_size: int
    stride: int
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if not 0 < self.stride <= self.max_size:
            raise ValueError(
                f"image stride {self.stride} does not fit in the largest size {self.max_size} "
                "(--vae_max_image_size, --vit_max_image_size)"
            )
        if not 0 < self.min_size <= self.max_size:
            raise ValueError(
                f"image sizes {self.min_size}..{self.max_size}: expected 0 < smallest <= largest "
                "(--vae_min_image_size, --vit_min_image_size and their max)"
            )
        if self.max_pixels < self.stride**2:
            raise ValueError(f"max_pixels {self.max_pixels} is less than one {self.stride} square")

    def target_size(self, size: ImageSize) -> ImageSize:
        """Size after the transform, in pixels, of a picture of `size` pixels."""
        if min(size) < 1:
            raise ValueError(f"picture of {size.width} x {size.height} pixels has no content")
        scale = min(self.max_size / max(size), 1)
        target = self._scaled(size, max(scale, self.min_size / min(size)))
        num_pixels = target.height * target.width
        if num_pixels > self.max_pixels:
            # The ratio of areas, not its root: the published model was trained with this cap.
            target = self._scaled(target, self.max_pixels / num_pixels)
        if max(target) > self.max_size:
            target = self._scaled(target, self.max_size / max(target))
        return target

    def _scaled(self, size: ImageSize, scale: float) -> ImageSize:
        """Scales to whole pixels, then to the nearest multiples of the stride, at least one."""
        sides = (self.stride * round(round(side * scale) / self.stride) for side in size)
        return ImageSize(*(max(self.stride, side) for side in sides))

    def __call__(self, image: Image.Image) -> Tensor:
        """Picture of any mode -> [3, h, w] fp32 in [-1, 1]; bicubic with antialias."""
        target = self.target_size(ImageSize(image.height, image.width))
        resized = tvf.resize(
            to_rgb(image), list(target), interpolation=InterpolationMode.BICUBIC, antialias=True
        )
        return tvf.to_tensor(resized) * 2 - 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts a picture of any mode to RGB, with transparent parts on white.

    16-bit grey (mode I too, which is how such files may open) is scaled to 8 bits; F is read as
    grey from 0 to 255. Raises ValueError for levels outside of that, which Pillow would clip.
    """
    if image.mode in MODES_16_BIT:
        return _deep_grey_to_rgb(image, MAX_16_BIT)
    if image.mode == "F":
        return _deep_grey_to_rgb(image, 255)
    if image.has_transparency_data:
        # Pillow undoes premultiplication only on the way to the straight twin of the mode.
        straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, "RGBA")
        rgba = image.convert(straight).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _deep_grey_to_rgb(image: Image.Image, white: int) -> Image.Image:
    levels = np.asarray(image).astype(np.float64)
    # Negated, so that NaN is refused too.
    if not ((levels >= 0) & (levels <= white)).all():
        raise ValueError(
            f"picture of mode {image.mode} has levels {levels.min()}..{levels.max()}, "
            f"expected 0..{white}"
        )
    eight_bit = np.rint(levels * 255 / white).astype(np.uint8)
    transparent_level = image.info.get("transparency")
    if transparent_level is not None:
        eight_bit[levels == transparent_level] = 255
    return Image.fromarray(eight_bit).convert("RGB")


def patchify(image: Tensor, patch: int) -> Tensor:
    """[C, h, w] -> [h/patch * w/patch, patch * patch * C], patches by rows.

    The numbers of a patch are in (row, column, channel) order.
    """
    channels, height, width = image.shape
    if height % patch or width % patch:
        raise ValueError(f"image of {width} x {height} does not divide into patches of {patch}")
    cells = image.reshape(channels, height // patch, patch, width // patch, patch)
    return cells.permute(1, 3, 2, 4, 0).reshape(-1, patch * patch * channels)


def unpatchify(tokens: Tensor, grid: ImageSize, patch: int) -> Tensor:
    """Inverse of `patchify`: [rows * columns, patch * patch * C] -> [C, h, w]."""
    if tokens.shape[0] != grid.height * grid.width or tokens.shape[1] % patch**2:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} are no grid of {grid.height} rows and "
            f"{grid.width} columns of patches of {patch}"
        )
    cells = tokens.reshape(grid.height, grid.width, patch, patch, -1).permute(4, 0, 2, 1, 3)
    return cells.reshape(-1, grid.height * patch, grid.width * patch)


def position_ids(grid: ImageSize, table_side: int) -> Tensor:
    """Rows `row * table_side + column` of a position table, int64 [rows * columns] on the CPU."""
    if max(grid) > table_side:
        raise ValueError(
            f"grid of {grid.height} rows and {grid.width} columns exceeds the position "
            f"table of side {table_side} (--image_size, --vae_max_image_size, --vit_max_image_size)"
        )
    rows, columns = torch.arange(grid.height), torch.arange(grid.width)
    return (rows[:, None] * table_side + columns).flatten()


def to_uint8(decoded: Tensor) -> np.ndarray:
    """Decoded pictures [..., 3, h, w] in about -1..1 -> uint8 [..., h, w, 3]; clamps and truncates.

    Raises ValueError for NaN or infinite values, which would turn into some colour.
    """
    decoded = decoded.detach().float()
    if not decoded.isfinite().all():
        raise ValueError("decoded picture holds NaN or infinite values")
    levels = (decoded * 0.5 + 0.5).clamp(0, 1) * 255
    return levels.to(torch.uint8).movedim(-3, -1).contiguous().cpu().numpy()
