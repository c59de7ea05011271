"""A host that runs a SLURM of its own gets no test cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import cluster_host
import pytest
from cluster_host import refusal

from launching import until

# The clusters of other tests would end as unsupported, too.
pytestmark = [pytest.mark.slurm, pytest.mark.alone]


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmd"])
def test_a_host_running_slurm_is_refused(tmp_path: Path, daemon: str) -> None:
    program = tmp_path / daemon
    shutil.copy(shutil.which("sleep"), program)
    environ = {key: value for key, value in os.environ.items() if key != cluster_host.MARK}
    pretender = subprocess.Popen([program, "600"], env=environ)
    try:
        # Just after its start a program has no environment yet, as one that ends.
        until(Path(f"/proc/{pretender.pid}/environ").read_bytes)
        reason = refusal(tmp_path / "own", environ={}, host_configuration=[])
        assert reason == f"this host runs a SLURM of its own: {daemon}, process {pretender.pid}"
    finally:
        pretender.kill()
        pretender.wait()
    assert refusal(tmp_path / "own", environ={}, host_configuration=[]) is None
