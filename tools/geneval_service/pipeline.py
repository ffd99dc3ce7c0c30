"""From pictures and prompts to scores: detection in batches, colors where prompts ask for them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from data.geneval import GenevalPrompt
from tools.geneval_service.detectors import ColorJudge, DetectedObject, Detector, ObjectView
from tools.geneval_service.scoring import (
    Detection,
    ImageScore,
    detections_to_color,
    score_image,
)

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True)
class GenevalScorer:
    """A detector, a color judge and GenEval's rules.

    `batch_size` pictures are in memory and in the detector at a time, however long a request is.
    """

    detector: Detector
    colors: ColorJudge
    batch_size: int = DEFAULT_BATCH_SIZE

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch size is {self.batch_size}, expected 1 or more (--batch-size)")

    def score(
        self, load: Callable[[int], Image.Image], prompts: Sequence[GenevalPrompt]
    ) -> list[ImageScore]:
        """Scores of the pictures `load(0)`, `load(1)`, ..., one for each prompt.

        `load` returns an RGB picture; what it raises ends the scoring.
        """
        scores: list[ImageScore] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            images = [load(index) for index in range(start, start + len(batch))]
            scores += self._score_batch(images, batch)
        return scores

    def _score_batch(
        self, images: Sequence[Image.Image], prompts: Sequence[GenevalPrompt]
    ) -> list[ImageScore]:
        found = self.detector.detect(images)
        if len(found) != len(images):
            raise RuntimeError(f"{self.detector.name} answered {len(found)} of {len(images)}")
        # Keyed by identity: two detections of one picture may be equal in every field.
        views = {
            id(item.detection): ObjectView(image, item)
            for image, prompt, items in zip(images, prompts, found, strict=True)
            for item in _items_to_color(prompt, items)
        }
        names = self.colors.name_colors(list(views.values())) if views else []
        named = dict(zip(views, names, strict=True))
        return [
            score_image(prompt, [_with_color(item.detection, named) for item in items])
            for prompt, items in zip(prompts, found, strict=True)
        ]


def _items_to_color(
    prompt: GenevalPrompt, items: Sequence[DetectedObject]
) -> Iterator[DetectedObject]:
    wanted = {id(d) for d in detections_to_color(prompt, [item.detection for item in items])}
    return (item for item in items if id(item.detection) in wanted)


def _with_color(detection: Detection, named: dict[int, str]) -> Detection:
    color = named.get(id(detection))
    return detection if color is None else replace(detection, color=color)
