"""Worker jobs that the login node submits: what it answers, and what it does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from launching import LIMIT_S, until
from stratbench.cell.run_folder import RunFolder
from stratbench.study.slurm.worker_job import WorkerJob
from stratbench.train.elastic import login_jobs, slurm_jobs
from stratbench.train.elastic.keeper import Keeper, Refused
from stratbench.train.elastic.login_jobs import Desk, LoginJobs, ServedCell

WORKFLOW = Path(__file__).parents[2] / "workflow"
CELL = "split/ddp/net/2gpu/rep0"
OWN = "rule_train_cell_wildcards_demo_split_ddp_net_2_0"


@dataclass
class Slurm:
    """SLURM as far as it is asked: jobs by id, each with what squeue tells of it."""

    folder: Path
    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    silent: bool = False

    def add(self, name: str, comment: str, state: str = "RUNNING") -> str:
        id_ = str(len(self.jobs) + 1)
        told = {"%i": id_, "%T": state, "%j": name, "%Z": str(self.folder), "%k": comment}
        self.jobs[id_] = told | {"%r": "None", "%S": "N/A", "%e": "N/A"}
        return id_

    def ask(self, command: list[str], text: str | None = None) -> Any:
        if self.silent:
            return None
        printed = ""
        if command[0] == "sbatch":
            options = dict(c.lstrip("-").partition("=")[::2] for c in command)
            self.scripts.append(text)
            printed = self.add(options["job-name"], options["comment"], "PENDING")
        elif command[0] == "squeue":
            form = command[-1].removeprefix("--format=")
            rows = (re.sub(r"%\w", lambda m, j=j: j[m[0]], form) for j in self.jobs.values())
            printed = "\n".join(rows)
        else:
            for id_ in command[2:]:
                self.jobs[id_]["%T"] = "CANCELLED"
        return subprocess.CompletedProcess(command, 0, printed, "")

    def states(self, *ids: str) -> list[str]:
        return [self.jobs[i]["%T"] for i in ids]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """SLURM, in which job 1 is that of the cell, and this process is of it."""
    found = Slurm(tmp_path)
    found.add("uuid", OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for module in (login_jobs, slurm_jobs):
        monkeypatch.setattr(module, "ask_slurm", found.ask)
    monkeypatch.setattr(login_jobs, "LOOK_S", 0.01)
    monkeypatch.setattr(login_jobs, "_TRY_S", 0.01)
    return found


@pytest.fixture
def cell(tmp_path: Path) -> ServedCell:
    found = ServedCell(CELL, OWN, str(tmp_path / "logs"), 2, WorkerJob(1, 4, 2000, 90))
    requests_of(found).parent.mkdir(parents=True)
    return found


def requests_of(cell: ServedCell) -> Path:
    return RunFolder.of_logs(Path(cell.logs)).requests


@pytest.fixture
def desk(cell: ServedCell, slurm: Slurm) -> Iterator[Desk]:
    """A desk that answers until the end of the test."""
    ended, desk = Event(), Desk([cell], "module load cuda")

    def answer() -> None:
        while not ended.wait(0.01):
            desk.answer_all()

    thread = Thread(target=answer)
    thread.start()
    yield desk
    ended.set()
    thread.join()


def test_a_keeper_keeps_jobs_that_the_login_node_submits(
    desk: Desk, cell: ServedCell, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_jobs, "LAST_ANSWER_S", LIMIT_S)
    with Keeper(LoginJobs(requests_of(cell)), 2, tmp_path / "jobs") as kept:
        until(lambda: len(slurm.jobs) == 3)
        assert slurm.jobs["2"]["%k"] == f"worker 0 of {CELL}"
        assert "\nmodule load cuda || exit\nexec srun " in slurm.scripts[0]
        slurm.jobs["2"]["%T"] = "PREEMPTED"
        kept.look_soon()
        until(lambda: "4" in slurm.jobs)
    assert slurm.states("2", "3", "4") == ["PREEMPTED", "CANCELLED", "CANCELLED"]
    assert [entry.id for entry in kept.jobs()] == ["2", "3", "4"]
    # The desk takes a request away once it is answered.
    until(lambda: not list(requests_of(cell).iterdir()))


def test_whoever_submitted_a_job_without_a_word_has_not_submitted_it_in_vain(
    desk: Desk, cell: ServedCell, slurm: Slurm
) -> None:
    there = slurm.add(slurm_jobs.JOB_NAME, f"worker 7 of {CELL}")
    assert LoginJobs(requests_of(cell)).submit(7, 0) == there
    assert slurm.scripts == []


def test_no_more_jobs_run_than_the_cell_has_workers(
    desk: Desk, cell: ServedCell, slurm: Slurm
) -> None:
    jobs = LoginJobs(requests_of(cell))
    jobs.submit(0, 0), jobs.submit(1, 1)
    with pytest.raises(Refused, match="2 worker jobs, and 2 workers"):
        jobs.submit(2, 0)


def test_only_the_cells_own_running_job_is_listened_to(
    desk: Desk, cell: ServedCell, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [slurm.add("uuid", OWN, "COMPLETED"), slurm.add("uuid", OWN.replace("_0", "_1")), "99"]
    for job in others:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        with pytest.raises(Refused, match="not of a job that trains"):
            LoginJobs(requests_of(cell)).submit(0, 0)
    assert slurm.scripts == []


def test_only_worker_jobs_of_the_cell_are_cancelled_and_shown(
    desk: Desk, cell: ServedCell, slurm: Slurm
) -> None:
    mine = slurm.add(slurm_jobs.JOB_NAME, f"worker 0 of {CELL}")
    others = [
        slurm.add(slurm_jobs.JOB_NAME, f"worker 0 of {CELL}1"),
        slurm.add("another", f"worker 0 of {CELL}"),
        slurm.add(slurm_jobs.JOB_NAME, f"worker x of {CELL}"),
    ]
    elsewhere = slurm.add(slurm_jobs.JOB_NAME, f"worker 0 of {CELL}")
    slurm.jobs[elsewhere]["%Z"] = "/elsewhere"
    jobs, every = LoginJobs(requests_of(cell)), [mine, *others, elsewhere, "--all"]
    assert jobs.look(every).keys() == {mine}
    jobs.cancel(every)
    assert slurm.states(mine, *others, elsewhere) == ["CANCELLED"] + 4 * ["RUNNING"]


PLANTED = {
    "no number": {"call": "submit", "number": "1; touch x"},
    "true": {"call": "submit", "number": True},
    "below zero": {"call": "submit", "number": -1},
    "too high": {"call": "submit", "number": 10**9},
    "another call": {"call": "__init__"},
    "a list": [1, 2],
    "ids of no list": {"call": "cancel", "ids": "12"},
    "too long": {"call": "submit", "number": 1, "text": "x" * 100_000},
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_no_launcher_asks_is_refused(
    desk: Desk, cell: ServedCell, slurm: Slurm, what: str
) -> None:
    folder = requests_of(cell)
    LoginJobs(folder)
    asked = PLANTED[what]
    text = json.dumps(asked | {"job": "1"} if isinstance(asked, dict) else asked)
    (folder / ".new").write_text(text)
    (folder / ".new").rename(folder / "1-1.request")
    until(lambda: (folder / "1-1.answer").exists())
    until(lambda: not (folder / "1-1.taken").exists())
    assert slurm.scripts == []
    assert slurm.states("1") == ["RUNNING"]


@pytest.mark.parametrize("mode", [0o720, 0o702, None])
def test_nothing_is_read_where_others_could_write(
    cell: ServedCell, slurm: Slurm, tmp_path: Path, mode: int | None
) -> None:
    folder = requests_of(cell)
    if mode is None:
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        folder.chmod(mode)
    (folder / "1-1.request").write_text(json.dumps({"call": "submit", "number": 0, "job": "1"}))
    Desk([cell]).answer_all()
    assert slurm.scripts == []


def test_a_request_that_is_a_link_or_a_pipe_is_not_read(
    cell: ServedCell, slurm: Slurm, tmp_path: Path
) -> None:
    folder = requests_of(cell)
    LoginJobs(folder)
    (tmp_path / "theirs").write_text(json.dumps({"call": "submit", "number": 0, "job": "1"}))
    (folder / "1-1.request").symlink_to(tmp_path / "theirs")
    os.mkfifo(folder / "1-2.request")
    Desk([cell]).answer_all()
    assert sorted(path.name for path in folder.iterdir()) == ["1-1.answer", "1-2.answer"]
    assert slurm.scripts == []


def test_what_an_earlier_launcher_asked_is_forgotten(cell: ServedCell, slurm: Slurm) -> None:
    folder = requests_of(cell)
    LoginJobs(folder)
    (folder / "1-1.request").write_text(json.dumps({"call": "submit", "number": 5, "job": "1"}))
    LoginJobs(folder)
    Desk([cell]).answer_all()
    assert slurm.scripts == []


def test_where_nobody_answers_the_cell_says_so(
    cell: ServedCell, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_jobs, "ANSWER_S", 0.05)
    jobs = LoginJobs(requests_of(cell))
    with pytest.raises(Refused, match=r"snakemake must run there .*submit_workers: login"):
        jobs.submit(0, 0)
    assert jobs.look(["3"]) is None
    assert list(requests_of(cell).iterdir()) == []  # both were withdrawn


def test_a_keeper_ends_at_once_although_nobody_answers(
    cell: ServedCell, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_jobs, "LAST_ANSWER_S", 0.05)
    with Keeper(LoginJobs(requests_of(cell)), 1, tmp_path / "jobs") as kept:
        until(lambda: list(requests_of(cell).glob("*.request")))
    assert kept.jobs() == []


def test_at_its_end_it_cancels_what_it_has_seen_to(cell: ServedCell, slurm: Slurm) -> None:
    with Desk([cell]) as desk:
        jobs = {n: desk._answer(cell, {"call": "submit", "number": n, "job": "1"}, login_jobs.listed_jobs())
                for n in (0, 1)}  # fmt: skip
        slurm.jobs[jobs[0]["id"]]["%T"] = "COMPLETED"
        another = slurm.add(slurm_jobs.JOB_NAME, "worker 0 of another cell")
    assert slurm.states(jobs[0]["id"], jobs[1]["id"], another) == [
        "COMPLETED", "CANCELLED", "RUNNING",
    ]  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_program_ends_with_the_process_that_has_started_it(
    tmp_path: Path, cell: ServedCell, how: signal.Signals
) -> None:
    """Killed, or stopped by Ctrl-C, which a terminal sends to all processes of its group."""
    started = subprocess.Popen(
        [sys.executable, "-c", "import sys, time\nfrom pathlib import Path\n"
         "from stratbench.train.elastic.login_jobs import _started, start_desk\n"
         "start_desk([], '', Path('log/of/it'))\nprint(_started[0].pid, flush=True)\ntime.sleep(900)\n"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
    )  # fmt: skip
    desk = int(started.stdout.readline())
    os.killpg(started.pid, how)
    started.wait(200)

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{desk}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    until(is_gone)
    assert (tmp_path / "log/of/it").read_text() == ""


def test_jobs_of_which_slurm_says_nothing_at_the_end_are_named(
    cell: ServedCell, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with Desk([cell]) as desk:
        desk._mine = {"7", "8"}
        monkeypatch.setattr(login_jobs, "ask_slurm", lambda command: None)
    assert "has not said that these worker jobs have ended: 7 8" in capsys.readouterr().out
