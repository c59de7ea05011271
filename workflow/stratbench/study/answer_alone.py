"""Keeps what Snakemake says of itself from the screen where a rule's answer is all that was asked for."""

from __future__ import annotations

import logging
from typing import Any

#: Rules that train nothing and print their answer.
ANSWERS = ("decide",)


def leave_answers_alone(workflow: Any) -> None:
    """From now on, Snakemake's information is left out if nothing but rules of ANSWERS is asked for.

    Warnings and errors are not, nor is a dry run, nor anything from Snakemake's log file. `workflow` is
    Snakemake's, which knows its targets only after it has read the rules.
    """

    def is_told(record: logging.LogRecord) -> bool:
        asked = workflow.dag_settings
        alone = asked is not None and asked.targets and set(map(str, asked.targets)) <= {*ANSWERS}
        return record.levelno > logging.INFO or not alone or workflow.dryrun

    for handler in logging.getLogger("snakemake.logging").handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        ):
            handler.addFilter(is_told)
