"""A parameter server on a virtual clock: the real policies and tickets, simulated time.

`staleness.py` and the tests of the policies run on it. It is a discrete-event driver. Workers take
tickets, compute for a drawn time, push shard by shard and wait where the policy says so; the server
applies one push at a time. Nothing sleeps and nothing depends on the machine, so the same arguments
give the same run, bit for bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stratbench.extensions.servers.policies.policy import Outcome, Policy
from stratbench.extensions.servers.ps.tickets import CompactIntSet, Ticket, TicketPlan, Tickets

#: (ticket, part of the ticket, weights [n]) -> gradient [n], or None where it overflowed.
Gradient = Callable[[Ticket, int, Tensor], Tensor | None]


class WorkerLost(RuntimeError):
    """A worker was lost under a policy that cannot go on without it."""


class Deadlock(RuntimeError):
    """Tickets are left, workers are there, and nothing can happen any more."""


class Timing:
    """How long everything takes, in virtual seconds, drawn worker by worker from a seed."""

    def __init__(
        self,
        compute_s: float,
        push_s: float = 0.0,
        pull_s: float = 0.0,
        apply_s: float = 0.0,
        compute_spread: float = 0.0,
        transfer_spread: float = 0.0,
        slowdown: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        """`compute_s`: median time of one ticket; `push_s`, `pull_s`: of all shards' transfer.

        `apply_s`: the server's time for one push of all shards, one after the other. The spreads
        are the standard deviations of the logarithm of a log-normal time. `slowdown[i]` multiplies
        worker i's compute time; 1 for workers it does not name.
        """
        self.compute_s, self.push_s, self.pull_s, self.apply_s = compute_s, push_s, pull_s, apply_s
        self.compute_spread, self.transfer_spread = compute_spread, transfer_spread
        self.slowdown, self.seed = slowdown, seed
        self._random: dict[int, random.Random] = {}

    def draw_compute_s(self, worker: int) -> float:
        """Time of `worker`'s next whole ticket."""
        slowdown = self.slowdown[worker] if worker < len(self.slowdown) else 1.0
        return self._draw(worker, self.compute_s * slowdown, self.compute_spread)

    def draw_push_s(self, worker: int) -> float:
        """Time of `worker`'s next push."""
        return self._draw(worker, self.push_s, self.transfer_spread)

    def draw_pull_s(self, worker: int) -> float:
        """Time of `worker`'s next pull."""
        return self._draw(worker, self.pull_s, self.transfer_spread)

    def _draw(self, worker: int, median_s: float, spread: float) -> float:
        stream = self._random.setdefault(worker, random.Random(f"{self.seed}/{worker}"))
        return median_s * math.exp(stream.gauss(0.0, spread))


@dataclass
class Trace:
    """What happened in a run. Times in virtual seconds, lists by worker."""

    time_s: float = 0.0  # when the last push was applied
    pushes: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # shards' pushes that came too late
    waits_s: list[float] = field(default_factory=list)  # between the push applied and the reply
    staleness: list[Counter[int]] = field(default_factory=list)  # by shard: staleness -> pushes
    settled: list[int] = field(default_factory=list)  # ticket numbers, in order
    reassigned: int = 0


@dataclass
class _Worker:
    number: int
    weights: Tensor  # what it computes on, [n]
    versions: list[int]
    present: bool = True
    idle: bool = False  # present, but without a ticket to work on
    incarnation: int = 0  # grows when it is lost: events of an earlier incarnation are void
    ticket: Ticket | None = None
    part: int = 0
    gradient: Tensor | None = None
    unapplied: int = 0  # shards of its push that the server has not taken yet
    waiting: set[int] = field(default_factory=set)  # shards it has pushed and not read since
    applied_s: float = 0.0


