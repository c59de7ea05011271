"""Holds the plan's verdict to public sweeps: what it says of configurations that ran or ran out of memory.

    PYTHONPATH=workflow python benchmarks/prediction/public_sweeps.py FILE.csv

FILE.csv has a row for each configuration of a sweep: `sweep` (its name), `strategy`, `dp`, `tp`, `pp`, `cp`,
`micro_batch`, `precision`, `weights`, `checkpointing`, `compile`, `offload` and `outcome` (ok or oom). Models
and GPUs of known sweeps are below. Rows that a config cannot say are left out: division of layers, experts
or texts (an own network has no sequence parallelism), `compile`, other number formats, a part of the blocks
checkpointed, and GPUs whose memory is not stated. Prints benchmarks/results/public-sweeps.md and takes about
five CPU-minutes in one process.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "workflow")]

from public_plans import Planner  # noqa: E402

from stratbench.cell.text.words import GIB  # noqa: E402
from stratbench.plan.device_rates import find_gpu  # noqa: E402
from stratbench.plan.schedule import DOES_NOT_FIT, FITS, TIGHT, Planned  # noqa: E402


def llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict:
    """Return the model of a config.yaml for a Llama of these sizes."""
    sizes = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
    }
    return {
        "call": "public_networks.Llama",
        "kwargs": sizes | more,
        "shard": ["LlamaBlock"],
    }


def gpt(layers: int, width: int, heads: int) -> dict:
    """Return the model of a config.yaml for a GPT of these sizes."""
    sizes = {"layers": layers, "width": width, "heads": heads, "bias": True}
    return {"call": "public_networks.GPT", "kwargs": sizes, "shard": ["GPTBlock"]}


MODELS = {
    "qwen3-0.6b": llama(28, 1024, 16, 8, 3072, head_size=128, tied=True),
    "qwen2.5-7b": llama(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": llama(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": llama(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": llama(80, 8192, 64, 8, 29568),
    "llama-13b-gqa": llama(40, 5120, 40, 8, 17920),
    "llama2-7b": llama(32, 4096, 32, 32, 11008),
    "llama2-13b": llama(40, 5120, 40, 40, 13824),
    "llama2-70b": llama(80, 8192, 64, 8, 28672),
    "llama3-8b": llama(32, 4096, 32, 8, 14336),
    "gpt2-large": gpt(36, 1280, 20),
    "enoki-28": gpt(21, 1792, 28),
    "enoki-32": gpt(24, 2048, 32),
    "enoki-40": gpt(30, 2560, 40),
    "enoki-44": gpt(33, 2816, 44),
    "enoki-48": gpt(36, 3072, 48),
}
MODELS |= {
    f"{name}-selective": model | {"kwargs": model["kwargs"] | {"selective": True}}
    for name, model in MODELS.items()
    if model["call"] == "public_networks.Llama"
}
# Sweeps by the beginning of their name: model, vocabulary, tokens per sample, GPU, GPUs per node, precision
# where the row states none. Sizes of enoki follow from its parameters.
SWEEPS = {
    "4090nop2p-qwen06b-x2": ("qwen3-0.6b", 151936, 512, "RTX 4090", 8, "bf16"),
    "h100blog-gpt2large-x1": ("gpt2-large", 50257, 1024, "H100 80GB HBM3", 8, "tf32"),
    "idris-qwen14b-a100": ("qwen2.5-14b", 152064, 4096, "A100-SXM4-80GB", 8, "bf16"),
    "idris-qwen14b-h100": ("qwen2.5-14b", 152064, 4096, "H100 80GB HBM3", 4, "bf16"),
    "idris-qwen14b-dalia": ("qwen2.5-14b", 152064, 4096, "GB200", 64, "bf16"),
    "idris-qwen32b-h100": ("qwen2.5-32b", 152064, 4096, "H100 80GB HBM3", 4, "bf16"),
    "idris-qwen32b-dalia": ("qwen2.5-32b", 152064, 4096, "GB200", 64, "bf16"),
    "idris-qwen72b-a100": ("qwen2.5-72b", 152064, 4096, "A100-SXM4-80GB", 8, "bf16"),
    "idris-qwen72b-h100": ("qwen2.5-72b", 152064, 4096, "H100 80GB HBM3", 4, "bf16"),
    "idrispar-qwen7b-a100": ("qwen2.5-7b", 152064, 4096, "A100-SXM4-80GB", 8, "bf16"),
    "idrispar-qwen7b-h100": ("qwen2.5-7b", 152064, 4096, "H100 80GB HBM3", 4, "bf16"),
    "kempner-13b": ("llama-13b-gqa", 128256, 4096, "H200", 4, "bf16"),
    "rorqual-enoki28": ("enoki-28", 50304, 2048, "H100 80GB HBM3", 4, "bf16"),
    "rorqual-enoki32": ("enoki-32", 50304, 2048, "H100 80GB HBM3", 4, "bf16"),
    "rorqual-enoki40": ("enoki-40", 50304, 2048, "H100 80GB HBM3", 4, "bf16"),
    "rorqual-enoki44": ("enoki-44", 50304, 2048, "H100 80GB HBM3", 4, "bf16"),
    "rorqual-enoki48": ("enoki-48", 50304, 2048, "H100 80GB HBM3", 4, "bf16"),
    "titan-llama2-13b": ("llama2-13b", 32000, 4096, "A100-SXM4-80GB", 8, "bf16"),
    "titan-llama2-70b": ("llama2-70b", 32000, 4096, "A100-SXM4-80GB", 8, "bf16"),
    "titan-llama3-8b": ("llama3-8b", 128256, 8192, "A100-SXM4-80GB", 8, "bf16"),
    "titan-llama8b": ("llama3-8b", 128256, 8192, "H100 96GB", 8, "bf16"),
    "internevo-7b": ("llama2-7b", 103168, 2048, "A100-SXM4-80GB", 8, "bf16"),
}
#: How a row's checkpointing is said; others, of some of the blocks, are not.
CHECKPOINTING = {
    "": False,
    "none": False,
    "none (default)": False,
    "full": True,
    "yes": True,
    "selective op": "selective",
}
#: Sources of sweeps, by the beginning of their names.
SOURCES = (
    "4090nop2p",
    "h100blog",
    "idrispar",
    "idris",
    "internevo",
    "kempner",
    "rorqual",
    "titan",
)


@dataclass(frozen=True)
class Run:
    """A configuration of a sweep: what is planned of it, and whether it ran."""

    sweep: str
    configuration: Mapping[str, Any]
    ran: bool

    @property
    def source(self) -> str:
        """Where it was published."""
        return next(source for source in SOURCES if self.sweep.startswith(source))


def read_runs(path: Path) -> list[Run]:
    """Return the runs that a config can say, each configuration once."""
    with path.open(encoding="utf-8", newline="") as file:
        runs = {str(run): run for run in _runs(csv.DictReader(file))}
    return list(runs.values())


def _runs(rows: Iterator[Mapping[str, str]]) -> Iterator[Run]:
    for row in rows:
        known = max((s for s in SWEEPS if row["sweep"].startswith(s)), key=len, default=None)
        if known is None or row["outcome"] not in ("ok", "oom") or row["compile"].startswith("yes"):
            continue
        configuration = _configuration(row, *SWEEPS[known])
        if configuration is not None:
            yield Run(row["sweep"], configuration, row["outcome"] == "ok")


def _configuration(
    row: Mapping[str, str],
    model: str,
    vocabulary: int,
    sequence: int,
    gpu: str,
    node: int,
    precision: str,
) -> dict[str, Any] | None:
    """Return the parts of a config.yaml that say this row; None where none can."""
    dp, tp, pp, cp = (int(row[axis] or 1) for axis in ("dp", "tp", "pp", "cp"))
    checkpointing = CHECKPOINTING.get(row["checkpointing"])
    formats = row["precision"] + row["weights"]
    if max(tp, pp, cp) > 1 or "ep" in row["strategy"].split("+") or checkpointing is None:
        return None
    if "float8" in formats or "nf4" in formats or not row["micro_batch"]:
        return None
    if checkpointing == "selective":
        if MODELS[model]["call"] != "public_networks.Llama":
            return None
        model, checkpointing = f"{model}-selective", False
    precision = next((p for p in ("fp16", "bf16") if p in row["precision"]), precision)
    variant = _variant(row["strategy"], dp)
    if variant is None:
        return None
    if variant["strategy"] == "fsdp" and precision in ("bf16", "fp16"):
        variant["mixed_precision"] = "policy"
    if variant["strategy"] == "fsdp" and row["offload"] and precision != "fp16":
        variant["offload"] = "cpu"
    experiment = {
        "gpus": dp,
        "global_batch": int(row["micro_batch"]) * dp,
        "optimizer": "adamw",
        "precision": precision,
        "activation_checkpointing": checkpointing,
    }
    return {
        "model": model,
        "data": {"sequence": sequence, "vocabulary": vocabulary},
        "variant": variant,
        "experiment": experiment,
        "cluster": {"gpu": gpu, "gpus_per_node": node},
    }


def _variant(strategy: str, gpus: int) -> dict[str, Any] | None:
    """Return the strategy and its options that train as `strategy` of a sweep does; None: none does."""
    if gpus == 1:
        return {"strategy": "single"}
    if strategy in ("ddp", "zero0"):
        return {"strategy": "ddp"}
    if strategy.startswith(("zero1", "internevo zero1")):
        return {"strategy": "zero1"}
    if strategy in ("zero2", "fsdp1-grad-op"):
        return {"strategy": "fsdp", "reshard_after_forward": "never"}
    if strategy.startswith(("zero3", "fsdp")):
        return {"strategy": "fsdp"}
    return None


def source_rows(planned: list[tuple[Run, Planned]]) -> Iterator[str]:
    """Yield the table of verdicts by source."""
    for source in (*SOURCES, "all"):
        mine = [(run.ran, p.fit.verdict) for run, p in planned if source in (run.source, "all")]
        if mine:
            cells = (
                mine.count((ran, v)) for ran in (True, False) for v in (FITS, TIGHT, DOES_NOT_FIT)
            )
            yield f"| {source} | {' | '.join(map(str, cells))} |"


def unfit_rows(planned: list[tuple[Run, Planned]]) -> Iterator[str]:
    """Yield a line for each configuration that ran although the plan says that it does not fit."""
    for run, p in planned:
        if run.ran and p.fit.verdict == DOES_NOT_FIT:
            c, needed_gib = run.configuration, p.fit.needed_bytes / GIB
            variant, experiment = c["variant"]["strategy"], c["experiment"]
            each = experiment["global_batch"] // experiment["gpus"]
            share = 100 * needed_gib / find_gpu(c["cluster"]["gpu"]).memory_gib
            yield (
                f"| {run.sweep} | {variant} | {each} | {experiment['activation_checkpointing']} | "
                f"{needed_gib:.1f} | {share:.0f} |"
            )


PAGE = """# The plan's verdict beside public sweeps

`PYTHONPATH=workflow python benchmarks/prediction/public_sweeps.py FILE.csv`

{count} configurations that a config can say. The limits are 81 % of the GPU's memory (`fits`) and 103 %
(`tight`).

| source | ran: fits | tight | does not fit | out of memory: fits | tight | does not fit |
|---|---|---|---|---|---|---|
{sources}

Configurations that ran and are said not to fit:

| sweep | strategy | samples per GPU | checkpointing | need, GiB | % of the GPU |
|---|---|---|---|---|---|
{unfit}
"""


def main() -> None:
    """Plan all runs of the file and print the page."""
    planner, planned = Planner(MODELS), []
    for run in read_runs(Path(sys.argv[1])):
        planned.append((run, planner.plan(run.configuration)))
        if planned[-1][1].fit is None:
            raise SystemExit(f"{run.sweep}: is not predicted: {planned[-1][1].why}")
    sources, unfit = "\n".join(source_rows(planned)), "\n".join(unfit_rows(planned))
    print(PAGE.format(count=len(planned), sources=sources, unfit=unfit), end="")


if __name__ == "__main__":
    main()
