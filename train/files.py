"""Whole-file writes that a reader never sees half done, and values made ready for JSON."""

import dataclasses
import enum
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` as UTF-8 beside `path` and rename it into place; makes missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: object) -> None:
    """Write `value` as indented JSON (see `json_ready`) in one atomic step."""
    write_text_atomic(path, json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n")


def json_ready(value: object) -> object:
    """Return `value` built of what JSON knows.

    Dataclasses and mappings become objects, sequences and sets become lists, non-finite numbers
    become null (JSON has no token for them), and anything else becomes its string.
    """
    if isinstance(value, enum.Enum):
        return json_ready(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: json_ready(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [json_ready(item) for item in sorted(value, key=str)]
    return str(value)
