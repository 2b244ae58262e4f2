"""The driver: starts a prepared run, watches it, ends it in order.

    guardian (Ray head) → generators, learner ranks, queue → watch → stop: generators, learner, queue → guardian

Consumes launcher states, queue status and metrics; produces the live view and summary.json. It waits for the
learner to finish; a generator that dies is started again, any other death ends the run with a message that
names it. No wait is without a deadline: a run whose steps stop for ``launch.stall_timeout_s`` ends, and says
which gate was shut.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError, PeerTimeout, ProcessDied, StopRequested
from asyncrl.launch import processes
from asyncrl.launch.evaluation import evaluate_ends, finish
from asyncrl.launch.head import Head
from asyncrl.launch.summary import write_summary
from asyncrl.launch.supervisor import Exit, ProcessSpec, Supervisor
from asyncrl.launch.watch import Watch
from asyncrl.monitor.live import LiveView
from asyncrl.queue.client import Observer
from asyncrl.queue.messages import QueueStatus

__all__ = ["Driver"]

POLL_S = 0.25
QUEUE_START_S = 60.0
QUEUE_TRY_S = 5.0
QUEUE_STOP_S = 1.0
QUEUE_ANSWER_S = 2.0
"""A broker that does not answer may be dead, and nobody but the driver, who asks, can start it again."""
R = TypeVar("R")


class Driver:
    """Runs one incarnation of a run to its end.

    Args:
        run_dir: prepared by :mod:`asyncrl.launch.start`.

    Example:
        ``Driver(prepare_run(compose(["recipe=tiny"]))).run()`` returns the exit code.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._config = run_dir.read_config()
        self._facts = run_dir.read_facts()
        self._view = LiveView(self._config.monitor.live, self._config.launch.steps)
        self._signal = 0
        self._restarts: Counter[str] = Counter()
        self._status: QueueStatus | None = None
        self._started_s = time.monotonic()
        self._specs: dict[str, ProcessSpec] = {}
        self._stop_failures: list[str] = []

    def run(self) -> int:
        """Starts, watches, stops. Returns 0 when the run finished, 128 + signal when asked to stop, 1 when it failed."""
        self._listen()
        self._view.say(f"run directory {self._run_dir.path}")
        evaluations: dict[str, float] = {}
        try:
            with Head(self._run_dir, self._facts.run_id, self._asked_to_stop) as head:
                self._listen()  # joining Ray put its own handler of SIGTERM in place
                supervisor = Supervisor(head.ray, self._facts.run_id, self._run_dir.logs, self._config.launch.stop_grace_s)
                try:
                    outcome, message = self._supervised(supervisor, head)
                    if outcome == "finished" and self._config.launch.export:
                        self._export(supervisor)
                        evaluations = self._evaluate(supervisor)
                finally:
                    supervisor.kill_all()
        except StopRequested as error:
            outcome, message = "stopped", str(error)
        except AsyncRLError as error:
            outcome, message = "failed", str(error)
        return self._finish(outcome, message, evaluations)

    def _supervised(self, supervisor: Supervisor, head: Head) -> tuple[str, str]:
        observer: Observer | None = None
        try:
            # the slowest to come up first; each waits for the others by itself
            specs = processes.generators(self._run_dir, self._config, self._facts)
            specs += processes.learners(self._run_dir, self._config, self._facts)
            for spec in [*specs, *processes.brokers(self._run_dir, self._config)]:
                self._specs[spec.name] = spec
                supervisor.start(spec)
            self._view.update(f"starting {', '.join(self._specs)}", None, None)
            observer = self._connect(supervisor)
            return self._watch(supervisor, observer, head)
        except ProcessDied as error:
            return "failed", str(error)
        finally:
            self._stop(supervisor, observer)
            if observer is not None:
                observer.close()

    def _connect(self, supervisor: Supervisor) -> Observer:
        """The queue's client; a process that died while the queue came up is named at once."""
        end = time.monotonic() + QUEUE_START_S
        while True:
            try:
                return Observer.connect(self._config, self._facts, "driver", QUEUE_TRY_S, QUEUE_ANSWER_S)
            except PeerTimeout:
                for exit_ in sorted(supervisor.poll(), key=_cause_first):
                    raise ProcessDied(_death(exit_), process=exit_.name) from None
                if self._signal:
                    raise StopRequested("asked to stop while the queue came up") from None
                if time.monotonic() > end:
                    raise

    def _watch(self, supervisor: Supervisor, observer: Observer, head: Head) -> tuple[str, str]:
        watch = Watch(self._run_dir, self._config, self._started_s)
        while not self._signal:
            if not head.alive():
                raise ProcessDied("the guardian died, and the Ray head with it", process="guardian")
            for exit_ in sorted(supervisor.poll(), key=_cause_first):
                if exit_.name.startswith("learner") and exit_.code == 0:
                    continue
                self._on_exit(exit_, supervisor, observer)
            self._status = watch.observe(observer, supervisor) or self._status
            self._view.update("starting", watch.metrics, self._status)
            if not any(name.startswith("learner") for name in supervisor.running):
                return watch.ending()
            over = watch.over(self._status)
            if over:
                return over
            time.sleep(POLL_S)
        return "stopped", f"asked to stop by {signal.Signals(self._signal).name}"

    def _on_exit(self, exit_: Exit, supervisor: Supervisor, observer: Observer) -> None:
        text = _death(exit_)
        broker = processes.is_broker(exit_.name)
        if not (exit_.name.startswith("generator") or (broker and self._config.queue.durability != "memory")):
            raise ProcessDied(text, process=exit_.name)
        self._restarts[exit_.name] += 1
        if self._restarts[exit_.name] > self._config.launch.max_restarts:
            raise ProcessDied(f"{text}; it was restarted {self._config.launch.max_restarts} times", process=exit_.name)
        if broker:
            self._view.say(f"{text}; starting it again over its log")
        else:
            self._view.say(f"{text}; starting it again, its tickets are issued again")
            self._tell_of_death(exit_.name, observer)
        supervisor.start(self._specs[exit_.name])

    def _tell_of_death(self, name: str, observer: Observer) -> None:
        try:
            observer.producer_gone(name)
        except PeerTimeout as error:  # a broker may be dead too, and nobody but the driver starts it again
            self._view.say(f"the queue was not told of it, and will see by its silence or its next hello: {error}")

    def _stop(self, supervisor: Supervisor, observer: Observer | None) -> None:
        """No more tickets; generators end and the learner checkpoints; the queue last."""
        brokers = [name for name in supervisor.running if processes.is_broker(name)]
        if observer is None or not brokers:
            return
        self._ask(observer.stop)
        workers = [name for name in supervisor.running if not processes.is_broker(name)]
        supervisor.terminate(workers)
        exits = supervisor.wait(workers, self._config.launch.stop_grace_s)
        self._stop_failures = [_death(exit_) for exit_ in exits if exit_.name.startswith("learner") and exit_.code != 0]
        self._status = self._ask(observer.status) or self._status
        late = [name for name in sorted(supervisor.running) if name.startswith("learner")]
        if not self._saved_last_step():  # otherwise all that was killed was the end of a process
            self._stop_failures += [f"{name} did not end within launch.stop_grace_s and was killed" for name in late]
        self._ask(lambda: observer.stop(exit=True))
        supervisor.wait(brokers, QUEUE_STOP_S)
        supervisor.kill_all()

    def _saved_last_step(self) -> bool:
        saved = self._run_dir.latest_checkpoint()
        return saved is not None and self._status is not None and saved.name == f"step-{self._status.step:06d}"

    def _ask(self, request: Callable[[], R]) -> R | None:
        """What a queue that is being stopped answers; its silence costs nobody else the stop."""
        end = time.monotonic() + self._config.queue.dead_after_s
        while True:
            try:
                return request()
            except AsyncRLError as error:
                if not isinstance(error, PeerTimeout) or time.monotonic() >= end:
                    self._view.say(f"the queue did not answer at the stop: {error}")
                    return None

    def _export(self, supervisor: Supervisor) -> None:
        """The learner exports when it ends by itself; a run that was ended by its time limit is exported here."""
        if (self._run_dir.export / "config.json").exists() or self._run_dir.latest_checkpoint() is None:
            return
        self._view.update("exporting the newest checkpoint", None, None)
        finish(supervisor, processes.export(self._run_dir, self._config), self._asked_to_stop)

    def _evaluate(self, supervisor: Supervisor) -> dict[str, float]:
        if not self._config.task.eval_size or not (self._run_dir.export / "config.json").exists():
            return {}
        self._view.update(f"scoring {self._config.task.eval_size} held-out prompts before and after", None, None)
        return evaluate_ends(supervisor, self._run_dir, self._config, self._facts, self._asked_to_stop)

    def _finish(self, outcome: str, message: str, evaluations: dict[str, float]) -> int:
        if self._stop_failures:
            outcome, message = "failed", "; ".join([message, *self._stop_failures])
        facts: dict[str, Any] = {
            "status": outcome,
            "message": message,
            "incarnation": self._facts.incarnation,
            "wall_s": round(time.monotonic() - self._started_s, 3),
            "restarts": dict(self._restarts),
            **evaluations,
        }
        summary = write_summary(self._run_dir, self._config, self._status, **facts)
        self._view.close()
        self._view.say(f"{outcome} after {summary['steps']} steps in {summary['wall_s']:.0f} s: {message}")
        for name, value in evaluations.items():
            self._view.say(f"{name} {value:.3f}")
        if outcome != "finished":
            self._view.say(f"continue with: asyncrl resume {self._run_dir.path}")
        return {"finished": 0, "stopped": 128 + self._signal}.get(outcome, 1)

    def _listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal:  # asked twice: end now, the guardian sees to the rest
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def _asked_to_stop(self) -> bool:
        return bool(self._signal)


def _death(exit_: Exit) -> str:
    return f"{exit_.name} died ({exit_.reason}); its last line: {exit_.last_line or 'none'}"


def _cause_first(exit_: Exit) -> tuple[bool, bool, str]:
    """The queue's death explains a learner's, and both explain a generator's."""
    return (exit_.name.startswith("generator"), not processes.is_broker(exit_.name), exit_.name)
