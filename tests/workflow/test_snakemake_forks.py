"""A run of Snakemake that takes too long is ended, and no other with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from snakemake_forks import StartedSnakemake, run_snakemake

from launching import LIMIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SNAKEFILE = """
rule wait:
    output: "never"
    shell: "touch started; sleep 600"
"""


def test_a_run_that_takes_too_long_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = StartedSnakemake(["--cores", "1"], tmp_path, env)
    try:
        until((tmp_path / "started").exists)
        with pytest.raises(TimeoutError, match="snakemake takes over 0 s"):
            run_snakemake(["--cores", "1", "--nolock"], tmp_path, env, 0)
        assert started.poll() is None
    finally:
        os.killpg(started.pid, signal.SIGKILL)
    assert started.wait(LIMIT_S) == -signal.SIGKILL
