"""Which cells share a SLURM job, and what becomes of each: the SLURM plugin's executor over jobs made up."""

from __future__ import annotations

import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratbench.study.slurm import live_jobs, nodes, sharing

executors = pytest.importorskip("stratbench.study.slurm.sharing_executor", exc_type=ImportError)


def test_kinds_are_kept_apart_and_the_order_stays():
    items = ["a1", "b1", "a2", "a3", "b2", "a4"]
    shares = sharing.divide(items, lambda i: i[0], lambda i: 1, 3, lambda i: None)
    assert shares == [["a1", "a2", "a3"], ["b1", "b2"], ["a4"]]


def test_a_shared_job_stays_below_the_partitions_limit():
    minutes = {"a": 30, "b": 30, "c": 70, "d": 20}
    shares = sharing.divide(minutes, lambda i: 0, minutes.get, 9, lambda i: 60)
    assert shares == [["a", "b"], ["c"], ["d"]]  # what no limit holds is refused elsewhere


def test_the_longest_job_is_that_of_the_partitions_most_patient_node():
    offered = nodes.parse_sinfo(
        "p*|n1|8|9000|(null)|1:00:00\np*|n2|8|9000|(null)|2:00:00\nq|n1|8|9000|(null)|infinite"
    )
    assert sharing.longest_job_min(offered, "p") == 120
    assert sharing.longest_job_min(offered, None) == 120
    assert sharing.longest_job_min(offered, "q") is None
    assert sharing.longest_job_min([], "p") is None


# ---------------------------------------------------------------- the executor


class Job:
    """What the executor uses of Snakemake's job of a cell."""

    def __init__(self, folder: Path, strategy: str, repeat: int = 0, **resources) -> None:
        self.path = folder / f"{strategy}{repeat}"
        self.path.mkdir()
        self.rule = SimpleNamespace(name="train_cell")
        self.attempt = 1
        self.wildcards = SimpleNamespace(
            study="s", experiment="e", strategy=strategy, model="m", gpus="1", repeat=str(repeat)
        )
        self.resources = {"nodes": 1, "gres": "", "cpus_per_task": 2, "runtime": 10, "mem_mb": 100}
        self.resources |= {"server_cpus": 0, "time_limit_s": 60} | resources
        self.output = SimpleNamespace(record=str(self.path / "record.json"))
        self.log = [str(self.path / "log")]
        self.params = SimpleNamespace(cell="", settings="")
        self.dag = SimpleNamespace(
            toposorted=lambda jobs, **_: [list(jobs)],
            workflow=SimpleNamespace(execution_settings=SimpleNamespace(attempt=1)),
        )

    def __repr__(self) -> str:
        return self.path.name

    def is_group(self) -> bool:
        return False

    def log_error(self, msg, aux_logs=(), **_) -> None:
        print(f"{self}: {msg} {aux_logs}")

    def begin(self) -> None:
        Path(self.log[0]).write_text("")

    def finish(self) -> None:
        self.begin()
        Path(self.output.record).write_text("valid")


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """One for three cells a job and two jobs at a time; it keeps what it submitted, and how cells ended."""
    ended = {}
    scheduler = SimpleNamespace(
        finish_callback=lambda job: ended.update({str(job): "success"}),
        error_callback=lambda job: ended.update({str(job): "error"}),
        running=set(),
        _lock=threading.Lock(),
        _user_kill=None,
        _open_jobs=threading.Semaphore(0),
    )
    made = executors.SharingExecutor.__new__(executors.SharingExecutor)
    made.workflow = SimpleNamespace(
        scheduler=scheduler, nodes=2, dag=SimpleNamespace(priority=lambda job: 0)
    )
    made.rule, made.cells_per_job, made.lists, made.offered = "train_cell", 3, tmp_path, []
    made.sharing, made.waiting, made.underway = threading.Lock(), deque(), 0
    made.submitted, made.ended = [], ended
    monkeypatch.setattr(made, "_submit_job", made.submitted.append)
    monkeypatch.setattr(
        executors.record, "is_of", lambda path, *_: Path(path).read_text() == "valid"
    )
    return made


def cells_of(job) -> list[str]:
    return [str(cell) for cell in (job.jobs if job.is_group() else [job])]


def info(job) -> executors.Any:
    from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

    return SubmittedJobInfo(job, external_jobid="7")


def test_cells_of_one_repeat_that_ask_for_the_same_share_a_job(executor, tmp_path):
    executor.workflow.nodes = sys.maxsize
    more = {"runtime": 30, "mem_mb": 700, "server_cpus": 1, "time_limit_s": 600}
    jobs = [
        Job(tmp_path, "c"),
        Job(tmp_path, "a", **more),
        Job(tmp_path, "b", repeat=1),
        Job(tmp_path, "b"),
        Job(tmp_path, "wide", cpus_per_task=4),
        Job(tmp_path, "far", nodes=2),
        Job(tmp_path, "d"),
    ]
    executor.run_jobs(jobs)
    found = [cells_of(job) for job in executor.submitted]
    assert found == [["far0"], ["a0", "b0", "c0"], ["d0"], ["wide0"], ["b1"]]
    shared = executor.submitted[1]
    listed = [
        Path(x).parent.name for x in live_jobs.shared_list(tmp_path, shared.wildcards[2]).open()
    ]
    assert listed == ["a0", "b0", "c0"]
    assert shared.resources["runtime"] == 10 + 10 + 30
    assert shared.resources["mem_mb"] == 700
    assert shared.resources["cpus_per_task"] == 2
    assert shared.wildcards[:2] == ["s", "shared"]


