"""Why a model exists: the roles of a worker, which are configurations of one class.

An actor is trained and gives log-probs. A reference is never trained and gives the log-probs that the actor started from: from a
model of its own or, where the actor trains adapters, from the actor's engine with the adapters off. A critic is trained and gives values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from asyncrl.algorithms.losses import Denominators
from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import Batch, BatchOutput, Row, TrainOutput
from asyncrl.learner.engine import Engine
from asyncrl.learner.objective import Objective
from asyncrl.learner.replica import Replica

__all__ = ["ACTOR", "CRITIC", "REFERENCE", "ModelWorker", "Role"]

GLOO_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """``model_type`` is the registry's; ``trained``: it has an optimizer; ``adapters``: it computes with those there are."""

    name: str
    model_type: str
    trained: bool
    adapters: bool


ACTOR = Role(name="actor", model_type="language_model", trained=True, adapters=True)
REFERENCE = Role(name="reference", model_type="language_model", trained=False, adapters=False)
CRITIC = Role(name="critic", model_type="value_model", trained=True, adapters=True)


class ModelWorker:
    """One model in one role; all ranks of a replica make the same calls with the same rows.

    Args:
        engine: an initialized engine of the role's model type; role: why the model exists; timeout_s: how long ranks of a replica wait for
            its source.

    Raises:
        UnsupportedError: a role that is trained on an engine that has no optimizer.
    """

    def __init__(self, engine: Engine, role: Role, timeout_s: float = GLOO_TIMEOUT_S) -> None:
        if role.trained and not engine.spec.trained:
            raise UnsupportedError(f"the role of {role.name} is trained; its engine was made with EngineSpec.trained = False")
        self.engine = engine
        self.role = role
        self.replica = Replica(engine, timeout_s)

    def train_mini_batch(self, batch: Batch, objective: Objective, should_stop: Callable[[], bool]) -> TrainOutput:
        """One optimizer step.

        Raises:
            UnsupportedError: the role is not trained.
        """
        if not self.role.trained:
            raise UnsupportedError(f"the role of {self.role.name} is never trained; use that of actor or critic")
        return self.engine.train_batch(
            batch, objective, should_stop=should_stop, rescale=lambda sums: objective.rescale(sums, batch.denominators)
        )

    def infer_batch(self, rows: tuple[Row, ...], should_stop: Callable[[], bool]) -> BatchOutput:
        """Log-probs or values of rows; ``predictions_N`` is empty on ranks that are not the source of their replica."""
        batch = Batch(rows_N=rows, denominators=Denominators(tokens=0, trajectories=0))
        adapters = self.role.adapters or not self.engine.spec.learner.lora_rank
        output = self.engine.infer_batch(batch, should_stop=should_stop, adapters=adapters)
        return output if self.replica.is_source else replace(output, predictions_N=())
