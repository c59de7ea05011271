"""A SLURM cluster with accounting, which lets in only jobs of a known account."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ACCOUNT, SlurmCluster
from cluster_workflow import ENDLESS, PROFILE, ClusterWorkflow, study

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_accounting_knows_a_finished_job(slurm_accounting: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_accounting.submit(tmp_path / "out", "true")

    def account() -> str:
        return slurm_accounting.run("sacct", "-nXP", "-j", job, "-o", "State,Account")

    until(lambda: account() == f"COMPLETED|{ACCOUNT}")
    with pytest.raises(RuntimeError, match="Invalid account"):
        slurm_accounting.submit(tmp_path / "out", "true", "--account=nobodys")


def test_a_cluster_with_accounting_needs_one_line_in_the_profile(
    slurm_accounting: SlurmCluster, tmp_path: Path, warm: dict[str, str]
) -> None:
    experiments = {"good": {}, "cancelled": ENDLESS}
    workflow = ClusterWorkflow(tmp_path, study(experiments), slurm_accounting)
    account = "  # slurm_account: my_project"
    workflow.change_code(PROFILE, account, f"  slurm_account: {ACCOUNT}")
    workflow.share_import(warm)
    run = workflow.start("--retries", "0")
    try:
        until(lambda: workflow.launcher("cancelled"))
        slurm_accounting.run("scancel", workflow.slurm_jobs("cancelled")[0]["id"])
        # sacct's "CANCELLED by 0" would go unnoticed for ever.
        output = workflow.finish(run)
    finally:
        slurm_accounting.cancel_all()
    assert run.returncode != 0
    assert workflow.status("good") == "ok"
    assert "CANCELLED" in output
    accounts = slurm_accounting.run("sacct", "-nXP", "-o", "Account,Comment").splitlines()
    assert {line.split("|")[0] for line in accounts if "tiny_good" in line} == {ACCOUNT}
