"""Mask2Former's way from pictures to objects: by hand-made logits, and with a tiny random model."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from data.vocabulary import CLASS_NAMES
from modeling.bagel.config import ImageSize
from tests.tools.geneval_service.tiny_models import write_clip, write_mask2former
from tools.geneval_service.app import create_app
from tools.geneval_service.local_models import choose_device
from tools.geneval_service.mask2former import InstanceModel, Mask2FormerDetector, input_geometry
from tools.geneval_service.self_check import SelfCheckError

CPU = torch.device("cpu")
CAT, DOG = CLASS_NAMES.index("cat"), CLASS_NAMES.index("dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mask2former(tmp_path_factory.mktemp("mask2former"))


@pytest.fixture(scope="module")
def detector(folder):
    return Mask2FormerDetector(folder, CPU)


@pytest.fixture
def answering(detector, monkeypatch):
    """Lets the model answer every picture with the given logits, instead of computing them."""

    def set_logits(class_logits, mask_logits):
        def forward(pixels):
            count = len(pixels)
            return class_logits.expand(count, -1, -1), mask_logits.expand(count, -1, -1, -1)

        monkeypatch.setattr(detector, "_model", forward)

    return set_logits


def class_logits(*rows):
    """[queries, 81] from {class index: probability}; the rest is "no object"."""
    logits = torch.full((len(rows), 81), -100.0)
    for row, probabilities in zip(logits, rows, strict=True):
        for index, probability in probabilities.items():
            row[index] = np.log(probability)
        row[80] = np.log(1 - sum(probabilities.values()) + 1e-9)
    return logits


def mask_plane(box, inside, side=200):
    """[side, side] logits: `inside` in the box of x0, y0, x1, y1, strongly negative elsewhere."""
    plane = torch.full((side, side), -50.0)
    plane[box[1] : box[3], box[0] : box[2]] = inside
    return plane


def test_boxes_scores_and_masks(detector, answering):
    """A square of 400 pixels is seen at 800, its masks at 200: edges are half a cell uncertain."""
    answering(
        class_logits({CAT: 0.9}, {DOG: 0.5}),
        torch.stack([mask_plane((20, 40, 60, 160), 4.0), mask_plane((100, 0, 200, 100), 50.0)]),
    )
    cat, dog = detector.detect([Image.new("RGB", (400, 400))])[0]
    assert (cat.detection.class_name, dog.detection.class_name) == ("cat", "dog")
    assert cat.detection.box == pytest.approx((40, 80, 120, 320), abs=1)
    assert dog.detection.box == pytest.approx((200, 0, 400, 200), abs=1)
    # Class probability times the mask's mean probability, which the soft edge lowers a little.
    inside = float(torch.tensor(4.0).sigmoid())
    assert 0.9 * inside * 0.97 < cat.detection.score < 0.9 * inside
    assert dog.detection.score == pytest.approx(0.5, rel=0.01)
    assert cat.mask.shape == (400, 400) and cat.mask.dtype == np.bool_
    rows, columns = np.nonzero(cat.mask)
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert tuple(map(float, box)) == cat.detection.box


def test_the_threshold_is_on_the_product(detector, answering):
    answering(
        class_logits({CAT: 0.5}, {CAT: 0.31}, {CAT: 0.29}, {CAT: 0.9}),
        torch.stack(
            [
                mask_plane((20, 40, 60, 160), 0.2),  # 0.5 * 0.55 is too little
                mask_plane((20, 40, 60, 160), 50.0),
                mask_plane((20, 40, 60, 160), 50.0),
                mask_plane((20, 40, 60, 160), -1.0),  # no pixel is more likely than not
            ]
        ),
    )
    found = detector.detect([Image.new("RGB", (400, 400))])[0]
    assert [round(item.detection.score, 2) for item in found] == [0.31]


def test_a_query_may_be_two_classes(detector, answering):
    answering(class_logits({CAT: 0.5, DOG: 0.45}), mask_plane((0, 0, 200, 200), 50.0)[None])
    found = detector.detect([Image.new("RGB", (400, 400))])[0]
    assert [item.detection.class_name for item in found] == ["cat", "dog"]
    assert found[0].detection.box == (0, 0, 400, 400)


def test_padding_is_cut_off(detector, answering):
    """300 x 500 is seen at 800 x 1333 and padded to 1344: masks are 200 x 336 cells."""
    plane = torch.full((200, 336), 50.0)
    answering(class_logits({CAT: 0.9}), plane[None])
    item = detector.detect([Image.new("RGB", (500, 300))])[0][0]
    assert item.detection.box == (0, 0, 500, 300) and item.mask.all()


@pytest.mark.parametrize(
    ("size", "resized", "padded"),
    [
        ((512, 512), (800, 800), (800, 800)),
        ((1024, 1024), (800, 800), (800, 800)),
        ((300, 451), (800, 1203), (800, 1216)),
        ((300, 600), (667, 1333), (672, 1344)),
        ((600, 300), (1333, 667), (1344, 672)),
        ((1, 4096), (1, 1333), (32, 1344)),
    ],
)
def test_input_sizes(size, resized, padded):
    geometry = input_geometry(ImageSize(*size))
    assert (geometry.original, geometry.resized, geometry.padded) == (size, resized, padded)


def test_preparation_is_rgb_in_imagenets_statistics(detector):
    geometry = input_geometry(ImageSize(300, 451))
    pixels = detector._prepare(Image.new("RGB", (451, 300), (255, 0, 0)), geometry)
    assert pixels.shape == (3, 800, 1216)
    seen = pixels[:, :800, :1203].amin((1, 2))
    assert seen.tolist() == pytest.approx([(255 - 123.675) / 58.395, -2.0357, -1.8044], abs=1e-3)
    assert not pixels[:, :, 1203:].any()


def test_a_picture_does_not_depend_on_its_batch(detector, monkeypatch):
    """The random model itself, on pictures of two sizes: same logits alone and together."""
    seen = []

    def remember(class_logits, mask_logits, geometry):
        seen.append((class_logits, mask_logits))
        return []

    monkeypatch.setattr(detector, "_objects", remember)
    monkeypatch.setattr("tools.geneval_service.mask2former.SHORT_SIDE", 96)
    rng = np.random.default_rng(0)
    sizes = ((64, 64), (40, 80), (64, 64))
    images = [Image.fromarray(rng.integers(0, 255, (*s, 3), dtype=np.uint8)) for s in sizes]
    detector.detect(images)
    together = [seen[0], seen[2], seen[1]]  # one size after the other
    for image, (classes, masks) in zip(images, together, strict=True):
        seen.clear()
        detector.detect([image])
        torch.testing.assert_close(seen[0][0], classes, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen[0][1], masks, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together[0][0], together[2][0], atol=1e-4)


def test_the_model_is_that_of_transformers(folder):
    """Same names and same logits as the class whose weights are published."""
    pytest.importorskip("scipy", reason="transformers' own class needs scipy for its loss")
    from transformers import Mask2FormerForUniversalSegmentation

    theirs = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    ours = InstanceModel.from_pretrained(folder).eval()
    pixels = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, (classes, masks) = theirs(pixels), ours(pixels)
    torch.testing.assert_close(classes, expected.class_queries_logits)
    torch.testing.assert_close(masks, expected.masks_queries_logits)


def rewrite_config(folder, target, labels):
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config["id2label"] = {str(i): label for i, label in enumerate(labels)}
    config["label2id"] = {label: i for i, label in enumerate(labels)}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_models_of_other_classes_are_refused(folder, tmp_path):
    named = rewrite_config(folder, tmp_path, [f"LABEL_{i}" for i in range(80)])
    with pytest.raises(ValueError, match="--model-folder .*id2label.*'LABEL_0'"):
        Mask2FormerDetector(named, CPU)
    doubled = rewrite_config(folder, tmp_path, ["cat", *CLASS_NAMES[1:]])
    with pytest.raises(ValueError, match="expected the 80 of COCO"):
        Mask2FormerDetector(doubled, CPU)


def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="--model-folder .* has no config.json"):
        Mask2FormerDetector(tmp_path, CPU)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["class_predictor.weight"]
    rewrite_config(folder, tmp_path, CLASS_NAMES)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 weights are missing.*class_predictor.weight"):
        Mask2FormerDetector(tmp_path, CPU)


def test_random_weights_do_not_serve(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.geneval_service.mask2former.SHORT_SIDE", 96)
    clip = write_clip(tmp_path, 32)
    with pytest.raises(SelfCheckError, match="mask2former does not find the cat"):
        create_app("mask2former", str(folder), str(clip), "cpu")


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=3.*R3_REWARD_GPUS=0"):
        choose_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ValueError, match="--device cuda"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="--device 'tpu'"):
        choose_device("tpu")
