"""The queue simulator against a real SLURM: the same jobs at the same moments.

    PYTHONPATH=workflow python benchmarks/prediction/queue_slurm.py

Writes benchmarks/results/elastic/slurm.md; ten seconds. It makes no run: those in its folder slurm were made
once, by a program that is not kept, on SLURM 22.05.8 on 2 nodes of 8 pretend GPUs: 200 Poisson jobs
(median 8 s, 1 to 16 GPUs), and 12 probes at equal moments, each as a gang of 8 GPUs for 12 s or as 8
jobs of one GPU that are cancelled when 96 GPU-seconds are done. Set were priority/basic and, for EASY,
bf_job_part_count_reserve=1, bf_interval=1, bf_resolution=1, sched_interval=2, batch_sched_delay=0. With
SLURM's `defaults` (bf_interval=30, batch_sched_delay=3) GPUs idle beside jobs of 12 s: those runs are
told, and no bound is on them.

SLURM's delays are inputs: from the allocation to a job's first line, from its last line to its end, and
from an end to the next allocation, whose time is drawn anew for each of 20 draws. A queue of short jobs is
chaotic: half a second moves its whole course. So one run cannot decide; bounds are on the runs at 0.6
together.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
from stratbench.extensions.queue.simulator import ALL, Arrival, Cluster, Rules
from stratbench.extensions.queue.trainings import (
    ElasticTraining,
    Gang,
    Scaling,
    SimulatedCheckpoints,
    Training,
)

OUT = Path(__file__).parents[1] / "results" / "elastic"
DRAWS = 20
#: Seconds, measured in the same runs: 0.15 to 0.19, 0.09, and 0.34 to 0.42 on average.
START_S, END_S, REACT_S = 0.15, 0.09, 0.4
WIDTH, PROBE_S = 8, 12.0
MEASURES = ("mean wait", "p95 wait", "probe to result")
#: How far simulated means over the runs at 0.6 may be off.
BOUNDS = (0.05, 0.10, 0.05)
#: The least standard deviation that a run is held to, as a share.
MIN_SD = 0.03


@dataclass(frozen=True)
class Run:
    """A run's jobs, its measures in seconds, and those of each draw of the simulator."""

    name: str
    real: tuple[float, ...]
    draws: list[tuple[float, ...]]

    def simulated(self, i: int) -> tuple[float, float]:
        """Mean and standard deviation over the draws of a measure."""
        values = [draw[i] for draw in self.draws]
        return statistics.fmean(values), statistics.stdev(values)

    def deviation(self, i: int) -> float:
        """How many standard deviations the simulator is off."""
        mean, sd = self.simulated(i)
        return (mean - self.real[i]) / max(sd, MIN_SD * mean)


def measures(waits: list[float], times: list[float]) -> tuple[float, ...]:
    p95 = sorted(waits)[int(0.95 * len(waits))]
    return statistics.fmean(waits), p95, statistics.fmean(times)


def read_run(path: Path) -> Run:
    """A run of SLURM, simulated DRAWS times."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    others = [r for r in rows if r["job"].startswith("b") and r["start_s"]]
    probes: dict[str, list[dict[str, str]]] = {}
    for r in rows:
        if r["job"].startswith("p"):
            probes.setdefault(r["job"].split(".")[0], []).append(r)
    moments = {name: min(float(r["submit_s"]) for r in jobs) for name, jobs in probes.items()}
    # Of a split probe the last job that ended is the last one in the file.
    ends = {name: [r["end_s"] for r in jobs if r["end_s"]] for name, jobs in probes.items()}
    times = [float(found[-1]) - moments[name] for name, found in ends.items() if found]
    waits = [float(r["start_s"]) - float(r["submit_s"]) for r in others]
    how = {"defaults": "defaults" in path.stem, "split": path.stem.endswith("split")}
    at = sorted(moments.values())
    draws = [simulate(others, at, random.Random(seed), **how) for seed in range(DRAWS)]
    return Run(path.stem, measures(waits, times), draws)


def simulate(
    others: list[dict[str, str]],
    moments: list[float],
    rng: random.Random,
    defaults: bool,
    split: bool,
) -> tuple[float, ...]:
    arrivals = sorted(
        (
            Arrival(
                float(r["submit_s"]),
                int(r["gpus"]),
                float(r["duration_s"]) + rng.expovariate(1 / REACT_S),
                float(r["request_s"]),
            )
            for r in others
        ),
        key=lambda a: a.submit_s,
    )
    rules = Rules(
        num_reservations=ALL if defaults else 1,
        backfill_interval_s=30.0 if defaults else 1.0,
        max_jobs_per_backfill=500,
        job_start_delay_s=START_S,
        job_end_delay_s=END_S,
    )
    sim = Cluster(2, 8, arrivals, rules)
    probes: list[Training] = []
    common = (WIDTH * PROBE_S, 120.0, WIDTH, Scaling(0.0), SimulatedCheckpoints(1800.0, 0.0), 0.0)
    for at_s in moments:
        sim.simulate_until(at_s)
        probes.append(ElasticTraining(*common) if split else Gang(*common))
        probes[-1].submit_training(sim)
    sim.simulate_until()
    return measures([w for _, w in sim.waits], [p.time_to_result_s for p in probes])


def pooled(runs: list[Run], i: int) -> float:
    """How far the simulated mean over some runs is off, as a share."""
    return (
        statistics.fmean(r.simulated(i)[0] for r in runs)
        / statistics.fmean(r.real[i] for r in runs)
        - 1
    )


def page(runs: list[Run]) -> str:
    lines = [
        "# The queue simulator against SLURM 22.05.8",
        "",
        "Made by `benchmarks/prediction/queue_slurm.py`: each run of 200 jobs and 12 probes, "
        f"{DRAWS} draws. SLURM's",
        "seconds / the simulator's mean and standard deviation over the draws; in brackets by how many of",
        f"those the two differ (of at least {MIN_SD:.0%}). The runs themselves were made once, by a "
        "program\nthat is not kept: their rows are in `slurm/`.",
        "",
        f"| run | {' | '.join(MEASURES)} |",
        "|---|---|---|---|",
    ]
    for run in runs:
        cells = []
        for i, real in enumerate(run.real):
            mean, sd = run.simulated(i)
            cells.append(f"{real:.1f} / {mean:.1f} ± {sd:.1f} ({run.deviation(i):+.1f})")
        lines.append(f"| {run.name} | {' | '.join(cells)} |")
    bounded = [r for r in runs if r.name.startswith("load-0.6")]
    lines += ["", "Bounds, on the runs at a load of 0.6 together:", ""]
    for i, (measure, bound) in enumerate(zip(MEASURES, BOUNDS, strict=True)):
        off = pooled(bounded, i)
        verdict = "holds" if abs(off) <= bound else "**missed**"
        lines.append(f"- {measure}: {off:+.1%} (at most {bound:.0%}): {verdict}")
    lines += ["", "Split over gang, time of the probes to their result, SLURM / simulated:", ""]
    by_name = {r.name: r for r in runs}
    for name in [r.name.removesuffix("-gang") for r in runs if r.name.endswith("-gang")]:
        gang, split = by_name[f"{name}-gang"], by_name[f"{name}-split"]
        real, ours = split.real[2] / gang.real[2], split.simulated(2)[0] / gang.simulated(2)[0]
        lines.append(f"- {name}: {real:.2f} / {ours:.2f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = page([read_run(path) for path in sorted((OUT / "slurm").glob("*.csv"))])
    (OUT / "slurm.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
