"""The launcher: runs one cell and writes its record, or leaves the evidence of its failure.

    python -m stratbench.train.launch --cell JSON --settings JSON --data DIR --record FILE --logs DIR

Exit code 0: the record is written (ok, oom, timeout, diverged and refused are results). Exit code 1: the cell
failed; the end of every process's log is printed and kept, with exit codes, in the cell's log folder.
"""

from __future__ import annotations

import signal

# Until `main` has its own way, Ctrl-C ends the imports without a traceback.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from stratbench.cell import record
from stratbench.cell.blocks import BlockPlan
from stratbench.cell.coordinates import Cell
from stratbench.cell.files import last_lines, write_atomic
from stratbench.cell.parent import end_with
from stratbench.cell.run_folder import RunFolder, command_name, worker_name
from stratbench.cell.settings import Settings
from stratbench.ps.wire.handshake import new_secret, write_secret
from stratbench.strategies import strategy_class
from stratbench.strategies.needs import check_installed
from stratbench.study.job_values import insert_values
from stratbench.study.slurm.worker_job import WorkerJob
from stratbench.telemetry.compiling import missing_compiler
from stratbench.telemetry.machine.tenants import describe_gpu
from stratbench.telemetry.pauses import PauseWatch
from stratbench.telemetry.timeline import merge_timeline
from stratbench.train import agent, assemble, gpu_locks
from stratbench.train.commands.results import keep_results
from stratbench.train.elastic import launch as elastic
from stratbench.train.elastic import served
from stratbench.train.ending import Ending, classify, oom_kills
from stratbench.train.gpu_locks import hold_devices
from stratbench.train.inputs import check_inputs, check_spec
from stratbench.train.job import Job
from stratbench.train.locks import Held, hold_cell, scratch
from stratbench.train.nodes.paused import keeping_pauses, spoiled_by_pauses
from stratbench.train.nodes.srun import queue_wait_s, run_on_nodes
from stratbench.train.restarts import attempts
from stratbench.train.standing import Standing, calls_in, standings_of, why_hung
from stratbench.workload.data import prepared
from stratbench.workload.data.sources import DataError
from stratbench.workload.users_code import ModelError

EVIDENCE_LINES = 20


def main(argv: list[str] | None = None) -> int:
    """Run the cell; returns the exit code. The cell is held until its result or its evidence is kept."""
    args = parse_arguments(argv)
    cell = Cell(**json.loads(args.cell))
    settings = Settings.from_json(args.settings)

    def train(held: ExitStack) -> None:
        # A second server of an elastic cell would wait, and hold its place, for as long as the first trains.
        waited = held.enter_context(hold_cell(args.logs, wait=not settings.elastic))
        # Snakemake deletes a record before it has the cell trained again.
        foreign = waited or args.parent is not None
        if foreign and record.is_of(args.record, args.cell, args.settings):
            print(f"cell {cell}: another launcher has finished it meanwhile; its record stays")
            return
        begin_log(args.logs, f"cell {cell}")
        train_held(args, cell, settings)

    return run_to_end(cell, f"cell {cell}", args.parent, train, lambda: args.logs)


class Failure(RuntimeError):
    """Training failed, and how each of its processes exited."""

    def __init__(self, reason: str, processes: Sequence[agent.ProcessExit] = ()) -> None:
        super().__init__(reason)
        self.processes = [str(p) for p in processes]


