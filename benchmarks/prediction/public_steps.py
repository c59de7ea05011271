"""Plans the steps of public runs, which narrow the plan's ranges of time, and leaves out one model at a time.

    PYTHONPATH=workflow python benchmarks/prediction/public_steps.py > benchmarks/results/public-steps.md

Writes the plan's one time for each run into workflow/reference/public_runs.csv, whose other columns are
restated from the source that each row names. Run it again when the plan's rates have changed. Networks are
followed with few of their equal blocks. Takes minutes.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "workflow")]

from public_plans import Planner, read_configurations  # noqa: E402
from public_sweep_runs import equal_blocks  # noqa: E402

from stratbench.extensions.plan import public_runs  # noqa: E402

COMMAND = "PYTHONPATH=workflow python benchmarks/prediction/public_steps.py"
VOCABULARY = 50368


def plan_s(planner: Planner, run: Mapping[str, str]) -> float:
    """Return the plan's one time of a run's step."""
    if run["configuration"]:
        return planner.plan(
            read_configurations()["configurations"][run["configuration"]]
        ).fit.usual_s
    sizes = {key: int(run[key]) for key in ("width", "heads")}
    configuration = {
        "model": "public",
        "data": {"sequence": int(run["sequence"]), "vocabulary": VOCABULARY},
        "variant": {"strategy": "fsdp", "mixed_precision": "policy"},
        "experiment": {
            "gpus": int(run["gpus"]),
            "per_worker_batch": int(run["per_worker_batch"]),
            "precision": "bf16",
            "activation_checkpointing": run["activation_checkpointing"] == "true",
            "max_grad_norm": 1.0,
            "optimizer": "adamw",
        },
        "cluster": {"gpu": run["gpu"], "network_gb_per_s": float(run["network_gb_per_s"])},
    }

    arguments = {"layers": int(run["layers"]), "bias": True, **sizes}
    model = {"call": "public_networks.GPT", "kwargs": arguments, "wrap_classes": ["GPTBlock"]}
    planner.models["public"] = model
    return planner.plan(configuration).fit.usual_s


def left_out_rows(runs: list[dict[str, str]]) -> Iterator[str]:
    """Yield the table of ranges from the runs of other models, by generation and checkpointing."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for run in runs:
        ratio = float(run["step_s"]) / float(run["planned_s"])
        low, high, *_ = public_runs.compute_time_ratios(
            r for r in runs if r["model"] != run["model"]
        )
        blocks = "every block" if run["activation_checkpointing"] == "true" else "no"
        generation = run["gpu"].split()[0]
        family = "Llama and Qwen3" if run["configuration"] else "MPT"
        for name in (f"{generation}, {blocks} checkpointing", family, "all"):
            found.setdefault(name, []).append((low, ratio, high))
    for name, each in sorted(found.items()):
        ratios = sorted(ratio for _, ratio, _ in each)
        inside = sum(low <= ratio <= high for low, ratio, high in each)
        faster = sum(ratio < low for low, ratio, _ in each)
        width = median(high / low for low, _, high in each)
        yield (
            f"| {name} | {len(each)} | {inside} ({100 * inside / len(each):.0f} %) | {faster} | "
            f"{len(each) - inside - faster} | {width:.2f} | "
            f"{ratios[0]:.2f}, {median(ratios):.2f}, {ratios[-1]:.2f} |"
        )


PAGE = """# The plan's times beside steps of public runs

`{command}`, about 5 CPU-minutes in one process.

{count} runs (`workflow/reference/public_runs.csv` has source and licence of each): MPT of 125 million to 70
billion parameters on 8 to 512 GPUs, 512 to 65,536 tokens, each at the best micro-batch that its authors
found; and Llama and Qwen3 of 7 to 32 billion on H100, by another source. Every step is held to the range from
the runs of all other models: the plan's one time, times the least and the most that they took of it.

| runs | steps | inside | faster | slower | median width | measured over planned |
|---|---|---|---|---|---|---|
{rows}

Measured over planned: the least, the median and the most; planned is the time to compare by. The width is
the range's upper end over its lower one.
"""


def page(runs: list[dict[str, str]]) -> str:
    """Return the page with the table."""
    return PAGE.format(
        command=COMMAND,
        count=len(runs),
        rows="\n".join(left_out_rows(runs)),
    )


def main() -> None:
    """Plan all runs, write the table and print the page."""
    runs, planner = (
        public_runs.read_public_runs(),
        Planner(read_configurations()["models"], equal_blocks),
    )
    for i, run in enumerate(runs, 1):
        run["planned_s"] = f"{plan_s(planner, run):.4g}"
        if i % 20 == 0:
            print(f"{i} of {len(runs)}: {time.process_time():.0f} s", file=sys.stderr, flush=True)
    with public_runs.PUBLIC_RUNS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, runs[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(runs)
    public_runs.get_public_time_ratios.cache_clear()
    print(page(runs), end="")


if __name__ == "__main__":
    main()
