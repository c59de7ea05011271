"""One shard of a server: its policy under a lock, the workers that wait for it, and its statistics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratbench.extensions.servers.policies.policy import Outcome, Policy, WeightsVersion
from stratbench.extensions.servers.ps.tickets import CompactIntSet

#: Weights of a shard, shape [n], and how often they were updated.
WeightsAndVersion = tuple[Tensor, WeightsVersion]


class Shard:
    """One shard of the weights: an update policy, protected by a lock.

    A ticket is applied to the shard once, even if it is pushed again.
    """

    def __init__(
        self,
        index: int,
        policy: Policy,
        release: Callable[[int, int], None],
        lr_share: Callable[[int], float] | None = None,
    ) -> None:
        """Create a shard in which all workers are present.

        Args:
            index: Number of the shard.
            policy: Policy of the shard, with its weights.
            release: Called under the lock with a worker's slot and `index` when this worker may read the
                shard.
            lr_share: Function from the number of pushes to the factor on the learning rate. None: always 1.
        """
        workers = policy.hyper.workers
        self.index = index
        self.policy = policy
        self.staleness: Counter[int] = Counter()  # number of applied pushes by staleness in updates
        self.dropped = 0
        self.apply_s = 0.0
        self._release = release
        self._lr_share = lr_share
        self._lock = threading.Lock()
        self._taken = CompactIntSet()
        self._waiting: set[int] = set()
        self._left: set[int] = set()
        self._read_version = [0] * workers
        self._snapshots: list[Tensor] = []
        #: Whether workers read the weights themselves and not a prediction. If so, no copy is sent.
        self._lends_own_weights = type(policy).view is Policy.view
        self._n_borrowers = 0  # number of threads that are sending `self.policy.weights`
        # Number of threads that are sending a tensor that was `self.policy.weights` before, by its id.
        self._n_borrowers_by_tensor_id: dict[int, int] = {}
        # A tensor that was `self.policy.weights` before and that no thread sends any more, for reuse.
        self._spare: Tensor | None = None

    def push(
        self,
        worker: int,
        ticket: int,
        grad: Tensor | None,
        is_alive: Callable[[], bool],
        weight: float = 1.0,
    ) -> None:
        """Apply the gradient that a worker has pushed for a ticket.

        If the shard has had the ticket before, because its first worker was lost half-way, the step counts as
        skipped. If the worker is lost by now, nothing changes.

        Args:
            worker: Slot of the worker.
            ticket: Number of the ticket.
            grad: Gradient, shape [n], or None if the step was skipped.
            is_alive: Returns whether the worker is still part of the run.
            weight: Weight of the gradient in a mean over pushes.
        """
        with self._lock:
            if not is_alive():
                return
            if worker in self._left:
                self._left.discard(worker)
                self.policy.on_join(worker)
            if not self._taken.add(ticket):
                grad = None
            if self._lr_share is not None:
                self.policy.lr_share = self._lr_share(len(self._taken))
            self.policy.push_weight = weight
            self._save_weights_before_change()
            started = time.perf_counter()
            self._apply_gradient(worker, grad)
            self._waiting.add(worker)
            self._release_ready_workers()
            self.apply_s += time.perf_counter() - started

    def _apply_gradient(self, worker: int, grad: Tensor | None) -> None:
        read_version = self._read_version[worker]
        if grad is None:
            self.policy.on_skip(worker, read_version)
            return
        staleness = self.policy.version - read_version
        if self.policy.on_push(worker, grad, read_version) is Outcome.DROPPED:
            self.dropped += 1
        else:
            self.staleness[staleness] += 1

    def _release_ready_workers(self) -> None:
        for worker in [w for w in self._waiting if self.policy.ready(w)]:
            self._waiting.discard(worker)
            self._release(worker, self.index)

    def view(self, worker: int, out: Tensor, is_alive: Callable[[], bool]) -> WeightsVersion:
        """Write the weights that a worker reads to `out`, and return their version.

        If the worker is lost, the read is not recorded, because another worker may have its slot.

        Args:
            worker: Slot of the worker.
            out: Tensor for the weights, shape [n].
            is_alive: Returns whether the worker is still part of the run.
        """
        with self._lock:
            return self._write_weights(worker, out, is_alive())

    def _write_weights(self, worker: int, out: Tensor, alive: bool) -> WeightsVersion:
        """Write the weights that a worker reads to `out`, and return their version. `_lock` is held."""
        if not alive:
            out.copy_(self.policy.weights)
            return self.policy.version
        version = self._read_version[worker] = self.policy.view(worker, out)
        return version

    @contextmanager
    def lend_weights(
        self, worker: int, spare: Tensor, is_alive: Callable[[], bool]
    ) -> Iterator[WeightsAndVersion]:
        """Yield the weights that a worker reads, shape [n], and their version.

        The yielded tensor does not change within the block, in which the caller sends it. It is the shard's
        own tensor if the policy makes no predictions, and updates go to a copy. Otherwise it is `spare`.

        Args:
            worker: Slot of the worker.
            spare: Tensor for weights that the policy computes for this worker, shape [n].
            is_alive: Returns whether the worker is still part of the run.
        """
        with self._lock:
            if self._lends_own_weights:
                lent, version = self.policy.weights, self.policy.version
                self._n_borrowers += 1
                if is_alive():
                    self._read_version[worker] = version
            else:
                lent, version = spare, self._write_weights(worker, spare, is_alive())
        try:
            yield lent, version
        finally:
            with self._lock:
                self._return_lent_weights(lent)

    def add_worker(self, worker: int) -> None:
        """Add a new or returning worker, and let it read the shard's weights at once."""
        with self._lock:
            if worker in self._left:
                self._left.discard(worker)
                self.policy.on_join(worker)
            self._release(worker, self.index)

    def remove_worker(self, worker: int) -> None:
        """Remove an idle or lost worker, so that no other worker waits for it."""
        with self._lock:
            self._waiting.discard(worker)
            if worker in self._left:
                return
            self._left.add(worker)
            self._save_weights_before_change()
            self.policy.on_leave(worker)
            self._release_ready_workers()

    def state(self) -> dict[str, Any]:
        """Return a copy of the shard's state for `load`. It does not have the workers that wait or read."""
        with self._lock:
            return {
                "policy": self.policy.state(),
                "floor": self._taken.floor,
                "above": self._taken.numbers_above_floor,
                "staleness": dict(self.staleness),
                "dropped": self.dropped,
                "apply_s": self.apply_s,
                "left": set(self._left),
            }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`. Afterwards no worker is present."""
        self.policy.load(state["policy"])
        self._taken = CompactIntSet(state["floor"], state["above"])
        self.staleness = Counter(state["staleness"])
        self.dropped, self.apply_s = state["dropped"], state["apply_s"]
        self._left = set(state["left"])
        for slot in range(self.policy.hyper.workers):
            self.remove_worker(slot)

    def finish(self) -> None:
        """End the training: remove all workers, and apply the gradients that the policy still holds."""
        with self._lock:
            self._save_weights_before_change()
            for worker in range(self.policy.hyper.workers):
                if worker not in self._left:
                    self._left.add(worker)
                    self.policy.on_leave(worker)
            self.policy.finish()
            # A worker that still waits needs the final weights. Its push was applied before the end.
            for worker in self._waiting:
                self._release(worker, self.index)
            self._waiting.clear()

    def request_snapshot(self, out: Tensor) -> None:
        """Request that the present weights are copied to `out`, shape [n].

        `save_snapshots` makes the copy. If the shard's weights change before, the copy is made before this
        change. So no worker waits for a copy of the whole model.
        """
        with self._lock:
            self._snapshots.append(out)

    def save_snapshots(self) -> None:
        """Make the copies that `request_snapshot` has requested."""
        with self._lock:
            self._save_snapshots()

    def _save_weights_before_change(self) -> None:
        """Copy the weights before a change, if a snapshot or a sending thread needs them. `_lock` is held."""
        self._save_snapshots()
        if self._n_borrowers:
            weights = self.policy.weights
            fresh = torch.empty_like(weights) if self._spare is None else self._spare
            self._n_borrowers_by_tensor_id[id(weights)], self._n_borrowers = self._n_borrowers, 0
            self.policy.weights, self._spare = fresh.copy_(weights), None

    def _return_lent_weights(self, lent: Tensor) -> None:
        """Record that a thread has finished sending the tensor `lent`. `_lock` is held."""
        if lent is self.policy.weights:
            self._n_borrowers -= 1
        elif id(lent) in self._n_borrowers_by_tensor_id:
            self._n_borrowers_by_tensor_id[id(lent)] -= 1
            if not self._n_borrowers_by_tensor_id[id(lent)]:
                del self._n_borrowers_by_tensor_id[id(lent)]
                # Reuse the tensor, because the first access to new memory is slow.
                self._spare = lent

    def _save_snapshots(self) -> None:
        for out in self._snapshots:
            out.copy_(self.policy.weights)
        self._snapshots.clear()
