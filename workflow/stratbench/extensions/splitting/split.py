"""Base class of the strategies `tensor` and `pipeline`, which divide the model among workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.strategies import base, refusals
from stratbench.strategies.counted import Counted
from stratbench.workload.network import models

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, Work

    from stratbench.workload.network.models import Model


class ModelSplit(Counted):
    """Base class of strategies in which each worker has only a part of the model.

    Several groups of such workers are replicas. The model declares how it is divided.
    """

    family = "splits"
    rigid = "each worker has a part of the model, which is lost with the worker"
    uses_wrap_groups = True
    divides_network = True
    #: Noun for the model's parts in messages.
    parts_name: ClassVar[str]
    #: Config key by which a user declares the division.
    stated_by: ClassVar[str]
    #: Whether the present part of a batch is its last one. Only there the replicas average gradients.
    _is_last = True

    @classmethod
    def indivisible_model_reason(cls, network: str | Model) -> str | None:
        """Return why this strategy cannot divide a model, or None if it can.

        The model need not be built.
        """
        raise NotImplementedError

    def indivisible_among_workers_reason(self, network: str | Model, gpus: int) -> str | None:
        """Return why a model cannot be divided among `gpus` workers, or None if it can.

        The text includes the remedy.
        """
        raise NotImplementedError

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        if values["compile"]:
            yield f".compile = true: compiled code is not tested with {cls.parts_name}; set it to false"
        if (chunks := values["loss_chunks"]) > 1:
            yield (
                f".loss_chunks = {chunks}: the loss in chunks is not tested with {cls.parts_name}; set it "
                "to 1"
            )
        strategy = cls(cls.Options(**options))
        for name, network in values["networks"].items():
            if reason := cls.indivisible_model_reason(network):
                yield f".models = {name!r}: {reason}"
                continue
            for gpus in values["gpus"]:
                # `mesh` raises ValueError if the groups of workers would differ in size. `check` reports
                # that.
                with suppress(ValueError):
                    if reason := strategy.indivisible_among_workers_reason(network, gpus):
                        yield f".gpus = {values['gpus']}: {name}: {reason}"

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        yield from super().iter_model_refusals(model, worker)
        yield from refusals.iter_unshardable_model_reasons(worker.trial)

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        self._pending_reductions: list[Work] = []
        super().setup(model, worker)

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        self._is_last = is_last_part
        return nullcontext()

    def _start_gradient_averaging(self, parameter: nn.Parameter, group: ProcessGroup) -> None:
        """Start the all-reduce that averages a parameter's gradient over the replicas in `group`."""
        import torch
        import torch.distributed as dist

        from stratbench.telemetry.shards import get_local_shard

        with torch.no_grad():
            own = get_local_shard(parameter.grad).div_(self.worker.mesh.replicas)
        self._pending_reductions.append(dist.all_reduce(own, group=group, async_op=True))

    def _wait_for_averaged_gradients(self) -> None:
        for work in self._pending_reductions:
            work.wait()
        self._pending_reductions.clear()

    def list_parameters_with_partial_gradient(self, x: Tensor, y: Tensor) -> list[str]:
        """Return the undivided parameters whose gradient differs between workers.

        All workers must call this method.
        """
        return []

    def has_divided_model_states(self, gpus: int) -> bool:
        """Return whether each of `gpus` workers has only a part of the model states."""
        mesh = self.mesh(gpus)
        return mesh.tensor * mesh.stages > 1

    def traits(self, gpus: int) -> base.Traits:
        divides = self.has_divided_model_states(gpus)
        # If the model is divided, the number of parts is None, because the workers' parts are unequal.
        parts = None if divides else 1
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=True,
            shards_states=divides,
            weight_parts=parts,
            optimizer_parts=parts,
            updates_per_step=1,
        )


def format_divisible_model_names(is_divisible: Callable[[str], bool]) -> str:
    """Return a clause that lists the built-in models that a strategy can divide.

    Args:
        is_divisible: Returns whether the strategy can divide the model of a name.
    """
    names = ", ".join(filter(is_divisible, models.MODELS))
    return f"these models do: {names}; a model of your own can as well (docs/split-your-model.md)"
