"""The order in which cells are submitted to SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import NODES, SlurmCluster
from cluster_workflow import CELLS_ONLY, ClusterWorkflow, study

from launching import until
from stratbench.cell.coordinates import Cell
from stratbench.study.order import compute_job_priority

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
pytest_plugins = ["cluster_fixtures"]
REPEATS, STRATEGIES = 4, ("single", "ddp", "zero1", "ps-async")


def test_cells_are_submitted_repeat_after_repeat(slurm: SlurmCluster, tmp_path: Path) -> None:
    block = {"strategies": list(STRATEGIES), "repeats": REPEATS}
    workflow = ClusterWorkflow(tmp_path, study({"waits": block}), slurm)
    slurm.run("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=order")
    run = workflow.start("--retries", "0", *CELLS_ONLY)
    try:
        until(lambda: len(workflow.slurm_jobs()) == REPEATS * len(STRATEGIES))
        by_submission = sorted(workflow.slurm_jobs(), key=lambda job: int(job["id"]))
    finally:
        slurm.cancel_all()
        workflow.finish(run)
    cells = []
    for job in by_submission:
        *_, experiment, strategy, model, gpus, repeat = job["comment"].split("_")
        cells.append(
            Cell("tiny", experiment, strategy, model, "tiny-images", int(gpus), int(repeat))
        )
    wanted = sorted(cells, key=compute_job_priority, reverse=True)
    # The plugin submits from two threads, of which one may lag.
    apart = [abs(place - wanted.index(cell)) for place, cell in enumerate(cells)]
    print(f"\nplaces apart: {apart}")
    assert sum(apart) <= 2 * len(apart)  # by chance some 85
