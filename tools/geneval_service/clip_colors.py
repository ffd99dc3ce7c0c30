"""Colors of objects by CLIP ViT-L/14 zero-shot, on the masked crop, as GenEval does it.

What is outside of the mask becomes #999, the crop is the box, and the prompts are GenEval's three
(Ghosh et al., 2023, arXiv 2310.11513). The picture preparation is that of CLIP (Radford et al.,
2021): bicubic to 224 on the short side, center square, CLIP's statistics.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, CLIPModel

from data.vocabulary import COLORS
from tools.geneval_service.detectors import ObjectView
from tools.geneval_service.local_models import load_whole

TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)
BACKGROUND = "#999"
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_BATCH = 32
# Only the center square of a crop is looked at: resizing a 1 x 4000 crop whole would take 600 MB.
MAX_ASPECT = 16


class ClipColorJudge:
    """`name_colors` runs the crops of all pictures as batches; text features are kept by class."""

    name = "clip"

    def __init__(self, folder: str | Path | None, device: torch.device) -> None:
        self._device = device
        self._model = load_whole(CLIPModel, folder, "--clip-folder", device)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._side = self._model.config.vision_config.image_size
        self._by_class: dict[str, Tensor] = {}

    @torch.inference_mode()
    def name_colors(self, views: Sequence[ObjectView]) -> list[str]:
        """The color whose text features lie closest to each crop's."""
        names: list[str] = []
        for start in range(0, len(views), MAX_BATCH):
            batch = views[start : start + MAX_BATCH]
            pixels = torch.stack([crop_pixels(view, self._side) for view in batch])
            features = _features(self._model.get_image_features(pixels.to(self._device)))
            # [batch, 1, D] x [batch, D, colors]: the length of the crop's features does not matter.
            texts = torch.stack([self._text_features(v.item.detection.class_name) for v in batch])
            best = (features[:, None] @ texts.transpose(1, 2))[:, 0].argmax(-1)
            names += [COLORS[index] for index in best.tolist()]
        return names

    def _text_features(self, class_name: str) -> Tensor:
        """Unit features [colors, D]: the mean of the templates' unit features."""
        if class_name not in self._by_class:
            texts = [t.format(color=c, name=class_name) for c in COLORS for t in TEMPLATES]
            tokens = self._tokenizer(texts, padding=True, return_tensors="pt").to(self._device)
            features = _features(
                self._model.get_text_features(
                    input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
                )
            )
            features = F.normalize(features, dim=-1).unflatten(0, (len(COLORS), len(TEMPLATES)))
            self._by_class[class_name] = F.normalize(features.mean(1), dim=-1)
        return self._by_class[class_name]


def crop_pixels(view: ObjectView, side: int) -> Tensor:
    """Float [3, side, side] of an object's masked crop, prepared for CLIP."""
    image = view.image
    if view.item.mask is not None:
        blank = Image.new("RGB", image.size, BACKGROUND)
        image = Image.composite(image, blank, Image.fromarray(view.item.mask))
    crop = image.crop(_center_box(view.item.detection.box))
    short, long = min(crop.size), max(crop.size)
    other = int(side * long / short)
    size = (side, other) if crop.width == short else (other, side)
    crop = crop.resize(size, Image.Resampling.BICUBIC)
    left, top = round((crop.width - side) / 2), round((crop.height - side) / 2)
    crop = crop.crop((left, top, left + side, top + side))
    pixels = torch.from_numpy(np.array(crop, dtype=np.float32) / 255).permute(2, 0, 1)
    mean, std = torch.tensor(IMAGE_MEAN), torch.tensor(IMAGE_STD)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def _center_box(box: Sequence[float]) -> tuple[int, int, int, int]:
    """A box in whole pixels, at least one each way, its long side cut to 16 times the short."""
    left, top = round(box[0]), round(box[1])
    width, height = max(1, round(box[2]) - left), max(1, round(box[3]) - top)
    longest = MAX_ASPECT * min(width, height)
    if width > longest:
        left, width = left + (width - longest) // 2, longest
    if height > longest:
        top, height = top + (height - longest) // 2, longest
    return left, top, left + width, top + height


def _features(output: object) -> Tensor:
    """transformers 4 returns the features themselves, 5 a record that holds them."""
    return output if isinstance(output, Tensor) else output.pooler_output
