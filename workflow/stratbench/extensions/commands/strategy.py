"""The strategy `command`: a user's trainer that is started as a command, such as `torchrun train.py`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stratbench.cell.options import option
from stratbench.cell.settings import GIVEN
from stratbench.extensions.commands.files import find_files_by_argument
from stratbench.strategies.base import Options, Strategy, Traits

#: Placeholders in arguments and their meanings, in addition to the names of an experiment's settings.
PLACEHOLDERS = {
    "workers": "number of processes on all nodes: the cell's `gpus`",
    "nodes": "number of nodes, on each of which the command is started once",
    "workers_per_node": "largest number of processes on a node",
    "node": "number of this node, from 0",
    "host": "name of node 0, on which the processes of all nodes rendezvous",
    "port": "a free port on node 0",
    "seed": "seed of the cell: the same for all strategies of a repeat",
    "global_batch": "samples per step over all workers",
    "per_worker_batch": "samples per step of one worker",
    "total_steps": "number of steps of the whole training",
    "model": "name of the model",
    "dataset": "name of the data set",
    "data": "folder of the prepared data set",
    "out": "an empty folder for output of the command, which is kept with the cell's log",
}
NAMES = (*PLACEHOLDERS, *GIVEN)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


class Command(Strategy):
    """A user's command with its own training loop, which reports its progress by `stratbench.report`.

    The record separates external measurements from what the command reports.
    """

    kind = "own"
    family = "engines"
    mark = 1
    summary: ClassVar[str] = "a trainer of your own, started as a command: its loop is not ours"
    rule: ClassVar[str] = "what the command does"
    collectives = ()
    buffers_note = "as the command has it"
    breakdown_note: ClassVar[str] = "a command is not looked into"

    @dataclass(frozen=True)
    class Options(Options):
        command: list[str] | None = option(  # noqa: RUF009 - the default is no list
            None,
            "program and its arguments, without a shell; placeholders such as {workers}, {seed} and {data} "
            "are "
            "replaced by values of the cell (docs/engines.md)",
        )
        needs: list[str] | None = option(  # noqa: RUF009 - the default is no list
            None,
            "pinned packages that it needs, such as accelerate==1.15.0; they are checked before any job",
        )
        sha256: str | None = option(
            None, "hash of the command's files on this machine; filled in automatically"
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.command == []:
                raise ValueError(
                    "command = []: names no program; give the program and its arguments"
                )
            if unknown := [n for n in iter_placeholders(self.command or ()) if n not in NAMES]:
                raise ValueError(
                    f"command: the placeholder {{{unknown[0]}}} is unknown; use one of: {', '.join(NAMES)}"
                )
            for pin in self.needs or ():
                if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", pin):
                    raise ValueError(
                        f"needs: {pin!r} is not a pinned package; write it as in accelerate==1.15.0"
                    )

    @classmethod
    def check(cls, name: str, options: dict[str, Any], gpus: int, per_worker_batch: int) -> None:
        if not get_command_arguments(options):
            raise ValueError(
                "it has no command to start; use a variant instead, such as "
                "mine: {strategy: command, command: [python, train.py]}"
            )

    @classmethod
    def check_nodes(cls, options: dict[str, Any], gpus: int, per_node: int) -> None:
        missing = {"node", "host"} - set(iter_placeholders(get_command_arguments(options)))
        if gpus > per_node and missing:
            missing_placeholders = " and ".join(f"{{{name}}}" for name in sorted(missing))
            raise ValueError(
                f"{gpus} workers span several nodes, and the command is started on each node; add "
                f"{missing_placeholders} to its arguments, or use fewer workers"
            )

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        for key in ("slowdown", "profile"):
            if values[key]:
                yield f".{key} = {values[key]}: stratbench cannot do this in a user's command"
        for name in iter_placeholders(get_command_arguments(options)):
            if name in GIVEN and values[name] is None:
                yield f".{name} = null: a command has it as {{{name}}}"

    @classmethod
    def packages(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(options["needs"] or ())

    @classmethod
    def list_user_files(cls, options: Mapping[str, Any]) -> dict[str, Path]:
        return find_files_by_argument(get_command_arguments(options))

    @classmethod
    def iter_unmet_requirements(cls, options: Mapping[str, Any]) -> Iterator[str]:
        program, *arguments = get_command_arguments(options) or [""]
        if shutil.which(program) is None:
            yield f"its program {program!r} is not found; install it, or give its path"
        for script in arguments:
            plain = script.endswith(".py") and not list(iter_placeholders([script]))
            if plain and not Path(script).expanduser().is_file():
                yield f"its script {script!r} is not here ({Path.cwd()}); give its path from there"

    def traits(self, gpus: int) -> Traits:
        return Traits(weight_parts=None, optimizer_parts=None, kept_copies=None)


def get_command_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the program and the arguments of a command, with their placeholders.

    The list is empty if the options have no command.
    """
    return options["command"] or []


def iter_placeholders(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the names of the placeholders in arguments, in order."""
    for argument in arguments:
        yield from _PLACEHOLDER.findall(argument)


def fill_placeholders(arguments: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """Return the arguments with placeholders replaced by their values."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), a) for a in arguments]
