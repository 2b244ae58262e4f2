"""From a checkpoint to a Hugging Face folder, in one process without a process group.

Consumes the newest whole checkpoint of a run and its model folder (configuration, tokenizer, whatever was not trained); produces a
folder that transformers and vLLM load: names and shapes of the model's own files, weights in the run's compute precision, adapters
merged, tied ones written once. They are bit for bit what generators were given.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl.config import LearnerConfig
from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError
from asyncrl.learner.adapters import add_adapters, scale_of
from asyncrl.learner.checkpoint import read_manifest
from asyncrl.learner.fsdp2_state import trained_parameters, weight_key
from asyncrl.learner.hf_model import load_model
from asyncrl.learner.hf_names import FileNames, file_tensors
from asyncrl.learner.state_files import WEIGHTS, check_fits, known_entries

__all__ = ["export_checkpoint"]

SHARD_BYTES = 4 << 30
MARK = ".asyncrl-export"  # only a folder that holds it is ever replaced
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt", ".index.json")


def export_checkpoint(run_dir: RunDir, out_dir: Path) -> Path:
    """Writes the newest checkpoint of a run as a Hugging Face folder; returns ``out_dir``.

    Raises:
        DataError: the run has no whole checkpoint yet, its model folder holds another model, or ``out_dir`` holds something else.
    """
    checkpoint = run_dir.latest_checkpoint()
    if checkpoint is None:
        raise DataError(f"{run_dir.path} has no whole checkpoint yet: nothing to export")
    model_dir = Path(run_dir.read_facts().model_dir)
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / MARK).is_file():
        raise DataError(f"the export folder is new, empty or an older export; {out_dir} holds other files")
    building = out_dir.with_name(f".{out_dir.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    dtype = getattr(torch, read_manifest(checkpoint).dtype)
    _copy_files(model_dir, building, str(dtype).removeprefix("torch."))
    _write_weights(_tensors(model_dir, checkpoint, run_dir.read_config().learner, dtype), building)
    (building / MARK).write_text(f"{checkpoint}\n")
    shutil.rmtree(out_dir, ignore_errors=True)
    building.replace(out_dir)
    return out_dir


def _tensors(model_dir: Path, checkpoint: Path, settings: LearnerConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The model of ``model_dir`` with the weights that the checkpoint holds in place of its own."""
    model = load_model(str(model_dir), "eager")  # nothing runs through it
    files = FileNames(model)
    if settings.lora_rank:
        add_adapters(model, settings.lora_rank, settings.lora_alpha)
    trained = {weight_key(name): parameter.detach() for name, parameter in trained_parameters(model)}
    check_fits(trained, {key: entry for key, entry in known_entries(checkpoint).items() if key.startswith(WEIGHTS)}, checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what no_dist asks for
        load(trained, checkpoint_id=str(checkpoint), no_dist=True)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    yield from file_tensors(parameters, files, scale=scale_of(settings), dtype=dtype, whole=lambda tensor: tensor)
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:  # a router's correction, for example; in the precision of the files
            yield from files.of(name, buffer.contiguous())


def _copy_files(model_dir: Path, out_dir: Path, dtype: str) -> None:
    for file in model_dir.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and not file.name.startswith("."):
            shutil.copyfile(file, out_dir / file.name)
    config = json.loads((out_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(tensors: Iterable[tuple[str, torch.Tensor]], out_dir: Path) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors:
        if filled and filled + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], out_dir / "model.safetensors", metadata={"format": "pt"})
        return
    names: dict[str, str] = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out_dir / file, metadata={"format": "pt"})
        names |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
