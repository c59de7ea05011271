"""Projects a study's records to counts that nobody has: writes projection.csv, and says so in sentences.

python -m stratbench.plan.projection --config JSON                          as `snakemake project` calls it
python -m stratbench.plan.projection --config JSON --most 256 --out FILE    as `snakemake decide` does
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from stratbench.plan.device_rates import Device, cpu_device, gpu_device, named_gpus
from stratbench.plan.needs import Subject, subject_of
from stratbench.plan.projection.evidence import (
    Evidence,
    OnLinks,
    cores_of_node,
    evidence_of,
    on_measured_links,
)
from stratbench.plan.projection.limits import MOST_TIMES
from stratbench.plan.projection.links import Unmeasured
from stratbench.plan.projection.memory import peaks_at
from stratbench.plan.projection.project import Projection, computing_of, project, sentence
from stratbench.plan.projection.servers import Queue
from stratbench.plan.projection.table import Row, Whole, rows_of, unfit_rows, write_csv
from stratbench.plan.projection.target import share_to_target
from stratbench.plan.schedule import records_by_cell
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError

#: The largest count that is asked for.
MOST_WORKERS = 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.plan.projection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="the whole config, as JSON")
    parser.add_argument(
        "--most", type=int, help=f"workers, to which others double ({MOST_WORKERS}); prints nothing"
    )
    parser.add_argument("--out", type=Path, help="results/<study>/projection.csv")
    args = parser.parse_args(argv)
    try:
        config, study = load_config(json.loads(args.config))
        out = args.out or Path(config["results"]) / study.name / "projection.csv"
        evidences = evidence_of(records_by_cell(study, config["results"]))
        found = [(e, *projected(config, study, e, args.most)) for e in evidences]
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_csv(out, [row for _, rows, _ in found for row in rows])
    if args.most:  # who asked tells what it says
        return 0
    if not found:
        print(
            "error: the study has no record of a finished cell; train some first", file=sys.stderr
        )
        return 1
    for evidence, _, made in found:
        print(text_of(evidence, made))
    print(f"Written: {out}")
    return 0


def projected(
    config: Mapping[str, Any], study: Study, evidence: Evidence, asked: int | None = None
) -> tuple[list[Row], list[Projection]]:
    """The rows of a strategy and what they are made from: doublings up to `asked`, and that itself."""
    base = study.base_strategy(evidence.strategy)[0]
    if evidence.unfit:
        return unfit_rows(evidence, base, [asked] if asked else []), []
    a_node = config["cluster"]["gpus_per_node"]

    @cache
    def at(workers: int) -> Subject:
        return subject_of(config, study, replace(evidence.last, gpus=workers))

    largest = evidence.points[-1].workers
    counts = counts_after(largest, asked or MOST_WORKERS)
    if asked and asked not in {*counts, *(p.workers for p in evidence.points)}:
        counts.append(asked)
    places = [(n, -(-n // a_node)) for n in counts]
    device = _device(config, at(largest))

    @cache
    def unsuited(workers: int) -> str | None:
        return why_unsuited(config, study, evidence, workers)

    on, queue, able = _on_links(config, study, evidence, at, device, counts)
    links = (on.replayed, on.slowed, on.levels, queue) if on else ()
    made = [
        *project(evidence.points, evidence.stated, [p for p in places if p[0] in able], *links,
                 unsuited=unsuited),
        # Without a replay, of which those that are too far would take minutes to be refused.
        *project(evidence.points, evidence.stated, [p for p in places if p[0] not in able],
                 unsuited=unsuited),
    ]  # fmt: skip
    made.sort(key=lambda p: p.workers)
    said = [p.workers for p in made if p.interval]
    peaks = peaks_at(
        [at(n) for n in said],
        [(at(p.workers), r) for p, r in zip(evidence.points, evidence.records, strict=True)],
        device.resident_threads,
        Path(config["results"]) / "plan-cache",
    )
    steps = {n: at(n).steps for n in (*(p.workers for p in evidence.points), *said)}
    target = share_to_target(study.target_scores().get(evidence.experiment), evidence)
    whole = Whole(steps, *target, None if evidence.on_cpu else price_of(config))
    rows = rows_of(evidence, base, made, dict(zip(said, peaks, strict=True)), whole)
    return rows, made


def price_of(config: Mapping[str, Any]) -> float | None:
    """Of a GPU for an hour: what the decision goes by, else what the plan does."""
    given = config["decide"]["price_per_gpu_hour"]
    return config["cluster"]["price_per_gpu_hour"] if given is None else given


def counts_after(largest: int, most: int) -> list[int]:
    """Doublings of the largest measured count, up to `most`."""
    return [largest << k for k in range(1, 1 + max(0, int(math.log2(most / largest))))]


def _device(config: Mapping[str, Any], subject: Subject) -> Device:
    cluster = config["cluster"]
    if subject.request.on_cuda:
        return gpu_device(named_gpus(cluster)[0], subject.settings.precision, cluster)
    return cpu_device(cluster, subject.cell.gpus)


def why_unsuited(
    config: Mapping[str, Any], study: Study, evidence: Evidence, workers: int
) -> str | None:
    """Why a strategy's cell on so many workers could not be trained, or would be of no use; else None."""
    if why := study.why_refused(config, replace(evidence.last, gpus=workers)):
        return why
    cores = cores_of_node(evidence.records[-1][0]) if evidence.on_cpu else None
    here = min(workers, config["cluster"]["gpus_per_node"])
    if cores is not None and here > cores:
        return (
            f"{here} CPU processes of a node would share its {cores:g} cores, and more of them are no more "
            "hardware"
        )
    return None


