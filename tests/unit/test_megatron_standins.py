"""Stand-ins for a CPU change nothing for anything but Megatron-core."""

import importlib.metadata

import pytest
import torch

from asyncrl.errors import UnsupportedError
from asyncrl.learner.megatron import standins

megatron = pytest.importorskip("megatron.core", reason="megatron-core is an extra")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="they have no effect with CUDA")


def test_megatron_takes_the_cpu_for_its_device_and_nobody_else_does():
    standins.import_megatron()
    from megatron.core import utils
    from megatron.core.tensor_parallel import random

    assert utils.torch.cuda.current_device() == torch.device("cpu")
    assert utils.torch.zeros(2, device="cuda", pin_memory=True).device == torch.device("cpu")
    assert utils.torch is random.torch is not torch
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2).cuda()
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_tensors_are_called_cuda_tensors_to_megatron_alone():
    standins.import_megatron()
    asked_by_megatron = eval("lambda tensor: tensor.type()", {"__name__": "megatron.core.optimizer.optimizer"})
    assert asked_by_megatron(torch.zeros(2)) == "torch.cuda.FloatTensor"
    assert asked_by_megatron(torch.zeros(2, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"


def test_the_compiler_is_there_again_after_the_import():
    standins.import_megatron()
    assert torch.compile.__module__ == "torch"


def test_a_version_that_nothing_was_tried_on_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(UnsupportedError, match=r"0.16.1 or 0.19.2; met 0.17.0: pip install megatron-core==0.16.1"):
        standins.import_megatron.__wrapped__()


def test_a_cpu_is_refused_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch):
    standins.check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    standins.check_device(torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="met device cpu beside 2 GPUs: set CUDA_VISIBLE_DEVICES to nothing"):
        standins.check_device(torch.device("cpu"))
