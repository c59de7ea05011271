"""Jobs that end before their rule begins: what is said of the node, the missing path and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratbench.study.slurm import unstarted_jobs


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The logs of a rule and of its SLURM job, neither of which is there."""
    monkeypatch.chdir(tmp_path)
    shown = "JobId=12 NodeList=node7 BatchHost=node7 NumNodes=1\n"
    monkeypatch.setattr(unstarted_jobs, "read_command_output", lambda command: shown)
    return [tmp_path / "results/rep0.log", tmp_path / "slurm_logs/rule_train_cell/x/12.log"]


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            "/var/spool/slurmd/job00012/slurm_script: 4: /home/me/.venv/bin/python3: not found\n",
            "does not have /home/me/.venv/bin/python3; create the Python environment on a file "
            "system that all nodes share, or have each job load it by `precommand` in the profile",
        ),
        (
            "slurmstepd-node7: error: couldn't chdir to `/scratch/my study': No such file or directory: "
            "going to /tmp instead\n",
            "does not have /scratch/my study; put it on a file system that all nodes share",
        ),
        ("bash: /opt/tools/load: No such file or directory\n", "does not have /opt/tools/load;"),
    ],
)
def test_a_node_without_what_a_job_needs_is_named_with_it(
    logs: list[Path], printed: str, told: str
) -> None:
    logs[1].parent.mkdir(parents=True)
    logs[1].write_text(printed)
    sentence = unstarted_jobs.explain_unstarted_rule(logs)
    assert sentence.startswith("SLURM job 12 began on node7, ")
    assert told in sentence


def test_a_node_that_does_not_see_the_folder_is_named_with_it(logs: list[Path]) -> None:
    sentence = unstarted_jobs.explain_unstarted_rule(logs)
    assert "began on node7 and wrote no log" in sentence
    assert f"cannot read {Path.cwd()}, move this folder to a file system" in sentence


def test_of_other_jobs_nothing_is_said(logs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    logs[1].parent.mkdir(parents=True)
    logs[1].write_text("error: it failed for another reason\n")
    assert unstarted_jobs.explain_unstarted_rule(logs) is None
    assert unstarted_jobs.explain_unstarted_rule(logs[:1]) is None  # of no SLURM job
    assert unstarted_jobs.explain_unstarted_rule([]) is None
    logs[1].unlink()
    monkeypatch.setattr(
        unstarted_jobs, "read_command_output", lambda command: "JobId=12 NodeList=(null)\n"
    )
    assert unstarted_jobs.explain_unstarted_rule(logs) is None  # cancelled while it waited
    logs[0].parent.mkdir(parents=True)
    logs[0].write_text("cell: began\n")
    assert unstarted_jobs.explain_unstarted_rule(logs) is None
