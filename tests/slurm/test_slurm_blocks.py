"""Blocks on a SLURM cluster: one job for all segments of one, what ends it, and that it comes again whole."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import SlurmCluster
from cluster_workflow import ClusterWorkflow, study

from launching import sharing, until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
#: Of two workers, each on a node of its own, and of one.
WIDE = {"strategies": ["ddp", "zero1", "fsdp", "colocated"], "gpus": [2], "threads": 1}
NEAR = {"strategies": ["single", "ddp"], "gpus": [1], "threads": 1}
ONCE = ("verdict", "--retries", "0")
#: In place of its first line: a strategy asks for more memory than a machine has.
SETUP = "    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:\n"
HUNGRY = SETUP + '        __import__("torch").empty(1 << 50)\n'


def racing(folder: Path, cluster: SlurmCluster) -> ClusterWorkflow:
    """Two comparisons, whose segments have few steps."""
    config = study({"wide": WIDE, "near": NEAR}, mem_mib_per_cpu_worker=6000)
    # With this seed ddp comes first: a collective strategy, which `hold` can hold.
    config["studies"]["tiny"]["seed"] = 3
    config["studies"]["tiny"]["variants"] = {
        "colocated": {"strategy": "ps-async", "server_placement": "colocated"}
    }
    workflow = ClusterWorkflow(folder, config, cluster)
    rules = "workflow/stratbench/extensions/verdict/block_rules.py"
    workflow.change_code(rules, "MAX_STEPS = 50, 300", "MAX_STEPS = 4, 6")
    workflow.change_code(rules, "SHARE_DISCARDED = 15, 0.2", "SHARE_DISCARDED = 2, 0.2")
    workflow.change_code(
        rules, "MIN_DISAGREEMENT, DISAGREEMENT = 0.03", "MIN_DISAGREEMENT, DISAGREEMENT = 9"
    )
    workflow.change_code("workflow/stratbench/strategies/sharding/zero.py", SETUP, HUNGRY)
    return workflow


@dataclass
class Raced:
    """A round of two blocks, of which each was killed before, and what the runs printed."""

    workflow: ClusterWorkflow
    rounds: list[dict[str, Any]]
    outputs: list[str]
    codes: list[int]
    evidence: str

    def block(self, experiment: str) -> dict[str, Any]:
        return json.loads(self.folder(experiment).joinpath("block.json").read_text())

    def folder(self, experiment: str) -> Path:
        blocks = self.workflow.folder / "results/tiny/blocks" / experiment
        return blocks / f"vgg-compact/{2 if experiment == 'wide' else 1}gpu/block1"

    def states(self, experiment: str) -> list[str]:
        return [job["state"] for job in self.workflow.slurm_jobs(experiment, "run_block")]


@pytest.fixture(scope="module")
def raced(slurm_session: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raced]:
    folder = tmp_path_factory.mktemp("raced")
    workflow = racing(folder, slurm_session)
    found = Raced(workflow, [], [], [], "")

    def job(experiment: str) -> str:
        return workflow.slurm_jobs(experiment, "run_block")[-1]["id"]

    def has_begun() -> psutil.Process | None:
        log = folder / "results/tiny/logs/blocks/near/vgg-compact/1gpu/block1.log"
        return workflow.block_launcher("near") if log.exists() and log.read_text() else None

    def hang(launcher: psutil.Process) -> None:
        """Stop a block, and have SLURM's limit reached."""
        launcher.send_signal(signal.SIGSTOP)
        workflow.reach_limit(job("near"))

    def finish(run) -> None:
        found.outputs.append(workflow.finish(run))
        found.codes.append(run.returncode)
        round_ = (folder / "results/tiny/verdict/round.json").read_text()
        found.rounds.append(json.loads(round_))

    try:
        workflow.hold("wide")
        # No segment imports PyTorch anew on each node.
        with sharing(folder / "workflow"):
            workflow.share_import(os.environ)
            run = workflow.start(*ONCE)
            hang(until(has_begun))
            until(lambda: workflow.training_worker("blocks/wide")).kill()
            workflow.release("wide")
            finish(run)
            evidence = next(folder.glob("results/tiny/logs/blocks/**/failure.json"))
            found.evidence = evidence.read_text()
            assert not list(folder.glob("results/tiny/blocks/**/*.json"))
            workflow.hold("wide")
            run = workflow.start(*ONCE)
            until(lambda: workflow.training_worker("blocks/wide"))
            slurm_session.run("scancel", job("wide"))
            finish(run)
            workflow.release("wide")
            finish(workflow.start(*ONCE))
        yield found
    finally:
        slurm_session.cancel_all()


def test_blocks_that_are_killed_fail_and_come_again_until_they_are_whole(raced: Raced) -> None:
    assert [code == 0 for code in raced.codes] == [False, False, True], raced.outputs[-1]
    assert raced.states("wide") == ["FAILED", "CANCELLED", "COMPLETED"]
    assert raced.states("near") == ["TIMEOUT", "COMPLETED"]
    assert "block1.log" in raced.outputs[0]
    assert "failed: TIMEOUT on node" in raced.outputs[0]
    assert "failed: CANCELLED on node" in raced.outputs[1]
    reason = json.loads(raced.evidence)["reason"]
    # Either worker may be the first to tell: the one that was killed, or the one that waits for it.
    assert reason.startswith("segment 00-ddp: ")
    assert raced.workflow.slurm_jobs() == []  # segments are no jobs of cells


def test_a_block_comes_again_in_the_same_order(raced: Raced) -> None:
    orders = [
        {comparison["experiment"]: comparison["strategies"] for comparison in round_["comparisons"]}
        for round_ in raced.rounds
    ]
    assert orders[0]["wide"] == orders[1]["wide"] == orders[2]["wide"]
    assert orders[0]["wide"][0] == "ddp"
    for experiment in ("wide", "near"):
        assert raced.block(experiment)["order"] == orders[0][experiment]


def test_a_block_of_four_strategies_is_one_job_on_two_nodes(raced: Raced) -> None:
    found = raced.block("wide")
    (*_, job) = raced.workflow.slurm_jobs("wide", "run_block")
    assert job["nodes"] == "node[1-2]"
    assert found["allocation"] == job["id"]
    assert sorted(found["order"]) == sorted(WIDE["strategies"])
    left = [name for name in found["order"] if name != "zero1"]
    ended = {"ok": [], "oom": []}
    for segment in found["segments"]:
        ended[segment["status"]].append((segment["pass"], segment["strategy"]))
        record = json.loads((raced.folder("wide") / segment["record"]).read_text())
        assert record["provenance"]["slurm_job_id"] == job["id"]
        nodes = [w["provenance"]["slurm"]["SLURMD_NODENAME"] for w in record["workers"]]
        assert sorted(nodes) == (["node1", "node2"] if segment["status"] == "ok" else [])
    assert [s for pass_name, s in ended["ok"] if pass_name == "first"] == left
    assert [s for pass_name, s in ended["ok"] if pass_name == "mirror"] == left[::-1]
    # Out of memory is a result: the strategy drops out, and the block goes on.
    assert [strategy for _, strategy in ended["oom"]] == ["zero1"]


def test_the_next_round_is_another(raced: Raced) -> None:
    shown = raced.workflow.run("-n", "verdict").stdout
    assert "report the present verdicts" in shown
    assert "block 1 of" not in shown
