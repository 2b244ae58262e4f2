"""Names, shapes and ties that an update must have: those of the model folder's own Hugging Face model, built without memory.

Source: design note, section 6; fault B41.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from asyncrl.errors import SyncError
from asyncrl.sync.messages import TensorSpec, UpdateManifest

__all__ = ["ModelShape"]

SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the model is made of.

    Attributes:
        shapes: by Hugging Face name, tied names included.
        tied: groups of names that are one tensor.
        head, embedding: names of output head and input embedding, which must differ in value unless tied; empty: not known.
        dtype: torch's name of the floating-point dtype that the engine computes in.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: tuple[frozenset[str], ...]
    head: str
    embedding: str
    dtype: str

    @classmethod
    def of_folder(cls, model_dir: str, dtype: str) -> ModelShape:
        """Reads ``config.json`` of a model folder."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
        model.tie_weights()
        same: defaultdict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            same[id(parameter)].append(name)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        return cls(
            shapes=shapes,
            tied=tuple(frozenset(group) for group in same.values() if len(group) > 1),
            head=same.get(id(getattr(head, "weight", None)), [""])[0],
            embedding=same.get(id(getattr(embedding, "weight", None)), [""])[0],
            dtype=dtype,
        )

    def check(self, manifest: UpdateManifest) -> None:
        """Compares an update with the model.

        Raises:
            SyncError: tensors missing, extra, of another shape or dtype, ties that differ, or an untied head that equals the embedding.
        """
        sent = {spec.name: spec for spec in manifest.tensors}
        faults = [*self._tie_faults(manifest.ties, sent), *self._name_faults(manifest.ties, sent)]
        faults += [fault for spec in manifest.tensors if spec.name in self.shapes for fault in self._tensor_faults(spec)]
        if self._equal_head(sent):
            faults.append(f"{self.head} equals {self.embedding} though the model does not tie them")
        if faults:
            more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            raise SyncError(
                f"version {manifest.version} does not fit the model: {'; '.join(faults[:SHOWN])}{more}; "
                "learner and generator load the same model folder",
                policy_version=manifest.version,
            )

    def _tie_faults(self, ties: dict[str, str], sent: dict[str, TensorSpec]) -> list[str]:
        faults = []
        for group in self.tied:
            members = sorted(group & sent.keys())
            if len(members) != 1:
                faults.append(f"one of the tied {sorted(group)} is sent; met {members or 'none'}")
            elif {name: ties.get(name) for name in group - {members[0]}} != dict.fromkeys(group - {members[0]}, members[0]):
                faults.append(f"{sorted(group - {members[0]})} are tied to {members[0]}; the update says {ties}")
        strangers = sorted(ties.keys() - set().union(*self.tied))
        return faults + ([f"{strangers} are not tied in the model"] if strangers else [])

    def _name_faults(self, ties: dict[str, str], sent: dict[str, TensorSpec]) -> list[str]:
        tied = set().union(*self.tied)
        missing = [f"{name} is missing" for name in sorted(self.shapes.keys() - sent.keys() - tied)]
        return missing + [f"{name} is not in the model" for name in sorted(sent.keys() - self.shapes.keys())]

    def _tensor_faults(self, spec: TensorSpec) -> list[str]:
        faults = []
        if spec.shape != self.shapes[spec.name]:
            faults.append(f"{spec.name} has shape {self.shapes[spec.name]}; met {spec.shape}")
        if spec.dtype != self.dtype:
            faults.append(f"{spec.name} is {self.dtype}; met {spec.dtype}")
        return faults

    def _equal_head(self, sent: dict[str, TensorSpec]) -> bool:
        if self.head == self.embedding or not {self.head, self.embedding} <= sent.keys():
            return False
        head, embedding = sent[self.head], sent[self.embedding]
        return (head.checksum, head.num_bytes) == (embedding.checksum, embedding.num_bytes)
