"""Files that an elastic cell adds to its run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.cell.run_folder import RunFolder, read_json_if_exists


@dataclass(frozen=True)
class RunFiles:
    """Paths and JSON files of an elastic cell in its run folder, shared by its launchers and workers."""

    folder: RunFolder

    @property
    def worker_jobs_path(self) -> Path:
        """The path of the list of submitted worker jobs, a JSON object per line."""
        return self.folder.path / "worker_jobs.jsonl"

    @property
    def end_marker_path(self) -> Path:
        """The path of the empty file that tells late workers that the training has ended."""
        return self.folder.path / "ended"

    @property
    def servers_dir(self) -> Path:
        """The path of the folder that the parameter servers of all launchers share."""
        return self.folder.path / "servers"

    def list_incarnation_paths(self) -> list[Path]:
        """Return the paths of the files that `write_incarnation` wrote, in the order of launchers."""
        return sorted(
            self.folder.path.glob("incarnation*.json"),
            key=lambda path: int(path.stem.removeprefix("incarnation")),
        )

    def write_incarnation(self, number: int, facts: dict[str, Any]) -> None:
        """Store facts on the workers that joined under launcher number `number`, from 0."""
        write_atomic(self.folder.path / f"incarnation{number}.json", json.dumps(facts))

    def write_orphaned_result(self, worker: int, result: dict[str, Any]) -> None:
        """Store the result of a worker whose launcher has ended without the result."""
        write_atomic(self.folder.path / f"unheard{worker}.json", json.dumps(result))

    def read_orphaned_result(self, worker: int) -> dict[str, Any] | None:
        """Return what `write_orphaned_result` stored, or None if the launcher received the result."""
        return read_json_if_exists(self.folder.path / f"unheard{worker}.json")
