"""Of a run that asks for an answer alone, the answer is what one sees."""

from __future__ import annotations

import io
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
def test_snakemake_is_quiet_where_a_decision_alone_is_asked_for(tmp_path, targets, dryrun, told):
    """On the screen; its log file has all."""
    asked = None if targets is None else SimpleNamespace(targets=targets)
    logger = logging.getLogger("snakemake.logging")
    level, screen = logger.level, io.StringIO()
    handlers = [logging.StreamHandler(screen), logging.FileHandler(tmp_path / "log")]
    try:
        for handler in handlers:
            logger.addHandler(handler)
        leave_answers_alone(SimpleNamespace(dag_settings=asked, dryrun=dryrun))
        logger.setLevel(logging.INFO)
        logger.info("Job stats")
        logger.warning("a warning")
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
    assert screen.getvalue().splitlines() == told
    assert (tmp_path / "log").read_text().splitlines() == ["Job stats", "a warning"]
