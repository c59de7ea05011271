"""Files that incarnations of a cell's servers leave for each other and for workers, as JSON.

They are the journal, and the mark that the run is over. Lines are appended atomically, so that they survive a
kill.
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
    """Log of events: workers that join, leave or are lost, and evaluations."""

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _JOURNAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        whole = path.read_bytes().rpartition(b"\n")
        os.ftruncate(
            self._file, len(whole[0] + whole[1])
        )  # an incarnation may have ended within a line

    def note(self, event: str, **facts: Any) -> None:
        """Append an event, dated in seconds since 1970."""
        entry = {
            "incarnation": self._incarnation,
            "event": event,
            "at_unix_s": time.time(),
            **facts,
        }
        line = f"{json.dumps(entry)}\n".encode()
        while line:  # a full disk takes a part, and fails the next time
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_journal(folder: str | Path) -> list[dict[str, Any]]:
    """Return all events of all incarnations, in order; none where there is no journal."""
    return NewEvents(folder).read()


def scores_in(journal: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the evaluation event of each epoch, by epoch.

    Epochs that ended after the state from which the next incarnation resumed are left out: their state is
    lost, and they are trained again.
    """
    scores: dict[int, dict[str, Any]] = {}
    for event in journal:
        if event["event"] == "incarnation":
            scores = {e: s for e, s in scores.items() if s["settled"] <= event["settled"]}
        elif event["event"] == "score":
            scores[event["epoch"]] = event
    return scores


class NewEvents:
    """The journal's events, each once, as they come."""

    def __init__(self, folder: str | Path) -> None:
        self._path, self._at = Path(folder, _JOURNAL), 0

    def read(self) -> list[dict[str, Any]]:
        """Return those since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")  # the last may be half written
        except FileNotFoundError:
            return []
        self._at += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]


def last_incarnation(folder: str | Path) -> int:
    """Return the number of the last incarnation that has begun, or 0 before the first."""
    return max((entry["incarnation"] for entry in read_journal(folder)), default=0)


class SettledTickets:
    """A byte per ticket: 0, or the incarnation of the server in which it was completed last (max.

    255).

    So a later incarnation knows what was done after the last saved state, and is done twice.
    """

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _DONE)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = bytes([min(incarnation, 255)])
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def numbers(self) -> set[int]:
        """Return the tickets that were completed in some incarnation."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._file), "rb") as file:
            return {number for number, incarnation in enumerate(file.read()) if incarnation}

    def add(self, number: int) -> None:
        """Mark ticket `number` as completed."""
        os.pwrite(self._file, self._incarnation, number)

    def forget(self, numbers: Iterable[int]) -> None:
        """These tickets are to be done again."""
        for number in numbers:
            os.pwrite(self._file, b"\0", number)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def state_manifest(folder: str | Path, server: int) -> Path:
    """Return the file that describes a server's saved state (`extensions.elastic.servers.saved_state`)."""
    return Path(folder, f"state{server}.json")


def drop_state(folder: str | Path, server: int) -> None:
    """Delete a server's saved state, so that its training starts from scratch."""
    state_manifest(folder, server).unlink(missing_ok=True)


def has_state(folder: str | Path, n_servers: int) -> bool:
    """Return whether all servers have saved a state."""
    return all(state_manifest(folder, server).exists() for server in range(n_servers))


def forget_end(folder: str | Path) -> None:
    """Delete the mark of the last incarnation's end, since another begins."""
    Path(folder, _ENDED).unlink(missing_ok=True)


def write_end(folder: str | Path, error: str | None) -> None:
    """Mark the run as over, for workers and the other servers. `error`: the failure, if any."""
    write_atomic(Path(folder, _ENDED), json.dumps({"error": error}))


def read_end(folder: str | Path) -> dict[str, Any] | None:
    """Return the mark of `write_end`, or None while the run continues."""
    try:
        return json.loads(Path(folder, _ENDED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
