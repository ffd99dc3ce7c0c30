"""Detection with Mask2Former (Swin-S, COCO instances) as GenEval does it, through transformers.

Picture preparation and the way from queries to boxes, scores and masks are those of the detector
that GenEval uses: short side 800 and long side at most 1333, ImageNet statistics, padding to a
multiple of 32; the 100 best (query, class) pairs, each scored by its class probability times the
mean probability inside its mask; the box is the mask's extent. transformers' own post-processing
resizes masks to 384 x 384 first and drops a query's second class, so that it is not used.

Legend: B pictures, Q queries, C classes, H/W input height and width, h/w a quarter of those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Mask2FormerConfig, Mask2FormerModel, Mask2FormerPreTrainedModel

from data.vocabulary import CLASS_NAMES, canonical_class
from modeling.bagel.config import ImageSize
from tools.geneval_service.detectors import DetectedObject
from tools.geneval_service.local_models import load_whole
from tools.geneval_service.scoring import MIN_CONFIDENCE, Detection

SHORT_SIDE = 800
LONG_SIDE = 1333
SIZE_DIVISOR = 32
MAX_PAIRS = 100
IMAGE_MEAN = (123.675, 116.28, 103.53)  # of 0..255, red green blue
IMAGE_STD = (58.395, 57.12, 57.375)

# Published configurations spell some classes as PASCAL VOC did.
_VOC_SPELLINGS = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


class InstanceModel(Mask2FormerPreTrainedModel):
    """Mask2Former with its class predictor and without its loss, which would need scipy."""

    def __init__(self, config: Mask2FormerConfig) -> None:
        super().__init__(config)
        self.model = Mask2FormerModel(config)
        self.class_predictor = nn.Linear(config.hidden_dim, config.num_labels + 1)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits [B, Q, C + 1] and mask logits [B, Q, h, w] of prepared pictures."""
        # Without hidden states it does not return the normalized queries, which the classes need.
        output = self.model(pixel_values, output_hidden_states=True)
        queries = output.transformer_decoder_intermediate_states[-1].transpose(0, 1)
        return self.class_predictor(queries), output.masks_queries_logits[-1]


@dataclass(frozen=True)
class _Geometry:
    """A picture's size, the size it is resized to, and that padded to a multiple of 32."""

    original: ImageSize
    resized: ImageSize
    padded: ImageSize


class Mask2FormerDetector:
    """`detect` runs pictures of one input size as one batch; see the file's head for the rules."""

    name = "mask2former"

    def __init__(self, folder: str | Path | None, device: torch.device) -> None:
        self._device = device
        self._model = load_whole(InstanceModel, folder, "--model-folder", device)
        self._class_names = _class_names(self._model.config.id2label, folder)
        self._mean = torch.tensor(IMAGE_MEAN, device=device)[:, None, None]
        self._std = torch.tensor(IMAGE_STD, device=device)[:, None, None]

    @torch.inference_mode()
    def detect(self, images: Sequence[Image.Image]) -> list[list[DetectedObject]]:
        """The objects of each RGB picture over the threshold, with masks."""
        found: list[list[DetectedObject]] = [[] for _ in images]
        # Mixed sizes would have to be padded to the largest, and a picture's objects would then
        # depend on its neighbours in the batch.
        by_size: dict[ImageSize, list[int]] = {}
        geometries = [input_geometry(ImageSize(image.height, image.width)) for image in images]
        for index, geometry in enumerate(geometries):
            by_size.setdefault(geometry.resized, []).append(index)
        for indices in by_size.values():
            pixels = [self._prepare(images[i], geometries[i]) for i in indices]
            class_logits, mask_logits = self._model(torch.stack(pixels))
            for row, index in enumerate(indices):
                found[index] = self._objects(class_logits[row], mask_logits[row], geometries[index])
        return found

    def _prepare(self, image: Image.Image, geometry: _Geometry) -> Tensor:
        """Float [3, H, W] of an RGB picture."""
        array = np.array(image, dtype=np.uint8)
        pixels = torch.from_numpy(array).to(self._device).permute(2, 0, 1).float()
        resized, padded = geometry.resized, geometry.padded
        pixels = _interpolate(pixels, resized)
        pixels = (pixels - self._mean) / self._std
        right, below = padded.width - resized.width, padded.height - resized.height
        return F.pad(pixels, (0, right, 0, below))

    def _objects(
        self, class_logits: Tensor, mask_logits: Tensor, geometry: _Geometry
    ) -> list[DetectedObject]:
        """Objects of one picture: class logits [Q, C + 1], mask logits [Q, h, w]."""
        num_classes = class_logits.shape[-1] - 1
        scores = class_logits.softmax(-1)[:, :-1].flatten()
        best, pairs = scores.topk(min(MAX_PAIRS, len(scores)))
        objects = []
        for probability, pair in zip(best.tolist(), pairs.tolist(), strict=True):
            # The mask's own probability is at most 1: what is not over the threshold stays there.
            if probability <= MIN_CONFIDENCE:
                break
            query, index = divmod(pair, num_classes)
            item = _masked_object(
                self._class_names[index], probability, mask_logits[query], geometry
            )
            if item is not None:
                objects.append(item)
        return objects


def input_geometry(size: ImageSize) -> _Geometry:
    """Sizes for the model: the largest within 800 on the short and 1333 on the long side."""
    short, long = min(size.height, size.width), max(size.height, size.width)
    scale = min(SHORT_SIDE / short, LONG_SIDE / long)
    sides = [max(1, int(side * scale + 0.5)) for side in (size.height, size.width)]
    padded = [-(-side // SIZE_DIVISOR) * SIZE_DIVISOR for side in sides]
    return _Geometry(size, ImageSize(*sides), ImageSize(*padded))


def _masked_object(
    class_name: str, probability: float, mask_logits: Tensor, geometry: _Geometry
) -> DetectedObject | None:
    """The object of one query [h, w], or None if its mask is empty or it scores too low."""
    logits = _interpolate(mask_logits[None], geometry.padded)
    logits = logits[:, : geometry.resized.height, : geometry.resized.width]
    logits = _interpolate(logits, geometry.original)[0]
    mask = logits > 0
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    if not len(rows):
        return None
    score = probability * float(logits[mask].sigmoid().mean())
    if score <= MIN_CONFIDENCE:
        return None
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    detection = Detection(class_name, tuple(float(edge) for edge in box), min(score, 1.0))
    return DetectedObject(detection, mask.cpu().numpy())


def _interpolate(planes: Tensor, size: ImageSize) -> Tensor:
    """Planes [n, h, w] resized bilinearly."""
    shape = (size.height, size.width)
    return F.interpolate(planes[None], shape, mode="bilinear", align_corners=False)[0]


def _class_names(id2label: Mapping[int, str], folder: str | Path | None) -> list[str]:
    """GenEval's class name of each index; ValueError unless they are the 80 COCO classes."""
    labels = [str(id2label[index]) for index in sorted(id2label, key=int)]
    try:
        names = [canonical_class(_VOC_SPELLINGS.get(label, label)) for label in labels]
    except ValueError as error:
        raise ValueError(f"--model-folder {folder}: id2label of config.json: {error}") from error
    if sorted(names) != sorted(CLASS_NAMES):
        raise ValueError(
            f"--model-folder {folder} knows {len(names)} classes, expected the 80 of COCO "
            "(Mask2Former for COCO instance segmentation, not panoptic)"
        )
    return names
