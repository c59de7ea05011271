"""Holds projections to this machine: steps on 1 and 2 workers, projected to 4, beside what 4 really take.

    PYTHONPATH=workflow python benchmarks/projection_own.py [--rounds 5] [--share 0.2]

Each worker, server and process of the links' measurement may use a fifth of a core's time (a control group
with a quota, `quota.py`). So four workers fit on two cores, and a fourth takes nothing from the other three:
more workers are more hardware. What differs from a cluster: caches and memory are shared, and sending takes
of the same quota as computing.

First links are measured on 2 workers, as `snakemake links` does. Then rounds of all cells, through the
launcher as the workflow does: each strategy on 1, 2 and 4 workers, in an order that turns with the round.
From the records of 1 and 2 the 4 are projected: on the measured links, by the counts alone, and by the naive
rules. The A/A null is the 4 again: the medians of odd and of even rounds. Writes the steps, the links and a
page. Needs root; half an hour.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import quota

from stratbench.cell.coordinates import Cell
from stratbench.plan.device_rates import cpu_device
from stratbench.plan.needs import subject_of
from stratbench.plan.projection.evidence import Evidence, evidence_of, on_measured_links
from stratbench.plan.projection.project import computing_at, project
from stratbench.plan.schedule import records_by_cell
from stratbench.study.config.config import Study, load_config
from stratbench.telemetry.collective_cost import Time
from stratbench.train.links import measure, servers
from stratbench.workload.data.prepare import prepare
from stratbench.workload.users_code import CODE_VARIABLE

HERE = Path(__file__).parent
FITTED, TARGET = (1, 2), 4
WITHOUT_OWN = "the replay, without the workers' own times"
BATCH = 32


def config_of(results: Path, rounds: int, steps: int) -> dict[str, Any]:
    alike = {
        "dataset": "images", "models": ["quota-net"], "gpus": [*FITTED, TARGET], "lr": 0.01, "device": "cpu",
        "threads": 1, "steps": steps, "precision": "fp32",
    }  # fmt: skip
    return {
        "study": "own",
        "results": str(results),
        "code": [str(HERE)],
        "models": {"quota-net": {"call": "quota:QuotaNet"}},
        "datasets": {
            "images": {"source": "synthetic", "train_samples": 4096, "test_samples": 64, "size": 16}
        },
        "cluster": {"gpus_per_node": 8},
        "studies": {
            "own": {
                "repeats": rounds,
                "experiments": {
                    "weak": alike
                    | {"strategies": ["ddp", "ps-sync", "ps-async"], "per_worker_batch": BATCH},
                    "strong": alike | {"strategies": ["ddp"], "global_batch": 4 * BATCH},
                },
            }
        },
    }


# --- links ----------------------------------------------------------------------------------------


def measure_links(folder: Path, repeats: int) -> None:
    """`links.csv` of 2 workers, each process in a group: gloo by a launcher's variables, servers by ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gloo = folder / "gloo"
    command = [
        sys.executable, "-m", "stratbench.train.links.measure", "--workers", str(FITTED[-1]),
        "--largest-mib", "8", "--kinds", "all_reduce", "broadcast", "--repeats", str(repeats),
        "--out", str(gloo),
    ]  # fmt: skip
    place = {
        "WORLD_SIZE": str(FITTED[-1]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, env=os.environ | place | {"RANK": str(rank)}, preexec_fn=quota.enter
        )
        for rank in range(FITTED[-1])
    ]
    if codes := [code for code in [p.wait() for p in ranks] if code]:
        raise SystemExit(f"error: the measurement of links ended with code {codes[0]}")
    with (gloo / "times.csv").open(newline="", encoding="utf-8") as file:
        times = [
            Time(r["library"], r["kind"], *map(int, (r["workers"], r["nodes"], r["n_bytes"], r["repeat"])),
                 float(r["seconds"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip
    with (gloo / "links.csv").open(newline="", encoding="utf-8") as file:
        kappa = float(next(csv.DictReader(file))["kappa"])
    servers._pusher, servers._server = pusher_in_group, server_in_group
    times += measure.measure_servers(measure.Sweep((FITTED[-1],), 8 << 20, repeats), ["shm"])
    measure.write_links(folder, times, kappa)


_PUSHER, _SERVER = servers._pusher, servers._server


def pusher_in_group(*args: Any) -> None:
    quota.enter()
    _PUSHER(*args)


def server_in_group(*args: Any) -> None:
    quota.enter()
    _SERVER(*args)


# --- cells ----------------------------------------------------------------------------------------


def train(cell: Cell, settings: str, data: Path, results: Path) -> dict[str, Any]:
    """Run one cell as the workflow does; its record."""
    record = cell.record_path(results)
    command = [
        sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(cell.as_dict()),
        "--settings", settings, "--data", str(data), "--record", str(record),
        "--timeline", str(record.with_name("timeline.csv")), "--logs", str(cell.log_dir(results)),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: cell {cell}:\n{done.stdout}")
    return json.loads(record.read_text(encoding="utf-8"))


def step_s(record: dict[str, Any]) -> float:
    return record["batch"]["global_batch"] / record["time"]["throughput_samples_per_s"]


def in_rounds(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of each repeat, in an order that turns by one with every repeat."""
    found = []
    for number in sorted({c.repeat for c in cells}):
        alike = [c for c in cells if c.repeat == number]
        turn = number % len(alike)
        found += alike[turn:] + alike[:turn]
    return found


# --- projections ----------------------------------------------------------------------------------


def without_own(records: Sequence[dict]) -> tuple[dict, ...]:
    """Records that do not hold the workers' own times."""
    return tuple(
        r | {"workers": [{k: v for k, v in w.items() if k != "own_ms"} for w in r["workers"]]}
        for r in records
    )


def projections(config: dict[str, Any], study: Study, evidence: Evidence, links: Path) -> dict:
    """By rule: seconds of a step on 4, with the interval where it has one."""
    cluster = config["cluster"]

    def by_replay(evidence: Evidence) -> Any:
        on = on_measured_links(at, evidence, device, links, lambda workers: 1)
        computing = computing_at(on.replayed, points, stated.scaling)
        queue = on.queue and (lambda n: on.queue(n, computing(n)))
        [found] = project(points, stated, [(TARGET, 1)], on.replayed, on.slowed, on.levels, queue)
        return found

    def at(workers: int) -> Any:
        return subject_of(config, study, evidence.last.__class__(
            **evidence.last.as_dict() | {"gpus": workers}
        ))  # fmt: skip

    stated, points = evidence.stated, evidence.points
    device = cpu_device(cluster, FITTED[-1])
    replayed = by_replay(evidence)
    alike = by_replay(replace(evidence, records=tuple(map(without_own, evidence.records))))
    [by_counts] = project(points, stated, [(TARGET, 1)])
    naive = {name: (seconds,) for name, seconds in by_counts.naive_s.items()}
    return (
        {
            p.rule: (p.interval.middle_s, p.interval.low_s, p.interval.high_s)
            for p in (replayed, by_counts)
        }
        | {WITHOUT_OWN: (alike.interval.middle_s,)}
        | naive
    )


def page(rows: Sequence[dict], made: dict[tuple[str, str], dict], args: argparse.Namespace) -> str:
    loads = sorted(float(r["load_1m"]) for r in rows)
    lines = [
        "# Steps on 1 and 2 workers, projected to 4",
        "",
        f"{args.rounds} rounds of {args.steps} steps, each worker and server with {args.share:g} of a core "
        f"by quota, on {os.cpu_count()} cores with a load of {loads[0]:.1f} to {loads[-1]:.1f}. Medians "
        "over the rounds; made by `benchmarks/projection_own.py`, which says what this shows and what not.",
        "",
        "| scaling, strategy | steps on 1, 2, 4, ms | null at 4 | by | projected, ms (80 %) | error |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (experiment, strategy), rules in made.items():
        of = {n: times_of(rows, experiment, strategy, n) for n in (*FITTED, TARGET)}
        steps = ", ".join(f"{1e3 * statistics.median(t):.0f}" for t in of.values())
        odd, even = (statistics.median(of[TARGET][i::2] or of[TARGET]) for i in (0, 1))
        for rule, (middle_s, *ends) in rules.items():
            within = f" ({1e3 * ends[0]:.0f} to {1e3 * ends[1]:.0f})" if ends else ""
            error = middle_s / statistics.median(of[TARGET]) - 1
            lines.append(
                f"| {experiment}, {strategy} | {steps} | {100 * (odd / even - 1):+.1f} % | {rule} | "
                f"{1e3 * middle_s:.0f}{within} | {100 * error:+.1f} % |"
            )
    return "\n".join(lines) + "\n"


def times_of(rows: Sequence[dict], experiment: str, strategy: str, workers: int) -> list[float]:
    asked = (experiment, strategy, str(workers))
    return [float(r["step_s"]) for r in rows
            if (r["experiment"], r["strategy"], str(r["workers"])) == asked]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--steps", type=int, default=40, help="of a cell (40)")
    parser.add_argument("--share", type=float, default=0.2, help="of a core, each process (0.2)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "projection" / "own")
    args = parser.parse_args()
    rows = []
    os.environ[CODE_VARIABLE] = str(HERE)  # where the processes of a cell find its network
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="projection-own-") as temporary:
        folder = Path(temporary)
        config, study = load_config(config_of(folder, args.rounds, args.steps))
        prepare("images", folder / "data", spec=config["datasets"]["images"])
        with quota.groups(args.share):
            measure_links(folder / "links", 5 if args.rounds > 1 else 1)
            for cell in in_rounds(study.cells):
                record = train(cell, study.settings(cell).as_json(), folder / "data", folder)
                rows.append(
                    {
                        "round": cell.repeat, "experiment": cell.experiment, "strategy": cell.strategy,
                        "workers": cell.gpus, "step_s": f"{step_s(record):.6g}",
                        "load_1m": round(os.getloadavg()[0], 1),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
        records = records_by_cell(study, str(folder))
        fitted = {cell: r for cell, r in records.items() if cell.gpus in FITTED}
        made = {
            (e.experiment, e.strategy): projections(
                config, study, e, folder / "links" / "links.csv"
            )
            for e in evidence_of(fitted)
        }
        shutil.copy(folder / "links" / "links.csv", args.out / "links.csv")
    with (args.out / "steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = page(rows, made, args)
    (args.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
