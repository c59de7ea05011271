"""The base of strategies that divide the network itself, so that workers exchange activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.strategies import base
from stratbench.strategies.counted import Counted
from stratbench.workload.network import models

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stratbench.workload.network.models import Model


class ModelSplit(Counted):
    """Base of strategies whose workers hold parts of a model; several groups of them are replicas.

    The model declares how it is divided.
    """

    family = "splits"
    rigid = "each worker holds a part of the network, which ends with the worker"
    uses_wrap_groups = True
    divides_network = True
    #: The parts' name for messages; also the key of a user's declaration of the division.
    parts_are: ClassVar[str]
    stated_by: ClassVar[str]

    @classmethod
    def why_not(cls, network: str | Model) -> str | None:
        """Return why a model, before it is built, cannot be divided in this way.

        Return None if it can.
        """
        raise NotImplementedError

    def too_many(self, network: str | Model, gpus: int) -> str | None:
        """Return why a model cannot be divided among so many workers, with the remedy.

        Return None otherwise.
        """
        raise NotImplementedError

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        if values["compile"]:
            yield f".compile = true: compiled code is not tried with {cls.parts_are}; set it to false"
        if (chunks := values["loss_chunks"]) > 1:
            yield f".loss_chunks = {chunks}: the loss in parts is not tried with {cls.parts_are}; set it to 1"
        strategy = cls(cls.Options(**options))
        for name, network in values["networks"].items():
            if reason := cls.why_not(network):
                yield f".models = {name!r}: {reason}"
                continue
            for gpus in values["gpus"]:
                with suppress(ValueError):  # groups of uneven size are reported by `mesh`
                    if reason := strategy.too_many(network, gpus):
                        yield f".gpus = {values['gpus']}: {name}: {reason}"

    def refusals_of_model(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        yield from super().refusals_of_model(model, worker)
        yield from base.refusals_of_parts(worker.trial)

    def partly_trained(self, x: Tensor, y: Tensor) -> list[str]:
        """Return whole parameters of which a worker has only a part of the gradient. All workers call it."""
        return []

    def divides(self, gpus: int) -> bool:
        """Return whether `gpus` workers hold shards of the states."""
        mesh = self.mesh(gpus)
        return mesh.tensor * mesh.stages > 1

    def traits(self, gpus: int) -> base.Traits:
        divides = self.divides(gpus)
        # Parts without a common divisor: norms, which each worker has completely, and unequal stages.
        parts = None if divides else 1
        return base.Traits(
            synchronous_alone=True,
            equals_ddp=True,
            shards_states=divides,
            weight_parts=parts,
            optimizer_parts=parts,
            updates_per_step=1,
        )


def these_do(able: Callable[[str], bool]) -> str:
    """Return which models can be divided in a way, as the end of a sentence."""
    names = ", ".join(filter(able, models.MODELS))
    return f"these do: {names}; one of your own can (docs/split-your-model.md)"
