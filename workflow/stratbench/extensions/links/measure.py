"""Measures the times of collectives, and of push and pull with parameter servers.

    python -m stratbench.extensions.links.measure --workers 2 4 --largest-mib 100 --out results/links
    torchrun --nnodes 2 --nproc-per-node 8 -m stratbench.extensions.links.measure --workers 16

The first command starts the processes of this machine itself, with NCCL if --gpus is given, else with gloo.
In a SLURM job of several nodes it starts them on each node. Under torchrun, or any launcher that sets RANK,
WORLD_SIZE and MASTER_ADDR, this process is one of them. The order of the measurements changes in each
round, so that changes of the machine affect all alike. The output is `times.csv` with every measurement,
and `links.csv` with a row per kind and level: latency of a step, rate, knee and spread.
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

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.links.collective_cost import CollectiveTime, FittedLink, fit_links
from stratbench.extensions.links.group import (
    LinkGroup,
    measure_links_in_launched_process,
    measure_links_on_nodes,
    measure_links_on_this_node,
)
from stratbench.extensions.links.servers import measure_server_exchanges
from stratbench.extensions.links.timing import KINDS, MeasuredLinks, Sweep
from stratbench.train.nodes.srun import read_slurm_node_and_core_counts

TRANSPORTS = ("shm", "tcp")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    sweep = Sweep(
        tuple(sorted(set(args.workers))), args.largest_mib << 20, args.repeats, tuple(args.kinds)
    )
    try:
        result = measure_all_collectives(args, sweep)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if result is not None:
        write_links(args.out, *result)
        print(f"Written: {args.out / 'links.csv'}, {args.out / 'times.csv'}")
    return 0


def measure_all_collectives(args: argparse.Namespace, sweep: Sweep) -> MeasuredLinks | None:
    """Measure all collectives and servers. Return the times and the slowdown of computation.

    Return None in a process that another launcher started, unless it is rank 0.
    """
    if "RANK" in os.environ:
        return measure_links_in_launched_process(sweep, args.gpus)
    times, compute_slowdown = [], math.nan
    nodes, cpus = read_slurm_node_and_core_counts()
    if args.kinds and nodes > 1:
        # Sizes of the groups to measure: those that fit on one node, and all workers of all nodes.
        # `measure_collectives` adds a group with one worker per node.
        here = [n for n in sweep.workers if n <= args.a_node]
        sizes = (*here, nodes * args.a_node)
        wide = replace(sweep, workers=sizes)
        folder = str((args.out / "run").resolve())
        group = LinkGroup(wide, args.gpus, folder, nodes, args.a_node)
        times, compute_slowdown = measure_links_on_nodes(group, cpus)
    elif args.kinds:
        times, compute_slowdown = measure_links_on_this_node(sweep, args.gpus)
    if args.servers:
        times += measure_server_exchanges(sweep, args.servers)
    return times, compute_slowdown


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.links.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[2],
        help="sizes of the groups of workers in which to measure; default: 2",
    )
    parser.add_argument(
        "--largest-mib",
        type=int,
        default=64,
        help="size of the largest measured tensor in MiB; default: 64",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=7,
        help="number of times that each measurement is made; default: 7",
    )
    parser.add_argument(
        "--kinds",
        nargs="*",
        choices=KINDS,
        default=KINDS,
        help="kinds of collectives to measure; default: all",
    )
    parser.add_argument(
        "--gpus", action="store_true", help="measure on GPUs with NCCL instead of CPUs with gloo"
    )
    parser.add_argument(
        "--servers",
        nargs="*",
        choices=TRANSPORTS,
        default=[],
        help="transports of parameter servers to measure; default: none",
    )
    parser.add_argument(
        "--a-node",
        type=int,
        help="workers per node in a SLURM job of several nodes; default: the largest of --workers",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder to which times.csv and links.csv are written",
    )
    args = parser.parse_args(argv)
    args.a_node = args.a_node or max(args.workers)
    if min(args.workers) < 2:
        parser.error(f"--workers {min(args.workers)}: a link connects two workers; give 2 or more")
    if not args.kinds and not args.servers:
        parser.error(
            "--kinds and --servers are empty: nothing to measure; name a kind or a transport"
        )
    if args.largest_mib < 1 or args.repeats < 1:
        parser.error("--largest-mib and --repeats: expected 1 or more")
    if args.gpus and "RANK" not in os.environ and max(args.workers) > torch.cuda.device_count():
        n = torch.cuda.device_count()
        parser.error(
            f"--workers {max(args.workers)} --gpus: this machine has {n} GPUs; give at most {n}"
        )
    return args


def write_links(folder: Path, times: Sequence[CollectiveTime], compute_slowdown: float) -> None:
    """Write the measured times to `times.csv`, and the fitted links to `links.csv`.

    Args:
        folder: Folder to write to.
        times: All measurements.
        compute_slowdown: Factor by which computation is slower during a collective.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(
        folder / "times.csv",
        _format_csv([f.name for f in fields(CollectiveTime)], map(astuple, times)),
    )
    rows = []
    for link in fit_links(times):
        slowed = "" if link.kind == "push_pull" else f"{compute_slowdown:.4g}"
        rows.append([*asdict(link).values(), slowed])
    write_text_atomically(
        folder / "links.csv", _format_csv([*(f.name for f in fields(FittedLink)), "kappa"], rows)
    )


def _format_csv(header: list[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
