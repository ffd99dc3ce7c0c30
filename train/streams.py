"""The random streams of a run: every draw comes from an explicit generator with a known seed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize


@dataclass(frozen=True)
class StreamSeeds:
    """What the seeds of a rank are made of. `total_steps` is part of them, as in the original."""

    rank: int
    world_size: int
    policy_group_id: int
    total_steps: int
    global_seed: int


@dataclass(frozen=True)
class GroupDraws:
    """Draws that all ranks of a policy group share: start noise [n, P] and stochastic index."""

    noise: Tensor
    sde_index: int


class RandomStreams:
    """Generators of one rank. The flow-noise stream lives as long as the run; others a step."""

    def __init__(self, seeds: StreamSeeds, device: torch.device):
        self.seeds = seeds
        self.device = device
        self.flow_noise = self._generator(seeds.global_seed * seeds.world_size + seeds.rank)

    def sample(self, step: int) -> torch.Generator:
        """Text sampling of this rank at a step."""
        return self._generator((self.seeds.rank + 1) * self.seeds.total_steps + step)

    def group(self, step: int) -> torch.Generator:
        """Shared by the ranks of a policy group at a step; each call starts it anew."""
        return self._generator((self.seeds.policy_group_id + 1) * self.seeds.total_steps + step)

    def evaluation(self, num_batches: int, first_index: int) -> torch.Generator:
        """Noise and text of one evaluation batch.

        Args:
            num_batches: own prompts // batch size.
            first_index: index of the batch's first prompt.
        """
        return self._generator((self.seeds.rank + 1) * (num_batches + 1) + first_index)

    def group_draws(
        self, step: int, shape: tuple[int, int], dtype: torch.dtype, is_refine: bool, bound: int
    ) -> GroupDraws:
        """Draws the start noise and the index of the stochastic forward, below `bound`.

        Two noise tensors are drawn at every step; a refine step uses the second.
        """
        generator = self.group(step)
        noises = [
            torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
            for _ in range(2)
        ]
        index = torch.randint(
            0, bound, (1,), generator=generator, device=self.device, dtype=torch.int32
        )
        return GroupDraws(noises[1 if is_refine else 0], int(index.item()))

    def state(self) -> dict[str, Tensor]:
        """States that outlive a step, for a checkpoint."""
        return {"flow_noise": self.flow_noise.get_state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.flow_noise.set_state(state["flow_noise"])

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)


def evaluation_noise(
    generator: torch.Generator, num_rounds: int, shape: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """One start noise for each round, drawn before any text of the batch."""
    return [
        torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
        for _ in range(num_rounds)
    ]


def square(side: int) -> ImageSize:
    """A square of `side` pixels."""
    return ImageSize(side, side)
