"""Start the embedded reward service: python -m tools.reward_service [--port 18085]."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from tools.reward_service.server import ABOUT, RewardServer


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tools.reward_service", description=ABOUT)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=18085, help="port, 0 for a free one")
    parser.add_argument("--port-file", type=Path, help="write the port here once listening")
    options = parser.parse_args(argv)
    try:
        server = RewardServer(options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"--port {options.port} on {options.host}: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        # shutdown() waits for the loop that the handler interrupts, hence the thread.
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    if options.port_file is not None:
        _write_whole(options.port_file, f"{server.server_port}\n")
    print(f"reward service on http://{options.host}:{server.server_port} ({ABOUT})", flush=True)
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    return 0


def _write_whole(path: Path, text: str) -> None:
    """Whoever waits for the file to appear must not read half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
