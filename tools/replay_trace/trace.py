"""Reads a trace folder: its settings as flags of the trainer, its pictures, its reward."""

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

from train.config import FLAGS, TrainConfig, from_flags
from train.rewards import RewardResult

# Settings that describe the recording, or repeat what the checkpoint says.
DESCRIPTIVE = {
    "world_size",
    "vae_image_stride",
    "vit_image_stride",
    "max_latent_size",
    "vit_max_num_patch_per_side",
    "lr_scheduler",
    "precision",
    "reward",
    "data",
    "recipe",
    "cfg_interval",
}


@dataclass(frozen=True)
class MeanRed:
    """The recorded runs' reward: the mean of the red channel over 255, or two levels by it."""

    threshold: float | None
    above: float
    below: float

    def score(self, picture: Image.Image) -> float:
        red = float(np.asarray(picture, dtype=np.float64)[..., 0].mean() / 255)
        if self.threshold is None:
            return red
        return self.above if red > self.threshold else self.below

    def submit(self, images: list[Image.Image], metadata: list[dict]) -> list[Future]:
        futures = []
        for image in images:
            future: Future = Future()
            value = self.score(image)
            future.set_result(RewardResult(value, value, value, 0.0, 0, None))
            futures.append(future)
        return futures

    def close(self) -> None:
        """Nothing is open."""


class Trace:
    """One trace folder. Raises ValueError where it is no trace."""

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / "trace.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no trace.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        self.config: dict = content["config"]
        self.ranks: list[list[dict]] = content["ranks"]
        self.tensors = safe_open(folder / "trace.safetensors", framework="pt")
        self.names = set(self.tensors.keys())

    @property
    def world_size(self) -> int:
        return self.config["world_size"]

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0])

    def tensor(self, rank: int, step: int, name: str) -> torch.Tensor | None:
        """A recorded tensor, or None where the trace has none of that name."""
        key = f"rank{rank}.step{step}.{name}"
        return self.tensors.get_tensor(key) if key in self.names else None

    def pictures(self, rank: int, step: int) -> list[Image.Image]:
        """The recorded pictures of a step in sample order."""
        pictures = []
        while (pixels := self.tensor(rank, step, f"image{len(pictures)}")) is not None:
            pictures.append(Image.fromarray(pixels.numpy()))
        return pictures

    def reward(self) -> MeanRed:
        """The reward of the recorded run."""
        reward = self.config["reward"]
        if reward["kind"] != "mean_red":
            raise ValueError(f"{self.folder}: reward kind {reward['kind']!r}, expected 'mean_red'")
        return MeanRed(reward["threshold"], reward.get("above", 1.0), reward.get("below", 0.0))

    def data_path(self) -> Path:
        """The prompt file, in the trace's folder or the one above."""
        for folder in (self.folder, self.folder.parent):
            if (folder / self.config["data"]).is_file():
                return folder / self.config["data"]
        raise ValueError(f"{self.folder}: {self.config['data']} is not beside it")

    def train_config(self, checkpoint: Path, num_shard: int) -> TrainConfig:
        """The trace's settings as flags of the trainer, on shard groups of `num_shard` ranks."""
        unknown = sorted(set(self.config) - set(FLAGS) - DESCRIPTIVE)
        if unknown:
            raise ValueError(f"{self.folder}: settings that are not understood: {unknown}")
        if self.config["precision"] != "float32" or self.config["lr_scheduler"] != "constant":
            raise ValueError(f"{self.folder}: expected precision float32 and a constant lr")
        low, high = self.config["cfg_interval"]
        flags = {name: value for name, value in self.config.items() if name in FLAGS}
        flags |= {
            "model_path": str(checkpoint),
            "train_data_path": str(self.data_path()),
            "cfg_interval_low": low,
            "cfg_interval_high": high,
            "r3_recipe": self.config["recipe"],
            "num_shard": num_shard,
            "precision": "fp32",
            "device": "cpu",
        }
        return from_flags(flags)
