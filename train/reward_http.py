"""HTTP for rewards: one session, retries with back-off, threads that hand out futures.

GenEval services and chat judges differ in what they are asked and what they answer (`Protocol`);
sessions, retries, deadlines and dead addresses are the same and live here.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import requests
import urllib3
from requests.adapters import HTTPAdapter

from train.reward_endpoints import Endpoint, EndpointRing, is_loopback
from train.reward_results import Attempts
from train.reward_wire import (
    MAX_ANSWER_BYTES,
    RewardConnectionError,
    RewardError,
    RewardStatusError,
    Scores,
    excerpt,
)

CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 10.0
MAX_BACKOFF_S = 30.0
# An address that answers so is behind a gateway without a service; a plain 500 is one that failed.
GATEWAY_STATUSES = (502, 503, 504)


@dataclass(frozen=True)
class HttpConfig:
    """Addresses, times (seconds) and limits that all reward protocols share."""

    urls: tuple[str, ...]
    api_key: str
    request_timeout_s: float
    step_deadline_s: float
    retries: int
    backoff_s: float
    cooldown_s: float
    pool_size: int


@dataclass(frozen=True)
class HttpRequest:
    """A request to one endpoint; without a body it is a GET."""

    url: str
    label: str
    body: bytes | None = None
    content_type: str = ""
    accept: str = "application/json, application/octet-stream"


@dataclass(frozen=True)
class HttpReply:
    """Status and whole body of an answer."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Sample:
    """One picture, as JPEG bytes, and the metadata of its prompt."""

    jpeg: bytes
    metadata: dict


Exchange = Callable[[HttpRequest, float], HttpReply]


class RewardProtocol(Protocol):
    """What a kind of reward service is asked and how its answer reads."""

    def hello(self, endpoint: Endpoint, exchange: Exchange, timeout_s: float) -> str:
        """Find out what the endpoint speaks; raises RewardError where it is down."""

    def check(self, metadata: dict) -> None:
        """Raise ValueError for metadata that this kind of service cannot judge."""

    def request(self, endpoint: Endpoint, form: str, sample: Sample) -> HttpRequest:
        """The request for one sample, in the form the endpoint speaks."""

    def read(self, reply: HttpReply, sample: Sample) -> Scores:
        """Scores from a 200 answer; RewardAnswerError where it is none."""


class HttpCore:
    """Sends samples to the endpoints of one service; safe to call from several threads."""

    def __init__(self, config: HttpConfig, rank: int) -> None:
        self._config = config
        self._ring = EndpointRing(config.urls, config.cooldown_s)
        # Jitter must differ between ranks and must not draw from the streams that training uses.
        self._jitter = random.Random(rank)
        self._session = requests.Session()
        self._session.trust_env = not all(is_loopback(url) for url in config.urls)
        adapter = HTTPAdapter(pool_maxsize=config.pool_size, max_retries=0)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def score(self, protocol: RewardProtocol, sample: Sample, attempts: Attempts) -> Scores:
        """Score one sample, with retries; raises the last RewardError when they are used up."""
        deadline = time.monotonic() + self._config.step_deadline_s
        while True:
            endpoint = self._ring.take()
            try:
                scores = self._attempt(endpoint, protocol, sample, deadline)
                self._ring.mark_live(endpoint)
                return scores
            except RewardError as error:
                is_down = self._note(endpoint, error)
                if not error.is_retryable or attempts.num_retries >= self._config.retries:
                    raise
                failure = error
            pause = self._pause(attempts.num_retries)
            if is_down and self._ring.has_live_beside(endpoint):
                pause = 0.0
            if time.monotonic() + pause >= deadline or attempts.given_up.wait(pause):
                raise failure
            attempts.num_retries += 1

    def exchange(self, request: HttpRequest, timeout_s: float) -> HttpReply:
        """One HTTP exchange within timeout_s; raises RewardConnectionError without an answer."""
        deadline = time.monotonic() + timeout_s
        headers = {"Accept": request.accept, "Accept-Encoding": "identity"}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        try:
            with self._session.request(
                "GET" if request.body is None else "POST",
                request.url,
                data=request.body,
                headers=headers,
                timeout=(min(CONNECT_TIMEOUT_S, timeout_s), timeout_s),
                auth=self._authorize if self._config.api_key else None,
                allow_redirects=False,
                stream=True,
            ) as response:
                return HttpReply(response.status_code, _read_body(response, deadline))
        except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise RewardConnectionError(
                f"{request.label}: no answer within {timeout_s:.3g} s"
            ) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise RewardConnectionError(f"{request.label}: {str(error)[:300]}") from error

    def close(self) -> None:
        """Close the kept connections."""
        self._session.close()

    def _attempt(
        self, endpoint: Endpoint, protocol: RewardProtocol, sample: Sample, deadline: float
    ) -> Scores:
        def budget() -> float:
            return max(0.05, min(self._config.request_timeout_s, deadline - time.monotonic()))

        form = endpoint.form
        if form is None:
            # A hung address must not cost a sample its full time while others could answer.
            limit = PROBE_TIMEOUT_S if self._ring.has_live_beside(endpoint) else float("inf")
            form = protocol.hello(endpoint, self.exchange, min(limit, budget()))
            endpoint.form = form
        reply = self.exchange(protocol.request(endpoint, form, sample), budget())
        check_status(reply, endpoint.label)
        return protocol.read(reply, sample)

    def _note(self, endpoint: Endpoint, error: RewardError) -> bool:
        """Mark the endpoint by what the error says about it; True if it is down."""
        is_gateway = isinstance(error, RewardStatusError) and error.status in GATEWAY_STATUSES
        if is_gateway or isinstance(error, RewardConnectionError):
            self._ring.mark_dead(endpoint)
            return True
        self._ring.mark_live(endpoint)
        return False

    def _pause(self, num_retries: int) -> float:
        backoff = min(MAX_BACKOFF_S, self._config.backoff_s * 2**num_retries)
        return backoff * self._jitter.uniform(0.5, 1.5)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # As a callable, so that requests does not put a .netrc entry in its place.
        request.headers["Authorization"] = f"Bearer {self._config.api_key}"
        return request


def check_status(reply: HttpReply, label: str) -> None:
    """Raise RewardStatusError unless the answer is a 200."""
    if reply.status != 200:
        raise RewardStatusError(
            f"{label}: HTTP {reply.status}; it began: {excerpt(reply.body)}", reply.status
        )


def _read_body(response: requests.Response, deadline: float) -> bytes:
    """The whole body, given up at the deadline even if bytes keep trickling in."""
    chunks: list[bytes] = []
    size = 0
    while chunk := response.raw.read1(1 << 16, decode_content=True):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            break
        if time.monotonic() > deadline:
            raise requests.ReadTimeout("the answer trickles in too slowly")
    return b"".join(chunks)


class WorkerPool:
    """Daemon threads that run jobs in order.

    concurrent.futures' own pool waits for its threads when the interpreter ends, so one hung
    request would hold up the exit of an aborted run.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], object]] | None]
        self._jobs = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, future: Future, job: Callable[[], object]) -> None:
        """Run job in a thread and put what it returns or raises into the future."""
        self._jobs.put((future, job))

    def close(self) -> None:
        """Let the threads end after the jobs that are queued; does not wait for them."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except Exception as error:  # handed on: whoever asks the future gets it raised
                future.set_exception(error)
            # The job holds a picture, and the next one may be long in coming.
            del entry, future, job
