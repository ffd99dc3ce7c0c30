"""The training engine: FSDP2 sharding, streamed loading, resident weights, the optimizer step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig
from modeling.bagel.qwen2_navit import GEN
from modeling.bagel.weights import (
    check_header,
    fill_sharded,
    find_weight_file,
    load_sharded,
    parameter_shapes,
    read_header,
)
from train.dist import ProcessContext, run_in_turns
from train.metrics import PhaseTimer


@dataclass(frozen=True)
class EngineConfig:
    """How the model is laid out over ranks."""

    compute_dtype: torch.dtype
    checkpoint_activations: bool
    freeze_und: bool
    load_concurrency: int


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up to a constant rate; the first step runs at rate 0."""

    lr: float
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


def meta_model(config: BagelConfig) -> Bagel:
    """The model without storage: names and shapes only."""
    with torch.device("meta"):
        return Bagel(config)


def build_policy(
    folder: Path, config: BagelConfig, engine: EngineConfig, context: ProcessContext
) -> Bagel:
    """A sharded fp32 policy, its shards read straight from the checkpoint's file."""
    model = meta_model(config)
    weight_file = find_weight_file(folder)
    report = check_header(read_header(weight_file), parameter_shapes(model))
    _freeze(model, engine)
    _shard(model, context.mesh, engine)
    model.to_empty(device=context.device)
    run_in_turns(
        context, engine.load_concurrency, lambda: load_sharded(model, weight_file, report)
    )
    fill_sharded(model, model.position_tables())
    return model


def build_reference(policy: Bagel, engine: EngineConfig, context: ProcessContext) -> Bagel:
    """A frozen copy of the policy's shards, device to device."""
    model = meta_model(policy.config)
    model.requires_grad_(False)
    _shard(model, context.mesh, engine)
    model.to_empty(device=context.device)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), policy.parameters(), strict=True):
            _local(mine).copy_(_local(theirs))
    return model


@contextmanager
def resident_weights(model: nn.Module, timer: PhaseTimer) -> Iterator[None]:
    """Gathers every parameter once in the compute type and keeps it until the block ends."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with timer.phase("gather"):
        for module in modules:
            module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


class Optimizer:
    """AdamW, warm-up and clipping over the trainable shards."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, device: torch.device):
        self.settings = settings
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(
            self.params,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=device.type == "cuda",
        )

    def learning_rate(self, step: int) -> float:
        """Rate of a step: rising from 0 over the warm-up, then constant."""
        warmup = self.settings.warmup_steps
        return self.settings.lr * min(1.0, step / warmup if warmup else 1.0)

    def update(self, step: int) -> float:
        """Clips, steps and clears gradients. Returns their norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.params, self.settings.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm.item()


def _freeze(model: Bagel, engine: EngineConfig) -> None:
    model.vit_model.requires_grad_(False)
    if engine.freeze_und:
        for name, param in model.language_model.named_parameters():
            if GEN not in name:
                param.requires_grad_(False)
        model.connector.requires_grad_(False)
    for layer in model.decoder.layers:
        layer.checkpoint_activations = engine.checkpoint_activations


def _shard(model: Bagel, mesh: DeviceMesh, engine: EngineConfig) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=engine.compute_dtype,
        reduce_dtype=torch.float32,
        # Inputs carry their types on purpose: fp32 timesteps must not be rounded on the way in.
        cast_forward_inputs=False,
    )
    # The image encoder is a group of its own: the learner never runs it, so never gathers it.
    for module in (*model.decoder.layers, model.vit_model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
