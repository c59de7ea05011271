"""Elastic synchronous training: a collective strategy on the workers that are present.

The global batch stays the same and is divided over the present workers. Each weights its loss by its
fraction: the mean gradient is that of the full batch, whichever workers are present. A generation stops after
the same step at all of its members. They vote in each step on whether to continue; the vote runs concurrently
with the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratbench.extensions.checkpoints import checkpoints
from stratbench.extensions.elastic.coordinator import reaches
from stratbench.extensions.elastic.group import ElasticGroup, broadcast
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.member import Gone, Over, Seat
from stratbench.strategies.base import Collective, Worker
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.train import loop
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.generators import seed_generators
from stratbench.workload.tasks import Task

#: How often the state is kept on the disk, in seconds.
CHECKPOINT_S = 60.0
#: What an exception says that comes of a member that is gone.
_OF_PEERS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "store")


class Weighted(Task):
    """A task whose mean loss is multiplied by `weight`: a member's fraction times their number.

    A sum and its weight stay as they are, since they contain their own normalization.
    """

    def __init__(self, task: Task) -> None:
        self._task, self.weight = task, 1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Any]:
        loss = self._task.loss(outputs, targets)
        if isinstance(loss, tuple) or self.weight == 1.0:
            return loss
        return loss * self.weight


def share(batch: int, rank: int, world: int) -> slice:
    """Return a member's slice of a batch, in nearly equal parts.

    Args:
        batch: Samples of the batch.
        rank: Rank in the generation.
        world: Number of its members.
    """
    return slice(rank * batch // world, (rank + 1) * batch // world)


@dataclass
class _Round:
    """A member's results in one generation."""

    failed: bool = False
    through: bool = False
    #: Of each epoch that is not told yet: the weighted losses of its steps, still on the device, and their
    #: seconds.
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)


