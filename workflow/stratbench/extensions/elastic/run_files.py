"""Files of elastic cells in their run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_text_atomically
from stratbench.cell.run_folder import RunFolder, read_json_if_exists


@dataclass(frozen=True)
class RunFiles:
    """Files of an elastic cell in its run folder, which its launchers and workers share."""

    folder: RunFolder

    @property
    def worker_jobs_path(self) -> Path:
        """Path of the list of submitted worker jobs, a JSON object per line."""
        return self.folder.path / "worker_jobs.jsonl"

    @property
    def end_marker_path(self) -> Path:
        """Path of an empty file, which exists if the training has ended.

        Workers that start later then exit.
        """
        return self.folder.path / "ended"

    @property
    def servers_dir(self) -> Path:
        """Path of the folder that the parameter servers of all launchers share."""
        return self.folder.path / "servers"

    def list_member_history_paths(self) -> list[Path]:
        """Return the paths of the launchers' histories of members, in the order of launchers."""
        return sorted(
            self.folder.path.glob("incarnation*.json"),
            key=lambda path: int(path.stem.removeprefix("incarnation")),
        )

    def write_member_history(self, launcher_number: int, history: dict[str, Any]) -> None:
        """Write a launcher's history of members. Launchers of a cell are numbered from 0."""
        path = self.folder.path / f"incarnation{launcher_number}.json"
        write_text_atomically(path, json.dumps(history))

    def write_unreported_result(self, worker: int, result: dict[str, Any]) -> None:
        """Write the result that a worker could not report, because its launcher had ended."""
        write_text_atomically(self.folder.path / f"unheard{worker}.json", json.dumps(result))

    def read_unreported_result(self, worker: int) -> dict[str, Any] | None:
        """Return the result that a worker could not report to its launcher, if any."""
        return read_json_if_exists(self.folder.path / f"unheard{worker}.json")
