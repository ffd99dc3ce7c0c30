"""The losses by hand: clipping, KL and its limit, counts, empty parts, and their gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.bagel.batch import LearnerOutput
from modeling.bagel.guidance import GuidanceConfig, guide
from modeling.diffusion.sde_sampler import SdeConfig, sde_log_prob, sde_mean, sde_std
from train.advantages import Advantages
from train.losses import (
    ImageScoring,
    LossConfig,
    LossReport,
    LossTargets,
    Scores,
    policy_loss,
    score,
    text_log_probs,
)
from train.packing import NoiseRows

CONFIG = LossConfig(
    ce_weight=1.0,
    mse_weight=2.0,
    kl_weight_text=0.001,
    kl_weight_image=0.001,
    clip_ratio=0.2,
    kl_limit=10.0,
)
STD = torch.tensor(0.5)
NO_TEXT = torch.zeros(0)
NO_IMAGES = torch.zeros(0, 1, 64)


def targets(
    probs: list[float],
    samples: list[int],
    after: Tensor = NO_IMAGES,
    behaviour: Tensor | None = None,
) -> LossTargets:
    return LossTargets(
        label_ids=torch.zeros(len(probs), dtype=torch.int64),
        label_samples=torch.tensor(samples, dtype=torch.int64),
        behaviour_probs=torch.tensor(probs),
        noise_rows=NoiseRows(list(range(after.shape[0])), [], []),
        before=torch.zeros_like(after),
        after=after,
        behaviour_log_prob=after[..., 0] * 0 if behaviour is None else behaviour,
        t=torch.tensor(0.9),
        dt=torch.tensor(0.1),
    )


def scores(log_probs: Tensor, mean: Tensor = NO_IMAGES) -> Scores:
    return Scores(log_probs, torch.zeros_like(mean), mean, STD)


def advantages(text: list[float], image: list[float] | None = None) -> Advantages:
    return Advantages([], torch.tensor(text), torch.tensor(image or [0.0] * len(text)))


def text_loss(
    ratios: list[float], samples: list[int], text: list[float], reference: Tensor | None = None
) -> LossReport:
    """Labels whose policy has `ratios` times the behaviour probability of 0.4."""
    log_probs = torch.log(torch.tensor(ratios) * 0.4)
    reference = log_probs if reference is None else reference
    aims = targets([0.4] * len(ratios), samples)
    return policy_loss(scores(log_probs), scores(reference), aims, advantages(text), CONFIG)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain"),
    [
        (1.1, 2.0, 2.2),
        (1.5, 2.0, 2.4),  # clipped above
        (0.5, 2.0, 1.0),  # not clipped below: the smaller gain counts
        (0.9, -2.0, -1.8),
        (0.5, -2.0, -1.6),  # clipped below
        (1.5, -2.0, -3.0),  # not clipped above
    ],
)
def test_text_ratio_is_clipped_on_its_pessimistic_side(ratio, advantage, gain):
    report = text_loss([ratio], [0], [advantage])
    assert report.text_policy.item() == pytest.approx(-gain / 1.0001, rel=1e-5)
    assert report.text_log_ratio.item() == pytest.approx(math.log(ratio), abs=1e-6)
    assert report.loss.item() == pytest.approx(report.text_policy.item(), rel=1e-6)


def test_each_label_takes_its_samples_advantage_and_all_labels_share_one_mean():
    report = text_loss([1.1, 1.0, 0.9], [1, 0, 1], [3.0, -1.0])
    assert report.text_policy.item() == pytest.approx(-(-1.1 + 3.0 - 0.9) / 3.0001, rel=1e-5)


def test_behaviour_probability_has_a_floor():
    log_probs = torch.tensor([math.log(1e-20)])
    report = policy_loss(
        scores(log_probs), scores(log_probs), targets([0.0], [0]), advantages([1.0]), CONFIG
    )
    assert report.text_log_ratio.item() == pytest.approx(0.0, abs=1e-5)


def test_text_kl_is_k3():
    policy, reference = [-1.0, -2.0], [-1.5, -1.2]
    report = text_loss([math.exp(p) / 0.4 for p in policy], [0, 0], [0.0], torch.tensor(reference))
    differences = [r - p for p, r in zip(policy, reference, strict=True)]
    expected = sum(math.exp(d) - d - 1 for d in differences) / 2.0001
    assert report.text_kl.item() == pytest.approx(expected, rel=1e-4)
    assert report.loss.item() == pytest.approx(0.001 * expected, rel=1e-4)


@pytest.mark.parametrize(("difference", "is_kept"), [(2.5, True), (3.0, False)])
def test_text_kl_above_its_limit_is_left_out(difference, is_kept):
    k3 = (math.exp(difference) - difference - 1) / 1.0001
    assert (k3 <= 10) == is_kept
    log_probs = torch.tensor([-4.0], requires_grad=True)
    report = policy_loss(
        scores(log_probs),
        scores(torch.tensor([-4.0 + difference])),
        targets([math.exp(-4.0)], [0]),
        advantages([1.0]),
        CONFIG,
    )
    assert report.text_kl.item() == pytest.approx(k3 if is_kept else 0.0, rel=1e-5)
    (gradient,) = torch.autograd.grad(report.loss, log_probs)
    kl_gradient = 0.001 * (1 - math.exp(difference)) if is_kept else 0.0
    assert gradient.item() == pytest.approx((-1.0 + kl_gradient) / 1.0001, rel=1e-4)


@pytest.mark.parametrize("reference", [200.0, float("inf"), float("nan")])
def test_an_infinite_text_kl_has_no_gradient(reference):
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    report = policy_loss(
        scores(log_probs),
        scores(torch.tensor([reference, -2.0])),
        targets([math.exp(-1.0), math.exp(-2.0)], [0, 0]),
        advantages([0.0]),
        CONFIG,
    )
    report.loss.backward()
    assert report.text_kl.item() == 0
    assert report.loss.item() == 0
    assert log_probs.grad.tolist() == [0.0, 0.0]


def image_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two images of three tokens: policy mean, reference mean, sample, behaviour log-probs."""
    generator = torch.Generator().manual_seed(0)
    mean, reference, draws = (torch.randn(2, 3, 64, generator=generator) for _ in range(3))
    after = mean + 0.5 * draws
    wanted = torch.tensor([[0.1, 0.0, 0.2], [-0.5, -0.4, -0.6]])  # log-ratios 0.1 and -0.5
    behaviour = -draws.square().mean(-1) / 2 - wanted
    return mean, mean + 0.1 * reference, after, behaviour


