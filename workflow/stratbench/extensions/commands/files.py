"""The files of a user's command in the run folder of its cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stratbench.cell.run_folder import RunFolder


def command_name(node: int) -> str:
    """Return the name of the command on a node, used like a worker's."""
    return f"command{node}"


def report_path(run: RunFolder) -> Path:
    """Return the file of the command's own report (`stratbench.report`), one JSON object per line."""
    return run.path / "report.jsonl"


def out_path(run: RunFolder) -> Path:
    """Return the folder for what the command writes."""
    return run.path / "out"


def end_path(run: RunFolder, node: int) -> Path:
    """Return the file on how the command ended on a node (`train.commands.supervisor`)."""
    return run.path / f"{command_name(node)}.json"


def read_ends(run: RunFolder, n_nodes: int) -> list[dict[str, Any]]:
    """Return how the command ended on each node where it ended by itself, with the node's number."""
    paths = {node: end_path(run, node) for node in range(n_nodes)}
    return [
        json.loads(path.read_text(encoding="utf-8")) | {"node": node}
        for node, path in paths.items()
        if path.exists()
    ]
