"""Trains a collective strategy synchronously on the workers that are present (elastic training).

The global batch stays the same, and is divided among the present workers. Each worker weights its loss by its
share of the batch. The mean gradient is then that of the full batch for any number of workers. During each
step all workers exchange votes on whether to stop, so that all of them stop after the same step.
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
from stratbench.extensions.elastic.group import ElasticGroup, broadcast_from_rank_zero
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.member import CoordinatorLost, WorkerMembership, WorkerNotNeeded
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.target import is_target_score_reached
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.train import loop
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.generators import seed_random_generators
from stratbench.workload.tasks import Task

#: Minimum seconds between two checkpoints.
CHECKPOINT_S = 60.0
#: Words in the messages of exceptions that the loss of another worker causes.
_OF_PEERS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "store")


class WeightedTask(Task):
    """Task whose loss is multiplied by `weight`, for workers with unequal parts of a batch.

    The weight is the worker's share of the batch times the number of workers. A loss that is a sum and its
    weight is not multiplied, because it is divided by the weight later.
    """

    def __init__(self, task: Task) -> None:
        self._task, self.weight = task, 1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Any]:
        loss = self._task.loss(outputs, targets)
        if isinstance(loss, tuple) or self.weight == 1.0:
            return loss
        return loss * self.weight


def get_batch_share(num_samples: int, rank: int, num_members: int) -> slice:
    """Return a worker's slice of a batch. The slices of all workers have nearly equal lengths.

    Args:
        num_samples: Number of samples in the batch.
        rank: Rank of the worker among those that train together.
        num_members: Number of workers that train together.
    """
    return slice(rank * num_samples // num_members, (rank + 1) * num_samples // num_members)


@dataclass
class GenerationProgress:
    """A worker's steps in one generation that it has not yet reported to the coordinator.

    Attributes:
        has_failed: Whether the process group broke during the generation.
        is_training_over: Whether the training is complete.
        losses_by_epoch: Weighted loss of each step, on the device, by epoch.
        step_seconds_by_epoch: Seconds of the steps, by epoch.
    """

    has_failed: bool = False
    is_training_over: bool = False
    losses_by_epoch: dict[int, list[Tensor]] = field(default_factory=dict)
    step_seconds_by_epoch: dict[int, float] = field(default_factory=dict)


class ElasticSynchronous:
    """Elastic synchronous training of one worker, over all generations in which it takes part."""

    def __init__(
        self,
        strategy: Collective,
        data: DeviceData,
        worker: Worker,
        phases: Phases,
        group: ElasticGroup,
        membership: WorkerMembership,
        leave_requested: threading.Event,
        worker_number: int,
    ) -> None:
        """Prepare the training of one elastic worker.

        Args:
            strategy: Strategy that was set up and warmed up in a process group of this worker alone.
            data: Data set.
            worker: This worker.
            phases: Measures phases of the process.
            group: Process group, which is formed again for each generation.
            membership: Connection to the coordinator.
            leave_requested: Set when this worker must leave.
            worker_number: Number of the worker.
        """
        self.strategy, self.data, self.worker = strategy, data, worker
        self._phases, self._group = phases, group
        self._membership, self._leave_requested = membership, leave_requested
        self._task = worker.task
        self._weighted = worker.task = WeightedTask(worker.task)
        self._clock = StepClock(worker.device, worker.heartbeat)
        worker.mark_phase_end = self._clock.mark_phase_end
        self._steps_per_epoch = data.train_samples // worker.settings.global_batch
        self._total = worker.settings.count_steps(data.train_samples)
        #: Number of generations in which this worker has trained.
        self.generations = 0
        self._step = self._samples = self._epochs_done = 0
        #: Results of epochs that the coordinator may not have got yet.
        self._entries: list[dict[str, Any]] = []
        self._rank, self._world, self._generation, self._number = 0, 1, 0, worker_number
        self._running = False
        #: Whether this worker voted to leave in the last vote.
        self._leaves = False
        #: Whether all workers voted to leave. Rank 0 must then save the state.
        self._all_leave = False
        self._stopped_s: float | None = None
        self._kept_s = time.monotonic()
        # A checkpoint is invalid if the process group broke before, because a GPU may hold wrong values.
        self._checkpoints = checkpoints.AsyncCheckpointWriter(
            worker.folder.path, counts=lambda: not group.broken
        )
        self._initial = strategy.save() if worker.device.type == "cuda" else None
        self._status: tuple[str, str | None] = ("ok", None)
        self._tables = lru_cache(maxsize=1)(
            lambda epoch: data.draw_order_and_augmentation(
                worker.settings.seed, epoch, worker.settings.augment
            ).to_device(data.index_device)
        )

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker has rank 0 in its current or last generation."""
        return self._rank == 0

    def train_until_training_ends(self, memory: MemoryMeter) -> loop.TrainingResult:
        """Train until the training is over or this worker must leave. Return the worker's results.

        Raises:
            WorkerNotNeeded: If this worker took part in no generation.
        """
        self._tables(0)
        self._membership.send_message("ready")
        try:
            while True:
                message = self._wait_for_next_generation()
                if message is None:
                    break
                self._train_in_generation(message, memory)
        except CoordinatorLost as gone:
            print(gone, flush=True)
            if self.is_rank_zero:
                self._save_state_for_later_members()
        except WorkerNotNeeded as over:
            print(over, flush=True)
        if not self.generations:
            raise WorkerNotNeeded("the training ended before this worker took a training step")
        return loop.TrainingResult(
            *self._status, self._clock, loop.EpochProgress(None), len(self._clock.step_ms), self._samples,
            memory.read_memory_since_start(),
        )  # fmt: skip

    @property
    def checkpoint_times_by_kind_s(self) -> dict[str, list[float]]:
        """Seconds for which each checkpoint blocked the training, and seconds until it was written."""
        written = self._checkpoints
        return {"held_up_s": written.held_up_s, "written_s": written.written_s}

    def _wait_for_next_generation(self) -> dict[str, Any] | None:
        """Wait for the coordinator's message that forms the next generation, and return it.

        The result is None if this worker has left.
        """
        if self._leave_requested.is_set() and not self.generations:
            self._membership.send_message("left")
            return None
        message = self._membership.wait_for_message()
        return None if message["what"] == "leave" else message

    def _train_in_generation(self, message: dict[str, Any], memory: MemoryMeter) -> None:
        """Train in one generation until it stops or breaks, and report to the coordinator."""
        self._epochs_done, self._generation = message["epochs_done"], message["generation"]
        self._entries = [e for e in self._entries if e["epoch"] > self._epochs_done]
        progress = GenerationProgress()
        try:
            self._form_group_and_train(progress, message, memory)
            self._report_generation_end(progress)
        except CoordinatorLost:
            self._stop_step_clock(progress)
            last = {"generation": self._generation, "ended_unix_s": time.time(), "step": self._step}
            # The cell's record gets the last steps from this file, because the worker cannot report them.
            RunFiles(self.worker.folder).write_unreported_result(
                self._number, last | {"epochs": self._summarize_unreported_steps(progress)}
            )
            raise

    def _form_group_and_train(
        self, progress: GenerationProgress, message: dict[str, Any], memory: MemoryMeter
    ) -> None:
        """Form the process group of a generation, and train until the generation stops or breaks."""
        try:
            self._form_group_and_receive_state(message)
            if not self.generations:
                memory.start()
            self.generations += 1
            self._synchronize_first_step()
            progress.is_training_over = self._train_until_complete_or_stopped(progress)
        except (RuntimeError, checkpoints.DamagedCheckpoint) as error:
            if not isinstance(error, checkpoints.DamagedCheckpoint) and not any(
                sign in str(error).lower() for sign in _OF_PEERS
            ):
                raise
            first_line = str(error).partition("\n")[0]
            print(f"generation {message['generation']} is broken: {first_line}", flush=True)
            progress.has_failed = True
            # After the write, the next generation knows whether this checkpoint is valid.
            self._checkpoints.wait_for_checkpoint_write()
        self._stop_step_clock(progress)
        self._stopped_s = time.monotonic()

    def _summarize_unreported_steps(self, progress: GenerationProgress) -> dict[int, list[float]]:
        """Return unreported steps by epoch: sum of losses, numbers of steps and workers, seconds."""
        # If the process group broke, losses on a GPU may be wrong, and are not reported.
        are_losses_wrong = progress.has_failed and self._initial is not None
        sums = {
            epoch: (float(torch.stack(x).double().sum()), len(x))
            if x and not are_losses_wrong
            else (0.0, 0)
            for epoch, x in progress.losses_by_epoch.items()
        }
        return {
            epoch: [*of, self._world, progress.step_seconds_by_epoch.get(epoch, 0.0)]
            for epoch, of in sums.items()
        }

    def _report_generation_end(self, progress: GenerationProgress) -> None:
        taken = {"step": self._step, "epochs": self._summarize_unreported_steps(progress)}
        if progress.is_training_over:
            self._membership.send_message("through", **taken)
            # The call raises WorkerNotNeeded, because the next message says that the training is over.
            self._membership.wait_for_message()
        if progress.has_failed and self._initial is not None:
            # The next generation must begin with a checkpoint, because a GPU may have computed wrong weights
            # after the failed collective.
            self.strategy.restore(self._initial)
            self._step = 0
        # Other workers learn of a request to leave by a vote, and may need this worker's state. A request
        # after the last vote therefore waits for the next one.
        leaving = self._leave_requested.is_set() if progress.has_failed else self._leaves
        # If the process group broke, a leaving worker saves the state, because no other may be left.
        must_save = leaving if progress.has_failed else self._all_leave and self._rank == 0
        if must_save:
            self._save_state_for_later_members()
        self._membership.send_message(
            "stopped", failed=progress.has_failed, leaving=leaving, holds=self._step, **taken
        )

    # ------------------------------------------------------------ forming the process group

    def _form_group_and_receive_state(self, message: dict[str, Any]) -> None:
        """Form the process group of a generation, and receive the model's state from rank 0."""
        # Others train while a worker waits for a later generation. That wait is no part of the cell's set-up.
        phase = "rendezvous" if message["generation"] == 0 else "regroup"
        with self._phases(phase):
            self._group.form_group(message["meeting"], message["rank"], message["world"])
        worker, strategy = self.worker, self.strategy
        self._rank, self._world = message["rank"], message["world"]
        worker.rank, worker.world_size, worker.mesh = self._rank, self._world, Mesh(self._world)
        strategy.optimizer.zero_grad(set_to_none=True)
        state = strategy.list_training_state_tensors() if message["load"] or self._rank else []
        # If rank 0 is lost while it sends its state, this worker restores its old state.
        with self._phases("join"), self._restore_tensors_on_failure(state):
            if message["load"]:
                with checkpoints.delete_checkpoint_if_damaged(worker.folder.path, message["step"]):
                    checkpoints.read_checkpoint_into_tensors(
                        worker.folder.path, message["step"], state
                    )
            # Wrapping by DDP also broadcasts the weights and buffers of rank 0.
            strategy.module = strategy.compiled = strategy.wrap(strategy.model, worker)
            num_model_tensors = len(strategy.weights_and_buffers())
            broadcast_from_rank_zero(strategy.list_training_state_tensors()[num_model_tensors:])
        self._step = strategy.steps = message["step"]
        batch = worker.settings.global_batch
        self._share = get_batch_share(batch, self._rank, self._world)
        self._weighted.weight = self._world * (self._share.stop - self._share.start) / batch
        seed_random_generators(worker.settings.seed + 1 + self._rank + 7919 * self._step)

    @contextmanager
    def _restore_tensors_on_failure(self, tensors: list[Tensor]) -> Iterator[None]:
        """Restore the tensors if a collective fails within the context.

        Tensors on a GPU are not restored, because the worker restores its initial state later.
        """
        before = [t.clone() for t in tensors] if self._initial is None else []
        try:
            yield
        except RuntimeError:
            for tensor, then in zip(tensors, before, strict=False):
                tensor.copy_(then)
            raise

    def _synchronize_first_step(self) -> None:
        """Wait for all workers before the first step. Report the pause since the last step."""
        loop.collect_and_freeze_garbage()
        dist.barrier()
        pause_s = self._stopped_s and time.monotonic() - self._stopped_s
        self._membership.send_message("begun", pause_s=pause_s)

    # ------------------------------------------------------------ steps

    def _train_until_complete_or_stopped(self, progress: GenerationProgress) -> bool:
        """Take training steps until the last one, or until workers vote to stop.

        Return whether the training is complete.
        """
        while True:
            self._evaluate_ended_epoch()
            if self._step >= self._total or self._status[0] == "diverged":
                return True
            end_step = min(
                (self._step // self._steps_per_epoch + 1) * self._steps_per_epoch, self._total
            )
            if not self._take_epoch_steps(end_step, progress):
                return False
            if self._step < self._total:
                self._membership.send_message(
                    "trained", epochs=self._summarize_unreported_steps(progress)
                )
                progress.losses_by_epoch.clear()

    def _take_epoch_steps(self, end_step: int, progress: GenerationProgress) -> bool:
        """Take the steps of the present epoch until `end_step` steps of the training are taken.

        Return whether all of them were taken, without a vote to stop.
        """
        epoch = self._step // self._steps_per_epoch
        order, augmentation = self._tables(epoch)
        losses = progress.losses_by_epoch.setdefault(epoch, [])
        clock, strategy, data = self._clock, self.strategy, self.data
        buffers = list(strategy.model.buffers())
        clock.begin_epoch()
        self._running = True
        votes = self._iter_stop_decisions()
        while self._step < end_step:
            if next(votes):
                break
            x, y = data.make_training_batch(
                order[self._get_own_sample_slice(self._step)], augmentation
            )
            if self._step + 1 < end_step:
                data.prefetch(order[self._get_own_sample_slice(self._step + 1)], augmentation)
            clock.mark_phase_end("data")
            with self._restore_tensors_on_failure(buffers):
                losses.append(strategy.step(x, y))
            clock.mark_step_end()
            self._step += 1
            self._samples += len(y)
            if self._rank == 0 and time.monotonic() - self._kept_s > CHECKPOINT_S:
                self._save_checkpoint()
        votes.close()
        self._stop_step_clock(progress)
        # The stopped clock has waited for the device, so any failed collective is known now.
        self._group.check_group_intact()
        return self._step == end_step

    def _get_own_sample_slice(self, step: int) -> slice:
        start = (step % self._steps_per_epoch) * self.worker.settings.global_batch
        return slice(start + self._share.start, start + self._share.stop)

    def _iter_stop_decisions(self) -> Iterator[bool]:
        """Yield before each step whether to stop, by the workers' vote during the previous step."""
        work = tally = None
        while True:
            # A worker that trains alone notices only here that its process group was broken up.
            self._group.check_group_intact()
            if work is not None:
                work.wait()
                wanted, leave = tally.tolist()
                self._all_leave = leave == self._world
                if wanted:
                    yield True
                    return
            self._leaves = self._leave_requested.is_set()
            wants = self._leaves or self._membership.change.is_set()
            tally = torch.tensor([int(wants), int(self._leaves)], dtype=torch.int32)
            work = dist.all_reduce(tally, async_op=True)
            yield False

    def _stop_step_clock(self, progress: GenerationProgress) -> None:
        """Stop the clock if it runs, and store the seconds of the last epoch."""
        if self._running:
            self._running = False
            self._clock.end_epoch()
            progress.step_seconds_by_epoch[max(progress.losses_by_epoch)] = (
                self._clock.epoch_times_s[-1]
            )

    def _save_checkpoint(self, wait_until_written: bool = False) -> None:
        facts = {"epochs": list(self._entries)}
        self._checkpoints.start_checkpoint_write_unless_busy(
            self._step,
            self.strategy.list_training_state_tensors(),
            wait_until_written,
            metadata=facts,
        )
        self._kept_s = time.monotonic()

    def _save_state_for_later_members(self) -> None:
        """Save a checkpoint for workers that join later, unless the training has ended."""
        if self._step and not RunFiles(self.worker.folder).end_marker_path.exists():
            self._save_checkpoint(wait_until_written=True)

    # ------------------------------------------------------------ evaluation

    def _evaluate_ended_epoch(self) -> None:
        """Evaluate the epoch that has just ended, if any, with all workers.

        An epoch that has a result is not evaluated again.
        """
        epoch, rest = divmod(self._step, self._steps_per_epoch)
        s = self.worker.settings
        if rest or s.steps or epoch <= self._epochs_done:
            return
        # The evaluation overwrites the buffers by those of rank 0, which must be undone if it fails.
        buffers = list(self.strategy.model.buffers())
        with self._phases("eval"), self._restore_tensors_on_failure(buffers):
            evaluated = loop.evaluate_test_set(
                self.strategy,
                self.data,
                self._task,
                self._rank,
                Mesh(self._world),
                self.worker.heartbeat,
            )
            self._group.check_group_intact()
        self._epochs_done = epoch
        # Training time and loss are missing here. The coordinator computes them from the reports of all
        # workers.
        entry = loop.build_epoch_entry(epoch - 1, 0.0, None, evaluated)
        self._entries.append(entry)
        self._membership.send_message("epoch", entry=entry)
        if self._rank == 0:
            score = loop.describe_score(self._task, entry["score"])
            print(f"epoch {epoch}/{s.epochs}: {self._world} members, {score}", flush=True)
        # The coordinator also ends the training, because it compares the same score with the target.
        target_score = s.get_extension_keys(Elastic).ends_at
        if is_target_score_reached(evaluated[1], target_score, self._task.better == "higher"):
            self._total = self._step
        if not isfinite(evaluated[0]):
            self._status = "diverged", f"the test loss became {evaluated[0]} in epoch {epoch}"
