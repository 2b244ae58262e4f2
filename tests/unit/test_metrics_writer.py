import json

import pytest

from asyncrl.config.run_dir import RunDir
from asyncrl.monitor.writer import REQUIRED_FIELDS, MetricsWriter


def step(number, **changes):
    return {**dict.fromkeys(REQUIRED_FIELDS, 1.0), "step": number, "staleness_hist": {0: 3, 1: 2}, **changes}


def test_one_object_a_step_with_string_keys_and_no_nan(tmp_path):
    writer = MetricsWriter(RunDir(tmp_path), tensorboard=False)
    writer.write(step(1, reward_mean=float("nan")))
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["staleness_hist"] == {"0": 3, "1": 2}
    assert json.loads(line)["reward_mean"] is None


def test_a_step_that_lacks_a_promised_field_is_refused(tmp_path):
    writer = MetricsWriter(RunDir(tmp_path), tensorboard=False)
    with pytest.raises(KeyError, match="mismatch_kl"):
        writer.write({k: v for k, v in step(1).items() if k != "mismatch_kl"})


def test_a_resumed_run_cuts_abandoned_steps_and_a_torn_line(tmp_path):
    first = MetricsWriter(RunDir(tmp_path), tensorboard=False)
    for number in (1, 2, 3):
        first.write(step(number))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    second = MetricsWriter(RunDir(tmp_path), tensorboard=False, start_step=2)
    second.write(step(3, reward_mean=9.0))
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["reward_mean"]) for m in lines] == [(1, 1.0), (2, 1.0), (3, 9.0)]
