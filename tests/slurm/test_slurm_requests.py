"""What a cell asks SLURM for, and what is told of a request that it can never meet."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from cluster import NODES, SlurmCluster
from cluster_workflow import ClusterWorkflow, study, wait_for

pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm-2"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


def as_shipped(experiments: dict) -> dict:
    """A study on CPUs with the defaults of `cluster`, made for nodes of GPUs."""
    config = study(experiments)
    del config["cluster"]
    return config


def test_cells_on_cpus_run_on_small_nodes_with_the_defaults(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    experiments = {
        "alone": {"threads": 1},
        "served": {"strategies": ["ps-sync"], "gpus": [4], "threads": 1},
    }
    workflow = ClusterWorkflow(tmp_path, as_shipped(experiments), slurm)
    records = [
        workflow.record("alone", "single", "vgg-compact", "1gpu"),
        workflow.record("served", "ps-sync", "vgg-compact", "4gpu"),
    ]
    targets = [str(record.relative_to(tmp_path)) for record in records]
    output = workflow.finish(workflow.start("--", *targets), limit_s=300)
    assert all(record.exists() for record in records), output
    asked = slurm.run("squeue", "-h", "-t", "all", "-o", "%Z|%k|%C|%m").splitlines()
    ours = {
        row.split("|")[1].split("_")[5]: row.split("|")[2:]
        for row in asked
        if row.startswith(str(tmp_path))
    }
    assert ours == {"alone": ["1", "2G"], "served": ["5", "10G"]}


def test_a_request_that_no_node_can_hold_is_told_before_anything_is_submitted(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    config = study({"good": {}, "wide": {"threads": 17}, "long": {"time_limit_s": 7200}})
    workflow = ClusterWorkflow(tmp_path, config, slurm)
    try:
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=60")
        output = workflow.finish(workflow.start(), limit_s=100)
    finally:
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
    told = [line for line in output.splitlines() if "asks for" in line]
    assert len(told) == 2, output
    assert told[0] == (
        "tiny/long: single, vgg-compact, 1 GPU, repeat 0 asks for a node with 1 CPU core, 12,000 MiB "
        "and 130 minutes, but the largest node of partition gpu has 16 CPU cores, 24,000 MiB and 60 "
        "minutes: set a lower studies.tiny.experiments.long.time_limit_s, or cluster.startup_allowance_s"
    )
    assert "17 CPU cores" in told[1]
    assert "lower studies.tiny.experiments.wide.threads" in told[1]
    assert workflow.slurm_jobs() == []
    assert "Traceback" not in output


def test_a_refused_sbatch_says_why_and_not_its_command_line(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"one": {}}), slurm)
    workflow.uncomment("  # constraint: a100 #", "  constraint: a100 #")
    run = workflow.start("--retries", "0")
    output = workflow.finish(run, limit_s=100)
    assert run.returncode != 0
    assert (
        "SLURM refuses it: Batch job submission failed: Invalid feature specification. "
        "tiny/one: single, vgg-compact, 1 GPU, repeat 0 asks for a node with 1 CPU core" in output
    )
    assert "--wrap" not in output
    assert "stratbench.train.launch" not in output


def test_a_job_that_never_starts_is_named_after_a_minute(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    workflow = ClusterWorkflow(tmp_path, study({"one": {}}), slurm)
    slurm.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=test")
    run = workflow.start()
    try:
        (job,) = wait_for(workflow.slurm_jobs)
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=1")
        since_s = time.monotonic()
        os.set_blocking(run.stdout.fileno(), False)
        said = bytearray()

        def told() -> str | None:
            with contextlib.suppress(BlockingIOError):
                said.extend(os.read(run.stdout.fileno(), 1 << 16))
            lines = said.decode().splitlines()
            return next((line for line in lines if "does not pass" in line), None)

        sentence = wait_for(told, 150)
        assert time.monotonic() - since_s > 50
        assert f"SLURM job {job['id']} (results/tiny/cells/one/" in sentence
        assert "PartitionTimeLimit: no node of the partition has what it asks for" in sentence
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=10)
        slurm.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
        slurm.cancel_all()
        slurm.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")
