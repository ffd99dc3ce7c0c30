"""Sizes of the tiny model, and the two configuration files that state them."""

import json
from pathlib import Path

from modeling.autoencoder import VaeConfig
from modeling.bagel.config import BagelConfig, ImageSize, LlmConfig, VitConfig
from modeling.bagel.images import ImageTransform

VOCAB_SIZE = 640
CONFIG = BagelConfig(
    llm=LlmConfig(
        hidden_size=96,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
    ),
    vit=VitConfig(
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=3,
        image_size=112,
        patch_size=14,
    ),
    max_latent_size=8,
)
# Two channels in each of the 32 norm groups, at every resolution: see linear_autoencoder.py.
VAE_CONFIG = VaeConfig(
    channels=64, channel_mults=(1, 1, 1, 1), num_blocks=1, z_channels=16, image_channels=3
)

# What the model is trained on, and what it is to be run with: --image_size 64,
# --vae_max_image_size 64, --vae_min_image_size 32, --vit_max_image_size 112,
# --vit_min_image_size 56.
PICTURE = ImageSize(64, 64)
VIT_TRANSFORM = ImageTransform(max_size=112, min_size=56, stride=CONFIG.vit.patch_size)


def write_configs(folder: Path, bos: int, eos: int) -> None:
    """Writes `llm_config.json` and `vit_config.json`."""
    llm, vit = CONFIG.llm, CONFIG.vit
    _write(
        folder / "llm_config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": llm.vocab_size,
            "hidden_size": llm.hidden_size,
            "intermediate_size": llm.intermediate_size,
            "num_hidden_layers": llm.num_layers,
            "num_attention_heads": llm.num_heads,
            "num_key_value_heads": llm.num_kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": llm.rms_norm_eps,
            "rope_theta": llm.rope_theta,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "torch_dtype": "bfloat16",
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
    )
    _write(
        folder / "vit_config.json",
        {
            "model_type": "siglip_vision_model",
            "hidden_size": vit.hidden_size,
            "intermediate_size": vit.intermediate_size,
            "num_hidden_layers": vit.num_layers + 1,  # BAGEL never uses the last one
            "num_attention_heads": vit.num_heads,
            "num_channels": 3,
            "image_size": vit.image_size,
            "patch_size": vit.patch_size,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": vit.layer_norm_eps,
        },
    )


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
