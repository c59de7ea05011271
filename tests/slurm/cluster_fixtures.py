"""Fixtures: a SLURM cluster of the test run's own, without and with accounting.

A plugin that the tests name, not a conftest.py: a module of that name would stand in the way of the
one that the unit tests import from.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import NODES, SlurmCluster
from cluster_host import Unavailable

from launching import WORKFLOW, sharing
from stratbench.train.forkserver import FOLDER_VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
from tiny_study import make_holdable


def _session(request: pytest.FixtureRequest, **options: bool) -> Iterator[SlurmCluster]:
    # A short path: a unix socket lies below it.
    directory = Path(tempfile.mkdtemp(prefix="stratbench-slurm-"))
    failed_before = request.session.testsfailed
    cluster = SlurmCluster(directory, **options)
    try:
        cluster.start()
    except Unavailable as error:
        shutil.rmtree(directory)
        pytest.skip(f"no SLURM cluster here: {error}")
    try:
        yield cluster
    finally:
        cluster.stop()
        if request.session.testsfailed == failed_before:
            shutil.rmtree(directory)
        else:
            print(f"SLURM's logs are kept in {directory}/log")


@pytest.fixture(scope="session")
def slurm_session(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """The cluster without accounting, as the tests before left it."""
    yield from _session(request)


@pytest.fixture(scope="session")
def slurm_accounting(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A cluster with accounting on, which lets in only jobs of a known account."""
    yield from _session(request, accounting=True)


@pytest.fixture
def slurm(slurm_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster without accounting: both nodes idle and no job in it, before and after."""
    yield slurm_session
    slurm_session.cancel_all()
    for node in NODES:
        slurm_session.restore_node(node)


@pytest.fixture(scope="session")
def warm_holding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The same as `warm`, for workers that can be held by `ClusterWorkflow.hold`."""
    package = tmp_path_factory.mktemp("holding") / "workflow"
    shutil.copytree(WORKFLOW, package, ignore=shutil.ignore_patterns("*.pyc.*"))
    make_holdable(package)
    with sharing(package):
        yield {FOLDER_VARIABLE: os.environ.pop(FOLDER_VARIABLE)}


@pytest.fixture
def limiting(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A cluster on which the kernel keeps jobs' limits of memory, as most clusters are."""
    if not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK):
        pytest.skip("no control groups of version 1 can be made here")
    yield from _session(request, control_groups=True)
