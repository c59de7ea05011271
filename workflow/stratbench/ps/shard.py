"""One shard on the server: its policy under a lock, its waiting workers, and its statistics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratbench.ps.policies.policy import Outcome, Policy
from stratbench.ps.tickets import Once


def _always() -> bool:
    return True


class Shard:
    """A policy and its lock.

    Every ticket counts here once, however often it is pushed.

    `release(worker, index)` is called, under the lock, for each worker that may now read the shard.
    """

    def __init__(
        self,
        index: int,
        policy: Policy,
        release: Callable[[int, int], None],
        lr_share: Callable[[int], float] | None = None,
    ) -> None:
        """`lr_share`: what the learning rate is multiplied by, by the number of pushes taken."""
        workers = policy.hyper.workers
        self.index = index
        self.policy = policy
        self.staleness: Counter[int] = Counter()  # updates between a push and what it was read from
        self.dropped = 0
        self.apply_s = 0.0
        self._release = release
        self._lr_share = lr_share
        self._lock = threading.Lock()
        self._taken = Once()
        self._waiting: set[int] = set()
        self._left: set[int] = set()
        self._read_version = [0] * workers
        self._snapshots: list[Tensor] = []
        #: The policy shows every worker the weights themselves: they can be lent without a copy.
        self._shows_weights = type(policy).view is Policy.view
        self._borrowers = 0  # readers of the tensor that has the weights now
        self._lent_on: dict[int, int] = {}  # borrowers of tensors that held them before, by id
        self._spare: Tensor | None = None  # one of these without readers

    def push(
        self,
        worker: int,
        ticket: int,
        grad: Tensor | None,
        alive: Callable[[], bool],
        weight: float = 1.0,
    ) -> None:
        """Take a worker's gradient for a ticket.

        A ticket that was taken before (its first holder was lost half-way) is a skipped step. If the sender
        is no longer `alive` under the lock, the push changes nothing.

        Args:
            worker: Slot of the worker.
            ticket: Number of the ticket.
            grad: Gradient, shape [n], or None if the step was skipped.
            alive: Whether the worker is still part of the run.
            weight: Factor on the gradient.
        """
        with self._lock:
            if not alive():
                return
            if worker in self._left:
                self._left.discard(worker)
                self.policy.on_join(worker)
            if not self._taken.add(ticket):
                grad = None
            if self._lr_share is not None:
                self.policy.lr_share = self._lr_share(len(self._taken))
            self.policy.push_weight = weight
            self._before_change()
            started = time.perf_counter()
            self._apply(worker, grad)
            self._waiting.add(worker)
            self._release_ready()
            self.apply_s += time.perf_counter() - started

    def _apply(self, worker: int, grad: Tensor | None) -> None:
        read_version = self._read_version[worker]
        if grad is None:
            self.policy.on_skip(worker, read_version)
            return
        staleness = self.policy.version - read_version
        if self.policy.on_push(worker, grad, read_version) is Outcome.DROPPED:
            self.dropped += 1
        else:
            self.staleness[staleness] += 1

    def _release_ready(self) -> None:
        for worker in [w for w in self._waiting if self.policy.ready(w)]:
            self._waiting.discard(worker)
            self._release(worker, self.index)

    def view(self, worker: int, out: Tensor, alive: Callable[[], bool] = _always) -> int:
        """Write the weights for `worker` to `out`; return their version.

        If it is no longer `alive`, nothing is noted: its slot may be another's by now.

        Args:
            worker: Slot of the worker.
            out: Shape [n].
            alive: Whether the worker is still part of the run.
        """
        with self._lock:
            return self._view(worker, out, alive())

    def _view(self, worker: int, out: Tensor, alive: bool) -> int:
        """Return the same; `_lock` is held."""
        if not alive:
            out.copy_(self.policy.weights)
            return self.policy.version
        version = self._read_version[worker] = self.policy.view(worker, out)
        return version

    @contextmanager
    def lend(
        self, worker: int, spare: Tensor, alive: Callable[[], bool] = _always
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield the weights for `worker`, shape [n], and their version, constant in the block.

        They are the shard's own if the policy shows them as they are: a send can take long and needs no copy.
        A change meanwhile is made to a copy. Otherwise they are `spare`, written.

        Args:
            worker: Slot of the worker.
            spare: Shape [n].
            alive: Whether the worker is still part of the run.
        """
        with self._lock:
            if self._shows_weights:
                lent, version = self.policy.weights, self.policy.version
                self._borrowers += 1
                if alive():
                    self._read_version[worker] = version
            else:
                lent, version = spare, self._view(worker, spare, alive())
        try:
            yield lent, version
        finally:
            with self._lock:
                self._take_back(lent)

    def join(self, worker: int) -> None:
        """Note that `worker` is at work (again) and has to read at once."""
        with self._lock:
            if worker in self._left:
                self._left.discard(worker)
                self.policy.on_join(worker)
            self._release(worker, self.index)

    def leave(self, worker: int) -> None:
        """Note that `worker` is idle or lost: no wait for it, and no more releases."""
        with self._lock:
            self._waiting.discard(worker)
            if worker in self._left:
                return
            self._left.add(worker)
            self._before_change()
            self.policy.on_leave(worker)
            self._release_ready()

    @property
    def taken(self) -> Once:
        """The tickets that have been here; a copy."""
        with self._lock:
            return Once(self._taken.floor, self._taken.above)

    def state(self) -> dict[str, Any]:
        """Return all that it knows, copied, for `load`.

        Waiting and reading workers are not part of it.
        """
        with self._lock:
            return {
                "policy": self.policy.state(),
                "floor": self._taken.floor,
                "above": self._taken.above,
                "staleness": dict(self.staleness),
                "dropped": self.dropped,
                "apply_s": self.apply_s,
                "left": set(self._left),
            }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a `state`, without any worker."""
        self.policy.load(state["policy"])
        self._taken = Once(state["floor"], state["above"])
        self.staleness = Counter(state["staleness"])
        self.dropped, self.apply_s = state["dropped"], state["apply_s"]
        self._left = set(state["left"])
        for slot in range(self.policy.hyper.workers):
            self.leave(slot)

    def finish(self) -> None:
        """No push will come any more: all leave, and what is held is applied."""
        with self._lock:
            self._before_change()
            for worker in range(self.policy.hyper.workers):
                if worker not in self._left:
                    self._left.add(worker)
                    self.policy.on_leave(worker)
            self.policy.finish()
            for worker in self._waiting:  # a ticket that is done again needs weights
                self._release(worker, self.index)
            self._waiting.clear()

    def snapshot(self, out: Tensor) -> None:
        """Copy the weights as they are now to `out`, shape [n], later.

        `save_snapshots` copies, or the first change if that is earlier. The copy is exact, and no worker
        waits for a copy of the whole model.
        """
        with self._lock:
            self._snapshots.append(out)

    def save_snapshots(self) -> None:
        """Make the copies that `snapshot` promised."""
        with self._lock:
            self._save_snapshots()

    def _before_change(self) -> None:
        """Keep what others are still to read; `_lock` is held."""
        self._save_snapshots()
        if self._borrowers:
            weights = self.policy.weights
            fresh = torch.empty_like(weights) if self._spare is None else self._spare
            self._lent_on[id(weights)], self._borrowers = self._borrowers, 0
            self.policy.weights, self._spare = fresh.copy_(weights), None

    def _take_back(self, lent: Tensor) -> None:
        """A borrower has read `lent`; `_lock` is held."""
        if lent is self.policy.weights:
            self._borrowers -= 1
        elif id(lent) in self._lent_on:
            self._lent_on[id(lent)] -= 1
            if not self._lent_on[id(lent)]:
                del self._lent_on[id(lent)]
                self._spare = lent  # its memory is touched already

    def _save_snapshots(self) -> None:
        for out in self._snapshots:
            out.copy_(self.policy.weights)
        self._snapshots.clear()
