"""The GenEval reward service as a Flask app: the public service's wire format, and JSON.

POST / scores pictures, GET /health and GET /metrics tell about the service. Run it through
`python -m tools.geneval_service` or gunicorn (judge.md); Flask's own server is not meant for it.
"""

import json
import logging
import os
import threading
import time

from flask import Flask, Response, request
from PIL import Image
from werkzeug.exceptions import ClientDisconnected, HTTPException

from data.geneval import GenevalPrompt, parse_prompt
from tools.geneval_service.metrics import WorkerCounters
from tools.geneval_service.pipeline import DEFAULT_BATCH_SIZE, GenevalScorer
from tools.geneval_service.self_check import check_models
from tools.reward_service.exchange import MAX_BODY_BYTES, Refusal, form_of, read_request
from tools.reward_service.scoring import decode_picture
from train.reward_wire import CONTENT_TYPES, FORMATS, RewardRequest, Scores, encode_answer

DETECTORS = ("mask2former", "ssd")
METRICS_VARIABLE = "R3_REWARD_METRICS_DIR"  # set by scripts/reward/gunicorn_geneval.py

logger = logging.getLogger("faster_r3")


def create_app(
    detector: str = "mask2former",
    model_folder: str | None = None,
    clip_folder: str | None = None,
    device: str = "auto",
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> Flask:
    """The app with real models, for gunicorn: loads them, checks them, and only then serves.

    Raises ValueError for settings that cannot work, SelfCheckError for models that are wrong.
    """
    return make_app(load_scorer(detector, model_folder, clip_folder, device, batch_size))


def load_scorer(
    detector: str, model_folder: str | None, clip_folder: str | None, device: str, batch_size: int
) -> GenevalScorer:
    """The detector by name with its color judge. Raises ValueError as `create_app` does."""
    # Imported late: neither backend's packages need to be there for the other.
    if detector == "mask2former":
        from tools.geneval_service.clip_colors import ClipColorJudge
        from tools.geneval_service.local_models import choose_device
        from tools.geneval_service.mask2former import Mask2FormerDetector

        place = choose_device(device)
        judge = ClipColorJudge(clip_folder, place)
        return GenevalScorer(Mask2FormerDetector(model_folder, place), judge, batch_size)
    if detector == "ssd":
        from tools.geneval_service.hue_colors import HueColorJudge
        from tools.geneval_service.ssd import SsdDetector

        return GenevalScorer(SsdDetector(model_folder), HueColorJudge(), batch_size)
    raise ValueError(f"--detector {detector!r}, expected one of {', '.join(DETECTORS)}")


def make_app(scorer: GenevalScorer) -> Flask:
    """The app around a scorer that has passed the self-check; raises SelfCheckError if it fails."""
    check_models(scorer)
    service = _Service(scorer, WorkerCounters(os.environ.get(METRICS_VARIABLE)))
    app = Flask("geneval_service", static_folder=None)
    app.add_url_rule("/", view_func=service.score, methods=["POST"])
    app.add_url_rule("/health", view_func=service.health)
    app.add_url_rule("/metrics", view_func=service.metrics)
    app.register_error_handler(Refusal, _refuse)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _defect)
    app.after_request(service.count)
    logger.info("geneval service: %s and %s passed the self-check", *service.names)
    return app


class _Service:
    """The views, around one scorer; one request is scored at a time."""

    def __init__(self, scorer: GenevalScorer, metrics: WorkerCounters) -> None:
        self._scorer = scorer
        self._metrics = metrics
        self._lock = threading.Lock()
        self.names = (scorer.detector.name, scorer.colors.name)

    def score(self) -> Response:
        """POST /: scores of a batch of pictures."""
        body = self._read_body()
        form = form_of(request.headers.get("Content-Type"))
        asked = read_request(body, form)
        prompts = [_prompt(meta, index) for index, meta in enumerate(asked.meta_datas)]
        start = time.monotonic()
        with self._lock:
            verdicts = self._scorer.score(lambda index: _picture(asked, index), prompts)
        self._metrics.counters.count_scored(len(verdicts), time.monotonic() - start)
        # The public service does not compute the plain reward where only the strict is asked for.
        scores = [
            Scores(v.score, 0.0 if asked.only_strict else v.reward, v.strict_reward)
            for v in verdicts
        ]
        tags = [prompt.tag for prompt in prompts]
        return Response(encode_answer(scores, tags, form), content_type=CONTENT_TYPES[form])

    def health(self) -> Response:
        """GET /health: that the self-check was passed, by which models, and the formats taken."""
        detector, colors = self.names
        record = {"status": "ok", "service": "GenEval", "detector": detector, "colors": colors}
        return _json(200, json.dumps({**record, "formats": list(FORMATS), "pid": os.getpid()}))

    def metrics(self) -> Response:
        """GET /metrics: counters of all workers in the Prometheus text format."""
        return Response(self._metrics.text(), content_type="text/plain; version=0.0.4")

    def count(self, response: Response) -> Response:
        """Count every answer."""
        self._metrics.counters.count_answer(response.status_code)
        self._metrics.save()
        return response

    def _read_body(self) -> bytes:
        length = request.content_length
        if length is None or "Transfer-Encoding" in request.headers:
            raise Refusal(411, "a request needs a Content-Length", is_body_read=False)
        if length > MAX_BODY_BYTES:
            raise Refusal(413, f"more than {MAX_BODY_BYTES} bytes", is_body_read=False)
        try:
            return request.get_data(cache=False)
        except (ClientDisconnected, OSError) as error:
            with self._metrics.counters.lock:
                self._metrics.counters.num_hang_ups += 1
            raise Refusal(400, f"the body did not come whole ({length} bytes)", False) from error


def _prompt(metadata: dict, index: int) -> GenevalPrompt:
    try:
        return parse_prompt(metadata, f"image {index}: metadata")
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    except RecursionError as error:
        raise Refusal(400, f"image {index}: metadata are nested too deeply") from error


def _picture(asked: RewardRequest, index: int) -> Image.Image:
    try:
        return decode_picture(asked.images[index])
    except ValueError as error:
        raise Refusal(400, f"image {index}: {error}") from error


def _json(status: int, body: str | bytes) -> Response:
    return Response(body, status=status, content_type=CONTENT_TYPES["json"])


def _refuse(refusal: Refusal) -> Response:
    return _json(refusal.status, refusal.body())


def _http_error(error: HTTPException) -> Response:
    """What Flask itself refuses: unknown paths and methods."""
    return _json(error.code or 500, Refusal(error.code or 500, str(error)).body())


def _defect(error: Exception) -> Response:
    """The last line of defence: one request fails with its reason, the service lives."""
    logger.exception("scoring failed")
    return _json(500, Refusal(500, f"{type(error).__name__}: {error}").body())
