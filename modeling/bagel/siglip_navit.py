"""The SigLIP image encoder over packed patches of pictures of any size.

Legend: T packed patches, D hidden, N heads, H head size.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from modeling.bagel.attention import varlen_attention
from modeling.bagel.config import VitConfig

IMAGE_CHANNELS = 3


class SiglipVit(nn.Module):
    """Pre-norm transformer; a patch sees every patch of its own picture and no other."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.vision_model = VisionModel(config)

    def forward(self, patches: Tensor, position_ids: Tensor, seqlens: list[int]) -> Tensor:
        """Encodes packed pictures.

        Args:
            patches: [T, patch * patch * 3], numbers in (row, column, channel) order, in [-1, 1].
            position_ids: int64 [T], `row * side + column` of each patch.
            seqlens: patches of each picture; they add up to T.

        Returns:
            [T, D] in the type of the weights (of autocast, where that is on).

        Raises:
            ValueError: if the three do not describe the same patches.
        """
        if not patches.shape[0] == position_ids.shape[0] == sum(seqlens):
            raise ValueError(
                f"{patches.shape[0]} patches, {position_ids.shape[0]} position ids and pictures "
                f"of {seqlens} patches do not match"
            )
        return self.vision_model(patches, position_ids, seqlens)


class VisionModel(nn.Module):
    """Embeddings, encoder and the norm of the last hidden state."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, position_ids: Tensor, seqlens: list[int]) -> Tensor:
        hidden = self.encoder(self.embeddings(patches, position_ids), seqlens)
        return self.post_layernorm(hidden)


class Embeddings(nn.Module):
    """Linear patch embedding plus a learned position row."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        patch_dim = config.patch_size**2 * IMAGE_CHANNELS
        self.patch_embedding = nn.Linear(patch_dim, config.hidden_size)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        embedded = self.patch_embedding(patches.to(self.patch_embedding.weight.dtype))
        return embedded + self.position_embedding(position_ids)


class Encoder(nn.Module):
    """The layers; it only exists for the checkpoint's names."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, seqlens: list[int]) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, seqlens)
        return hidden


class EncoderLayer(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual, [T, D] -> [T, D]."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, seqlens: list[int]) -> Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), seqlens)
        return hidden + self.mlp(self.layer_norm2(hidden))


class Attention(nn.Module):
    """Full multi-head attention inside each picture, without rotary positions."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.head_split = (config.num_heads, config.hidden_size // config.num_heads)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, seqlens: list[int]) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, self.head_split)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(varlen_attention(q, k, v, seqlens, causal=False).flatten(-2))


class Mlp(nn.Module):
    """Two linear layers around a tanh-GELU."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
