"""BAGEL: text, image-encoder and latent tokens through one mixture-of-transformers decoder.

One definition serves both sides: `forward` is the learner's packed pass, `extend` the rollout's
cached pass. Shape letters: S packed tokens, D hidden, V vocabulary, P latent token (64).
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from modeling.bagel.attention import AttendForest
from modeling.bagel.batch import LearnerOutput, PackedBatch
from modeling.bagel.cache import CacheAppend
from modeling.bagel.config import BagelConfig, ImageSize
from modeling.bagel.images import position_ids
from modeling.bagel.layers import (
    Connector,
    PositionTable,
    TimestepEmbedder,
    once_per_device,
    sincos_table,
    to_device,
)
from modeling.bagel.qwen2_navit import (
    Decoder,
    ExpertOrder,
    MotCausalLM,
    QkRounding,
    Rotary,
)
from modeling.bagel.siglip_navit import SiglipVit


class Wanted(Enum):
    """Whose final hidden states a pass is for; others need not be computed.

    Keys and values of all new tokens are.
    """

    ALL = auto()
    GEN = auto()
    NONE = auto()


@dataclass(frozen=True)
class LayerPass:
    """New tokens of a rollout on their way through all layers and the final norm."""

    decoder: Decoder
    x: Tensor  # [S, D] in expert order, which a stack may overwrite
    experts: ExpertOrder
    rotary: Rotary
    append: CacheAppend
    wanted: Wanted = Wanted.ALL


class Stack(Protocol):
    """Runs all decoder layers of a rollout pass and the final norm."""

    keeps_runs_apart: bool
    """Whether a run of an append has the bits that it has without the others."""

    def run(self, layer_pass: LayerPass) -> Tensor:
        """[S, D] in expert order, final-normed; rows that are not wanted hold any values."""

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The product of x [M, K] with a linear layer, such as the text head: [M, N]."""

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        """Whether und rows are summed as the eager path sums `num_rows`, however many they are.

        They are where `CacheRun.eager_tokens` says that number.
        """


class EagerStack:
    """The eager path, which the others are compared with: layer after layer, all rows together."""

    keeps_runs_apart = False

    def run(self, layer_pass: LayerPass) -> Tensor:
        decoder, x, experts = layer_pass.decoder, layer_pass.x, layer_pass.experts
        for index, layer in enumerate(decoder.layers):
            attend = partial(layer_pass.append.attend, index)
            x = layer.run(x, experts, layer_pass.rotary, attend)
        return decoder.final_norm(x, experts)

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return linear(x)

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        return False


@once_per_device
def _grid_ids(grid: ImageSize, table_side: int, device: torch.device) -> Tensor:
    return to_device(position_ids(grid, table_side), device)


class Bagel(nn.Module):
    """The whole model but the autoencoder; parameter names are those of the checkpoint."""

    def __init__(self, config: BagelConfig):
        super().__init__()
        self.config = config
        hidden = config.llm.hidden_size
        self.language_model = MotCausalLM(config.llm)
        self.time_embedder = TimestepEmbedder(hidden)
        self.vae2llm = nn.Linear(config.latent_dim, hidden)
        self.llm2vae = nn.Linear(hidden, config.latent_dim)
        self.latent_pos_embed = PositionTable(config.max_latent_size, hidden)
        self.vit_model = SiglipVit(config.vit)
        self.connector = Connector(config.vit.hidden_size, hidden)
        self.vit_pos_embed = PositionTable(config.vit.side, hidden)

    @property
    def decoder(self):
        return self.language_model.model

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights as they lie now: the compute type while they are gathered."""
        return self.llm2vae.weight.dtype

    def position_tables(self) -> dict[str, Tensor]:
        """The fixed tables by parameter name, fp32, for the two parameters never loaded."""
        hidden = self.config.llm.hidden_size
        return {
            f"{name}.pos_embed": sincos_table(getattr(self, name).side, hidden)
            for name in ("latent_pos_embed", "vit_pos_embed")
        }

    def embed_text(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, D]."""
        return self.decoder.embed_tokens(ids)

    def embed_vit(self, features: Tensor, position_ids: Tensor) -> Tensor:
        """Image-encoder output [T, D_vit] at its grid positions -> [T, D]."""
        return self.connector(features.to(self.dtype)) + self.vit_pos_embed(position_ids)

    def encode_vit(self, patches: Tensor, grid: ImageSize) -> Tensor:
        """Image-encoder output [I, D_vit] of one picture's patches, past the hooks of FSDP2."""
        ids = _grid_ids(grid, self.config.vit.side, patches.device)
        return self.vit_model.vision_model(patches, ids, [ids.numel()])

    def embed_latents(self, latents: Tensor, time: Tensor, position_ids: Tensor) -> Tensor:
        """Latent tokens [T, P], embedded times [T or 1, D] and grid positions -> [T, D]."""
        embedded = self.vae2llm(latents.to(self.dtype))
        return embedded + time + self.latent_pos_embed(position_ids)

    def forward(
        self, batch: PackedBatch, attend: AttendForest, rounding: QkRounding
    ) -> LearnerOutput:
        """The learner's pass over a packed forest.

        Args:
            batch: model inputs on the model's device.
            attend: attention over the batch's forest (`forest_attention`).
            rounding: where q and k are rounded.
        """
        experts = batch.experts()
        parts = [self.embed_text(batch.text_ids)]
        # Without pictures the connector must stay out of the graph: a zero gradient would still
        # let Adam move it, and a generate step trains no connector. Likewise without latents.
        if batch.vit_index.numel():
            parts.append(self.embed_vit(batch.vit_features, batch.vit_position_ids))
        if batch.latent_index.numel():
            time, positions = self.time_embedder(batch.timesteps), batch.latent_position_ids
            parts.append(self.embed_latents(batch.latents, time, positions))
        x = torch.cat(parts)
        rotary = self.decoder.rotary(batch.rope_ids, experts, rounding)
        attend_experts = experts.reordered(attend)
        for layer in self.decoder.layers:
            x = layer(x, experts, rotary, attend_experts)
        x = experts.to_document(self.decoder.final_norm(x, experts))
        return LearnerOutput(
            logits=self.language_model.lm_head(x[batch.label_index]),
            velocity=self.llm2vae(x[batch.noise_index]),
        )

    def extend(
        self,
        x: Tensor,
        experts: ExpertOrder,
        rope_ids: Tensor,
        append: CacheAppend,
        rounding: QkRounding,
        stack: Stack,
        wanted: Wanted = Wanted.ALL,
    ) -> Tensor:
        """The rollout's pass: new tokens behind cached contexts, on resident weights.

        Args:
            x: [S, D] embeddings of the new tokens in expert order.
            experts: their split between the experts.
            rope_ids: int64 [S] in document order.
            append: where their keys and values go and what they see.
            rounding: where q and k are rounded.
            stack: what runs the layers.
            wanted: whose hidden states the caller reads; a stack may leave out the others.

        Returns:
            [S, D], final-normed, in expert order; rows that are not wanted hold any values.
        """
        rotary = self.decoder.rotary(rope_ids, experts, rounding)
        return stack.run(LayerPass(self.decoder, x, experts, rotary, append, wanted))
