"""Policies that average several workers' gradients into one update: sync, backup workers, K-batch.

An update has the learning rate of a global batch; `lr_scale` plays no part here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stratbench.cell.options import option
from stratbench.ps.policies.options import PolicyOptions
from stratbench.ps.policies.policy import Fields, Hyper, Outcome, Policy, optimizer_of

if TYPE_CHECKING:
    from torch import Tensor


class SyncPolicy(Policy):
    """Averages the gradients of all live workers in one step, for which all wait.

    W -= lr * velocity(mean of the gradients, each by its `push_weight`). Bulk-synchronous SGD as in Li et
    al., "Scaling distributed machine learning with the parameter server", OSDI 2014 (sequential consistency),
    and the synchronous server of the paper this project re-implements. The sum runs in order of the worker
    numbers whatever the order of arrival, so that a run can be repeated bit for bit. A worker that has
    finished is no longer waited for; one that was lost ends the run.
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
        tolerates_loss: ClassVar[bool] = False
        averages_all: ClassVar[bool] = True
        synchronous_alone: ClassVar[bool] = True

        def updates_per_step(self, workers: int) -> float:
            return 1.0

        def optimizer_buffers(self, workers: int) -> int:
            """Momentum, and the gradients of all workers but the last of a step."""
            return 1 + (workers - 1)

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._optimizer = optimizer_of(weights, hyper)
        self._live = set(range(hyper.workers))
        self._arrived: set[int] = set()
        self._arrived_and_left = 0  # workers that left after a push in this round
        self._weight = 0.0  # of the gradients in this round; skipped pushes arrive without one
        self._total: Tensor | None = None  # sum of the gradients already in order
        self._held: dict[int, Tensor] = {}  # gradients that some lower worker may still precede
        slots = self.options.optimizer_buffers(hyper.workers) - 1
        # Zeros, not empty: memory is touched for the first time here and not inside the clock.
        self._free = [torch.zeros_like(weights) for _ in range(slots)]

    def state(self) -> Fields:
        """Return the state, with only the number of free buffers, whose contents are unused."""
        return Fields(super().state(), _free=len(self._free))

    def load(self, state: Fields) -> None:
        super().load(Fields(state, _free=self._free[: state["_free"]]))

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        self._arrived.add(worker)
        self._held[worker] = grad
        if self.push_weight != 1.0:
            grad.mul_(self.push_weight)
        self._weight += self.push_weight
        if self._advance(borrowed=grad):
            return Outcome.APPLIED
        if self._total is grad:
            self._total = self._keep(grad)
        elif worker in self._held:
            self._held[worker] = self._keep(grad)
        return Outcome.HELD

    def on_skip(self, worker: int, read_version: int) -> None:
        self._arrived.add(worker)
        self._advance()

    def on_leave(self, worker: int) -> None:
        self._live.discard(worker)
        if worker in self._arrived:
            # Its push stays in the round, its number may come back within the round.
            self._arrived.discard(worker)
            self._arrived_and_left += 1
            if worker in self._held:
                self._sum(self._held.pop(worker))
        self._advance()

    def on_join(self, worker: int) -> None:
        self._live.add(worker)

    def ready(self, worker: int) -> bool:
        return worker not in self._arrived

    def _summable_below(self) -> float:
        """Return the lowest number of a missing worker, or infinity if the round is complete."""
        return min(self._live - self._arrived, default=math.inf)

    def _advance(self, borrowed: Tensor | None = None) -> bool:
        """Sum what is in order and, if the round is complete, step.

        Says whether it was complete.

        `borrowed`: the gradient that is the caller's and must not enter the free list.
        """
        limit = self._summable_below()
        for worker in sorted(w for w in self._held if w < limit):
            self._sum(self._held.pop(worker), borrowed)
        if limit != math.inf:
            return False
        if self._total is not None:
            if self._weight not in (0.0, 1.0):  # without any weight the sum is one of zeros
                self._total.div_(self._weight)
            self._optimizer.step(self.weights, self._total, self.lr)
            self.version += 1
            self._release(self._total, borrowed)
        self._total, self._weight, self._arrived_and_left = None, 0.0, 0
        self._arrived.clear()
        return True

    def _sum(self, grad: Tensor, borrowed: Tensor | None = None) -> None:
        if self._total is None:
            self._total = grad
        else:
            self._total.add_(grad)
            self._release(grad, borrowed)

    def _keep(self, grad: Tensor) -> Tensor:
        slot = self._free.pop()
        slot.copy_(grad)
        return slot

    def _release(self, tensor: Tensor, borrowed: Tensor | None) -> None:
        if tensor is not borrowed:
            self._free.append(tensor)


