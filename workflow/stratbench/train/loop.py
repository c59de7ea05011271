"""The training loop of a worker: warm-up, then timed epochs, each followed by an evaluation.

The loop is the same for every strategy. Strategies differ only in `strategy.step`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from stratbench.cell.files import replace_non_finite_by_none
from stratbench.cell.run_folder import RunFolder
from stratbench.strategies import compiled
from stratbench.strategies.base import Strategy, Worker
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.heartbeat import Heartbeat
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train.beside.beside import Beside, TrainingStart
from stratbench.workload.data.device_data import (
    Augmentation,
    DeviceData,
    choose_evaluation_batch_size,
)
from stratbench.workload.generators import Generators
from stratbench.workload.tasks import (
    EvaluationResult,
    Task,
    compute_loss_and_score_sums,
    compute_test_loss_and_score,
)
from stratbench.workload.torch_internals import wait_for_collectives


@dataclass
class EpochProgress:
    """Results of the finished epochs. A file has a copy, so that a timeout loses no epoch."""

    folder: RunFolder | None
    epoch_results: list[dict[str, Any]] = field(default_factory=list)

    def append_epoch(self, entry: dict[str, Any]) -> None:
        """Append the results of a finished epoch, also to the run folder's file."""
        self.epoch_results.append(entry)
        if self.folder is not None:
            self.folder.append_epoch_result(entry)


@dataclass
class TrainingResult:
    """The measurements of one worker from its training loop."""

    status: str
    reason: str | None
    clock: StepClock
    progress: EpochProgress
    steps: int
    samples: int
    memory: dict[str, Any]
    #: Sums of this worker's batch losses, by epoch and step, each with the number or the total weight of the
    #: batches. They are kept only if workers have no common epochs. If the task has no weights, an epoch has
    #: a single sum at step 0.
    losses: dict[int, dict[int, tuple[float | None, float]]] = field(default_factory=dict)


def train(
    strategy: Strategy,
    data: DeviceData,
    worker: Worker,
    phases: Phases,
    log: PhaseLog,
    memory: MemoryMeter,
    progress: EpochProgress,
    activities: Sequence[Beside] = (),
) -> TrainingResult:
    """Warm up, then train and evaluate all epochs.

    If a training or test loss is not finite, the run ends after this epoch with the status `diverged`. With
    the setting `steps` nothing is evaluated, and training ends after this number of steps.

    Args:
        strategy: Strategy whose `setup` has been called.
        data: Data set.
        worker: This worker.
        phases: Meter of the seconds in each phase.
        log: Log of the phases for the timeline.
        memory: Meter of peak memory.
        progress: Results of finished epochs. The function appends to them.
        activities: Activities besides the training, such as checkpoints. They run while the clock is stopped.
    """
    s = worker.settings
    with phases("warmup"):
        warm_up(strategy, data, worker)
    memory.start()
    clock = StepClock(worker.device, worker.heartbeat, strategy.own_phases)
    worker.mark_phase_end = clock.mark_phase_end
    reason = used = None
    in_all = s.count_steps(data.train_samples)
    steps_per_epoch = data.train_samples // s.global_batch
    starts = [
        activity.restore_training_start(clock, progress.epoch_results) for activity in activities
    ]
    start = max(starts, key=lambda each: each.steps, default=TrainingStart())
    for entry in start.epochs:
        progress.append_epoch(entry)
    first, taken = start.steps // steps_per_epoch, start.losses
    steps = first * steps_per_epoch
    for epoch in range(first, s.count_training_set_passes(data.train_samples)):
        max_steps = in_all - steps
        losses = train_epoch(
            strategy, data, worker, clock, log, epoch, max_steps, activities, taken
        )
        taken = ()
        strategy.check_equal_collectives()
        # The peak memory of training is read before the first evaluation, which may need more.
        if used is None:
            used = memory.read_memory_since_start()
        steps += len(losses)
        loss = average_over_replicas(torch.stack(losses).double().mean(), worker)
        mean_losses = {"training": loss}
        if s.steps:
            print_step_progress(steps, in_all, clock, worker)
        else:
            with phases("eval"):
                evaluation = evaluate_test_set(
                    strategy, data, worker.task, worker.rank, worker.mesh, worker.heartbeat
                )
            entry = build_epoch_entry(epoch, clock.train_time_s, loss, evaluation)
            strategy.check_equal_collectives()
            progress.append_epoch(entry)
            print_epoch_results(entry, clock, worker, samples=len(losses) * s.global_batch)
            mean_losses["test"] = evaluation.loss
        where = f"step {steps} of {s.steps}" if s.steps else f"epoch {epoch + 1} of {s.epochs}"
        if reason := divergence_reason(mean_losses, where):
            break
        if steps < in_all and find_earliest_clock_stop_step(activities) == steps:
            call_due_activities(activities, steps, [])
    status, samples = "diverged" if reason else "ok", steps * strategy.samples_per_step(s)
    return TrainingResult(status, reason, clock, progress, steps, samples, used)


