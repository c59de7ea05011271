"""The training loop of one worker: warm-up, timed epochs, evaluation between them.

The loop is the same for every strategy; only what `strategy.step` does differs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from stratbench.cell.files import finite
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.strategies import compiled
from stratbench.strategies.base import Strategy, Worker
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases, StepClock
from stratbench.telemetry.heartbeat import Heartbeat
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train.beside.beside import Beside, Start
from stratbench.workload.data.device_data import Augmentation, DeviceData, EpochTables, eval_batch
from stratbench.workload.generators import Generators
from stratbench.workload.tasks import Evaluated, Task, evaluated, sums_of_batch
from stratbench.workload.torch_internals import wait_for_collectives


@dataclass
class Progress:
    """Results of the finished epochs, with a copy in `folder`, so that a timeout loses none."""

    folder: RunFolder | None
    per_epoch: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entry: dict[str, Any]) -> None:
        """Keep what a finished epoch gave."""
        self.per_epoch.append(entry)
        if self.folder is not None:
            self.folder.add_epoch(entry)


@dataclass
class Result:
    """The measurements of one worker."""

    status: str
    reason: str | None
    clock: StepClock
    progress: Progress
    steps: int
    samples: int
    memory: dict[str, Any]
    #: Parameter server: of each epoch the sum and number of this worker's batch losses; of a task that
    #: weighs, by the number of the step, sums and weights of its batches.
    losses: dict[int, dict[int, tuple[float | None, float]]] = field(default_factory=dict)


def train(
    strategy: Strategy,
    data: DeviceData,
    worker: Worker,
    phases: Phases,
    log: PhaseLog,
    memory: MemoryMeter,
    progress: Progress,
    besides: Sequence[Beside] = (),
) -> Result:
    """Warm up, then train and evaluate all epochs; `strategy.setup` has been called.

    A loss that is not finite, in training or on the test set, ends the run after its epoch with status
    `diverged`. With `steps` there is no evaluation, and the last epoch ends with them.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        phases: Phases of the worker's time.
        log: Log of the phases.
        memory: Meter of peak memory.
        progress: Results of the finished epochs.
        besides: Activities next to the training.
    """
    s = worker.settings
    with phases("warmup"):
        warm_up(strategy, data, worker)
    memory.start()
    clock = StepClock(worker.device, worker.heartbeat, strategy.own_phases)
    worker.mark = clock.mark
    reason = used = None
    in_all = s.total_steps(data.train_samples)
    steps_per_epoch = data.train_samples // s.global_batch
    starts = [beside.begin(clock, progress.per_epoch) for beside in besides]
    start = max(starts, key=lambda each: each.steps, default=Start())
    for entry in start.epochs:
        progress.add(entry)
    first, taken = start.steps // steps_per_epoch, start.losses
    steps = first * steps_per_epoch
    for epoch in range(first, s.passes(data.train_samples)):
        max_steps = in_all - steps
        losses = train_epoch(strategy, data, worker, clock, log, epoch, max_steps, besides, taken)
        taken = ()
        strategy.check_alike()
        if used is None:  # before an evaluation, whose batches may need more than training's
            used = memory.read()
        steps += len(losses)
        loss = mean_over_workers(torch.stack(losses).double().mean(), worker)
        mean_losses = {"training": loss}
        if s.steps:
            report_steps(steps, in_all, clock, worker)
        else:
            with phases("eval"):
                evaluation = evaluate(
                    strategy, data, worker.task, worker.rank, worker.mesh, worker.heartbeat
                )
            entry = epoch_entry(epoch, clock.train_time_s, loss, evaluation)
            strategy.check_alike()
            progress.add(entry)
            report_epoch(entry, clock, worker, samples=len(losses) * s.global_batch)
            mean_losses["test"] = evaluation.loss
        where = f"step {steps} of {s.steps}" if s.steps else f"epoch {epoch + 1} of {s.epochs}"
        if reason := why_diverged(mean_losses, where):
            break
        if steps < in_all and next_stop(besides) == steps:
            tell(besides, steps, [])
    status, samples = "diverged" if reason else "ok", steps * strategy.samples_per_step(s)
    return Result(status, reason, clock, progress, steps, samples, used)


def next_stop(besides: Sequence[Beside]) -> int | None:
    """Return the step after which the clock stops next for any of them, or None."""
    stops = [beside.next_stop() for beside in besides]
    return min((stop for stop in stops if stop is not None), default=None)


def tell(besides: Sequence[Beside], step: int, losses: list[torch.Tensor]) -> None:
    """Call the activities that need the clock to stop after `step`.

    Args:
        besides: Activities next to the training.
        step: Step of the training.
        losses: Losses of the epoch in progress.
    """
    for beside in besides:
        if beside.next_stop() == step:
            beside.between(step, losses)


def why_diverged(mean_losses: dict[str, float], where: str) -> str | None:
    """Return the first of an epoch's losses, by name, that is not finite, in words.

    Return None where all are.
    """
    for name, value in mean_losses.items():
        if not isfinite(value):
            return f"the {name} loss became {value} in {where}"
    return None


def train_with_server(
    strategy: Any,
    data: DeviceData,
    worker: Worker,
    phases: Phases,
    log: PhaseLog,
    memory: MemoryMeter,
    progress: Progress,
) -> Result:
    """Warm up, then train on the tickets of the servers until none are left.

    There is no wait for an epoch: the servers save their state at the end of each, and after the training one
    worker evaluates these. Its result has the epochs. A worker of an elastic cell evaluates during the
    training, at the servers' request, and may be asked to leave.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        phases: Phases of the worker's time.
        log: Log of the phases.
        memory: Meter of peak memory.
        progress: Results of the finished epochs.
    """
    s = worker.settings

    def evaluate_now(epoch: int) -> dict[str, float | None]:
        if clock.running:
            clock.end()
        with phases("eval"):
            return evaluate_epoch(strategy, data, worker, epoch)

    with phases("warmup"):
        warm_up(strategy, data, worker)
    passes = s.passes(data.train_samples)
    tables = drawn_tables(data, s, passes)
    memory.start()
    clock = StepClock(worker.device, worker.heartbeat, strategy.own_phases)
    worker.mark = clock.mark
    losses: dict[int, dict[int, list[torch.Tensor]]] = {}
    samples = taken = 0
    reports = ThreadPoolExecutor(1)  # a slow disk must not hold up a step
    tables(0)
    settle_garbage()
    for epoch, where in strategy.tickets(evaluate_now):
        if not samples:
            reports.submit(log.write, "train", "start", at_s=time.monotonic())
        if not clock.running:
            clock.begin()
        if epoch not in losses:
            # Each worker does, since each reaches an epoch at its own time.
            reports.submit(print, f"epoch {epoch + 1}/{passes} begun", flush=True)
        order, augmentation = tables(epoch)
        x, y = data.batch(order[where], augmentation)
        if data.fetches_ahead and (likely := strategy.likely_ticket(data.train_samples)):
            order, augmentation = tables(likely[0])
            data.expect(order[likely[1]], augmentation)
        clock.mark("data")
        step = where.start // s.global_batch if worker.weighs else 0
        losses.setdefault(epoch, {}).setdefault(step, []).append(strategy.step(x, y))
        clock.tick()
        samples += len(y)
        taken += 1
    if clock.running:
        clock.end()
    reports.shutdown()
    if samples:
        log.write("train", "end")
    used = memory.read()
    sums = {e: {n: summed(v) for n, v in steps.items()} for e, steps in losses.items()}
    diverged = [
        f"training loss of epoch {e + 1}"
        for e, steps in sums.items()
        if not isfinite(sum(x for x, _ in steps.values()))
    ]
    finite_losses = {
        e: {n: (finite(x), w) for n, (x, w) in steps.items()} for e, steps in sums.items()
    }
    if strategy.is_evaluator and not s.steps:
        with phases("eval"):
            diverged += evaluate_epochs(strategy, data, worker, progress)
    reason = f"the {diverged[0]} is not a finite number" if diverged else None
    return Result(
        "diverged" if reason else "ok", reason, clock, progress, taken, samples, used, finite_losses,
    )  # fmt: skip


def summed(losses: list[torch.Tensor]) -> tuple[float, float]:
    """The sum of some batches' losses and their number.

    Sums with their weights [2] are added.
    """
    stacked = torch.stack(losses).double()
    if stacked.dim() == 1:
        return float(stacked.sum()), len(losses)
    total, weight = stacked.sum(0).tolist()
    return total, weight


def drawn_tables(data: DeviceData, s: Settings, epochs: int) -> Callable[[int], EpochTables]:
    """Return a function for the tables of an epoch by its number, on the device.

    All are drawn in this call, since there is no pause between two epochs to draw the next one's in.

    Args:
        data: The data set.
        s: Settings of the cell.
        epochs: Number of epochs.
    """
    drawn = [data.tables(s.seed, epoch, s.augment).packed() for epoch in range(epochs)]

    @lru_cache(maxsize=2)  # a ticket of a lost worker may be from the epoch before
    def tables(epoch: int) -> EpochTables:
        return drawn[epoch].on(data.index_device)

    return tables


def evaluate_epoch(
    strategy: Any, data: DeviceData, worker: Worker, epoch: int
) -> dict[str, float | None]:
    """Return the evaluation of the servers' state after an epoch, as `Channel.score` takes it.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        epoch: Number of the epoch.
    """
    with strategy.holding_epoch(epoch) as train_time_s:
        entry = served_entry(strategy, data, worker, epoch, train_time_s)
    return {key: entry[key] for key in ("test_loss", "score", "score_error")}


def evaluate_epochs(
    strategy: Any, data: DeviceData, worker: Worker, progress: Progress
) -> list[str]:
    """Evaluate the servers' state after each epoch.

    Return the names of values that were not finite.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        progress: Results of the finished epochs.
    """
    diverged = []
    for epoch in range(worker.settings.epochs):
        entry = served_entry(strategy, data, worker, epoch, strategy.load_epoch(epoch))
        strategy.drop_epoch(epoch)
        if entry["test_loss"] is None:
            diverged.append(f"test loss after epoch {epoch + 1}")
        progress.add(entry)
    return diverged


def served_entry(
    strategy: Any, data: DeviceData, worker: Worker, epoch: int, train_time_s: float
) -> dict[str, Any]:
    """Return the entry of an epoch whose server state the model has loaded.

    Its training loss is missing: only the launcher has all losses.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        epoch: Number of the epoch.
        train_time_s: Training time until its end.
    """
    evaluation = evaluate(strategy, data, worker.task, 0, Mesh(1), worker.heartbeat)
    entry = epoch_entry(epoch, train_time_s, None, evaluation)
    print(
        f"epoch {epoch + 1}/{worker.settings.epochs} as the servers had it after "
        f"{train_time_s:.2f} s: {describe_score(worker.task, entry['score'])}",
        flush=True,
    )
    return entry


def epoch_entry(
    epoch: int, train_time_s: float, train_loss: float | None, evaluation: Evaluated
) -> dict[str, Any]:
    """Return the record's entry of an epoch.

    Args:
        epoch: Its number, from 0.
        train_time_s: Training time until its end.
        train_loss: Mean training loss, if known.
        evaluation: Its evaluation.
    """
    return {
        "epoch": epoch + 1,
        "train_time_s": train_time_s,
        "train_loss": finite(train_loss),
        "test_loss": finite(evaluation.loss),
        "score": finite(evaluation.score),
        "score_error": finite(evaluation.error),
        **({"answers_left_out": evaluation.left_out} if evaluation.left_out else {}),
    }


def describe_score(task: Task, score: float | None) -> str:
    """Return the score with its name and unit, for a line of progress."""
    if score is None:
        return f"test {task.score_name} not finite"
    shown = f"{score:.2%}" if task.unit == "share" else f"{score:.4f} {task.unit}"
    return f"test {task.score_name} {shown}"


def warm_up(strategy: Strategy, data: DeviceData, worker: Worker) -> None:
    """Take a few steps that leave no trace: everything that they change is restored.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
    """
    s = worker.settings
    saved, generators = strategy.save(), Generators.now(worker.device)
    batch = data.practice_batches(strategy.samples_per_step(s), s)
    # The second step of a compiled model may compile again, for what the first has set up.
    for _ in range(max(s.warmup_steps, 3) if s.compile else s.warmup_steps):
        strategy.step(*batch())
    if s.compile:
        compiled.check_gradients(strategy, worker, *batch())
    with strategy.evaluating() as model, torch.no_grad():
        model(data.test_batch(0, eval_batch(data.meta["shape"]))[0])
    if worker.watch is not None:
        worker.watch.end_warm_up()
    strategy.restore(saved)
    generators.put_back(worker.device)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        let_go_of_collectives(worker.device)


def let_go_of_collectives(device: torch.device) -> None:
    """Free the tensors that the warm-up's collectives hold before memory is measured.

    These include DDP's first buckets. PyTorch keeps the tensors of a collective until its watchdog has seen
    the end and another collective runs. After a quick warm-up they would count in the peak, as large as all
    gradients.
    """
    torch.cuda.synchronize(device)
    wait_for_collectives()  # which the watchdog has not seen
    dist.all_reduce(torch.zeros(1, device=device))


def train_epoch(
    strategy: Strategy,
    data: DeviceData,
    worker: Worker,
    clock: StepClock,
    log: PhaseLog,
    epoch: int,
    max_steps: int | None = None,
    besides: Sequence[Beside] = (),
    taken: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Train one timed epoch, or its first `max_steps` steps.

    Return each step's loss, on the device.

    It is timed in stretches, between which the clock stops for activities next to it. Those due after the
    last step run once the epoch was evaluated.

    Args:
        strategy: The strategy.
        data: The data set.
        worker: This worker.
        clock: Clock of the steps.
        log: Log of the phases.
        epoch: Number of the epoch.
        max_steps: Maximum number of steps, or None for all.
        besides: Activities next to the training.
        taken: Losses of its first steps, which were taken before.
    """
    s = worker.settings
    order, augmentation = data.tables(s.seed, epoch, s.augment).on(data.index_device)
    settle_garbage()
    batches = islice(strategy.batches(order, epoch), len(taken), max_steps)
    losses, per_epoch = list(taken), data.train_samples // s.global_batch
    last = per_epoch if max_steps is None else min(per_epoch, max_steps)
    while True:
        stop = next_stop(besides)
        until = last if stop is None else min(stop - epoch * per_epoch, last)
        stretch = islice(batches, until - len(losses))
        log.write("train", "start")
        line_up(worker)  # nothing between this and the clock: it would be charged to all the others
        losses += timed_steps(strategy, data, clock, stretch, augmentation, goes_on=bool(losses))
        log.write("train", "end")
        if until == last:
            return losses
        tell(besides, stop, losses)


