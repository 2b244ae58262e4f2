"""Groups a second through the whole state machine with metadata alone: tickets, puts, leases, commits, real processes.

``python -m benchmarks.queue_rates RUN_DIR FIRST NUMBER`` plays that many producers, each with a socket of its own: it asks for tickets,
puts them all with a payload of 64 bytes, and begins anew, until its input ends. The caller (:func:`rate`) is the learner and commits.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError
from asyncrl.queue.connection import dialogue_for, open_socket
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.messages import Hello, Outcomes, Put, PutItem, Refused, RequestBody, Role, Ticket, TicketRequest, Tickets
from asyncrl.queue.payload import checksum
from asyncrl.trajectory import GroupMeta
from benchmarks.cpu import process_cpu_s
from benchmarks.figures import Figure
from benchmarks.queue_carrier import broker, new_run

__all__ = ["DURABILITIES", "PRODUCERS", "figures", "rate"]

PRODUCERS = (10, 100, 1000)
DURABILITIES = ("memory", "written")
GROUPS_PER_STEP = 128
TICKETS = 4
CLIENTS = 2
SIBLINGS = 8
WAIT_S = 5.0
WARM_STEPS = 24
"""By then producers have used up their credit, and go at the pace of the learner."""
PAYLOAD = bytes(64)
CHECKSUM = checksum([PAYLOAD])


def figures(repeats: int = 1, seconds: float = 4.0, producers: Sequence[int] = PRODUCERS) -> list[Figure]:
    """Groups a second of wall time, and CPU time of the broker for a group, by durability and number of producers."""
    found = []
    for durability in DURABILITIES:
        for number in producers:
            name = f"{number} producers, {durability}"
            try:
                measured = [rate(number, durability, seconds) for _ in range(repeats)]
            except (DataError, subprocess.SubprocessError) as error:
                found.append(Figure(name=name, value=None, unit="groups/s", note=str(error)))
                continue
            found.append(Figure(name=name, value=statistics.median(one[0] for one in measured), unit="groups/s"))
            found.append(Figure(name=name, value=statistics.median(one[1] for one in measured) * 1e6, unit="CPU us/group in the broker"))
    return found


def rate(num_producers: int, durability: str, seconds: float) -> tuple[float, float]:
    """Groups a second and CPU seconds of the broker a group.

    Raises:
        DataError: no batch came.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        options = {"payload": "inline", "durability": durability}
        run_dir = new_run(Path(folder), GROUPS_PER_STEP, options)
        with broker(run_dir) as process, Consumer.connect(run_dir.read_config(), run_dir.read_facts(), "learner-0") as consumer:
            clients = _clients(run_dir, num_producers)
            try:
                return _measure(consumer, process.pid, seconds)
            finally:
                for client in clients:
                    client.kill()
                    client.wait(timeout=10)


def _clients(run_dir: RunDir, num_producers: int) -> list[subprocess.Popen[bytes]]:
    share = num_producers // CLIENTS
    command = [sys.executable, "-m", "benchmarks.queue_rates", str(run_dir.path)]
    return [subprocess.Popen([*command, str(n * share), str(share)], stdin=subprocess.PIPE) for n in range(CLIENTS)]


def _measure(consumer: Consumer, process: int, seconds: float) -> tuple[float, float]:
    step, began_s, began_cpu_s, began_step = 0, 0.0, 0.0, 0
    while True:
        if not consumer.lease(step, 30.0).groups:
            raise DataError("no batch came within 30 s")
        consumer.commit(step)
        step += 1
        if step == WARM_STEPS:
            began_s, began_cpu_s, began_step = time.monotonic(), process_cpu_s(process), step
        elif step > WARM_STEPS and time.monotonic() - began_s >= seconds:
            groups = (step - began_step) * GROUPS_PER_STEP
            return groups / (time.monotonic() - began_s), (process_cpu_s(process) - began_cpu_s) / groups


class _Producer:
    """One producer's socket and what it says next."""

    def __init__(self, context: zmq.Context[Any], run_dir: RunDir, number: int) -> None:
        config, facts = run_dir.read_config(), run_dir.read_facts()
        self._dialogue = dialogue_for(config, facts, f"generator-{number}", 0)
        self.socket = context.socket(zmq.DEALER)
        open_socket(self.socket, self._dialogue)
        self._say(Hello(role=Role.PRODUCER))

    def hear(self) -> None:
        """Takes one reply and sends the next request."""
        body = self._dialogue.reply(self.socket.recv_multipart())[1]
        if isinstance(body, Refused):
            raise DataError(f"nothing is refused; met {body.message}")
        if isinstance(body, Outcomes) and any(outcome != "accepted" for outcome in body.outcomes):
            raise DataError(f"every group is accepted; met {body.outcomes}")
        if isinstance(body, Tickets) and body.tickets:
            self._say(Put(groups=tuple(map(_item, body.tickets))), [PAYLOAD] * len(body.tickets))
        else:
            self._say(TicketRequest(version=0, max_tickets=TICKETS, wait_s=WAIT_S))

    def _say(self, body: RequestBody, payloads: Sequence[bytes] = ()) -> None:
        sequence, frames = self._dialogue.request(body, payloads)
        self.socket.send_multipart(frames)
        self._dialogue.sent(sequence)


def _item(ticket: Ticket) -> PutItem:
    lengths = (100,) * SIBLINGS
    meta = GroupMeta(
        group_id=ticket.group_id,
        ticket=ticket.ticket,
        attempt=ticket.attempt,
        incarnation=0,
        generator="generator-0",
        lengths_N=lengths,
        prompt_lengths_N=(50,) * SIBLINGS,
        sampled_tokens_N=(50,) * SIBLINGS,
        rewards_N=tuple(float(n % 2) for n in range(SIBLINGS)),
        tokens_by_version={0: 50 * SIBLINGS},
        payload_bytes=len(PAYLOAD),
    )
    return PutItem(meta=meta, checksum=CHECKSUM, lengths=(len(PAYLOAD),))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("number", type=int)
    options = parser.parse_args()
    context, poller = zmq.Context(), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, options.number + 16)
    producers = {}
    for number in range(options.first, options.first + options.number):
        producer = _Producer(context, RunDir(options.run_dir), number)
        producers[producer.socket] = producer
        poller.register(producer.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            if socket not in producers:
                context.destroy(linger=0)
                return
            producers[socket].hear()


if __name__ == "__main__":
    main()
