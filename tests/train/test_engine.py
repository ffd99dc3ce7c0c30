"""The training engine on one and on two ranks: loading, gathering, averaging, the optimizer."""

import socket

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from modeling.bagel.attention import forest_attention
from modeling.bagel.bagel import Bagel
from modeling.bagel.batch import PackedBatch
from modeling.bagel.config import ImageSize
from modeling.bagel.layout import ForestBuilder, SegmentKind
from modeling.bagel.qwen2_navit import QkRounding
from modeling.bagel.weights import read_bagel_config
from tests.tiny import CHECKPOINT, CPU, one_rank, tiny_model
from train.dist import LaunchInfo, ProcessContext, start_processes, stop_processes
from train.engine import (
    EngineConfig,
    Optimizer,
    OptimizerSettings,
    build_policy,
    build_reference,
    resident_weights,
)
from train.metrics import PhaseTimer
from train.settings import ProcessConfig

NUM_GROUPS = 2 + 1 + 1
"""What is gathered as one: two decoder layers, the image encoder, the rest."""


def engine(**changes: object) -> EngineConfig:
    settings = {
        "compute_dtype": torch.float32,
        "checkpoint_activations": True,
        "freeze_und": False,
        "load_concurrency": 1,
    }
    return EngineConfig(**{**settings, **changes})


def policy_on(context: ProcessContext, **changes: object) -> Bagel:
    return build_policy(CHECKPOINT, read_bagel_config(CHECKPOINT), engine(**changes), context)


def optimizer_settings(**changes: object) -> OptimizerSettings:
    settings = {
        "lr": 0.1,
        "warmup_steps": 4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    return OptimizerSettings(**{**settings, **changes})


def batch(seed: int) -> PackedBatch:
    """One row of text and noise, different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    builder = ForestBuilder()
    builder.add(SegmentKind.NOISE, 6, builder.add(SegmentKind.TEXT, 8))
    plan, none = builder.finish(), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        plan=plan,
        rope_ids=torch.tensor(plan.rope_ids()),
        text_ids=torch.randint(0, 600, (10,), generator=generator),
        text_index=torch.tensor([*range(8), 8, 13]),
        vit_features=torch.zeros(0, 0),
        vit_position_ids=none,
        vit_index=none,
        latents=torch.randn(4, 64, generator=generator),
        timesteps=torch.full((4,), 0.7),
        latent_position_ids=torch.arange(4),
        latent_index=torch.arange(9, 13),
        label_index=torch.arange(2, 7),
        noise_index=torch.arange(9, 13),
    )


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    inputs = batch(seed)
    output = model(inputs, forest_attention(inputs.plan, CPU), QkRounding())
    return output.logits.square().mean() + output.velocity.square().mean()


def check_loading(context: ProcessContext) -> None:
    """Policy and reference hold the file's numbers, each rank its own rows of them."""
    policy = policy_on(context)
    reference = build_reference(policy, engine(), context)
    expected = dict(tiny_model().named_parameters())
    for model in (policy, reference):
        parameters = dict(model.named_parameters())
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.float32
            assert parameter.placements == (Shard(0),)
            rows = -(-parameter.shape[0] // context.world_size)  # the last rank may have fewer
            assert parameter.to_local().shape[0] <= rows
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    frozen = {n for n, p in policy.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in expected if n.startswith("vit_model") or "pos_embed" in n}
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        policy.llm2vae.bias.add_(1.0)
    assert torch.equal(reference.llm2vae.bias.full_tensor(), expected["llm2vae.bias"])


def check_residency(context: ProcessContext) -> None:
    """Weights are gathered once, are all there inside, and are gone behind."""
    policy, expected = policy_on(context), dict(tiny_model().named_parameters())
    timer = PhaseTimer()
    for _ in range(2):
        full, counts = {}, []
        with CommDebugMode() as communication, torch.no_grad():
            with resident_weights(policy, timer):
                counts.append(communication.get_total_counts())
                for name, parameter in policy.named_parameters():
                    assert not isinstance(parameter, DTensor), name
                    assert torch.equal(parameter, expected[name]), name
                    full[name] = parameter.data
                policy.embed_text(torch.tensor([1, 2]))
                policy.language_model.lm_head(torch.zeros(1, 64))
                policy.encode_vit(torch.zeros(4, 588), ImageSize(2, 2))
            counts.append(communication.get_total_counts())
        assert counts[0] == counts[1]
        if context.world_size > 1:  # alone there may be nothing to gather
            assert counts[0] == NUM_GROUPS
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert full[name].untyped_storage().size() == 0, name
    assert "gather" in timer.seconds()


def check_residency_ends_with_an_error(context: ProcessContext) -> None:
    policy = policy_on(context)
    with pytest.raises(KeyError), resident_weights(policy, PhaseTimer()):
        raise KeyError("a rollout failed")
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


def check_compute_type(context: ProcessContext) -> None:
    """Shards stay fp32, gathered weights are bf16, in the rollout and in the learner."""
    policy = policy_on(context, compute_dtype=torch.bfloat16)
    expected = dict(tiny_model().named_parameters())
    with resident_weights(policy, PhaseTimer()):
        for name, parameter in policy.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, expected[name].bfloat16()), name
    seen = []
    policy.llm2vae.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss_of(policy, 0).backward()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


def check_gradients(context: ProcessContext) -> None:
    """Each rank's loss is its own; gradients are the average, and parameters sharded after."""
    policy = policy_on(context)
    loss_of(policy, context.rank).backward()
    plain = Bagel(read_bagel_config(CHECKPOINT))
    plain.load_state_dict(tiny_model().state_dict())
    sum(loss_of(plain, rank) for rank in range(context.world_size)).backward()
    expected = dict(plain.named_parameters())
    num_held = 0
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor), name
        if not parameter.requires_grad or expected[name].grad is None:
            assert parameter.grad is None, name
            continue
        num_held += 1
        mine, theirs = parameter.grad.full_tensor(), expected[name].grad / context.world_size
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7, msg=name)
    assert num_held > 50
    assert policy.connector.fc1.weight.grad is None  # no picture was read


