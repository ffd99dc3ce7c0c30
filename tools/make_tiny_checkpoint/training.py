"""Initial weights of the tiny model, and the short supervised training behind them."""

import logging
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.bagel.attention import AttendForest, forest_attention
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig
from modeling.bagel.layout import ROOT, SegmentPlan
from modeling.bagel.qwen2_navit import QkRounding
from tools.make_tiny_checkpoint.lesson_rows import Lesson, Teacher

logger = logging.getLogger("faster_r3")

LEARNING_RATE = 3e-3
FINAL_RATE = 0.05  # of the learning rate, at the end of a half cosine
WARMUP_STEPS = 20
BETAS = (0.9, 0.98)
MAX_GRAD_NORM = 1.0
EMBEDDING_STD = 0.5  # of the size of the position tables' entries
LOG_EVERY = 50


def build_model(config: BagelConfig, seed: int) -> Bagel:
    """The model in fp32 with seeded weights; the image encoder stays as it starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Bagel(config)
        nn.init.normal_(model.decoder.embed_tokens.weight, std=EMBEDDING_STD)
    with torch.no_grad():
        for name, table in model.position_tables().items():
            model.get_parameter(name).copy_(table)
    model.vit_model.requires_grad_(False)
    return model


def train(model: Bagel, teacher: Teacher, num_steps: int) -> None:
    """Trains text and images on `num_steps` lessons."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, betas=BETAS, weight_decay=0.0)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        text, image = losses(model, teacher.lesson())
        optimizer.zero_grad()
        (text + image).backward()
        nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM)
        optimizer.step()
        if step % LOG_EVERY == 0 or step == num_steps - 1:
            logger.info("step %d: text %.3f, image %.3f", step, text.item(), image.item())


def losses(model: Bagel, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Cross entropy of the texts, and mean squared error of the velocities."""
    output = model(lesson.batch, tree_attention(lesson.batch.plan), QkRounding())
    text = F.cross_entropy(output.logits, lesson.label_ids)
    return text, F.mse_loss(output.velocity, lesson.velocities)


def tree_attention(plan: SegmentPlan) -> AttendForest:
    """Attention over a packed forest with a dense mask for each tree, not one for all of them."""
    lengths, trees = [], []
    for start, end in plan.tree_ranges:
        first = next(i for i, segment in enumerate(plan.segments) if segment.start == start)
        segments = tuple(
            replace(
                segment,
                start=segment.start - start,
                parent=ROOT if segment.parent == ROOT else segment.parent - first,
            )
            for segment in plan.segments
            if start <= segment.start < end
        )
        tree = SegmentPlan(segments, ((0, end - start),))
        lengths.append(end - start)
        trees.append(forest_attention(tree, torch.device("cpu"), "dense"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(trees, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([tree(*qkv) for tree, *qkv in parts])

    return attend


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    progress = step / max(1, num_steps)
    decay = FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
    return LEARNING_RATE * decay * min(1.0, (step + 1) / WARMUP_STEPS)
