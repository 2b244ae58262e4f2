from __future__ import annotations

import os

import pytest

from asyncrl.config import Config
from asyncrl.generators.vllm_start import choose_start_method, prepare_environment


@pytest.mark.parametrize(
    ("device", "asked", "method"), [("cpu", None, "fork"), ("cuda", None, "spawn"), ("cpu", "spawn", "spawn"), ("cuda", "fork", "fork")]
)
def test_processes_of_the_engine_are_forked_on_a_cpu_unless_the_user_asks_for_something_else(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str | None, method: str
):
    monkeypatch.setattr(os, "environ", {} if asked is None else {"VLLM_WORKER_MULTIPROC_METHOD": asked})
    config = Config.model_validate({"generator": {"device": device}})
    wanted = prepare_environment(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's settings for a CPU leave it
    choose_start_method(config, wanted)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method
