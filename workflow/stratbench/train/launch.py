"""The launcher of a cell: it trains the cell, and writes the record.

python -m stratbench.train.launch --cell JSON --settings JSON --data DIR --record FILE --logs DIR

Exit code 0: the record is written (ok, oom, timeout, diverged and unsupported are results). Exit code 1: the
cell failed. The end of every process's log is then printed, and stored with exit codes in the cell's log
folder.
"""

from __future__ import annotations

import signal

# With this handler, Ctrl-C during the imports below ends the process without a traceback. `main` sets
# another handler.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_last_lines, write_text_atomically
from stratbench.cell.parent import terminate_when_ancestor_ends
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.strategies import get_strategy_class
from stratbench.strategies.needs import check_installed
from stratbench.study.job_values import insert_job_values
from stratbench.telemetry.compiling import missing_compiler_reason
from stratbench.telemetry.machine.foreign_processes import describe_gpu
from stratbench.telemetry.timeline import merge_timeline
from stratbench.train import agent, assemble, gpu_locks
from stratbench.train.inputs import check_code_and_data, check_data_spec
from stratbench.train.job import Job
from stratbench.train.locks import LockHeld, create_scratch_folder, lock_cell
from stratbench.train.nodes.srun import compute_queue_wait_s
from stratbench.train.running.runner import create_runner
from stratbench.train.standing import read_stack_calls
from stratbench.workload.data import prepared
from stratbench.workload.data.sources import DataError
from stratbench.workload.users_code import ModelError

EVIDENCE_LINES = 20


def main(argv: list[str] | None = None) -> int:
    """Train the cell, and return the exit code. The cell is locked until the result is stored."""
    args = parse_arguments(argv)
    cell = Cell(**json.loads(args.cell))
    settings = Settings.from_json(args.settings)

    def train_cell_under_lock(held: ExitStack) -> None:
        # If workers are SLURM jobs of their own, a second launcher ends instead of waiting. It would
        # otherwise occupy its own job for the whole training.
        waited = held.enter_context(lock_cell(args.logs, wait=create_runner(settings).is_gang))
        # Snakemake deletes the old record before it starts a launcher. So a record that exists now is from
        # another launcher.
        foreign = waited or args.parent is not None
        if foreign and record.is_valid_record_of_cell(args.record, args.cell, args.settings):
            print(f"cell {cell}: another launcher has finished it meanwhile; its record stays")
            return
        truncate_launcher_log(args.logs, f"cell {cell}")
        train_locked_cell(args, cell, settings)

    return run_launcher(cell, f"cell {cell}", args.parent, train_cell_under_lock, lambda: args.logs)


class Failure(RuntimeError):
    """Raised if a training has failed, with the exits of its processes."""

    def __init__(self, reason: str, processes: Sequence[agent.ProcessExit] = ()) -> None:
        super().__init__(reason)
        self.processes = [str(p) for p in processes]


class CellOrBlock(Protocol):
    """Cell, or block of short timed runs, that a launcher trains."""

    def as_dict(self) -> dict[str, Any]: ...


def run_launcher(
    launched: CellOrBlock,
    first_line: str,
    parent_pid: int | None,
    work: Callable[[ExitStack], None],
    get_log_dir: Callable[[], Path],
) -> int:
    """Run a launcher's work function with error handling, and return the launcher's exit code.

    The evidence is stored if the work fails.

    Args:
        launched: The cell or block.
        first_line: First line to print.
        parent_pid: Id of the process whose end also ends this process, or None.
        work: Function that does the work. It enters contexts, such as locks, in the stack that it gets. They
            then last until the evidence of a failure is stored.
        get_log_dir: Function that returns the folder for the evidence of a failure.
    """
    # Logs may contain characters that the encoding of the locale does not have.
    sys.stdout.reconfigure(errors="backslashreplace")
    print(first_line, flush=True)
    with ExitStack() as held:
        try:
            agent.handle_stop_signals(agent.raise_stopped_error)
            if parent_pid is not None:
                terminate_when_ancestor_ends(parent_pid)
            work(held)
            return 0
        except agent.Stopped as stopped:
            print(
                f"{format_cell_or_block_title(launched)}: stopped by {stopped}; all its processes were ended",
                flush=True,
            )
            return 128 + stopped.signum
        except LockHeld as e:
            # No evidence is stored: the cell's folder belongs to the launcher that holds the lock.
            print(f"{format_cell_or_block_title(launched)}: {e}", flush=True)
            return 1
        except Failure as e:
            return store_failure_and_get_exit_code(get_log_dir(), launched, str(e), e.processes)
        except (gpu_locks.DeviceError, DataError, record.RecordError, ModelError, OSError) as e:
            return store_failure_and_get_exit_code(get_log_dir(), launched, str(e), [])
        except Exception as e:
            trace = "".join(traceback.format_exception(e)).splitlines()
            return store_failure_and_get_exit_code(
                get_log_dir(), launched, f"{type(e).__name__}: {e}", [], trace
            )