def find_earliest_clock_stop_step(activities: Sequence[Beside]) -> int | None:
    """Return the next step number after which an activity needs the clock to stop. None if never."""
    stops = [activity.find_next_clock_stop_step() for activity in activities]
    return min((stop for stop in stops if stop is not None), default=None)


def call_due_activities(
    activities: Sequence[Beside], step: int, losses: list[torch.Tensor]
) -> None:
    """Carry out the activities that are due after a step. The clock must be stopped.

    Args:
        activities: Activities such as checkpoints.
        step: Number of steps taken.
        losses: Losses of the present epoch so far.
    """
    for activity in activities:
        if activity.find_next_clock_stop_step() == step:
            activity.act_after_step(step, losses)


def divergence_reason(mean_losses: dict[str, float], where: str) -> str | None:
    """Return a sentence on the first mean loss that is not finite. None if all are.

    Args:
        mean_losses: Mean losses by name (`training`, `test`).
        where: Name of the step or epoch of these losses, for the sentence.
    """
    for name, value in mean_losses.items():
        if not isfinite(value):
            return f"the {name} loss became {value} in {where}"
    return None


def build_epoch_entry(
    epoch: int, train_time_s: float, train_loss: float | None, evaluation: EvaluationResult
) -> dict[str, Any]:
    """Return the element for one epoch in the record's list `score.per_epoch`.

    Args:
        epoch: Number of the epoch, from 0.
        train_time_s: Training time in seconds until the end of the epoch.
        train_loss: Mean training loss, or None if not known.
        evaluation: Loss and score on the test set.
    """
    return {
        "epoch": epoch + 1,
        "train_time_s": train_time_s,
        "train_loss": replace_non_finite_by_none(train_loss),
        "test_loss": replace_non_finite_by_none(evaluation.loss),
        "score": replace_non_finite_by_none(evaluation.score),
        "score_error": replace_non_finite_by_none(evaluation.error),
        **({"answers_left_out": evaluation.left_out} if evaluation.left_out else {}),
    }


def describe_score(task: Task, score: float | None) -> str:
    """Return a score on the test set as text, with its name and unit."""
    if score is None:
        return f"test {task.score_name} not finite"
    shown = f"{score:.2%}" if task.unit == "share" else f"{score:.4f} {task.unit}"
    return f"test {task.score_name} {shown}"


def warm_up(strategy: Strategy, data: DeviceData, worker: Worker) -> None:
    """Train and evaluate a few batches untimed, then restore all state that has changed.

    Args:
        strategy: Strategy whose `setup` has been called.
        data: Data set.
        worker: This worker.
    """
    s = worker.settings
    saved, generators = strategy.save(), Generators.capture_states(worker.device)
    batch = data.create_warmup_batch_function(strategy.samples_per_step(s), s)
    # A compiled model takes at least 3 steps. It may compile again in the second, because the first creates
    # state.
    for _ in range(max(s.warmup_steps, 3) if s.compile else s.warmup_steps):
        strategy.step(*batch())
    if s.compile:
        compiled.check_compiled_gradients(strategy, worker, *batch())
    with strategy.open_evaluation_model() as model, torch.no_grad():
        model(data.make_test_batch(0, choose_evaluation_batch_size(data.meta["shape"]))[0])
    if worker.compile_watch is not None:
        worker.compile_watch.mark_warm_up_end()
    strategy.restore(saved)
    generators.restore_states(worker.device)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        free_warm_up_collective_tensors(worker.device)