def run_to_end(
    of: Cell | BlockPlan,
    begun: str,
    parent: int | None,
    work: Callable[[ExitStack], None],
    logs: Callable[[], Path],
) -> int:
    """Do the work of a cell's or a block's launcher; returns the exit code.

    What the work holds is held until the evidence of a failure is kept, in the folder that `logs` names
    then. `begun`: what is printed first. `parent`: the process with which this one ends.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # a log may hold what the locale cannot write
    print(begun, flush=True)
    with ExitStack() as held:
        try:
            agent.on_signals(agent.raise_stopped)
            if parent is not None:
                end_with(parent)
            work(held)
            return 0
        except agent.Stopped as stopped:
            print(f"{title_of(of)}: stopped by {stopped}; all its processes were ended", flush=True)
            return 128 + stopped.signum
        except Held as e:  # the evidence in the cell's folder is the holder's
            print(f"{title_of(of)}: {e}", flush=True)
            return 1
        except Failure as e:
            return fail(logs(), of, str(e), e.processes)
        except (gpu_locks.DeviceError, DataError, record.RecordError, ModelError, OSError) as e:
            return fail(logs(), of, str(e), [])
        except Exception as e:
            trace = "".join(traceback.format_exception(e)).splitlines()
            return fail(logs(), of, f"{type(e).__name__}: {e}", [], trace)


def title_of(of: Cell | BlockPlan) -> str:
    """A cell or a block, in the first words of a line about it."""
    return f"{'cell' if isinstance(of, Cell) else 'block'} {of}"


def begin_log(logs: Path, first_line: str) -> None:
    """Begin anew the log of the cell or block with this log folder, where this launcher's output goes there.

    Its shell appends, and it begins the log once it holds the cell: while it waits, the log is another's.
    """
    with contextlib.suppress(OSError):
        is_log = os.path.samestat(os.fstat(1), logs.with_name(f"{logs.name}.log").stat())
        if is_log and fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND:
            sys.stdout.flush()
            os.ftruncate(1, 0)
            print(first_line, flush=True)


def train_held(args: argparse.Namespace, cell: Cell, settings: Settings) -> None:
    """Train a cell that is held, and write its record. Failure where that has no result."""
    if not record.can_validate():
        print(
            "fastjsonschema is not installed: the record will not be validated here, but where it is read",
            flush=True,
        )
    for old in (args.logs / record.FAILURE_FILE, args.record, args.timeline):
        old.unlink(missing_ok=True)
    folder = RunFolder.of_logs(args.logs)
    if settings.elastic:
        elastic.prepare(folder, cell, settings, prepared.read_meta(args.data))
    else:
        ended_unix_s = attempts.last_sign(folder)
        folder.create()
    check_installed(cell.strategy, strategy_class(settings.strategy), settings.options)
    check_inputs(args.data, settings)
    with (
        hold_devices(settings, args.nodes, asked_of_workers(args)) as use_cuda,
        job_of(cell, settings, use_cuda, args) as job,
    ):
        if settings.compile and (reason := missing_compiler(job.use_cuda)):
            raise Failure(reason)
        if settings.elastic:
            job = elastic.since_the_first(job)
            by = served if job.has_servers else elastic
            exits = agent.Exits([], False)
            with keeping_pauses(job) as watch:
                ending = by.launch(job, asked_of_workers(args), watch)
        else:
            if settings.checkpoint_every:
                job = attempts.begin(job, ended_unix_s)
            job, exits, ending = launch_again_if_paused(job, args.cpus_per_node)
    if ending.status == "error":
        raise Failure(ending.reason, exits.processes)
    agent.on_signals(lambda _: None)  # what is as good as finished is not given up
    merge_timeline(job.folder.sample_files(), job.folder.phase_logs(), args.timeline)
    finished = assemble.make_record(job, ending)
    record.write(args.record, finished)
    attempts.forget_all(job)
    skews_ms = finished["time"]["start_skew_ms"]
    skew = f", start skew {max(skews_ms):.1f} ms" if skews_ms else ""
    print(f"cell {cell}: {ending.status}{f' ({ending.reason})' if ending.reason else ''}{skew}")


def asked_of_workers(args: argparse.Namespace) -> WorkerJob | None:
    """What each worker job of an elastic cell asks SLURM for; None where workers run on this machine."""
    return WorkerJob.from_json(args.worker_job) if args.worker_job else None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The launcher's command line."""
    parser = launchers_parser(__doc__)
    parser.add_argument("--cell", required=True, help="the cell's seven coordinates, as JSON")
    parser.add_argument("--record", required=True, type=Path, help="where the record goes")
    parser.add_argument("--timeline", required=True, type=Path, help="where the timeline goes")
    parser.add_argument(
        "--worker-job",
        default="",
        help="of an elastic cell: what each worker job asks SLURM for, as JSON; empty: this machine",
    )
    parser.add_argument("--repeats", type=int, help="repeats of the cell that the config asks for")
    return parser.parse_args(insert_values(sys.argv[1:] if argv is None else argv))


