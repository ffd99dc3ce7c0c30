"""The GenEval wire format as a reward protocol: JSON where it is offered, else pickle."""

from data import safe_json
from train.reward_endpoints import Endpoint
from train.reward_http import (
    GATEWAY_STATUSES,
    Exchange,
    HttpReply,
    HttpRequest,
    Sample,
    check_status,
)
from train.reward_wire import CONTENT_TYPES, RewardRequest, Scores, decode_answer, encode_request


class GenevalProtocol:
    """The GenEval wire format: JSON with services that offer it, else pickle as the public one."""

    def __init__(self, only_strict: bool) -> None:
        self._only_strict = only_strict

    def hello(self, endpoint: Endpoint, exchange: Exchange, timeout_s: float) -> str:
        """Ask GET /health which formats it takes; any answer but a list with json means pickle."""
        request = HttpRequest(endpoint.url + "/health", endpoint.label, accept="application/json")
        reply = exchange(request, timeout_s)
        if reply.status in GATEWAY_STATUSES:
            check_status(reply, endpoint.label)
        return "json" if reply.status == 200 and "json" in _formats(reply.body) else "pickle"

    def check(self, metadata: dict) -> None:
        """Prompts are validated when their file is read; the service judges the rest."""

    def request(self, endpoint: Endpoint, form: str, sample: Sample) -> HttpRequest:
        """POST to the endpoint's root, one picture; requests adds the `/` to a bare address."""
        record = RewardRequest([sample.jpeg], [sample.metadata], self._only_strict)
        return HttpRequest(
            url=endpoint.url,
            label=endpoint.label,
            body=encode_request(record, form),
            content_type=CONTENT_TYPES[form],
        )

    def read(self, reply: HttpReply, sample: Sample) -> Scores:
        """The checked scores of the one picture."""
        del sample
        return decode_answer(reply.body, num_images=1)[0]


def _formats(body: bytes) -> list:
    try:
        record = safe_json.loads(body)
    except ValueError:
        return []
    formats = record.get("formats") if isinstance(record, dict) else None
    return formats if isinstance(formats, list) else []