def simulate(
    policies: Sequence[Policy],
    plan: TicketPlan,
    gradient: Gradient,
    timing: Timing,
    changes: Iterable[tuple[float, int, str]] = (),
    lr_share: Callable[[int], float] | None = None,
) -> Trace:
    """Run `plan` to its end over the shards that `policies` own, one policy a shard.

    The flat weights are the policies' weights end to end; `hyper.workers` workers start at time 0.
    `changes`: (time in seconds, worker, "leave" or "join"): a worker is lost, and comes back.
    `lr_share`: what the learning rate is multiplied by, by the number of pushes a shard has taken.
    Raises WorkerLost where the policy does not tolerate a loss, Deadlock if the run cannot end.
    """
    return _Run(policies, plan, gradient, timing, changes, lr_share).run()


class _Run:
    """The state of one simulated run."""

    def __init__(
        self,
        policies: Sequence[Policy],
        plan: TicketPlan,
        gradient: Gradient,
        timing: Timing,
        changes: Iterable[tuple[float, int, str]],
        lr_share: Callable[[int], float] | None,
    ) -> None:
        self.lr_share = lr_share
        self.policies, self.gradient, self.timing = policies, gradient, timing
        self.tickets = Tickets(plan)
        self.parts = policies[0].options.pushes_per_ticket
        self.taken = [
            CompactIntSet() for _ in policies
        ]  # pushes by shard: a lost worker's may be half in
        ends = list(itertools.accumulate(p.weights.numel() for p in policies))
        self.slices = [slice(a, b) for a, b in itertools.pairwise([0, *ends])]
        n = policies[0].hyper.workers
        flat = torch.cat([p.weights for p in policies])
        self.workers = [_Worker(i, flat.clone(), [0] * len(policies)) for i in range(n)]
        self.trace = Trace(
            pushes=[0] * n,
            dropped=[0] * n,
            waits_s=[0.0] * n,
            staleness=[Counter() for _ in policies],
        )
        self.server_free_s = 0.0
        self._order = itertools.count()  # equal times: first come, first served
        self._queue_frame: list[tuple] = []
        self._changes = sorted(changes)

    def run(self) -> Trace:
        for worker in self.workers:
            self._read_all(worker)
            self._start(worker, 0.0)
        for time_s, number, what in self._changes:
            action = {"leave": self._lose, "join": self._join}[what]
            self._at(time_s, action, self.workers[number], None)
        while self._queue_frame:
            now_s, _, action, worker, incarnation, shard = heapq.heappop(self._queue_frame)
            if shard is None:
                action(worker, now_s)
            elif incarnation == worker.incarnation:
                action(worker, shard, now_s)
        self._check_complete()
        for policy in self.policies:
            policy.finish()
        self.trace.reassigned = len(self.tickets.reassigned)
        return self.trace

    def _at(self, time_s: float, action: Callable, worker: _Worker, shard: int | None) -> None:
        event = (time_s, next(self._order), action, worker, worker.incarnation, shard)
        heapq.heappush(self._queue_frame, event)

    # ---- a worker's round: read, take a ticket, compute, push, wait

    def _read(self, worker: _Worker, shard: int) -> None:
        out = worker.weights[self.slices[shard]]
        worker.versions[shard] = self.policies[shard].view(worker.number, out)

    def _read_all(self, worker: _Worker) -> None:
        for shard in range(len(self.policies)):
            self._read(worker, shard)

    def _start(self, worker: _Worker, now_s: float) -> None:
        """Work on with what was read; without a ticket, make room for the others."""
        if worker.ticket is None:
            worker.ticket, worker.part = self.tickets.take_next_ticket(worker.number), 0
        if worker.ticket is None:
            worker.idle = True
            self._tell(worker, "on_leave")
            return
        worker.gradient = self.gradient(worker.ticket, worker.part, worker.weights)
        worker.unapplied = len(self.policies)
        timing, number = self.timing, worker.number
        compute_s = timing.draw_compute_s(number) / self.parts
        sent_s = now_s + timing.draw_pull_s(number) + compute_s
        push_s = timing.draw_push_s(number)
        for shard in range(len(self.policies)):
            arrival_s = sent_s + push_s * (shard + 1) / len(self.policies)
            self._at(arrival_s, self._arrive, worker, shard)

    def _arrive(self, worker: _Worker, shard: int, now_s: float) -> None:
        start_s = max(now_s, self.server_free_s)
        self.server_free_s = start_s + self.timing.apply_s / len(self.policies)
        self._at(self.server_free_s, self._apply, worker, shard)

    def _apply(self, worker: _Worker, shard: int, now_s: float) -> None:
        policy, number, read = self.policies[shard], worker.number, worker.versions[shard]
        push = worker.ticket.number * self.parts + worker.part
        is_new = self.taken[shard].add(push)
        if self.lr_share is not None:
            policy.lr_share = self.lr_share(len(self.taken[shard]))
        if not is_new or worker.gradient is None:
            policy.on_skip(number, read)
        else:
            self.trace.staleness[shard][policy.version - read] += 1
            outcome = policy.on_push(number, worker.gradient[self.slices[shard]], read)
            self.trace.dropped[number] += outcome is Outcome.DROPPED
        worker.waiting.add(shard)
        worker.unapplied -= 1
        if worker.unapplied == 0:
            self._settle_part(worker, now_s)
        self._release(now_s)

    def _settle_part(self, worker: _Worker, now_s: float) -> None:
        self.trace.pushes[worker.number] += 1
        self.trace.time_s = worker.applied_s = now_s
        worker.part += 1
        if worker.part == self.parts:
            self.tickets.record_received_gradients(worker.number, worker.ticket.number)
            self.trace.settled.append(worker.ticket.number)
            worker.ticket = None

    def _release(self, now_s: float) -> None:
        """Answer every worker that the policies let go, until nothing changes any more."""
        released = True
        while released:
            released = False
            for worker in self.workers:
                for shard in sorted(worker.waiting):
                    if self.policies[shard].ready(worker.number):
                        worker.waiting.remove(shard)
                        self._read(worker, shard)
                        if not worker.waiting and not worker.unapplied:
                            self.trace.waits_s[worker.number] += now_s - worker.applied_s
                            self._start(worker, now_s)
                            released = True

    # ---- workers that are lost, and that come (back)

    def _tell(self, worker: _Worker, event: str) -> None:
        for policy in self.policies:
            getattr(policy, event)(worker.number)

    def _lose(self, worker: _Worker, now_s: float) -> None:
        if not worker.present:
            return
        if not worker.idle and not self.policies[0].options.survives_worker_loss:
            step = self.policies[0].version
            raise WorkerLost(f"step {step}: worker {worker.number} was lost")
        worker.present, worker.incarnation = False, worker.incarnation + 1
        worker.ticket, worker.unapplied = None, 0
        worker.waiting.clear()
        if not worker.idle:
            self._tell(worker, "on_leave")
        worker.idle = False
        returned = self.tickets.take_back_tickets(worker.number)
        self._release(now_s)
        for other in [w for w in self.workers if w.idle and returned]:
            self._resume(other, now_s)

    def _join(self, worker: _Worker, now_s: float) -> None:
        if not worker.present:
            worker.present = worker.idle = True
            self._resume(worker, now_s)

    def _resume(self, worker: _Worker, now_s: float) -> None:
        """Put an idle worker back to work if there is a ticket for it."""
        worker.ticket, worker.part = self.tickets.take_next_ticket(worker.number), 0
        if worker.ticket is not None:
            worker.idle = False
            self._tell(worker, "on_join")
            self._read_all(worker)
            self._start(worker, now_s)

    def _check_complete(self) -> None:
        if self.tickets.are_all_completed:
            return
        left = len(self.tickets.plan) - self.tickets.n_settled
        waiting = [w.number for w in self.workers if w.waiting]
        if not any(w.present for w in self.workers):
            raise WorkerLost(f"all workers were lost with {left} tickets left")
        raise Deadlock(f"{left} tickets are left; workers that wait forever: {waiting}")