def launchers_parser(description: str) -> argparse.ArgumentParser:
    """A parser of what a cell's and a block's launcher are both told: what to train, and on what."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--settings", required=True, help="resolved settings, as JSON; a block's by strategy"
    )
    parser.add_argument("--data", required=True, type=Path, help="folder of the prepared data set")
    parser.add_argument("--logs", required=True, type=Path, help="folder for logs and evidence")
    parser.add_argument(
        "--time-limit-s", type=float, default=0, help="of the cell or of each segment; 0: none"
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes that it spans")
    parser.add_argument("--parent", type=int, help="process id of the parent: ends when it does")
    parser.add_argument(
        "--cpus-per-node", type=int, default=1, help="CPU cores it has asked for on each node"
    )
    parser.add_argument(
        "--server-cpus", type=int, default=0, help="how many of these are for parameter servers"
    )
    return parser


@contextmanager
def job_of(
    cell: Cell,
    settings: Settings,
    use_cuda: bool,
    args: argparse.Namespace,
    logs: Path | None = None,
    in_block: bool = False,
) -> Iterator[Job]:
    """The job, on the devices that are held for it. Its time limit (0: none) counts from here.

    `args`: a launcher's command line. `logs`: instead of the folder that it names.
    """
    meta = prepared.verified_meta(args.data)
    check_spec(meta, args.data, settings)
    workers_per_node = -(-cell.gpus // args.nodes)
    with scratch() as local:
        yield Job(
            cell=cell,
            settings=settings,
            data_dir=args.data.resolve(),
            data=meta,
            folder=RunFolder.of_logs(logs or args.logs, local),
            workers_per_node=workers_per_node,
            use_cuda=use_cuda,
            threads=threads_of(settings, workers_per_node, args),
            origin_unix_s=time.time(),
            origin_s=time.monotonic(),
            time_limit_s=args.time_limit_s or None,
            in_block=in_block,
            queue_wait_s=queue_wait_s(),
            planned_repeats=None if in_block else args.repeats,
        )


def threads_of(settings: Settings, workers: int, args: argparse.Namespace) -> int:
    """CPU threads of each worker: those that it asks for as a job of its own, else its share of the node."""
    if settings.elastic and (asked := asked_of_workers(args)):
        return settings.threads or asked.cpus
    return gpu_locks.threads_of(settings, workers, args.cpus_per_node, args.server_cpus)


def launch_again_if_paused(job: Job, cpus_per_node: int) -> tuple[Job, agent.Exits, Ending]:
    """Do as `launch` does, and once more where pauses have spoiled what was measured; returns the job, too.

    A second time the record says so. A cell that keeps checkpoints has only the record say so.
    """
    exits, ending = launch(job, cpus_per_node)
    paused = spoiled_by_pauses(job, ending.status)
    if paused is None or job.from_step is not None:
        return job, exits, ending
    reason = f"; {ending.reason}" if ending.reason else ""
    print(f"{title_of(job.cell)}: {paused} while it trained; it trains again{reason}", flush=True)
    folder = job.folder
    folder.create()
    if folder.local is not None:
        folder = replace(folder, local=folder.local / "again")
        folder.local.mkdir()
    job = replace(job, folder=folder, origin_unix_s=time.time(), origin_s=time.monotonic())
    return job, *launch(job, cpus_per_node)


def launch(job: Job, cpus_per_node: int) -> tuple[agent.Exits, Ending]:
    """Run the job's processes on all its nodes; returns how they exited, and how the cell ended."""
    if job.has_servers:
        write_secret(job.folder.secret, new_secret())
    kills_before = oom_kills()
    try:
        one = job.n_nodes == 1
        exits = agent.run_node(job, 0) if one else launch_with_srun(job, cpus_per_node)
    finally:
        job.folder.secret.unlink(missing_ok=True)
        # Of a cell that was not evaluated.
        shutil.rmtree(job.folder.snapshots(job.n_nodes > 1), ignore_errors=True)
    if job.is_command:
        keep_results(job)
    ending = classify(job, exits, kills_before)
    if ending.status == "error" and (paused := spoiled_by_pauses(job, ending.status)):
        ending = replace(ending, reason=f"{ending.reason}; {paused}")
    return exits, ending


