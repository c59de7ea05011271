"""Runs an elastic synchronous cell: its coordinator in this process, its workers as separate jobs."""

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
from stratbench.extensions.elastic.coordinator import (
    Coordinator,
    NewestCheckpoint,
)
from stratbench.extensions.elastic.jobs.keeper import (
    NoWorkersError,
    WorkerJobBackend,
    WorkerJobSupervisor,
)
from stratbench.extensions.elastic.jobs.local_jobs import LocalJobs
from stratbench.extensions.elastic.jobs.slurm_jobs import SlurmJobs
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.target import is_target_score_reached
from stratbench.extensions.servers.wire.handshake import load_secret, make_secret, write_secret
from stratbench.extensions.servers.wire.transport import Listeners
from stratbench.telemetry.machine.busy import measure_load_of_other_programs
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.sampler import Sampler
from stratbench.train import agent
from stratbench.train.ending import CellEnding, make_timeout_ending
from stratbench.train.forkserver import is_shared_server_on_same_gpus, run_fork_server
from stratbench.train.job import Job
from stratbench.train.nodes.paused import is_deadline_over
from stratbench.workload.tasks import get_task

#: Maximum seconds after the end of the training in which workers may write their results.
LAST_FILES_S = 60.0
#: Seconds between two checks whether the training is over.
POLL_S = 0.2
#: Maximum seconds between two writes of the history of members.
KEEP_S = 10.0


