"""Policies that average several gradients into one update: `ps-sync`, `ps-backup` and `ps-kbatch`.

An update uses the learning rate of a global batch, and `lr_scale` has no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.extensions.servers.policies.options import BufferCount, PolicyOptions
from stratbench.extensions.servers.policies.policy import (
    Fields,
    Hyper,
    Outcome,
    Policy,
    make_shard_optimizer,
)

if TYPE_CHECKING:
    from torch import Tensor


class SyncPolicy(Policy):
    """Policy that averages the gradients of all live workers in each step. All workers wait.

    W -= lr * velocity(mean of the gradients, weighted by `push_weight`). Source: bulk-synchronous SGD of Li
    et al., "Scaling distributed machine learning with the parameter server", OSDI 2014. Gradients are summed
    in
    the order of the slots and not of arrival, so that a run can be repeated bit for bit. No step waits for a
    worker that has finished. A lost worker ends the run.
    """

    summary: ClassVar[str] = "parameter server, every step waits for all workers"
    rule: ClassVar[str] = "W -= lr velocity(mean of all workers' g)"
    rigid = (
        "each of its steps is the mean of all workers' gradients, so that it has to stop and begin anew "
        "whenever a worker comes or goes; ps-backup goes on without those that are missing"
    )

    @dataclass(frozen=True)
    class Options(PolicyOptions):
        refuses_adamw: ClassVar[str | None] = None
        survives_worker_loss: ClassVar[bool] = False
        averages_all: ClassVar[bool] = True
        is_synchronous_on_one_worker: ClassVar[bool] = True

        def updates_per_step(self, workers: int) -> float:
            return 1.0

        def optimizer_buffers(self, workers: int) -> BufferCount:
            """Return the number of buffers: one for the momentum, and the others for gradients.

            The gradient that arrives last needs no buffer.
            """
            return 1 + (workers - 1)

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._optimizer = make_shard_optimizer(weights, hyper)
        self._live = set(range(hyper.workers))
        self._arrived: set[int] = set()
        # Number of workers that left after their push for the present step.
        self._arrived_and_left = 0
        self._weight = 0.0  # sum of the weights of the gradients that arrived for the present step
        # Sum of the gradients of the lowest slots, as far as these have arrived.
        self._total: Tensor | None = None
        # Gradients by slot that are not in the sum yet, because the gradient of a lower slot is missing.
        self._held: dict[int, Tensor] = {}
        slots = self.options.optimizer_buffers(hyper.workers) - 1
        # Filling the buffers with zeros makes the kernel provide their memory now, and not during training.
        self._free = [torch.zeros_like(weights) for _ in range(slots)]

    def state(self) -> Fields:
        """Return the policy's state. It has the number of free buffers in place of these buffers."""
        return Fields(super().state(), _free=len(self._free))

    def load(self, state: Fields) -> None:
        super().load(Fields(state, _free=self._free[: state["_free"]]))

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        self._arrived.add(worker)
        self._held[worker] = grad
        if self.push_weight != 1.0:
            grad.mul_(self.push_weight)
        self._weight += self.push_weight
        if self._advance_step_if_complete(caller_gradient=grad):
            return Outcome.APPLIED
        if self._total is grad:
            self._total = self._copy_to_free_buffer(grad)
        elif worker in self._held:
            self._held[worker] = self._copy_to_free_buffer(grad)
        return Outcome.HELD

    def on_skip(self, worker: int, read_version: int) -> None:
        self._arrived.add(worker)
        self._advance_step_if_complete()

    def on_leave(self, worker: int) -> None:
        self._live.discard(worker)
        if worker in self._arrived:
            # The worker's push still counts for the present step. Another worker may get its slot before the
            # step ends.
            self._arrived.discard(worker)
            self._arrived_and_left += 1
            if worker in self._held:
                self._add_gradient_to_sum(self._held.pop(worker))
        self._advance_step_if_complete()

    def on_join(self, worker: int) -> None:
        self._live.add(worker)

    def ready(self, worker: int) -> bool:
        return worker not in self._arrived

    def _find_summable_slots_end(self) -> float:
        """Return the slot below which all gradients of the present step have arrived.

        It is infinity if the gradients of all live workers have arrived.
        """
        return min(self._live - self._arrived, default=math.inf)

    def _advance_step_if_complete(self, caller_gradient: Tensor | None = None) -> bool:
        """Add arrived gradients to the sum in the order of slots. If none is missing, update the weights.

        Args:
            caller_gradient: Gradient tensor of the caller, which must not become a free buffer.

        Returns:
            Whether the weights were updated and the next step begins.
        """
        limit = self._find_summable_slots_end()
        for worker in sorted(w for w in self._held if w < limit):
            self._add_gradient_to_sum(self._held.pop(worker), caller_gradient)
        if limit != math.inf:
            return False
        if self._total is not None:
            # A sum with weight 0 is 0 and needs no division.
            if self._weight not in (0.0, 1.0):
                self._total.div_(self._weight)
            self._optimizer.step(self.weights, self._total, self.lr)
            self.version += 1
            self._make_buffer_reusable(self._total, caller_gradient)
        self._total, self._weight, self._arrived_and_left = None, 0.0, 0
        self._arrived.clear()
        return True

    def _add_gradient_to_sum(self, grad: Tensor, caller_gradient: Tensor | None = None) -> None:
        if self._total is None:
            self._total = grad
        else:
            self._total.add_(grad)
            self._make_buffer_reusable(grad, caller_gradient)

    def _copy_to_free_buffer(self, grad: Tensor) -> Tensor:
        slot = self._free.pop()
        slot.copy_(grad)
        return slot

    def _make_buffer_reusable(self, tensor: Tensor, caller_gradient: Tensor | None) -> None:
        if tensor is not caller_gradient:
            self._free.append(tensor)


