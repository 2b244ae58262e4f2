"""``python -m asyncrl.generators.evaluate --model DIR --run-config FILE --out FILE``: greedy scores on the held-out prompts.

The file holds ``accuracy`` (share of all prompts with a reward of at least 1), ``mean_reward`` (over those that were scored), ``n``,
and ``prompts``: id, reward (null: not scored) and response or reason of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.run_dir import write_atomic
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.generators.engine import GeneratorEngine, SampleRequest, new_engine
from asyncrl.generators.groups import UnusablePromptError, prompt_ids
from asyncrl.generators.process import configure_logging, stamp_version
from asyncrl.generators.scoring import Removed, Scorer
from asyncrl.tasks import Prompt, new_eval_set, new_reward

__all__ = ["evaluate", "summarize"]

log = logging.getLogger("asyncrl.generators.evaluate")
FULL_REWARD = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One held-out prompt; ``reward`` None: it could not be scored, ``detail`` says why, else the response."""

    prompt_id: str
    reward: float | None
    detail: str


async def evaluate(config: Config, engine: GeneratorEngine) -> list[Score]:
    """Scores every held-out prompt greedily with the weights that the engine was started with."""
    prompts, scorer = new_eval_set(config), Scorer(new_reward(config), config.task.reward_timeout_s)
    slots = asyncio.Semaphore(config.generator.max_num_seqs)

    async def one(index: int, prompt: Prompt) -> Score:
        async with slots:
            return await _score(config, engine, scorer, index, prompt)

    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))


async def _score(config: Config, engine: GeneratorEngine, scorer: Scorer, index: int, prompt: Prompt) -> Score:
    generator = config.generator
    try:
        ids = prompt_ids(engine, prompt, generator.max_new_tokens)
    except UnusablePromptError as error:
        return Score(prompt_id=prompt.prompt_id, reward=None, detail=str(error))
    request = SampleRequest(
        request_id=f"eval-{index}",
        prompt_ids=ids,
        temperature=0.0,
        max_new_tokens=generator.max_new_tokens,
        stop=tuple(generator.stop),
        seed=0,
    )
    result = await engine.sample(request)
    scored = await scorer.score(prompt, result.text)
    if isinstance(scored, Removed):
        return Score(prompt_id=prompt.prompt_id, reward=None, detail=f"{scored.reason}: {scored.detail}")
    return Score(prompt_id=prompt.prompt_id, reward=scored.reward, detail=result.text)


def summarize(scores: list[Score]) -> dict[str, object]:
    """What is written to the file.

    Raises:
        DataError: there are no prompts.

    Example:
        >>> summarize([Score(prompt_id="a", reward=1.0, detail=""), Score(prompt_id="b", reward=0.5, detail="")])["accuracy"]
        0.5
    """
    if not scores:
        raise DataError("there are no held-out prompts to score: set task.eval_size")
    rewards = [score.reward for score in scores if score.reward is not None]
    return {
        "accuracy": sum(reward >= FULL_REWARD for reward in rewards) / len(scores),
        "mean_reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "n": len(scores),
        "prompts": [{"prompt_id": s.prompt_id, "reward": s.reward, "detail": s.detail} for s in scores],
    }


async def _run(config: Config, model_dir: str, out: Path) -> None:
    engine = new_engine(config, model_dir)
    stamp_version(engine)
    try:
        await engine.start()
        summary = summarize(await evaluate(config, engine))
    finally:
        await engine.close()
    write_atomic(out, json.dumps(summary))
    log.info("accuracy %.4f, mean reward %.4f over %d prompts", summary["accuracy"], summary["mean_reward"], summary["n"])


def main(arguments: list[str] | None = None) -> int:
    """Runs the process and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.generators.evaluate", description="Greedy scores of one model.")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--run-config", required=True, type=Path, help="resolved options, as in a run directory's config.json")
    parser.add_argument("--out", required=True, type=Path, help="file that gets the scores")
    options = parser.parse_args(arguments)
    configure_logging("evaluate", "info")
    try:
        config = Config.model_validate_json(options.run_config.read_text())
        asyncio.run(_run(config, options.model, options.out))
    except (AsyncRLError, OSError) as error:
        log.error("evaluation ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
