"""Cells that a command of the user's trains: started, watched from outside, ended, and what they report."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launching import LIMITS_S, LaunchedCell, assert_gone, settings, until
from stratbench.cell import record
from stratbench.cell.run_folder import RunFolder
from stratbench.cell.settings import Settings
from stratbench.extensions.commands.files import find_files_by_argument
from stratbench.extensions.commands.process import find_rendezvous_address
from stratbench.extensions.commands.reading import ReportError, read_report
from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.duration import estimate_time_from_records
from stratbench.extensions.plan.pages.check_text import format_check_result
from stratbench.extensions.plan.schedule import make_plan
from stratbench.strategies import get_option_defaults, get_strategy_class
from stratbench.strategies.needs import iter_missing_requirements
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.telemetry.sampler import CellProcesses, Sampler
from stratbench.workload.users_code import hash_named_files

pytestmark = pytest.mark.timeout(300)
Command = get_strategy_class("command")

#: A trainer that only reports: two epochs of four steps on the batch of the cell, for both of its workers.
TRAINER = """
import os, sys, time
os.environ["WORLD_SIZE"] = "2"
from stratbench.report import Report
report = Report(parameters=1000, note="a fact")
for epoch in range(2):
    for step in range(4):
        time.sleep(0.01)
        report.step(16, 0.5)
    report.pause()
    time.sleep(0.02)
    report.score(0.5, test_loss=0.7, error=0.1)
"""
REPORTS = "from stratbench.report import Report\nreport = Report()\n"
#: How commands end that do not train well: code, time limit, status, words of the reason.
ENDS = {
    "fails": ("import sys\nprint('no such file')\nsys.exit(3)", 0, "error", "no such file"),
    "is killed": ("import os\nos.kill(os.getpid(), 9)", 0, "error", "SIGKILL"),
    "reports nothing": ("print('done')", 0, "error", "stratbench.report"),
    "reports garbage": (
        "import os\nopen(os.environ['STRATBENCH_REPORT'], 'w').write('{not json}\\n')",
        0,
        "error",
        "report.jsonl, line 1: the line is no JSON object",
    ),
    "lacks memory": (
        f"{REPORTS}report.step(16)\nraise MemoryError('Unable to allocate 3 TiB')",
        0,
        "oom",
        "Unable to allocate 3 TiB",
    ),
    "diverges": (
        f"{REPORTS}report.step(16, float('nan'))",
        0,
        "diverged",
        "the training loss is not a finite number",
    ),
    "never steps": (f"import time\n{REPORTS}time.sleep(600)", 4, "error", "no step within"),
}
#: Starts others, one of them orphaned and in a session of its own, tells who they are, and stays.
FAMILY = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeper)
if os.fork() == 0:
    orphan = subprocess.Popen(sleeper, start_new_session=True, stdin=subprocess.DEVNULL)
    with open("{told}.new", "w") as file:
        file.write(f"{os.getppid()} {child.pid} {orphan.pid}")
    os.rename("{told}.new", "{told}")
    os._exit(0)
time.sleep(600)
"""


def of_command(command: list[str], **changes) -> Settings:
    """Settings of a cell that `command` trains, as a study resolves them."""
    options = get_option_defaults("command") | {"command": command}
    files = Command.list_user_files(options)
    options["sha256"] = hash_named_files(files) if files else None
    return settings("command", options=options, **changes)


@pytest.fixture
def trainer(tmp_path):
    """Writes a trainer; returns the settings of its cell."""

    def write(code: str = TRAINER, **changes) -> Settings:
        path = tmp_path / "train.py"
        path.write_text(code)
        return of_command([sys.executable, str(path)], **changes)

    return write