class ElasticSynchronous:
    """A member's training, from its first generation to its last."""

    def __init__(
        self,
        strategy: Collective,
        data: DeviceData,
        worker: Worker,
        phases: Phases,
        group: ElasticGroup,
        seat: Seat,
        leaving: threading.Event,
        number: int,
    ) -> None:
        """`strategy`: set up and warmed up in a group of its own. `leaving`: set when it shall leave."""
        self.strategy, self.data, self.worker = strategy, data, worker
        self._phases, self._group, self._seat, self._leaving = phases, group, seat, leaving
        self._task = worker.task
        self._weighted = worker.task = Weighted(worker.task)
        self._clock = StepClock(worker.device, worker.heartbeat)
        worker.mark = self._clock.mark
        self._steps_per_epoch = data.train_samples // worker.settings.global_batch
        self._total = worker.settings.total_steps(data.train_samples)
        #: How many it has taken part in.
        self.generations = 0
        self._step = self._samples = self._epochs_done = 0
        #: Results of epochs that the coordinator may not have heard of.
        self._entries: list[dict[str, Any]] = []
        self._rank, self._world, self._generation, self._number = 0, 1, 0, number
        self._running = False
        #: By the last vote, whether this member leaves, and whether all do: then nobody has the state.
        self._leaves = self._all_leave = False
        self._stopped_s: float | None = None
        self._kept_s = time.monotonic()
        # What a device computes after its group has broken is no state.
        self._checkpoints = checkpoints.Writer(worker.folder.path, counts=lambda: not group.broken)
        self._initial = strategy.save() if worker.device.type == "cuda" else None
        self._status: tuple[str, str | None] = ("ok", None)
        self._tables = lru_cache(maxsize=1)(
            lambda epoch: data.tables(worker.settings.seed, epoch, worker.settings.augment).on(
                data.index_device
            )
        )

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its generation, or was in its last one."""
        return self._rank == 0

    def run(self, memory: MemoryMeter) -> loop.Result:
        """Take part until the training is over, or this worker must leave; return its results.

        Raises Over if that is before it has taken part.
        """
        self._tables(0)
        self._seat.say("ready")
        try:
            while True:
                message = self._await_form()
                if message is None:
                    break
                self._take_part(message, memory)
        except Gone as gone:
            print(gone, flush=True)
            if self.is_first:
                self._keep_for_others()
        except Over as over:
            print(over, flush=True)
        if not self.generations:
            raise Over("this worker has taken part in nothing")
        return loop.Result(
            *self._status, self._clock, loop.Progress(None), len(self._clock.step_ms), self._samples,
            memory.read(),
        )  # fmt: skip

    @property
    def checkpoint_times_s(self) -> dict[str, list[float]]:
        """Seconds for which each checkpoint blocked the training, and took to write."""
        written = self._checkpoints
        return {"held_up_s": written.held_up_s, "written_s": written.written_s}

    def _await_form(self) -> dict[str, Any] | None:
        """Return the next generation that this member is called to.

        Return None once it has left.
        """
        if self._leaving.is_set() and not self.generations:
            self._seat.say("left")
            return None
        message = self._seat.next()
        return None if message["what"] == "leave" else message

    def _take_part(self, message: dict[str, Any], memory: MemoryMeter) -> None:
        """Be in one generation, from its forming to its stop."""
        self._epochs_done, self._generation = message["epochs_done"], message["generation"]
        self._entries = [e for e in self._entries if e["epoch"] > self._epochs_done]
        done = _Round()
        try:
            self._go_through(done, message, memory)
            self._report(done)
        except Gone:
            self._end_clock(done)
            last = {"generation": self._generation, "ended_unix_s": time.time(), "step": self._step}
            # The record's maker reads it.
            self.worker.folder.write_unheard(self._number, last | {"epochs": self._untold(done)})
            raise

    def _go_through(self, done: _Round, message: dict[str, Any], memory: MemoryMeter) -> None:
        """Meet the others, and train with them until the generation stops or breaks."""
        try:
            self._meet(message)
            if not self.generations:
                memory.start()
            self.generations += 1
            self._begin()
            done.through = self._train(done)
        except (RuntimeError, checkpoints.Damaged) as error:
            if not isinstance(error, checkpoints.Damaged) and not any(
                sign in str(error).lower() for sign in _OF_PEERS
            ):
                raise
            print(f"generation {message['generation']} is broken: {_first(error)}", flush=True)
            done.failed = True
            self._checkpoints.settle()  # it is known now whether the one that is written counts
        self._end_clock(done)
        self._stopped_s = time.monotonic()

    def _untold(self, done: _Round) -> dict[int, list[float]]:
        """Return unreported steps by epoch: sum and number of losses, members, seconds."""
        # A device may have computed anything before the host knew that its group is broken.
        garbage = done.failed and self._initial is not None
        sums = {
            epoch: (float(torch.stack(x).double().sum()), len(x)) if x and not garbage else (0.0, 0)
            for epoch, x in done.losses.items()
        }
        return {
            epoch: [*of, self._world, done.seconds.get(epoch, 0.0)] for epoch, of in sums.items()
        }

    def _report(self, done: _Round) -> None:
        taken = {"step": self._step, "epochs": self._untold(done)}
        if done.through:
            self._seat.say("through", **taken)
            self._seat.next()  # raises Over
        if done.failed and self._initial is not None:
            # A device may have gone on with what the broken collective left: only a checkpoint is sure.
            self.strategy.restore(self._initial)
            self._step = 0
        # Who is asked only after the vote leaves after the next one: somebody counts on its state.
        leaving = self._leaving.is_set() if done.failed else self._leaves
        # Of a generation that broke nobody knows who is left.
        if leaving if done.failed else self._all_leave and self._rank == 0:
            self._keep_for_others()
        self._seat.say("stopped", failed=done.failed, leaving=leaving, holds=self._step, **taken)

    # ------------------------------------------------------------ meeting

    def _meet(self, message: dict[str, Any]) -> None:
        """Form the group, and receive the state of its first rank."""
        with self._phases("rendezvous"):
            self._group.form(message["meeting"], message["rank"], message["world"])
        worker, strategy = self.worker, self.strategy
        self._rank, self._world = message["rank"], message["world"]
        worker.rank, worker.world_size, worker.mesh = self._rank, self._world, Mesh(self._world)
        strategy.optimizer.zero_grad(set_to_none=True)
        state = strategy.state_tensors() if message["load"] or self._rank else []
        # Its first rank may be lost while others have half of its state.
        with self._phases("join"), self._undone_if_it_fails(state):
            if message["load"]:
                with checkpoints.deleted_if_damaged(worker.folder.path, message["step"]):
                    checkpoints.read_into(worker.folder.path, message["step"], state)
            # DDP sends rank 0's weights and buffers to all.
            strategy.module = strategy.compiled = strategy.wrap(strategy.model, worker)
            broadcast(self._optimizer_tensors())
        self._step = strategy.steps = message["step"]
        batch = worker.settings.global_batch
        self._share = share(batch, self._rank, self._world)
        self._weighted.weight = self._world * (self._share.stop - self._share.start) / batch
        seed_generators(worker.settings.seed + 1 + self._rank + 7919 * self._step)

    @contextmanager
    def _undone_if_it_fails(self, tensors: list[Tensor]) -> Iterator[None]:
        """Restore tensors if a collective fails. A device then starts from scratch."""
        before = [t.clone() for t in tensors] if self._initial is None else []
        try:
            yield
        except RuntimeError:
            for tensor, then in zip(tensors, before, strict=False):
                tensor.copy_(then)
            raise

    def _optimizer_tensors(self) -> list[Tensor]:
        return self.strategy.state_tensors()[len(self.strategy.weights_and_buffers()) :]

    def _begin(self) -> None:
        """Synchronise the start, and report for how long no step was taken."""
        loop.settle_garbage()
        dist.barrier()
        pause_s = self._stopped_s and time.monotonic() - self._stopped_s
        self._seat.say("begun", pause_s=pause_s)

    # ------------------------------------------------------------ steps

    def _train(self, done: _Round) -> bool:
        """Take steps until all are taken, or the members vote to stop.

        Return whether all are.
        """
        while True:
            self._evaluate_where_due()
            if self._step >= self._total or self._status[0] == "diverged":
                return True
            ends = min(
                (self._step // self._steps_per_epoch + 1) * self._steps_per_epoch, self._total
            )
            if not self._steps_to(ends, done):
                return False
            if self._step < self._total:
                self._seat.say("trained", epochs=self._untold(done))
                done.losses.clear()

    def _steps_to(self, ends: int, done: _Round) -> bool:
        """Take the steps of an epoch up to `ends`.

        Return whether all of them were taken.
        """
        epoch = self._step // self._steps_per_epoch
        order, augmentation = self._tables(epoch)
        losses = done.losses.setdefault(epoch, [])
        clock, strategy, data = self._clock, self.strategy, self.data
        buffers = list(strategy.model.buffers())
        clock.begin()
        self._running = True
        votes = self._votes()
        while self._step < ends:
            if next(votes):
                break
            x, y = data.batch(order[self._samples_of(self._step)], augmentation)
            if self._step + 1 < ends:
                data.expect(order[self._samples_of(self._step + 1)], augmentation)
            clock.mark("data")
            with self._undone_if_it_fails(buffers):
                losses.append(strategy.step(x, y))
            clock.tick()
            self._step += 1
            self._samples += len(y)
            if self._rank == 0 and time.monotonic() - self._kept_s > CHECKPOINT_S:
                self._keep()
        votes.close()
        self._end_clock(done)
        self._group.check()  # the device is waited for
        return self._step == ends

    def _samples_of(self, step: int) -> slice:
        start = (step % self._steps_per_epoch) * self.worker.settings.global_batch
        return slice(start + self._share.start, start + self._share.stop)

    def _votes(self) -> Iterator[bool]:
        """Before each step: whether the members have agreed, in the step before, to stop here."""
        work = tally = None
        while True:
            self._group.check()  # who trains alone waits for nobody
            if work is not None:
                work.wait()
                wanted, leave = tally.tolist()
                self._all_leave = leave == self._world
                if wanted:
                    yield True
                    return
            self._leaves = self._leaving.is_set()
            wants = self._leaves or self._seat.change.is_set()
            tally = torch.tensor([int(wants), int(self._leaves)], dtype=torch.int32)
            work = dist.all_reduce(tally, async_op=True)
            yield False

    def _end_clock(self, done: _Round) -> None:
        """Stop the clock, if it runs.

        Its seconds are of the last epoch that was begun.
        """
        if self._running:
            self._running = False
            self._clock.end()
            done.seconds[max(done.losses)] = self._clock.epoch_times_s[-1]

    def _keep(self, wait: bool = False) -> None:
        facts = {"epochs": list(self._entries)}
        self._checkpoints.take(self._step, self.strategy.state_tensors(), wait, facts=facts)
        self._kept_s = time.monotonic()

    def _keep_for_others(self) -> None:
        """Save the state for later members, if there will be any: at its time limit a cell has ended."""
        if self._step and not self.worker.folder.ended.exists():
            self._keep(wait=True)

    # ------------------------------------------------------------ evaluation

    def _evaluate_where_due(self) -> None:
        """Evaluate together at the end of an epoch that has no result yet."""
        epoch, rest = divmod(self._step, self._steps_per_epoch)
        s = self.worker.settings
        if rest or s.steps or epoch <= self._epochs_done:
            return
        buffers = list(self.strategy.model.buffers())  # which are sent
        with self._phases("eval"), self._undone_if_it_fails(buffers):
            evaluated = loop.evaluate(
                self.strategy,
                self.data,
                self._task,
                self._rank,
                Mesh(self._world),
                self.worker.heartbeat,
            )
            self._group.check()
        self._epochs_done = epoch
        # The coordinator knows the times of all generations, and everybody's losses.
        entry = loop.epoch_entry(epoch - 1, 0.0, None, evaluated)
        self._entries.append(entry)
        self._seat.say("epoch", entry=entry)
        if self._rank == 0:
            score = loop.describe_score(self._task, entry["score"])
            print(f"epoch {epoch}/{s.epochs}: {self._world} members, {score}", flush=True)
        if reaches(
            evaluated[1], s.of(Elastic).ends_at, self._task.better
        ):  # the coordinator finds so, too
            self._total = self._step
        if not isfinite(evaluated[0]):
            self._status = "diverged", f"the test loss became {evaluated[0]} in epoch {epoch}"


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
