"""What a run was made of: config.json and environment.json, with the secrets left out."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from train.files import json_ready, write_json_atomic

REDACTED = "<redacted>"
TREE_ROOT = Path(__file__).resolve().parent.parent

_PACKAGES = ("torch", "torchvision", "transformers", "triton", "flash-attn", "safetensors")
_PACKAGES += ("numpy", "wandb")
# "token" alone is no sign of a secret here: this project counts tokens.
_SECRET_NAME = re.compile(
    r"api_?key|secret|passw(or)?d|credential|(access|api|auth|bearer)_?token|authorization",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_URL_QUERY = re.compile(r"([?&])([^=&\s]+)=([^&#\s,]+)")
_SHORTEST_SECRET = 6  # shorter ones are found by name only, or every letter would be blotted out


def redact(config: object) -> object:
    """Return a JSON-ready copy of `config` (dataclass or mapping) without its secrets.

    A value is a secret by the name of its field, wherever it is nested; logins and keys inside
    URLs are cut from any string. An empty secret stays empty, so that one sees none was given.
    """
    return _redact_value(json_ready(config))


def redact_command_line(argv: Sequence[str], config: object = None) -> list[str]:
    """Return `argv` without secrets, in the forms `--name value` and `--name=value`.

    Secret values found in `config` are cut wherever else they occur.
    """
    secrets = _secret_values(json_ready(config))
    result: list[str] = []
    hide_next = False
    for argument in argv:
        name, separator, _ = argument.partition("=")
        is_secret_flag = name.startswith("-") and bool(_SECRET_NAME.search(name.replace("-", "_")))
        if hide_next:
            result.append(REDACTED)
        elif is_secret_flag and separator:
            result.append(f"{name}={REDACTED}")
        else:
            for secret in secrets:
                argument = argument.replace(secret, REDACTED)
            result.append(_redact_string(argument))
        hide_next = is_secret_flag and not separator and not hide_next
    return result


def collect_environment(config: object, switches: object, argv: Sequence[str]) -> dict[str, object]:
    """Return versions, devices, source state, switches and command line; no host secrets.

    `config` and `switches` are dataclasses or mappings. What is not there (a package, a GPU, git)
    is null or an empty list. The process environment is never dumped.
    """
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "gpus": _gpus(),
        "host_cpus": os.cpu_count(),
        "source": source_state(),
        "switches": redact(switches),
        "command_line": redact_command_line(argv, config),
    }


def write_run_files(run_dir: Path, config: object, switches: object, argv: Sequence[str]) -> None:
    """Write `config.json` and `environment.json` into `run_dir`; call it on the main rank."""
    run_dir = Path(run_dir)
    write_json_atomic(run_dir / "config.json", redact(config))
    write_json_atomic(run_dir / "environment.json", collect_environment(config, switches, argv))


def source_state(root: Path = TREE_ROOT) -> dict[str, object]:
    """Return the git commit of the tree at `root` and whether it has changes, or nulls."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy without history inside somebody else's repository must not claim that one's commit.
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": None, "has_changes": None}
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    has_changes = None if status is None else bool(status)
    return {"commit": _git(root, "rev-parse", "HEAD"), "has_changes": has_changes}


def _redact_value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _redact_field(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact_value(item) for item in value]
    return _redact_string(value) if isinstance(value, str) else value


def _redact_field(name: str, value: object) -> object:
    if not _SECRET_NAME.search(name):
        return _redact_value(value)
    return REDACTED if value else value


def _redact_string(text: str) -> str:
    text = _URL_LOGIN.sub(f"{REDACTED}@", text)
    return _URL_QUERY.sub(_redact_query, text)


def _redact_query(match: re.Match) -> str:
    start, name, value = match.groups()
    is_secret = bool(_SECRET_NAME.search(name)) or name.lower() in ("key", "token")
    return f"{start}{name}={REDACTED if is_secret else value}"


def _secret_values(value: object) -> list[str]:
    """All secret strings of a JSON-ready value, the longest first."""
    found: list[str] = []
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and _SECRET_NAME.search(name):
                found += [item] if len(item) >= _SHORTEST_SECRET else []
            else:
                found += _secret_values(item)
    elif isinstance(value, list):
        for item in value:
            found += _secret_values(item)
    return sorted(found, key=len, reverse=True)


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The NVIDIA driver's version from its proc file, which costs no process."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match.group(0) if match else None


def _gpus() -> list[dict[str, object]]:
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "memory_gib": round(device.total_memory / 2**30, 2)}
        for device in devices
    ]


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in `root`, or None where git or the repository is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
