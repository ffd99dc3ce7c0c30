"""Models of transformers from a local folder, checked to be whole, on the device that is there."""

import logging
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

logger = logging.getLogger("faster_r3")

DEVICES = ("auto", "cuda", "cpu")


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cuda" or "cpu".

    auto is a GPU where one is visible. Raises ValueError where a GPU was asked for, with cuda or by
    a CUDA_VISIBLE_DEVICES that names one, and this torch cannot use it: a detector on a CPU by
    mistake would slow a run down twentyfold without a word.
    """
    if name not in DEVICES:
        raise ValueError(f"--device {name!r}, expected one of {', '.join(DEVICES)}")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if name == "cuda" or visible:
        raise ValueError(
            f"--device {name}, CUDA_VISIBLE_DEVICES={visible}, but torch {torch.__version__} finds "
            "no GPU; set R3_REWARD_GPUS=0 and --device cpu to score on the CPU"
        )
    return torch.device("cpu")


def load_whole(
    model_class: type[PreTrainedModel], folder: str | Path | None, flag: str, device: torch.device
) -> PreTrainedModel:
    """A model in fp32 from a local folder in transformers' layout, for inference, without network.

    Raises ValueError that names `flag` if the folder is not there or lacks a weight: transformers
    itself would draw a missing one at random and only warn.
    """
    if folder is None:
        raise ValueError(f"this detector needs {flag} FOLDER")
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{flag} {folder} has no config.json; expected a folder that transformers wrote or "
            "that was downloaded whole from a model hub"
        )
    model, info = model_class.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    broken = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
    if broken:
        raise ValueError(
            f"{flag} {folder} is no whole {model_class.__name__}: {len(broken)} weights are "
            f"missing or misshapen, among them {', '.join(broken[:3])}"
        )
    logger.info("%s from %s on %s", model_class.__name__, folder, device)
    return model.float().eval().requires_grad_(False).to(device)
