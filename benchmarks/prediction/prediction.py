"""Trains cells on this host's CPU and compares what the plan predicted with what was measured.

    export PYTHONPATH=workflow
    python benchmarks/prediction/prediction.py                            the whole matrix, about 20 minutes
    python benchmarks/prediction/prediction.py --models resnet50 --strategies ddp --workers 2

Every cell is trained by the real launcher, on synthetic images of 32x32 pixels. Writes
benchmarks/results/prediction.csv and .md. Memory does not depend on what else the host does.

glibc's allocator keeps much of what is freed, so the high-water mark of a process is above what was in
use at any time. By default each cell is trained twice: with the allocator told to give memory back at
once (`returning`), which shows whether the prediction is right, and as it is (`default`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

WORKFLOW = Path(__file__).parents[2] / "workflow"
sys.path.insert(0, str(WORKFLOW))

from stratbench.extensions.plan.against_records import make_prediction_rows  # noqa: E402
from stratbench.extensions.plan.check import check_study  # noqa: E402
from stratbench.extensions.plan.pages.table import write_csv_rows  # noqa: E402
from stratbench.extensions.plan.schedule import make_plan, read_records_by_cell  # noqa: E402
from stratbench.study.config import config as configuration  # noqa: E402
from stratbench.workload.data.prepare import prepare_data_set  # noqa: E402

OUT = Path(__file__).parents[1] / "results"
#: So many that PowerSGD feeds errors back in the last (see VARIANTS).
STEPS = 4
#: glibc's tunables (mallopt(3)): every tensor that matters is a mapping of its own.
ALLOCATORS = {
    "returning": {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_TOP_PAD_": "0",
    },
    "default": {},
}
#: Samples a worker: enough for activations to matter, few enough for a step to take seconds.
BATCHES = {
    "vgg16": 32,
    "resnet50": 64,
    "convnext_large": 16,
    "efficientnet_v2_l": 16,
    "densenet121": 64,
}
VARIANTS = {
    "ddp-copies": {"strategy": "ddp", "gradient_as_bucket_view": False},
    "fsdp-zero2": {"strategy": "fsdp", "reshard_after_forward": "never"},
    "fsdp-pairs": {"strategy": "fsdp", "shard_group_size": 2},
    "fsdp-replicas": {"strategy": "fsdp", "shard_group_size": 1},
    "fsdp-offload": {"strategy": "fsdp", "offload": "cpu"},
    "ddp-fp16": {"strategy": "ddp", "compress": "fp16"},
    "ddp-bf16": {"strategy": "ddp", "compress": "bf16"},
    "ddp-powersgd": {"strategy": "ddp", "compress": "powersgd", "powersgd_start_step": 2},
    "post-local": {"strategy": "local-sgd", "start": 2},
    "ps-sync-tcp": {"strategy": "ps-sync", "transport": "tcp"},
    "sync-colocated": {"strategy": "ps-sync", "server_placement": "colocated"},
}
STRATEGIES = ("single", "ddp", "ddp-copies", "fsdp", "fsdp-zero2", "ps-sync", "ps-sync-tcp")
#: Columns of the Markdown table and what they are called there.
SHOWN = {
    "allocator": "allocator",
    "strategy": "strategy",
    "model": "model",
    "gpus": "workers",
    "precision": "precision",
    "peak_mib_measured": "peak measured, MiB",
    "peak_mib_predicted": "predicted, MiB",
    "peak_error_percent": "error, %",
    "over_base_error_percent": "of what a step adds, %",
    "states_error_percent": "model states, %",
    "sent_error_percent": "bytes sent, %",
}


def study_config(
    model: str, strategies: list[str], workers: list[int], precision: str, results: Path
) -> dict[str, Any]:
    """A study of one model with a data set just large enough for the steps."""
    batch, most = BATCHES[model], max(workers)
    images = {"source": "synthetic", "train_samples": STEPS * batch * most, "test_samples": 32}
    return {
        "study": f"{model}-{precision}",
        "results": str(results),
        "datasets": {"images": images},
        "studies": {
            f"{model}-{precision}": {
                "variants": {k: v for k, v in VARIANTS.items() if k in strategies},
                "experiments": {
                    "prediction": {
                        "dataset": "images",
                        "strategies": strategies,
                        "models": [model],
                        "gpus": workers,
                        "epochs": 1,
                        "per_worker_batch": batch,
                        "lr": 1e-4,
                        "precision": precision,
                        "warmup_steps": 2,
                        "device": "cpu",
                        "threads": 1,
                    }
                },
            }
        },
    }


def train(
    study: configuration.Study, config: dict[str, Any], allocator: str, timeout_s: float
) -> None:
    """Train every cell that has no record yet."""
    results = Path(config["results"])
    folder = results / "data" / "images"
    prepare_data_set("images", folder, spec=config["datasets"]["images"])
    for cell in study.cells:
        record = cell.record_path(results)
        if record.exists():
            continue
        command = [
            sys.executable, "-m", "stratbench.train.launch",
            "--cell", json.dumps(cell.as_dict()),
            "--settings", study.settings(cell).as_json(),
            "--data", str(folder),
            "--record", str(record),
            "--timeline", str(record.with_name("timeline.csv")),
            "--logs", str(cell.log_dir(results)),
            "--time-limit-s", str(timeout_s),
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env=os.environ | ALLOCATORS[allocator] | {"PYTHONPATH": str(WORKFLOW)},
            capture_output=True,
            text=True,
            timeout=timeout_s + 60,
        )
        end = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()]
        print(end[0], flush=True)


def markdown(rows: list[dict[str, Any]], steps: set[int]) -> str:
    """The table with the distribution of its errors; `steps`: how many the cells trained."""
    import torch

    lines = [
        f"torch {torch.__version__}, {platform.system()} {platform.machine()}, CPU with gloo; "
        f"synthetic images of 32x32 pixels, {' or '.join(map(str, sorted(steps)))} steps; "
        "error: predicted against measured.",
        "",
        "| allocator | strategies | cells | median error, % | worst, % |",
        "|---|---|---|---|---|",
    ]
    for allocator in ALLOCATORS:
        mine = [r for r in rows if r["allocator"] == allocator]
        for name in ("", *dict.fromkeys(map(base_of, mine))):
            errors = [r["peak_error_percent"] for r in mine if name in ("", base_of(r))]
            if errors:
                median = statistics.median(map(abs, errors))
                worst = max(errors, key=abs)
                lines.append(
                    f"| {allocator} | {name or 'all'} | {len(errors)} | {median:.1f} | {worst:+.1f} |"
                )
    lines += ["", "| " + " | ".join(SHOWN.values()) + " |", "|" + "---|" * len(SHOWN)]
    order = ("allocator", "model", "precision", "strategy", "gpus")
    for r in sorted(rows, key=lambda r: [r[column] for column in order]):
        lines.append("| " + " | ".join(_shown(r[column]) for column in SHOWN) + " |")
    return "\n".join(lines) + "\n"


def base_of(row: dict[str, Any]) -> str:
    """The strategy that a row's is a variant of."""
    return VARIANTS.get(row["strategy"], row)["strategy"]


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg16", "convnext_large"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--results", type=Path, help="kept between runs; else a temporary folder")
    parser.add_argument("--timeout-s", type=float, default=600, help="of one cell")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the two tables")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows, steps = [], set()
        for model, precision, allocator in product(args.models, args.precisions, args.allocators):
            results = (args.results or Path(scratch)) / f"{model}-{precision}-{allocator}"
            config, study = configuration.load_config(
                study_config(model, args.strategies, args.workers, precision, results)
            )
            train(study, config, allocator, args.timeout_s)
            records = read_records_by_cell(study, config["results"])
            plan = make_plan(config, check_study(config, study), records)
            steps |= {record["batch"]["steps_per_epoch"] for record in records.values()}
            compared = make_prediction_rows(plan, records)
            rows += [{"allocator": allocator} | row for row in compared]
        args.out.mkdir(parents=True, exist_ok=True)
        write_csv_rows(rows, args.out / "prediction.csv")
        (args.out / "prediction.md").write_text(markdown(rows, steps), encoding="utf-8")
        print(markdown(rows, steps))


if __name__ == "__main__":
    main()
