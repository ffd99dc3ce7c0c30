"""What goes over the wire to a reward service and back, in pickle and in JSON.

The pickle form is that of the public GenEval service: a request {images: [JPEG bytes], meta_datas,
only_strict}, an answer {scores, rewards, strict_rewards, group_rewards, group_strict_rewards}. The
JSON form has the same names, with the images as base64 text. No torch here: the embedded service
in tools/ reads and writes the same forms with this file.
"""

import base64
import io
import json
import math
import pickle
from dataclasses import dataclass

from PIL import Image

from data import safe_json
from train import safe_pickle

FORMATS = ("json", "pickle")
CONTENT_TYPES = {"json": "application/json", "pickle": "application/octet-stream"}
MAX_ANSWER_BYTES = 4 << 20
EXCERPT_CHARS = 200
# The public service fills a tag's group list with this number for samples of another tag.
OTHER_TAG = -10.0
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

_PICKLE_PROTOCOL = 4
_ANSWER_LISTS = ("scores", "rewards", "strict_rewards")


class RewardError(RuntimeError):
    """A sample could not be scored. `is_retryable` says whether asking again may help."""

    is_retryable = False


class RewardAnswerError(RewardError):
    """The service answered with something that is not one finite score per image."""


class RewardConnectionError(RewardError):
    """No answer: refused, reset, cut off or too slow."""

    is_retryable = True


class RewardStatusError(RewardError):
    """The service answered with an HTTP status other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        # 429 is not in the public client's list; hosted judges use it to ask for patience.
        self.is_retryable = status in (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Scores:
    """A picture's three numbers: graded score (training), reward (evaluation), strict reward."""

    score: float
    reward: float
    strict_reward: float


@dataclass(frozen=True)
class RewardRequest:
    """A request as a service sees it; `images` are encoded pictures, not yet decoded."""

    images: list[bytes]
    meta_datas: list[dict]
    only_strict: bool


def encode_jpeg(image: Image.Image, quality: int) -> bytes:
    """JPEG bytes of a picture; modes that JPEG lacks become RGB."""
    buffer = io.BytesIO()
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    rgb.save(buffer, format="JPEG", quality=quality)
    return buffer.getvalue()


def encode_request(request: RewardRequest, form: str) -> bytes:
    """Body of a request in the form "json" or "pickle"."""
    record: dict[str, object] = {
        "images": request.images,
        "meta_datas": request.meta_datas,
        "only_strict": request.only_strict,
    }
    if form == "pickle":
        return pickle.dumps(record, protocol=_PICKLE_PROTOCOL)
    record["images"] = [base64.b64encode(image).decode("ascii") for image in request.images]
    return json.dumps(record).encode("utf-8")


def decode_request(body: bytes, form: str) -> RewardRequest:
    """Read a request; raises ValueError that says what is wrong with it."""
    record = _parse_json(body) if form == "json" else safe_pickle.loads(body)
    if not isinstance(record, dict):
        raise ValueError(f"a request must be a mapping, not {type(record).__name__}")
    images, metas = record.get("images"), record.get("meta_datas")
    only_strict = record.get("only_strict", False)
    if not isinstance(images, list | tuple) or not isinstance(metas, list | tuple):
        raise ValueError("a request needs the lists 'images' and 'meta_datas'")
    if not images:
        raise ValueError("a request needs at least one image")
    if len(images) != len(metas):
        raise ValueError(f"{len(images)} images but {len(metas)} meta_datas")
    if not isinstance(only_strict, bool):
        raise ValueError("'only_strict' must be true or false")
    if form == "json":
        images = [_from_base64(image, index) for index, image in enumerate(images)]
    for index, (image, meta) in enumerate(zip(images, metas, strict=True)):
        if not isinstance(image, bytes):
            raise ValueError(f"image {index} must be bytes, not {type(image).__name__}")
        if not isinstance(meta, dict):
            raise ValueError(f"meta_datas {index} must be a mapping, not {type(meta).__name__}")
    return RewardRequest(list(images), list(metas), only_strict)


def encode_answer(scores: list[Scores], tags: list[str], form: str) -> bytes:
    """Body of an answer, with the group lists in the public service's layout."""
    rewards = [item.reward for item in scores]
    strict = [item.strict_reward for item in scores]
    record = {
        "scores": [item.score for item in scores],
        "rewards": rewards,
        "strict_rewards": strict,
        "group_rewards": _by_tag(rewards, tags),
        "group_strict_rewards": _by_tag(strict, tags),
    }
    if form == "pickle":
        return pickle.dumps(record, protocol=_PICKLE_PROTOCOL)
    return json.dumps(record, allow_nan=False).encode("utf-8")


def decode_answer(body: bytes, num_images: int) -> list[Scores]:
    """Read and check an answer: three lists with one finite number per image.

    The form is told from the first byte, since the public service labels its pickles text/html.
    Raises RewardAnswerError with the first 200 characters of what came.
    """
    try:
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"{len(body)} bytes are more than the {MAX_ANSWER_BYTES} allowed")
        record = safe_pickle.loads(body) if body[:1] == b"\x80" else _parse_json(body)
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__} is not a mapping of score lists")
        columns = [_numbers(record, name, num_images) for name in _ANSWER_LISTS]
    except ValueError as error:
        raise RewardAnswerError(f"bad reward answer: {error}; it began: {excerpt(body)}") from error
    return [Scores(*row) for row in zip(*columns, strict=True)]


def excerpt(body: bytes) -> str:
    """The first 200 characters of a body on one line, and a traceback's last line too."""
    text = " ".join(body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace").split())
    head = "".join(char if char.isprintable() else "?" for char in text[:EXCERPT_CHARS])
    if not head:
        return "(nothing)"
    if not text.startswith("Traceback") or len(text) <= EXCERPT_CHARS:
        return head
    last = body[-4 * EXCERPT_CHARS :].decode("utf-8", "replace").strip().splitlines()[-1]
    return f"{head} ... {last[:EXCERPT_CHARS]}"


def _numbers(record: dict, name: str, num_images: int) -> list[float]:
    values = record.get(name)
    if not isinstance(values, list | tuple):
        raise ValueError(f"the list {name!r} is missing")
    if len(values) != num_images:
        raise ValueError(f"{name!r} has {len(values)} entries for {num_images} images")
    for value in values:
        # An integer beyond the floats would raise OverflowError in isfinite.
        is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 53)
        if not is_number or not math.isfinite(value):
            found = value if isinstance(value, float) else f"a {type(value).__name__}"
            raise ValueError(f"{name!r} holds {found}, not a finite number in range")
    return [float(value) for value in values]


def _parse_json(body: bytes) -> object:
    try:
        return safe_json.loads(body)
    except ValueError as error:
        raise ValueError(f"neither pickle nor JSON: {error}") from error


def _from_base64(image: object, index: int) -> bytes:
    if not isinstance(image, str):
        raise ValueError(f"image {index} must be base64 text, not {type(image).__name__}")
    try:
        return base64.b64decode(image, validate=True)
    except ValueError as error:
        raise ValueError(f"image {index} is not base64: {error}") from error


def _by_tag(values: list[float], tags: list[str]) -> dict[str, list[float]]:
    pairs = list(zip(values, tags, strict=True))
    return {name: [value if tag == name else OTHER_TAG for value, tag in pairs] for name in TAGS}
