from __future__ import annotations

import pytest

from asyncrl.errors import UnsupportedError
from asyncrl.learner.engine import EngineRegistry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[EngineRegistry]:
    monkeypatch.setattr(EngineRegistry, "_classes", {})
    monkeypatch.setattr(EngineRegistry, "_modules", {"broken": "asyncrl_module_that_is_not_there"})
    return EngineRegistry


def found(registry: type[EngineRegistry], device: str, vendor: str) -> object:
    return registry.find(model_type="language_model", backend="b", device=device, vendor=vendor)


def test_a_vendor_comes_before_the_device_and_nvidia_last(registry: type[EngineRegistry]):
    amd, plain, nvidia = (type(name, (), {}) for name in ("Amd", "Plain", "Nvidia"))
    registry.register(model_type="language_model", backend="b", devices=("cuda",), vendor="nvidia")(nvidia)
    assert found(registry, "cuda", "amd") is nvidia
    registry.register(model_type="language_model", backend="b", devices=("cuda", "cpu"))(plain)
    assert found(registry, "cuda", "amd") is plain
    registry.register(model_type="language_model", backend="b", devices=("cuda",), vendor="amd")(amd)
    assert found(registry, "cuda", "amd") is amd
    assert found(registry, "cuda", "nvidia") is nvidia
    assert found(registry, "cpu", "amd") is plain


def test_what_is_not_registered_is_refused_with_what_is(registry: type[EngineRegistry]):
    registry.register(model_type="language_model", backend="b", devices=("cpu",))(type("E", (), {}))
    with pytest.raises(UnsupportedError, match=r"value_model.*registered: language_model/b on cpu \(any vendor\)"):
        registry.find(model_type="value_model", backend="b", device="cpu")


def test_a_backend_that_does_not_import_shows_its_true_error(registry: type[EngineRegistry]):
    with pytest.raises(UnsupportedError, match="No module named 'asyncrl_module_that_is_not_there'"):
        registry.find(model_type="language_model", backend="broken", device="cpu")


def test_fsdp2_registers_itself_for_cpu_and_cuda():
    for device in ("cpu", "cuda"):
        assert EngineRegistry.find(model_type="language_model", backend="fsdp2", device=device).__name__ == "FSDP2Engine"
