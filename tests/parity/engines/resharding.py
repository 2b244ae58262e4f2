"""Chains of layouts, each of which starts from what the one before saved: a rank's part of one link, and the chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engines.cells import CELLS, Cell
from engines.work import Order, engine_of, train_more

__all__ = ["AFTER", "BEFORE", "CHAINS", "Hop", "chain", "hop"]

BEFORE, AFTER = 2, 3
"""Steps that a layout trains before it saves and after; the next one repeats the latter from the checkpoint."""

_FSDP2 = ("one rank", "DP2", "DP4", "HSDP 2×2", "SP2", "TP2", "TP2×DP2", "offload", "one rank")
_MEGATRON = ("one rank", "DP2", "TP2", "PP2", "interleaved PP2", "PP4", "TP2×PP2", "TP2×DP2", "TP4, more than key/value heads", "CP2")
CHAINS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "every layout": ("qwen3", tuple(f"fsdp2 {name}" for name in _FSDP2)),
    "tied": ("qwen3 tied", ("fsdp2 DP2", "fsdp2 TP2")),
    "LoRA": ("qwen3", ("fsdp2 LoRA, DP2", "fsdp2 LoRA, SP2")),
    "value head": ("qwen3 value", ("fsdp2 value head, DP2", "fsdp2 value head, TP2")),
    "MoE": ("qwen3 moe", ("fsdp2 MoE, DP2", "fsdp2 MoE, SP2")),
    # between two checkpoints of the other engine: whatever an engine can read, it has written
    "every layout of Megatron": ("qwen3 deep", ("fsdp2 TP2", *(f"megatron {name}" for name in _MEGATRON), "fsdp2 TP2")),
    "Megatron, tied": ("qwen3 tied", ("megatron PP2", "megatron TP2×PP2", "megatron PP2×DP2", "megatron DP2")),
    "Megatron, MoE": ("qwen3 moe", ("fsdp2 MoE, DP2", "megatron MoE, EP2", "megatron MoE, TP2×EP2", "megatron MoE, TP2", "fsdp2 MoE, DP2")),
    "Megatron, value head": ("qwen3 value", ("fsdp2 value head, DP2", "megatron value head, PP2", "fsdp2 value head, DP2")),
}
"""By what is special: the model of all cells of a chain, and their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """``start``: the checkpoint to start from, which holds ``step`` steps, or None for the model's folder; ``end``: where to save."""

    order: Order
    start: str | None
    step: int
    end: str


def hop(work: Hop) -> list[tuple[float, float]]:
    """Loads, trains :data:`BEFORE` steps, saves, and trains :data:`AFTER` more while it is written; (loss, norm) of each step."""
    engine, saved = engine_of(work.order), work.step + BEFORE
    if work.start is not None:
        engine.load(Path(work.start))
    before = train_more(work.order, engine, range(work.step, saved))
    saving = engine.save(Path(work.end))
    after = train_more(work.order, engine, range(saved, saved + AFTER))
    assert saving.wait(60.0)
    return before + after


def chain(name: str, most_ranks: int) -> list[Cell]:
    """The cells of a chain for which there are ranks enough, warming up for longer than the chain trains."""
    model, names = CHAINS[name]
    by_name = {str(cell): cell for cell in CELLS}
    cells = [replace(by_name[cell], model=model, learner={**by_name[cell].learner, "warmup_steps": 30}) for cell in names]
    return [cell for cell in cells if cell.ranks <= most_ranks]