def free_warm_up_collective_tensors(device: torch.device) -> None:
    """Free tensors that NCCL's collectives of the warm-up used, before memory is measured.

    DDP's first buckets are such tensors. PyTorch keeps the tensors of a collective until its watchdog has
    seen the end and another collective runs. These tensors are as large as all gradients, and would be part
    of the peak after a short warm-up.
    """
    torch.cuda.synchronize(device)
    # NCCL's watchdog must have seen the end of all collectives. One more collective then frees the tensors of
    # the earlier ones.
    wait_for_collectives()
    dist.all_reduce(torch.zeros(1, device=device))


def train_epoch(
    strategy: Strategy,
    data: DeviceData,
    worker: Worker,
    clock: StepClock,
    log: PhaseLog,
    epoch: int,
    max_steps: int | None = None,
    activities: Sequence[Beside] = (),
    earlier_losses: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Train one epoch with a running clock. Return the loss of each step, on the device.

    The clock stops for activities that are due within the epoch. Activities that are due after the epoch's
    last step are left to the caller, which runs them after the evaluation.

    Args:
        strategy: Strategy whose `setup` has been called.
        data: Data set.
        worker: This worker.
        clock: Clock of the steps.
        log: Log of the phases for the timeline.
        epoch: Number of the epoch, from 0.
        max_steps: Maximum number of steps, or None for all steps of the epoch.
        activities: Activities such as checkpoints.
        earlier_losses: Losses of the steps of this epoch that were taken before an interruption.
    """
    s = worker.settings
    order, augmentation = data.draw_order_and_augmentation(s.seed, epoch, s.augment).to_device(
        data.index_device
    )
    collect_and_freeze_garbage()
    batches = islice(strategy.batches(order, epoch), len(earlier_losses), max_steps)
    losses, per_epoch = list(earlier_losses), data.train_samples // s.global_batch
    last = per_epoch if max_steps is None else min(per_epoch, max_steps)
    while True:
        stop = find_earliest_clock_stop_step(activities)
        until = last if stop is None else min(stop - epoch * per_epoch, last)
        stretch = islice(batches, until - len(losses))
        log.write_phase_event("train", "start")
        # The clocks of all workers start right after this barrier. Nothing that delays a worker may follow it
        # here.
        wait_for_all_workers(worker)
        losses += run_timed_steps(
            strategy, data, clock, stretch, augmentation, continues_epoch=bool(losses)
        )
        log.write_phase_event("train", "end")
        if until == last:
            return losses
        call_due_activities(activities, stop, losses)


def run_timed_steps(
    strategy: Strategy,
    data: DeviceData,
    clock: StepClock,
    batches: Iterable[torch.Tensor],
    augmentation: Augmentation | None = None,
    continues_epoch: bool = False,
) -> list[torch.Tensor]:
    """Take one timed step per batch. Return the losses of the steps, on the device.

    Args:
        strategy: Strategy whose `setup` has been called.
        data: Data set.
        clock: Clock of the steps.
        batches: Indices of the samples of each batch.
        augmentation: Augmentation of the epoch, or None.
        continues_epoch: Whether the steps belong to the same epoch as the steps that were timed last.
    """
    losses = []
    clock.begin_epoch(continues_epoch)
    for indices, following in iter_batches_with_next(batches):
        x, y = data.make_training_batch(indices, augmentation)
        if following is not None:
            data.prefetch(following, augmentation)
        clock.mark_phase_end("data")
        losses.append(strategy.step(x, y))
        clock.mark_step_end()
    clock.end_epoch()
    return losses


def iter_batches_with_next(
    batches: Iterable[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each batch with the batch that follows, or with None for the last batch."""
    batches = iter(batches)
    now = next(batches, None)
    while now is not None:
        following = next(batches, None)
        yield now, following
        now = following


def wait_for_all_workers(worker: Worker) -> None:
    """Wait until all workers have called this function.

    The wait also lasts until their devices are idle.
    """
    if worker.world_size > 1:
        on_cuda = worker.device.type == "cuda"
        dist.barrier(device_ids=[worker.device.index] if on_cuda else None)


def collect_and_freeze_garbage() -> None:
    """Collect Python's garbage now, and exempt all present objects from later collections.

    Otherwise a full collection, which takes a tenth of a second with PyTorch loaded, could run within the
    timed region. Garbage of the training is still collected, which takes microseconds.
    """
    gc.collect()
    gc.freeze()


def evaluate_test_set(
    strategy: Strategy,
    data: DeviceData,
    task: Task,
    rank: int,
    mesh: Mesh,
    heartbeat: Heartbeat | None = None,
) -> EvaluationResult:
    """Return the model's mean loss and score on the whole test set.

    Replicas of the model divide the test set. Each worker calls the model equally often, because the forward
    of a sharded model is a collective. Additional calls do not count. If several workers share a
    replica, the calls of only one of them count.

    Args:
        strategy: Strategy whose `setup` has been called.
        data: Data set.
        task: Task with loss and score.
        rank: Rank of this worker.
        mesh: Division of the workers into replicas.
        heartbeat: Heartbeat to update after each batch, or None.
    """
    total, batch = data.test_samples, choose_evaluation_batch_size(data.meta["shape"])
    rounds, share = math.ceil(total / (batch * mesh.replicas)), mesh.get_coordinate(rank).replica
    sums = torch.zeros(8, dtype=torch.float64, device=data.device)
    with strategy.open_evaluation_model() as model, torch.no_grad():
        for i in range(rounds):
            start = (i * mesh.replicas + share) * batch
            counts = start < total and mesh.reports_replica_results(rank)
            x, y = (
                data.make_test_batch(start, start + batch)
                if start < total
                else data.make_test_batch(0, 1)
            )
            outputs = model(x)
            if counts:
                sums += compute_loss_and_score_sums(task, outputs, y)
            if heartbeat is not None:
                heartbeat.record_progress()
    if mesh.num_workers > 1:
        dist.all_reduce(sums)
    return compute_test_loss_and_score(sums.tolist())


def average_over_replicas(value: torch.Tensor, worker: Worker) -> float:
    """Return the mean of a scalar over the replicas of the model.

    One worker of each replica has the value. The function waits for the device, so call it between epochs
    only.
    """
    if worker.world_size > 1:
        if not worker.mesh.reports_replica_results(worker.rank):
            value = torch.zeros_like(value)
        dist.all_reduce(value)
    return float(value) / worker.mesh.replicas


def print_step_progress(
    steps_done: int, total_steps: int, clock: StepClock, worker: Worker
) -> None:
    """Print, on rank 0, the progress of a cell without evaluation.

    Args:
        steps_done: Number of steps taken.
        total_steps: Number of steps of the training.
        clock: Clock of the steps.
        worker: This worker.
    """
    if worker.rank == 0:
        rate = steps_done * worker.settings.global_batch / clock.train_time_s
        print(f"step {steps_done}/{total_steps}: {rate:,.0f} samples/s, no evaluation", flush=True)


def print_epoch_results(
    entry: dict[str, Any], clock: StepClock, worker: Worker, samples: int
) -> None:
    """Print, on rank 0, the results of an epoch and the estimated remaining time.

    Args:
        entry: Results of the epoch.
        clock: Clock of the steps.
        worker: This worker.
        samples: Number of training samples in the epoch.
    """
    if worker.rank:
        return
    epochs, done = worker.settings.epochs, entry["epoch"]
    epoch_s = clock.epoch_times_s[-1]
    left_s = clock.train_time_s / done * (epochs - done)
    loss = "not finite" if entry["train_loss"] is None else f"{entry['train_loss']:.4f}"
    print(
        f"epoch {done}/{epochs}: training loss {loss}, {describe_score(worker.task, entry['score'])}, "
        f"{samples / epoch_s:,.0f} samples/s, {epoch_s:.2f} s, about {left_s:.0f} s of training left",
        flush=True,
    )
