"""Projects a study's step times to more workers: writes projection.csv, and prints sentences.

`snakemake project` calls `python -m stratbench.extensions.projection --config JSON`. `snakemake decide`
adds `--most 256 --out FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.extensions.plan.schedule import read_records_by_cell
from stratbench.extensions.projection.evidence import ProjectionInputs, gather_projection_inputs
from stratbench.extensions.projection.memory import project_peak_memory
from stratbench.extensions.projection.project import Projection, describe_projected_step_time
from stratbench.extensions.projection.study import (
    iter_inputs_with_progress,
    list_doubled_worker_counts,
    make_cell_to_project,
    make_device_of_cell,
    project_strategy,
)
from stratbench.extensions.projection.table import (
    Row,
    TrainingFacts,
    make_projection_rows,
    make_refused_rows,
    write_projection_csv,
)
from stratbench.extensions.projection.target import compute_time_share_to_target_score
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError

#: Maximum number of workers to project to without the option `--most`.
MAX_WORKERS = 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.projection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="the config of the study as JSON text")
    parser.add_argument(
        "--most",
        type=int,
        help=f"largest number of workers to project to (default: {MAX_WORKERS}); with this option "
        "nothing is printed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the file projection.csv to write; default: results/<study>/projection.csv",
    )
    args = parser.parse_args(argv)
    try:
        config, study = load_config(json.loads(args.config))
        out = args.out or Path(config["results"]) / study.name / "projection.csv"
        evidences = gather_projection_inputs(read_records_by_cell(study, config["results"]))
        by_evidence = [
            (e, *make_rows_and_projections(config, study, e, args.most))
            for e in iter_inputs_with_progress(evidences)
        ]
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_projection_csv(out, [row for _, rows, _ in by_evidence for row in rows])
    if args.most:  # `stratbench decide` uses this option, and prints results itself
        return 0
    if not by_evidence:
        print(
            "error: the study has no record of a finished cell; train some cells first",
            file=sys.stderr,
        )
        return 1
    for evidence, _, made in by_evidence:
        print(describe_strategy_projection(evidence, made))
    print(f"Written: {out}")
    return 0


def make_rows_and_projections(
    config: Mapping[str, Any],
    study: Study,
    evidence: ProjectionInputs,
    max_workers: int | None = None,
) -> tuple[list[Row], list[Projection]]:
    """Return the rows of projection.csv for a strategy, and its projections.

    The projected counts are doublings of the largest measured number of workers.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        max_workers: Largest number of workers, which is projected as well; None for MAX_WORKERS.
    """
    base = study.resolve_base_strategy(evidence.strategy)[0]
    if evidence.cannot_project_reason:
        return make_refused_rows(evidence, base, [max_workers] if max_workers else []), []
    measured = [p.workers for p in evidence.measured_steps]
    counts = list_doubled_worker_counts(measured[-1], max_workers or MAX_WORKERS)
    if max_workers and max_workers not in {*counts, *measured}:
        counts.append(max_workers)
    made = project_strategy(config, study, evidence, counts)
    workers = [p.workers for p in made if p.interval]
    at = {n: make_cell_to_project(config, study, evidence, n) for n in (*measured, *workers)}
    peaks = project_peak_memory(
        [at[n] for n in workers],
        [(at[n], r) for n, r in zip(measured, evidence.records_per_worker_count, strict=True)],
        make_device_of_cell(config, at[measured[-1]]).resident_threads,
        Path(config["results"]) / "plan-cache",
    )
    target = compute_time_share_to_target_score(
        study.get_target_scores().get(evidence.experiment), evidence
    )
    price = None if evidence.is_on_cpu else read_price_per_gpu_hour(config)
    facts = TrainingFacts({n: s.steps for n, s in at.items()}, *target, price)
    rows = make_projection_rows(evidence, base, made, dict(zip(workers, peaks, strict=True)), facts)
    return rows, made


def read_price_per_gpu_hour(config: Mapping[str, Any]) -> float | None:
    """Return the price of a GPU per hour from the block `decide`, else from `cluster`."""
    price = config["decide"]["price_per_gpu_hour"]
    return config["cluster"]["price_per_gpu_hour"] if price is None else price


def describe_strategy_projection(
    evidence: ProjectionInputs, projections: Sequence[Projection]
) -> str:
    """Return a text on one strategy's projections, with a line per number of workers.

    Beyond the largest projected number, only the first refused one has a line.
    """
    title = f"{evidence.experiment}, {evidence.model}, {evidence.strategy}"
    if evidence.cannot_project_reason:
        return f"{title}: not projected: {evidence.cannot_project_reason}."
    unit = "workers" if evidence.is_on_cpu else "GPUs"
    measured = ", ".join(str(p.workers) for p in evidence.measured_steps)
    lines = [f"{title}: {evidence.scaling} scaling, measured on {measured} {unit}"]
    most = max((p.workers for p in projections if not p.refusal_reason), default=0)
    shown = sum(p.workers <= most for p in projections) + 1
    lines += [f"  {describe_projected_step_time(p, unit)}" for p in projections[:shown]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
