"""Entry points of an elastic cell's processes: of a worker, and of a parameter server.

    python -m stratbench.extensions.elastic.worker JOB.json NUMBER

A worker reads the file JOB.json, which the cell's launcher has written. The worker's exit code is 0 if the
training is over or the cell's own job has ended. It is also 0 after a signal to leave (SIGTERM, SIGUSR1). It
is 3 if memory was exhausted, and 1 after any other error.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# First: without it, the garbage collector would double the time that importing torch takes.
import stratbench.workload.with_torch  # noqa: F401
from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.extensions.elastic.group import ElasticGroup
from stratbench.extensions.elastic.member import WorkerNotNeeded, join_as_member
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.extensions.elastic.servers.channel import ATTEMPT_S, ReturningChannel, RunOverError
from stratbench.extensions.elastic.servers.config import ElasticServerConfig
from stratbench.extensions.elastic.servers.run import make_elastic_run
from stratbench.extensions.elastic.split import ElasticSynchronous
from stratbench.extensions.servers import loop as served_loop
from stratbench.extensions.servers.cells import has_servers
from stratbench.extensions.servers.process import serve_as_process
from stratbench.extensions.servers.ps.client import Channel
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.wire.link import Left, ServerLost
from stratbench.strategies.mesh import Mesh
from stratbench.train import agent, loop, worker
from stratbench.train.job import Job
from stratbench.train.locks import create_scratch_folder


def main(job_file: str, worker_number: int, local_rank: int = 0) -> None:
    """Run the process of an elastic worker.

    Args:
        job_file: File of the job.
        worker_number: Number of the worker.
        local_rank: Index of the worker's GPU among the visible ones.
    """
    began_unix_s = time.time()
    leave_requested = threading.Event()
    set_event_on_signals((signal.SIGTERM, signal.SIGUSR1), leave_requested)
    job = Job.from_json(Path(job_file).read_text(encoding="utf-8"))
    agent.set_process_environment(job, on_one_host=False)
    folder = job.folder
    if RunFiles(folder).end_marker_path.exists():
        worker.exit_immediately(0)
    worker.redirect_output(folder.get_log_path(format_worker_name(worker_number)))
    origin_s = time.monotonic() - (began_unix_s - job.origin_unix_s)
    with (
        create_scratch_folder()
        if folder.node_local_dir is None
        else nullcontext(folder.node_local_dir) as local
    ):
        job = replace(job, origin_s=origin_s, folder=replace(folder, node_local_dir=local))
        code = _train_and_return_exit_code(job, worker_number, local_rank, leave_requested)
    worker.exit_immediately(code)


def set_event_on_signals(
    signals: Sequence[signal.Signals], leave_requested: threading.Event
) -> None:
    """Set the event `leave_requested` when the process receives one of the signals.

    SLURM sends these signals before it ends a job. A separate thread sets the event at once, because the main
    thread may compute for seconds before it handles signals.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def wait_for_signal() -> None:
        number = reading.recv(1)[0]
        leave_requested.set()
        print(f"{signal.Signals(number).name}: this worker leaves", flush=True)
        writing.close()  # only the first signal is reported

    for each in signals:
        signal.signal(each, lambda number, frame: None)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait_for_signal, daemon=True).start()


def _train_and_return_exit_code(
    job: Job, worker_number: int, local_rank: int, leave_requested: threading.Event
) -> int:
    """Train as worker `worker_number`, write the worker's results, and return the exit code."""
    train = train_with_servers if has_servers(job.settings) else train_synchronous
    try:
        result, code = train(job, worker_number, local_rank, leave_requested), 0
    except (WorkerNotNeeded, RunOverError, Left, ServerLost) as over:
        print(over, flush=True)
        return 0
    except Exception as error:
        traceback.print_exc()
        result, code = worker.build_error_result_and_exit_code(error)
    job.folder.write_worker_result(worker_number, result)
    return code


