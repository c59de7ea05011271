"""Files by which the servers of an elastic cell inform restarted servers and workers.

Each start of the servers is an incarnation with a number from 1. The files are the journal of events, the
mark that the training is over, and the list of completed tickets. Lines of the journal are appended
atomically, so that they survive a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_text_atomically

_JOURNAL, _ENDED, _DONE = "journal.jsonl", "ended.json", "tickets"


class Journal:
    """Appends events to a file: workers that join, leave or are lost, and evaluations."""

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _JOURNAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = incarnation
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        whole = path.read_bytes().rpartition(b"\n")
        # Servers that were killed may have written only a part of the last line, which is removed.
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
        # On a full disk a write may write only a part. The next one then raises OSError.
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the journal's file."""
        os.close(self._file)


def read_journal(folder: str | Path) -> list[dict[str, Any]]:
    """Read all events of the journal in order. Without a journal the list is empty."""
    return JournalReader(folder).read_new_events()


def collect_score_events(journal: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the `score` events of the journal by epoch. They have the results of evaluations.

    Restarted servers resume from a saved state. Epochs that ended after this state are trained again, so that
    their earlier events are left out.
    """
    scores: dict[int, dict[str, Any]] = {}
    for event in journal:
        if event["event"] == "incarnation":
            scores = {e: s for e, s in scores.items() if s["settled"] <= event["settled"]}
        elif event["event"] == "score":
            scores[event["epoch"]] = event
    return scores


class JournalReader:
    """Reads events that were added to the journal, each event once."""

    def __init__(self, folder: str | Path) -> None:
        self._path, self._at = Path(folder, _JOURNAL), 0

    def read_new_events(self) -> list[dict[str, Any]]:
        """Return the events that were added to the journal since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")  # without an incomplete last line
        except FileNotFoundError:
            return []
        self._at += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]


def read_last_incarnation_number(folder: str | Path) -> int:
    """Return the number of the servers' last start (incarnation), or 0 before the first."""
    return max((entry["incarnation"] for entry in read_journal(folder)), default=0)


class CompletedTickets:
    """File of completed tickets, with one byte per ticket.

    The byte is 0 until the ticket is completed. Then it is the number of the incarnation that did so, at most
    255. Restarted servers read from this file which tickets were completed after the last saved state, and
    let workers compute them again.
    """

    def __init__(self, folder: str | Path, incarnation: int) -> None:
        path = Path(folder, _DONE)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._incarnation = bytes([min(incarnation, 255)])
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def read_ticket_numbers(self) -> set[int]:
        """Return the numbers of all completed tickets."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._file), "rb") as file:
            return {number for number, incarnation in enumerate(file.read()) if incarnation}

    def mark_ticket_completed(self, number: int) -> None:
        """Mark ticket `number` as completed."""
        os.pwrite(self._file, self._incarnation, number)

    def mark_tickets_incomplete(self, numbers: Iterable[int]) -> None:
        """Mark tickets as not completed, so that workers compute them again."""
        for number in numbers:
            os.pwrite(self._file, b"\0", number)

    def close(self) -> None:
        """Close the file of completed tickets."""
        os.close(self._file)


def get_state_manifest_path(folder: str | Path, server: int) -> Path:
    """Return the path of the JSON file that describes a server's saved state."""
    return Path(folder, f"state{server}.json")


def delete_server_state(folder: str | Path, server: int) -> None:
    """Delete a server's saved state, so that the training starts from the beginning."""
    get_state_manifest_path(folder, server).unlink(missing_ok=True)


def is_state_of_all_servers_saved(folder: str | Path, n_servers: int) -> bool:
    """Return whether each of `n_servers` servers has a saved state."""
    return all(get_state_manifest_path(folder, server).exists() for server in range(n_servers))


def delete_run_end_mark(folder: str | Path) -> None:
    """Delete the mark that the training is over, because the servers start again."""
    Path(folder, _ENDED).unlink(missing_ok=True)


def write_run_end_mark(folder: str | Path, error: str | None) -> None:
    """Write the mark that the training is over, with the error if it has failed.

    Workers and other servers read this mark.
    """
    write_text_atomically(Path(folder, _ENDED), json.dumps({"error": error}))


def read_run_end_mark(folder: str | Path) -> dict[str, Any] | None:
    """Return the content of the mark that the training is over, if it exists."""
    try:
        return json.loads(Path(folder, _ENDED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
