"""Runs an elastic cell: its coordinator here, its workers as jobs of their own."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.checkpoints import checkpoints
from stratbench.extensions.elastic.coordinator import Coordinator, reaches
from stratbench.extensions.elastic.jobs.keeper import Backend, GaveUp, WorkerJobSupervisor
from stratbench.extensions.elastic.jobs.local_jobs import LocalJobs
from stratbench.extensions.elastic.jobs.slurm_jobs import SlurmJobs
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.servers.wire.handshake import load_secret, new_secret, write_secret
from stratbench.extensions.servers.wire.transport import Listeners
from stratbench.telemetry.machine.busy import busy_check
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.sampler import Sampler
from stratbench.train import agent
from stratbench.train.ending import Ending, slow
from stratbench.train.forkserver import fork_server, shares_gpus
from stratbench.train.job import Job
from stratbench.train.nodes.paused import is_over
from stratbench.workload.tasks import task_of

#: How long members may take to write their files once all is over, in seconds.
LAST_WORDS_S = 60.0
#: How often the launcher looks whether the training is over, and keeps the history at least, in seconds.
LOOK_S, KEEP_S = 0.2, 10.0


def prepare(folder: RunFolder, cell: Cell, settings: Settings, data: dict[str, Any]) -> None:
    """Create the run folder, or reuse one with an unfinished training of equal settings and data.

    Args:
        folder: The run folder.
        cell: The cell.
        settings: Its settings.
        data: Metadata of the prepared data set, with the checksum of its arrays.
    """
    try:
        kept = json.loads(folder.job.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = None
    wanted = {"cell": asdict(cell), "settings": asdict(settings), "data": data}
    same = kept and {key: kept[key] for key in wanted} == wanted
    if not same or folder.ended.exists():
        folder.create()
        return
    print(f"going on with the training that {folder.path} holds", flush=True)


def since_the_first(job: Job) -> Job:
    """Return the job with times that count from the start of the cell's first launcher."""
    try:
        first = Job.from_json(job.folder.job.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return job
    spent_s = job.origin_unix_s - first.origin_unix_s
    return replace(job, origin_unix_s=first.origin_unix_s, origin_s=job.origin_s - spent_s)


def launch(job: Job, worker_job: WorkerJob | None, watch: PauseWatch) -> Ending:
    """Train the cell.

    Args:
        job: The cell's.
        worker_job: SLURM request of each worker job, or None for processes of this machine.
        watch: Detects pauses, which count towards no limit.
    """
    folder = job.folder
    hand_out(job)
    incarnation = len(folder.incarnations())
    with (
        backend_of(job, worker_job) as backend,
        _coordinator(job, worker_job is not None) as coordinator,
    ):
        try:
            with WorkerJobSupervisor(backend, job.cell.gpus, folder.worker_jobs) as keeper:
                coordinator.on_change, coordinator.on_lost = keeper.look_soon, keeper.give_up
                keep = partial(folder.write_incarnation, incarnation)
                ending = _wait(job, coordinator, keeper, keep, watch)
                if ending.status != "error":
                    folder.ended.touch()
                    keeper.finish()
                    _await_last_words(coordinator)
        finally:
            folder.write_incarnation(incarnation, coordinator.facts())
            if folder.ended.exists():  # nobody goes on with it
                folder.secret.unlink(missing_ok=True)
                checkpoints.forget(folder.path)
    return ending


def hand_out(job: Job) -> None:
    """Write the files of worker jobs: the job, and the secret, which stays the first launcher's."""
    # A worker on another node has a local folder of its own.
    job.folder.write_job(replace(job, folder=replace(job.folder, local=None)).to_json())
    if not job.folder.secret.exists():
        write_secret(job.folder.secret, new_secret())


def _wait(
    job: Job,
    coordinator: Coordinator,
    keeper: WorkerJobSupervisor,
    keep: Callable[[dict[str, Any]], None],
    watch: PauseWatch,
) -> Ending:
    """Wait until the training is over, its time is, or no worker can continue.

    `keep` writes the history.
    """
    limit_s, deadline, kept, again_s = job.time_limit_s, None, None, 0.0
    while not coordinator.done.wait(LOOK_S):
        # A launcher that is killed keeps nothing more.
        if kept != coordinator.changes or time.monotonic() > again_s:
            kept, again_s = coordinator.changes, time.monotonic() + KEEP_S
            keep(coordinator.facts())
        if ending := ended_by_workers(job.folder, keeper):
            return ending
        # Time in the queue is none of the training's.
        if limit_s is not None and deadline is None and coordinator.has_begun:
            deadline = time.monotonic() + limit_s
        if deadline is not None and is_over(deadline, watch):
            return slow(limit_s)
    if coordinator.failure:
        return Ending("error", coordinator.failure)
    diverged = coordinator.diverged()
    return Ending("diverged", diverged) if diverged else Ending("ok", None)


def ended_by_workers(folder: RunFolder, keeper: WorkerJobSupervisor) -> Ending | None:
    """Return how the cell ends by its workers' reports, or None if it continues."""
    for result in _results(folder, keeper):
        if result["status"] in ("oom", "unsupported"):
            return Ending(result["status"], result["reason"])
    try:
        keeper.check()
    except GaveUp as gave_up:
        reasons = (r["reason"] for r in _results(folder, keeper) if r["status"] == "error")
        return Ending("error", ": ".join([str(gave_up), *list(reasons)[:1]]))
    return None


def _results(folder: RunFolder, keeper: WorkerJobSupervisor) -> Iterator[dict[str, Any]]:
    """Yield the results of ended workers."""
    for entry in keeper.jobs():
        if entry.ended_unix_s is not None and (result := folder.read_worker(entry.number)):
            yield result


def _await_last_words(coordinator: Coordinator) -> None:
    ends = time.monotonic() + LAST_WORDS_S
    while coordinator.present and time.monotonic() < ends:
        time.sleep(LOOK_S / 4)


def newest_kept(folder: RunFolder) -> tuple[int, list[dict[str, Any]]] | None:
    """Return the step of the newest complete checkpoint with its epochs' results, or None."""
    for step in sorted(checkpoints.steps_in(folder.path), reverse=True):
        try:
            with checkpoints.deleted_if_damaged(folder.path, step):
                return step, checkpoints.read_facts(folder.path, step).get("epochs", [])
        except checkpoints.Damaged as error:
            print(error, flush=True)
    return None


@contextmanager
def _coordinator(job: Job, across_nodes: bool) -> Iterator[Coordinator]:
    folder = job.folder
    host = socket.gethostname() if across_nodes else None
    listeners = Listeners("127.0.0.1" if host is None else "0.0.0.0", host)
    better = task_of(job.settings, job.data_shape).better
    coordinator = Coordinator(
        load_secret(folder.secret),
        listeners,
        job.cell.gpus,
        job.train_samples // job.settings.global_batch,
        lambda: newest_kept(folder),
        len(folder.read_epochs()),
        folder.add_epoch,
        lambda score: reaches(score, job.settings.of(Elastic).ends_at, better),
    )
    coordinator.start()
    listeners.publish(folder.rendezvous, 0)
    try:
        yield coordinator
    finally:
        with suppress(OSError):
            os.unlink(f"{folder.rendezvous}.0")
        coordinator.close()


@contextmanager
def backend_of(job: Job, worker_job: WorkerJob | None) -> Iterator[Backend]:
    """Yield the scheduler of workers."""
    folder = job.folder
    agent.set_environment(job, on_one_host=worker_job is None)
    if worker_job is not None:
        folder.write_busy(0, busy_check())
        yield SlurmJobs(worker_job, folder, job.cell.path)
        return
    with fork_server(may_share=not job.use_cuda or shares_gpus()) as server:
        sampler = Sampler(folder.samples(0), folder.pids(0), job.origin_s)
        try:
            folder.write_busy(0, busy_check())
            yield LocalJobs(server, folder.job, sampler.watch)
        finally:
            sampler.stop()
