"""A producer and a trainer of your own, over a queue that ``asyncrl queue serve`` runs. No model, no GPU: a table of 10 x 10 logits.

    asyncrl queue serve /tmp/q task.name=none algorithm.groups_per_step=8 algorithm.no_signal=keep &
    python examples/own_trainer.py /tmp/q --steps 20

The task: answer ticket t with token t % 10. The producer samples eight answers a ticket; the trainer takes policy-gradient steps.
Kill this process or the queue and start it again: no group is lost or trained twice. The two functions may as well run in two
processes, if you hand the weights over by some means of your own.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.queue import EMPTY, Consumer, Frontier, Producer, Ticket, Trajectory, TrajectoryGroup, VersionSpan


class Policy:
    """Logits [prompt, answer] and the number of training steps in them, replaced together."""

    def __init__(self, file: Path) -> None:
        self.file = file
        saved = json.loads(file.read_text()) if file.exists() else None
        self.frontier = msgspec.convert(saved["frontier"], Frontier) if saved else EMPTY  # without it a queue that is ahead stays ahead
        self.current = (self.frontier.steps, np.array(saved["logits"])) if saved else (0, np.zeros((10, 10)))

    def save(self, logits: np.ndarray, frontier: Frontier) -> None:
        """Weights and frontier in one rename: they agree after a crash, and the queue is taken back to them."""
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"logits": logits.tolist(), "frontier": msgspec.to_builtins(frontier)}))
        os.replace(part, self.file)
        self.current = (frontier.steps, logits)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def sample(ticket: Ticket, version: int, logits: np.ndarray, rng: np.random.Generator) -> TrajectoryGroup:
    """Eight answers, each with the log-probability that it was sampled with. Token ids: 10 + prompt, then the answer."""
    prompt = ticket.ticket % 10
    chances = softmax(logits[prompt])
    same = {"group_id": ticket.group_id, "ticket": ticket.ticket, "attempt": ticket.attempt, "prompt_id": ticket.prompt_id, "sample": 0}
    same |= {"seed": ticket.seed, "incarnation": 0, "version_spans": [VersionSpan(1, version)], "generator": "sampler-0", "engine": "table"}
    same |= {"finish_reason": "length", "temperature": 1.0, "loss_mask": [False, True], "dispatched_s": 0.0, "finished_s": 0.0}
    rows = [
        {"input_ids": [10 + prompt, answer], "behavior_logprobs": [0.0, np.log(chances[answer])], "reward": float(answer == prompt)}
        for answer in rng.choice(10, size=8, p=chances)
    ]
    return TrajectoryGroup(trajectories=tuple(Trajectory.checked(**same, **row, sibling=i) for i, row in enumerate(rows)))


async def produce(run_dir: Path, policy: Policy) -> None:
    """Asks for tickets by the version that it samples with, and answers them; ends when no more will come."""
    producer, rng = await Producer.join(run_dir, "sampler-0"), np.random.default_rng()
    stopping = False
    while not stopping:
        version, logits = policy.current
        await producer.heartbeat(version, in_flight={}, sampled_tokens=0)
        tickets = await producer.tickets(version, n=4, wait_s=0.2)
        await producer.put([sample(ticket, version, logits, rng) for ticket in tickets.tickets])
        stopping = tickets.stopping
    await producer.close()


def train(run_dir: Path, policy: Policy, steps: int) -> None:
    """Leases the batch of a step, trains on it, commits, saves."""
    with Consumer.join(run_dir, "trainer-0", restore=policy.frontier) as consumer:
        while (step := policy.current[0]) < steps:
            lease = consumer.lease(step, wait_s=1.0)
            groups, damaged = consumer.fetch(lease.groups)
            if damaged:  # sampled again
                consumer.return_(step, damaged)
            elif groups:
                logits = policy.current[1].copy()
                for rows in (group.trajectories for group in groups.values()):
                    mean = sum(row.reward for row in rows) / len(rows)
                    for prompt, answer, reward in ((row.input_ids[0] - 10, row.input_ids[1], row.reward) for row in rows):
                        logits[prompt] += 0.5 * (reward - mean) * (np.eye(10)[answer] - softmax(policy.current[1][prompt]))
                policy.save(logits, consumer.commit(step).frontier)
                consumer.checkpointed(step + 1)  # no older one is kept: its payload can go
        score = np.mean([softmax(row)[prompt] for prompt, row in enumerate(policy.current[1])])
        print(f"step {steps}: the right answer has probability {score:.2f}; {consumer.status().trained} groups trained")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    policy = Policy(options.run_dir / "policy.json")
    producing = asyncio.create_task(produce(options.run_dir, policy))
    try:
        await asyncio.to_thread(train, options.run_dir, policy, options.steps)
    finally:
        if producing.done():
            producing.result()  # raises what ended it, which is why training got no more groups
        producing.cancel()


if __name__ == "__main__":
    asyncio.run(main())
