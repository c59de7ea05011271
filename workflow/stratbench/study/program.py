"""Runs programs of the package for a Snakemake rule, one after the other in one process.

    python -m stratbench.study.program $PPID [--values FILE] [--hold FOLDER] -m MODULE ARGUMENTS [-m ...]

The process and its child processes end when the Snakemake that has started it ends. After a program that
fails, no further program runs. If a file cannot be read or written, it ends with one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

from stratbench.cell.files import format_os_error
from stratbench.cell.locks import NoLocks, try_to_lock_file
from stratbench.cell.parent import terminate_when_ancestor_ends
from stratbench.study.job_values import insert_job_values

LOCK = ".lock"


def main() -> int:
    """Run the programs of the command line. Return the exit code of the last one that ran."""
    own, *programs = split_arguments_by_program(insert_job_values(sys.argv[1:]))
    parser = argparse.ArgumentParser(prog="python -m stratbench.study.program", description=__doc__)
    parser.add_argument(
        "parent",
        type=int,
        help="process id of Snakemake ($PPID); this program ends when Snakemake ends",
    )
    parser.add_argument(
        "--hold",
        type=Path,
        help="folder to lock, so that no other run writes to it at the same time",
    )
    args = parser.parse_args(own)
    signal.signal(signal.SIGTERM, partial(stop_process_tree, os.getpid()))
    terminate_when_ancestor_ends(args.parent)
    try:
        with lock_folder(args.hold) if args.hold else nullcontext():
            for module, *arguments in programs:
                sys.argv = [module, *arguments]
                code = find_main_function(module)()
                sys.stdout.flush()
                if code:
                    return code
    except OSError as error:
        print(f"error: {format_os_error(error)}", file=sys.stderr)
        return 1
    return 0


def split_arguments_by_program(arguments: list[str]) -> list[list[str]]:
    """Return a command line's arguments in parts, which are separated by `-m`."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "-m":
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def find_main_function(module_name: str) -> Callable[[], int | None]:
    """Return the function `main` of a module, or of a package's `__main__`."""
    module = import_module(module_name)
    is_package = hasattr(module, "__path__")
    return (import_module(f"{module_name}.__main__") if is_package else module).main


def stop_process_tree(pid: int, signum: int, frame: object) -> None:
    """Handle a signal by ending this process and all processes that it has started.

    Args:
        pid: Process that has set the handler. A fork of this process only ends itself.
        signum: The signal.
        frame: Unused.
    """
    import psutil

    if os.getpid() != pid:  # in a forked child; the parent ends all child processes
        os._exit(128 + signum)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    sys.exit(128 + signum)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for the duration of the block.

    This process ends if another one has locked the folder. On a file system without locks, nothing is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = try_to_lock_file(folder / LOCK)
    except NoLocks:
        yield
        return
    if descriptor is None:
        sys.exit(f"error: another run is writing to {folder}; start again when that run has ended")
    try:
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
