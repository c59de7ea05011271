"""Holds what waiting for the slowest costs to real workers: 1, 2 and 4 that sleep, projected to 8 and 16.

    PYTHONPATH=workflow python benchmarks/projection_jitter.py ddp --work FOLDER [--seeds 2]

A worker's forward sleeps for a time of its own in every step (`sleeping_net.py`) and computes almost nothing,
so that 16 processes fit on two cores. The times are log-normal; their logarithms are correlated from step to
step (0.7; published 0.64 to 0.74), and of one level half of their variance is the worker's own and stays.
Each seed is a network of its own: the same worker has the same times on every count.

First links are measured on 2 and 4 processes. All cells go through the launcher as in the workflow. From the
records of 1, 2 and 4 `project` makes its table, with the workers' own times and without. In the records that
it reads a process has a core, since it needs none: else more of them would be refused. Writes the mean step
of every cell, and a page that says how busy the machine was. Half an hour; records that are in FOLDER stay.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quota
from projection_own import step_s, train
from sleeping_net import MEAN_S, VARIABLE

from stratbench.analysis.report.projection import SHORT_RULES
from stratbench.plan.projection import __main__ as command
from stratbench.study.config.config import load_config
from stratbench.train.links import measure
from stratbench.workload.data.prepare import prepare
from stratbench.workload.users_code import CODE_VARIABLE

HERE = Path(__file__).parent
#: Variation, and which share of it stays.
LEVELS = ((0.0, 0.0), (0.1, 0.0), (0.3, 0.0), (0.3, 0.5))
MEASURED, TARGETS = (1, 2, 4), {"ddp": (8, 16), "ps-sync": (8,)}
#: A row of a table, by model and workers.
Rows = dict[tuple[str, int], dict[str, str]]


def name_of(level: tuple[float, float], seed: int) -> str:
    varies, stays = level
    return f"sleeping-{100 * varies:.0f}-{100 * stays:.0f}-{seed}"


def level_of(model: str) -> tuple[float, float]:
    varies, stays = model.split("-")[1:3]
    return int(varies) / 100, int(stays) / 100


def config_of(args: argparse.Namespace, results: Path, study: str) -> dict[str, Any]:
    networks = {
        name_of(level, seed): {
            "call": "sleeping_net:SleepingNet",
            "kwargs": {"variation": level[0], "stays": level[1], "seed": seed},
        }
        for seed in range(args.seeds)
        for level in LEVELS
    }
    alike = {
        "dataset": "images", "models": list(networks), "strategies": [args.strategy], "per_worker_batch": 4,
        "lr": 0.01, "device": "cpu", "threads": 1, "steps": args.steps, "precision": "fp32",
    }  # fmt: skip
    counts = {"measured": MEASURED, "held-out": TARGETS[args.strategy]}
    return {
        "study": study,
        "results": str(results),
        "code": [str(HERE)],
        "models": networks,
        "datasets": {
            "images": {"source": "synthetic", "train_samples": 16384, "test_samples": 64, "size": 8}
        },
        "cluster": {"gpus_per_node": 16},
        "studies": {
            name: {"experiments": {"weak": alike | {"gpus": list(of)}}}
            for name, of in counts.items()
        },
    }


def trained(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for every cell; those of a seed in an order of their own, so that all meet the same load."""
    cells = []
    for study in ("measured", "held-out"):
        config, read = load_config(config_of(args, folder, study))
        cells += [(cell, read.settings(cell).as_json()) for cell in read.cells]
    prepare("images", folder / "data", spec=config["datasets"]["images"])
    random.Random(0).shuffle(cells)
    rows = []
    for cell, settings in sorted(cells, key=lambda c: c[0].model.rpartition("-")[2]):
        path = cell.record_path(folder)
        load = path.with_name("load")
        if not path.exists():
            with tempfile.TemporaryDirectory() as numbers:
                os.environ[VARIABLE] = numbers
                train(cell, settings, folder / "data", folder)
                del os.environ[VARIABLE]
            load.write_text(f"{os.getloadavg()[0]:.1f}", encoding="utf-8")
        record = json.loads(path.read_text(encoding="utf-8"))
        rows.append(
            {
                "model": cell.model, "workers": cell.gpus, "step_s": f"{step_s(record):.6g}",
                "load_1m": load.read_text(encoding="utf-8"),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def projected(args: argparse.Namespace, folder: Path, own_times: bool) -> Rows:
    """The rows of `project`, from changed copies of the records."""
    results = folder / f"own-times-{own_times}"
    shutil.rmtree(results, ignore_errors=True)
    shutil.copytree(folder / "measured", results / "measured")
    (folder / "plan-cache").mkdir(exist_ok=True)
    (results / "plan-cache").symlink_to(folder / "plan-cache")
    for path in results.glob("measured/cells/**/record.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for worker in record["workers"]:
            worker["provenance"]["host"]["cpu_quota_cores"] = 16
            if not own_times:
                worker.pop("own_ms", None)
        path.write_text(json.dumps(record), encoding="utf-8")
    if code := command.main(["--config", json.dumps(config_of(args, results, "measured"))]):
        raise SystemExit(code)
    with (results / "measured" / "projection.csv").open(newline="", encoding="utf-8") as file:
        return {(r["model"], int(r["workers"])): r for r in csv.DictReader(file)}


def page(args: argparse.Namespace, rows: Sequence[dict], found: Rows, without: Rows) -> str:
    loads = sorted(float(r["load_1m"]) for r in rows)
    taken = {(r["model"], r["workers"]): float(r["step_s"]) for r in rows}
    lines = [
        f"# Waiting for the slowest of real workers, projected from 1, 2 and 4: `{args.strategy}`",
        "",
        f"Each worker sleeps {1e3 * MEAN_S:.0f} ms a step in the mean, for {args.steps} steps, on "
        f"{os.cpu_count()} cores with a load of {loads[0]:.1f} to {loads[-1]:.1f} (median "
        f"{statistics.median(loads):.1f}; [steps.csv](steps.csv) has each cell's). Made by "
        "`benchmarks/projection_jitter.py`, which says what is measured. Times in ms, errors in percent of "
        'what was measured; "outside": the interval of 80 % does not hold it. "More than at 0 %": how many '
        "percent the step is longer than that of the same seed and count without variation, measured, "
        "projected, and by a + b/N: what waiting costs, without what so many processes cost here.",
        "",
        "| varies, of which stays | seed | on 1, 2, 4 | workers | measured | projected (80 %) | by | error | "
        "a + b/N | without own times | more than at 0 % |",
        "|---" * 11 + "|",
    ]
    for model, n in sorted(taken, key=lambda k: (LEVELS.index(level_of(k[0])), *k)):
        if n in MEASURED:
            continue
        true_s, of, other = taken[model, n], found[model, n], without[model, n]
        varies, stays = level_of(model)
        null = (name_of(LEVELS[0], int(model.rpartition("-")[2])), n)
        more = [
            error(step, float(without_variation))
            for step, without_variation in (
                (true_s, taken[null]),
                (of["step_s"], found[null]["step_s"]),
                (of["a_plus_b_s"], found[null]["a_plus_b_s"]),
            )
        ]
        steps = ", ".join(f"{1e3 * taken[model, m]:.0f}" for m in MEASURED)
        lines.append(
            f"| {varies:.0%}, {stays:.0%} | {model.rpartition('-')[2]} | {steps} | {n} | "
            f"{1e3 * true_s:.0f} | {interval(of, true_s)} | {SHORT_RULES[of['rule']]} | "
            f"{error(of['step_s'], true_s)} | {error(of['a_plus_b_s'], true_s)} | "
            f"{error(other['step_s'], true_s)}, by {SHORT_RULES[other['rule']]} | "
            f"{', '.join(more)} |"
        )
    return "\n".join(lines) + "\n"


def error(projected_s: str | float, true_s: float) -> str:
    return f"{100 * (float(projected_s) / true_s - 1):+.1f}"


def interval(row: dict[str, str], true_s: float) -> str:
    low, middle, high = (float(row[f"step{end}_s"]) for end in ("_low", "", "_high"))
    outside = "" if low <= true_s <= high else ", outside"
    return f"{1e3 * middle:.0f} ({1e3 * low:.0f} to {1e3 * high:.0f}){outside}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("strategy", choices=TARGETS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the records")
    parser.add_argument("--seeds", type=int, default=2, help="of each level (2)")
    parser.add_argument("--steps", type=int, default=64, help="of a cell (64)")
    args = parser.parse_args()
    folder = args.work.resolve()
    links = folder / "measured" / "links"
    os.environ[CODE_VARIABLE] = str(HERE)  # where the processes of a cell find its network
    with quota.groups(os.cpu_count()):
        quota.enter()  # with all processes that it starts
        if not (links / "links.csv").exists():
            asked = [
                "--workers",
                "2",
                "4",
                "--largest-mib",
                "1",
                "--kinds",
                "all_reduce",
                "broadcast",
            ]
            if code := measure.main([*asked, "--servers", "shm", "--out", str(links)]):
                raise SystemExit(code)
        rows = trained(args, folder)
        text = page(args, rows, projected(args, folder, True), projected(args, folder, False))
        quota.leave()
    out = HERE / "results" / "projection" / "jitter" / args.strategy
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(links / "links.csv", out)
    with (out / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
