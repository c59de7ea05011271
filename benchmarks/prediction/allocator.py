"""Compares the plan's memory with PyTorch's own CUDA allocator, on a CUDA runtime in software.

    export PYTHONPATH=workflow
    .venv-gpu-path/bin/python benchmarks/prediction/allocator.py          the whole matrix, hours on two cores
    .venv-gpu-path/bin/python benchmarks/prediction/allocator.py --models resnet50 --out results/resnet50

It needs the environment of `make test-gpu-path`: PyTorch's CUDA build on the software GPU. Host code and
allocator are real and no kernel runs, so there are no workspaces of cuDNN and no buffers of NCCL. Each case
is a fresh process that trains a few steps as worker 0 of a cell; the peak is what the cell's record would
hold. Other workers are not there: their collectives return at once (`SOFTWARE_GPU_NCCL_SOLO`). Writes
allocator.csv and .md of the cases that were asked for, to benchmarks/results unless `--out` says
otherwise. What was measured is kept, and not measured again; the plan is made anew when its code has changed.
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
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "gpu"), str(REPOSITORY / "workflow")]

from stratbench.cell.files import read_json, write_text_atomically  # noqa: E402
from stratbench.cell.text.words import MIB  # noqa: E402
from stratbench.extensions.plan.against_records import get_measured_peak_bytes  # noqa: E402
from stratbench.extensions.plan.check import dry_run_requests  # noqa: E402
from stratbench.extensions.plan.device_rates import find_gpu_datasheet  # noqa: E402
from stratbench.extensions.plan.footprint.request import Request, compute_data_bytes  # noqa: E402
from stratbench.strategies import get_strategy_class  # noqa: E402
from stratbench.workload.data.datasets import make_dataset_metadata  # noqa: E402
from stratbench.workload.data.prepare import prepare_data_set  # noqa: E402

#: Enough for what comes with the second step.
STEPS = 3
#: Samples a worker; a text has 256 tokens.
BATCHES = {
    "densenet121": 32,
    "resnet50": 32,
    "vit_b_16": 32,
    "vgg16": 32,
    "gpt2-small": 8,
    "convnext_large": 16,
    "efficientnet_v2_l": 16,
}
STRATEGIES = ("single", "ddp", "zero1", "fsdp", "ps-sync")
IMAGES = {"source": "synthetic", "train_samples": 512, "test_samples": 32}
TEXTS = {
    "source": "markov-text", "train_samples": 128, "test_samples": 8, "vocabulary": 50257,
    "sequence": 256,
}  # fmt: skip
#: Columns of the Markdown table and what they are called there.
SHOWN = {
    "model": "network",
    "strategy": "strategy",
    "precision": "precision",
    "gpus": "workers",
    "plan_mib": "plan, MiB",
    "requested_mib": "requested, MiB",
    "error_percent": "error, %",
    "cublas_mib": "cuBLAS, MiB",
    "allocated_mib": "allocated, MiB",
    "reserved_mib": "reserved, MiB",
}


@dataclass(frozen=True)
class Case:
    """Worker 0 of a cell: its network and strategy, and how many workers there are."""

    model: str
    strategy: str
    precision: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.strategy}-{self.precision}-{self.gpus}"

    @property
    def spec(self) -> dict[str, Any]:
        """Of its data set."""
        return TEXTS if self.model.startswith("gpt") else IMAGES


def cases_of(args: argparse.Namespace) -> Iterator[Case]:
    """Those that differ: one process has no others, and a server's worker does the same beside any number."""
    for model, strategy, precision, gpus in product(
        args.models, args.strategies, args.precisions, args.workers
    ):
        alone = strategy == "single" or get_strategy_class(strategy).kind == "server"
        if gpus == 1 or not alone:
            yield Case(model, strategy, precision, gpus)


def settings_of(case: Case) -> Any:
    from subject import settings

    return settings(
        case.strategy, "cuda", model=case.model, gpus=case.gpus, precision=case.precision,
        per_worker_batch=BATCHES[case.model], epochs=None, steps=STEPS, warmup_steps=2,
    )  # fmt: skip


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """What the record of worker 0 would say of memory, from a training in this process."""
    import torch

    from stratbench.telemetry.provenance import collect_worker_provenance
    from stratbench.train.worker import train_as_worker
    from subject import job_of, served

    data = folder / f"data-{case.spec['source']}"
    prepare_data_set("data", data, spec=case.spec)
    with tempfile.TemporaryDirectory() as run:
        job = job_of(settings_of(case), data, Path(run))
        with served(job) if get_strategy_class(case.strategy).kind == "server" else nullcontext():
            result = train_as_worker(job, 0, 0)
    assert result["steps"] == STEPS
    gpu = collect_worker_provenance(torch.device("cuda", 0))["gpu"]["name"]
    kept = {key: result[key] for key in ("memory", "model_states")}
    return kept | {"gpu": gpu, "torch": torch.__version__}


