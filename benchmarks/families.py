"""Makes the tables of the study in families.yaml from its records: accuracy, traffic and memory.

    STRATBENCH_DATA=... snakemake --profile profiles/local --configfile benchmarks/families.yaml \\
        results/mnist-families/cells.csv
    PYTHONPATH=workflow python benchmarks/families.py results/mnist-families

Writes results/families-mnist.csv, a row a cell, and results/families-mnist.md beside this file. Rows of
cells that the folder has no record of are kept. No times: the workers share a machine's cores, and their
times would say more of the machine than of the strategies.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from stratbench.cell import record as records
from stratbench.cell.words import counted

OUT = Path(__file__).parent / "results"
KIB, REPEATS = 1024, 3
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


def place(row: dict[str, Any]) -> tuple[str, str, int, int]:
    """Which cell of the study a row is of."""
    return row["experiment"], row["strategy"], row["gpus"], row["repeat"]


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier table; none where there is none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    whole = ("gpus", "repeat", "updates", "states_bytes", "optimizer_bytes")
    words = ("experiment", "strategy", "status", "revision")

    def value(key: str, text: str) -> Any:
        if key in words:
            return text
        return (int if key in whole else float)(text) if text else None

    return [{key: value(key, text) for key, text in line.items()} for line in lines]


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
    steps, revisions = rows[0]["updates"], len({r["revision"] for r in rows})
    lines = [
        "MNIST (60,000 images), a network of 57,722 parameters in fp32 (225 KiB), SGD 0.05 with momentum "
        f"0.9, one epoch of {steps} global batches of 512, 512 or 256 a worker; each worker a CPU process.",
        "Accuracy on the test set: median (lowest to highest) of the repeats. Bytes a worker sends "
        "and receives in a step, as a mean over the training: collectives counted by the ring "
        "algorithms, servers by what went over the socket or through shared memory. States: "
        "parameters, gradients and optimizer's state of the worker that holds most; those that "
        "parameter servers hold are not in it. Apart: how far the workers' weights are from their "
        "mean at the end, relative to it.",
        f"Made as `benchmarks/families.py` says, at {counted(revisions, 'revision')} of the code "
        "(families-mnist.csv names them). "
        "Times are left out: the machine was busy with other work.",
    ]
    counts = Counter((r["experiment"], r["strategy"]) for r in rows)
    if min(counts.values()) < REPEATS:
        lines += [
            "",
            "The study was stopped before its end, on a machine with much else to do: strategies are "
            "absent or have fewer than three repeats, and one repeat says little of an accuracy. Bytes "
            "and states are exact all the same.",
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
    table = args.out / "families-mnist.csv"
    found = {place(row): row for row in kept_rows(table)}
    for path in sorted((args.study / "cells").rglob("record.json")):
        row = row_of(records.read(path))
        found[place(row)] = row
    rows = sorted(found.values(), key=place)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (args.out / "families-mnist.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
