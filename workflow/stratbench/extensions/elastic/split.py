"""Trains a collective strategy synchronously on the workers that are present (elastic training).

The global batch stays the same and is divided over the present workers. Each worker weights its loss by its
share of the batch. The mean gradient is then that of the full batch for any number of workers. In each step
the members vote on whether to continue, concurrently with the step, so that all of them stop after the same
step.
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
from stratbench.extensions.elastic.coordinator import reaches_target
from stratbench.extensions.elastic.group import ElasticGroup, broadcast_from_first
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.member import CoordinatorLost, Over, WorkerMembership
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.train import loop
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.generators import seed_random_generators
from stratbench.workload.tasks import Task

#: Seconds between two checkpoints.
CHECKPOINT_S = 60.0
#: Words in the message of an exception that a lost member causes.
_OF_PEERS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "store")


class WeightedTask(Task):
    """Task whose loss is multiplied by `weight`, to average over unequal parts of a batch.

    The weight is the member's share of the batch times the number of members.

    A loss that is a sum with its weight is not changed, because it is normalized later.
    """

    def __init__(self, task: Task) -> None:
        self._task, self.weight = task, 1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Any]:
        loss = self._task.loss(outputs, targets)
        if isinstance(loss, tuple) or self.weight == 1.0:
            return loss
        return loss * self.weight


def get_batch_share(batch: int, rank: int, world: int) -> slice:
    """Return a member's slice of a batch; the slices of all members are nearly equal.

    Args:
        batch: Number of samples in the batch.
        rank: Rank of the member in its generation.
        world: Number of members.
    """
    return slice(rank * batch // world, (rank + 1) * batch // world)


@dataclass
class GenerationProgress:
    """A member's progress in one generation that it has not reported to the coordinator."""

    has_failed: bool = False
    is_training_over: bool = False
    #: By epoch: weighted losses of its steps, which are still on the device, and seconds of its steps.
    losses_by_epoch: dict[int, list[Tensor]] = field(default_factory=dict)
    seconds_by_epoch: dict[int, float] = field(default_factory=dict)


