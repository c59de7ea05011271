"""Split synchronous training: a collective strategy's arithmetic on as many workers as are there.

The global batch stays as it is and is divided over those present, each of whom weighs its loss by its share:
the mean gradient is that of the whole batch, whoever is there. A generation stops after the same step at all
of its members, who vote in each step on whether to go on; the vote travels while the step is computed.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stratbench.strategies.base import Collective, Worker
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.train import loop
from stratbench.train.elastic.coordinator import reaches
from stratbench.train.elastic.group import Group
from stratbench.train.elastic.member import Over, Seat
from stratbench.train.restarts import checkpoints
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.tasks import Task

#: How often the state is kept on the disk, in seconds.
CHECKPOINT_S = 60.0
#: Most bytes of the optimizer's state that are sent at once.
_SENT_BYTES = 64 << 20
#: What an exception says that comes of a member that is gone.
_OF_PEERS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "store")


class Weighted(Task):
    """A task whose loss is multiplied by `weight`: a member's share of the batch times their number."""

    def __init__(self, task: Task) -> None:
        self._task, self.weight = task, 1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._task.loss(outputs, targets)
        return loss if self.weight == 1.0 else loss * self.weight


def share(batch: int, rank: int, world: int) -> slice:
    """Which samples of a batch are those of a member: as many for each as can be, all of them together."""
    return slice(rank * batch // world, (rank + 1) * batch // world)


@dataclass
class Outcome:
    """What a member did in all, for its file."""

    result: loop.Result
    held_up_s: list[float]
    written_s: list[float]
    generations: int
    was_first: bool


@dataclass
class _Round:
    """What a member did in one generation."""

    failed: bool = False
    through: bool = False
    #: Of each epoch: the weighted losses of its steps, still on the device, and their seconds.
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)