class BackupPolicy(SyncPolicy):
    """Policy that averages the gradients of the fastest workers in each step, and drops late gradients.

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016. A push is late if its weights were
    read before the last step. Its worker continues at once with the new weights. A step is also made when
    every live worker has pushed since the last step, late or not. This happens if workers were lost, or if
    they wait at another shard: each shard decides by itself which pushes are late.
    """

    summary: ClassVar[str] = "parameter server, does not wait for the slowest workers"
    rule: ClassVar[str] = (
        "as ps-sync, from the first N - b pushes of a step; later ones are dropped"
    )

    @dataclass(frozen=True)
    class Options(PolicyOptions):
        refuses_adamw: ClassVar[str | None] = None
        backups: int = option(1, "workers a step does not wait for (at most workers - 1)", least=0)

        # A single worker is never late. So its training equals that with PyTorch's own optimizer.
        is_synchronous_on_one_worker: ClassVar[bool] = True

        def waits_for_slowest(self, workers: int) -> bool:
            return self.quorum(workers) == workers

        def quorum(self, workers: int) -> int:
            """Return the number of gradients that a step averages: all but those of `backups` workers."""
            return max(1, workers - self.backups)

        def optimizer_buffers(self, workers: int) -> BufferCount:
            """Return the number of buffers: one for the momentum, and others for gradients.

            The last gradient of a step needs no buffer.
            """
            return 1 + (self.quorum(workers) - 1)

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        super().__init__(weights, hyper, options)
        self._quorum = self.options.quorum(hyper.workers)
        self._late: set[int] = set()  # slots of the workers whose push since the last step was late
        #: Slots of workers whose push was missing when a step ended without an update, because all others
        #: skipped. Their next push is late, although the version of the weights has not changed.
        self._passed: set[int] = set()

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        if not self._is_push_late(worker, read_version):
            return super().on_push(worker, grad, read_version)
        self._late.add(worker)
        self._advance_step_if_complete()
        return Outcome.DROPPED

    def on_skip(self, worker: int, read_version: int) -> None:
        """Count a worker that skips its push as arrived, or as late."""
        (self._late if self._is_push_late(worker, read_version) else self._arrived).add(worker)
        self._advance_step_if_complete()

    def on_leave(self, worker: int) -> None:
        self._late.discard(worker)
        self._passed.discard(worker)
        super().on_leave(worker)

    def _is_push_late(self, worker: int, read_version: int) -> bool:
        passed = worker in self._passed
        self._passed.discard(worker)
        return passed or read_version != self.version

    def _advance_step_if_complete(self, caller_gradient: Tensor | None = None) -> bool:
        version, missing = self.version, self._live - self._arrived - self._late
        pushes = len(self._arrived) + self._arrived_and_left
        stepped = pushes > 0 and super()._advance_step_if_complete(caller_gradient)
        if stepped:
            self._late.clear()
            if self.version == version:
                self._passed |= missing
        return stepped

    def _find_summable_slots_end(self) -> float:
        """Return infinity if all gradients that the step averages have arrived, and else -1.

        Gradients of slots below the result may be summed. With -1 there are none, because it is unknown which
        gradients will be the first to arrive.
        """
        enough = len(self._arrived) + self._arrived_and_left >= self._quorum
        return math.inf if enough or self._live <= self._arrived | self._late else -1


