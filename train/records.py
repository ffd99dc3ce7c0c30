"""Typed records that the phases of a step hand to each other.

Shape letters: n image tokens, P numbers in a latent token (64).
"""

from dataclasses import dataclass
from enum import Enum

from PIL import Image
from torch import Tensor

from data.geneval import GenevalPrompt
from modeling.bagel.config import ImageSize
from modeling.bagel.context import ConditionImage
from modeling.bagel.text_decode import DecodedText

NO_EDIT = "no further edit"


class Stage(Enum):
    """What an RL step trains: drawing from a prompt, or refining an earlier drawing."""

    GENERATE = "generate"
    REFINE = "refine"


@dataclass(frozen=True)
class BufferEntry:
    """A scored drawing that a refine step may start from."""

    prompt: GenevalPrompt
    score: float
    picture: Image.Image


@dataclass(frozen=True)
class Sample:
    """One sample of a rollout. `operation` is empty in a generate step."""

    thought: DecodedText
    text: str
    format_reward: float
    operation: str
    picture: Image.Image

    @property
    def declines_edit(self) -> bool:
        return says_no_edit(self.operation)


@dataclass(frozen=True)
class FlowTrace:
    """The stochastic step of all samples of a rank: what the learner scores.

    `before` and `after` are [B, n, P] latents, `log_prob` fp32 [B, n]; `t` and `dt` are shared.
    """

    before: Tensor
    after: Tensor
    log_prob: Tensor
    t: float
    dt: float
    grid: ImageSize


@dataclass(frozen=True)
class Rollout:
    """Everything a rank sampled in one step.

    `flow` is None where the flow had no stochastic step; `entry` and `condition` exist in refine
    steps only.
    """

    stage: Stage
    prompt: GenevalPrompt
    samples: list[Sample]
    flow: FlowTrace | None
    sde_index: int | None
    entry: BufferEntry | None = None
    condition: ConditionImage | None = None


def says_no_edit(operation: str) -> bool:
    """Whether an edit operation declines to edit, in any case."""
    return NO_EDIT in operation.lower()
