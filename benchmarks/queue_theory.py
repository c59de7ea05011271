"""The queue simulator against what is known exactly: M/M/c, and a gang with checkpoints under failures.

    PYTHONPATH=workflow nice python benchmarks/queue_theory.py

Writes results/elastic/theory.csv and theory.md; a minute or two of one core. Of each M/M/c 20 runs of 40,000
jobs, the first tenth of each left out. The bound: the exact mean wait lies within the 99 % interval, and that
is at most 5 % to either side. Plain means do not get there, since the waits of a run hang together over
thousands of jobs. So their scatter is explained by controls of known mean (Lavenberg and Welch, 1981): the
load of the run's own draws, and with c > 1 the mean wait of one server c times as fast for the same jobs, by
Lindley's recursion.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
from stratbench.plan.queue.simulator import Arrival, Cluster, Rules
from stratbench.plan.queue.trainings import Checkpoints, Gang, Scaling

RUNS, JOBS, TRAININGS = 20, 40_000, 6000
CASES = [(servers, load) for servers in (1, 8, 16) for load in (0.7, 0.85)]
COLUMNS = ("case", "exact", "simulated", "half_width", "plain", "plain_half_width", "holds")


def waiting_probability(servers: int, load: float) -> float:
    """Erlang's C: how likely a job of M/M/c waits, at `load` per server."""
    offered = servers * load
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def run(servers: int, load: float, jobs: int, seed: int) -> tuple[float, float, float]:
    """The mean wait of one run in services, and its two controls less their means."""
    rng, now = random.Random(f"{servers}/{load}/{seed}"), 0.0
    arrivals = []
    for _ in range(jobs):
        now += rng.expovariate(servers * load)
        service = rng.expovariate(1.0)
        arrivals.append(Arrival(now, 1, service, service))
    sim = Cluster(1, servers, arrivals, Rules(reserve=None))
    sim.run_until()
    first = jobs // 10
    drawn = math.log(sum(a.duration_s for a in arrivals) / (servers * now)) - math.log(load)
    fast, wait, last = [], 0.0, 0.0
    for job in arrivals:  # Lindley: one server that is `servers` times as fast
        wait = max(0.0, wait - (job.submit_s - last))
        fast.append(wait)
        wait, last = wait + job.duration_s / servers, job.submit_s
    exact = load / (1 - load) / servers
    mean = statistics.fmean(wait_s for _, wait_s in sim.waits[first:])
    return mean, drawn, statistics.fmean(fast[first:]) - exact


def with_controls(values: np.ndarray, controls: np.ndarray) -> tuple[float, float]:
    """The mean with the controls [runs, controls] at 0, by least squares, and its 99 % half-width."""
    design = np.column_stack([np.ones(len(values)), controls])
    found, *_ = np.linalg.lstsq(design, values, rcond=None)
    left = values - design @ found
    freedom = len(values) - design.shape[1]
    variance = left @ left / freedom * np.linalg.inv(design.T @ design)[0, 0]
    return float(found[0]), float(student.ppf(0.995, freedom) * math.sqrt(variance))


def mmc_rows(runs: int, jobs: int) -> Iterator[dict]:
    for servers, load in CASES:
        drawn = np.array([run(servers, load, jobs, seed) for seed in range(runs)])
        exact = waiting_probability(servers, load) / (servers * (1 - load))
        # With one server the second control would be the simulated wait itself.
        mean, half = with_controls(drawn[:, 0], drawn[:, 1 : 3 if servers > 1 else 2])
        plain, wide = with_controls(drawn[:, 0], np.empty((runs, 0)))
        yield {
            "case": f"M/M/{servers} at {load}",
            "exact": exact,
            "simulated": mean,
            "half_width": half,
            "plain": plain,
            "plain_half_width": wide,
            "holds": abs(mean - exact) <= half <= 0.05 * exact,
        }


def checkpoint_row(trainings: int) -> dict:
    """20 h of work in periods of 30 min, each begun again when it fails: n M (exp(T / M) - 1)."""
    period_s, mtbf_s, n = 1800.0, 8 * 3600.0, 40
    times = []
    for seed in range(trainings):
        sim = Cluster(1, 1, [], Rules(node_mtbf_s=mtbf_s, repair_s=0.0), seed)
        gang = Gang(n * period_s, 1e9, 1, Scaling(0.0), Checkpoints(period_s, 0.0), startup_s=0.0)
        gang.begin(sim)
        sim.run_until(done=lambda gang=gang: gang.finished)
        times.append(gang.done_s)
    exact = n * mtbf_s * math.expm1(period_s / mtbf_s)
    mean, half = with_controls(np.array(times), np.empty((trainings, 0)))
    return {
        "case": "checkpoints under failures, s",
        "exact": exact,
        "simulated": mean,
        "half_width": half,
        "plain": mean,
        "plain_half_width": half,
        "holds": abs(mean - exact) <= 0.005 * exact,
    }


def page(rows: list[dict], runs: int, jobs: int, trainings: int) -> str:
    lines = [
        "# The queue simulator against exact results",
        "",
        f"Made by `benchmarks/queue_theory.py`: {runs} runs of {jobs:,} jobs, {trainings:,} trainings.",
        "M/M/c: the mean wait in services, with 99 % intervals. Bounds: the exact value lies in the interval",
        "with controls, whose half-width is at most 5 %; the checkpoint formula is met within 0.5 %.",
        "",
        "| case | exact | simulated, with controls | off by | plain mean | holds |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['case']} | {r['exact']:.6g} | {r['simulated']:.6g} ± {r['half_width'] / r['exact']:.1%} "
            f"| {r['simulated'] / r['exact'] - 1:+.2%} | {r['plain']:.6g} ± "
            f"{r['plain_half_width'] / r['exact']:.1%} | {'yes' if r['holds'] else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--trainings", type=int, default=TRAININGS)
    out = Path(__file__).parent / "results" / "elastic"
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()
    rows = [*mmc_rows(given.runs, given.jobs), checkpoint_row(given.trainings)]
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.out / "theory.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows
        )
    text = page(rows, given.runs, given.jobs, given.trainings)
    (given.out / "theory.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
