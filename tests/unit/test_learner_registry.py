from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncrl.cli import main
from asyncrl.config.refusals import Refusal
from asyncrl.errors import UnsupportedError
from asyncrl.learner.capabilities import Capabilities
from asyncrl.learner.matrix import EngineRow, as_text, engine_rows
from asyncrl.learner.registry import Backend, EngineRegistry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[EngineRegistry]:
    monkeypatch.setattr(EngineRegistry, "_classes", {})
    monkeypatch.setattr(EngineRegistry, "_backends", {"broken": Backend(module="asyncrl_module_that_is_not_there", extra="learner")})
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


def test_another_makers_cuda_device_is_served_by_what_is_registered_for_nvidia_but_no_other_device_is(registry: type[EngineRegistry]):
    registry.register(model_type="language_model", backend="b", devices=("cuda",), vendor="nvidia")(type("E", (), {}))
    assert found(registry, "cuda", "") is found(registry, "cuda", "amd")
    with pytest.raises(UnsupportedError, match=r"no engine language_model/b on npu \(amd\)"):
        found(registry, "npu", "amd")


def test_a_backend_that_does_not_import_shows_its_true_error(registry: type[EngineRegistry]):
    with pytest.raises(UnsupportedError, match=r"No module named 'asyncrl_module_that_is_not_there' \(pip install 'asyncrl\[learner\]'\)"):
        registry.find(model_type="language_model", backend="broken", device="cpu")


def test_a_backend_whose_package_has_a_version_that_does_not_fit_says_so(registry: type[EngineRegistry], tmp_path, monkeypatch):
    (tmp_path / "engine_of_another_version.py").write_text(
        "from asyncrl.errors import UnsupportedError\nraise UnsupportedError('package is 1.0 or 2.0; met 3.0')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._backends["broken"] = Backend(module="engine_of_another_version", extra="learner")
    with pytest.raises(UnsupportedError, match=r"met 3.0 \(pip install 'asyncrl\[learner\]'\)"):
        registry.find(model_type="language_model", backend="broken", device="cpu")


def test_fsdp2_registers_itself_for_cpu_and_cuda():
    for device in ("cpu", "cuda"):
        assert EngineRegistry.find(model_type="language_model", backend="fsdp2", device=device).__name__ == "FSDP2Engine"


REFUSAL = Refusal(combination="A with B", reason="no C", nearest="A")


def test_the_matrix_has_a_row_for_each_class_and_each_module_that_does_not_import(registry: type[EngineRegistry]):
    declared = Capabilities(models="dense ones", layouts=("data parallel",), refused=(REFUSAL,))
    language, value = (type(name, (), {"capabilities": declared}) for name in ("L", "V"))
    registry._backends["b"] = Backend(module="json", extra="learner")
    registry.register(model_type="language_model", backend="b", devices=("cpu", "cuda"))(language)
    registry.register(model_type="value_model", backend="b", devices=("cuda",), vendor="nvidia")(value)
    shared = {"backend": "b", "models": "dense ones", "layouts": ("data parallel",), "refused": (REFUSAL,)}
    first, second, broken = engine_rows()
    assert first == EngineRow(model_types=("language_model",), devices=("cpu", "cuda"), **shared)
    assert second == EngineRow(model_types=("value_model",), devices=("cuda (nvidia)",), **shared)
    assert (broken.backend, broken.model_types) == ("broken", ()) and broken.import_error.startswith("ModuleNotFoundError: No module named")
    text = as_text([first, broken])
    assert "  registered   language_model on cpu, cuda\n" in text and "  imports      no: ModuleNotFoundError" in text
    assert "  refused      A with B: no C; nearest that works: A\n" in text
    assert "  learner.engine=mindspeed_megatron, torchtitan, veomni, automodel: no engine of this name is built; " in text


def test_the_command_prints_each_engine_as_it_is_here(capsys: pytest.CaptureFixture[str]):
    assert main(["engines", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    fsdp2 = next(row for row in printed["engines"] if row["backend"] == "fsdp2" and "language_model" in row["model_types"])
    assert (fsdp2["backend"], fsdp2["devices"], fsdp2["import_error"]) == ("fsdp2", ["cpu", "cuda"], "")
    assert "data parallel" in fsdp2["layouts"] and {"combination", "reason", "nearest"} == set(fsdp2["refused"][0])
    assert printed["refused"]["learner.device=npu"]["nearest"] == "learner.device=auto"


def test_the_command_says_what_is_missing_where_torch_is_not_installed():
    code = "import sys; sys.modules['torch'] = None; from asyncrl.cli import main; sys.exit(main(['engines']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "learner.engine=fsdp2\n  imports      no: ModuleNotFoundError: import of torch halted" in done.stdout
    assert "(pip install 'asyncrl[learner]')" in done.stdout


def test_the_command_says_what_is_missing_where_megatron_core_is_not_installed_and_what_trains_all_the_same():
    code = "import sys; sys.modules['megatron'] = None; from asyncrl.cli import main; sys.exit(main(['engines']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (missing,) = [block for block in done.stdout.split("\nlearner.engine=") if block.startswith("megatron\n")]
    assert "  imports      no: ModuleNotFoundError: " in missing and "(pip install 'asyncrl[megatron]')" in missing
    assert "learner.engine=fsdp2\n  registered   language_model on cpu, cuda\n  imports      yes\n" in done.stdout
