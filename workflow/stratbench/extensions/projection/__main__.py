"""Projects a study's records to other worker counts: writes projection.csv, and prints sentences.

`python -m stratbench.extensions.projection --config JSON` is what `snakemake project` calls, and with
`--most 256 --out FILE` what `snakemake decide` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.extensions.plan.schedule import records_by_cell
from stratbench.extensions.projection.evidence import ProjectionInputs, evidence_of
from stratbench.extensions.projection.memory import peaks_at
from stratbench.extensions.projection.project import Projection, sentence
from stratbench.extensions.projection.study import (
    counts_after,
    device_of,
    each_shown,
    projections_of,
    subject_at,
)
from stratbench.extensions.projection.table import Row, Whole, rows_of, unfit_rows, write_csv
from stratbench.extensions.projection.target import share_to_target
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError

#: Maximum worker count.
MAX_WORKERS = 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.projection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="the whole config, as JSON")
    parser.add_argument(
        "--most", type=int, help=f"workers, to which others double ({MAX_WORKERS}); prints nothing"
    )
    parser.add_argument("--out", type=Path, help="results/<study>/projection.csv")
    args = parser.parse_args(argv)
    try:
        config, study = load_config(json.loads(args.config))
        out = args.out or Path(config["results"]) / study.name / "projection.csv"
        evidences = evidence_of(records_by_cell(study, config["results"]))
        by_evidence = [(e, *projected(config, study, e, args.most)) for e in each_shown(evidences)]
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_csv(out, [row for _, rows, _ in by_evidence for row in rows])
    if args.most:  # the caller prints it
        return 0
    if not by_evidence:
        print(
            "error: the study has no record of a finished cell; train some first", file=sys.stderr
        )
        return 1
    for evidence, _, made in by_evidence:
        print(text_of(evidence, made))
    print(f"Written: {out}")
    return 0


def projected(
    config: Mapping[str, Any],
    study: Study,
    evidence: ProjectionInputs,
    max_workers: int | None = None,
) -> tuple[list[Row], list[Projection]]:
    """Return the rows of a strategy and their projections: doublings up to `max_workers`, and it.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        max_workers: Largest worker count, if configured.
    """
    base = study.base_strategy(evidence.strategy)[0]
    if evidence.unfit:
        return unfit_rows(evidence, base, [max_workers] if max_workers else []), []
    measured = [p.workers for p in evidence.points]
    counts = counts_after(measured[-1], max_workers or MAX_WORKERS)
    if max_workers and max_workers not in {*counts, *measured}:
        counts.append(max_workers)
    made = projections_of(config, study, evidence, counts)
    workers = [p.workers for p in made if p.interval]
    at = {n: subject_at(config, study, evidence, n) for n in (*measured, *workers)}
    peaks = peaks_at(
        [at[n] for n in workers],
        [(at[n], r) for n, r in zip(measured, evidence.records, strict=True)],
        device_of(config, at[measured[-1]]).resident_threads,
        Path(config["results"]) / "plan-cache",
    )
    target = share_to_target(study.target_scores().get(evidence.experiment), evidence)
    price = None if evidence.on_cpu else price_of(config)
    whole = Whole({n: s.steps for n, s in at.items()}, *target, price)
    rows = rows_of(evidence, base, made, dict(zip(workers, peaks, strict=True)), whole)
    return rows, made


def price_of(config: Mapping[str, Any]) -> float | None:
    """Return the price of a GPU per hour: the decision's, else the plan's."""
    price = config["decide"]["price_per_gpu_hour"]
    return config["cluster"]["price_per_gpu_hour"] if price is None else price


def text_of(evidence: ProjectionInputs, projections: Sequence[Projection]) -> str:
    """Return the sentences of one strategy.

    Only the first unsupported count beyond all projected ones has a sentence.
    """
    title = f"{evidence.experiment}, {evidence.model}, {evidence.strategy}"
    if evidence.unfit:
        return f"{title}: not projected: {evidence.unfit}."
    unit = "workers" if evidence.on_cpu else "GPUs"
    measured = ", ".join(str(p.workers) for p in evidence.points)
    lines = [f"{title}: {evidence.scaling} scaling, measured on {measured} {unit}"]
    most = max((p.workers for p in projections if not p.refused), default=0)
    lines += [f"  {sentence(p, unit)}" for p in projections if p.workers <= most]
    lines += [f"  {sentence(p, unit)}" for p in projections if p.workers > most][:1]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
