"""From an issued ticket number to the ticket that a generator gets: prompt, group id, seed.

Ticket number n is prompt index n of the source, and the seed is a pure function of the run's task seed and n: a ticket
that is issued again, by another process or after a restore, asks for the same samples.

Source: design note, section 4.
"""

from __future__ import annotations

from hashlib import blake2b

from asyncrl.queue.messages import Ticket
from asyncrl.queue.records import Issue
from asyncrl.tasks.prompt import PromptSource

__all__ = ["TicketPrompts", "ticket_seed"]


def ticket_seed(run_seed: int, ticket: int) -> int:
    """Seed of a ticket's group, within 0 .. 2**31 - 1: the range that every sampling engine takes."""
    digest = blake2b(f"{run_seed}/{ticket}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class TicketPrompts:
    """Fills tickets from a prompt source.

    Args:
        source: prompts by index. seed: of the task. deadline_s: seconds that a ticket may take from its issue.
    """

    def __init__(self, source: PromptSource, seed: int, deadline_s: float) -> None:
        self._source = source
        self._seed = seed
        self._deadline_s = deadline_s

    def ticket(self, issue: Issue) -> Ticket:
        """The ticket for an issue.

        Raises:
            DataError: the source cannot give this prompt.
        """
        prompt = self._source.prompt(issue.ticket)
        return Ticket(
            ticket=issue.ticket,
            group_id=f"g{issue.ticket}",
            attempt=issue.attempt,
            prompt_id=prompt.prompt_id,
            prompt=prompt.prompt,
            is_chat=prompt.is_chat,
            answer=prompt.answer,
            extra=prompt.extra,
            seed=ticket_seed(self._seed, issue.ticket),
            deadline_s=self._deadline_s,
            not_before_version=issue.not_before_version,
            exact_version=issue.exact_version,
        )

    def prompt_id(self, ticket: int) -> str:
        """Identity of a ticket's prompt, for the dead-letter file."""
        return self._source.prompt(ticket).prompt_id
