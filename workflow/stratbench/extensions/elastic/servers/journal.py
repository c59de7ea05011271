"""Files through which incarnations of a cell's servers inform each other and the workers.

These are the journal of events, the mark that the run is over, and the list of completed tickets. Lines are
appended atomically, so that they survive a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic

_JOURNAL, _ENDED, _DONE = "journal.jsonl", "ended.json", "tickets"


class Journal:
    """Appends events to a file: workers that join, leave or are lost, and evaluations."""

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _JOURNAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        whole = path.read_bytes().rpartition(b"\n")
        # A killed incarnation may have written only a part of its last line.
        os.ftruncate(self._file, len(whole[0] + whole[1]))

    def append_event(self, event: str, **facts: Any) -> None:
        """Append an event with its time in seconds since 1970."""
        entry = {
            "incarnation": self._incarnation,
            "event": event,
            "at_unix_s": time.time(),
            **facts,
        }
        line = f"{json.dumps(entry)}\n".encode()
        while line:  # on a full disk, the first write may write a part, and the next one raises
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the journal's file."""
        os.close(self._file)


def read_journal(folder: str | Path) -> list[dict[str, Any]]:
    """Read all events of all incarnations in order.

    The list is empty if there is no journal.
    """
    return NewEvents(folder).read_new_events()


def collect_scores(journal: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the journal's event with the results of each evaluated epoch, by epoch.

    Epochs that ended after the state from which a later incarnation resumed are left out, because they are
    trained again.
    """
    scores: dict[int, dict[str, Any]] = {}
    for event in journal:
        if event["event"] == "incarnation":
            scores = {e: s for e, s in scores.items() if s["settled"] <= event["settled"]}
        elif event["event"] == "score":
            scores[event["epoch"]] = event
    return scores


class NewEvents:
    """Reads new events of the journal, each event once."""

    def __init__(self, folder: str | Path) -> None:
        self._path, self._at = Path(folder, _JOURNAL), 0

    def read_new_events(self) -> list[dict[str, Any]]:
        """Return the journal's events since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        except FileNotFoundError:
            return []
        self._at += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]


def read_last_incarnation(folder: str | Path) -> int:
    """Return the number of the last incarnation that has started, or 0 before the first."""
    return max((entry["incarnation"] for entry in read_journal(folder)), default=0)


class SettledTickets:
    """File with one byte per ticket: the incarnation that completed the ticket, or 0.

    The byte is at most 255. From the file a later incarnation knows which tickets were completed after the
    last saved state, and must be done again.
    """

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _DONE)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = bytes([min(incarnation, 255)])
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def read_numbers(self) -> set[int]:
        """Return the numbers of the tickets that were completed in any incarnation."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._file), "rb") as file:
            return {number for number, incarnation in enumerate(file.read()) if incarnation}

    def mark_completed(self, number: int) -> None:
        """Mark ticket `number` as completed."""
        os.pwrite(self._file, self._incarnation, number)

    def mark_undone(self, numbers: Iterable[int]) -> None:
        """Mark tickets as not completed, so that workers compute the tickets again."""
        for number in numbers:
            os.pwrite(self._file, b"\0", number)

    def close(self) -> None:
        """Close the file of completed tickets."""
        os.close(self._file)


def get_state_manifest(folder: str | Path, server: int) -> Path:
    """Return the path of the JSON file that describes a server's saved state."""
    return Path(folder, f"state{server}.json")


def delete_state(folder: str | Path, server: int) -> None:
    """Delete a server's saved state, so that its training starts from scratch."""
    get_state_manifest(folder, server).unlink(missing_ok=True)


def has_state(folder: str | Path, n_servers: int) -> bool:
    """Return whether all servers have a saved state."""
    return all(get_state_manifest(folder, server).exists() for server in range(n_servers))


def delete_end_mark(folder: str | Path) -> None:
    """Delete the mark that the run is over, because another incarnation starts."""
    Path(folder, _ENDED).unlink(missing_ok=True)


def write_end_mark(folder: str | Path, error: str | None) -> None:
    """Mark the run as over for workers and other servers. `error` is the reason of a failure, if any."""
    write_atomic(Path(folder, _ENDED), json.dumps({"error": error}))


def read_end_mark(folder: str | Path) -> dict[str, Any] | None:
    """Return the content of the mark that the run is over.

    The result is None while the run continues.
    """
    try:
        return json.loads(Path(folder, _ENDED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
