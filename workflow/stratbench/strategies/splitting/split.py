"""The base of strategies that divide the network itself, so that workers exchange activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.strategies import base
from stratbench.workload.network import models

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.strategies.saved import SavedState
    from stratbench.workload.network.models import Model


class Split(base.Collective):
    """Workers hold parts of a network that states how it is divided; several groups of them are replicas.

    Only a step tells what is exchanged: it is counted in the first one after a `save`, which is not timed.
    """

    family = "splits"
    rigid = "each worker holds a part of the network, which ends with the worker"
    uses_wrap_groups = True
    divides_network = True
    #: What compiled code is not tried with; the key by which a user's network states how it is divided.
    parts_are: ClassVar[str]
    stated_by: ClassVar[str]

    #: What that step sent, in bytes; None: not looked at yet.
    _sent_bytes: float | None = None

    @classmethod
    def why_not(cls, network: str | Model) -> str | None:
        """Why a network, of which nothing is built yet, cannot be divided in this way; None where it can."""
        raise NotImplementedError

    def too_many(self, network: str | Model, gpus: int) -> str | None:
        """Why a network that can be divided cannot be divided among so many workers, with the remedy."""
        raise NotImplementedError

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        if values["compile"]:
            yield f".compile = true: compiled code is not tried with {cls.parts_are}; set it to false"
        strategy = cls(cls.Options(**options))
        for name, network in values["networks"].items():
            if why := cls.why_not(network):
                yield f".models = {name!r}: {why}"
                continue
            for gpus in values["gpus"]:
                with suppress(ValueError):  # groups that do not come out even are told by `mesh`
                    if why := strategy.too_many(network, gpus):
                        yield f".gpus = {values['gpus']}: {name}: {why}"

    def divides(self, gpus: int) -> bool:
        """Whether `gpus` workers hold parts of the states."""
        mesh = self.mesh(gpus)
        return mesh.tensor * mesh.stages > 1

    def traits(self, gpus: int) -> base.Traits:
        divides = self.divides(gpus)
        # What is not divided by a number: norms, which each worker has whole, and unequal stages.
        parts = None if divides else 1
        return base.Traits(
            synchronous_alone=True,
            equals_ddp=True,
            shards_states=divides,
            weight_parts=parts,
            optimizer_parts=parts,
            updates_per_step=1,
        )

    def save(self) -> SavedState:
        self._sent_bytes = None
        return super().save()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self._sent_bytes is not None:
            return super().step(x, y)
        from stratbench.telemetry.collective_count import CollectiveCount

        with CollectiveCount() as count:
            loss = super().step(x, y)
        self._sent_bytes = count.wire_bytes(self.worker.world_size)
        return loss

    def communication(self) -> dict[str, Any] | None:
        return None if isnan(self._sent_bytes) else base.ring_traffic(self._sent_bytes)


def these_do(able: Callable[[str], bool]) -> str:
    """Which networks can be divided in a way, at the end of a sentence."""
    names = ", ".join(filter(able, models.MODELS))
    return f"these do: {names}; one of your own can (docs/your-model.md)"