@pytest.mark.slow
def test_a_command_becomes_a_record(start_cell, trainer):
    launched = start_cell(trainer(epochs=2))
    code, output = launched.finish()
    assert code == 0, output
    found = record.read_record(launched.record)  # validates
    assert (found["status"], found["strategy"]["kind"]) == ("ok", "own")
    assert found["strategy"]["details"] == {"engine": "command"}
    said, outside = found["program"]["self_reported"], found["program"]["external"]
    counts = {key: said[key] for key in ("workers", "parameters", "batch", "steps", "samples")}
    assert counts == {"workers": 2, "parameters": 1000, "batch": 16, "steps": 8, "samples": 128}
    assert said["facts"] == {"note": "a fact"}
    assert found["batch"]["samples_seen"] == 128
    assert found["time"]["step_ms"]["count"] == 8
    assert 0.08 <= found["time"]["train_time_s"] <= outside["ended_s"] - outside["begun_s"]
    assert found["time"]["eval_s"] >= 0.04
    assert outside["begun_s"] <= said["first_s"] <= said["last_s"] <= outside["ended_s"]
    assert outside["exit_code"] == 0
    assert outside["largest_process_bytes"] == found["memory"]["peak_bytes"] > 1 << 22
    assert 0 < outside["cpu_time_s"] < found["time"]["total_s"]
    assert [e["score"] for e in found["score"]["per_epoch"]] == [0.5, 0.5]
    assert found["score"]["per_epoch"][0]["train_loss"] == 0.5
    assert (
        launched.folder.get_phase_log_path(0).read_text().count('"train"') == 4
    )  # both epochs' start and end


@pytest.mark.slow
def test_a_command_has_its_values_devices_and_threads(start_cell, tmp_path):
    told = tmp_path / "told.json"
    path = tmp_path / "tell.py"
    path.write_text(
        f"import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], open({str(told)!r}, 'w'))\n"
        f"{REPORTS}report.step(16)\n"
    )
    names = [
        "{workers}",
        "{node}/{nodes}",
        "{seed}",
        "{global_batch}",
        "{lr}",
        "{total_steps}",
        "{host}",
    ]
    s = of_command([sys.executable, str(path), *names, "{out}", "$(id) 'a'"], threads=3)
    launched = start_cell(s)
    assert launched.finish()[0] == 0
    arguments, environment = json.loads(told.read_text())
    assert arguments[:7] == ["2", "0/1", "7", "16", "0.05", "4", "127.0.0.1"]
    assert arguments[8] == "$(id) 'a'"
    assert Path(arguments[7]).is_dir()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_how_a_command_ends(start_cell, trainer, end):
    code, limit_s, status, words = ENDS[end]
    launched = start_cell(trainer(code), time_limit_s=limit_s)
    exit_code, output = launched.finish()
    assert exit_code == (status == "error"), output
    if status == "error":
        evidence = json.loads((launched.logs / record.FAILURE_FILE).read_text())
        assert words in evidence["reason"]
        assert not launched.record.exists()
        return
    found = record.read_record(launched.record)
    assert found["status"] == status
    assert words in found["reason"]
    assert found["score"]["final"] is None


@pytest.mark.slow
def test_a_slow_command_reaches_its_limit(start_cell, trainer):
    slow = trainer(f"import time\n{REPORTS}\nwhile True:\n time.sleep(0.1)\n report.step(16)")
    for limit_s in LIMITS_S:
        launched = start_cell(slow, time_limit_s=limit_s)
        exit_code, output = launched.finish()
        if "no step within" not in output:
            break
    assert exit_code == 0, output
    found = record.read_record(launched.record)
    assert found["status"] == "timeout"
    assert f"limit of {limit_s:g} s" in found["reason"]
    assert found["score"]["final"] is None


