"""Fixtures: a fresh copy of the workflow, and one whose study has run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_study import Workflow, skipping_config, tiny_config


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    """An untouched copy; nothing has run."""
    return Workflow(tmp_path, tiny_config())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A copy whose study has run to its report, but for a cell that the plan called infeasible.

    Tests leave it as they found it.
    """
    done = Workflow(tmp_path_factory.mktemp("finished"), skipping_config())
    assert done.jobs()["train_cell"] == 5  # not yet planned
    planned = done.run("plan")
    assert planned.returncode == 0, planned.stdout
    assert "infeasible: vgg16 with single on 1 worker (1 cell of second): needs" in planned.stdout
    assert done.jobs()["train_cell"] == 4
    result = done.run()
    assert result.returncode == 0, result.stdout
    assert ": train tiny/first: ddp, vgg-compact, workers: 2, repeat 0; log: " in result.stdout
    # The end of a run tells what came of it.
    assert "vgg-compact (first): " in result.stdout
    assert "Start skew between the workers of an epoch: " in result.stdout
    return done