class Split:
    """A member's training, from its first generation to its last."""

    def __init__(
        self,
        strategy: Collective,
        data: DeviceData,
        worker: Worker,
        phases: Phases,
        group: Group,
        seat: Seat,
        leaving: threading.Event,
        number: int,
    ) -> None:
        """`strategy`: set up and warmed up in a group of its own. `leaving`: set when it shall leave."""
        self.strategy, self.data, self.worker = strategy, data, worker
        self._phases, self._group, self._seat, self._leaving = phases, group, seat, leaving
        self._task = worker.task
        self._weighted = worker.task = Weighted(worker.task)
        self._clock = StepClock(worker.device, worker.pulse)
        worker.mark = self._clock.mark
        self._steps_per_epoch = data.train_samples // worker.settings.global_batch
        self._total = worker.settings.total_steps(data.train_samples)
        self._step = self._samples = self._generations = 0
        self._epochs_done = 0
        self._rank, self._world, self._generation, self._number = 0, 1, 0, number
        self._running = self._through = False
        #: By the last vote, whether this member leaves, and whether all do: then nobody has the state.
        self._leaves = self._all_leave = False
        self._stopped_s: float | None = None
        self._kept_s = time.monotonic()
        self._checkpoints = checkpoints.Writer(worker.folder.path)
        self._initial = strategy.save() if worker.device.type == "cuda" else None
        self._status: tuple[str, str | None] = ("ok", None)
        self._tables = lru_cache(maxsize=1)(
            lambda epoch: data.tables(worker.settings.seed, epoch, worker.settings.augment).on(
                data.index_device
            )
        )

    def run(self, memory: Any, progress: loop.Progress) -> Outcome:
        """Take part until the training is over, or this worker shall leave."""
        self._tables(0)
        self._seat.say("ready")
        try:
            while True:
                said = self._await_form()
                if said is None:
                    break
                self._take_part(said, memory)
        except Over as over:
            print(over, flush=True)
            if not self._through and self._step and self._rank == 0:
                self._keep(wait=True)  # whoever comes next goes on from here
        status, reason = self._status
        used = memory.read()
        result = loop.Result(
            status, reason, self._clock, progress, len(self._clock.step_ms), self._samples, used
        )
        keeper = self._checkpoints
        return Outcome(
            result, keeper.held_up_s, keeper.written_s, self._generations, self._rank == 0
        )

    def _await_form(self) -> dict[str, Any] | None:
        """The next generation that this member is called to; None once it has left."""
        if self._leaving.is_set() and not self._generations:
            self._seat.say("left")
            return None
        said = self._seat.next()
        return None if said["what"] == "leave" else said

    def _take_part(self, said: dict[str, Any], memory: Any) -> None:
        """Be in one generation, from its forming to its stop."""
        self._epochs_done, self._generation = said["epochs_done"], said["generation"]
        done = _Round()
        try:
            self._meet(said)
            if not self._generations:
                memory.start()
            self._generations += 1
            self._begin()
            done.through = self._train(done)
        except RuntimeError as error:
            if not any(sign in str(error).lower() for sign in _OF_PEERS):
                raise
            print(f"generation {said['generation']} is broken: {_first(error)}", flush=True)
            done.failed = True
        self._end_clock(done)
        self._stopped_s = time.monotonic()
        self._report(done)

    def _report(self, done: _Round) -> None:
        epochs = {
            epoch: [
                float(torch.stack(values).double().sum()),
                len(values),
                self._world,
                done.seconds.get(epoch, 0.0),
            ]
            for epoch, values in done.losses.items()
            if values
        }
        if done.through:
            self._through = True
            self._seat.say("through", step=self._step, epochs=epochs)
            self._seat.next()  # raises Over
        if done.failed and self._initial is not None:
            # A device may have gone on with what the broken collective left: only a checkpoint is sure.
            self.strategy.restore(self._initial)
            self._step = 0
        # Who is asked only after the vote leaves after the next one: somebody counts on its state.
        leaving = self._leaving.is_set() if done.failed else self._leaves
        if self._all_leave and self._rank == 0 and not done.failed:
            self._keep(wait=True)
        told = {"step": self._step, "epochs": epochs}
        try:
            self._seat.say("stopped", failed=done.failed, leaving=leaving, **told)
        except Over:  # the record's maker reads it
            told |= {"generation": self._generation, "ended_unix_s": time.time()}
            self.worker.folder.write_unheard(self._number, told)
            raise

    # ------------------------------------------------------------ meeting

    def _meet(self, said: dict[str, Any]) -> None:
        """Form the group, and have the state of its first rank."""
        with self._phases("rendezvous"):
            self._group.form(said["meeting"], said["rank"], said["world"])
        worker, strategy = self.worker, self.strategy
        self._rank, self._world = said["rank"], said["world"]
        worker.rank, worker.world_size, worker.mesh = self._rank, self._world, Mesh(self._world)
        strategy.optimizer.zero_grad(set_to_none=True)
        with self._phases("join"):
            if said["load"]:
                checkpoints.read_into(
                    worker.folder.path, said["step"], self.strategy.state_tensors()
                )
            # DDP sends rank 0's weights and buffers to all.
            strategy.module = strategy.compiled = strategy.wrap(strategy.model, worker)
            for tensors in _in_parts(self._optimizer_tensors()):
                _broadcast(tensors)
        self._step = strategy.steps = said["step"]
        batch = worker.settings.global_batch
        self._share = share(batch, self._rank, self._world)
        self._weighted.weight = self._world * (self._share.stop - self._share.start) / batch
        torch.manual_seed(worker.settings.seed + 1 + self._rank + 7919 * self._step)

    def _optimizer_tensors(self) -> list[Tensor]:
        return self.strategy.state_tensors()[len(self.strategy.weights_and_buffers()) :]

    def _begin(self) -> None:
        """Line up, and say how long nobody took a step."""
        loop.settle_garbage()
        dist.barrier()
        pause_s = self._stopped_s and time.monotonic() - self._stopped_s
        self._seat.say("begun", pause_s=pause_s)

    # ------------------------------------------------------------ steps

    def _train(self, done: _Round) -> bool:
        """Take steps until all are taken, or the members vote to stop; returns whether all are."""
        while True:
            self._evaluate_where_due()
            if self._step >= self._total or self._status[0] == "diverged":
                return True
            ends = min(
                (self._step // self._steps_per_epoch + 1) * self._steps_per_epoch, self._total
            )
            if not self._steps_to(ends, done):
                return False

    def _steps_to(self, ends: int, done: _Round) -> bool:
        """Take the steps of an epoch up to `ends`; returns whether all of them were taken."""
        epoch = self._step // self._steps_per_epoch
        order, augmentation = self._tables(epoch)
        losses = done.losses.setdefault(epoch, [])
        clock, strategy, data = self._clock, self.strategy, self.data
        buffers = list(strategy.model.buffers()) if self._initial is None else []
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
            before = [b.clone() for b in buffers]
            try:
                losses.append(strategy.step(x, y))
            except RuntimeError:
                for buffer, then in zip(buffers, before, strict=True):
                    buffer.copy_(then)
                raise
            clock.tick()
            self._step += 1
            self._samples += len(y)
            if self._rank == 0 and time.monotonic() - self._kept_s > CHECKPOINT_S:
                self._keep()
        votes.close()
        self._end_clock(done)
        return self._step == ends

    def _samples_of(self, step: int) -> slice:
        start = (step % self._steps_per_epoch) * self.worker.settings.global_batch
        return slice(start + self._share.start, start + self._share.stop)

    def _votes(self) -> Iterator[bool]:
        """Before each step: whether the members have agreed, in the step before, to stop here."""
        work = tally = None
        while True:
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
        """Stop the clock, if it runs; its seconds are of the last epoch that was begun."""
        if self._running:
            self._running = False
            self._clock.end()
            done.seconds[max(done.losses)] = self._clock.epoch_times_s[-1]

    def _keep(self, wait: bool = False) -> None:
        self._checkpoints.take(self._step, self.strategy.state_tensors(), wait)
        self._kept_s = time.monotonic()

    # ------------------------------------------------------------ evaluation

    def _evaluate_where_due(self) -> None:
        """At the end of an epoch that nobody has evaluated yet, do so together."""
        epoch, rest = divmod(self._step, self._steps_per_epoch)
        s = self.worker.settings
        if rest or s.steps or epoch <= self._epochs_done:
            return
        with self._phases("eval"):
            evaluated = loop.evaluate(
                self.strategy,
                self.data,
                self._task,
                self._rank,
                Mesh(self._world),
                self.worker.pulse,
            )
        self._epochs_done = epoch
        if self._rank == 0:
            # The coordinator knows the times of all generations, and everybody's losses.
            entry = loop.epoch_entry(epoch - 1, 0.0, None, evaluated)
            self._seat.say("epoch", entry=entry)
            score = loop.describe_score(self._task, entry["score"])
            print(f"epoch {epoch}/{s.epochs}: {self._world} members, {score}", flush=True)
        if reaches(evaluated[1], s.ends_at, self._task.better):  # the coordinator finds so, too
            self._total = self._step
        if not isfinite(evaluated[0]):
            self._status = "diverged", f"the test loss became {evaluated[0]} in epoch {epoch}"


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device together, up to _SENT_BYTES."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        part: list[Tensor] = []
        for tensor in alike:
            if part and sum(t.nbytes for t in part) + tensor.nbytes > _SENT_BYTES:
                yield part
                part = []
            part.append(tensor)
        yield part


def _broadcast(tensors: list[Tensor]) -> None:
    """Have all members hold what the first rank holds."""
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    dist.broadcast(flat, src=0)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def leave_on(signals: tuple[signal.Signals, ...], leaving: threading.Event) -> None:
    """Set `leaving` when one of the signals comes: SLURM's warning, or the end of a job's time.

    At once, by a thread of its own: the main one may compute for seconds without looking.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def wait() -> None:
        number = reading.recv(1)[0]
        leaving.set()
        print(f"{signal.Signals(number).name}: this worker leaves", flush=True)
        writing.close()  # which its handlers need no longer

    for each in signals:
        signal.signal(each, lambda number, frame: None)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
