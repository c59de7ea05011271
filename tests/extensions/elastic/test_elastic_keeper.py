"""The keeper of worker jobs, and what it is told; checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from launching import LIMIT_S, until
from stratbench.cell.run_folder import RunFolder, format_worker_name
from stratbench.extensions.checkpoints import checkpoints
from stratbench.extensions.elastic.jobs import keeper
from stratbench.extensions.elastic.jobs.keeper import (
    JobStatus,
    NoWorkersError,
    SubmissionRefused,
    WorkerJobSupervisor,
)
from stratbench.extensions.elastic.jobs.slurm_jobs import SlurmJobs
from stratbench.extensions.elastic.jobs.worker_job import WorkerJob
from stratbench.extensions.elastic.run_files import RunFiles
from stratbench.study.resources import JobRequest
from stratbench.study.slurm import submission
from stratbench.study.slurm.submission import Kind


@dataclass
class Scripted(keeper.WorkerJobBackend):
    """A backend whose jobs are what the test says they are."""

    jobs: dict[str, JobStatus] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    full: bool = False
    silent: bool = False
    looks: int = 0
    #: Refusals that pass, one for each submission.
    passing: list[Kind] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)

    def submit_worker_job(self, worker_number: int, slot: int) -> str:
        self.tried.append(worker_number)
        if self.passing:
            raise SubmissionRefused("not now", self.passing.pop(0))
        if self.full:
            raise SubmissionRefused("QOSMaxSubmitJobPerUserLimit")
        self.slots[str(worker_number)] = slot
        self.jobs[str(worker_number)] = JobStatus("queued")  # the last: tests wait for it
        return str(worker_number)

    def poll_worker_jobs(self, ids: Iterable[str]) -> Mapping[str, JobStatus] | None:
        jobs, silent = dict(self.jobs), self.silent  # the test changes them meanwhile
        self.looks += 1
        return None if silent else {i: jobs[i] for i in ids if i in jobs}

    def cancel_worker_jobs(self, ids: Iterable[str]) -> None:
        self.cancelled += ids


def test_a_job_that_ends_is_replaced_by_one_of_a_new_number(tmp_path: Path) -> None:
    backend = Scripted()
    with WorkerJobSupervisor(backend, 2, tmp_path / "jobs") as kept:
        until(lambda: len(backend.jobs) == 2)
        backend.jobs["0"] = JobStatus("ended", "PREEMPTED")
        kept.poll_jobs_soon()
        until(lambda: len(backend.jobs) == 3)
        assert backend.slots["2"] == backend.slots["0"]
        del backend.jobs["1"]  # SLURM has forgotten it
        kept.poll_jobs_soon()
        until(lambda: "3" in backend.jobs)
    assert sorted(backend.cancelled) == ["2", "3"]
    told = {entry.number: entry.reason for entry in kept.list_jobs()}
    assert told[0] == "PREEMPTED"
    assert told[1] == "no longer known"
    assert "cancelled" in told[2]


def test_the_job_of_a_worker_that_nobody_hears_of_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LOST_JOB_GRACE_S", 0.05)
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(lambda: backend.jobs)
        backend.jobs["0"] = JobStatus("running", started_unix_s=1.0)
        kept.cancel_job_of_lost_worker(0)
        until(lambda: backend.cancelled)
        assert backend.cancelled == ["0"]


def test_the_job_of_a_lost_worker_that_ends_by_itself_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a worker that fails whenever it trains would be taken for one that was cancelled, for ever."""
    monkeypatch.setattr(keeper, "LOST_JOB_GRACE_S", LIMIT_S)
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(lambda: backend.jobs)
        kept.cancel_job_of_lost_worker(0)
        kept.poll_jobs_soon()
        backend.jobs["0"] = JobStatus("ended", "FAILED", has_failed=True)
        kept.poll_jobs_soon()
        until(lambda: kept.list_jobs()[0].failed)
        assert backend.cancelled == []