def launch_with_srun(job: Job, cpus_per_node: int) -> agent.Exits:
    """Run one agent on each node of the SLURM job; each agent and this function keep the time limit."""
    path = job.folder.write_job(job.to_json())
    agent_of_job = [str(path), str(job.elapsed_s)]
    watch = PauseWatch()

    def left_s(beyond_s: float = 15.0) -> float:
        """Until the agents, which keep the limit themselves, are to have ended."""
        deadline_s = agent.extended_deadline_s(job, watch)
        return math.inf if deadline_s is None else deadline_s + beyond_s - time.monotonic()

    try:
        code = run_on_nodes(
            job.n_nodes, cpus_per_node, "stratbench.train.agent", agent_of_job, left_s
        )
        late = left_s(beyond_s=0) <= 0
    finally:
        watch.stop()
    standings = standings_of(job)
    processes = [
        agent.ProcessExit(worker_name(r), _exit_code(job, r, standings.get(r)))
        for r in range(job.world_size)
    ]
    if job.is_command:
        ends = {e["node"]: e["exit_code"] for e in job.folder.command_ends(job.n_nodes)}
        lost = None if late or not code else 1  # its agent ended before it
        processes = [
            agent.ProcessExit(command_name(n), ends.get(n, lost)) for n in range(job.n_nodes)
        ]
    ended = code != 0
    hung = ended and why_hung(standings) is not None
    return agent.Exits(processes, timed_out=late and ended, hung=hung and not late)


def _exit_code(job: Job, rank: int, standing: Standing | None) -> int | None:
    """What the worker's own file says, or else its agent: srun does not pass on the exit codes of each."""
    result = job.folder.read_worker(rank)
    if result is None:
        return None if standing is None else standing.exit_code
    return int(result["status"] not in ("ok", "diverged"))


def fail(
    log_dir: Path,
    cell: Cell | BlockPlan,
    reason: str,
    processes: list[str],
    trace: Sequence[str] = (),
) -> int:
    """Keep and print the evidence of a failure, as far as the disk allows; returns the exit code."""
    folder, path = RunFolder.of_logs(log_dir), log_dir / record.FAILURE_FILE
    logs = {p.name: last_lines(p)[-EVIDENCE_LINES:] for p in folder.process_logs()}
    stacks = {p.name: calls_in(p)[:EVIDENCE_LINES] for p in folder.stacks()}
    places = folder.read_places()
    if trace:
        logs["launcher"] = trace[-EVIDENCE_LINES:]
    evidence = {
        "cell": cell.as_dict(),
        "reason": reason,
        "processes": processes,
        "places": places,
        "logs": logs,
        "stacks": stacks,
    }
    try:
        write_atomic(path, json.dumps(evidence, indent=1) + "\n")
        kept = f"kept in {path}"
    except OSError as e:
        kept = f"not kept: {e}"
    with contextlib.suppress(OSError):  # this log may be on the same full disk
        print(f"\n{title_of(cell)} FAILED: {reason}")
        for line in processes:
            print(f"  {line}")
        for name, place in places.items():
            gpu = f"{describe_gpu(place['gpu'])} of " if "gpu" in place else ""
            print(f"  {name} ran on {gpu}{place['host']}")
        for name, lines in logs.items():
            print(f"--- end of {folder.path / name}")
            print("\n".join(lines) or "(empty)")
        for name, calls in stacks.items():
            print(f"--- innermost calls in {folder.path / name}")
            print("\n".join(calls))
        print(f"--- {kept}", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # at once: of a launcher that is killed before, Snakemake deletes the record
