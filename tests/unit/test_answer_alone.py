"""Of a run that asks for an answer alone, the answer is what one sees."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from stratbench.study.answer_alone import leave_answers_alone


@pytest.mark.parametrize(
    ("targets", "dryrun", "told"),
    [
        ({"decide"}, False, ["a warning"]),
        ({"decide"}, True, ["Job stats", "a warning"]),
        ({"decide", "plan"}, False, ["Job stats", "a warning"]),
        (set(), False, ["Job stats", "a warning"]),
        (None, False, ["Job stats", "a warning"]),
    ],
)
def test_snakemake_is_quiet_where_a_decision_alone_is_asked_for(targets, dryrun, told):
    asked = None if targets is None else SimpleNamespace(targets=targets)
    logger = logging.getLogger("snakemake.logging")
    before, level, seen = list(logger.filters), logger.level, []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    try:
        leave_answers_alone(SimpleNamespace(dag_settings=asked, dryrun=dryrun))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.info("Job stats")
        logger.warning("a warning")
    finally:
        logger.filters[:] = before
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert seen == told