def prepare_run_folder(
    folder: RunFolder, cell: Cell, settings: Settings, data: dict[str, Any]
) -> None:
    """Create the run folder, unless it has an unfinished training with equal settings and data.

    Args:
        folder: The run folder.
        cell: The cell.
        settings: Settings of the cell.
        data: Metadata of the prepared data set, with the checksum of its arrays.
    """
    try:
        kept = json.loads(folder.job_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = None
    wanted = {"cell": asdict(cell), "settings": asdict(settings), "data": data}
    same = kept and {key: kept[key] for key in wanted} == wanted
    if not same or RunFiles(folder).end_marker_path.exists():
        folder.create_empty_folder()
        return
    print(f"resuming the unfinished training in {folder.path}", flush=True)


def shift_times_to_first_launcher(job: Job) -> Job:
    """Return the job with times that count from the start of the cell's first launcher."""
    try:
        first = Job.from_json(job.folder.job_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return job
    spent_s = job.origin_unix_s - first.origin_unix_s
    return replace(job, origin_unix_s=first.origin_unix_s, origin_s=job.origin_s - spent_s)


def launch_training(job: Job, worker_job: WorkerJob | None, watch: PauseWatch) -> CellEnding:
    """Train an elastic synchronous cell, and return how it ended.

    Args:
        job: Job of the cell.
        worker_job: SLURM request of each worker job, or None for processes of this machine.
        watch: Detects pauses of this machine, which do not count towards the time limit.
    """
    folder, files = job.folder, RunFiles(job.folder)
    write_worker_input_files(job)
    incarnation = len(files.list_member_history_paths())
    with (
        open_worker_job_backend(job, worker_job) as backend,
        _run_coordinator(job, worker_job is not None) as coordinator,
    ):
        try:
            with WorkerJobSupervisor(backend, job.cell.gpus, files.worker_jobs_path) as supervisor:
                coordinator.on_change, coordinator.on_lost = (
                    supervisor.poll_jobs_soon,
                    supervisor.cancel_job_of_lost_worker,
                )
                write_history = partial(files.write_member_history, incarnation)
                ending = _wait_for_training_end(job, coordinator, supervisor, write_history, watch)
                if ending.status != "error":
                    files.end_marker_path.touch()
                    supervisor.stop_submitting_jobs()
                    _wait_until_workers_wrote_results(coordinator)
        finally:
            files.write_member_history(incarnation, coordinator.export_member_history())
            # After the end no later launcher resumes the training.
            if files.end_marker_path.exists():
                folder.job_secret_path.unlink(missing_ok=True)
                checkpoints.delete_checkpoints(folder.path)
    return ending


def write_worker_input_files(job: Job) -> None:
    """Write the files that worker jobs read: the job, and the cell's secret.

    The secret of an earlier launcher remains.
    """
    # Each worker replaces the node-local folder by one of its own, because it may run on another node.
    job.folder.write_job(replace(job, folder=replace(job.folder, node_local_dir=None)).to_json())
    if not job.folder.job_secret_path.exists():
        write_secret(job.folder.job_secret_path, make_secret())


def _wait_for_training_end(
    job: Job,
    coordinator: Coordinator,
    supervisor: WorkerJobSupervisor,
    write_history: Callable[[dict[str, Any]], None],
    watch: PauseWatch,
) -> CellEnding:
    """Wait until the training ends, and return how it ended.

    The training also ends at its time limit, and when no worker can continue. `write_history` writes the
    history of members to a file.
    """
    limit_s, deadline, written_counts, next_write_s = job.time_limit_s, None, None, 0.0
    while not coordinator.done.wait(POLL_S):
        # The record needs the history even if this launcher is killed.
        if written_counts != coordinator.history_event_counts or time.monotonic() > next_write_s:
            written_counts, next_write_s = (
                coordinator.history_event_counts,
                time.monotonic() + KEEP_S,
            )
            write_history(coordinator.export_member_history())
        if ending := find_ending_caused_by_workers(job.folder, supervisor):
            return ending
        # The wait in SLURM's queue before the first step does not count towards the time limit.
        if limit_s is not None and deadline is None and coordinator.has_training_begun:
            deadline = time.monotonic() + limit_s
        if deadline is not None and is_deadline_over(deadline, watch):
            return make_timeout_ending(limit_s)
    if coordinator.failure:
        return CellEnding("error", coordinator.failure)
    diverged = coordinator.get_divergence_reason()
    return CellEnding("diverged", diverged) if diverged else CellEnding("ok", None)


def find_ending_caused_by_workers(
    folder: RunFolder, supervisor: WorkerJobSupervisor
) -> CellEnding | None:
    """Return how the cell ends because of its workers' results. None if the training continues.

    The cell also ends if no worker can be started.
    """
    for result in _iter_worker_results(folder, supervisor):
        if result["status"] in ("oom", "unsupported"):
            return CellEnding(result["status"], result["reason"])
    try:
        supervisor.check_can_start_jobs()
    except NoWorkersError as gave_up:
        reasons = (
            r["reason"] for r in _iter_worker_results(folder, supervisor) if r["status"] == "error"
        )
        return CellEnding("error", ": ".join([str(gave_up), *list(reasons)[:1]]))
    return None


def _iter_worker_results(
    folder: RunFolder, supervisor: WorkerJobSupervisor
) -> Iterator[dict[str, Any]]:
    """Yield the results of workers that have ended."""
    for entry in supervisor.list_jobs():
        if entry.ended_unix_s is not None and (result := folder.read_worker_result(entry.number)):
            yield result


def _wait_until_workers_wrote_results(coordinator: Coordinator) -> None:
    ends = time.monotonic() + LAST_FILES_S
    while coordinator.num_present_members and time.monotonic() < ends:
        time.sleep(POLL_S / 4)


def find_newest_checkpoint(folder: RunFolder) -> NewestCheckpoint | None:
    """Return the newest checkpoint of an elastic cell that is not damaged, if any.

    Damaged checkpoints are deleted.
    """
    for step in sorted(checkpoints.list_checkpoint_steps(folder.path), reverse=True):
        try:
            with checkpoints.delete_checkpoint_if_damaged(folder.path, step):
                metadata = checkpoints.read_checkpoint_metadata(folder.path, step)
                return NewestCheckpoint(step, metadata.get("epochs", []))
        except checkpoints.DamagedCheckpoint as error:
            print(error, flush=True)
    return None


@contextmanager
def _run_coordinator(job: Job, across_nodes: bool) -> Iterator[Coordinator]:
    folder = job.folder
    host = socket.gethostname() if across_nodes else None
    listeners = Listeners("127.0.0.1" if host is None else "0.0.0.0", host)
    higher_is_better = get_task(job.settings, job.data_shape).better == "higher"
    coordinator = Coordinator(
        load_secret(folder.job_secret_path),
        listeners,
        job.cell.gpus,
        job.train_samples // job.settings.global_batch,
        lambda: find_newest_checkpoint(folder),
        len(folder.read_epoch_results()),
        folder.append_epoch_result,
        lambda score: is_target_score_reached(
            score, job.settings.get_extension_keys(Elastic).ends_at, higher_is_better
        ),
    )
    coordinator.start_threads()
    listeners.publish_addresses(folder.server_rendezvous_path, 0)
    try:
        yield coordinator
    finally:
        with suppress(OSError):
            os.unlink(f"{folder.server_rendezvous_path}.0")
        coordinator.close()


@contextmanager
def open_worker_job_backend(job: Job, worker_job: WorkerJob | None) -> Iterator[WorkerJobBackend]:
    """Open the scheduler of worker jobs: SLURM, or a fork server on this machine."""
    folder = job.folder
    agent.set_process_environment(job, on_one_host=worker_job is None)
    if worker_job is not None:
        folder.write_load_of_other_processes(0, measure_load_of_other_programs())
        yield SlurmJobs(worker_job, folder, job.cell.path)
        return
    with run_fork_server(may_share=not job.use_cuda or is_shared_server_on_same_gpus()) as server:
        sampler = Sampler(
            folder.get_timeline_samples_path(0), folder.get_pid_list_path(0), job.origin_s
        )
        try:
            folder.write_load_of_other_processes(0, measure_load_of_other_programs())
            yield LocalJobs(server, folder.job_path, sampler.watch_process)
        finally:
            sampler.stop()
