"""What Snakemake says of a failed job: the end of its log, and not its command line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from snakemake_interface_logger_plugins.common import LogEvent

#: In the command lines of this workflow's rules, and of no other's.
MARK = "STRATBENCH_PACKAGE"
#: Lines that are shown of a log.
MOST_LINES = 300


def speak_of_failed_jobs() -> None:
    """From now on, as `shorten` does. Again is the same as once."""
    logging.getLogger("snakemake.logging").addFilter(shorten)


def shorten(record: logging.LogRecord) -> bool:
    """Filter of Snakemake's messages: leaves command lines out, and shows the end of a failed job's log.

    A command line holds the resolved config, twice. A log is shown whether or not the profile says so
    and Snakemake is quiet; not that of a rule whose output has been on the screen.
    """
    event = getattr(record, "event", None)
    if event == LogEvent.ERROR:  # the job's own message follows
        return not ("CalledProcessError" in record.getMessage() and MARK in record.getMessage())
    if event == LogEvent.JOB_ERROR and MARK in (command := record.shellcmd or ""):
        for log in record.log:
            if "| tee " not in command:
                print(end_of(Path(log)), file=sys.stderr, flush=True)
        record.aux = {**record.aux, "log": ", ".join(record.log)}
        record.shellcmd, record.log = None, []
    return True


def end_of(log: Path) -> str:
    """The last lines of a log, below its name."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        lines = [f"cannot be read: {error.strerror}"]
    omitted = ["..."] if len(lines) > MOST_LINES else []
    return "\n".join([f"{log}:", *omitted, *lines[-MOST_LINES:]])