@dataclass(frozen=True)
class BucketOptions(PolicyOptions):
    """Options of policies that average a fixed number of pushes of any workers into one update.

    No worker waits for others.
    """

    refuses_adamw: ClassVar[str | None] = None

    @property
    def is_synchronous_on_one_worker(self) -> bool:
        return self.pushes_per_update(1) == 1

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return workers / self.pushes_per_update(workers)

    def pushes_per_update(self, workers: int) -> int:
        """Return the number of pushes that are averaged into one update: the number of workers."""
        return workers

    def optimizer_buffers(self, workers: int) -> BufferCount:
        """Return the number of buffers: one for the momentum, and one for the gradients' sum.

        A single gradient needs no sum.
        """
        return 1 + (self.pushes_per_update(workers) > 1)


class KBatchPolicy(Policy):
    """Policy that averages the gradients of any `k` pushes into one update. No worker waits.

    W -= lr * velocity(mean of K gradients). Sources: K-batch-async SGD of Dutta et al., "Slow and stale
    gradients can win the race", AISTATS 2018; n-softsync of Zhang et al., IJCAI 2016. If fewer than K
    gradients are left at the end, `finish` averages and applies them.
    """

    summary: ClassVar[str] = "parameter server, averages any K pushes"
    rule: ClassVar[str] = "W -= lr velocity(mean of any K pushes)"

    @dataclass(frozen=True)
    class Options(BucketOptions):
        k: int = option(
            0, "pushes averaged into one update; 0: as many as there are workers", least=0
        )

        def pushes_per_update(self, workers: int) -> int:
            """Return the option `k`, or the number of workers if `k` is 0."""
            return self.k or workers

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._optimizer = make_shard_optimizer(weights, hyper)
        self._k = self.options.pushes_per_update(hyper.workers)
        self._sum = torch.zeros_like(weights) if self._k > 1 else None
        self._count = 0

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        if self._sum is None:
            self._apply_gradient(grad)
            return Outcome.APPLIED
        if self._count:
            self._sum.add_(grad)
        else:
            self._sum.copy_(grad)
        self._count += 1
        if self._count < self._k:
            return Outcome.HELD
        self._apply_mean_gradient()
        return Outcome.APPLIED

    def finish(self) -> None:
        if self._count:
            self._apply_mean_gradient()

    def _apply_mean_gradient(self) -> None:
        self._apply_gradient(self._sum.div_(self._count))
        self._count = 0

    def _apply_gradient(self, grad: Tensor) -> None:
        self._optimizer.step(self.weights, grad, self.lr)
        self.version += 1
