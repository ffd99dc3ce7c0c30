"""The flow's forward behind cached contexts: one branch, and several at once."""

import pytest
import torch
from torch import Tensor

from modeling.bagel import noise_forward
from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts, Stacks
from modeling.bagel.noise_forward import NoiseForward, can_join
from tests.tiny import PoisonedStack, contexts

TOKENS = [5, 77, 300, 12, 9, 41, 8]
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class TestNoise:
    GRID = ImageSize(2, 3)

    def velocity(self, grown: Contexts, x: Tensor, t: float) -> Tensor:
        return NoiseForward([grown], self.GRID)(x, torch.tensor(t))[0]

    def latents(self, seed: int) -> Tensor:
        return torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(seed))

    def prompted(self) -> Contexts:
        grown = contexts(2)
        grown.feed_text([0, 1], [TOKENS, TOKENS[:3]])
        return grown

    def test_each_forward_overwrites_the_last(self):
        grown = self.prompted()
        forward, time = NoiseForward([grown], self.GRID), torch.tensor(0.7)
        forward(self.latents(0), time)
        again = forward(self.latents(1), time)
        assert torch.equal(again[0], self.velocity(self.prompted(), self.latents(1), 0.7))
        assert grown.cache.lengths == grown.cache.next_rope == [7, 3]

    def test_text_behind_it_does_not_see_it(self):
        grown, plain = self.prompted(), self.prompted()
        self.velocity(grown, self.latents(0), 0.7)
        runs = [TOKENS[:2], TOKENS]
        assert torch.equal(grown.feed_text([0, 1], runs), plain.feed_text([0, 1], runs))

    def test_it_depends_on_context_latents_and_time(self):
        base = self.velocity(self.prompted(), self.latents(0), 0.7)
        assert base.shape == (2, 6, 64)
        others = {
            "context": self.velocity(contexts(2), self.latents(0), 0.7),
            "latents": self.velocity(self.prompted(), self.latents(1), 0.7),
            "time": self.velocity(self.prompted(), self.latents(0), 0.2),
        }
        for what, other in others.items():
            assert (base - other).abs().amax(dim=(1, 2)).min() > 1e-3, what

    def test_every_token_sees_every_other(self):
        x = self.latents(0)
        changed = x.clone()
        changed[0, 5] += 1
        base, moved = (self.velocity(self.prompted(), a, 0.7) for a in (x, changed))
        assert (base - moved)[0, 0].abs().max() > 1e-5  # an earlier token of the same sample
        assert torch.equal(base[1], moved[1])  # no token of another sample

    def test_grids_beyond_the_position_table_are_refused(self):
        with pytest.raises(ValueError, match="exceeds the position table of side 8"):
            NoiseForward([contexts(1)], ImageSize(9, 2))


class TestSeveralBranches:
    GRID = ImageSize(2, 3)

    def branches(self) -> list[Contexts]:
        """As a guided edit has them: of different lengths, some rows longer than others."""
        grown = [contexts(2, capacity=64), contexts(2, capacity=48), contexts(2)]
        grown[0].feed_text([0, 1], [TOKENS, TOKENS[:3]])
        grown[1].feed_text([1], [TOKENS[:4]])
        return grown

    def test_one_forward_gives_what_each_branch_gives_alone(self):
        x, time = torch.randn(2, 6, 64), torch.tensor(0.6)
        joint, alone = self.branches(), self.branches()
        velocities = NoiseForward(joint, self.GRID)(x, time)
        assert velocities.shape == (3, 2, 6, 64)
        for mine, contexts_alone in zip(velocities, alone, strict=True):
            expected = NoiseForward([contexts_alone], self.GRID)(x, time)[0]
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
        assert (velocities[0] - velocities[1]).abs().max() > 1e-3
        for mine, theirs in zip(joint, alone, strict=True):  # what it leaves in the caches
            assert mine.cache.lengths == theirs.cache.lengths
            for layer, expected in zip(mine.cache.keys, theirs.cache.keys, strict=True):
                torch.testing.assert_close(layer, expected, rtol=1e-4, atol=1e-4)

    def test_the_und_rows_of_the_last_layer_are_not_read(self):
        x, time = torch.randn(2, 6, 64), torch.tensor(0.6)
        plain, poisoned = self.branches(), self.branches()
        for contexts_poisoned in poisoned:
            contexts_poisoned.stacks = Stacks(image=PoisonedStack())
        velocities = [NoiseForward(branches, self.GRID)(x, time) for branches in (plain, poisoned)]
        assert torch.equal(*velocities)

    def test_few_tokens_are_not_joined_and_none_are_by_the_eager_stack(self, monkeypatch):
        def branches(rows: int, stacks: Stacks) -> list[Contexts]:
            grown = [contexts(rows), contexts(rows)]
            for each in grown:
                each.stacks = stacks
            return grown

        fused = Stacks(image=PoisonedStack())
        assert can_join(branches(2, fused), ImageSize(16, 16))
        assert not can_join(branches(2, Stacks()), ImageSize(16, 16))
        assert not can_join(branches(1, fused), ImageSize(16, 16))  # 256 rows a branch
        monkeypatch.setattr(noise_forward, "INVARIANT_ROWS", 256)
        assert can_join(branches(1, fused), ImageSize(16, 16))
