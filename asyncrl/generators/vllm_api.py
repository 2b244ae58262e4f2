"""What the vLLM adapter needs of an API generation, and the choice between the two that are known.

They differ in one thing: whether the engine itself reports which weights sampled which token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, Protocol

from asyncrl.errors import EngineError
from asyncrl.generators.spans import Cuts
from asyncrl.trajectory import VersionSpan

__all__ = ["SpanApi", "acknowledged_tokens", "span_api", "wait_until_processed"]

PROCESSED_TIMEOUT_S = 30.0


class SpanApi(Protocol):
    """How one generation of vLLM stamps versions."""

    name: str

    async def stamp(self, llm: Any, version: int) -> None:
        """Says, while generation is paused, that tokens from now on are of ``version``."""

    def spans(self, completion: Any, cuts: Cuts) -> tuple[VersionSpan, ...]:
        """Spans of a finished completion, counted from its first sampled token."""


def span_api(llm_class: type) -> SpanApi:
    """The generation that an AsyncLLM class belongs to, told by its methods and not by its number."""
    if hasattr(llm_class, "update_weight_version"):
        from asyncrl.generators.vllm_exact import ExactSpans

        return ExactSpans()
    from asyncrl.generators.vllm_cut import CutSpans

    return CutSpans()


async def wait_until_processed(llm: Any, running: Collection[str]) -> dict[str, int]:
    """Waits until every output that the engine sent before it paused has been counted here; tokens by request id.

    The engine answers a pause after its last outputs, over the same ordered socket; they may still lie in the frontend's queue.
    They are counted when its reader waits at the empty queue again. A request in ``running`` that the frontend does not know is either
    on its way in, with no token, or on its way out, with all of them: which, shows when it has arrived.

    Args:
        running: request ids of the adapter, a live view.

    Raises:
        EngineError: this takes longer than ``PROCESSED_TIMEOUT_S``.
    """
    queue: Any = llm.engine_core.outputs_queue  # an asyncio.Queue, which shows its waiters in an attribute of its own alone
    deadline_s = time.monotonic() + PROCESSED_TIMEOUT_S
    while True:
        counts = acknowledged_tokens(llm)
        idle = queue.empty() and any(not getter.done() for getter in queue._getters)
        if (idle or not counts) and all(request_id in counts for request_id in running):
            return counts
        if time.monotonic() > deadline_s:
            raise EngineError(f"the outputs of a paused vLLM engine are counted within {PROCESSED_TIMEOUT_S:.0f} s; {queue.qsize()} wait")
        await asyncio.sleep(0.001)


def acknowledged_tokens(llm: Any) -> dict[str, int]:
    """Tokens counted so far of every running request, by the request id that it was given."""
    states = llm.output_processor.request_states.values()
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None}
