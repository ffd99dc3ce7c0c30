"""Parts of a tiny run, a reward source without HTTP, and evaluations on several real ranks."""

import socket
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from PIL import Image
from torch.distributed.tensor import DTensor

from train.assembly import Parts, assemble
from train.config import TrainConfig, from_flags
from train.dist import LaunchInfo, start_processes, stop_processes
from train.evaluation import Evaluator
from train.metrics import PhaseTimer
from train.rewards import RewardResult
from train.trainer import StepError

PARITY = Path(__file__).resolve().parents[1] / "parity"
PROMPTS = PARITY / "prompts40.jsonl"
NAN = float("nan")


class ColourRewards:
    """Scores by colour: `reward` is the mean green over 255, `score` the mean red.

    Nothing is answered before `hold` pictures have come; pictures whose number is in `failing`
    get an error. `calls` are the numbers of pictures of each submission.
    """

    def __init__(self, hold: int = 0, failing: tuple[int, ...] = ()):
        self.hold = hold
        self.failing = failing
        self.calls: list[int] = []
        self.results: list[RewardResult] = []
        self.metadata: list[dict] = []
        self.waiting: list[tuple[Future, RewardResult]] = []

    def submit(self, images: list[Image.Image], metadata: list[dict]) -> list[Future]:
        self.calls.append(len(images))
        self.metadata += metadata
        futures = []
        for image in images:
            result = colour_result(image)
            if len(self.results) in self.failing:
                result = RewardResult(NAN, NAN, NAN, 0.0, 0, "no such object")
            self.results.append(result)
            futures.append(Future())
            self.waiting.append((futures[-1], result))
        if len(self.results) >= self.hold:
            for future, result in self.waiting:
                future.set_result(result)
            self.waiting.clear()
        return futures

    def close(self) -> None:
        """Nothing is open."""


def colour_result(image: Image.Image) -> RewardResult:
    red, green, _ = np.asarray(image, dtype=np.float64).mean((0, 1)) / 255
    return RewardResult(red, green, 0.0, 0.0, 0, None)


def tiny_config(**flags: object) -> TrainConfig:
    """A run on the tiny checkpoint: two rounds of three points, batches of two."""
    return from_flags(
        {
            "model_path": str(PARITY / "tiny_bagel"),
            "train_data_path": str(PROMPTS),
            "val_data_path": str(PROMPTS),
            "group_size": 2,
            "policy_group_size": 1,
            "image_size": 64,
            "vae_max_image_size": 64,
            "vae_min_image_size": 32,
            "vit_max_image_size": 112,
            "vit_min_image_size": 56,
            "max_output_token_n_gen": 24,
            "max_output_token_n_edit": 32,
            "eval_num_rounds": 2,
            "eval_num_timesteps": 3,
            "eval_batch_size": 2,
            "eval_prompts": 3,
            "reward_step_deadline_s": 10.0,
            "device": "cpu",
            **flags,
        }
    )


def is_sharded(parts: Parts) -> bool:
    return all(isinstance(param, DTensor) for param in parts.policy.parameters())


def evaluate_on_ranks(world_size: int, cases: list[dict], out: Path) -> list[list[dict]]:
    """Runs one evaluation a case on every rank; what each rank saw, by rank and case.

    A case holds flags, and under `failing_rank` the rank whose first picture is not scored.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run_rank, args=(world_size, cases, port, out), nprocs=world_size)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_rank(rank: int, world_size: int, cases: list[dict], port: int, out: Path) -> None:
    torch.set_num_threads(1)
    config = tiny_config(master_port=port, num_shard=world_size, process_group_timeout_s=60.0)
    launch = LaunchInfo(rank, world_size, rank, world_size)
    context = start_processes(config.processes, config.rl.policy_group_size, launch)
    parts = assemble(config, context, ColourRewards(), PhaseTimer())
    seen = []
    for case in cases:
        flags = dict(case)
        failing = (0,) if flags.pop("failing_rank", None) == rank else ()
        parts.config, parts.rewards = config.replace(**flags), ColourRewards(failing=failing)
        try:
            report = Evaluator(parts, context).run(step=0)
            outcome = {"metrics": report.metrics, "num_cards": len(report.cards)}
        except StepError as error:
            outcome = {"error": str(error)}
        outcome["calls"] = parts.rewards.calls
        outcome["rewards"] = [result.reward for result in parts.rewards.results]
        outcome["is_sharded"] = is_sharded(parts)
        seen.append(outcome)
    torch.save(seen, out / f"rank{rank}.pt")
    stop_processes()
