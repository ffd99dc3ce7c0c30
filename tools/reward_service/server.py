"""HTTP side of the embedded reward service: the public service's wire format, and JSON."""

import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tools.reward_service.exchange import (
    MAX_BODY_BYTES,
    READ_TIMEOUT_S,
    Counters,
    Refusal,
    form_of,
    read_request,
)
from tools.reward_service.scoring import decode_picture, score_picture, tag_of
from train.reward_wire import CONTENT_TYPES, FORMATS, encode_answer

# Pictures are decoded in this many requests at a time, so that a burst does not fill the memory.
MAX_SCORING = 4
ABOUT = "toy service: judges the colours that a prompt asks for, nothing else"

logger = logging.getLogger("faster_r3")


class RewardServer(ThreadingHTTPServer):
    """One thread a connection. Port 0 takes a free one; `server_port` tells which."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host: str, port: int) -> None:
        self.counters = Counters()
        self.scoring_slots = threading.BoundedSemaphore(MAX_SCORING)
        super().__init__((host, port), RewardHandler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is counted; anything else is logged. The server goes on."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            logger.exception("connection from %s failed", client_address)
            return
        with self.counters.lock:
            self.counters.num_hang_ups += 1


class RewardHandler(BaseHTTPRequestHandler):
    """POST / scores pictures; GET /health and GET /metrics tell about the service."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version = "faster-r3-colours"
    sys_version = ""
    timeout = READ_TIMEOUT_S
    # Headers and body go out as one packet at once; without this a kept connection waits 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            record = {"status": "ok", "service": ABOUT, "formats": list(FORMATS)}
            self._answer(200, "application/json", json.dumps(record).encode("utf-8"))
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", self.server.counters.text().encode())
        elif path == "/":
            self._refuse(Refusal(405, "POST pictures here; GET /health tells about the service"))
        else:
            self._refuse(Refusal(404, f"nothing at {path[:80]!r}"))

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path.partition("?")[0] != "/":
                raise Refusal(404, "pictures are scored at /")
            form = form_of(self.headers.get("Content-Type"))
            answer = self._score(body, form)
        except Refusal as refusal:
            self._refuse(refusal)
        except Exception as error:  # the last line of defence: one request fails, the service lives
            logger.exception("scoring failed")
            self._refuse(Refusal(500, f"{type(error).__name__}: {error}"))
        else:
            self._answer(200, CONTENT_TYPES[form], answer)

    def log_message(self, template: str, *args: object) -> None:
        """Requests are counted, not printed."""
        logger.debug(template, *args)

    def _read_body(self) -> bytes:
        text = self.headers.get("Content-Length")
        if text is None or "Transfer-Encoding" in self.headers:
            raise Refusal(411, "a request needs a Content-Length", is_body_read=False)
        if not (text.isascii() and text.isdigit()):
            raise Refusal(400, "bad Content-Length", is_body_read=False)
        length = int(text[:20])
        if length > MAX_BODY_BYTES:
            raise Refusal(413, f"more than {MAX_BODY_BYTES} bytes", is_body_read=False)
        try:
            body = self.rfile.read(length)
        except TimeoutError as error:
            raise Refusal(408, "the body did not come", is_body_read=False) from error
        if len(body) < length:
            raise Refusal(400, f"body ends after {len(body)} of {length} bytes", False)
        return body

    def _score(self, body: bytes, form: str) -> bytes:
        request = read_request(body, form)
        scores, tags = [], []
        start = time.monotonic()
        with self.server.scoring_slots:
            for index, (data, metadata) in enumerate(
                zip(request.images, request.meta_datas, strict=True)
            ):
                try:
                    tags.append(tag_of(metadata))
                    scores.append(score_picture(decode_picture(data), metadata))
                except ValueError as error:
                    raise Refusal(400, f"image {index}: {error}") from error
        self.server.counters.count_scored(len(scores), time.monotonic() - start)
        return encode_answer(scores, tags, form)

    def _refuse(self, refusal: Refusal) -> None:
        if not refusal.is_body_read:
            self.close_connection = True
        self._answer(refusal.status, "application/json", refusal.body())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.server.counters.count_answer(status)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