def test_what_falls_due_just_after_a_look_is_not_left_for_the_longest_pause(tmp_path: Path) -> None:
    kept = WorkerJobSupervisor(Scripted(), 1, tmp_path / "jobs")
    assert kept._compute_poll_wait_s(30.0) < 1.0  # its first job
    kept._submit_missing_jobs()
    assert kept._compute_poll_wait_s(30.0) == 30.0
    kept._cancel_at_s[0] = time.monotonic()
    assert kept._compute_poll_wait_s(30.0) < 1.0
    kept._poll_jobs_and_detect_changes()
    kept._cancel_at_s.clear()
    kept.stop_submitting_jobs()
    kept._record_job_end(0, JobStatus("ended"))
    assert kept._compute_poll_wait_s(30.0) == 30.0


def test_jobs_are_taken_for_ended_only_where_somebody_says_so(tmp_path: Path) -> None:
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(lambda: backend.jobs)
        backend.silent = True
        backend.jobs["0"] = JobStatus("ended", "FAILED", has_failed=True)
        begun = backend.looks + 1  # one may be under way
        for n in range(3):
            kept.poll_jobs_soon()
            until(lambda n=n: backend.looks > begun + n)
        assert kept.list_jobs()[0].ended_unix_s is None
        backend.silent = False
        kept.poll_jobs_soon()
        until(lambda: kept.list_jobs()[0].failed)


def test_what_fails_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(keeper, "MAX_PAUSE_S", 0.001)
    backend = Scripted()
    backend.submit_worker_job = lambda number, slot: (  # each has failed when it is looked at
        backend.jobs.update({str(number): JobStatus("ended", "exit code 1", has_failed=True)})
        or str(number)
    )

    def gave_up() -> bool:
        kept.poll_jobs_soon()
        try:
            kept.check_can_start_jobs()
        except NoWorkersError as reason:
            return "exit code 1" in str(reason)
        return False

    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(gave_up)
    assert len(backend.jobs) == keeper.MAX_FAILURES


def test_a_cell_without_any_worker_job_fails_and_one_with_some_goes_on(tmp_path: Path) -> None:
    backend = Scripted(full=True)
    with WorkerJobSupervisor(backend, 2, tmp_path / "none") as kept:
        until(lambda: kept._failure_reason)
        with pytest.raises(NoWorkersError, match="QOSMaxSubmitJobPerUserLimit"):
            kept.check_can_start_jobs()
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "some") as kept:
        until(lambda: backend.jobs)
        backend.full = True
        kept.check_can_start_jobs()