def _on_links(
    config: Mapping[str, Any],
    study: Study,
    evidence: Evidence,
    at: Callable[[int], Subject],
    device: Device,
    counts: Sequence[int],
) -> tuple[OnLinks | None, Queue | None, set[int]]:
    """The replay on measured links where all measured counts have theirs, and the counts that have, too."""
    points, path = evidence.points, Path(config["results"]) / study.name / "links" / "links.csv"
    a_node, able = config["cluster"]["gpus_per_node"], set()
    try:
        on = on_measured_links(at, points[-1].workers, evidence.stated, device, path, a_node)
        if on is None:
            return None, None, able
        for p in points:
            if computing_of(on.replayed, p.workers, p.step_s) == 0:
                print(
                    f"{evidence.strategy}: on the measured links its collectives alone would take "
                    f"longer than its whole step on {p.workers} workers did: measure links again on a quiet "
                    "machine; the counts alone are used"
                )
                return None, None, able
    except Unmeasured as error:
        print(f"{evidence.strategy}: {error}; the counts alone are used")
        return None, None, able
    for n in counts:
        suited = why_unsuited(config, study, evidence, n) is None
        if suited and n <= MOST_TIMES * points[-1].workers:
            with suppress(Unmeasured):
                on.replayed(n, 1.0)
                able.add(n)
    queue = on.queue and on.queue(computing_of(on.replayed, points[-1].workers, points[-1].step_s))
    return on, queue, able


def text_of(evidence: Evidence, projections: Sequence[Projection]) -> str:
    """The sentences of one strategy; of the refused counts the first one's."""
    title = f"{evidence.experiment}, {evidence.model}, {evidence.strategy}"
    if evidence.unfit:
        return f"{title}: not projected: {evidence.unfit}."
    unit = "workers" if evidence.on_cpu else "GPUs"
    measured = ", ".join(str(p.workers) for p in evidence.points)
    lines = [f"{title}: {evidence.stated.scaling} scaling, measured on {measured} {unit}"]
    lines += [f"  {sentence(p, unit)}" for p in projections if not p.refused]
    refused = [p for p in projections if p.refused]
    lines += [f"  {sentence(p, unit)}" for p in refused[:1]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