def timed_steps(
    strategy: Strategy,
    data: DeviceData,
    clock: StepClock,
    batches: Iterable[torch.Tensor],
    augmentation: Augmentation | None = None,
    goes_on: bool = False,
) -> list[torch.Tensor]:
    """Time one step per entry of `batches`; return the losses, still on the device.

    Args:
        strategy: The strategy.
        data: The data set.
        clock: Clock of the steps.
        batches: Sample numbers of each batch.
        augmentation: Augmentation of the epoch, if any.
        goes_on: Whether it continues the epoch whose steps were timed last.
    """
    losses = []
    clock.begin(goes_on)
    for indices, following in with_next(batches):
        x, y = data.batch(indices, augmentation)
        if following is not None:
            data.expect(following, augmentation)
        clock.mark("data")
        losses.append(strategy.step(x, y))
        clock.tick()
    clock.end()
    return losses


def with_next(
    batches: Iterable[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each of `batches` with the one after it, None after the last."""
    batches = iter(batches)
    now = next(batches, None)
    while now is not None:
        following = next(batches, None)
        yield now, following
        now = following


def line_up(worker: Worker) -> None:
    """Wait until all workers of a collective are here and their devices are idle."""
    if worker.world_size > 1:
        on_cuda = worker.device.type == "cuda"
        dist.barrier(device_ids=[worker.device.index] if on_cuda else None)


def settle_garbage() -> None:
    """Collect Python's garbage now, and never look again at what is left.

    Otherwise a full collection, which takes a tenth of a second with torch loaded, would fall into the timed
    training. Garbage of the training is still collected, in microseconds.
    """
    gc.collect()
    gc.freeze()


def evaluate(
    strategy: Strategy,
    data: DeviceData,
    task: Task,
    rank: int,
    mesh: Mesh,
    heartbeat: Heartbeat | None = None,
) -> Evaluated:
    """Return mean loss and score on the whole test set.

    The copies of the model divide the test set. Each worker calls the model equally often, since a sharded
    forward is a collective. The task sees only what counts: no batch beyond the end, and only one of the
    workers that share a copy.

    Args:
        strategy: The strategy.
        data: The data set.
        task: The task.
        rank: Rank of this worker.
        mesh: Division of the workers.
        heartbeat: Heartbeat to update, if any.
    """
    total, batch = data.test_samples, eval_batch(data.meta["shape"])
    rounds, share = math.ceil(total / (batch * mesh.replicas)), mesh.place(rank).replica
    sums = torch.zeros(8, dtype=torch.float64, device=data.device)
    with strategy.evaluating() as model, torch.no_grad():
        for i in range(rounds):
            start = (i * mesh.replicas + share) * batch
            counts = start < total and mesh.speaks(rank)
            x, y = data.test_batch(start, start + batch) if start < total else data.test_batch(0, 1)
            outputs = model(x)
            if counts:
                sums += sums_of_batch(task, outputs, y)
            if heartbeat is not None:
                heartbeat.alive()
    if mesh.workers > 1:
        dist.all_reduce(sums)
    return evaluated(sums.tolist())


def mean_over_workers(value: torch.Tensor, worker: Worker) -> float:
    """Return the mean of a scalar over the model's copies.

    It synchronizes, so only between epochs.

    One of the workers of a copy knows the value.
    """
    if worker.world_size > 1:
        if not worker.mesh.speaks(worker.rank):
            value = torch.zeros_like(value)
        dist.all_reduce(value)
    return float(value) / worker.mesh.replicas


def report_steps(done: int, in_all: int, clock: StepClock, worker: Worker) -> None:
    """Print one line of progress of a cell without evaluation, on rank 0.

    Args:
        done: Steps done.
        in_all: Steps of the training.
        clock: Clock of the steps.
        worker: This worker.
    """
    if worker.rank == 0:
        rate = done * worker.settings.global_batch / clock.train_time_s
        print(f"step {done}/{in_all}: {rate:,.0f} samples/s, no evaluation", flush=True)


def report_epoch(entry: dict[str, Any], clock: StepClock, worker: Worker, samples: int) -> None:
    """Print one line of progress, on rank 0.

    Args:
        entry: The epoch's entry.
        clock: Clock of the steps.
        worker: This worker.
        samples: Training samples of an epoch.
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