def test_priorities_say_which_cells_come_together(executor, tmp_path):
    jobs = [Job(tmp_path, name, repeat) for repeat in (0, 1) for name in "abcd"]
    wanted = ["d1", "b1", "c1", "a1", "b0", "c0", "a0", "d0"]
    executor.workflow.dag.priority = lambda job: -wanted.index(str(job))
    executor.run_jobs(jobs)
    assert cells_of(executor.submitted[0]) == wanted[:3]


def test_no_more_jobs_are_submitted_than_may_be(executor, tmp_path):
    executor.run_jobs([Job(tmp_path, f"s{n}") for n in range(8)])
    first, second = executor.submitted
    assert [len(first), len(second)] == [3, 3]
    executor.report_job_success(info(first))
    assert executor.ended == dict.fromkeys(("s00", "s10", "s20"), "success")
    assert cells_of(executor.submitted[2]) == ["s60", "s70"]


def test_after_a_sigterm_nothing_more_is_submitted(executor, tmp_path):
    jobs = [Job(tmp_path, f"s{n}") for n in range(8)]
    scheduler = executor.workflow.scheduler
    scheduler.running.update(jobs)
    executor.run_jobs(jobs)
    scheduler._user_kill = "graceful"
    executor.report_job_success(info(executor.submitted[0]))
    assert len(executor.submitted) == 2
    assert {str(job) for job in scheduler.running} == {f"s{n}0" for n in range(6)}
    assert scheduler._open_jobs.acquire(blocking=False), "Snakemake would wait for ever"


def test_each_cell_of_a_failed_job_is_told_by_what_it_has_left(executor, tmp_path, capfd):
    names = ("broke", "cut", "done", "never")
    broken, cut_off, done, missed = jobs = [Job(tmp_path, name) for name in names]
    for job in jobs:  # of an earlier run, and forced to be trained again
        job.finish()
    executor.cells_per_job = 4
    executor.run_jobs(jobs)
    (shared,) = executor.submitted
    Path(done.output.record).unlink()
    done.finish()
    for job in (broken, cut_off):
        Path(job.log[0]).unlink()
        job.begin()
    executor.report_job_error(info(shared), msg="CANCELLED", aux_logs=["7.log"])
    wanted = {"broke0": "error", "cut0": "error", "done0": "success", "never0": "error"}
    assert executor.ended == wanted
    out, err = capfd.readouterr()
    told = out.splitlines()
    assert [line.split(":")[0] for line in told] == ["broke0", "cut0"]
    assert ["7.log" in line for line in told] == [True, False]  # it is of them all
    assert "SLURM job 7 ended before the turn of 1 of its 4 cells" in err
    assert missed.output.record in err


def test_a_cell_that_is_tried_again_has_a_job_of_its_own(executor, tmp_path):
    executor.workflow.nodes = 9
    jobs = [Job(tmp_path, name) for name in "abc"]
    for job in jobs:
        job.attempt = 2
    executor.run_jobs(jobs)
    assert [cells_of(job) for job in executor.submitted] == [["a0"], ["b0"], ["c0"]]


def test_a_job_of_one_cell_fails_as_without_sharing(executor, tmp_path):
    job = Job(tmp_path, "a")
    executor.run_jobs([job])
    job.finish()
    executor.report_job_error(info(job), msg="FAILED")
    assert executor.ended == {"a0": "error"}
    assert executor.underway == 0


def test_the_command_is_of_one_snakemake_in_the_shells_place(executor, tmp_path, monkeypatch):
    executor.run_jobs([Job(tmp_path, name) for name in "ab"])
    (shared,) = executor.submitted
    executor.workflow.executor_settings = SimpleNamespace(pass_command_as_script=False)
    monkeypatch.setattr(executor, "get_python_executable", lambda: "/bin/py")
    plain = "module load x && /bin/py -m snakemake --cores all --executor slurm-jobstep --jobs 1 --mode x"
    monkeypatch.setattr(executors.Executor, "format_job_exec", lambda self, job: plain)
    assert executor.format_job_exec(Job(tmp_path, "c")) == plain
    assert executor.format_job_exec(shared) == (
        "module load x && exec env STRATBENCH_SHARED_JOB=1 /bin/py -m snakemake --cores all "
        "--keep-going --resources gpu_slots=1 --mode x"
    )
    monkeypatch.setattr(executors.Executor, "format_job_exec", lambda self, job: "other")
    with pytest.raises(RuntimeError, match="set cells_per_job to 1"):
        executor.format_job_exec(shared)
