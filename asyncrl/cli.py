"""The ``asyncrl`` command.

asyncrl train recipe=tiny queue.max_staleness=4     compose, check, start, supervise
asyncrl train recipe=tiny --cfg job                 print the resolved options
asyncrl resume RUN [launch.steps=200]               continue from the newest checkpoint
asyncrl export RUN DIR                              write a Hugging Face folder
asyncrl eval MODEL task=sums …                      score a held-out set greedily
asyncrl config [GROUP]                              list options: meaning, unit, default, range
asyncrl engines [--json]                            what trains here: engines, layouts, what is refused
asyncrl keys DIR NAME…                              make CURVE keys for a queue that other machines reach
asyncrl queue ls|show|verify|tail RUN               look into the queue of a run, live or dead
asyncrl queue serve DIR [name=value …]              a queue by itself, for trainers of your own
asyncrl bench NAME [--json FILE]                    measure against a floor and against peers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncrl import __version__
from asyncrl.errors import AsyncRLError
from asyncrl.launch.queue_commands import add_commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. An expected error prints one line and returns 2."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except AsyncRLError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl", description="Asynchronous reinforcement learning for language models.")
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="compose options, start a run and supervise it")
    train.add_argument("overrides", nargs="*", metavar="name=value")
    train.add_argument("--cfg", choices=["job"], help="print the resolved options and stop")
    train.set_defaults(command=_train)
    resume = commands.add_parser("resume", help="continue a run from its newest checkpoint")
    resume.add_argument("run", metavar="RUN")
    resume.add_argument("overrides", nargs="*", metavar="name=value")
    resume.set_defaults(command=_resume)
    export = commands.add_parser("export", help="write the newest checkpoint as a Hugging Face folder")
    export.add_argument("run", metavar="RUN")
    export.add_argument("folder", metavar="DIR")
    export.set_defaults(command=_export)
    evaluate = commands.add_parser("eval", help="score a model greedily on held-out prompts")
    evaluate.add_argument("model", metavar="MODEL", help="Hugging Face folder or builtin:NAME")
    evaluate.add_argument("overrides", nargs="*", metavar="name=value")
    evaluate.set_defaults(command=_eval)
    config = commands.add_parser("config", help="list every option")
    config.add_argument("group", nargs="?", default="", metavar="GROUP")
    config.set_defaults(command=_config)
    engines = commands.add_parser("engines", help="list training engines as they are here, and what is refused")
    engines.add_argument("--json", action="store_true", help="print JSON")
    engines.set_defaults(command=_engines)
    add_commands(commands)
    bench = commands.add_parser("bench", help="measure against a floor and against peers")
    bench.add_argument("name", choices=["learner", "queue"])
    bench.add_argument("--json", metavar="FILE", help="write the figures there")
    bench.add_argument("--repeats", type=int, default=3, metavar="N", help="interleaved repeats that the medians are taken of (3)")
    bench.set_defaults(command=_bench)
    return parser


def _train(options: argparse.Namespace) -> int:
    from asyncrl.config.compose import compose, to_yaml

    config = compose(options.overrides)
    if options.cfg:
        print(to_yaml(config), end="")
        return 0
    from asyncrl.launch.driver import Driver
    from asyncrl.launch.start import prepare_run

    return Driver(prepare_run(config)).run()


def _resume(options: argparse.Namespace) -> int:
    from asyncrl.config.compose import override
    from asyncrl.config.run_dir import RunDir
    from asyncrl.launch.driver import Driver
    from asyncrl.launch.start import prepare_resume

    run_dir = RunDir(options.run)
    config = override(run_dir.read_config(), options.overrides)
    return Driver(prepare_resume(run_dir, config)).run()


def _export(options: argparse.Namespace) -> int:
    from pathlib import Path

    from asyncrl.config.run_dir import RunDir
    from asyncrl.learner.export import export_checkpoint

    run_dir = RunDir(options.run)
    run_dir.read_facts()
    export_checkpoint(run_dir, Path(options.folder))
    print(f"wrote {options.folder}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from asyncrl.config.compose import compose
    from asyncrl.launch.standalone_eval import evaluate_model

    result = evaluate_model(options.model, compose(options.overrides))
    print(f"accuracy {result['accuracy']:.4f} mean_reward {result['mean_reward']:.4f} prompts {int(result['n'])}")
    return 0


def _config(options: argparse.Namespace) -> int:
    from asyncrl.config.listing import listing

    print(listing(options.group), end="")
    return 0


def _engines(options: argparse.Namespace) -> int:
    import json

    from asyncrl.learner.matrix import as_json, as_text, engine_rows

    rows = engine_rows()
    print(json.dumps(as_json(rows), indent=1) if options.json else as_text(rows).rstrip())
    return 0


def _bench(options: argparse.Namespace) -> int:
    from pathlib import Path

    from asyncrl.bench import run_bench

    return run_bench(options.name, Path(options.json) if options.json else None, max(1, options.repeats))