def format_cell_or_block_title(launched: CellOrBlock) -> str:
    """Return the kind and name of a cell or block, for messages."""
    return f"{'cell' if isinstance(launched, Cell) else 'block'} {launched}"


def truncate_launcher_log(logs: Path, first_line: str) -> None:
    """Truncate the log of this launcher to its first line.

    It is called after the cell or block has been locked. Until then another launcher may write to the log, so
    the shell opens the log for appending.
    """
    with contextlib.suppress(OSError):
        is_log = os.path.samestat(os.fstat(1), logs.with_name(f"{logs.name}.log").stat())
        if is_log and fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND:
            sys.stdout.flush()
            os.ftruncate(1, 0)
            print(first_line, flush=True)


def train_locked_cell(args: argparse.Namespace, cell: Cell, settings: Settings) -> None:
    """Train a cell that is locked already, and write its record.

    Args:
        args: Command line of the launcher.
        cell: Cell to train.
        settings: Settings of the cell.

    Raises:
        Failure: If the cell ends without a result.
    """
    if not record.can_validate_records():
        print(
            "fastjsonschema is not installed: the record will not be validated here, but where it is read",
            flush=True,
        )
    for old in (args.logs / record.FAILURE_FILE, args.record, args.timeline):
        old.unlink(missing_ok=True)
    runner = create_runner(settings)
    runner.prepare(RunFolder.from_log_dir(args.logs), cell, settings, args.data)
    check_installed(cell.strategy, get_strategy_class(settings.strategy), settings.options)
    check_code_and_data(args.data, settings)
    with (
        runner.reserve_gpus(settings, args) as use_cuda,
        create_job(cell, settings, use_cuda, args) as job,
    ):
        if settings.compile and (reason := missing_compiler_reason(job.use_cuda)):
            raise Failure(reason)
        job, exits, ending = runner.run(job, args)
    if ending.status == "error":
        raise Failure(ending.reason, exits.processes)
    # The cell has a result now, which a signal must not prevent from being written.
    agent.handle_stop_signals(lambda _: None)
    merge_timeline(
        job.folder.list_timeline_samples_paths(), job.folder.list_phase_log_paths(), args.timeline
    )
    finished = assemble.make_record(job, ending)
    record.write_record(args.record, finished)
    shutil.rmtree(job.folder.saved_state_dir, ignore_errors=True)
    skews_ms = finished["time"]["start_skew_ms"]
    skew = f", start skew {max(skews_ms):.1f} ms" if skews_ms else ""
    print(f"cell {cell}: {ending.status}{f' ({ending.reason})' if ending.reason else ''}{skew}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line of a cell's launcher."""
    parser = create_launcher_parser(__doc__)
    parser.add_argument(
        "--cell", required=True, help="cell to train: its seven coordinates, as JSON"
    )
    parser.add_argument("--record", required=True, type=Path, help="file for the record")
    parser.add_argument("--timeline", required=True, type=Path, help="file for the timeline")
    parser.add_argument(
        "--worker-job",
        default="",
        help="SLURM resources of a worker's job as JSON, if each worker is a job of its own; else empty",
    )
    parser.add_argument(
        "--repeats", type=int, help="number of repeats of the cell that the config plans"
    )
    return parser.parse_args(insert_job_values(sys.argv[1:] if argv is None else argv))


def create_launcher_parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options that launchers of cells and of blocks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--settings",
        required=True,
        help="settings of the cell as JSON, or of a block's segments by strategy",
    )
    parser.add_argument("--data", required=True, type=Path, help="folder of the prepared data set")
    parser.add_argument(
        "--logs", required=True, type=Path, help="folder for logs, and for evidence of a failure"
    )
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=0,
        help="time limit in seconds of the cell or of each segment; 0: no limit",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="number of nodes on which the cell or block runs"
    )
    parser.add_argument(
        "--parent", type=int, help="id of the process whose end also ends the launcher"
    )
    parser.add_argument(
        "--cpus-per-node",
        type=int,
        default=1,
        help="CPU cores that the cell or block has requested on each node",
    )
    parser.add_argument(
        "--server-cpus",
        type=int,
        default=0,
        help="CPU cores per node, of the requested ones, that are for parameter servers",
    )
    return parser