def started_family(start_cell, trainer, tmp_path) -> tuple[LaunchedCell, list[psutil.Process]]:
    """A cell whose command has started others, and all its processes below the launcher."""
    told = tmp_path / "told"
    launched = start_cell(trainer(FAMILY.replace("{told}", str(told))))
    until(told.exists)
    mine = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    return launched, [*mine, *psutil.Process(launched.process.pid).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_a_command_outlives_its_launcher(start_cell, trainer, tmp_path, number):
    launched, processes = started_family(start_cell, trainer, tmp_path)
    launched.process.send_signal(number)
    assert_gone(processes)
    assert launched.finish()[0] != 0


@pytest.mark.slow
def test_nothing_of_a_command_outlives_its_supervisor(start_cell, trainer, tmp_path):
    launched, processes = started_family(start_cell, trainer, tmp_path)
    supervisor = next(p for p in processes if any("supervisor" in part for part in p.cmdline()))
    supervisor.kill()
    assert_gone(processes)
    code, output = launched.finish()
    assert code == 1
    assert "SIGKILL" in output


@pytest.mark.slow
def test_a_command_ends_with_all_that_it_has_started(start_cell, trainer, tmp_path):
    """One that leaves others behind has ended well, and they have ended, too."""
    told = tmp_path / "told"
    code = FAMILY.replace("{told}", str(told)).replace(
        "\ntime.sleep(600)", f"\n{REPORTS}report.step(16)"
    )
    launched = start_cell(
        trainer(code + f"while not os.path.exists({str(told)!r}): time.sleep(0.01)\n")
    )
    assert launched.finish()[0] == 0
    assert_gone([p for pid in told.read_text().split() for p in found_process(int(pid))])


def found_process(pid: int) -> list[psutil.Process]:
    """The process of this number, if it runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


@pytest.mark.slow
def test_a_changed_script_is_not_trained(start_cell, trainer, tmp_path):
    s = trainer()
    (tmp_path / "train.py").write_text("print('another')")
    code, output = start_cell(s).finish()
    assert code == 1
    assert "have changed since the run was started" in output


# ---------------------------------------------------------------- the report

START = {"event": "start", "t": 10.0, "facts": {"workers": 2, "parameters": 5}}


def written(path: Path, *lines: dict | str) -> Path:
    """A report of these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def step(t: float, **more) -> dict:
    return {"event": "step", "t": t, "samples": 8} | more


def test_the_clock_of_a_report_stands_while_it_evaluates(tmp_path):
    lines = (
        {"event": "score", "t": 10.5, "score": 0.1},  # before any step, as nanoGPT does
        step(11.0, loss=2.0),
        step(12.0, loss=4.0),
        {"event": "pause", "t": 12.25, "losses": []},
        {"event": "score", "t": 15.0, "score": 0.7, "losses": []},
        step(16.0),
        {"event": "pause", "t": 16.0},
        {"event": "resume", "t": 20.0},
        step(21.0),
    )
    told = read_report(written(tmp_path / "r", START, *lines))
    assert told.step_times_s == [0.5, 1.25, 1.0, 1.0]
    assert told.train_time_s == 3.75
    assert told.training_intervals == [[10.5, 12.25], [15.0, 16.0], [20.0, 21.0]]
    assert [(s.train_time_s, s.train_loss) for s in told.scores] == [(0.0, None), (1.75, 3.0)]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    path = written(tmp_path / "r", START, step(11.0))
    with path.open("a") as file:
        file.write('{"event": "step", "t": 12')
    assert read_report(path).samples_per_step == [8]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "no step"),
        ((step(11.0),), "line 1: the event step comes before the event start"),
        ((START, "[1]"), "line 2: the line is no JSON object"),
        ((START, "\x00"), "line 2: the line is no JSON object"),
        ((START, "[" * 100_000), "line 2: the line is no JSON object"),
        ((START, {"event": "step", "t": 11.0}), "line 2: lacks 'samples'"),
        ((START, step(11.0, samples=-1)), "no whole number"),
        ((START, step(11.0, samples=True)), "no whole number"),
        ((START, step(9.0)), "earlier than that of the previous line"),
        ((START, '{"event": "step", "t": NaN, "samples": 1}'), "not finite"),
        ((START, step(11.0, loss="low")), "is no number"),
        ((START, {"event": "boom", "t": 11.0}), "is unknown"),
        ((START, {"event": ["step"], "t": 11.0}), "line 2"),
        ((START, START | {"t": 11.0}), "comes a second time"),
        (
            (START, {"event": "pause", "t": 11.0}, step(12.0)),
            "while the training clock was stopped",
        ),
        (({"event": "start", "t": 1.0, "facts": {}},), "workers"),
        (({"event": "start", "t": 1.0, "facts": {"workers": 1, "x": [1]}},), "the fact 'x'"),
    ],
)
def test_whatever_is_no_report_is_one_error(tmp_path, lines, words):
    with pytest.raises(ReportError, match=words) as error:
        read_report(written(tmp_path / "r", *lines))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": "python train.py"}, "a list"),
        ({"command": []}, "names no program"),
        ({"command": ["python", 3]}, "a list"),
        ({"command": ["python", "{sede}"]}, "{sede} is unknown"),
        ({"command": ["python"], "needs": ["accelerate"]}, "not a pinned package"),
    ],
)
def test_a_wrong_command_is_refused_in_words(given, words):
    with pytest.raises(ValueError, match=words):
        Command.Options(**given)


