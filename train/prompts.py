"""Which prompt a policy group draws at a step: the prompt random stream."""

import torch


class PromptSampler:
    """Draws one prompt for each policy group, the same on every rank without communication.

    A step has an epoch. One generator, seeded `data_seed + epoch`, draws `world_size` distinct
    prompts and then shuffles them; a policy group takes the entry of its number. The epoch is the
    step. Where `epoch_lags` (see `Recipe`) it is two draws, that is four steps, behind and stops at
    0: steps 0, 2 and 4 see the same prompts.

    Raises ValueError for fewer prompts than ranks, and for ranks that do not divide into policy
    groups.
    """

    def __init__(
        self,
        num_prompts: int,
        world_size: int,
        policy_group_size: int,
        data_seed: int,
        epoch_lags: bool,
    ) -> None:
        if policy_group_size < 1 or world_size < 1 or world_size % policy_group_size:
            raise ValueError(
                f"{world_size} ranks do not divide into policy groups of {policy_group_size} "
                "(--policy_group_size)"
            )
        if num_prompts < world_size:
            raise ValueError(
                f"{num_prompts} prompts for {world_size} ranks: every rank needs its own "
                "(--train_data_path)"
            )
        self.num_prompts = num_prompts
        self.world_size = world_size
        self.policy_group_size = policy_group_size
        self.data_seed = data_seed
        self.epoch_lags = epoch_lags

    def epoch_for(self, step: int) -> int:
        """The epoch whose draw serves RL step `step`, refine steps counted too."""
        return max(0, step - 4) if self.epoch_lags else step

    def index_for(self, step: int, rank: int) -> int:
        """Index of the prompt that the rank's policy group draws at RL step `step`."""
        if step < 0 or not 0 <= rank < self.world_size:
            raise ValueError(f"step {step}, rank {rank} of {self.world_size}: out of range")
        generator = torch.Generator().manual_seed(self.data_seed + self.epoch_for(step))
        drawn = torch.randperm(self.num_prompts, generator=generator)[: self.world_size]
        order = torch.randperm(self.world_size, generator=generator)
        return int(drawn[order[rank // self.policy_group_size]])