def test_a_refusal_after_all_jobs_were_taken_away_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a number that no job has: a refused one may be one whose answer was lost."""
    monkeypatch.setattr(keeper, "MAX_POLL_S", 0.05)
    backend, refused = Scripted(), []
    submit = backend.submit_worker_job
    backend.submit_worker_job = lambda number, slot: (
        (backend.full and refused.append(number)) or submit(number, slot)
    )
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(lambda: backend.jobs)
        backend.full = True
        backend.jobs["0"] = JobStatus("ended", "PREEMPTED")
        kept.poll_jobs_soon()
        until(lambda: len(refused) >= 2)
        kept.check_can_start_jobs()
        backend.full = False
        until(lambda: len(backend.jobs) == 2)
        kept.check_can_start_jobs()
    assert not {str(number) for number in refused} & set(backend.jobs)


def test_the_keeper_of_a_requeued_cell_takes_over_and_submits_no_job_twice(tmp_path: Path) -> None:
    backend, journal = Scripted(), tmp_path / "jobs"
    first = WorkerJobSupervisor(backend, 2, journal)
    first.__enter__()
    until(lambda: len(backend.jobs) == 2)
    first._stopped = True  # as by SIGKILL: nothing is cancelled
    first.poll_jobs_soon()
    first._thread.join()
    with WorkerJobSupervisor(backend, 2, journal) as second:
        second.poll_jobs_soon()
        backend.jobs["0"] = JobStatus("ended", "NODE_FAIL")
        second.poll_jobs_soon()
        until(lambda: len(backend.jobs) == 3)
    assert sorted(backend.cancelled) == ["1", "2"]


def test_slurm_is_told_paths_and_numbers_alone_and_none_of_its_own_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in sbatch's place: the tests' SLURM has no account, no QOS and no constraint."""
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nenv > {tmp_path}/env; for x; do echo \"$x\"; done > {tmp_path}/args\n"
                    f"cat > {tmp_path}/script; echo '77;cluster'\n")  # fmt: skip
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    resources = {
        "slurm_partition": "gpu", "slurm_account": "me", "qos": "low", "constraint": "a100",
        "slurm_extra": "--exclusive '--reservation=my one'",
    }  # fmt: skip
    asked = WorkerJob.from_request(JobRequest(1, 1, 4, 2000, 90), resources, "scavenger")
    assert WorkerJob.from_json(asked.as_json()) == asked
    folder = RunFolder(tmp_path / "100% mine; $(touch x)")
    jobs = SlurmJobs(asked, folder, "a/b c")
    assert jobs.submit_worker_job(3, 0) == "77"
    args = (tmp_path / "args").read_text().splitlines()
    assert "--comment=worker 3 of a/b c" in args
    assert "--no-requeue" in args
    assert f"--output={folder.get_log_path(format_worker_name(3))}".replace("%", "%%") in args
    assert args[-10:] == [
        "--gres=gpu:1", "--cpus-per-task=4", "--mem=2000M", "--time=90", "--partition=scavenger",
        "--account=me", "--qos=low", "--constraint=a100", "--exclusive", "--reservation=my one",
    ]  # fmt: skip
    seen = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in seen
    assert "SLURM_CONF=/etc/here.conf" in seen
    script = (tmp_path / "script").read_text()
    assert f"'{folder.job_path}' 3" in script
    RunFiles(folder).end_marker_path.parent.mkdir(parents=True)
    # It waited in the queue beyond the end of the training: not even srun is needed.
    RunFiles(folder).end_marker_path.touch()
    assert (
        subprocess.run(["/bin/sh"], input=script, text=True, env={"PATH": "/bin"}).returncode == 0
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("printed", "id_"),
    [
        ("Welcome to the cluster!\n\n--> Verifying access...OK\n4711", "4711"),
        ("Job limits: 100 of\n200\n4711;gpu-cluster\nGood bye.", "4711"),
        ("Welcome!", None),
        ("", None),
    ],
)
def test_a_greeting_of_sbatch_is_no_jobs_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, id_: str | None
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null; cat {tmp_path}/printed\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "printed").write_text(printed)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = SlurmJobs(WorkerJob(1, 4, 2000, 90), RunFolder(tmp_path), "a/b")
    if id_ is not None:
        assert jobs.submit_worker_job(3, 0) == id_
        return
    with pytest.raises(
        SubmissionRefused, match=f"sbatch printed '{printed}' instead of a job number"
    ):
        jobs.submit_worker_job(3, 0)


def test_a_submission_that_may_pass_is_tried_again_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "SHORTEST_PAUSE_S", 0.05)
    backend = Scripted(passing=["silence", "limit", "silence"])
    with WorkerJobSupervisor(backend, 2, tmp_path / "jobs") as kept:
        kept._postponed._pause_s = 0.05
        until(lambda: len(backend.jobs) == 2)
        kept.check_can_start_jobs()
    assert backend.tried == [0, 0, 0, 0, 1]
    assert (
        capfd.readouterr().out.count(
            "a worker job is not accepted at present, and will be submitted again"
        )
        == 2
    )


def test_a_cell_is_given_up_when_sbatch_has_not_answered_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "SILENCE_S", 0.2)
    backend = Scripted(passing=["silence"] * 100)
    kept = WorkerJobSupervisor(backend, 1, tmp_path / "jobs")
    kept._postponed._pause_s = 0.05
    with kept:
        until(lambda: kept._failure_reason)
        with pytest.raises(NoWorkersError, match="no worker job is accepted: not now"):
            kept.check_can_start_jobs()
    assert set(backend.tried) == {0}


