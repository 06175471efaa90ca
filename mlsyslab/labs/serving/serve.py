"""A standing service for people and standard clients, until Ctrl-C; then it drains.

python -m mlsyslab.labs.serving.serve --port 8000 --max-batch 8
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mlsyslab.contract import LabError, RunError
from mlsyslab.labs.serving.config import PRESETS, Config
from mlsyslab.labs.serving.job import ServingJob
from mlsyslab.labs.serving.measure import preset, standing
from mlsyslab.labs.serving.protocol import MODEL
from mlsyslab.options import add_arguments, config_from_arguments

POLL_S = 0.1
DRAINED_WITHIN_S = 20.0


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until Ctrl-C, then let nobody in any more and return when everybody has an answer. A second Ctrl-C ends
    it at once.

    Raises RunError where the port is taken or a process fails, ConfigError where something is missing here.
    """
    job = standing(config, host=host, port=port, out=out)
    try:
        if url := address(job):
            say(f"serving {MODEL!r} at {url} (try {url}/v2/models/{MODEL}); Ctrl-C drains and ends it")
        while not job.finished:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say("draining")
        job.drain()
    job.wait(DRAINED_WITHIN_S)
    if job.status["state"] == "failed":
        raise RunError(str(job.status["error"]))
    if out is None:  # after a failure the logs are worth keeping
        shutil.rmtree(job.out, ignore_errors=True)


def address(job: ServingJob) -> str:
    """Wait until a standing service takes requests: its URL; "" where it ended before."""
    while not job.finished:
        if url := job.status.get("url"):
            return str(url)
        time.sleep(POLL_S / 10)
    return ""


def command_line(argv: list[str]) -> int:
    """0 after a drain, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m mlsyslab.labs.serving.serve", description=__doc__)
    parser.add_argument("--preset", default="worked_example", choices=sorted(PRESETS))
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    add_arguments(parser, Config)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = config_from_arguments(arguments, preset(arguments.preset))
        serve(config, host=arguments.host, port=arguments.port)
    except LabError as error:
        print(f"mlsyslab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
