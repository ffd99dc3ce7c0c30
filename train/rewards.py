"""Rewards over HTTP: the settings, and a client that scores pictures in the background.

The trainer needs nothing below this file: results and the wait for them are passed on from here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from train.judges import JUDGE_KINDS, ChatJudge
from train.reward_endpoints import parse_url
from train.reward_geneval import GenevalProtocol
from train.reward_http import (
    HttpConfig,
    HttpCore,
    RewardProtocol,
    Sample,
    WorkerPool,
)
from train.reward_results import (
    OUTAGE_POLICIES,
    Attempts,
    RewardFuture,
    RewardOutageError,
    RewardResult,
    failed_result,
    require_one_of,
)
from train.reward_wait import WaitPace, WaitStatus, resolve_rewards
from train.reward_wire import RewardError, encode_jpeg

__all__ = [
    "OUTAGE_POLICIES",
    "REWARD_KINDS",
    "RewardClient",
    "RewardConfig",
    "RewardError",
    "RewardFuture",
    "RewardOutageError",
    "RewardResult",
    "WaitPace",
    "WaitStatus",
    "make_reward_client",
    "resolve_rewards",
]

REWARD_KINDS = ("geneval", *JUDGE_KINDS)


@dataclass(frozen=True)
class RewardConfig:
    """Where rewards come from and how patiently they are asked for; times in seconds.

    `jpeg_quality` is what the public client sends. `cooldown_s` is how long an address that failed
    is left alone while others answer. Raises ValueError that names the flag.
    """

    urls: tuple[str, ...]
    kind: str = "geneval"
    api_key: str = field(default="", repr=False)
    model_name: str = ""
    request_timeout_s: float = 120.0
    step_deadline_s: float = 480.0
    retries: int = 3
    backoff_s: float = 0.5
    cooldown_s: float = 10.0
    pool_size: int = 8
    jpeg_quality: int = 75
    only_strict: bool = False
    outage: str = "abort"

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("--reward_url: no address given, e.g. http://127.0.0.1:18085")
        for url in self.urls:
            parse_url(url)
        require_one_of("--reward_fn", self.kind, REWARD_KINDS)
        require_one_of("--reward_outage", self.outage, OUTAGE_POLICIES)
        if self.kind in JUDGE_KINDS and not self.model_name:
            raise ValueError(f"--reward_model_name: reward_fn {self.kind} needs the judge's name")
        if self.kind in JUDGE_KINDS and not self.api_key:
            raise ValueError(
                f"--reward_api_key: reward_fn {self.kind} needs a key "
                "(any word will do for a server that checks none)"
            )
        # The key itself must never get into a message, and HTTP libraries print a bad header.
        if not all("!" <= char <= "~" for char in self.api_key):
            raise ValueError("--reward_api_key: the key has blanks or characters outside ASCII")
        for name in ("request_timeout_s", "step_deadline_s", "backoff_s", "cooldown_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"--reward_{name}: {value} must be a positive number of seconds")
        if self.retries < 0 or self.pool_size < 1 or not 1 <= self.jpeg_quality <= 95:
            raise ValueError(
                f"rewards need retries >= 0, pool_size >= 1 and jpeg_quality in 1..95, not "
                f"{self.retries}, {self.pool_size} and {self.jpeg_quality}"
            )


class RewardClient:
    """Scores pictures in background threads, one request a picture.

    `rank` seeds the jitter of the back-off only. Close it at the end; it is a context manager too.
    """

    def __init__(self, config: RewardConfig, rank: int) -> None:
        self._config = config
        self._protocol: RewardProtocol
        if config.kind in JUDGE_KINDS:
            self._protocol = ChatJudge(config.kind, config.model_name)
        else:
            self._protocol = GenevalProtocol(config.only_strict)
        self._core = HttpCore(_http_config(config), rank)
        self._pool = WorkerPool(config.pool_size, "reward")
        self._open: set[RewardFuture] = set()
        self._is_closed = False

    def submit(self, images: Sequence[Image.Image], metadata: Sequence[dict]) -> list[RewardFuture]:
        """Start scoring; one future a picture, in order. ValueError where the two do not pair."""
        if len(images) != len(metadata):
            raise ValueError(f"{len(images)} images but {len(metadata)} metadata to score")
        for record in metadata:
            self._protocol.check(record)
        return [
            self._start(image, record, Attempts())
            for image, record in zip(images, metadata, strict=True)
        ]

    def close(self) -> None:
        """Abandon what is still open and end the threads; does not wait for a hung request."""
        self._is_closed = True
        for future in list(self._open):
            future.abandon()
        self._pool.close()
        self._core.close()

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, image: Image.Image, metadata: dict, attempts: Attempts) -> RewardFuture:
        if self._is_closed:
            raise RuntimeError("the reward client is closed")
        future = RewardFuture(attempts, lambda: self._start(image, metadata, attempts.renewed()))
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._pool.submit(future, lambda: self._score(image, metadata, attempts))
        return future

    def _score(self, image: Image.Image, metadata: dict, attempts: Attempts) -> RewardResult:
        if attempts.started is None:
            attempts.started = time.monotonic()
        sample = Sample(encode_jpeg(image, self._config.jpeg_quality), metadata)
        try:
            scores = self._core.score(self._protocol, sample, attempts)
        except RewardError as error:
            text = f"{type(error).__name__}: {error}"
            elapsed_s = time.monotonic() - attempts.started
            return failed_result(text, elapsed_s, attempts.num_repeats, error.is_retryable)
        return RewardResult(
            score=scores.score,
            reward=scores.reward,
            strict_reward=scores.strict_reward,
            latency_s=time.monotonic() - attempts.started,
            retries=attempts.num_repeats,
            error=None,
        )


def make_reward_client(config: RewardConfig, rank: int) -> RewardClient:
    """The client of config.kind: geneval, geneval_plus or tiif."""
    return RewardClient(config, rank)


def _http_config(config: RewardConfig) -> HttpConfig:
    return HttpConfig(
        urls=config.urls,
        api_key=config.api_key,
        request_timeout_s=config.request_timeout_s,
        step_deadline_s=config.step_deadline_s,
        retries=config.retries,
        backoff_s=config.backoff_s,
        cooldown_s=config.cooldown_s,
        pool_size=config.pool_size,
    )
