"""What a SLURM job's start costs a small cell, alone and where cells share a job, on the tests' own cluster.

    python benchmarks/shared_jobs.py --rounds 3

In each round the same cells are trained three times, each time in a new folder: one a job, all in one job,
one a job again (the null). One SLURM job runs at a time. SLURM's accounting tells how long jobs held their
allocation, and the CPU time of all their processes. It needs Debian's packages of SLURM and mariadb, as
tests/slurm/cluster.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("workflow", "tests", "tests/slurm")]

from cluster import ACCOUNT, SlurmCluster  # noqa: E402
from cluster_workflow import CELLS_ONLY, PROFILE, ClusterWorkflow, study  # noqa: E402

MODELS = ["vgg-compact", "resnet-compact"]
STRATEGIES = ["single", "zero1"]
CELLS = len(MODELS) * len(STRATEGIES)
ARMS = {"alone": 1, "shared": CELLS, "alone again": 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in ARMS}
    with (
        tempfile.TemporaryDirectory(prefix="shared-jobs-") as folder,
        SlurmCluster(Path(folder, "c"), accounting=True) as cluster,
    ):
        for n in range(rounds):
            arms = list(ARMS)
            for arm in arms[n % 3 :] + arms[: n % 3]:
                place = Path(folder, f"{n}-{arm.replace(' ', '-')}")
                place.mkdir()
                found[arm].append(seconds_a_cell(place, ARMS[arm], cluster))
                print(f"round {n}, {arm}: {describe(found[arm][-1])}", flush=True)
    print(
        f"\nMedian of {rounds} rounds, {CELLS} cells each; load average {os.getloadavg()[0]:.1f}:"
    )
    for arm, rows in found.items():
        print(
            f"{arm}: {describe([statistics.median(column) for column in zip(*rows, strict=True)])}"
        )
    for what, column in (("of the allocation", 0), ("of CPU", 1)):
        for arm in ("shared", "alone again"):
            pairs = zip(found[arm], found["alone"], strict=True)
            ratios = sorted(a[column] / b[column] for a, b in pairs)
            told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{arm} / alone, seconds {what}, by round: {told}")


def describe(row: tuple[float, float, float] | list[float]) -> str:
    held_s, cpu_s, own_s = row
    return f"a cell {held_s:.1f} s of allocation, {cpu_s:.1f} s of CPU, {own_s:.1f} s by its record"


def seconds_a_cell(
    folder: Path, cells_per_job: int, cluster: SlurmCluster
) -> tuple[float, float, float]:
    """Of the allocation, of CPU, and by the records, for each cell of a study trained in `folder`."""
    matrix = {"strategies": STRATEGIES, "models": MODELS}
    workflow = ClusterWorkflow(folder, study({"e": matrix}, cells_per_job=cells_per_job), cluster)
    workflow.change_code(PROFILE, "  # slurm_account: my_project", f"  slurm_account: {ACCOUNT}")
    done = workflow.run("--jobs", "1", *CELLS_ONLY)
    records = [json.loads(path.read_bytes()) for path in folder.rglob("record.json")]
    if done.returncode or [r["status"] for r in records] != ["ok"] * CELLS:
        raise SystemExit(done.stdout)
    jobs = ",".join(sorted({r["provenance"]["slurm_job_id"] for r in records}))
    asked = ("sacct", "-nP", "-j", jobs, "-o", "JobID,ElapsedRaw,TotalCPU")
    rows = [line.split("|") for line in cluster.run(*asked).splitlines()]
    held_s = sum(int(elapsed) for job, elapsed, _ in rows if "." not in job)
    cpu_s = sum(seconds(cpu) for job, _, cpu in rows if "." in job)  # of its steps
    own_s = sum(r["time"]["total_s"] for r in records)
    return held_s / CELLS, cpu_s / CELLS, own_s / CELLS


def seconds(text: str) -> float:
    """A time as sacct writes it: `01:02:03`, `02:03.456`."""
    found = 0.0
    for part in text.split(":"):
        found = 60 * found + float(part)
    return found


if __name__ == "__main__":
    main()
