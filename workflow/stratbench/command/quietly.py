"""Snakemake with `--quiet all`, but with the messages on why a rule could not begin.

Its own `--quiet all` hides errors too, such as a mistake in config.yaml. Errors inside a rule are printed by
the rule itself.
"""

from __future__ import annotations

import logging
import sys

from snakemake_interface_logger_plugins.common import LogEvent

from stratbench.study.snakemake_internals import run_with


class BeforeRules(logging.Handler):
    """Prints errors until the first job begins."""

    begun = False

    def emit(self, record: logging.LogRecord) -> None:
        self.begun = self.begun or getattr(record, "event", None) == LogEvent.JOB_INFO
        if record.levelno >= logging.ERROR and not self.begun:
            print(record.getMessage(), file=sys.stderr)


def main() -> None:
    """Takes Snakemake's arguments, and ends with its exit code."""
    run_with(BeforeRules())


if __name__ == "__main__":
    main()
