"""Jagged rows → packed micro-batches under a hard token cap, each group's prompt computed once.

A *part* is what cannot be separated: one trajectory, or several siblings behind their shared prompt. A group larger than the
cap becomes several parts, each with the prompt again; only a single trajectory longer than the cap is an error. Parts fill
micro-batches first-fit, longest first, ties by row: the same rows always give the same micro-batches. Where other replicas run theirs
at the same time, the most expensive micro-batch is first on each: the layers' collectives make all wait for the slowest.

Index i of every jagged array is token i of its trajectory: the hidden state before it predicts it, and position 0 has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncrl.errors import DataError
from asyncrl.learner.batch import MicroBatch, Row
from asyncrl.learner.cost import work_of

__all__ = ["Part", "attention_mask", "filler", "pack", "pack_parts", "parts_of", "scatter", "widened"]


_WHOLE = ("segments", "parents", "sources", "targets", "rows", "columns", "row_segments", "row_parents")
_OPTIONAL = ("proximal_logprobs", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are packed side by side; ``shared_tokens`` of prompt come once before them (0: nothing shared)."""

    rows: tuple[int, ...]
    shared_tokens: int
    size_tokens: int


def pack(rows_N: Sequence[Row], *, cap_tokens: int, shared_prompt: bool, quadratic: float | None = None) -> list[MicroBatch]:
    """Packs rows; as few micro-batches as first-fit finds, in its order or, where ``quadratic`` prices a token pair, by falling cost.

    Raises:
        DataError: a single trajectory longer than ``cap_tokens``, named with its length.
    """
    bins = pack_parts(parts_of(rows_N, cap_tokens=cap_tokens, shared_prompt=shared_prompt), cap_tokens)
    if quadratic is not None:
        bins.sort(key=lambda chosen: -sum(_cost(rows_N, part, quadratic) for part in chosen))
    return [_micro_batch(rows_N, chosen) for chosen in bins]