class BackupPolicy(SyncPolicy):
    """Uses the first N - b of N workers in each step; late pushes are dropped.

    Chen et al., "Revisiting distributed synchronous SGD", 2016. A push is late when its weights were read
    before the last step. Its sender continues at once with the new weights. A step is also made when every
    live worker has pushed since the last one, late or not. Then workers were lost, or the missing ones wait
    at another shard, since shards decide separately who was late.
    """

    summary: ClassVar[str] = "parameter server, does not wait for the slowest workers"
    rule: ClassVar[str] = (
        "as ps-sync, from the first N - b pushes of a step; later ones are dropped"
    )

    @dataclass(frozen=True)
    class Options(PolicyOptions):
        refuses_adamw: ClassVar[str | None] = None
        backups: int = option(1, "workers a step does not wait for (at most workers - 1)", least=0)

        synchronous_alone: ClassVar[bool] = True  # whatever `backups` is: one push is waited for

        def waits_for_slowest(self, workers: int) -> bool:
            return self.quorum(workers) == workers

        def quorum(self, workers: int) -> int:
            """Return the number of pushes per step of `workers` workers."""
            return max(1, workers - self.backups)

        def optimizer_buffers(self, workers: int) -> int:
            """Momentum, and the gradients of a step but its last."""
            return 1 + (self.quorum(workers) - 1)

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        super().__init__(weights, hyper, options)
        self._quorum = self.options.quorum(hyper.workers)
        self._late: set[int] = set()  # heard since the last step, but not in this one
        #: Not yet heard of a step whose pushes were all skipped: they are late, on an unchanged version.
        self._passed: set[int] = set()

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        if not self._is_late(worker, read_version):
            return super().on_push(worker, grad, read_version)
        self._late.add(worker)
        self._advance()
        return Outcome.DROPPED

    def on_skip(self, worker: int, read_version: int) -> None:
        (self._late if self._is_late(worker, read_version) else self._arrived).add(worker)
        self._advance()

    def on_leave(self, worker: int) -> None:
        self._late.discard(worker)
        self._passed.discard(worker)
        super().on_leave(worker)

    def _is_late(self, worker: int, read_version: int) -> bool:
        passed = worker in self._passed
        self._passed.discard(worker)
        return passed or read_version != self.version

    def _advance(self, borrowed: Tensor | None = None) -> bool:
        version, missing = self.version, self._live - self._arrived - self._late
        pushes = len(self._arrived) + self._arrived_and_left
        stepped = pushes > 0 and super()._advance(borrowed)
        if stepped:
            self._late.clear()
            if self.version == version:
                self._passed |= missing
        return stepped

    def _summable_below(self) -> float:
        """Return the same for all: a step's workers are known only when it is complete."""
        enough = len(self._arrived) + self._arrived_and_left >= self._quorum
        return math.inf if enough or self._live <= self._arrived | self._late else -1


@dataclass(frozen=True)
class BucketOptions(PolicyOptions):
    """Options of policies that update with every n pushes from any workers, without waiting."""

    refuses_adamw: ClassVar[str | None] = None

    @property
    def synchronous_alone(self) -> bool:
        return self.pushes_per_update(1) == 1

    def waits_for_slowest(self, workers: int) -> bool:
        return False

    def updates_per_step(self, workers: int) -> float:
        return workers / self.pushes_per_update(workers)

    def pushes_per_update(self, workers: int) -> int:
        """Return the number of workers: a global batch."""
        return workers

    def optimizer_buffers(self, workers: int) -> int:
        """Momentum, and the running sum where an update takes more than one push."""
        return 1 + (self.pushes_per_update(workers) > 1)


class KBatchPolicy(Policy):
    """Averages every K pushes, from any workers, into one update, without waiting.

    W -= lr * velocity(mean of K gradients). K-batch-async SGD of Dutta et al., "Slow and stale gradients can
    win the verdict", AISTATS 2018; n-softsync of Zhang et al., IJCAI 2016. `finish` averages and applies the
    fewer than K that are left.
    """

    summary: ClassVar[str] = "parameter server, averages any K pushes"
    rule: ClassVar[str] = "W -= lr velocity(mean of any K pushes)"

    @dataclass(frozen=True)
    class Options(BucketOptions):
        k: int = option(
            0, "pushes averaged into one update; 0: as many as there are workers", least=0
        )

        def pushes_per_update(self, workers: int) -> int:
            """`k`, or the number of workers where it is 0."""
            return self.k or workers

    def __init__(self, weights: Tensor, hyper: Hyper, options: PolicyOptions | None = None) -> None:
        import torch

        super().__init__(weights, hyper, options)
        self._optimizer = optimizer_of(weights, hyper)
        self._k = self.options.pushes_per_update(hyper.workers)
        self._sum = torch.zeros_like(weights) if self._k > 1 else None
        self._count = 0

    def on_push(self, worker: int, grad: Tensor, read_version: int) -> Outcome:
        if self._sum is None:
            self._apply(grad)
            return Outcome.APPLIED
        if self._count:
            self._sum.add_(grad)
        else:
            self._sum.copy_(grad)
        self._count += 1
        if self._count < self._k:
            return Outcome.HELD
        self._apply_sum()
        return Outcome.APPLIED

    def finish(self) -> None:
        if self._count:
            self._apply_sum()

    def _apply_sum(self) -> None:
        self._apply(self._sum.div_(self._count))
        self._count = 0

    def _apply(self, grad: Tensor) -> None:
        self._optimizer.step(self.weights, grad, self.lr)
        self.version += 1
