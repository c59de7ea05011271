"""A cluster that misbehaves: its controller is away, sbatch fails, limits, preemption, lost answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from cluster_faults import TIMES_OUT, hungry_config, stub
from cluster_workflow import CELLS_ONLY, ENDLESS, NEVER_S, ClusterWorkflow, study

from launching import until

pytest_plugins = ["cluster_fixtures"]
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
#: A cell that is held: no time limit ends it before it is released.
HELD = {"time_limit_s": NEVER_S}
EXECUTOR = "workflow/stratbench/study/slurm/executor.py"
SUBMISSION = "workflow/stratbench/study/slurm/submission.py"


@contextlib.contextmanager
def printing(workflow: ClusterWorkflow, folder: Path, *args: str) -> Iterator[tuple]:
    """A started run and the file that it prints to; killed at the end of the block where it still runs."""
    printed = folder / "printed"
    with printed.open("w") as output:
        run = workflow.start(*CELLS_ONLY, *args, stdout=output)
    try:
        yield run, printed
    finally:
        run.kill()
        workflow.cluster.cancel_all()


def test_cells_are_followed_while_the_controller_is_away(
    slurm: SlurmCluster, tmp_path: Path, warm_holding: dict[str, str]
):
    """One cell ends and one is cancelled while SLURM does not answer; both are noticed afterwards."""
    workflow = ClusterWorkflow(tmp_path / "w", study({"ends": HELD, "lost": ENDLESS}), slurm)
    workflow.share_import(warm_holding)
    workflow.change_code(EXECUTOR, "UNANSWERED_S = 120.0", "UNANSWERED_S = 1.0")
    workflow.hold("ends")
    with printing(workflow, tmp_path, "--retries", "0") as (run, printed):
        until(lambda: workflow.training_worker("ends") and workflow.training_worker("lost"))
        with slurm.controller_away():
            until(lambda: "SLURM has not answered" in printed.read_text())
            workflow.release("ends")
            until(lambda: workflow.cell_record("ends"))
        slurm.run("scancel", workflow.slurm_jobs("lost")[0]["id"])
        run.wait(timeout=300)
        text = printed.read_text()
        assert run.returncode != 0
        assert workflow.status("ends") == "ok", text
        assert "failed: CANCELLED on node" in text
        assert "log: results/tiny/logs/lost/" in text
        assert "cell tiny/lost: " in text
        assert workflow.cell_record("lost") is None
        assert text.count("SLURM has not answered") == 1
        assert len(workflow.slurm_jobs()) == 2


def test_a_job_that_slurm_has_forgotten_is_judged_by_what_it_left(
    slurm: SlurmCluster, tmp_path: Path, warm_holding: dict[str, str]
):
    workflow = ClusterWorkflow(tmp_path / "w", study({"ends": HELD, "lost": ENDLESS}), slurm)
    workflow.share_import(warm_holding)
    workflow.change_code(EXECUTOR, "OMITTED_S = 30.0", "OMITTED_S = 3.0")
    workflow.hold("ends")
    forgets = tmp_path / "forgets"
    stub(workflow, tmp_path, "squeue", f'[ -e {forgets} ] || exec REAL "$@"')
    with printing(workflow, tmp_path, "--retries", "0") as (run, printed):
        until(lambda: workflow.training_worker("ends") and workflow.training_worker("lost"))
        # Hidden first: it is looked at every 2 s, and must not be seen as it ends.
        forgets.touch()
        workflow.release("ends")
        until(lambda: workflow.cell_record("ends"))
        run.wait(timeout=300)
        assert "it has written no result" in printed.read_text()
    assert run.returncode != 0
    assert workflow.status("lost") is None


def test_a_preempted_cell_is_trained_again(slurm: SlurmCluster, tmp_path: Path, warm_holding):
    slurm.run("scontrol", "create", "PartitionName=low", "Nodes=node2", "State=UP",
              "MaxTime=INFINITE", "PriorityTier=0", "PreemptMode=CANCEL")  # fmt: skip
    try:
        workflow = ClusterWorkflow(tmp_path / "w", study({"one": HELD}), slurm)
        workflow.change_code(
            "profiles/slurm/config.yaml", "  # slurm_partition: gpu #", "  slurm_partition: low #"
        )
        workflow.share_import(warm_holding)
        workflow.hold("one")
        with printing(workflow, tmp_path) as (run, printed):
            until(lambda: workflow.training_worker("one"))
            wide = f"--mem={slurm.memory_mib}M", "--nodelist=node2", "--output=/dev/null"
            other = slurm.run("sbatch", "--parsable", *wide, "--wrap=sleep 9999")
            until(lambda: workflow.slurm_jobs()[0]["state"] == "PREEMPTED")
            until(lambda: len(workflow.slurm_jobs()) == 2)
            slurm.run("scancel", other)
            workflow.release("one")
            run.wait(timeout=300)
            text = printed.read_text()
            assert run.returncode == 0, text
            assert "PREEMPTED on node2: SLURM gave its node to another job" in text
        assert workflow.status("one") == "ok"
    finally:
        slurm.cancel_all()
        slurm.run("scontrol", "delete", "PartitionName=low")


@pytest.mark.parametrize("taken", [False, True], ids=["not taken", "taken all the same"])
def test_a_submission_without_an_answer_is_tried_again_and_no_cell_twice(
    slurm: SlurmCluster, tmp_path: Path, warm, taken: bool
):
    workflow = ClusterWorkflow(tmp_path / "w", study({"a": {}, "b": {}}), slurm)
    workflow.share_import(warm)
    workflow.change_code(SUBMISSION, "MAX_PAUSE_S = 5.0, 60.0", "MAX_PAUSE_S = 1.0, 1.0")
    over, tries = tmp_path / "over", tmp_path / "tries"
    script = TIMES_OUT.replace("OVER", str(over)).replace("TRIES", str(tries))
    script = script.replace("BEFORE", 'REAL "$@" > /dev/null' if taken else "")
    stub(workflow, tmp_path, "sbatch", script)
    with printing(workflow, tmp_path, "--retries", "0") as (run, printed):
        until(lambda: tries.exists() and len(tries.read_text().split()) >= 3 - taken)
        over.touch()
        run.wait(timeout=300)
        text = printed.read_text()
        assert run.returncode == 0, text
        assert (
            text.count("sbatch fails for now (Batch job submission failed: Socket timed out") == 1
        )
        assert "Error in rule" not in text
        assert len(workflow.slurm_jobs()) == 2
    assert [workflow.status(name) for name in "ab"] == ["ok"] * 2


#: SLURM takes two jobs of this user at a time. One sbatch at a time, or two might count the same.
TWO_AT_A_TIME = """
case "$*" in *--parsable*) ;; *) exec REAL "$@" ;; esac
exec 9> LOCK
flock 9
[ "$(squeue --me --noheader | wc -l)" -lt 2 ] && exec REAL "$@"
echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2
echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2
exit 1
"""


def test_a_limit_on_the_number_of_jobs_is_waited_for(slurm: SlurmCluster, tmp_path: Path, warm):
    workflow = ClusterWorkflow(tmp_path / "w", study({name: {} for name in "abcd"}), slurm)
    workflow.share_import(warm)
    script = TWO_AT_A_TIME.replace("LOCK", str(tmp_path / "lock"))
    stub(workflow, tmp_path, "sbatch", script)
    with printing(workflow, tmp_path, "--retries", "0") as (run, printed):
        run.wait(timeout=500)
        text = printed.read_text()
        assert run.returncode == 0, text
        assert (
            text.count("SLURM takes no more jobs of yours at a time (AssocMaxSubmitJobLimit") == 1
        )
        assert "`jobs: 2` in the profile" in text
    assert [workflow.status(name) for name in "abcd"] == ["ok"] * 4


def test_a_cell_that_the_kernel_kills_for_its_memory_is_a_result(
    limiting: SlurmCluster, tmp_path: Path
):
    """SLURM calls the job OUT_OF_MEMORY, although its launcher has written the record and ended in order."""
    workflow = ClusterWorkflow(tmp_path / "w", hungry_config(study({"hungry": {}})), limiting)
    run = workflow.run(*CELLS_ONLY)
    assert run.returncode == 0, run.stdout
    assert workflow.status("hungry") == "oom"
    [job] = workflow.slurm_jobs()
    assert job["state"] == "OUT_OF_MEMORY"
