"""``python -m asyncrl.generators RUN_DIR --name generator-0``: one generator process. Exit code 0 after an orderly end.

Reads the run directory, starts the engine, joins the publisher and samples; :mod:`asyncrl.generators.rollout` draws the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from types import FrameType

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError
from asyncrl.generators.process import configure_logging, generate
from asyncrl.queue.heap import not_for_children

log = logging.getLogger("asyncrl.generators")


def main(arguments: list[str] | None = None) -> int:
    """Runs the process and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.generators", description="One generator of a run.")
    parser.add_argument("run_dir", help="directory of the run")
    parser.add_argument("--name", required=True, help="name of this generator, unique in the run")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end_while_starting)
    not_for_children()
    configure_logging(options.name, "info")
    try:
        run_dir = RunDir(options.run_dir)
        config = run_dir.read_config()
        configure_logging(options.name, config.monitor.log_level)
        asyncio.run(generate(config, run_dir.read_facts(), options.name))
    except AsyncRLError as error:
        log.error("%s ends: %s", options.name, error)
        return 1
    except KeyboardInterrupt:
        log.info("%s was interrupted", options.name)
        return 0
    log.info("%s ended in order", options.name)
    return 0


def _end_while_starting(number: int, frame: FrameType | None) -> None:
    """Before the loop listens to signals itself: nothing is in flight yet, so the process may simply go."""
    sys.exit(0)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # all is closed; tearing down an interpreter with vLLM in it takes seconds that a stop does not have