def test_what_is_no_placeholder_is_left_alone():
    Command.Options(command=["python", '{"json": 1}', "{}", "a{0}"])


def test_what_a_command_needs_is_looked_for_before_any_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = get_option_defaults("command")
    lacking = list(
        iter_missing_requirements(
            [
                ("one", Command, options | {"command": ["no-such-program"]}),
                ("two", Command, options | {"command": ["python", "there.py", "{out}/later.py"]}),
                (
                    "three",
                    Command,
                    options | {"command": ["python"], "needs": ["nothing-at-all==1.0"]},
                ),
            ]
        )
    )
    assert lacking[0].startswith(
        "three: nothing-at-all==1.0 is needed, but this Python has none; run pip"
    )
    assert lacking[1].startswith("one: its program 'no-such-program' is not found")
    assert lacking[2].startswith("two: its script 'there.py' is not here")
    assert len(lacking) == 3


def test_several_nodes_need_their_numbers_and_a_place_to_meet():
    options = get_option_defaults("command") | {"command": ["torchrun", "{host}"]}
    with pytest.raises(ValueError, match=r"add \{node\}"):
        Command.check_nodes(options, 8, 4)
    Command.check_nodes(options | {"command": ["torchrun", "{host}", "{node}"]}, 8, 4)
    Command.check_nodes(options, 4, 4)


def test_the_files_of_a_command_are_its_script_and_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("train.py", "import net, json"),
        ("net.py", ""),
        ("other.py", ""),
        ("c.yaml", ""),
    ):
        Path(name).write_text(text)
    Path("data.bin").write_bytes(b"\0\1")
    found = find_files_by_argument(["python", "train.py", "c.yaml", "data.bin", "{seed}"])
    assert list(found) == ["c.yaml", "net.py", "train.py"]
    assert list(find_files_by_argument(["python", "-m", "train"])) == ["net.py", "train.py"]
    before = hash_named_files(found)
    Path("net.py").write_text("x = 1")
    assert hash_named_files(found) != before


