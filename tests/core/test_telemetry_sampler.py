"""The sampler as a process of its own: what it sees, and how it ends."""

from __future__ import annotations

import csv
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fake_nvml import INSTANCES, UUIDS, FakeNvml, GpuIsLost

from launching import LIMIT_S, assert_gone, until
from stratbench.telemetry import sampler as sampler_module
from stratbench.telemetry.machine import busy
from stratbench.telemetry.machine.busy import measure_load_of_other_programs
from stratbench.telemetry.machine.nvml import Gpu, Nvml
from stratbench.telemetry.sampler import (
    CellProcesses,
    Sampler,
    find_gpus,
    write_samples_until_stop,
)
from stratbench.telemetry.timeline import SAMPLE_COLUMNS, read_samples

pytestmark = pytest.mark.timeout(300)

BURN = "import time\nend = time.time() + 600\nwhile time.time() < end: pass"


@contextmanager
def burning():
    """A child that keeps one core busy."""
    child = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A sampler has the lowest priority: on a busy machine it may need long for its last sample."""
    monkeypatch.setattr(sampler_module, "MAX_STOP_S", LIMIT_S)


def has_burnt(rows: list[dict]) -> bool:
    """Whether a process has used a core, which on a busy machine it gets late."""
    cpu_times_s = [float(row["cpu_time_s"]) for row in rows]
    return cpu_times_s[-1] > cpu_times_s[0] and any(float(row["cpu_pct"] or 0) > 0 for row in rows)


def samples(path: Path, kind: str) -> list[dict]:
    return [row for row in read_samples(path) if row["kind"] == kind]


def test_it_sees_a_process_burn_cpu_and_takes_a_last_sample(tmp_path):
    out = tmp_path / "samples.csv"
    origin_s = time.monotonic() - 50
    sampler = Sampler(out, out.with_suffix(".pids"), origin_s, period_s=0.1)
    with burning() as child:
        sampler.watch_process("rank0", child.pid)
        until(lambda: len(samples(out, "process")) >= 6 and has_burnt(samples(out, "process")))
    ended_s = time.monotonic() - origin_s
    assert sampler.stop() is True
    rows = samples(out, "process")
    assert {row["id"] for row in rows} == {"rank0"}
    assert rows[0]["cpu_pct"] == ""  # nothing to compare the first with
    times = [float(row["cpu_time_s"]) for row in rows]
    assert times == sorted(times)
    assert all(int(row["rss_bytes"]) > 1 << 20 for row in rows)
    hosts = samples(out, "host")
    host_times = [row["t_s"] for row in hosts]
    assert host_times == sorted(host_times)
    assert 50 <= host_times[0] <= ended_s <= host_times[-1] + 0.001  # written to the ms
    assert max(float(row["cpu_pct"] or 0) for row in hosts) > 0
    by_core = [row["cores_pct"].split() for row in hosts if row["cores_pct"]]
    assert {len(cores) for cores in by_core} == {os.cpu_count()}
    assert not out.with_suffix(".pids").exists()


def test_a_share_is_of_the_time_since_the_share_before(monkeypatch):
    """Of samples just behind one another only the first has one."""
    now = SimpleNamespace(s=10.0)
    monkeypatch.setattr(sampler_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    watched, found = CellProcesses(None), []
    for at_s, cpu_time_s in ((10, 3.0), (12, 4.0), (12.001, 4.1), (14, 4.6)):
        now.s = at_s
        found.append(watched._measure_cpu_share("rank0", {1: cpu_time_s}))
    assert found == [{}, {"cpu_pct": 50.0}, {}, {"cpu_pct": 30.0}]


def test_it_is_light(tmp_path):
    out = tmp_path / "samples.csv"
    sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=0.1)
    try:
        until(lambda: samples(out, "host"))
        process = psutil.Process(sampler.pid)
        assert process.memory_info().rss < 60 << 20
        assert process.nice() == 19
        maps = Path(f"/proc/{sampler.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()
    finally:
        sampler.stop()


def test_sigterm_leaves_whole_rows_and_the_last_sample(tmp_path):
    out = tmp_path / "samples.csv"
    sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=600)
    until(lambda: samples(out, "host"))
    time.sleep(0.3)
    assert sampler.stop() is True  # it does not wait for its period
    rows = samples(out, "host")
    assert len(rows) == 2
    assert rows[1]["t_s"] - rows[0]["t_s"] > 0.2
    assert out.read_text().endswith("\n")


def processes(path: Path) -> list[str]:
    return [row["id"] for row in samples(path, "process")]


def test_a_process_is_sampled_when_it_is_named_and_not_at_the_next_period_only(tmp_path):
    out = tmp_path / "samples.csv"
    sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=600)
    try:
        until(lambda: samples(out, "host"))
        sampler.watch_process("rank0", os.getpid())
        until(lambda: processes(out) == ["rank0"])
        sampler.watch_process("rank1", os.getpid())
        until(lambda: processes(out) == ["rank0", "rank0", "rank1"])
    finally:
        sampler.stop()


@pytest.mark.slow
def test_naming_processes_does_not_disturb_a_sampler_that_is_starting(tmp_path):
    for i in range(5):
        out = tmp_path / f"out{i}.csv"
        sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=600)
        for rank in range(3):
            sampler.watch_process(f"rank{rank}", os.getpid())
        until(lambda out=out: set(processes(out)) == {"rank0", "rank1", "rank2"})
        assert sampler.stop() is True


def test_a_killed_sampler_leaves_what_it_had_and_stop_says_so(tmp_path):
    out = tmp_path / "samples.csv"
    sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=0.05)
    until(lambda: len(samples(out, "host")) >= 3)
    os.kill(sampler.pid, signal.SIGKILL)
    assert sampler.stop() is False
    assert len(samples(out, "host")) >= 3


@pytest.mark.slow
def test_it_ends_when_its_launcher_is_killed(tmp_path):
    """However long its period is."""
    out = tmp_path / "samples.csv"
    program = (
        "import time; from stratbench.telemetry.sampler import Sampler;"
        f"s = Sampler({str(out)!r}, {str(out) + '.pids'!r}, time.time(), 600);"
        "print(s.pid, flush=True); time.sleep(600)"
    )
    root = Path(sampler_module.__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True
    )
    pid = int(launcher.stdout.readline())
    until(lambda: samples(out, "host"))
    sampler = psutil.Process(pid)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert_gone([sampler])


def test_a_sampler_that_cannot_start_fails_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sampler_module.sys, "executable", str(tmp_path / "no-python"))
    sampler = Sampler(tmp_path / "samples.csv", tmp_path / "pids", time.time())
    sampler.watch_process("rank0", os.getpid())
    assert sampler.pid is None
    assert sampler.stop() is False
    assert "no timeline" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_ends_the_timeline_in_one_line(tmp_path):
    """The kernel refuses more bytes, as on a full disk; the rows that were written stay."""
    out = tmp_path / "samples.csv"
    done = subprocess.run(
        [sys.executable, sampler_module.__file__, "--out", out, "--period-s", "0.01"],
        env=os.environ
        | {
            "PYTHONPATH": str(Path(sampler_module.__file__).parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",  # it would be cut off
        },
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr == f"sampler: File too large: {out}; the timeline ends\n"
    assert out.read_text().startswith(",".join(SAMPLE_COLUMNS))


def test_a_period_of_zero_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sampler_module.main(["--out", str(tmp_path / "s.csv"), "--period-s", "0"])
    assert "--period-s" in capsys.readouterr().err


def sampled_with(
    library: FakeNvml,
    count: int,
    sleep=lambda seconds: None,
    period_s: float = 0.001,
    gpus: list[Gpu] | None = None,
    foreign_processes=None,
) -> list[dict]:
    """Rows of `count` samples and the last one, taken in this process."""
    stop, wake = threading.Event(), threading.Event()
    text = io.StringIO()
    waits = iter(range(count))

    def wait(seconds: float) -> None:
        sleep(seconds)
        if next(waits) == count - 1:
            stop.set()

    wake.wait = wait
    write_samples_until_stop(
        stop,
        wake,
        text,
        gpus or Nvml(library).list_gpus(),
        CellProcesses(None),
        foreign_processes,
        parent_pid=os.getppid(),
        period_s=period_s,
        origin_s=sampler_module.time.monotonic(),
    )
    text.seek(0)
    return list(csv.DictReader(text))


def test_strangers_are_looked_for_once_in_two_samples():
    looks = []
    watch = SimpleNamespace(poll_gpus=looks.append, write_foreign_processes=lambda: None)
    rows = sampled_with(FakeNvml(gpus=1), 6, foreign_processes=watch)
    times_s = [float(row["t_s"]) for row in rows if row["kind"] == "host"]
    assert 2 <= len(looks) < len(times_s)
    assert set(looks) <= set(times_s)


def test_gpu_counters_are_columns_and_those_not_offered_are_empty():
    library = FakeNvml(gpus=2, failures={"nvmlDeviceGetTotalEnergyConsumption": GpuIsLost("lost")})
    gpus = [row for row in sampled_with(library, 1) if row["kind"] == "gpu"]
    assert [row["id"] for row in gpus] == ["0", "1", "0", "1"]
    assert gpus[0]["power_w"] == "312.5"
    assert gpus[0]["throttle"] == "sw_power_cap;hw_thermal_slowdown"
    assert gpus[0]["energy_j"] == ""
    assert set(gpus[0]) == set(SAMPLE_COLUMNS)


def test_pcie_snapshots_which_block_are_taken_now_and_then():
    gpus = [row for row in sampled_with(FakeNvml(), 20) if row["kind"] == "gpu"]
    taken = [i for i, row in enumerate(gpus) if row["pcie_tx_bytes_per_s"]]
    assert taken == [0, 10, 20]


def test_a_sample_has_the_time_of_its_energy_whatever_other_gpus_take(monkeypatch):
    """The counters are clocks at 60 W; a snapshot of PCIe takes 20 ms, any other answer 1 ms."""
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.s)
    monkeypatch.setattr(sampler_module, "time", clock)

    class Slow(FakeNvml):
        def __getattr__(self, name):
            ask = super().__getattr__(name)

            def asked(*arguments):
                energy_mj = 60e3 * now.s
                now.s += 0.02 if "PcieThroughput" in name else 0.001
                return energy_mj if "Energy" in name else ask(*arguments)

            return asked

    library = Slow(gpus=8)
    known = Nvml(library).list_gpus()
    origin_s = now.s
    rows = [row for row in sampled_with(library, 11, gpus=known) if row["kind"] == "gpu"]
    assert len(rows) == 8 * 12
    assert sum(bool(row["pcie_tx_bytes_per_s"]) for row in rows) == 8 * 2
    late_s = [float(row["energy_j"]) / 60 - origin_s - float(row["t_s"]) for row in rows]
    assert late_s == pytest.approx([0] * len(rows), abs=0.001)  # t_s is written to the ms


def test_a_cells_own_gpus_are_sampled_and_no_others(capsys):
    library = FakeNvml(gpus=2)
    rows = sampled_with(library, 1, gpus=find_gpus(["GPU-666"], Nvml(library)))
    assert [row["id"] for row in rows if row["kind"] == "gpu"] == ["1", "1"]
    assert capsys.readouterr().err == ""


def test_an_instance_has_rows_without_the_power_of_its_gpu():
    library = FakeNvml(gpus=2, mig=True)
    rows = sampled_with(library, 1, gpus=find_gpus([INSTANCES[1]], Nvml(library)))
    gpus = [row for row in rows if row["kind"] == "gpu"]
    assert {row["id"] for row in gpus} == {INSTANCES[1]}
    assert {(row["mem_used_bytes"], row["power_w"], row["energy_j"]) for row in gpus} == {
        ("12884901888", "", "")
    }


def test_why_a_gpu_cannot_be_sampled_is_said(capsys):
    assert find_gpus(["0"], Nvml(FakeNvml(failures={"nvmlInit": OSError("mismatch")}))) == []
    assert "cannot sample GPU 0 (OSError: mismatch)" in capsys.readouterr().err
    assert find_gpus([UUIDS[0]], Nvml(FakeNvml(mig=True))) == []  # all instances' power is in its
    assert "divided into MIG instances" in capsys.readouterr().err


def test_its_period_is_kept_however_long_a_sample_takes(monkeypatch):
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.s, time=lambda: 1e9 + now.s)
    monkeypatch.setattr(sampler_module, "time", clock)

    class Slow(FakeNvml):
        def _nvmlDeviceGetClockInfo(self, handle, clock):
            now.s += 0.1
            return 1

    def sleep(seconds: float) -> None:
        now.s += seconds

    rows = [row for row in sampled_with(Slow(), 6, sleep, 0.5) if row["kind"] == "host"]
    assert [float(row["t_s"]) for row in rows] == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 3])


def test_without_a_driver_the_host_is_sampled_all_the_same():
    rows = sampled_with(FakeNvml(failures={"nvmlInit": OSError("no driver")}), 2)
    assert [row["kind"] for row in rows] == ["host"] * 3


def test_watched_reads_whole_lines_as_they_come_and_drops_the_dead(tmp_path):
    pids = tmp_path / "pids"
    watched = CellProcesses(pids)
    assert watched.read_new_processes_if_any() is False  # not there yet
    with burning() as child:
        pids.write_text(f"rank0 {child.pid}\nrank1 {os.getpid()}")
        assert watched.read_new_processes_if_any() is True
        assert [row["id"] for row in watched.sample_processes()] == ["rank0"]
        with pids.open("a") as file:
            file.write("\nrank2 not-a-number\n")
        watched.read_new_processes_if_any()
        assert [row["id"] for row in watched.sample_processes()] == ["rank0", "rank1"]
        child.kill()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        # A process that was not waited for yet would read as one without memory.
        assert [row["id"] for row in watched.sample_processes()] == ["rank1"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_it_keeps_off_the_cores_of_the_watched(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    out = tmp_path / "samples.csv"
    sampler = Sampler(out, out.with_suffix(".pids"), time.time(), period_s=0.05)
    try:
        with burning() as child:
            os.sched_setaffinity(child.pid, cores[:1])
            sampler.watch_process("rank0", child.pid)
            until(lambda: os.sched_getaffinity(sampler.pid) == set(cores[1:]))
    finally:
        sampler.stop()


@pytest.mark.slow
def test_busy_check_tells_our_processes_from_others():
    with burning() as child:
        ours = measure_load_of_other_programs(window_s=0.6, nvml=Nvml(FakeNvml()))
        assert child.pid not in {p["pid"] for p in ours["other_processes"]}


def test_every_process_on_a_gpu_before_the_cell_starts_is_another():
    """In a container NVML's numbers are the host's: one that equals ours says nothing."""
    running = [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in (os.getpid(), 4242)]
    library = FakeNvml(answers={"nvmlDeviceGetComputeRunningProcesses": running})
    facts = measure_load_of_other_programs(window_s=0.001, nvml=Nvml(library))
    assert facts["other_gpu_processes"] == {0: [os.getpid(), 4242]}
    idle = FakeNvml(answers={"nvmlDeviceGetComputeRunningProcesses": []})
    assert "other_gpu_processes" not in measure_load_of_other_programs(
        window_s=0.001, nvml=Nvml(idle)
    )


def test_busy_check_subtracts_what_we_use_ourselves(monkeypatch):
    now = SimpleNamespace(s=0.0)

    def sleep(seconds: float) -> None:
        now.s += seconds

    clock = SimpleNamespace(monotonic=lambda: now.s, sleep=sleep)
    us, worker, foreign = os.getpid(), 10**9, 10**9 + 1
    by_process = iter([{us: 5.0, worker: 1.0}, {us: 6.0, worker: 1.5, foreign: 0.4}])
    monkeypatch.setattr(busy, "_list_own_process_tree_pids", lambda: {us, worker})
    busy_s = iter([100.0, 102.5])
    monkeypatch.setattr(busy, "time", clock)
    monkeypatch.setattr(busy, "_read_cpu_s_by_pid", lambda: next(by_process))
    monkeypatch.setattr(busy, "_read_busy_cpu_s", lambda: next(busy_s))
    facts = measure_load_of_other_programs(window_s=2.0)
    # 2.5 s busy, of which 1.5 s ours: the rest counts although only 0.4 s of it is visible.
    assert facts["other_cpu_cores"] == 0.5
    assert facts["other_processes"] == [{"pid": foreign, "name": "?", "cores": 0.2}]


@pytest.mark.slow
def test_busy_check_sees_a_stranger(tmp_path, monkeypatch):
    # Its parent ends at once, so that it descends from us no longer.
    pid_file = tmp_path / "pid"
    shell = f'"{sys.executable}" -c "$1" & echo $! > "{pid_file}"'
    subprocess.run(["sh", "-c", shell, "sh", BURN], check=True, timeout=300)
    pid = int(pid_file.read_text())
    try:
        until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) > 0.2)
        # Five are named at most, from a tenth of a core: what else this machine does may not push it out,
        # nor leave it too little.
        cpu_times = busy._read_cpu_s_by_pid
        weights = {pid: 100, os.getpid(): 1}
        monkeypatch.setattr(
            busy,
            "_read_cpu_s_by_pid",
            lambda: {p: weights[p] * s for p, s in cpu_times().items() if p in weights},
        )
        facts = {}

        def seen() -> bool:
            facts.update(measure_load_of_other_programs(window_s=0.8))
            named = [process["pid"] for process in facts["other_processes"]]
            return named == [pid] and facts["other_cpu_cores"] > 0.1

        until(seen)
    finally:
        os.kill(pid, signal.SIGKILL)
