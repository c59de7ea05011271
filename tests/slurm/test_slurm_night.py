"""A run of thirty cells on a cluster that misbehaves in all ways at once: minutes, only where asked for.

STRATBENCH_NIGHT=1 python -m pytest -s tests/slurm/test_slurm_night.py
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_faults import TIMES_OUT, hungry_config, stub
from cluster_workflow import CELLS_ONLY, NEVER_S, PROFILE, ClusterWorkflow, study

from launching import until
from stratbench.telemetry.pauses import SHORTEST_S

pytest_plugins = ["cluster_fixtures"]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif("STRATBENCH_NIGHT" not in os.environ, reason="STRATBENCH_NIGHT is not set"),
]
#: Seconds during which sbatch fails.
FAILS_S = 60
#: Trains for some seconds, most of which its worker sleeps.
LONG = {"epochs": 20, "slowdown": {"workers": [0], "factor": 20}, "lr": 1e-4}
HELD = {"time_limit_s": NEVER_S}


def test_thirty_cells_survive_a_night(limiting: SlurmCluster, tmp_path: Path, warm) -> None:
    slurm = limiting
    plain = [f"c{i:02}" for i in range(27)]
    experiments = {name: {} for name in plain} | {
        "suspended": LONG,
        "preempted": HELD,
        "hungry": {},
    }
    workflow = ClusterWorkflow(tmp_path / "w", hungry_config(study(experiments)), slurm)
    workflow.share_import(warm, *plain)
    workflow.hold("preempted")
    # In the file, since a controller that starts again reads that.
    low = "PartitionName=low Nodes=node1,node2 MaxTime=INFINITE PriorityTier=0 PreemptMode=CANCEL"
    slurm.conf.write_text(f"{slurm.conf.read_text()}{low}\n")
    slurm.run("scontrol", "reconfigure")
    workflow.change_code(PROFILE, "  # slurm_partition: gpu #", "  slurm_partition: low #")
    over, tries = tmp_path / "over", tmp_path / "tries"
    script = TIMES_OUT.replace("OVER", str(over)).replace("TRIES", str(tries))
    over.touch()
    stub(workflow, tmp_path, "sbatch", script.replace("BEFORE", ""))
    printed = tmp_path / "printed"
    begun = time.monotonic()
    with printed.open("w") as output:
        run = workflow.start(*CELLS_ONLY, "--jobs", "6", stdout=output)
    try:
        until(lambda: workflow.training_worker("preempted"))
        with slurm.controller_away():
            time.sleep(20)
        over.unlink()
        until(lambda: tries.exists())
        time.sleep(FAILS_S)
        over.touch()
        job = workflow.slurm_jobs("preempted")[0]
        wide = f"--mem={slurm.memory_mib}M", f"--nodelist={job['nodes']}", "--output=/dev/null"
        other = slurm.run("sbatch", "--parsable", *wide, "--wrap=sleep 9999")
        until(lambda: workflow.slurm_jobs("preempted")[0]["state"] == "PREEMPTED")
        slurm.run("scancel", other)
        workflow.release("preempted")
        until(lambda: workflow.training_worker("suspended"))
        job = workflow.slurm_jobs("suspended")[-1]["id"]
        slurm.run("scontrol", "suspend", job)
        with slurm.controller_away():
            time.sleep(max(20, 2 * SHORTEST_S))
        slurm.run("scontrol", "resume", job)
        run.wait(timeout=2000)
    finally:
        run.kill()
        slurm.cancel_all()
    text = printed.read_text()
    took_s = time.monotonic() - begun
    records = [json.loads(p.read_text()) for p in (tmp_path / "w/results").rglob("record.json")]
    statuses = sorted(r["status"] for r in records)
    assert statuses == ["ok"] * 29 + ["oom"], text
    assert run.returncode == 0, text
    jobs = {name: len(workflow.slurm_jobs(name)) for name in experiments}
    preempted = sum(j["state"] == "PREEMPTED" for j in workflow.slurm_jobs())
    assert sum(jobs.values()) == 30 + preempted, jobs
    ours = [line for line in text.splitlines() if re.search(r"SLURM|sbatch", line)]
    ours = [line for line in ours if not re.search(r"has been submitted|account|run ID|old", line)]
    print(f"{took_s:.0f} s; {preempted} preempted; lines that tell of SLURM:", *ours, sep="\n  ")
    assert len(ours) <= 12
