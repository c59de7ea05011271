"""The training loop of a worker of parameter servers: tickets instead of epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

import torch

from stratbench.cell.files import replace_non_finite_by_none
from stratbench.cell.settings import Settings
from stratbench.strategies.base import Worker
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train.loop import (
    EpochProgress,
    TrainingResult,
    build_epoch_entry,
    collect_and_freeze_garbage,
    describe_score,
    evaluate_test_set,
    warm_up,
)
from stratbench.workload.data.device_data import DeviceData, EpochTables


def train_on_tickets(
    strategy: Any,
    data: DeviceData,
    worker: Worker,
    phases: Phases,
    log: PhaseLog,
    memory: MemoryMeter,
    progress: EpochProgress,
    activities: Sequence[Any] = (),
) -> TrainingResult:
    """Warm up, then train on the tickets of parameter servers until none is left.

    Workers do not wait for each other between epochs. The servers write a snapshot at the end of each epoch,
    and one worker evaluates the snapshots after the training. A worker of an elastic cell evaluates during
    the training if the servers request it, and may have to leave.

    Args:
        strategy: `ParameterServer` whose `setup` has been called.
        data: Data set.
        worker: This worker.
        phases: Meter of the seconds in each phase.
        log: Log of the phases for the timeline.
        memory: Meter of peak memory.
        progress: Results of finished epochs, to which the evaluating worker adds.
        activities: Activities during the training. None of them begins, since workers have no common steps.
    """
    s = worker.settings

    def evaluate_epoch_now(epoch: int) -> dict[str, float | None]:
        if clock.is_running:
            clock.end_epoch()
        with phases("eval"), strategy.hold_snapshot(epoch) as train_time_s:
            entry = make_epoch_entry(strategy, data, worker, epoch, train_time_s)
        return {key: entry[key] for key in ("test_loss", "score", "score_error")}

    with phases("warmup"):
        warm_up(strategy, data, worker)
    passes = s.count_training_set_passes(data.train_samples)
    tables = make_order_and_augmentation_copier(data, s, passes)
    memory.start()
    clock = StepClock(worker.device, worker.heartbeat, strategy.own_phases)
    worker.mark_phase_end = clock.mark_phase_end
    losses: dict[int, dict[int, list[torch.Tensor]]] = {}
    samples = taken = 0
    # Another thread writes the log. So a slow disk does not delay a step.
    reports = ThreadPoolExecutor(1)
    tables(0)
    collect_and_freeze_garbage()
    for epoch, where in strategy.iter_tickets(evaluate_epoch_now):
        if not samples:
            reports.submit(log.write_phase_event, "train", "start", at_s=time.monotonic())
        if not clock.is_running:
            clock.begin_epoch()
        if epoch not in losses:
            # Every worker prints this line, because workers begin an epoch at different times.
            reports.submit(print, f"epoch {epoch + 1}/{passes} begun", flush=True)
        order, augmentation = tables(epoch)
        x, y = data.make_training_batch(order[where], augmentation)
        if data.fetches_next_batch_early and (
            likely := strategy.predict_next_ticket(data.train_samples)
        ):
            order, augmentation = tables(likely[0])
            data.prefetch(order[likely[1]], augmentation)
        clock.mark_phase_end("data")
        step = where.start // s.global_batch if worker.has_weighted_loss else 0
        losses.setdefault(epoch, {}).setdefault(step, []).append(strategy.step(x, y))
        clock.mark_step_end()
        samples += len(y)
        taken += 1
    if clock.is_running:
        clock.end_epoch()
    reports.shutdown()
    if samples:
        log.write_phase_event("train", "end")
    used = memory.read_memory_since_start()
    sums = {e: {n: sum_batch_losses(v) for n, v in steps.items()} for e, steps in losses.items()}
    diverged = [
        f"training loss of epoch {e + 1}"
        for e, steps in sums.items()
        if not isfinite(sum(x for x, _ in steps.values()))
    ]
    finite_losses = {
        e: {n: (replace_non_finite_by_none(x), w) for n, (x, w) in steps.items()}
        for e, steps in sums.items()
    }
    if strategy.is_evaluator and not s.steps:
        with phases("eval"):
            diverged += evaluate_all_snapshots(strategy, data, worker, progress)
    reason = f"the {diverged[0]} is not a finite number" if diverged else None
    return TrainingResult(
        "diverged" if reason else "ok", reason, clock, progress, taken, samples, used, finite_losses,
    )  # fmt: skip


class SummedLosses(NamedTuple):
    """Sum of the losses of batches, and the sum of the batches' weights."""

    loss: float
    weight: float


def sum_batch_losses(losses: list[torch.Tensor]) -> SummedLosses:
    """Return the sum of the losses of batches, and the sum of the batches' weights.

    Args:
        losses: A tensor per batch: the loss as a scalar, with weight 1, or the pair (sum of losses, weight).
    """
    stacked = torch.stack(losses).double()
    if stacked.dim() == 1:
        return SummedLosses(float(stacked.sum()), len(losses))
    return SummedLosses(*stacked.sum(0).tolist())


def make_order_and_augmentation_copier(
    data: DeviceData, s: Settings, epochs: int
) -> Callable[[int], EpochTables]:
    """Return a function that copies an epoch's sample order and augmentation to the device.

    These tables are drawn for all epochs in advance, because training with servers has no pause between two
    epochs.

    Args:
        data: Data set.
        s: Settings of the cell.
        epochs: Number of epochs.
    """
    drawn = [
        data.draw_order_and_augmentation(s.seed, epoch, s.augment).convert_to_small_integers()
        for epoch in range(epochs)
    ]

    @lru_cache(maxsize=2)  # tickets of lost workers may be of the previous epoch
    def copy_order_and_augmentation(epoch: int) -> EpochTables:
        return drawn[epoch].to_device(data.index_device)

    return copy_order_and_augmentation


def evaluate_all_snapshots(
    strategy: Any, data: DeviceData, worker: Worker, progress: EpochProgress
) -> list[str]:
    """Evaluate the servers' snapshots of all epochs.

    The result names the losses that are not finite.

    Args:
        strategy: Strategy of the cell.
        data: Data set.
        worker: This worker.
        progress: Results of finished epochs, to which the function adds.
    """
    diverged = []
    for epoch in range(worker.settings.epochs):
        entry = make_epoch_entry(strategy, data, worker, epoch, strategy.load_snapshot(epoch))
        strategy.delete_snapshot(epoch)
        if entry["test_loss"] is None:
            diverged.append(f"test loss after epoch {epoch + 1}")
        progress.append_epoch(entry)
    return diverged


def make_epoch_entry(
    strategy: Any, data: DeviceData, worker: Worker, epoch: int, train_time_s: float
) -> dict[str, Any]:
    """Evaluate the snapshot that the model has loaded, and return the results.

    The training loss is missing, because only the launcher has the losses of all workers.

    Args:
        strategy: Strategy of the cell.
        data: Data set.
        worker: This worker.
        epoch: Number of the epoch, from 0.
        train_time_s: Training time in seconds until the end of the epoch.
    """
    evaluation = evaluate_test_set(strategy, data, worker.task, 0, Mesh(1), worker.heartbeat)
    entry = build_epoch_entry(epoch, train_time_s, None, evaluation)
    print(
        f"epoch {epoch + 1}/{worker.settings.epochs} as the servers had it after "
        f"{train_time_s:.2f} s: {describe_score(worker.task, entry['score'])}",
        flush=True,
    )
    return entry
