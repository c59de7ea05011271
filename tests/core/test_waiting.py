"""Why jobs wait in SLURM's queue: told once, after two minutes, in its words and ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stratbench.cell.text.help_page import format_help_address
from stratbench.study.slurm import commands, job_states
from stratbench.study.slurm.job_states import JobState
from stratbench.study.slurm.waiting import PATIENCE_S, WaitingJobs, describe_progress


def pending(reason: str, start: str = "N/A") -> JobState:
    return JobState("PENDING", reason=reason, start_time=start)


def told(states: dict[str, JobState]) -> list[str]:
    """The sentences on jobs that have waited long enough."""
    waiting = WaitingJobs({"12": "results/a/record.json"})
    assert list(waiting.iter_wait_explanations(states, 0.0)) == []
    assert list(waiting.iter_wait_explanations(states, PATIENCE_S - 1)) == []
    sentences = list(waiting.iter_wait_explanations(states, PATIENCE_S))
    assert list(waiting.iter_wait_explanations(states, 2 * PATIENCE_S)) == []
    return sentences


@pytest.mark.parametrize("reason", ["Priority", "Resources", "None", "Dependency", "BeginTime"])
def test_the_queues_own_reasons_are_not_told(reason):
    assert told({"12": pending(reason)}) == []
    assert told({"12": JobState("RUNNING", reason="PartitionConfig")}) == []


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("PartitionConfig", "no node of the partition has the requested resources"),
        ("QOSMaxWallDurationPerJobLimit", "allows a job fewer resources or less time"),
        ("AssocGrpCpuLimit", "allows no more at a time"),
        ("QOSMaxJobsPerUserLimit", "allows no more at a time"),
        ("JobHeldUser", "scontrol release 12"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
         "`sinfo --list-reasons` says why"),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "remove --nodelist from slurm_extra"),
        ("ReqNodeNotAvail, Reserved for maintenance", "reserved for maintenance"),
        ("Reservation", "its reservation has not begun"),
    ],
)  # fmt: skip
def test_a_reason_is_told_once_with_its_meaning(reason, meaning):
    [sentence] = told({"12": pending(reason)})
    start = f"SLURM job 12 (results/a/record.json) waits for the reason {reason}: "
    assert sentence.startswith(start)
    assert meaning in sentence
    assert sentence.endswith("; `scancel 12` cancels it " + format_help_address("for the reason"))


def test_a_reason_that_is_not_known_is_told_in_slurms_word_with_its_estimate():
    [sentence] = told({"12": pending("SitePolicy7", "2026-12-01T08:00:00")})
    assert sentence == (
        "SLURM job 12 (results/a/record.json) waits for the reason SitePolicy7; SLURM expects it to start at "
        f"2026-12-01T08:00:00; `scancel 12` cancels it {format_help_address('for the reason')}"
    )


def test_jobs_with_one_reason_share_a_sentence_and_a_reason_that_changes_begins_anew():
    [sentence] = told({str(n): pending("PartitionDown") for n in range(12, 16)})
    assert "SLURM job 12 (results/a/record.json) and 3 others wait for" in sentence
    waiting = WaitingJobs()
    assert list(waiting.iter_wait_explanations({"1": pending("PartitionDown")}, 0.0)) == []
    assert list(waiting.iter_wait_explanations({"1": pending("Priority")}, 60.0)) == []
    assert list(waiting.iter_wait_explanations({"1": pending("PartitionDown")}, 100.0)) == []
    assert list(waiting.iter_wait_explanations({"1": pending("PartitionDown")}, 200.0)) == []
    assert len(list(waiting.iter_wait_explanations({"1": pending("PartitionDown")}, 220.0))) == 1


def test_progress_is_one_line():
    states = {
        "1": JobState("RUNNING"),
        "2": pending("Priority"),
        "3": pending("Priority"),
        "4": pending("Resources"),
    }
    assert describe_progress(30, 12, 1, 3, states) == (
        "12 of 30 jobs done, 1 running, 3 queued (2 Priority, 1 Resources), 3 to be submitted, 1 failed"
    )
    assert describe_progress(1, 0, 0, 0, {"1": JobState("RUNNING")}) == "0 of 1 job done, 1 running"


def test_states_are_read_and_no_answer_is_none(monkeypatch):
    answers = [
        SimpleNamespace(
            returncode=0,
            stdout="12|PENDING||Priority|rule_train_cell_wildcards_a|2026-12-01T08:00:00\n"
            "13_1|CANCELLED by 0|node1|None|a|b|N/A\nCLUSTER: x\n",
        ),
        SimpleNamespace(returncode=1, stdout="12|RUNNING|node1|None|c|N/A\n"),
    ]
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: answers.pop(0))
    states = job_states.read_job_states("run")
    assert states == {
        "12": JobState(
            "PENDING", "", "Priority", "rule_train_cell_wildcards_a", "2026-12-01T08:00:00"
        ),
        "13_1": JobState("CANCELLED", "node1", "None", "a|b", "N/A"),
    }
    assert job_states.read_job_states("run") is None


def test_a_users_filters_hide_no_job(monkeypatch):
    seen = {}
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SINFO_PARTITION", "one")

    def run(command, env, **_):
        seen.update(env)
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(commands.subprocess, "run", run)
    job_states.read_job_states("run")
    assert not [name for name in seen if name.startswith(("SQUEUE_", "SINFO_"))]
