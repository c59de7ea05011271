"""Rows of public sweeps as parts of a config.yaml: networks, GPUs, links and settings of known sweeps.

A row has `sweep` (its name), `strategy`, `dp`, `tp`, `pp`, `cp`, `micro_batch`, `accumulate` (micro-batches
of a step), `precision`, `weights`, `checkpointing`, `compile`, `offload`, `outcome` (ok or oom), `throughput`
and `step_s`. Rows that a config cannot say are left out: context or expert parallelism, layers divided both
ways, LoRA, other number formats, and batches that the source does not state.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.tune.differences import SELECTIVE_SHARE


def llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict:
    """Return the model of a config.yaml for a Llama of these sizes."""
    sizes = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
    }
    divided = {"num_heads": kv_heads, "tensor_plan": "public_networks:LLAMA_TENSOR_PLAN"}
    own = {"call": "public_networks.Llama", "kwargs": sizes | more, "wrap_classes": ["LlamaBlock"]}
    return own if "tied" in more else own | divided


def gpt(layers: int, width: int, heads: int, **more: Any) -> dict:
    """Return the model of a config.yaml for a GPT of these sizes."""
    sizes = {"layers": layers, "width": width, "heads": heads, "bias": True}
    own = {"call": "public_networks.GPT", "kwargs": sizes | more, "wrap_classes": ["GPTBlock"]}
    divided = {
        "num_heads": heads,
        "tensor_plan": "public_networks:GPT_TENSOR_PLAN",
        "pipeline_modules": "public_networks:GPT_PIECES",
    }
    return own | divided if more else own


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
    "gpt2": gpt(12, 768, 12),
    "gpt2-medium": gpt(24, 1024, 16),
    "gpt2-large": gpt(36, 1280, 20),
    "gpt2-xl": gpt(48, 1600, 25),
    "distilbert": gpt(6, 768, 12),
    "deberta": gpt(48, 1536, 24),
    "gpt3-xl-24": gpt(24, 2048, 16, separate=True),
    "gpt3-xl-32": gpt(32, 2048, 16, separate=True),
    "gpt3-xl-40": gpt(40, 2048, 16, separate=True),
}
MODELS |= {f"enoki-{n}": gpt(3 * n // 4, 64 * n, n, separate=True) for n in (28, 32, 40, 44, 48)}
VTRAIN = ((1024, 24, 16), (2048, 20, 16), (2048, 24, 16), (3072, 30, 32), (6144, 40, 48))
MODELS |= {
    f"vtrain-h{width}-l{layers}": gpt(layers, width, heads, separate=True)
    for width, layers, heads in VTRAIN
}
MODELS |= {
    f"{name}-selective": model | {"kwargs": model["kwargs"] | {"selective": True}}
    for name, model in MODELS.items()
    if model["call"] == "public_networks.Llama"
}


class Setup(NamedTuple):
    """What a sweep's rows have in common. `precision`: where a row states none; rates: GB per second.

    `network`: of a node, as far as the source says; None: the plan's default. `link`: of a GPU within its
    node; None: the datasheet's.
    """

    model: str
    vocabulary: int
    sequence: int
    gpu: str
    node: int
    precision: str = "bf16"
    network: float | None = None
    link: float | None = None


A100, H100, V100 = "A100-SXM4-80GB", "H100 80GB HBM3", "V100 SXM 32 GB"
#: By the beginning of a sweep's name. BERT and DeBERTa are taken as GPTs.
SWEEPS = {
    "4090nop2p-qwen06b-x2": Setup("qwen3-0.6b", 151936, 512, "RTX 4090", 8, link=15.3),
    "h100blog-gpt2large-x1": Setup("gpt2-large", 50257, 1024, H100, 8, "tf32"),
    "idris-qwen14b-a100": Setup("qwen2.5-14b", 152064, 4096, A100, 8),
    "idris-qwen14b-h100": Setup("qwen2.5-14b", 152064, 4096, H100, 4, network=200),
    "idris-qwen14b-dalia": Setup("qwen2.5-14b", 152064, 4096, "GB200", 64),
    "idris-qwen32b-h100": Setup("qwen2.5-32b", 152064, 4096, H100, 4, network=200),
    "idris-qwen32b-dalia": Setup("qwen2.5-32b", 152064, 4096, "GB200", 64),
    "idris-qwen72b-a100": Setup("qwen2.5-72b", 152064, 4096, A100, 8),
    "idris-qwen72b-h100": Setup("qwen2.5-72b", 152064, 4096, H100, 4, network=200),
    "idrispar-qwen72b-ac": Setup("qwen2.5-72b", 152064, 4096, H100, 4, network=200),
    "idrispar-qwen7b-a100": Setup("qwen2.5-7b", 152064, 4096, A100, 8),
    "idrispar-qwen7b-ac": Setup("qwen2.5-7b", 152064, 4096, H100, 4, network=200),
    "idrispar-qwen7b-h100": Setup("qwen2.5-7b", 152064, 4096, H100, 4, network=200),
    "kempner-13b": Setup("llama-13b-gqa", 128256, 4096, "H200", 4, network=50),
    "kempner-7b": Setup("llama3-8b", 128256, 4096, "H200", 4, network=50),
    "titan-llama2-13b": Setup("llama2-13b", 32000, 4096, A100, 8, network=50),
    "titan-llama2-70b": Setup("llama2-70b", 32000, 4096, A100, 8, network=50),
    "titan-llama3-8b": Setup("llama3-8b", 128256, 8192, A100, 8, network=50),
    "titan-llama8b": Setup("llama3-8b", 128256, 8192, "H100 96GB", 8, network=400),
    "internevo-7b": Setup("llama2-7b", 103168, 2048, A100, 8, network=50),
    "ds-gpt2-large": Setup("gpt2-large", 50257, 1024, V100, 16, "fp16"),
    "ds-gpt2-medium": Setup("gpt2-medium", 50257, 1024, V100, 16, "fp16"),
    "ds-gpt2-xl": Setup("gpt2-xl", 50257, 1024, V100, 16, "fp16"),
    "ds-gpt2-v100": Setup("gpt2", 50257, 1024, V100, 16, "fp16"),
    "ds-bert-base": Setup("gpt2", 28996, 128, V100, 16, "fp32"),
    "ds-bert-large": Setup("gpt2-medium", 30522, 128, V100, 16, "fp32"),
    "ds-distilbert": Setup("distilbert", 28996, 128, V100, 16, "fp32"),
    "ds-deberta": Setup("deberta", 128100, 256, V100, 16, "fp16"),
}
SWEEPS |= {
    f"rorqual-enoki{n}": Setup(f"enoki-{n}", 50304, 2048, H100, 4) for n in (28, 32, 40, 44, 48)
}
SWEEPS |= {
    f"vtrain-h{width}-l{layers}": Setup(
        f"vtrain-h{width}-l{layers}",
        50264,
        1024 if width < 3000 else 2048,
        A100,
        8,
        "fp16",
        100,
        150,
    )
    for width, layers, _ in VTRAIN
}
for _n in (24, 32, 40):
    _fast = Setup(f"gpt3-xl-{_n}", 50264, 2048, V100, 8, "fp16", 3.125)
    SWEEPS[f"dtfm-gpt3xl{_n}-v100-x64"] = _fast
    SWEEPS[f"dtfm-gpt3xl{_n}-v100-x64-slow"] = _fast._replace(node=1, network=1.25)
#: How a row's checkpointing is said: the share of the blocks, or the kind.
CHECKPOINTING = {
    "": 0.0,
    "none": 0.0,
    "none (default)": 0.0,
    "full": 1.0,
    "full (setting of the validation files)": 1.0,
    "yes": 1.0,
    "selective layer": 0.5,
    "selective op": "selective",
}


@dataclass(frozen=True)
class Run:
    """A configuration of a sweep: what is planned of it, and what was measured.

    `share`: of the blocks that are checkpointed; one between 0 and 1 is planned with none and with all of
    them. `cost`: what a sample took, in any unit of the sweep; None where the GPU's memory did not suffice.
    """

    row: Mapping[str, str]
    configuration: Mapping[str, Any]
    share: float
    kinds: Mapping[str, float]
    cost: float | None

    @property
    def whole(self) -> bool:
        """Whether one config says it."""
        return self.share in (0.0, SELECTIVE_SHARE, 1.0)

    def at(self, checkpointing: Any) -> dict[str, Any]:
        """Return the configuration with this checkpointing."""
        experiment = dict(self.configuration["experiment"]) | {
            "activation_checkpointing": checkpointing
        }
        return dict(self.configuration) | {"experiment": experiment}


def read_runs(path: Path) -> list[Run]:
    """Return the runs that a config can say, each configuration once, at its best repeat."""
    best: dict[str, Run] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for run in filter(None, map(_run, csv.DictReader(file))):
            known = best.setdefault(f"{run.row['sweep']} {run.configuration} {run.share}", run)
            if run.cost is not None and (known.cost is None or run.cost < known.cost):
                best[f"{run.row['sweep']} {run.configuration} {run.share}"] = run
    return list(best.values())


def _run(row: Mapping[str, str]) -> Run | None:
    """Return what a row says; None where no config can."""
    known = max((s for s in SWEEPS if row["sweep"].startswith(s)), key=len, default=None)
    dp, tp, pp, cp = [int(row[axis] or 1) for axis in ("dp", "tp", "pp", "cp")]
    formats, share = row["precision"] + row["weights"], _share(row["checkpointing"])
    unsaid = known is None or row["outcome"] not in ("ok", "oom") or share is None
    if unsaid or cp > 1 or min(tp, pp) > 1 or "ep" in row["strategy"].split("+"):
        return None
    if "float8" in formats or "nf4" in formats or "LoRA" in formats or not row["micro_batch"]:
        return None
    setup, parts = SWEEPS[known], int(row["accumulate"] or 1)
    precision = next((p for p in ("fp16", "bf16") if p in row["precision"]), setup.precision)
    variant = _variant(row["strategy"], dp, tp, pp, parts)
    if variant is None or (share == "selective" and f"{setup.model}-selective" not in MODELS):
        return None
    if variant["strategy"] == "fsdp" and precision in ("bf16", "fp16"):
        variant["mixed_precision"] = "policy"
    if variant["strategy"] == "fsdp" and row["offload"] and precision != "fp16":
        variant["offload"] = "cpu"
    elif row["offload"]:
        return None
    micro_batch, batch = int(row["micro_batch"]), int(row["micro_batch"]) * parts * dp
    experiment = {
        "gpus": dp * tp * pp,
        "global_batch": batch,
        "optimizer": "adamw",
        "precision": precision,
        "activation_checkpointing": share == 1.0,
        "gradient_accumulation_steps": 1 if pp > 1 else parts,
        "compile": row["compile"].startswith("yes") and tp * pp == 1,
    }
    cluster = {"gpu": setup.gpu, "gpus_per_node": setup.node}
    cluster |= {"network_gb_per_s": setup.network} if setup.network else {}
    cluster |= {"link_gb_per_s": setup.link} if setup.link else {}
    configuration = {
        "model": f"{setup.model}-selective" if share == "selective" else setup.model,
        "data": {"sequence": setup.sequence, "vocabulary": setup.vocabulary},
        "variant": variant,
        "experiment": experiment,
        "cluster": cluster,
    }
    share = SELECTIVE_SHARE if share == "selective" else share
    kinds = {
        "micro-batch": micro_batch / tp,
        "checkpointing": share,
        "sharding": _stage(variant),
        "tensor": tp,
        "pipeline": pp,
        "compile": float(row["compile"].startswith("yes")),
        "offload": float(bool(row["offload"])),
    }
    return Run(row, configuration, share, kinds, _cost(row, batch))


def _share(text: str) -> float | str | None:
    if (numbers := re.match(r"(\d)/(\d) of", text)) is not None:
        return int(numbers[1]) / int(numbers[2])
    if (number := re.match(r"([\d.]+) of", text)) is not None:
        return float(number[1])
    return CHECKPOINTING.get(text)


def _cost(row: Mapping[str, str], batch: int) -> float | None:
    if row["outcome"] == "oom":
        return None
    return 1 / float(row["throughput"]) if row["throughput"] else float(row["step_s"]) / batch


def _variant(strategy: str, dp: int, tp: int, pp: int, parts: int) -> dict[str, Any] | None:
    """Return the strategy and its options that train as `strategy` of a sweep does; None: none does."""
    if pp > 1:
        ours = {"strategy": "pipeline", "pipeline_parallel_size": pp, "microbatches": parts}
        return ours if strategy == "megatron" and parts >= pp else None
    if tp > 1:
        data = "fsdp" if strategy.startswith(("fsdp", "tp")) else "ddp"
        return {"strategy": "tensor", "tensor_parallel_size": tp, "data_parallel": data}
    if dp == 1:
        return {"strategy": "single"}
    if strategy in ("ddp", "zero0", "megatron"):
        return {"strategy": "ddp"}
    if strategy.startswith(("zero1", "internevo zero1")):
        return {"strategy": "zero1"}
    if strategy in ("zero2", "fsdp1-grad-op"):
        return {"strategy": "fsdp", "reshard_after_forward": "never"}
    if strategy.startswith(("zero3", "fsdp")):
        return {"strategy": "fsdp"}
    return None


def _stage(variant: Mapping[str, Any]) -> int:
    """Return how much is divided among replicas, counted as ZeRO's stages."""
    if variant["strategy"] == "fsdp":
        return 2 if variant.get("reshard_after_forward") == "never" else 3
    if variant["strategy"] == "tensor":
        return 3 if variant["data_parallel"] == "fsdp" else 0
    return int(variant["strategy"] == "zero1")


def equal_blocks(request: Request) -> tuple[str, int] | None:
    """Return path and number of a network's blocks; None where it is none of the transformers here."""
    own = request.settings.own_model
    if own is None or "layers" not in own["kwargs"]:
        return None
    return ("layers" if own["call"].endswith("Llama") else "blocks"), own["kwargs"]["layers"]
