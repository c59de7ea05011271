"""Makes the tables of the study in families.yaml from its records: accuracy, traffic and memory.

    STRATBENCH_DATA=... snakemake results/mnist-families/cells.csv --profile profiles/local \\
        --configfile benchmarks/families.yaml
    PYTHONPATH=workflow python benchmarks/families.py results/mnist-families

Writes results/families-mnist.csv, a row a cell, and results/families-mnist.md beside this file. No times:
the workers share a machine's cores, and their times would say more of the machine than of the strategies.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

from stratbench.cell import record as records

OUT = Path(__file__).parent / "results"
KIB = 1024
TITLES = {
    "one": "One worker",
    "same-data": "Two workers, all data for both",
    "own-classes": "Two workers, five classes each",
}


def row_of(record: dict[str, Any]) -> dict[str, Any]:
    """What the tables show of a record; bytes of the worker that holds most, and of a mean step."""
    moved = record["communication"] or {}
    apart = record["strategy"]["details"].get("consensus_distance") or [None]
    return {key: record["cell"][key] for key in ("experiment", "strategy", "gpus", "repeat")} | {
        "status": record["status"],
        "accuracy": record["score"]["final"],
        "test_loss": record["score"]["per_epoch"][-1]["test_loss"],
        "updates": record["batch"]["updates_applied"],
        "sent_bytes_per_step": moved.get("sent_bytes_per_step"),
        "received_bytes_per_step": moved.get("received_bytes_per_step"),
        "states_bytes": sum(record["memory"]["model_states"].values()),
        "optimizer_bytes": record["memory"]["model_states"]["optimizer_bytes"],
        "consensus_distance": apart[-1],
        "revision": record["provenance"]["git"]["revision"],
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """A line of a table: the repeats of a strategy."""
    first = rows[0]
    values = sorted(100 * r["accuracy"] for r in rows if r["accuracy"] is not None)
    accuracy = f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
    apart = [r["consensus_distance"] for r in rows if r["consensus_distance"] is not None]
    cells = (
        first["strategy"],
        str(len(values)),
        accuracy,
        f"{first['sent_bytes_per_step'] / KIB:.1f}",
        f"{first['received_bytes_per_step'] / KIB:.1f}",
        f"{first['states_bytes'] / KIB:.0f}",
        f"{first['optimizer_bytes'] / KIB:.0f}",
        f"{statistics.median(apart):.1e}" if apart else "",
    )
    return f"| {' | '.join(cells)} |"


def page(rows: list[dict[str, Any]]) -> str:
    """The tables, an experiment each, in the order of the study."""
    steps, revisions = rows[0]["updates"], sorted({r["revision"][:7] for r in rows})
    lines = [
        "MNIST (60,000 images), a network of 57,722 parameters in fp32 (225 KiB), SGD 0.05 with momentum "
        f"0.9, one epoch of {steps} global batches of 512, 512 or 256 a worker; each worker a CPU process.",
        "Accuracy on the test set: median (lowest to highest) of the repeats. Bytes a worker sends "
        "and receives in a step, as a mean over the training: collectives counted by the ring "
        "algorithms, servers by what went over the socket or through shared memory. States: "
        "parameters, gradients and optimizer's state of the worker that holds most; those that "
        "parameter servers hold are not in it. Apart: how far the workers' weights are from their "
        "mean at the end, relative to it.",
        f"Made as `benchmarks/families.py` says, by revision {', '.join(revisions)}. Asynchronous "
        "servers take pushes as they come, and reach other accuracies in another run. Times are left out: "
        "workers share the cores of one machine.",
    ]
    for experiment, title in TITLES.items():
        own = [r for r in rows if r["experiment"] == experiment]
        lines += [
            "",
            f"## {title}",
            "",
            "| strategy | repeats | accuracy, % | sent, KiB | received, KiB "
            "| states, KiB | of the optimizer, KiB | apart |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for strategy in dict.fromkeys(r["strategy"] for r in own):
            lines.append(shown([r for r in own if r["strategy"] == strategy]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="the study's folder of results")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the two files")
    args = parser.parse_args()
    paths = sorted((args.study / "cells").rglob("record.json"))
    rows = [row_of(records.read(path)) for path in paths]
    with (args.out / "families-mnist.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (args.out / "families-mnist.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
