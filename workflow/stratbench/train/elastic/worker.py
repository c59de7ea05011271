"""The process of one worker job of an elastic cell.

    python -m stratbench.train.elastic.worker JOB.json NUMBER

It finds all it needs by the paths in the job's file, which the cell's launcher has written. It ends in order
(exit code 0) when the training is over, when it is asked to leave (SIGTERM, SIGUSR1), and when the cell's
own job is gone; 3 without memory, 1 on any other error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stratbench.cell.run_folder import worker_name
from stratbench.strategies import strategy_class
from stratbench.strategies.mesh import Mesh
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.pulse import Pulse
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop, worker
from stratbench.train.elastic import served_worker
from stratbench.train.elastic.group import Group
from stratbench.train.elastic.member import Over, take_seat
from stratbench.train.elastic.split import Outcome, Split, leave_on
from stratbench.train.job import Job
from stratbench.train.locks import scratch
from stratbench.workload.users_code import Refused


def main(job_file: str, number: int, local_rank: int = 0) -> None:
    """Entry point of the process; `local_rank`: of the GPUs that it sees, the one that it uses."""
    began_unix_s = time.time()
    leaving = threading.Event()
    leave_on((signal.SIGTERM, signal.SIGUSR1), leaving)
    job = Job.from_json(Path(job_file).read_text(encoding="utf-8"))
    folder = job.folder
    if folder.ended.exists():
        worker.leave(0)
    worker.log_to(folder.log(worker_name(number)))
    origin_s = time.monotonic() - (began_unix_s - job.origin_unix_s)
    with scratch() if folder.local is None else nullcontext(folder.local) as local:
        job = replace(job, origin_s=origin_s, folder=replace(folder, local=local))
        code = _run(job, number, local_rank, leaving)
    worker.leave(code)


def _run(job: Job, number: int, local_rank: int, leaving: threading.Event) -> int:
    try:
        by = served_worker.train if job.has_servers else train
        result = by(job, number, local_rank, leaving)
    except Over as over:
        print(over, flush=True)
        return 0
    except Exception as error:
        traceback.print_exc()
        status = "oom" if worker.is_out_of_memory(error) else "error"
        refused = isinstance(error, Refused)
        told = {
            "status": "refused" if refused else status,
            "reason": str(error) if refused else worker.first_line(error),
        }
        job.folder.write_worker(number, told)
        return worker.EXIT_OOM if status == "oom" else worker.EXIT_ERROR
    job.folder.write_worker(number, result)
    return 0


def train(job: Job, number: int, local_rank: int, leaving: threading.Event) -> dict[str, Any]:
    """Train as one of the cell's members; returns what the worker measured."""
    s = job.settings
    device = torch.device("cuda", local_rank) if job.use_cuda else torch.device("cpu")
    worker.configure_torch(s, device, job.threads)
    memory = MemoryMeter(device)
    pulse = Pulse(job.folder.pulse(number))
    log = PhaseLog(job.folder.phases(number), number, job.origin_s, pulse.alive)
    phases = Phases(device, log)
    started_s = job.elapsed_s
    group = Group(job.folder.path, device)
    seat = take_seat(job.folder, number, lambda _: group.break_up(), leaving)
    cls = strategy_class(s.strategy)
    strategy = cls(cls.Options(**s.options))
    with phases("rendezvous"):
        group.form_alone()
    with phases("data"):
        data = worker.load_data(job, device)
    with phases("build"):
        ready = worker.set_up(
            s, strategy, data, device, seat.place,
            rank=0, world_size=1, local_world=1, folder=job.folder, pulse=pulse, mesh=Mesh(1),
        )  # fmt: skip
        me = ready.worker
    with phases("warmup"):
        loop.warm_up(strategy, data, me)
    split = Split(strategy, data, me, phases, group, seat, leaving, number)
    outcome = split.run(memory, loop.Progress(None))
    measured = worker.worker_result(outcome.result, strategy, phases, number)
    measured |= _facts(outcome)
    worker.describe(measured, ready, strategy, data)
    if outcome.was_first:
        measured |= worker.flops_of(s, ready.built)
    measured["started_s"] = started_s
    return measured


def _facts(outcome: Outcome) -> dict[str, Any]:
    """What a member's file says beside what every worker's does.

    How much it sent depends on how many were there, step by step: no figure stands for that.
    """
    return {
        "communication": None,
        "generations": outcome.generations,
        "checkpoints": {"held_up_s": outcome.held_up_s, "written_s": outcome.written_s},
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)