def measured(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The same from a process of its own, or what was kept of an earlier one."""
    path = folder / "measured" / f"{case.name}.json"
    if not path.exists():
        case_json = json.dumps(asdict(case))
        done = subprocess.run(
            [sys.executable, __file__, "--folder", str(folder), "--case", case_json],
            env=os.environ | {"SOFTWARE_GPU_NCCL_SOLO": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if not path.exists():
            raise RuntimeError(f"{case.name}: no figures:\n{(done.stdout + done.stderr)[-3000:]}")
    return read_json(path)


def row_of(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The case's row of the table."""
    found = measured(case, folder, timeout_s)
    s, data = settings_of(case), make_dataset_metadata("data", case.spec)
    request = Request.from_settings(s, data, on_cuda=True, workers_per_node=case.gpus)
    _, made = dry_run_requests([request], folder / "plan-cache")
    if (footprint := made[request].footprint) is None:
        raise RuntimeError(f"{case.name}: {made[request].fault}")
    gpu = find_gpu_datasheet(found["gpu"])
    peak = footprint.compute_training_peak(s.per_worker_batch, gpu.resident_threads)
    plan_bytes = peak.n_bytes + compute_data_bytes(data, request.input_shape, s.augment)
    used = found["memory"]
    requested_bytes = get_measured_peak_bytes(used, 0)
    return asdict(case) | {
        "per_worker_batch": s.per_worker_batch,
        "gpu": found["gpu"],
        "torch": found["torch"],
        "plan_mib": mib(plan_bytes),
        "requested_mib": mib(requested_bytes),
        "error_percent": round(100 * (plan_bytes / requested_bytes - 1), 2),
        "cublas_mib": mib(used["cublas_bytes"]),
        "allocated_mib": mib(used["allocated_peak_bytes"]),
        "reserved_mib": mib(used["reserved_peak_bytes"]),
        "states_equal": found["model_states"] == footprint.model_states_bytes,
        "phase": peak.phase,
    }


def mib(n_bytes: int) -> float:
    return round(n_bytes / MIB, 2)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, and the distribution of its errors."""
    gpus, versions = ({r[key] for r in rows} for key in ("gpu", "torch"))
    equal = sum(r["states_equal"] for r in rows)
    lines = [
        "# The plan beside PyTorch's CUDA allocator",
        "",
        f"PyTorch {', '.join(sorted(versions))} and its own CUDA caching allocator on a CUDA runtime in "
        f"software ({', '.join(sorted(gpus))}): no kernel was run, cuDNN had no workspaces, NCCL no buffers, "
        "and other workers were not there. Not a measurement on a GPU: it shows whether the plan knows what "
        "PyTorch asks its allocator for.",
        "",
        f"Worker 0, {STEPS} steps; images of 32x32 pixels, texts of {TEXTS['sequence']} of "
        f"{TEXTS['vocabulary']} tokens. \"requested\": the peak of what was asked of the allocator, less "
        "cuBLAS's workspaces; \"allocated\": the peak of whole blocks, cuBLAS's among them; error: the plan "
        f"against requested. Model states are the plan's, byte for byte, in {equal} of {len(rows)} cases.",
        "",
        "| network | cases | median error, % | worst, % |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name in ("", *dict.fromkeys(r["model"] for r in rows)):
        errors = [r["error_percent"] for r in rows if name in ("", r["model"])]
        middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
        lines.append(f"| {name or 'all'} | {len(errors)} | {middle:.2f} | {worst:+.2f} |")
    lines += ["", "| " + " | ".join(SHOWN.values()) + " |", "|" + "---|" * len(SHOWN)]
    lines += ["| " + " | ".join(str(r[column]) for column in SHOWN) + " |" for r in rows]
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]], out: Path) -> None:
    with (out / "allocator.csv").open("w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "allocator.md").write_text(markdown(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one case")
    parser.add_argument(
        "--out", type=Path, default=BENCHMARKS / "results", help="folder of the tables"
    )
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "results" / "allocator", help="what is kept"
    )
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = Case(**args.case)
        text = json.dumps(measure(case, args.folder))
        write_text_atomically(args.folder / "measured" / f"{case.name}.json", text)
        sys.stdout.flush()
        os._exit(0)  # as a worker ends: an orderly shutdown of NCCL would wait for the others
    rows, cases = [], list(cases_of(args))
    for i, case in enumerate(cases, 1):
        began_s = time.monotonic()
        try:
            rows.append(row_of(case, args.folder, args.timeout_s))
        except Exception:
            traceback.print_exc()
            continue
        took_s = time.monotonic() - began_s
        error = rows[-1]["error_percent"]
        print(f"{i} of {len(cases)}: {case.name}: {error:+.2f} %, {took_s:.0f} s", flush=True)
    if not rows:
        sys.exit("no case was measured")
    args.out.mkdir(parents=True, exist_ok=True)
    write(rows, args.out)
    print(markdown(rows))


if __name__ == "__main__":
    main()