class ElasticSynchronous:
    """One worker's training, through all generations that it is a member of."""

    def __init__(
        self,
        strategy: Collective,
        data: DeviceData,
        worker: Worker,
        phases: Phases,
        group: ElasticGroup,
        seat: WorkerMembership,
        leaving: threading.Event,
        number: int,
    ) -> None:
        """Prepare the training of one elastic worker.

        Args:
            strategy: Strategy that was set up and warmed up in a group of this process alone.
            data: Data set.
            worker: This worker.
            phases: Measures phases of the process.
            group: Process group, which is formed for each generation.
            seat: Connection to the coordinator.
            leaving: Set when this worker must leave.
            number: Number of the worker.
        """
        self.strategy, self.data, self.worker = strategy, data, worker
        self._phases, self._group, self._seat, self._leaving = phases, group, seat, leaving
        self._task = worker.task
        self._weighted = worker.task = WeightedTask(worker.task)
        self._clock = StepClock(worker.device, worker.heartbeat)
        worker.mark_phase_end = self._clock.mark_phase_end
        self._steps_per_epoch = data.train_samples // worker.settings.global_batch
        self._total = worker.settings.total_steps(data.train_samples)
        #: Number of generations that this worker has trained in.
        self.generations = 0
        self._step = self._samples = self._epochs_done = 0
        #: Results of epochs that the coordinator may not have received.
        self._entries: list[dict[str, Any]] = []
        self._rank, self._world, self._generation, self._number = 0, 1, 0, number
        self._running = False
        #: Results of the last vote: whether this member leaves, and whether all leave, so that the state must
        #: be saved.
        self._leaves = self._all_leave = False
        self._stopped_s: float | None = None
        self._kept_s = time.monotonic()
        # What a device computes after its group was broken up must not become a checkpoint.
        self._checkpoints = checkpoints.Writer(worker.folder.path, counts=lambda: not group.broken)
        self._initial = strategy.save() if worker.device.type == "cuda" else None
        self._status: tuple[str, str | None] = ("ok", None)
        self._tables = lru_cache(maxsize=1)(
            lambda epoch: data.draw_epoch_tables(
                worker.settings.seed, epoch, worker.settings.augment
            ).to_device(data.index_device)
        )

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker is rank 0 of its current or last generation."""
        return self._rank == 0

    def run(self, memory: MemoryMeter) -> loop.Result:
        """Train until the training is over or this worker must leave, and return its results.

        Raises:
            Over: If this worker was in no generation.
        """
        self._tables(0)
        self._seat.send_message("ready")
        try:
            while True:
                message = self._wait_for_generation()
                if message is None:
                    break
                self._train_in_generation(message, memory)
        except CoordinatorLost as gone:
            print(gone, flush=True)
            if self.is_rank_zero:
                self._save_for_later_members()
        except Over as over:
            print(over, flush=True)
        if not self.generations:
            raise Over("the training ended before this worker took a step")
        return loop.Result(
            *self._status, self._clock, loop.Progress(None), len(self._clock.step_ms), self._samples,
            memory.read(),
        )  # fmt: skip

    @property
    def checkpoint_times_s(self) -> dict[str, list[float]]:
        """Seconds for which each checkpoint blocked training, and seconds to write the checkpoint."""
        written = self._checkpoints
        return {"held_up_s": written.held_up_s, "written_s": written.written_s}

    def _wait_for_generation(self) -> dict[str, Any] | None:
        """Wait for the message that forms the next generation, and return it.

        The result is None after leaving.
        """
        if self._leaving.is_set() and not self.generations:
            self._seat.send_message("left")
            return None
        message = self._seat.wait_for_message()
        return None if message["what"] == "leave" else message

    def _train_in_generation(self, message: dict[str, Any], memory: MemoryMeter) -> None:
        """Train in one generation until the generation stops, and report to the coordinator."""
        self._epochs_done, self._generation = message["epochs_done"], message["generation"]
        self._entries = [e for e in self._entries if e["epoch"] > self._epochs_done]
        done = GenerationProgress()
        try:
            self._form_and_train(done, message, memory)
            self._report_generation_end(done)
        except CoordinatorLost:
            self._stop_clock(done)
            last = {"generation": self._generation, "ended_unix_s": time.time(), "step": self._step}
            # The coordinator is lost, so that the process that makes the record reads this file instead.
            RunFiles(self.worker.folder).write_orphaned_result(
                self._number, last | {"epochs": self._summarize_unreported_steps(done)}
            )
            raise

    def _form_and_train(
        self, done: GenerationProgress, message: dict[str, Any], memory: MemoryMeter
    ) -> None:
        """Form the group of a generation, and train until the generation stops or breaks."""
        try:
            self._form_group(message)
            if not self.generations:
                memory.start()
            self.generations += 1
            self._begin_steps()
            done.is_training_over = self._train_until_stop(done)
        except (RuntimeError, checkpoints.DamagedCheckpoint) as error:
            if not isinstance(error, checkpoints.DamagedCheckpoint) and not any(
                sign in str(error).lower() for sign in _OF_PEERS
            ):
                raise
            print(
                f"generation {message['generation']} is broken: {_get_first_line(error)}",
                flush=True,
            )
            done.has_failed = True
            self._checkpoints.wait_for_write()  # now it is known whether the checkpoint in progress is valid
        self._stop_clock(done)
        self._stopped_s = time.monotonic()

    def _summarize_unreported_steps(self, done: GenerationProgress) -> dict[int, list[float]]:
        """Return the unreported steps by epoch: sum and number of losses, number of members, seconds."""
        # On a GPU, losses may be wrong if the group broke before the host knew it.
        garbage = done.has_failed and self._initial is not None
        sums = {
            epoch: (float(torch.stack(x).double().sum()), len(x)) if x and not garbage else (0.0, 0)
            for epoch, x in done.losses_by_epoch.items()
        }
        return {
            epoch: [*of, self._world, done.seconds_by_epoch.get(epoch, 0.0)]
            for epoch, of in sums.items()
        }

    def _report_generation_end(self, done: GenerationProgress) -> None:
        taken = {"step": self._step, "epochs": self._summarize_unreported_steps(done)}
        if done.is_training_over:
            self._seat.send_message("through", **taken)
            self._seat.wait_for_message()  # raises Over if the training has ended
        if done.has_failed and self._initial is not None:
            # A GPU may have continued with wrong values after the broken collective: only a checkpoint is
            # safe.
            self.strategy.restore(self._initial)
            self._step = 0
        # A worker that must leave since the vote leaves after the next vote: others may need its state.
        leaving = self._leaving.is_set() if done.has_failed else self._leaves
        # After a break it is unknown whether other members are left, so that each leaving member saves the
        # state.
        if leaving if done.has_failed else self._all_leave and self._rank == 0:
            self._save_for_later_members()
        self._seat.send_message(
            "stopped", failed=done.has_failed, leaving=leaving, holds=self._step, **taken
        )

    # ------------------------------------------------------------ meeting

    def _form_group(self, message: dict[str, Any]) -> None:
        """Form the process group, and receive the state of rank 0."""
        with self._phases("rendezvous"):
            self._group.form_group(message["meeting"], message["rank"], message["world"])
        worker, strategy = self.worker, self.strategy
        self._rank, self._world = message["rank"], message["world"]
        worker.rank, worker.world_size, worker.mesh = self._rank, self._world, Mesh(self._world)
        strategy.optimizer.zero_grad(set_to_none=True)
        state = strategy.state_tensors() if message["load"] or self._rank else []
        # If rank 0 is lost meanwhile, a member would have half of its state: the old state is restored.
        with self._phases("join"), self._restore_on_failure(state):
            if message["load"]:
                with checkpoints.delete_if_damaged(worker.folder.path, message["step"]):
                    checkpoints.read_checkpoint_into(worker.folder.path, message["step"], state)
            # DDP broadcasts the weights and buffers of rank 0 when it wraps the model.
            strategy.module = strategy.compiled = strategy.wrap(strategy.model, worker)
            broadcast_from_first(self._list_optimizer_tensors())
        self._step = strategy.steps = message["step"]
        batch = worker.settings.global_batch
        self._share = get_batch_share(batch, self._rank, self._world)
        self._weighted.weight = self._world * (self._share.stop - self._share.start) / batch
        seed_random_generators(worker.settings.seed + 1 + self._rank + 7919 * self._step)

    @contextmanager
    def _restore_on_failure(self, tensors: list[Tensor]) -> Iterator[None]:
        """Restore tensors on the CPU if a collective fails in the context.

        On a GPU the member restores its initial state later.
        """
        before = [t.clone() for t in tensors] if self._initial is None else []
        try:
            yield
        except RuntimeError:
            for tensor, then in zip(tensors, before, strict=False):
                tensor.copy_(then)
            raise

    def _list_optimizer_tensors(self) -> list[Tensor]:
        return self.strategy.state_tensors()[len(self.strategy.weights_and_buffers()) :]

    def _begin_steps(self) -> None:
        """Synchronize the start of all members, and report the pause since the last step."""
        loop.collect_and_freeze_garbage()
        dist.barrier()
        pause_s = self._stopped_s and time.monotonic() - self._stopped_s
        self._seat.send_message("begun", pause_s=pause_s)

    # ------------------------------------------------------------ steps

    def _train_until_stop(self, done: GenerationProgress) -> bool:
        """Take steps until the last one, or until the members vote to stop.

        Return whether the training is complete.
        """
        while True:
            self._evaluate_ended_epoch()
            if self._step >= self._total or self._status[0] == "diverged":
                return True
            ends = min(
                (self._step // self._steps_per_epoch + 1) * self._steps_per_epoch, self._total
            )
            if not self._take_steps(ends, done):
                return False
            if self._step < self._total:
                self._seat.send_message("trained", epochs=self._summarize_unreported_steps(done))
                done.losses_by_epoch.clear()

    def _take_steps(self, ends: int, done: GenerationProgress) -> bool:
        """Take the steps of the present epoch up to step `ends`.

        Return whether all of them were taken.
        """
        epoch = self._step // self._steps_per_epoch
        order, augmentation = self._tables(epoch)
        losses = done.losses_by_epoch.setdefault(epoch, [])
        clock, strategy, data = self._clock, self.strategy, self.data
        buffers = list(strategy.model.buffers())
        clock.begin_epoch()
        self._running = True
        votes = self._iter_stop_votes()
        while self._step < ends:
            if next(votes):
                break
            x, y = data.make_training_batch(order[self._get_own_samples(self._step)], augmentation)
            if self._step + 1 < ends:
                data.prefetch(order[self._get_own_samples(self._step + 1)], augmentation)
            clock.mark_phase_end("data")
            with self._restore_on_failure(buffers):
                losses.append(strategy.step(x, y))
            clock.mark_step_end()
            self._step += 1
            self._samples += len(y)
            if self._rank == 0 and time.monotonic() - self._kept_s > CHECKPOINT_S:
                self._save_checkpoint()
        votes.close()
        self._stop_clock(done)
        self._group.check_intact()  # the clock has waited for the device, so that a broken group is known
        return self._step == ends

    def _get_own_samples(self, step: int) -> slice:
        start = (step % self._steps_per_epoch) * self.worker.settings.global_batch
        return slice(start + self._share.start, start + self._share.stop)

    def _iter_stop_votes(self) -> Iterator[bool]:
        """Yield before each step whether members voted, during the previous step, to stop."""
        work = tally = None
        while True:
            self._group.check_intact()  # a member that trains alone has no collective that would fail
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

    def _stop_clock(self, done: GenerationProgress) -> None:
        """Stop a running clock, and add its seconds to the last epoch with a step."""
        if self._running:
            self._running = False
            self._clock.end()
            done.seconds_by_epoch[max(done.losses_by_epoch)] = self._clock.epoch_times_s[-1]

    def _save_checkpoint(self, wait: bool = False) -> None:
        facts = {"epochs": list(self._entries)}
        self._checkpoints.start_write(self._step, self.strategy.state_tensors(), wait, facts=facts)
        self._kept_s = time.monotonic()

    def _save_for_later_members(self) -> None:
        """Save the state for later members, unless the cell has ended."""
        if self._step and not RunFiles(self.worker.folder).end_marker_path.exists():
            self._save_checkpoint(wait=True)

    # ------------------------------------------------------------ evaluation

    def _evaluate_ended_epoch(self) -> None:
        """Evaluate with all members at the end of an epoch.

        An epoch that has a result already is not evaluated again.
        """
        epoch, rest = divmod(self._step, self._steps_per_epoch)
        s = self.worker.settings
        if rest or s.steps or epoch <= self._epochs_done:
            return
        # The evaluation broadcasts the buffers of rank 0.
        buffers = list(self.strategy.model.buffers())
        with self._phases("eval"), self._restore_on_failure(buffers):
            evaluated = loop.evaluate_test_set(
                self.strategy,
                self.data,
                self._task,
                self._rank,
                Mesh(self._world),
                self.worker.heartbeat,
            )
            self._group.check_intact()
        self._epochs_done = epoch
        # The coordinator fills in times and losses, because it knows those of all generations and members.
        entry = loop.build_epoch_entry(epoch - 1, 0.0, None, evaluated)
        self._entries.append(entry)
        self._seat.send_message("epoch", entry=entry)
        if self._rank == 0:
            score = loop.describe_score(self._task, entry["score"])
            print(f"epoch {epoch}/{s.epochs}: {self._world} members, {score}", flush=True)
        # The coordinator comes to the same result from the same score.
        if reaches_target(evaluated[1], s.get_extension_keys(Elastic).ends_at, self._task.better):
            self._total = self._step
        if not isfinite(evaluated[0]):
            self._status = "diverged", f"the test loss became {evaluated[0]} in epoch {epoch}"


def _get_first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
