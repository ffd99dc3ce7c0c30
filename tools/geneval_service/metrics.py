"""Counters of one worker, and their sum over all workers of the service.

gunicorn hands a request for /metrics to any worker. So every worker keeps its counters in a file of
its own, in a folder that the configuration makes, and whichever is asked adds the files up. A
worker that ended leaves its file, so that no total ever falls.
"""

import json
import os
from pathlib import Path

from tools.reward_service.exchange import Counters


class WorkerCounters:
    """This worker's `counters`; without a folder it is the only worker."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.counters = Counters()
        self._folder = None if folder is None else Path(folder)

    def save(self) -> None:
        """Write this worker's counters where the others find them."""
        if self._folder is None:
            return
        with self.counters.lock:
            record = {
                "by_status": list(self.counters.by_status.items()),
                "num_images": self.counters.num_images,
                "scoring_s": self.counters.scoring_s,
                "num_hang_ups": self.counters.num_hang_ups,
            }
            # Whoever adds up must not read half a file.
            part = self._folder / f"{os.getpid()}.part"
            part.write_text(json.dumps(record), encoding="ascii")
            part.replace(part.with_suffix(".json"))

    def text(self) -> str:
        """All workers' counters in the Prometheus text format; the uptime is this worker's."""
        if self._folder is None:
            return self.counters.text()
        self.save()
        total = Counters(started=self.counters.started)
        for path in sorted(self._folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="ascii"))
            for status, count in record["by_status"]:
                total.by_status[status] = total.by_status.get(status, 0) + count
            total.count_scored(record["num_images"], record["scoring_s"])
            total.num_hang_ups += record["num_hang_ups"]
        return total.text()