def test_a_worker_job_that_slurm_has_taken_without_an_answer_is_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_out = "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1"
    for name, script in {
        "sbatch": f"cat > /dev/null; echo x >> {tmp_path}/asked; {timed_out}",
        "squeue": "echo '41|worker 2 of a/b'; echo '42|worker 3 of a/b'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = SlurmJobs(WorkerJob(1, 4, 2000, 90), RunFolder(tmp_path), "a/b")
    with pytest.raises(SubmissionRefused, match="Socket timed out") as refused:
        jobs.submit_worker_job(3, 0)
    assert refused.value.retry_kind == "silence"
    assert jobs.submit_worker_job(3, 0) == "42"
    assert (tmp_path / "asked").read_text() == "x\n"


def test_jobs_that_nobody_knows_are_not_submitted_again_without_an_end(tmp_path: Path) -> None:
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        for number in range(keeper.MAX_UNKNOWN):
            until(lambda n=number: str(n) in backend.jobs)
            del backend.jobs[str(number)]
            kept.poll_jobs_soon()
        until(lambda: kept._failure_reason)
        with pytest.raises(
            NoWorkersError, match=r"SLURM knows none of the last 3 worker jobs .* job 2"
        ):
            kept.check_can_start_jobs()
    assert len(backend.slots) == keeper.MAX_UNKNOWN


def test_memory_is_asked_for_as_the_profile_has_it() -> None:
    """Clusters may forbid it, or want it for each core."""

    def arguments(**resources: int) -> list[str]:
        return WorkerJob.from_request(
            JobRequest(1, 1, 4, 2000, 90), resources, None
        ).sbatch_arguments

    assert [a for a in arguments(mem_mb=500) if "mem" in a] == ["--mem=2000M"]
    assert [a for a in arguments(mem_mb=0) if "mem" in a] == []
    assert [a for a in arguments(mem_mb_per_cpu=300) if "mem" in a] == ["--mem-per-cpu=300M"]


def test_where_nodes_may_not_submit_the_cell_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = WorkerJob(1, 4, 2000, 90)
    folder = RunFolder(tmp_path)
    with WorkerJobSupervisor(SlurmJobs(asked, folder, "a/b"), 1, tmp_path / "jobs") as kept:
        until(lambda: kept._failure_reason)
        with pytest.raises(
            NoWorkersError,
            match=r"sbatch: No such file.*slurm_partition.*worker_partition to the partition of the workers$",
        ):
            kept.check_can_start_jobs()
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Access denied' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(SubmissionRefused, match=r"^sbatch: Access denied \(on .* may not submit"):
        SlurmJobs(asked, folder, "a/b").submit_worker_job(0, 0)


def test_a_checkpoint_holds_what_was_written_or_is_refused(tmp_path: Path) -> None:
    state = [torch.randn(3, 4, dtype=torch.float64), torch.tensor(7.0), torch.arange(5)]
    checkpoints.write_checkpoint(tmp_path, 12, state)
    checkpoints.write_checkpoint(tmp_path, 40, [t + 1 for t in state])
    checkpoints.delete_checkpoints(tmp_path, 40)
    assert max(checkpoints.list_checkpoint_steps(tmp_path)) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-40.bin"]
    read = [torch.zeros_like(t) for t in state]
    checkpoints.read_checkpoint_into_tensors(tmp_path, 40, read)
    assert all(torch.equal(a, b + 1) for a, b in zip(read, state, strict=True))
    path = checkpoints.get_checkpoint_path(tmp_path, 40)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"{}\n", b"\x80\x04."):
        path.write_bytes(damaged)
        before = [t.clone() for t in read]
        with pytest.raises(checkpoints.DamagedCheckpoint):
            checkpoints.read_checkpoint_into_tensors(tmp_path, 40, read)
        assert all(torch.equal(a, b) for a, b in zip(read, before, strict=True))
    path.write_bytes(whole)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="tensors of other shapes"):
        checkpoints.read_checkpoint_into_tensors(tmp_path, 40, state[:2])


def test_an_entry_says_all_of_a_job(tmp_path: Path) -> None:
    backend = Scripted()
    with WorkerJobSupervisor(backend, 1, tmp_path / "jobs") as kept:
        until(lambda: backend.jobs)
        backend.jobs["0"] = JobStatus("running", started_unix_s=100.0)
        kept.poll_jobs_soon()
        until(lambda: kept.list_jobs()[0].started_unix_s == 100.0)
    last = json.loads((tmp_path / "jobs").read_text().splitlines()[-1])
    assert last["started_unix_s"] == 100.0
    assert last["ended_unix_s"] is not None
