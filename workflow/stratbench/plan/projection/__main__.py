"""Projects a study's records to counts that nobody has: writes projection.csv and a figure for each model.

python -m stratbench.plan.projection --config JSON      as `snakemake project` calls it
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.plan.device_rates import cpu_device, gpu_device, named_gpus
from stratbench.plan.needs import subject_of
from stratbench.plan.projection.evidence import Evidence, evidence_of, on_measured_links
from stratbench.plan.projection.links import Unmeasured
from stratbench.plan.projection.naive import RULES
from stratbench.plan.projection.project import Projection, computing_of, project, sentence
from stratbench.plan.schedule import records_by_cell
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError

#: The largest count that is asked for.
MOST_WORKERS = 1024
COLUMNS = (
    "experiment", "model", "strategy", "scaling", "measured", "workers", "nodes", "step_low_s", "step_s",
    "step_high_s", "efficiency_low", "efficiency", "efficiency_high", "rule", "skill", "refused",
    *(f"{name} s" for name in RULES),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.plan.projection", description=__doc__
    )
    parser.add_argument("--config", required=True, help="the whole config, as JSON")
    args = parser.parse_args(argv)
    try:
        config, study = load_config(json.loads(args.config))
        out = Path(config["results"]) / study.name
        found = [
            (e, _projected(config, study, e))
            for e in evidence_of(records_by_cell(study, config["results"]))
        ]
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not found:
        print(
            "error: the study has no record of a finished cell; train some first", file=sys.stderr
        )
        return 1
    write_csv(out / "projection.csv", found)
    written = [str(out / "projection.csv")]
    from stratbench.plan.projection.figure import draw

    for experiment, model in dict.fromkeys((e.experiment, e.model) for e, _ in found):
        alike = [f for f in found if (f[0].experiment, f[0].model) == (experiment, model) and f[1]]
        if alike:
            path = out / f"projection-{experiment}-{model}.svg"
            draw(alike, path)
            written.append(str(path))
    for evidence, projections in found:
        print(text_of(evidence, projections))
    print(f"Written: {', '.join(written)}")
    return 0


def _projected(config: dict[str, Any], study: Study, evidence: Evidence) -> list[Projection]:
    if evidence.unfit:
        return []
    cluster, most = config["cluster"], evidence.points[-1].workers
    subject = subject_of(config, study, evidence.cells[-1])
    if subject.request.on_cuda:
        named = named_gpus(cluster)
        device = gpu_device(named[0], subject.settings.precision, cluster)
    else:
        device = cpu_device(cluster, most)
    a_node = cluster["gpus_per_node"]
    counts = []
    while (most := 2 * most) <= MOST_WORKERS:
        counts.append((most, -(-most // a_node)))
    links_path = Path(config["results"]) / study.name / "links" / "links.csv"
    on, queue = None, None
    try:
        on = on_measured_links(subject, evidence.stated, device, links_path, a_node)
        if on is not None:
            # The counts first: where a link of theirs is missing, none is used.
            for workers in (*(p.workers for p in evidence.points), *(w for w, _ in counts[:3])):
                on.replayed(workers, 1.0)
            if on.queue is not None:
                last = evidence.points[-1]
                queue = on.queue(computing_of(on.replayed, last.workers, last.step_s))
    except Unmeasured as error:
        print(f"{evidence.strategy}: {error}; the counts alone are used")
        on = None
    if on is None:
        return project(evidence.points, evidence.stated, counts)
    within = counts[:3]  # further ones are refused by their multiple
    made = project(
        evidence.points, evidence.stated, within, on.replayed, on.slowed, on.levels, queue
    )
    return made + project(evidence.points, evidence.stated, counts[3:])


def text_of(evidence: Evidence, projections: Sequence[Projection]) -> str:
    """The sentences of one strategy; of the refused counts the first one's."""
    title = f"{evidence.experiment}, {evidence.model}, {evidence.strategy}"
    if evidence.unfit:
        return f"{title}: not projected: {evidence.unfit}."
    unit = "GPUs" if evidence.stated.gpu else "workers"
    measured = ", ".join(str(p.workers) for p in evidence.points)
    lines = [f"{title}: {evidence.stated.scaling} scaling, measured on {measured} {unit}"]
    lines += [f"  {sentence(p, unit)}" for p in projections if not p.refused]
    refused = [p for p in projections if p.refused]
    lines += [f"  {sentence(p, unit)}" for p in refused[:1]]
    return "\n".join(lines)


def write_csv(path: Path, found: Sequence[tuple[Evidence, list[Projection]]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for evidence, projections in found:
        for p in projections:
            writer.writerow(_row(evidence, p))
    write_atomic(path, text.getvalue())


def _row(evidence: Evidence, p: Projection) -> list[Any]:
    first = evidence.points[0]
    ideal_s = first.step_s
    if evidence.stated.scaling == "strong":
        ideal_s *= first.workers / p.workers
    i = p.interval
    times = [i.low_s, i.middle_s, i.high_s] if i else [None] * 3
    # A long step is a low efficiency.
    efficiencies = [ideal_s / t if t else None for t in reversed(times)]
    skill = p.skill.value
    return [
        evidence.experiment, evidence.model, evidence.strategy, evidence.stated.scaling,
        " ".join(str(m.workers) for m in evidence.points), p.workers, p.nodes,
        *map(_rounded, times), *map(_rounded, efficiencies), p.rule if i else "",
        _rounded(skill), p.refused or "", *(_rounded(p.naive_s[name]) for name in RULES),
    ]  # fmt: skip


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


if __name__ == "__main__":
    sys.exit(main())
