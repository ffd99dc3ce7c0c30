"""The question with a known answer that a service must get right before it serves.

On some cards a detector is known to run without an error and to return rubbish, so that rewards
stay at 0 and a run learns nothing for days. So every worker looks at one photograph and at three
flat colors when it starts. The photograph is "chelsea", a cat, CC0 by Stefan van der Walt.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from data.geneval import parse_prompt
from tools.geneval_service.detectors import DetectedObject, ObjectView
from tools.geneval_service.pipeline import GenevalScorer
from tools.geneval_service.scoring import Detection

PICTURE = Path(__file__).with_name("self_check_cat.jpg")
# Detections at random would show every class; the excluded ones look nothing like a cat.
QUESTION = {
    "tag": "single_object",
    "include": [{"class": "cat", "count": 1}],
    "exclude": [{"class": "airplane", "count": 1}, {"class": "pizza", "count": 1}],
    "prompt": "a photo of a cat",
}
FLAT_COLORS = {"red": (220, 20, 20), "green": (20, 150, 40), "blue": (30, 50, 210)}
FLAT_SIDE = 128


class SelfCheckError(RuntimeError):
    """The models answer the known question wrongly: they must not be used for rewards."""


def check_models(scorer: GenevalScorer) -> None:
    """Raises SelfCheckError if the cat is not found or the colors are not told apart."""
    with Image.open(PICTURE) as file:
        picture = file.convert("RGB")
    verdict = scorer.score(lambda _: picture, [parse_prompt(QUESTION, "self-check")])[0]
    if verdict.reward != 1.0:
        raise SelfCheckError(
            f"{scorer.detector.name} does not find the cat in {PICTURE.name} "
            f"({'; '.join(verdict.reasons)}): wrong weights, or this GPU and this torch do not go "
            "together; the service will not start"
        )
    named = scorer.colors.name_colors([_flat_view(rgb) for rgb in FLAT_COLORS.values()])
    if named != list(FLAT_COLORS):
        raise SelfCheckError(
            f"{scorer.colors.name} calls {', '.join(FLAT_COLORS)} {', '.join(named)}: wrong "
            "weights, or this GPU and this torch do not go together; the service will not start"
        )


def _flat_view(rgb: tuple[int, int, int]) -> ObjectView:
    side = FLAT_SIDE
    box = (0.0, 0.0, float(side), float(side))
    item = DetectedObject(Detection("vase", box, 1.0), np.ones((side, side), dtype=bool))
    return ObjectView(Image.new("RGB", (side, side), rgb), item)
