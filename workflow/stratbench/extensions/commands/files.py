"""Paths of a user command's files in the run folder of its cell."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.run_folder import RunFolder
from stratbench.workload.users_code import find_source_files

#: Maximum size in bytes of a file that counts as a command's code. Larger files are data.
MAX_PART_BYTES = 1 << 20


def get_command_file_stem(node: int) -> str:
    """Return the common name of a command's files on a node, such as `command0`."""
    return f"command{node}"


def get_report_path(run: RunFolder) -> Path:
    """Return the path of the command's report, to which `stratbench.report` writes JSON lines."""
    return run.path / "report.jsonl"


def get_output_folder(run: RunFolder) -> Path:
    """Return the path of the folder to which the command may write."""
    return run.path / "out"


def get_exit_status_path(run: RunFolder, node: int) -> Path:
    """Return the path of the file that says how the command on a node ended.

    The command's supervisor writes this file.
    """
    return run.path / f"{get_command_file_stem(node)}.json"


def read_exit_statuses(run: RunFolder, n_nodes: int) -> list[dict[str, Any]]:
    """Read how the command ended on each node.

    Nodes on which the command was killed or could not start are left out.
    """
    paths = {node: get_exit_status_path(run, node) for node in range(n_nodes)}
    return [
        json.loads(path.read_text(encoding="utf-8")) | {"node": node}
        for node, path in paths.items()
        if path.exists()
    ]


def find_files_by_argument(arguments: Iterable[str]) -> dict[str, Path]:
    """Return the user's files that a command's arguments name, by their names there.

    The result includes files of the user that a Python file imports, by their relative paths. A module after
    `-m` is searched in the working directory. Binary files, files above 1 MiB and installed packages are left
    out.
    """
    by_name: dict[str, Path] = {}
    before = ""
    for argument in arguments:
        path = Path(argument).expanduser()
        if before == "-m":
            by_name |= find_source_files(argument, [Path.cwd()])
        elif (
            path.is_file()
            and path.stat().st_size <= MAX_PART_BYTES
            and b"\0" not in path.read_bytes()
        ):
            beside = find_source_files(path.stem, [path.parent]) if path.suffix == ".py" else {}
            by_name |= {name: p for name, p in beside.items() if p != path} | {argument: path}
        before = argument
    return dict(sorted(by_name.items()))
