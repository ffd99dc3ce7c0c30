"""What every reward service here has in common: limits, refusals, counters, reading a request."""

import json
import threading
import time
from dataclasses import dataclass, field

from train.reward_wire import CONTENT_TYPES, RewardRequest, decode_request

MAX_BODY_BYTES = 64 << 20
MAX_IMAGES = 256
READ_TIMEOUT_S = 30.0
MAX_REASON_CHARS = 600  # a refusal quotes what it refuses, which may be the whole request


class Refusal(Exception):
    """A request that is answered with a 4xx status; the connection closes if its body is unread."""

    def __init__(self, status: int, message: str, is_body_read: bool = True) -> None:
        if len(message) > MAX_REASON_CHARS:
            message = message[:MAX_REASON_CHARS] + " ..."
        super().__init__(message)
        self.status = status
        self.is_body_read = is_body_read

    def body(self) -> bytes:
        """The answer's JSON."""
        return json.dumps({"error": str(self)}).encode("utf-8")


@dataclass
class Counters:
    """What /metrics shows."""

    started: float = field(default_factory=time.monotonic)
    by_status: dict[int, int] = field(default_factory=dict)
    num_images: int = 0
    scoring_s: float = 0.0
    num_hang_ups: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_answer(self, status: int) -> None:
        """Count one answer, whatever it says."""
        with self.lock:
            self.by_status[status] = self.by_status.get(status, 0) + 1

    def count_scored(self, num_images: int, elapsed_s: float) -> None:
        """Count pictures that were scored and the time that took."""
        with self.lock:
            self.num_images += num_images
            self.scoring_s += elapsed_s

    def text(self) -> str:
        """The counters in the Prometheus text format."""
        with self.lock:
            lines = [
                f'reward_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.by_status.items())
            ]
            lines.append(f"reward_images_total {self.num_images}")
            lines.append(f"reward_scoring_seconds_total {self.scoring_s:.6f}")
            lines.append(f"reward_client_hang_ups_total {self.num_hang_ups}")
            lines.append(f"reward_uptime_seconds {time.monotonic() - self.started:.3f}")
        return "\n".join(lines) + "\n"


def form_of(content_type: str | None) -> str:
    """The form of a body by its type; the public client sends a pickle without any."""
    kind = (content_type or CONTENT_TYPES["pickle"]).partition(";")[0].strip().lower()
    for form, known in CONTENT_TYPES.items():
        if kind == known:
            return form
    allowed = ", ".join(CONTENT_TYPES.values())
    raise Refusal(415, f"content type {kind[:80]!r} is not one of {allowed}")


def read_request(body: bytes, form: str) -> RewardRequest:
    """Reads a request of at most 256 images; raises Refusal that says what is wrong with it."""
    try:
        request = decode_request(body, form)
    except ValueError as error:
        raise Refusal(400, f"bad request: {error}") from error
    if len(request.images) > MAX_IMAGES:
        raise Refusal(413, f"{len(request.images)} images, at most {MAX_IMAGES}")
    return request
