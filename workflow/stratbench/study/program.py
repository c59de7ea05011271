"""Runs programs of the package for a rule, one after the other in one process.

    python -m stratbench.study.program $PPID [--values FILE] [--hold FOLDER] -m MODULE ARGUMENTS [-m ...]

It ends with the Snakemake that has started it, and so do the processes that a program has started. The first
program that fails is the last; a file that cannot be read or written ends it in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

from stratbench.cell.files import reason_of
from stratbench.cell.locks import NoLocks, try_lock
from stratbench.cell.parent import end_with
from stratbench.study.job_values import insert_values

LOCK = ".lock"


def main() -> int:
    """Run the programs of the command line; returns the exit code of the last."""
    own, *programs = split(insert_values(sys.argv[1:]))
    parser = argparse.ArgumentParser(prog="python -m stratbench.study.program", description=__doc__)
    parser.add_argument("parent", type=int, help="process that it ends with: Snakemake, as $PPID")
    parser.add_argument("--hold", type=Path, help="a folder that no other one writes meanwhile")
    args = parser.parse_args(own)
    signal.signal(signal.SIGTERM, partial(stop, os.getpid()))
    end_with(args.parent)
    try:
        with hold(args.hold) if args.hold else nullcontext():
            for module, *arguments in programs:
                sys.argv = [module, *arguments]
                code = main_of(module)()
                sys.stdout.flush()
                if code:
                    return code
    except OSError as error:
        print(f"error: {reason_of(error)}", file=sys.stderr)
        return 1
    return 0


def split(arguments: list[str]) -> list[list[str]]:
    """Return the arguments before the first -m, between one and the next, and after the last."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "-m":
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def main_of(name: str):
    """The function `main` of a module, or of a package's `__main__`."""
    module = import_module(name)
    return (import_module(f"{name}.__main__") if hasattr(module, "__path__") else module).main


def stop(pid: int, signum: int, frame: object) -> None:
    """End the processes that a program has started, and clean up.

    Signal handler of process `pid`.

    Args:
        pid: Process that has set the handler; a fork of it does nothing.
        signum: The signal.
        frame: Unused.
    """
    import psutil

    if os.getpid() != pid:  # forked from it
        os._exit(128 + signum)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    sys.exit(128 + signum)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder locked in the block.

    Ends this process with a sentence where another one has it.

    A file system without locks locks nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = try_lock(folder / LOCK)
    except NoLocks:
        yield
        return
    if descriptor is None:
        sys.exit(
            f"error: another run writes {folder} at this moment; start again when it has ended"
        )
    try:
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