def check_optimizer(context: ProcessContext) -> None:
    """Norm before clipping, clipping over all shards, the first step at rate 0."""
    policy = policy_on(context)
    optimizer = Optimizer(policy, optimizer_settings(max_grad_norm=1e-3), context.device)
    before = {n: p.full_tensor().clone() for n, p in policy.named_parameters()}
    loss_of(policy, 0).backward()
    gradients = {
        n: p.grad.full_tensor().clone() for n, p in policy.named_parameters() if p.grad is not None
    }
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert norm > 1e-2  # so it is clipped
    assert optimizer.update(0) == pytest.approx(norm, rel=1e-5)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter.full_tensor(), before[name]), name
    state = optimizer.adamw.state[policy.llm2vae.bias]["exp_avg"].full_tensor()
    clipped = gradients["llm2vae.bias"] * (1e-3 / norm)
    torch.testing.assert_close(state, 0.1 * clipped, rtol=1e-3, atol=1e-12)
    loss_of(policy, 0).backward()
    optimizer.update(1)
    moved = policy.llm2vae.bias.full_tensor() - before["llm2vae.bias"]
    # After two equal gradients Adam moves a number by the rate, a quarter of 0.1, but for eps.
    expected = -0.025 * clipped / (clipped.abs() + 1e-8)
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-6)


CHECKS = (
    check_loading,
    check_residency,
    check_residency_ends_with_an_error,
    check_compute_type,
    check_gradients,
    check_optimizer,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_world_of_one(check):
    with one_rank() as context:
        check(context)


def two_ranks(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    processes = ProcessConfig(
        num_shard=2, device="cpu", master_port=port, process_group_timeout_s=60.0
    )
    context = start_processes(processes, 2, LaunchInfo(rank, 2, rank, 2))
    try:
        for check in CHECKS:
            check(context)
    finally:
        stop_processes()


def test_two_ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(two_ranks, (port,), nprocs=2)


@pytest.mark.parametrize(
    ("warmup", "rates"),
    [(4, [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]), (1, [0.0, 0.1, 0.1]), (0, [0.1, 0.1])],
)
def test_learning_rate_rises_from_zero_and_stays(warmup, rates):
    settings = optimizer_settings(warmup_steps=warmup)
    optimizer = Optimizer(nn.Linear(2, 2), settings, CPU)
    assert [optimizer.learning_rate(step) for step in range(len(rates))] == pytest.approx(rates)
    assert optimizer.learning_rate(10**6) == rates[-1]


def test_frozen_und_expert_leaves_the_gen_expert():
    with one_rank() as context:
        policy = policy_on(context, freeze_und=True)
        trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    layers = {n for n in trained if n.startswith("language_model")}
    assert layers
    assert all("_moe_gen" in n for n in layers)
    others = {"vae2llm", "llm2vae", "time_embedder"}
    assert {n.split(".")[0] for n in trained - layers} == others


def test_blocks_are_sharded_one_by_one():
    with one_rank() as context:
        policy = policy_on(context, checkpoint_activations=False)
        groups = [m for m in policy.modules() if isinstance(m, FSDPModule)]
        assert len(groups) == NUM_GROUPS
        assert all(isinstance(layer, FSDPModule) for layer in policy.decoder.layers)
        assert not any(layer.checkpoint_activations for layer in policy.decoder.layers)
