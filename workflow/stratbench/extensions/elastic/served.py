"""Runs an elastic cell with parameter servers: servers in this job, workers as separate jobs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from contextlib import suppress

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic.jobs.keeper import WorkerJobSupervisor
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.launch import (
    LAST_FILES_S,
    POLL_S,
    find_ending_caused_by_workers,
    open_worker_job_backend,
    write_worker_input_files,
)
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.servers.config import ElasticConfig, ElasticServerConfig
from stratbench.extensions.elastic.servers.journal import (
    JournalReader,
    delete_run_end_mark,
    is_state_of_all_servers_saved,
    read_journal,
    read_last_incarnation_number,
)
from stratbench.extensions.servers.cells import count_servers, read_finished_server_statistics
from stratbench.extensions.servers.node import make_server_processes
from stratbench.extensions.servers.strategy import make_server_configs
from stratbench.telemetry.pauses import PauseWatch
from stratbench.train import agent
from stratbench.train.ending import CellEnding, make_timeout_ending
from stratbench.train.forkserver import Process, run_fork_server
from stratbench.train.job import Job
from stratbench.train.nodes.paused import is_deadline_over
from stratbench.workload.tasks import get_task

#: Seconds after which stopped servers are killed. They save their state before. SLURM allows 30 s by default.
SAVE_S = 25.0
SERVER = "stratbench.extensions.elastic.worker:serve_parameters"


def launch_training(job: Job, worker_job: WorkerJob | None, watch: PauseWatch) -> CellEnding:
    """Train an elastic cell with parameter servers, and return how it ended.

    Args:
        job: Job of the cell.
        worker_job: SLURM request of each worker job, or None for processes of this machine.
        watch: Detects pauses of this machine, which do not count towards the time limit.
    """
    folder, files = job.folder, RunFiles(job.folder)
    write_worker_input_files(job)
    # The mark that an earlier run is over would end the new servers and workers.
    delete_run_end_mark(files.servers_dir)
    configs = make_elastic_server_configs(job, across_nodes=worker_job is not None)
    with (
        run_fork_server(may_share=True) as path,
        open_worker_job_backend(job, worker_job) as backend,
    ):
        servers = make_server_processes(path, folder, configs, SERVER)
        try:
            for process in servers:
                process.start()
            with WorkerJobSupervisor(backend, job.cell.gpus, files.worker_jobs_path) as supervisor:
                ending = _wait_for_training_end(
                    job, configs[0].elastic.incarnation, servers, supervisor, watch
                )
                if ending.status != "error":
                    files.end_marker_path.touch()
                    supervisor.stop_submitting_jobs()
                    _wait_until_workers_wrote_results(job, supervisor)
        finally:
            _stop_servers(servers)
            if files.end_marker_path.exists():
                _remove_resume_files(folder)
    return ending


def make_elastic_server_configs(job: Job, across_nodes: bool) -> list[ElasticServerConfig]:
    """Return the config of each parameter server for its next start (incarnation).

    The servers resume from a saved state if there is one.
    """
    own, s = RunFiles(job.folder).servers_dir, job.settings
    elastic = ElasticConfig(
        str(own),
        incarnation=1 + read_last_incarnation_number(own),
        resumes_saved_state=is_state_of_all_servers_saved(own, count_servers(s)),
        target_score=s.get_extension_keys(Elastic).ends_at,
        higher_is_better=get_task(s, job.data_shape).better == "higher",
    )
    if elastic.incarnation > 1:
        how = (
            "resume from their saved state"
            if elastic.resumes_saved_state
            else "start from scratch, because no state was saved"
        )
        print(f"incarnation {elastic.incarnation} of the servers: they {how}", flush=True)
    host = socket.gethostname() if across_nodes else None
    configs = make_server_configs(s, job.train_samples, job.folder, host)
    # Snapshots of the weights need a shared folder, because a worker on any node may evaluate an epoch.
    snapshots = None if s.steps else str(job.folder.get_snapshot_dir(shared=True))
    return [
        ElasticServerConfig(**vars(c) | {"snapshot_dir": snapshots}, elastic=elastic)
        for c in configs
    ]


def _wait_for_training_end(
    job: Job,
    incarnation: int,
    servers: list[Process],
    supervisor: WorkerJobSupervisor,
    watch: PauseWatch,
) -> CellEnding:
    """Wait for the end of the training, and return how it ended.

    The training also ends at its time limit, and when no worker can continue. `incarnation` is the number of
    this start of the servers.
    """
    limit_s, deadline = job.time_limit_s, None
    journal, has_begun = JournalReader(RunFiles(job.folder).servers_dir), False
    while any(process.is_alive() for process in servers):
        if ending := find_ending_caused_by_workers(job.folder, supervisor):
            return ending
        if failed := next((p for p in servers if p.exitcode), None):
            return CellEnding("error", _find_failure_reason(job, failed))
        for event in journal.read_new_events():
            has_begun |= event["event"] == "join"
            if event["event"] in ("join", "leave", "loss"):
                supervisor.poll_jobs_soon()
            if event["event"] == "loss" and event["incarnation"] == incarnation:
                supervisor.cancel_job_of_lost_worker(event["worker"])
        # The wait in SLURM's queue before the first worker joins does not count towards the time limit.
        if limit_s is not None and deadline is None and has_begun:
            deadline = time.monotonic() + limit_s
        if deadline is not None and is_deadline_over(deadline, watch):
            return make_timeout_ending(limit_s)
        time.sleep(POLL_S)
    return _classify_ending(job, servers)


def _find_failure_reason(job: Job, process: Process) -> str:
    errors = (s["error"] for s in read_finished_server_statistics(job) if s["error"])
    return next(errors, None) or str(agent.ProcessExit(process.name, process.exitcode))


def _classify_ending(job: Job, servers: list[Process]) -> CellEnding:
    """Return how the cell ended, from the results of its servers. All servers must have ended."""
    if failed := next((p for p in servers if p.exitcode), None):
        return CellEnding("error", _find_failure_reason(job, failed))
    first = job.folder.read_server_statistics(0)
    if first is None or first["elastic"]["suspended"]:
        return CellEnding(
            "error", "the servers were stopped; the next start resumes from their saved state"
        )
    for score in first["elastic"]["scores"]:
        if score["test_loss"] is None or score["score"] is None:
            reason = f"the test loss or score became no finite number in epoch {score['epoch'] + 1}"
            return CellEnding("diverged", reason)
    return CellEnding("ok", None)


def _wait_until_workers_wrote_results(job: Job, supervisor: WorkerJobSupervisor) -> None:
    """Wait until the workers that are still present have written their results."""
    joined = {
        e["worker"] for e in read_journal(RunFiles(job.folder).servers_dir) if e["event"] == "join"
    }
    ends = time.monotonic() + LAST_FILES_S
    while time.monotonic() < ends:
        if not any(e.ended_unix_s is None and e.number in joined for e in supervisor.list_jobs()):
            return
        supervisor.poll_jobs_soon()
        time.sleep(POLL_S)


def _stop_servers(servers: list[Process]) -> None:
    """Stop the servers by SIGTERM, upon which they save their state. Kill those that do not end."""
    for process in servers:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
    ends = time.monotonic() + SAVE_S
    for process in servers:
        if process.pid is not None:
            process.join(max(0.0, ends - time.monotonic()))
    agent.kill_processes(servers)


def _remove_resume_files(folder: RunFolder) -> None:
    """Remove the cell's secret, saved states and snapshots, because the training is not resumed."""
    folder.job_secret_path.unlink(missing_ok=True)
    for path in [*RunFiles(folder).servers_dir.glob("state*"), *folder.path.glob("server.*")]:
        if path.suffix != ".log":
            path.unlink(missing_ok=True)
    shutil.rmtree(folder.get_snapshot_dir(shared=True), ignore_errors=True)