def parts_of(rows_N: Sequence[Row], *, cap_tokens: int, shared_prompt: bool) -> list[Part]:
    """Cuts rows into parts, by group id; siblings whose prompts differ share nothing."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows_N):
        if len(row.trajectory) > cap_tokens:
            raise DataError(
                f"a trajectory has at most learner.micro_batch_tokens = {cap_tokens} tokens; met {len(row.trajectory)} in sibling "
                f"{row.trajectory.sibling} of group {row.trajectory.group_id}: raise it or lower generator.max_new_tokens",
                group_id=row.trajectory.group_id,
                sibling=row.trajectory.sibling,
            )
        groups.setdefault(row.trajectory.group_id, []).append(i)
    parts: list[Part] = []
    for members in groups.values():
        if shared_prompt and len(members) > 1 and _same_prompt(rows_N, members):
            parts += _shared_parts(rows_N, members, cap_tokens)
        else:
            parts += [Part(rows=(i,), shared_tokens=0, size_tokens=len(rows_N[i].trajectory)) for i in members]
    return parts


def pack_parts(parts: Sequence[Part], cap_tokens: int) -> list[list[Part]]:
    """First-fit, longest first; inside a micro-batch parts stand in row order."""
    bins: list[list[Part]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda p: (-p.size_tokens, p.rows)):
        place = next((b for b, free in enumerate(room) if free >= part.size_tokens), None)
        if place is None:
            bins.append([part])
            room.append(cap_tokens - part.size_tokens)
        else:
            bins[place].append(part)
            room[place] -= part.size_tokens
    return [sorted(chosen, key=lambda p: p.rows) for chosen in bins]


def filler() -> MicroBatch:
    """A micro-batch of weight zero: two tokens, one target, mask 0.0. It keeps ranks with fewer rows in step."""
    zeros, zero = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    none, nobody = torch.zeros(1), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=zeros,
        position_ids=torch.arange(2)[None],
        segments=zeros[0],
        parents=zeros[0],
        sources=zero,
        targets=zero,
        temperatures=torch.ones(1),
        behavior_logprobs=none,
        proximal_logprobs=none,
        returns=none,
        advantages=none,
        mask=none,
        rows=zero,
        columns=zero,
        row_segments=nobody,
        row_parents=nobody,
        row_indices=(),
    )


def widened(micro: MicroBatch, least_tokens: int) -> MicroBatch:
    """The same with tokens that nobody sees behind it, up to ``least_tokens``: ranks that slice a pack want one token each."""
    missing = least_tokens - len(micro)
    if missing <= 0:
        return micro
    zeros, nobody = torch.zeros(missing, dtype=torch.int64), torch.full((missing,), int(micro.segments.max()) + 1)
    return replace(
        micro,
        input_ids=torch.cat([micro.input_ids, zeros[None]], dim=1),
        position_ids=torch.cat([micro.position_ids, torch.arange(missing)[None]], dim=1),
        segments=torch.cat([micro.segments, nobody]),
        parents=torch.cat([micro.parents, nobody]),
    )


def attention_mask(micro: MicroBatch, *, additive: torch.dtype | None) -> torch.Tensor:
    """[1, 1, L, L]: bool, True where token q sees token k; or added to the scores, in the dtype given."""
    places = torch.arange(len(micro), device=micro.segments.device)
    same = (micro.segments[:, None] == micro.segments[None]) | (micro.parents[:, None] == micro.segments[None])
    sees = same & (places[None] <= places[:, None])
    if additive is None:
        return sees[None, None]
    return torch.zeros(sees.shape, dtype=additive, device=sees.device).masked_fill(~sees, torch.finfo(additive).min)[None, None]


def scatter(values: torch.Tensor, micro: MicroBatch, out_N: Sequence[np.ndarray]) -> None:
    """Puts one value per sampled token to index (row, column) of jagged arrays."""
    flat = values.detach().float().cpu().numpy()
    rows, columns = micro.rows.cpu().numpy(), micro.columns.cpu().numpy()
    for local, row in enumerate(micro.row_indices):
        chosen = rows == local
        out_N[row][columns[chosen]] = flat[chosen]


def _cost(rows_N: Sequence[Row], part: Part, quadratic: float) -> float:
    tokens, pairs = work_of([len(rows_N[i].trajectory) - part.shared_tokens for i in part.rows], part.shared_tokens)
    return tokens + quadratic * pairs


def _same_prompt(rows_N: Sequence[Row], members: list[int]) -> bool:
    first = rows_N[members[0]].trajectory
    prompt = first.input_ids[: first.prompt_length]
    others = (rows_N[i].trajectory for i in members[1:])
    return all(t.prompt_length == len(prompt) and np.array_equal(t.input_ids[: len(prompt)], prompt) for t in others)


def _shared_parts(rows_N: Sequence[Row], members: list[int], cap_tokens: int) -> list[Part]:
    prompt = rows_N[members[0]].trajectory.prompt_length
    parts: list[Part] = []
    for i in members:
        own = len(rows_N[i].trajectory) - prompt
        last = parts[-1] if parts else None
        if last is not None and last.size_tokens + own <= cap_tokens:
            parts[-1] = Part(rows=(*last.rows, i), shared_tokens=prompt, size_tokens=last.size_tokens + own)
        else:
            parts.append(Part(rows=(i,), shared_tokens=prompt, size_tokens=prompt + own))
    return parts


class _Columns:
    """Collects the flat columns of one micro-batch."""

    def __init__(self) -> None:
        self.length = 0
        self.segment = 0
        self.names: dict[str, list[np.ndarray]] = {}

    def add(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.names.setdefault(name, []).append(array)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.names[name])).to(dtype)


def _micro_batch(rows_N: Sequence[Row], parts: Sequence[Part]) -> MicroBatch:
    columns, indices = _Columns(), tuple(i for part in parts for i in part.rows)
    local = {row: k for k, row in enumerate(indices)}
    for part in parts:
        prompt_at, prompt_segment = columns.length, columns.segment
        if part.shared_tokens:
            _add_segment(columns, rows_N[part.rows[0]].trajectory.input_ids[: part.shared_tokens], 0, prompt_segment)
        for i in part.rows:
            parent = prompt_segment if part.shared_tokens else columns.segment
            _add_row(columns, rows_N[i], local[i], part.shared_tokens, prompt_at, parent)
    return _assemble(columns, indices, [name for name in _OPTIONAL if all(getattr(rows_N[i], name) is not None for i in indices)])


def _add_segment(columns: _Columns, ids: np.ndarray, first_position: int, parent: int) -> None:
    size = len(ids)
    columns.add(
        input_ids=ids,
        position_ids=np.arange(first_position, first_position + size),
        segments=np.full(size, columns.segment),
        parents=np.full(size, parent),
    )
    columns.length += size
    columns.segment += 1


def _add_row(columns: _Columns, row: Row, local: int, shared: int, prompt_at: int, parent: int) -> None:
    trajectory, at = row.trajectory, columns.length
    columns.add(row_segments=np.array([columns.segment]), row_parents=np.array([parent]))
    _add_segment(columns, trajectory.input_ids[shared:], shared, parent)
    sampled = np.flatnonzero(trajectory.loss_mask)
    before = sampled - 1
    columns.add(
        sources=np.where(before < shared, prompt_at + before, at + before - shared),
        targets=trajectory.input_ids[sampled],
        temperatures=np.full(len(sampled), trajectory.temperature, dtype=np.float32),
        behavior_logprobs=trajectory.behavior_logprobs[sampled],
        advantages=np.full(len(sampled), row.advantage, dtype=np.float32),
        rows=np.full(len(sampled), local),
        columns=sampled,
    )
    for name in _OPTIONAL:
        values = getattr(row, name)
        if values is not None:
            columns.add(**{name: values[sampled]})


def _assemble(columns: _Columns, indices: tuple[int, ...], given: Sequence[str]) -> MicroBatch:
    whole = {name: columns.tensor(name, torch.int64) for name in _WHOLE}
    absent: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    real = {name: columns.tensor(name, torch.float32) for name in ("temperatures", "behavior_logprobs", "advantages", *given)}
    return MicroBatch(
        input_ids=columns.tensor("input_ids", torch.int64)[None],
        position_ids=columns.tensor("position_ids", torch.int64)[None],
        mask=torch.ones(len(whole["rows"])),
        row_indices=indices,
        **(absent | whole | real),
    )
