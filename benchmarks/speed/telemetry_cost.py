"""Measures what telemetry costs: the CPU time of the sampler process, of the step clock and of its heartbeat.

    PYTHONPATH=workflow python benchmarks/speed/telemetry_cost.py --seconds 30

Prints CPU time, not wall clock, so another load on the machine disturbs it little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from stratbench.cell.run_folder import format_worker_name
from stratbench.telemetry.clock import StepClock
from stratbench.telemetry.heartbeat import Heartbeat
from stratbench.telemetry.sampler import Sampler
from stratbench.telemetry.timeline import read_samples

#: Steps that the clock is timed over, and how often.
STEPS, ROUNDS = 20_000, 9
PHASES = ("data", "forward", "backward", "optimizer", "server_wait")


def sampler_cost(seconds: float, period_s: float, ranks: int) -> dict[str, float]:
    """Share of one core, in percent, and memory of a sampler that watches `ranks` processes."""
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        for _ in range(ranks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "samples.csv")
        sampler = Sampler(out, Path(folder, "pids"), time.time(), period_s)
        try:
            for rank, process in enumerate(sleepers):
                sampler.watch_process(format_worker_name(rank), process.pid)
            watched = psutil.Process(sampler.pid)
            time.sleep(2)  # its start is not what a long cell pays
            before_s, begun_s = _cpu_s(watched), time.monotonic()
            time.sleep(seconds)
            cpu_s, elapsed_s = _cpu_s(watched) - before_s, time.monotonic() - begun_s
            rss_bytes = watched.memory_info().rss
        finally:
            sampler.stop()
            for process in sleepers:
                process.kill()
                process.wait()
        samples = sum(row["kind"] == "host" for row in read_samples(out))
    return {
        "period_s": period_s,
        "ranks": ranks,
        "samples": samples,
        "cpu_pct_of_a_core": 100 * cpu_s / elapsed_s,
        "cpu_ms_per_sample": 1000 * cpu_s / (elapsed_s / period_s),
        "rss_mib": rss_bytes / 2**20,
    }


def clock_cost(phases: tuple[str, ...], heartbeat: Heartbeat | None = None) -> float:
    """CPU microseconds that the clock takes in a step: a mark for each phase, and a tick (median)."""
    rounds_us = []
    for _ in range(ROUNDS):
        clock = StepClock("cpu", heartbeat)
        clock.begin_epoch()
        begun_s = time.process_time()
        for _ in range(STEPS):
            for phase in phases:
                clock.mark_phase_end(phase)
            clock.mark_step_end()
        rounds_us.append((time.process_time() - begun_s) / STEPS * 1e6)
    return statistics.median(rounds_us)


def _cpu_s(process: psutil.Process) -> float:
    """User and system time; finer than ps shows it where the scheduler's own sum is readable."""
    try:
        return (
            int(Path(f"/proc/{process.pid}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
        )
    except (OSError, ValueError, IndexError):
        times = process.cpu_times()
        return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="length of the measurement")
    parser.add_argument("--period-s", type=float, default=0.5)
    parser.add_argument("--ranks", type=int, default=4, help="processes that the sampler watches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with_heartbeat_us = clock_cost(PHASES, Heartbeat(Path(folder, "heartbeat")))
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "sampler": sampler_cost(options.seconds, options.period_s, options.ranks),
                "clock_us_per_step": clock_cost(()),
                "clock_us_per_step_with_5_marks": clock_cost(PHASES),
                "clock_us_per_step_with_5_marks_and_heartbeat": with_heartbeat_us,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
