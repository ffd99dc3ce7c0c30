"""The addresses of a reward service: taken in turn, a dead one left out until it answers again."""

import threading
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass
class Endpoint:
    """One service. `form` is what it speaks, None until asked (again)."""

    url: str
    label: str
    form: str | None = None
    dead_until_s: float | None = field(default=None, repr=False)


def parse_url(url: str) -> Endpoint:
    """Endpoint of an address, its url without a slash at the end. ValueError on anything odd."""
    parts = urlsplit(url.strip())
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(
            f"--reward_url: {url!r} is not an address such as http://127.0.0.1:18085 "
            "(commas between several)"
        )
    if parts.query or parts.fragment:
        raise ValueError(f"--reward_url: {url!r} must not carry a query or a fragment")
    # The label goes into messages and logs, so it leaves out a user name and password.
    host = parts.netloc.rpartition("@")[2]
    path = parts.path.rstrip("/")
    return Endpoint(f"{parts.scheme}://{parts.netloc}{path}", f"{parts.scheme}://{host}{path}")


def is_loopback(url: str) -> bool:
    """Whether the address is on this machine, where a web proxy must not be asked."""
    return urlsplit(url).hostname in LOOPBACK_HOSTS


class EndpointRing:
    """Round robin over the live endpoints, shared by the threads of a client.

    An endpoint that failed is left out for `cooldown_s`; then one caller gets it as a probe while
    the others go on without it. With none alive the one that has rested longest is handed out.
    """

    def __init__(self, urls: tuple[str, ...], cooldown_s: float) -> None:
        self._endpoints = [parse_url(url) for url in urls]
        self._cooldown_s = cooldown_s
        self._turn = 0
        self._lock = threading.Lock()

    def take(self) -> Endpoint:
        """The endpoint for the next request."""
        now = monotonic()
        with self._lock:
            for endpoint in self._endpoints:
                if endpoint.dead_until_s is not None and endpoint.dead_until_s <= now:
                    endpoint.dead_until_s = now + self._cooldown_s
                    return endpoint
            live = [endpoint for endpoint in self._endpoints if endpoint.dead_until_s is None]
            if not live:
                # Its time moves on as well, so that callers spread over all of them.
                rested = min(self._endpoints, key=lambda item: item.dead_until_s or 0.0)
                rested.dead_until_s = now + self._cooldown_s
                return rested
            self._turn += 1
            return live[self._turn % len(live)]

    def mark_dead(self, endpoint: Endpoint) -> None:
        """Leave it out for the cool-down; what it speaks is asked again afterwards."""
        with self._lock:
            endpoint.dead_until_s = monotonic() + self._cooldown_s
            endpoint.form = None

    def mark_live(self, endpoint: Endpoint) -> None:
        """It answered: it takes its turn again."""
        with self._lock:
            endpoint.dead_until_s = None

    def has_live_beside(self, endpoint: Endpoint) -> bool:
        """Whether another endpoint could take the request at once."""
        with self._lock:
            return any(
                other is not endpoint and other.dead_until_s is None for other in self._endpoints
            )