def train_synchronous(
    job: Job, worker_number: int, local_rank: int, leave_requested: threading.Event
) -> dict[str, Any]:
    """Train as a worker of an elastic synchronous cell, and return its results.

    Args:
        job: Job of the cell.
        worker_number: Number of the worker.
        local_rank: Index of the worker's GPU among the visible ones.
        leave_requested: Set when this worker must leave.

    Raises:
        WorkerNotNeeded: If the worker is not admitted.
    """
    s, start = job.settings, worker.start_worker(job, worker_number, local_rank)
    strategy, device, phases = start.strategy, start.device, start.phases
    group = ElasticGroup(job.folder.path, device)
    membership = join_as_member(job.folder, worker_number, group.break_up_group, leave_requested)
    with phases("rendezvous"):
        group.form_single_member_group()
    with phases("data"):
        data = worker.load_data(job, device)
    with phases("build"):
        ready = worker.set_up_model(
            s, strategy, data, device, membership.place,
            rank=0, world_size=1, local_world_size=1, folder=job.folder,
            heartbeat=start.heartbeat, mesh=Mesh(1),
        )  # fmt: skip
    with phases("warmup"):
        loop.warm_up(strategy, data, ready.worker)
    split = ElasticSynchronous(
        strategy, data, ready.worker, phases, group, membership, leave_requested, worker_number
    )
    measured = worker.build_worker_result(
        split.train_until_training_ends(start.memory), start, worker_number
    )
    # The bytes sent per step are unknown, because they change with the number of present workers.
    measured |= {"communication": None, "generations": split.generations}
    measured["checkpoints"] = split.checkpoint_times_by_kind_s
    worker.add_model_descriptions(measured, ready, strategy, data)
    if split.is_rank_zero:
        measured |= worker.count_sample_flops(s, ready.built)
    return measured


def train_with_servers(
    job: Job, worker_number: int, local_rank: int, leave_requested: threading.Event
) -> dict[str, Any]:
    """Train as a worker of an elastic cell with parameter servers, and return its results.

    Args:
        job: Job of the cell.
        worker_number: Number of the worker.
        local_rank: Index of the worker's GPU among the visible ones.
        leave_requested: Set when this worker must leave.

    Raises:
        RunOverError: If the training is over before this worker has joined.
        Left: If this worker must leave before it has joined.
        ServerLost: If no server answers.
    """
    s, start = job.settings, worker.start_worker(job, worker_number, local_rank)
    strategy, device, phases = start.strategy, start.device, start.phases
    with phases("data"):
        data = worker.load_data(job, device)
    with phases("build"):
        # Each new worker has a larger number. For the setting `slowdown.workers` its number is taken modulo
        # `gpus`.
        ready = worker.set_up_model(
            s, strategy, data, device, worker_number % s.gpus,
            rank=worker_number, world_size=s.gpus, local_world_size=1, folder=job.folder,
            heartbeat=start.heartbeat, mesh=Mesh(1),
            make_server_channel=partial(make_returning_channel, job.folder, leave_requested),
        )  # fmt: skip
    result = served_loop.train_on_tickets(
        strategy, data, ready.worker, phases, start.log, start.memory, loop.EpochProgress(None)
    )
    measured = worker.build_worker_result(result, start, worker_number)
    worker.add_model_descriptions(measured, ready, strategy, data)
    if not strategy.channel.left:
        measured |= worker.count_sample_flops(s, ready.built)
    measured["left"], measured["returns"] = strategy.channel.left, strategy.channel.returns
    strategy.close()
    return measured


def make_returning_channel(
    folder: RunFolder, leave_requested: threading.Event, connect: Callable[[int, float], Channel]
) -> ReturningChannel:
    """Make a channel that connects to the servers, and again after they were restarted.

    Args:
        folder: Run folder of the cell.
        leave_requested: Set when this worker must leave.
        connect: Connects to the servers, from their incarnation and a time limit in seconds.
    """
    return ReturningChannel(
        lambda incarnation: connect(incarnation, ATTEMPT_S),
        folder.server_rendezvous_path,
        RunFiles(folder).servers_dir,
        leave_requested,
    )


def serve_parameters(config_json: str, run_dir: str) -> None:
    """Run the process of an elastic parameter server.

    Args:
        config_json: Its config (`ElasticServerConfig`) as JSON.
        run_dir: Run folder of the cell.
    """
    config = ElasticServerConfig(**json.loads(config_json))
    serve_as_process(config, run_dir, partial(run_server, make_run=make_elastic_run))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
