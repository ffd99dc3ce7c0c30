"""Sizes of a BAGEL checkpoint, read from its folder and refused early when they do not fit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LATENT_CHANNELS = 16
LATENT_PATCH = 2


class ImageSize(NamedTuple):
    """Height and width, in pixels or in grid cells as the name around it says."""

    height: int
    width: int


@dataclass(frozen=True)
class LlmConfig:
    """Sizes of the mixture-of-transformers decoder (`llm_config.json`)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class VitConfig:
    """Sizes of the SigLIP image encoder (`vit_config.json`); `num_layers` counts used layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float = 1e-6

    @property
    def side(self) -> int:
        """Patches along one side of the position table."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class BagelConfig:
    """All sizes of one model. `max_latent_size` is the side of the latent position table."""

    llm: LlmConfig
    vit: VitConfig
    max_latent_size: int

    @property
    def latent_dim(self) -> int:
        """Numbers in one latent token (2 x 2 cells of 16 channels)."""
        return LATENT_PATCH * LATENT_PATCH * LATENT_CHANNELS


def read_llm_config(folder: Path) -> LlmConfig:
    """Reads `llm_config.json`. Raises ValueError naming the file and the field that is wrong."""
    path, raw = _read_json(folder, "llm_config.json")
    config = LlmConfig(
        hidden_size=_positive(raw, "hidden_size", path),
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path),
        num_heads=_positive(raw, "num_attention_heads", path),
        num_kv_heads=_positive(raw, "num_key_value_heads", path),
        vocab_size=_positive(raw, "vocab_size", path),
        rope_theta=float(raw.get("rope_theta", 1e6)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
    )
    if config.hidden_size % config.num_heads or config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{path}: hidden_size {config.hidden_size}, num_attention_heads {config.num_heads} and "
            f"num_key_value_heads {config.num_kv_heads} do not divide each other (--model_path)"
        )
    if raw.get("tie_word_embeddings", False):
        raise ValueError(f"{path}: tie_word_embeddings is true, expected false (--model_path)")
    return config


def read_vit_config(folder: Path) -> VitConfig:
    """Reads `vit_config.json`; the last configured layer is never used, so it is not counted."""
    path, raw = _read_json(folder, "vit_config.json")
    config = VitConfig(
        hidden_size=_positive(raw, "hidden_size", path),
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path) - 1,
        num_heads=_positive(raw, "num_attention_heads", path),
        image_size=_positive(raw, "image_size", path),
        patch_size=_positive(raw, "patch_size", path),
        layer_norm_eps=float(raw.get("layer_norm_eps", 1e-6)),
    )
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"{path}: hidden_size {config.hidden_size} is not a multiple of "
            f"num_attention_heads {config.num_heads} (--model_path)"
        )
    return config


def _read_json(folder: Path, name: str) -> tuple[Path, dict]:
    path = Path(folder) / name
    if not path.is_file():
        raise ValueError(f"--model_path {folder}: {name} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error} (--model_path)") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__} (--model_path)")
    return path, raw


def _positive(raw: dict, key: str, path: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{path}: {key} is {value!r}, expected a positive integer (--model_path)")
    return value
