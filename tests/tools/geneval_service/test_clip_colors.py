"""Colors by CLIP: the crop that it sees, the prompts, and a tiny random model end to end."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.vocabulary import COLORS
from tests.tools.geneval_service.fakes import found
from tests.tools.geneval_service.tiny_models import write_clip
from tools.geneval_service.clip_colors import (
    IMAGE_MEAN,
    IMAGE_STD,
    ClipColorJudge,
    crop_pixels,
)
from tools.geneval_service.detectors import ObjectView

CPU = torch.device("cpu")
SIDE = 32


def view(image, box, mask=None, name="cat"):
    return ObjectView(image, found(name, box, mask=mask))


def seen(view, side=SIDE):
    """The crop as uint8 [side, side, 3]."""
    mean, std = torch.tensor(IMAGE_MEAN)[:, None, None], torch.tensor(IMAGE_STD)[:, None, None]
    pixels = crop_pixels(view, side) * std + mean
    return (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"), SIDE)


@pytest.fixture(scope="module")
def judge(folder):
    return ClipColorJudge(folder, CPU)


def test_the_crop_is_the_box_with_999_outside_of_the_mask():
    image = Image.new("RGB", (100, 80), (200, 0, 0))
    image.paste((0, 0, 200), (20, 10, 60, 50))
    mask = np.zeros((80, 100), dtype=bool)
    mask[10:50, 20:40] = True
    crop = seen(view(image, (20, 10, 60, 50), mask))
    assert (crop[:, : SIDE // 2 - 3] == (0, 0, 200)).all()
    assert (crop[:, SIDE // 2 + 3 :] == (0x99, 0x99, 0x99)).all()
    assert (seen(view(image, (20, 10, 60, 50))) == (0, 0, 200)).all()


def test_the_center_square_of_a_long_crop_is_seen():
    image = Image.new("RGB", (100, 400), (200, 0, 0))
    image.paste((0, 200, 0), (0, 140, 100, 260))
    assert (seen(view(image, (0, 0, 100, 400))) == (0, 200, 0)).all()
    flat = image.rotate(90, expand=True)
    assert (seen(view(flat, (0, 0, 400, 100))) == (0, 200, 0)).all()


@pytest.mark.parametrize("box", [(0, 5, 4096, 6), (5, 0, 6, 4096), (7, 7, 7, 7), (0.4, 0, 0.6, 2)])
def test_thin_boxes_cost_no_memory(box):
    image = Image.new("RGB", (4096, 4096), (200, 0, 0))
    assert seen(view(image, box), 224).shape == (224, 224, 3)


def test_every_object_gets_a_color_whatever_its_batch(judge):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    boxes = [(x, y, x + 20, y + 20) for x in (0, 20, 40) for y in range(0, 44, 4)]
    views = [view(image, box, name="dog" if i % 2 else "cat") for i, box in enumerate(boxes)]
    names = judge.name_colors(views)
    assert len(names) == len(views) > 32 and set(names) <= set(COLORS)
    assert names == [judge.name_colors([each])[0] for each in views]


def test_the_nearest_text_wins(judge, monkeypatch):
    """The crop's features are set to those of each color's own prompts."""
    views = [view(Image.new("RGB", (9, 9)), (0, 0, 9, 9), name="bird") for _ in COLORS]
    own = judge._text_features("bird")
    torch.testing.assert_close(own.norm(dim=-1), torch.ones(len(COLORS)))
    monkeypatch.setattr(judge._model, "get_image_features", lambda pixels: own * 7)
    assert judge.name_colors(views) == list(COLORS)


def test_the_prompts_are_genevals(judge, monkeypatch):
    asked = []
    tokenizer = judge._tokenizer

    def remember(texts, **keys):
        asked.extend(texts)
        return tokenizer(texts, **keys)

    monkeypatch.setattr(judge, "_tokenizer", remember)
    first = judge._text_features("tv remote")
    assert asked[:3] == [
        "a photo of a red tv remote",
        "a photo of a red-colored tv remote",
        "a photo of a red object",
    ]
    assert len(asked) == 30 and asked[-1] == "a photo of a white object"
    assert judge._text_features("tv remote") is first and len(asked) == 30


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--clip-folder .* has no config.json"):
        ClipColorJudge(tmp_path, CPU)
