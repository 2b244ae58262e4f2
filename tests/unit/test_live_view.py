import io

from asyncrl.monitor.live import LiveView
from asyncrl.queue.messages import LagHistogram, QueueStatus

METRICS = {
    "step": 3, "reward_mean": 0.25, "policy_version": 3, "staleness_mean": 1.5, "staleness_max": 2,
    "generator_tokens_per_s": 310.4, "learner_tokens_per_s": 420.0, "sync_s": 0.8,
}  # fmt: skip


def status(**changes):
    fields = {
        "step": 3, "admitted": 10, "trained": 6, "dropped": {}, "in_flight": 4, "generating": 3, "queued_groups": 1,
        "queued_bytes": 9, "oldest_queued_s": 0.0,
        "leased": 0, "reissued": 0, "lag": LagHistogram(consumed={}, in_flight={}, queued={}), "generator_tokens": 0, "rewards_sum": 0.0,
        "rewards_count": 0, "refused": {}, "blocked": "", "producers": {}, "stopping": False,
    }  # fmt: skip
    return QueueStatus(**{**fields, **changes})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_rewritten_in_place_with_everything_on_it():
    stream = Terminal()
    view = LiveView("line", 60, stream)
    line = view.line("", METRICS, status())
    assert line == (
        "step 3/60 | reward 0.250 | version 3 | stale 1.50 max 2 | gen 310 tok/s | learn 420 tok/s | sync 0.80 s"
        " | queue 1 | waits: learner for 3 groups being sampled"
    )
    view.update("", METRICS, status())
    view.update("", METRICS, status())
    assert stream.getvalue().count("\n") == 0 and stream.getvalue().count("\r\x1b[K") == 2
    view.close()
    assert stream.getvalue().endswith("\n") and "?25l" not in stream.getvalue()


def test_elsewhere_each_step_is_one_plain_line():
    stream = io.StringIO()
    view = LiveView("auto", 60, stream)
    for _ in range(3):
        view.update("", METRICS, status(blocked="version 3 + staleness 2 reached"))
    view.update("", {**METRICS, "step": 4}, None)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("waits: version 3 + staleness 2 reached")


def test_off_shows_nothing_but_what_is_said():
    stream = io.StringIO()
    view = LiveView("off", 60, stream)
    view.update("", METRICS, status())
    view.say("done")
    assert stream.getvalue() == "asyncrl: done\n"
