"""Measures how much one slow worker among four slows down each strategy, with real processes.

    STRATBENCH_DATA=... PYTHONPATH=workflow python benchmarks/speed/straggler.py --dataset mnist

Trains a compact model under ps-sync, ps-async, ps-dana and ps-ormo in turn, with `--optimizer adamw` under
ps-sync, ps-preview, ps-kbatch and ps-async at 1/N, `--rounds` times, with worker 0 slowed by `--factor`, each
cell through the launcher as the workflow does it. Writes a CSV and a Markdown table of throughput ratios
(paired by round) and scores. The workers share this machine's cores; only ratios mean anything.

    head -c 480000 .../tinyshakespeare/input.txt > shakespeare-480k.txt
    PYTHONPATH=workflow python benchmarks/speed/straggler.py --text shakespeare-480k.txt \\
        --model gpt-compact --optimizer adamw --lr 0.001 --batch 32 --epochs 1 --rounds 2
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from stratbench.cell.coordinates import Cell
from stratbench.study.config.config import load_config
from stratbench.workload.data.prepare import prepare_data_set

#: By optimizer: what is compared, and what else the experiment says.
STRATEGIES = {
    "sgd": ("ps-sync", "ps-async", "ps-dana", "ps-ormo"),
    "adamw": ("ps-sync", "ps-preview", "ps-kbatch", "async-scaled"),
}
RECIPES = {
    "sgd": {},
    "adamw": {
        "optimizer": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.1, "schedule": "cosine",
        "lr_warmup_steps": 25,
    },
}  # fmt: skip


def study(args: argparse.Namespace) -> dict:
    slowdown = {"workers": [0], "factor": args.factor} if args.factor > 1 else None
    return {
        "study": "straggler",
        "datasets": {args.dataset: {"text": str(args.text), "sequence": 32}} if args.text else {},
        "studies": {
            "straggler": {
                "repeats": args.rounds,
                "variants": {"async-scaled": {"strategy": "ps-async", "lr_scale": "1/N"}},
                "experiments": {
                    "straggler": {
                        "dataset": args.dataset, "strategies": list(args.strategies), "models": [args.model],
                        "gpus": [args.workers], "epochs": args.epochs, "global_batch": args.batch,
                        "lr": args.lr, "device": "cpu", "threads": 1, "slowdown": slowdown,
                        **RECIPES[args.optimizer],
                    }
                },
            }
        },
    }  # fmt: skip


def train(cell: Cell, settings: str, data: Path, folder: Path) -> dict:
    """Run one cell as the workflow does; its record."""
    record = cell.record_path(folder)
    command = [
        sys.executable, "-m", "stratbench.train.launch", "--cell", json.dumps(cell.as_dict()),
        "--settings", settings, "--data", str(data), "--record", str(record),
        "--timeline", str(record.with_name("timeline.csv")), "--logs", str(cell.log_dir(folder)),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(record.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="digits", help="digits, mnist or cifar10")
    parser.add_argument("--model", default="vgg-compact", help="a compact model")
    parser.add_argument("--workers", type=int, default=4, help="workers; the first one is slow")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times slower; 1: not")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of a cell")
    parser.add_argument("--batch", type=int, default=64, help="global batch")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate")
    parser.add_argument("--optimizer", choices=list(STRATEGIES), default="sgd")
    parser.add_argument("--strategies", nargs="*", help="the optimizer's unless they are named")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, one seed each")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--text", type=Path, help="a text to train on in the place of --dataset")
    args = parser.parse_args()
    args.dataset = args.text.stem if args.text else args.dataset
    args.strategies = args.strategies or STRATEGIES[args.optimizer]
    config, chosen = load_config(study(args))
    rows = kept(args) if args.resume else []
    done = {(row["round"], row["strategy"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="straggler-") as temporary:
        folder = Path(temporary)
        prepare_data_set(args.dataset, folder / "data", spec=config["datasets"].get(args.dataset))
        for cell in sorted(
            chosen.cells, key=lambda c: (c.repeat, args.strategies.index(c.strategy))
        ):
            if (cell.repeat, cell.strategy) in done:
                continue
            settings = chosen.settings(cell).as_json()
            record = train(cell, settings, folder / "data", folder)
            [server] = record["server"]["servers"]
            rows.append(
                {
                    "round": cell.repeat,
                    "strategy": cell.strategy,
                    "train_time_s": record["time"]["train_time_s"],
                    "throughput_samples_per_s": record["time"]["throughput_samples_per_s"],
                    record["task"]["score"]: record["score"]["final"],
                    "slow_workers_tickets": server["workers"][0]["tickets"],
                    "load_1m": os.getloadavg()[0],
                }
            )
            print(rows[-1], flush=True)
            write(rows, args)  # what is trained is not lost when this is stopped
    print(write(rows, args))


def result(args: argparse.Namespace, ending: str) -> Path:
    """The file of a run's results."""
    few = "" if args.workers == 4 else f"-{args.workers}-workers"
    few += "" if args.optimizer == "sgd" else f"-{args.optimizer}"
    return args.out / f"straggler-{args.dataset}-x{args.factor:g}{few}.{ending}"


def kept(args: argparse.Namespace) -> list[dict]:
    """The rows of an earlier run."""
    with result(args, "csv").open(newline="", encoding="utf-8") as file:
        return [
            {
                key: value if key == "strategy" else json.loads(value or "null")
                for key, value in row.items()
            }
            for row in csv.DictReader(file)
        ]


def write(rows: list[dict], args: argparse.Namespace) -> str:
    """Write the CSV and the page; returns the page."""
    args.out.mkdir(exist_ok=True)
    with result(args, "csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    text = table(rows, args)
    result(args, "md").write_text(text, encoding="utf-8")
    return text


def table(rows: list[dict], args: argparse.Namespace) -> str:
    def of(strategy: str, key: str) -> list[float]:
        return [row[key] for row in rows if row["strategy"] == strategy]

    def ratio(strategy: str, to: str) -> float:
        pairs = zip(
            of(strategy, "throughput_samples_per_s"),
            of(to, "throughput_samples_per_s"),
            strict=False,  # a run that was stopped has a round less of the last ones
        )
        return statistics.median(a / b for a, b in pairs)

    present = [s for s in args.strategies if of(s, "round")]
    first, second = (present * 2)[:2]
    score = "loss" if "loss" in rows[0] else "accuracy"
    lines = [
        f"# {args.workers} workers on {args.dataset}, worker 0 slowed {args.factor:g}x",
        "",
        f"{args.model}, {args.optimizer}, {args.epochs} epochs, global batch {args.batch}, lr {args.lr}, "
        f"{args.rounds} interleaved rounds; real processes on {os.cpu_count()} cores. Medians of ratios "
        "paired by round.",
        "",
        f"| strategy | throughput / {first} | throughput / {second} | {score}, mean | time, median s |",
        "|---|---|---|---|---|",
    ]
    for s in present:
        lines.append(
            f"| {s} | {ratio(s, first):.2f} | {ratio(s, second):.2f} | "
            f"{scores(of(s, score), score)} | {statistics.median(of(s, 'train_time_s')):.1f} |"
        )
    return "\n".join(lines) + "\n"


def scores(values: list[float | None], name: str) -> str:
    """The mean, and how many runs diverged."""
    known = [value for value in values if value is not None]
    spec = ".3f" if name == "loss" else ".2%"
    mean = format(statistics.mean(known), spec) if known else "–"
    diverged = len(values) - len(known)
    return f"{mean} ({diverged} of {len(values)} diverged)" if diverged else mean


if __name__ == "__main__":
    main()
