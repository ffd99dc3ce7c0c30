"""Image transform, modes, patch order and position ids against golden values and by hand."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from modeling.bagel.config import ImageSize
from modeling.bagel.images import (
    ImageTransform,
    patchify,
    position_ids,
    to_rgb,
    to_uint8,
    unpatchify,
)

PARITY = Path(__file__).parents[2] / "parity"
UNITS = json.loads((PARITY / "units.json").read_text())
GREY_LEVEL = 2 / 255


def golden() -> dict[str, torch.Tensor]:
    return load_file(PARITY / "units.safetensors")


def gradient(width: int, height: int) -> Image.Image:
    """The picture of units.json `transforms_image`."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    channels = (255 * x // (width - 1), 255 * y // (height - 1), 7 * (x + y) % 256)
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def vit_transform() -> ImageTransform:
    return ImageTransform(max_size=112, min_size=56, stride=14)


@pytest.mark.parametrize("case", UNITS["transforms"])
def test_golden_transform(case):
    transform = ImageTransform(case["max"], case["min"], case["stride"])
    out = transform(gradient(case["width"], case["height"]))
    assert list(out.shape) == case["out_chw"] and out.dtype == torch.float32
    assert out.min() >= -1 and out.max() <= 1
    for pixel, expected in ((out[:, 0, 0], case["corner"]), (out[:, -1, -1], case["last"])):
        torch.testing.assert_close(pixel, torch.tensor(expected), rtol=0, atol=GREY_LEVEL + 1e-6)
    assert out.mean().item() == pytest.approx(case["mean"], abs=GREY_LEVEL / 4)
    assert out.std().item() == pytest.approx(case["std"], abs=GREY_LEVEL / 4)


def test_golden_vit_patches_and_positions():
    patches, ids, seqlens = [], [], []
    for width, height in UNITS["vit_images_wh"]:
        image = vit_transform()(gradient(width, height))
        patches.append(patchify(image, 14))
        grid = ImageSize(image.shape[1] // 14, image.shape[2] // 14)
        ids.append(position_ids(grid, 8))
        seqlens.append(len(ids[-1]))
    assert seqlens == UNITS["vit_seqlens"]
    assert torch.equal(torch.cat(ids), golden()["vit.position_ids"])
    expected = golden()["vit.patches"]
    torch.testing.assert_close(torch.cat(patches), expected, rtol=0, atol=GREY_LEVEL + 1e-6)


def test_golden_latent_patches_and_positions():
    latent, tokens = golden()["vae.latent"][0], golden()["vae.patched_latent"]
    assert torch.equal(patchify(latent, 2), tokens)
    assert torch.equal(unpatchify(tokens, ImageSize(3, 4), 2), latent)
    assert torch.equal(position_ids(ImageSize(3, 4), 8), golden()["vae.latent_position_ids"])


def test_patch_numbers_are_in_row_column_channel_order():
    rows, columns, channels = torch.meshgrid(
        torch.arange(4), torch.arange(6), torch.arange(3), indexing="ij"
    )
    image = (100 * rows + 10 * columns + channels).permute(2, 0, 1)
    tokens = patchify(image, 2)
    assert tokens.shape == (6, 12)
    assert tokens[4].tolist() == [220, 221, 222, 230, 231, 232, 320, 321, 322, 330, 331, 332]
    assert torch.equal(unpatchify(tokens, ImageSize(2, 3), 2), image)


@pytest.mark.parametrize(
    ("transform", "size", "expected"),
    [
        (ImageTransform(512, 256, 16), (64, 1024), (32, 512)),  # max wins over min
        (ImageTransform(512, 256, 16), (300, 400), (304, 400)),
        (ImageTransform(512, 256, 16), (1, 1), (256, 256)),
        (ImageTransform(512, 256, 16), (1, 4000), (16, 512)),  # never less than a stride
        (ImageTransform(504, 252, 14), (1024, 1024), (504, 504)),
        (ImageTransform(100, 20, 8), (20, 20), (16, 16)),  # 2.5 strides round to the even 2
        (ImageTransform(4096, 256, 16), (4096, 4096), (448, 448)),  # pixel cap, ratio of areas
        (ImageTransform(4096, 256, 16), (1024, 2048), (880, 1760)),
    ],
)
def test_target_size(transform, size, expected):
    assert transform.target_size(ImageSize(*size)) == ImageSize(*expected)


def test_transform_of_a_square_colour_is_that_colour():
    image = Image.new("RGB", (300, 270), (255, 0, 51))
    out = ImageTransform(512, 256, 16)(image)
    assert out.shape == (3, 272, 304)
    assert torch.equal(out.amin((1, 2)), out.amax((1, 2)))
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, -1.0, -0.6]), rtol=0, atol=1e-6)


def rgb_pixels(image: Image.Image) -> list[list[int]]:
    converted = to_rgb(image)
    assert converted.mode == "RGB" and converted.size == image.size
    return np.asarray(converted).reshape(-1, 3).tolist()


