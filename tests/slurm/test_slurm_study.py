"""A study on a SLURM cluster, from submission to its report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_workflow import ClusterWorkflow, study

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: A collective one, and one with a server beside each worker, to which the workers of both nodes connect.
SPANNING = ("fsdp", "colocated")
#: A user's own, in a folder beside: jobs on other nodes find it by `code`.
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, channels, image_size):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(channels * image_size**2, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)))
"""


@pytest.fixture
def finished(slurm: SlurmCluster, warm: dict[str, str], tmp_path: Path) -> ClusterWorkflow:
    """A study with a cell on two nodes for each strategy and a cell on one, after its run.

    What spans nodes trains a user's own network.
    """
    # Nodes that are taken to have one GPU each: the cells of two workers span both.
    experiments = {
        "spread": {"strategies": list(SPANNING), "gpus": [2], "models": ["mine"]},
        "near": {"strategies": ["ddp"], "gpus": [1]},
    }
    config = study(experiments, mem_mib_per_cpu_worker=6000)
    config["studies"]["tiny"]["variants"] = {
        "colocated": {"strategy": "ps-async", "server_placement": "colocated"}
    }
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a_net.py").write_text(NETWORK)
    config |= {"models": {"mine": {"call": "a_net.Net"}}, "code": ["elsewhere"]}
    workflow = ClusterWorkflow(tmp_path, config, slurm)
    workflow.share_import(warm)
    output = workflow.run().stdout
    assert (tmp_path / "results/tiny/report.html").exists(), output
    return workflow


def test_a_study_with_cells_on_one_and_two_nodes_reaches_its_report(
    finished: ClusterWorkflow,
) -> None:
    cells = [("spread", strategy, 2) for strategy in SPANNING] + [("near", "ddp", 1)]
    for experiment, strategy, gpus in cells:
        model = "mine" if experiment == "spread" else "vgg-compact"
        record = json.loads(finished.record(experiment, strategy, model, f"{gpus}gpu").read_text())
        if model == "mine":
            assert record["model"]["own"]["files"] == ["a_net.py"]
        assert record["status"] == "ok"
        assert record["provenance"]["nodes"] == gpus
        assert record["provenance"]["slurm_job_id"]
        assert record["time"]["queue_wait_s"] >= 0
        nodes = [w["provenance"]["slurm"]["SLURMD_NODENAME"] for w in record["workers"]]
        assert len(set(nodes)) == gpus, nodes
    path = finished.record("spread", "colocated", "mine", "2gpu")
    moved = json.loads(path.read_text())["communication"]
    # Of two servers each worker has one on its node; the other's half crosses, each way.
    each = (moved["sent_bytes_per_step"] + moved["received_bytes_per_step"]) / 2
    assert moved["local_bytes_per_step"] == pytest.approx(each, rel=0.1)
    assert moved["busiest_link_bytes_per_batch"] == pytest.approx(each, rel=0.1)
    jobs = finished.slurm_jobs()
    assert len(jobs) == len(cells)  # one a cell, and nothing but cells
    assert {job["state"] for job in jobs} == {"COMPLETED"}
    spanning = [job["nodes"] for job in jobs if "_2_0" in job["comment"]]
    assert spanning == ["node[1-2]"] * len(SPANNING)
    assert finished.jobs() == {}


def test_links_are_measured_by_one_job_within_and_between_the_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    config = study({"near": {"strategies": ["ddp"], "gpus": [1, 2]}}, gpus_per_node=2)
    workflow = ClusterWorkflow(tmp_path, config, slurm)
    output = workflow.run("links").stdout
    folder = tmp_path / "results/tiny/links"
    assert "all-reduce by gloo, between nodes: " in output
    with (folder / "times.csv").open(newline="") as file:
        times = list(csv.DictReader(file))
    assert {(t["workers"], t["nodes"]) for t in times} == {("2", "1"), ("2", "2"), ("4", "2")}
    with (folder / "links.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["kind"], r["level"]) for r in rows} == {
        (kind, level) for kind in ("all_reduce", "broadcast") for level in ("within", "between")
    }
    # Asked for again it measures again; the processes' own folder is gone.
    assert {p.name for p in folder.iterdir()} == {"times.csv", "links.csv"}