@contextmanager
def create_job(
    cell: Cell,
    settings: Settings,
    use_cuda: bool,
    args: argparse.Namespace,
    logs: Path | None = None,
    in_block: bool = False,
) -> Iterator[Job]:
    """Yield the job of a cell or segment. The job's time limit counts from now.

    Args:
        cell: Cell to train.
        settings: Settings of the cell.
        use_cuda: Whether the cell trains on GPUs.
        args: Command line of the launcher.
        logs: Log folder, or None for that of `args`.
        in_block: Whether the job is a segment of a block.
    """
    meta = prepared.read_verified_metadata(args.data)
    check_data_spec(meta, args.data, settings)
    workers_per_node = -(-cell.gpus // args.nodes)
    with create_scratch_folder() as local:
        yield Job(
            cell=cell,
            settings=settings,
            data_dir=args.data.resolve(),
            data=meta,
            folder=RunFolder.from_log_dir(logs or args.logs, local),
            workers_per_node=workers_per_node,
            use_cuda=use_cuda,
            threads=create_runner(settings).count_threads_per_worker(
                settings, workers_per_node, args
            ),
            origin_unix_s=time.time(),
            origin_s=time.monotonic(),
            time_limit_s=args.time_limit_s or None,
            is_in_block=in_block,
            queue_wait_s=compute_queue_wait_s(),
            planned_repeats=None if in_block else args.repeats,
        )


def store_failure_and_get_exit_code(
    log_dir: Path,
    cell: CellOrBlock,
    reason: str,
    processes: list[str],
    trace: Sequence[str] = (),
) -> int:
    """Store and print the evidence of a failure. If it cannot be stored, only print why.

    Args:
        log_dir: Folder for the evidence.
        cell: Cell or block that failed.
        reason: Why the cell or block failed.
        processes: One line per process on how it ended.
        trace: Lines of the launcher's traceback, if any.

    Returns:
        The exit code of the launcher, 1.
    """
    folder, path = RunFolder.from_log_dir(log_dir), log_dir / record.FAILURE_FILE
    logs = {p.name: read_last_lines(p)[-EVIDENCE_LINES:] for p in folder.list_log_paths()}
    stacks = {p.name: read_stack_calls(p)[:EVIDENCE_LINES] for p in folder.list_stack_trace_paths()}
    places = folder.read_process_locations()
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
        write_text_atomically(path, json.dumps(evidence, indent=1) + "\n")
        where = f"kept in {path}"
    except OSError as e:
        where = f"not kept: {e}"
    # Printing may fail, too, if the log is on the same full disk.
    with contextlib.suppress(OSError):
        print(f"\n{format_cell_or_block_title(cell)} FAILED: {reason}")
        for line in processes:
            print(f"  {line}")
        for name, device in places.items():
            gpu = f"{describe_gpu(device['gpu'])} of " if "gpu" in device else ""
            print(f"  {name} ran on {gpu}{device['host']}")
        for name, lines in logs.items():
            print(f"--- end of {folder.path / name}")
            print("\n".join(lines) or "(empty)")
        for name, calls in stacks.items():
            print(f"--- innermost calls in {folder.path / name}")
            print("\n".join(calls))
        print(f"--- {where}", flush=True)
    return 1


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # The process ends without clean-up. If it were killed during a clean-up, Snakemake would delete the
    # record.
    os._exit(code)