def through_png(image: Image.Image, **options) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_transparency_goes_on_white():
    rgba = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    rgba.putpixel((1, 0), (200, 0, 0, 0))
    expected = [[200, 0, 0], [255, 255, 255]]
    assert rgb_pixels(rgba) == expected
    assert rgb_pixels(rgba.convert("RGBa")) == expected
    half = rgb_pixels(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))
    assert half == [[127, 127, 127]]


def test_grey_with_alpha_goes_on_white():
    grey = Image.new("LA", (2, 1), (50, 255))
    grey.putpixel((1, 0), (50, 0))
    assert rgb_pixels(grey) == [[50] * 3, [255] * 3]
    assert rgb_pixels(grey.convert("La")) == [[50] * 3, [255] * 3]


def test_palette_with_and_without_transparency():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert rgb_pixels(palette) == [[10, 20, 30], [40, 50, 60]]
    assert rgb_pixels(through_png(palette, transparency=1)) == [[10, 20, 30], [255] * 3]
    levels = through_png(palette, transparency=bytes([255, 0]))
    assert rgb_pixels(levels) == [[10, 20, 30], [255] * 3]


def test_colour_keys_of_plain_modes_go_on_white():
    grey = Image.new("L", (2, 1), 9)
    grey.putpixel((1, 0), 200)
    assert rgb_pixels(through_png(grey, transparency=9)) == [[255] * 3, [200] * 3]
    colour = Image.new("RGB", (2, 1), (1, 2, 3))
    colour.putpixel((1, 0), (4, 5, 6))
    assert rgb_pixels(through_png(colour, transparency=(1, 2, 3))) == [[255] * 3, [4, 5, 6]]


def test_modes_without_transparency():
    assert rgb_pixels(Image.new("RGB", (1, 1), (1, 2, 3))) == [[1, 2, 3]]
    assert rgb_pixels(Image.new("L", (1, 1), 77)) == [[77] * 3]
    assert rgb_pixels(Image.new("1", (1, 1), 1)) == [[255] * 3]
    assert rgb_pixels(Image.new("CMYK", (1, 1), (0, 255, 255, 0))) == [[255, 0, 0]]
    assert rgb_pixels(Image.new("F", (1, 1), 99.6)) == [[100] * 3]


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_16_bit_grey_is_scaled_not_clipped(mode):
    image = Image.new(mode, (4, 1))
    for column, level in enumerate((0, 257, 32768, 65535)):
        image.putpixel((column, 0), level)
    assert rgb_pixels(image) == [[0] * 3, [1] * 3, [128] * 3, [255] * 3]


def test_16_bit_png_with_colour_key():
    image = Image.fromarray(np.array([[0, 65535, 1000]], dtype=np.uint16))
    opened = through_png(image)
    opened.info["transparency"] = 0
    assert rgb_pixels(opened) == [[255] * 3, [255] * 3, [4] * 3]


@pytest.mark.parametrize(
    ("mode", "level"), [("I", 70000), ("I", -1), ("F", 300.0), ("F", float("nan"))]
)
def test_levels_out_of_range_are_refused(mode, level):
    with pytest.raises(ValueError, match=f"mode {mode} has levels"):
        to_rgb(Image.new(mode, (1, 1), level))


def test_to_uint8_clamps_and_truncates():
    values = torch.tensor([-3.0, -1.0, 0.0, 0.999, 1.0, 7.0])
    picture = to_uint8(values.view(1, 2, 3).expand(3, 2, 3))
    assert picture.shape == (2, 3, 3) and picture.dtype == np.uint8
    assert picture[..., 1].flatten().tolist() == [0, 0, 127, 254, 255, 255]
    assert to_uint8(torch.zeros(3, 2, 4).bfloat16()).shape == (2, 4, 3)
    several = torch.rand(2, 3, 4, 5) * 2 - 1
    assert np.array_equal(to_uint8(several), np.stack([to_uint8(each) for each in several]))


def test_to_uint8_returns_pictures_unchanged():
    image = gradient(64, 48)
    as_tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    # Half a level up: truncation alone would lose levels to rounding.
    assert np.array_equal(to_uint8((as_tensor + 0.5) / 255 * 2 - 1), np.asarray(image))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.full((3, 2, 2), float("nan")))
    with pytest.raises(ValueError, match="9 x 4 does not divide"):
        patchify(torch.zeros(3, 4, 9), 2)
    with pytest.raises(ValueError, match="no grid of 3 rows"):
        unpatchify(torch.zeros(8, 64), ImageSize(3, 3), 2)
    with pytest.raises(ValueError, match="side 8.*--vit_max_image_size"):
        position_ids(ImageSize(2, 9), 8)
    with pytest.raises(ValueError, match="no content"):
        vit_transform().target_size(ImageSize(0, 5))
    with pytest.raises(ValueError, match="--vit_min_image_size"):
        ImageTransform(56, 112, 14)
    with pytest.raises(ValueError, match="stride 14 does not fit"):
        ImageTransform(10, 5, 14)
