"""Measures links: collectives, servers' push and pull, and how much they slow computation down.

    python -m stratbench.extensions.links.measure --workers 2 4 --largest-mib 100 --out results/links
    torchrun --nnodes 2 --nproc-per-node 8 -m stratbench.extensions.links.measure --workers 16

The first starts the processes of this machine itself (NCCL with --gpus, else gloo), in a SLURM job of several
nodes as many on each; under torchrun, or any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR, this
process is one of them. The measurements of a round come in an order of their own, so that a machine that
changes meanwhile changes all alike. Writes `times.csv` (every measurement) and `links.csv` (a row for each
kind and level: latency of a step, rate, knee, spread).
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path
from typing import Any

import torch

from stratbench.cell.files import write_atomic
from stratbench.extensions.links.collective_cost import FittedLink, Time, fitted_links
from stratbench.extensions.links.group import (
    LinkGroup,
    as_one_of_many,
    measure_here,
    measure_on_nodes,
)
from stratbench.extensions.links.servers import measure_servers
from stratbench.extensions.links.timing import KINDS, Sweep
from stratbench.train.nodes.srun import size_of_job

TRANSPORTS = ("shm", "tcp")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    sweep = Sweep(
        tuple(sorted(set(args.workers))), args.largest_mib << 20, args.repeats, tuple(args.kinds)
    )
    try:
        result = measured(args, sweep)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if result is not None:
        write_links(args.out, *result)
        print(f"Written: {args.out / 'links.csv'}, {args.out / 'times.csv'}")
    return 0


def measured(args: argparse.Namespace, sweep: Sweep) -> tuple[list[Time], float] | None:
    """Return all times, and kappa.

    Return None in a process that another launcher started, but for rank 0.
    """
    if "RANK" in os.environ:
        return as_one_of_many(sweep, args.gpus)
    times, kappa = [], math.nan
    nodes, cpus = size_of_job()
    if args.kinds and nodes > 1:
        # On one of them, and all workers of all nodes (`measure` adds one of each node).
        here = [n for n in sweep.workers if n <= args.a_node]
        wide = replace(sweep, workers=(*here, nodes * args.a_node))
        folder = str((args.out / "run").resolve())
        group = LinkGroup(wide, args.gpus, folder, nodes, args.a_node)
        times, kappa = measure_on_nodes(group, cpus)
    elif args.kinds:
        times, kappa = measure_here(sweep, args.gpus)
    if args.servers:
        times += measure_servers(sweep, args.servers)
    return times, kappa


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.links.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="counts (2)")
    parser.add_argument("--largest-mib", type=int, default=64, help="the largest tensor (64)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (7)")
    parser.add_argument(
        "--kinds", nargs="*", choices=KINDS, default=KINDS, help="of collectives (all)"
    )
    parser.add_argument("--gpus", action="store_true", help="on GPUs with NCCL; else CPUs and gloo")
    parser.add_argument(
        "--servers",
        nargs="*",
        choices=TRANSPORTS,
        default=[],
        help="parameter servers, too, by these",
    )
    parser.add_argument(
        "--a-node",
        type=int,
        help="workers of a node in a SLURM job of several (the largest of --workers)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the two files")
    args = parser.parse_args(argv)
    args.a_node = args.a_node or max(args.workers)
    if min(args.workers) < 2:
        parser.error(f"--workers {min(args.workers)}: a link has two ends")
    if not args.kinds and not args.servers:
        parser.error("--kinds without any, and no --servers: nothing to measure")
    if args.largest_mib < 1 or args.repeats < 1:
        parser.error("--largest-mib and --repeats: expected 1 or more")
    if args.gpus and "RANK" not in os.environ and max(args.workers) > torch.cuda.device_count():
        n = torch.cuda.device_count()
        parser.error(f"--workers {max(args.workers)} --gpus: this machine has {n}")
    return args


def write_links(folder: Path, times: Sequence[Time], kappa: float) -> None:
    """Write `times.csv` and `links.csv`.

    Args:
        folder: Folder to write to.
        times: All measurements.
        kappa: Slowdown of computation during collectives, for their rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "times.csv", _csv([f.name for f in fields(Time)], map(astuple, times)))
    rows = []
    for link in fitted_links(times):
        slowed = "" if link.kind == "push_pull" else f"{kappa:.4g}"
        rows.append([*asdict(link).values(), slowed])
    write_atomic(folder / "links.csv", _csv([*(f.name for f in fields(FittedLink)), "kappa"], rows))


def _csv(header: list[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