def image_loss(image: list[float]) -> LossReport:
    mean, reference, after, behaviour = image_case()
    return policy_loss(
        scores(NO_TEXT, mean),
        scores(NO_TEXT, reference),
        targets([], [], after, behaviour),
        advantages([0.0, 0.0], image),
        CONFIG,
    )


@pytest.mark.parametrize(
    ("image", "gain"),
    [
        ([2.0, 0.0], 2 * math.exp(0.1)),
        ([0.0, 2.0], 2 * math.exp(-0.5)),
        ([0.0, -2.0], -1.6),
        ([3.0, -1.0], 3 * math.exp(0.1) - 0.8),
    ],
)
def test_image_ratio_is_of_the_mean_over_tokens(image, gain):
    report = image_loss(image)
    assert report.image_log_ratio.tolist() == pytest.approx([0.1, -0.5], abs=1e-5)
    assert report.image_policy.item() == pytest.approx(-gain / 2.0001, rel=1e-4)


def test_image_terms_have_their_weights():
    mean, reference, _, _ = image_case()
    report = image_loss([3.0, -1.0])
    kl = ((mean - reference) / 0.5).square().mean().item()
    assert report.image_kl.item() == pytest.approx(kl, rel=1e-5)
    expected = 2 * report.image_policy.item() + 0.001 * kl
    assert report.loss.item() == pytest.approx(expected, rel=1e-5)


def test_every_weight_takes_part():
    mean, reference, after, behaviour = image_case()
    log_probs = torch.log(torch.tensor([0.5, 0.3]))
    inputs = (
        scores(log_probs, mean),
        scores(log_probs + 0.4, reference),
        targets([0.4, 0.4], [0, 1], after, behaviour),
        advantages([1.0, -2.0], [0.5, 0.25]),
    )
    weights = LossConfig(3.0, 5.0, 0.7, 0.9, 0.2, 10.0)
    report = policy_loss(*inputs, weights)
    expected = 3.0 * (report.text_policy + 0.7 * report.text_kl)
    expected = expected + 5.0 * report.image_policy + 0.9 * report.image_kl
    assert report.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert min(abs(v) for v in (report.text_kl.item(), report.image_kl.item())) > 1e-3


@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_nothing_to_train_is_a_loss_of_zero(num_samples):
    log_probs = torch.zeros(0, requires_grad=True)
    mean = torch.zeros(0, 1, 64, requires_grad=True)
    report = policy_loss(
        scores(log_probs, mean),
        scores(NO_TEXT),
        targets([], []),
        advantages([1.0] * num_samples, [1.0] * num_samples),
        CONFIG,
    )
    assert report.loss.item() == 0
    report.loss.backward()  # other ranks may have labels, so this one must take part
    assert report.image_log_ratio.numel() == report.text_log_ratio.numel() == 0