def test_all_processes_of_a_command_are_one_row_of_the_timeline(tmp_path):
    pids = tmp_path / "pids"
    sampler = Sampler(tmp_path / "samples.csv", pids, time.monotonic(), period_s=600)
    sampler.watch_process("rank0", os.getpid())
    sampler.watch_process("command0", os.getpid(), with_descendants=True)
    watched = CellProcesses(pids)
    with psutil.Popen([sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
                      stdin=-1, stdout=-1) as child:  # fmt: skip
        child.stdout.readline()
        watched.read_new_processes_if_any()
        alone, together = watched.sample_processes()
        child.stdin.close()
    sampler.stop()
    assert alone["id"] == "rank0"
    assert together["rss_bytes"] >= alone["rss_bytes"] + (1 << 20)


def test_processes_of_all_nodes_meet_where_node_0_says(tmp_path):
    job = SimpleNamespace(n_nodes=2, folder=RunFolder(tmp_path))
    host, port = find_rendezvous_address(job, 0)
    assert host == os.uname().nodename
    assert find_rendezvous_address(job, 1) == (host, port)
    alone = find_rendezvous_address(SimpleNamespace(n_nodes=1, folder=RunFolder(tmp_path)), 0)
    assert alone[0] == "127.0.0.1"


PLANNED = {
    "study": "s",
    "datasets": {"t": {"source": "synthetic", "train_samples": 64, "test_samples": 32, "size": 16}},
    "studies": {
        "s": {
            "variants": {"mine": {"strategy": "command", "command": ["python", "train.py"]}},
            "experiments": {
                "e": {"dataset": "t", "models": ["vgg-compact"], "strategies": ["mine"], "gpus": [2],
                      "epochs": 1, "global_batch": 32, "lr": 0.1, "device": "cpu"}
            },
        }
    },
}  # fmt: skip


@pytest.mark.slow
def test_plan_and_check_say_of_a_command_what_they_cannot_know(tmp_path):
    config, study = load_config(PLANNED | {"results": str(tmp_path)})
    checked = check_study(config, study)
    assert checked.refusal_reasons_by_cell == {}
    assert "mine: is a command of yours, which is not tried" in format_check_result(checked)
    (planned,) = make_plan(config, checked, {}).cells
    assert (planned.state, planned.footprint) == ("to do", None)
    assert "memory and traffic of a command are unknown" in planned.reason
    found = {
        "cell": planned.cell.as_dict(),
        "status": "ok",
        "time": {"train_time_s": 10.0},
        "program": {},
    }
    span = estimate_time_from_records(planned.cell, [found])
    assert (span.low_s, span.high_s) == (9.0, 11.0)
    # Of others it says nothing.
    assert estimate_time_from_records(replace(planned.cell, strategy="ddp"), [found]) is None


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ({"slowdown": {"sigma": 0.1}}, "slowdown"),
        ({"strategies": ["command"]}, "it has no command"),
        ({"gpus": [8]}, "several nodes"),
        ({"epochs": None, "steps": 4}, "a command has it as {epochs}"),
    ],
)
def test_what_a_command_cannot_do_is_refused_before_any_job(tmp_path, experiment, words):
    config = copy.deepcopy(PLANNED)
    config["studies"]["s"]["variants"]["mine"]["command"].append("{epochs}")
    config["studies"]["s"]["experiments"]["e"] |= experiment
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(config)


#: Stands for srun on a machine that is both nodes: starts the agent of each.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & started="$started $!"; done
for one in $started; do wait $one || code=1; done
exit ${code:-0}
"""
#: Tells which node it is and where all meet; that of node 0 reports.
ON_NODES = """
import os, sys
node, nodes, host, port, told = sys.argv[1:]
os.environ |= {"RANK": node, "WORLD_SIZE": "2"}
from stratbench.report import Report
Report(parameters=3).step(16)
open(f"{told}-{node}", "w").write(f"{nodes} {host}:{port}")
sys.exit(int(os.path.exists(f"{told}-fails") and node == "1"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_command_is_started_once_on_each_node(start_cell, tmp_path, fails):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "train.py").write_text(ON_NODES)
    told = tmp_path / "told"
    if fails:
        (tmp_path / "told-fails").touch()
    given = ["{node}", "{nodes}", "{host}", "{port}", str(told)]
    launched = start_cell(
        of_command([sys.executable, str(tmp_path / "train.py"), *given]),
        program=("-m", "stratbench.train.launch", "--nodes", "2"),
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    code, output = launched.finish()
    assert code == fails, output
    if fails:
        assert "command1: exit code 1" in output
        return
    first, second = ((tmp_path / f"told-{node}").read_text() for node in (0, 1))
    assert first == second
    assert first.startswith("2 ")
    found = record.read_record(launched.record)
    assert found["provenance"]["nodes"] == 2
    assert found["program"]["self_reported"]["steps"] == 1
    assert found["program"]["external"]["exit_code"] == 0
