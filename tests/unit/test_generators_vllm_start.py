from __future__ import annotations

import os

import pytest

from asyncrl.config import Config
from asyncrl.generators.vllm_start import choose_start_method, prepare_environment


@pytest.mark.parametrize(("device", "method"), [("cpu", "fork"), ("cuda", "spawn")])
def test_processes_of_the_engine_are_forked_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch, device: str, method: str):
    monkeypatch.setattr(os, "environ", {})
    config = Config.model_validate({"generator": {"device": device}})
    prepare_environment(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM's settings for a CPU leave it
    choose_start_method(config)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method