def test_text_log_probs_are_formed_where_the_recipe_says():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([3, 0, 49, 7])
    exact = logits.float().log_softmax(-1)[torch.arange(4), ids]
    wide, narrow = (text_log_probs(logits, ids, in_fp32) for in_fp32 in (True, False))
    assert wide.dtype == narrow.dtype == torch.float32
    torch.testing.assert_close(wide, exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(narrow, narrow.bfloat16().float())
    assert (narrow - exact).abs().max() > 1e-4


GUIDANCE = GuidanceConfig(4.0, 1.5, (0.4, 1.0), "text_channel", 0.0)
SDE = SdeConfig(1.0, "monotonic")


def output(rows: int) -> LearnerOutput:
    generator = torch.Generator().manual_seed(4)
    return LearnerOutput(
        logits=torch.randn(2, 9, generator=generator),
        velocity=torch.randn(rows * 3, 64, generator=generator),
    )


def scored_targets(rows: NoiseRows) -> LossTargets:
    before = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5))
    aims = targets([0.4, 0.4], [0, 1], before)
    return replace(aims, noise_rows=rows, label_ids=torch.tensor([8, 2]))


def test_scoring_guides_each_image_with_its_own_copies():
    rows = NoiseRows([0, 3], [1, 4], [2, 5])
    out, aims = output(6), scored_targets(rows)
    copies = out.velocity.view(6, 3, 64)
    got = score(out, aims, ImageScoring(GUIDANCE, SDE), in_fp32=True)
    expected = guide(copies[[0, 3]], copies[[1, 4]], copies[[2, 5]], GUIDANCE)
    assert torch.equal(got.velocity, expected)
    assert torch.equal(got.step_mean, sde_mean(aims.before, expected, aims.t, aims.dt, SDE))
    assert torch.equal(got.step_std, sde_std(aims.t, aims.dt, SDE))
    by_hand = out.logits.log_softmax(-1)[[0, 1], [8, 2]]
    torch.testing.assert_close(got.text_log_probs, by_hand)


def test_unguided_scoring_takes_the_conditional_velocity():
    out = output(4)
    got = score(
        out, scored_targets(NoiseRows([0, 2], [1, 3], [])), ImageScoring(None, SDE), in_fp32=True
    )
    assert torch.equal(got.velocity, out.velocity.view(4, 3, 64)[[0, 2]])


def test_gradient_of_the_whole_loss_is_that_of_finite_differences():
    rows = NoiseRows([0, 3], [1, 4], [2, 5])
    aims = scored_targets(rows)
    start = output(6)
    fixed = score(start, aims, ImageScoring(GUIDANCE, SDE), in_fp32=True)
    noise = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6))
    after = fixed.step_mean + fixed.step_std * noise
    behaviour = sde_log_prob(after, fixed.step_mean, fixed.step_std) + 0.05
    aims = replace(aims, after=after, behaviour_log_prob=behaviour)
    probs = fixed.text_log_probs.exp() * 1.1
    aims = replace(aims, behaviour_probs=probs)
    reference = replace(
        fixed, text_log_probs=fixed.text_log_probs + 0.3, step_mean=fixed.step_mean + 0.05
    )
    gains = advantages([1.5, -0.7], [0.8, -1.2])
    config = replace(CONFIG, kl_weight_text=0.5, kl_weight_image=0.5)

    def loss(logits: Tensor, velocity: Tensor) -> Tensor:
        out = LearnerOutput(logits, velocity)
        policy = score(out, aims, ImageScoring(GUIDANCE, SDE), in_fp32=True)
        return policy_loss(policy, reference, aims, gains, config).loss

    inputs = [start.logits.requires_grad_(), start.velocity.requires_grad_()]
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    generator = torch.Generator().manual_seed(7)
    for which, (tensor, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        assert gradient.norm() > 1e-3
        direction = gradient / gradient.norm()
        direction = direction + 0.3 * torch.randn(tensor.shape, generator=generator) / 10
        step = 2e-2
        moved = []
        for sign in (1, -1):
            shifted = [x.detach() for x in inputs]
            shifted[which] = shifted[which] + sign * step * direction
            moved.append(loss(*shifted).item())
        slope = (moved[0] - moved[1]) / (2 * step)
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=2e-2)
