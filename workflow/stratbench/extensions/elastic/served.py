"""Runs an elastic cell with parameter servers: the servers here, its workers as separate jobs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from stratbench.cell.run_folder import RunFolder
from stratbench.extensions.elastic.jobs.keeper import WorkerJobSupervisor
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.keys import Elastic
from stratbench.extensions.elastic.launch import (
    LAST_WORDS_S,
    LOOK_S,
    backend_of,
    ended_by_workers,
    hand_out,
)
from stratbench.extensions.elastic.servers.config import ElasticConfig, ElasticServerConfig
from stratbench.extensions.elastic.servers.journal import (
    NewEvents,
    forget_end,
    has_state,
    last_incarnation,
    read_journal,
)
from stratbench.extensions.servers.cells import count_servers, read_servers
from stratbench.extensions.servers.node import server_processes
from stratbench.extensions.servers.strategy import server_configs
from stratbench.telemetry.pauses import PauseWatch
from stratbench.train import agent
from stratbench.train.ending import Ending, slow
from stratbench.train.forkserver import Process, fork_server
from stratbench.train.job import Job
from stratbench.train.nodes.paused import is_over
from stratbench.workload.tasks import task_of

#: How long servers that are to stop may take to save their state, in seconds. SLURM gives 30 by default.
SAVE_S = 25.0
SERVER = "stratbench.extensions.elastic.worker:serve_parameters"


def launch(job: Job, worker_job: WorkerJob | None, watch: PauseWatch) -> Ending:
    """Train the cell.

    Args:
        job: The cell's.
        worker_job: SLURM request of each worker job, or None for processes of this machine.
        watch: Detects pauses, which count towards no limit.
    """
    folder = job.folder
    hand_out(job)
    forget_end(folder.servers)  # before any server or worker of this incarnation looks
    configs = configs_of(job, across_nodes=worker_job is not None)
    with fork_server(may_share=True) as path, backend_of(job, worker_job) as backend:
        servers = server_processes(path, folder, configs, SERVER)
        try:
            for process in servers:
                process.start()
            with WorkerJobSupervisor(backend, job.cell.gpus, folder.worker_jobs) as keeper:
                ending = _wait(job, configs[0].elastic.incarnation, servers, keeper, watch)
                if ending.status != "error":
                    folder.ended.touch()
                    keeper.finish()
                    _await_last_words(job, keeper)
        finally:
            _stop(servers)
            if folder.ended.exists():
                _clean_up(folder)
    return ending


def configs_of(job: Job, across_nodes: bool) -> list[ElasticServerConfig]:
    """Return each server's config for the next incarnation, which resumes if the last saved its state."""
    own, s = job.folder.servers, job.settings
    elastic = ElasticConfig(
        str(own),
        incarnation=1 + last_incarnation(own),
        resumes=has_state(own, count_servers(s)),
        target_score=s.of(Elastic).ends_at,
        higher_is_better=task_of(s, job.data_shape).better == "higher",
    )
    if elastic.incarnation > 1:
        how = (
            "go on from their saved state"
            if elastic.resumes
            else "start from scratch: none was saved"
        )
        print(f"incarnation {elastic.incarnation} of the servers: they {how}", flush=True)
    host = socket.gethostname() if across_nodes else None
    configs = server_configs(s, job.train_samples, job.folder, host)
    # Whoever evaluates an epoch may run elsewhere.
    snapshots = None if s.steps else str(job.folder.snapshots(shared=True))
    return [
        ElasticServerConfig(**vars(c) | {"snapshot_dir": snapshots}, elastic=elastic)
        for c in configs
    ]


def _wait(
    job: Job,
    incarnation: int,
    servers: list[Process],
    keeper: WorkerJobSupervisor,
    watch: PauseWatch,
) -> Ending:
    """Wait until the training is over, its time is, or no worker can continue.

    `incarnation`: that of the servers.
    """
    limit_s, deadline = job.time_limit_s, None
    journal, has_begun = NewEvents(job.folder.servers), False
    while any(process.is_alive() for process in servers):
        if ending := ended_by_workers(job.folder, keeper):
            return ending
        if failed := next((p for p in servers if p.exitcode), None):
            return Ending("error", _why_failed(job, failed))
        for event in journal.read():
            has_begun |= event["event"] == "join"
            if event["event"] in ("join", "leave", "loss"):
                keeper.look_soon()
            if event["event"] == "loss" and event["incarnation"] == incarnation:
                keeper.give_up(event["worker"])
        # Time in the queue is none of the training's.
        if limit_s is not None and deadline is None and has_begun:
            deadline = time.monotonic() + limit_s
        if deadline is not None and is_over(deadline, watch):
            return slow(limit_s)
        time.sleep(LOOK_S)
    return _ending_of(job, servers)


def _why_failed(job: Job, process: Process) -> str:
    errors = (s["error"] for s in read_servers(job) if s["error"])
    return next(errors, None) or str(agent.ProcessExit(process.name, process.exitcode))


def _ending_of(job: Job, servers: list[Process]) -> Ending:
    """Return how the cell ended, once its servers have."""
    if failed := next((p for p in servers if p.exitcode), None):
        return Ending("error", _why_failed(job, failed))
    first = job.folder.read_server(0)
    if first is None or first["elastic"]["suspended"]:
        return Ending("error", "the servers were stopped; what they saved is gone on with")
    for score in first["elastic"]["scores"]:
        if score["test_loss"] is None or score["score"] is None:
            reason = f"the test loss or score became no finite number in epoch {score['epoch'] + 1}"
            return Ending("diverged", reason)
    return Ending("ok", None)


def _await_last_words(job: Job, keeper: WorkerJobSupervisor) -> None:
    """Let the workers that are still there write what they have measured."""
    joined = {e["worker"] for e in read_journal(job.folder.servers) if e["event"] == "join"}
    ends = time.monotonic() + LAST_WORDS_S
    while time.monotonic() < ends:
        if not any(e.ended_unix_s is None and e.number in joined for e in keeper.jobs()):
            return
        keeper.look_soon()
        time.sleep(LOOK_S)


def _stop(servers: list[Process]) -> None:
    """Have running servers save their state, and end."""
    for process in servers:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
    ends = time.monotonic() + SAVE_S
    for process in servers:
        if process.pid is not None:
            process.join(max(0.0, ends - time.monotonic()))
    agent.end_all(servers)


def _clean_up(folder: RunFolder) -> None:
    """Remove secret, saved states and unused snapshots of a cell that will not be resumed."""
    folder.secret.unlink(missing_ok=True)
    for path in [*Path(folder.servers).glob("state*"), *folder.path.glob("server.*")]:
        if path.suffix != ".log":
            path.unlink(missing_ok=True)
    shutil.rmtree(folder.snapshots(shared=True), ignore_errors=True)
