"""Runs Snakemake with `--quiet all`, but prints errors that occur before the first rule.

Snakemake's `--quiet all` also hides errors, such as a mistake in config.yaml. Errors inside a rule are
printed by the rule itself.
"""

from __future__ import annotations

import logging
import sys

from snakemake_interface_logger_plugins.common import LogEvent

from stratbench.study.snakemake_internals import (
    remove_places_from_error,
    run_snakemake_with_handler,
)


class BeforeRules(logging.Handler):
    """A log handler that prints errors until Snakemake begins its first job."""

    begun = False

    def emit(self, record: logging.LogRecord) -> None:
        self.begun = self.begun or getattr(record, "event", None) == LogEvent.JOB_INFO
        if record.levelno >= logging.ERROR and not self.begun:
            print(remove_places_from_error(record.getMessage()), file=sys.stderr)


def main() -> None:
    """Run Snakemake with the arguments of this process, and exit with its exit code."""
    run_snakemake_with_handler(BeforeRules())


if __name__ == "__main__":
    main()
