"""Holds the plan to public measurements on real GPUs: memory, whether a configuration fits, time of a step.

    PYTHONPATH=workflow python benchmarks/prediction/public_gpus.py > benchmarks/results/public-gpus.md

public_gpus.csv has the measured figures, with the source and licence of each, and public_gpus.yaml the
configurations as parts of a config.yaml. Networks are written from their widths and layers
(public_networks.py); timm's are planned as torchvision's of the same name. Takes minutes in one process.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "workflow")]

from public_plans import Planner, read_configurations  # noqa: E402
from public_sweep_runs import equal_blocks  # noqa: E402

from stratbench.cell.text.words import GIB  # noqa: E402
from stratbench.extensions.plan import public_runs  # noqa: E402
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS, TIGHT, PlannedCell  # noqa: E402

#: What the source of a measured peak read, and how it is called in the table.
KINDS = {
    "allocated": "allocated or active",
    "active": "allocated or active",
    "reserved": "reserved",
    "nvidia-smi": "nvidia-smi, less its context",
}
COMMAND = "PYTHONPATH=workflow python benchmarks/prediction/public_gpus.py"


@dataclass(frozen=True)
class Measured:
    """A configuration with what its sources measured, and its plan."""

    name: str
    configuration: Mapping[str, Any]
    rows: list[Mapping[str, str]]
    planned: PlannedCell
    #: The verdict on the next larger batch, which ran out of memory; None where none is known.
    verdict_on_failed: str | None
    #: Planned bytes that PyTorch has allocated, and that its allocator holds, on the worker that the source
    #: measured: on the last stage of a pipeline.
    allocated_bytes: int
    reserved_bytes: int

    @property
    def unsaid(self) -> str | None:
        """What of the measured run no key of a config.yaml says."""
        return self.configuration.get("unsaid")

    @property
    def gpu_is_stated(self) -> bool:
        """Whether the source says on which GPU it ran."""
        return "not stated" not in self.rows[0]["gpu"]

    def peaks_gib(self) -> dict[str, float]:
        """Return the measured peaks by kind, each the median of its rows."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            if row["measured_gib"]:
                found.setdefault(KINDS[row["kind"]], []).append(float(row["measured_gib"]))
        return {kind: median(values) for kind, values in found.items()}

    def planned_gib(self, kind: str) -> float:
        """Return the planned peak that a measured one of this kind is held to."""
        is_reserved = kind in (KINDS["reserved"], KINDS["nvidia-smi"])
        return (self.reserved_bytes if is_reserved else self.allocated_bytes) / GIB

    def error_percent(self, kind: str, measured_gib: float) -> float:
        """Return how far the planned peak is above a measured one."""
        return 100 * (self.planned_gib(kind) / measured_gib - 1)

    @property
    def steps_s(self) -> list[float]:
        """The measured times of a step."""
        return list(dict.fromkeys(float(row["step_s"]) for row in self.rows if row["step_s"]))

    @property
    def range_s(self) -> tuple[float, float]:
        """The range of a step."""
        return self.planned.fit.device_rate_span.low_s, self.planned.fit.device_rate_span.high_s

    @property
    def narrowed(self) -> bool:
        """Whether the range is from public runs."""
        return "public runs" in self.planned.fit.device_rate_span.source

    @property
    def left_out_s(self) -> tuple[float, float]:
        """The range of a step without public runs of the same model."""
        if not self.narrowed:
            return self.range_s
        own = [
            run["model"]
            for run in public_runs.read_public_runs()
            if run["configuration"] == self.name
        ]
        model = own[0] if own else self.rows[0]["model"].replace(" ", "-")
        others = (run for run in public_runs.read_public_runs() if run["model"] != model)
        low, high, *_ = public_runs.compute_time_ratios(others)
        usual_s = self.planned.fit.usual_s
        return usual_s * low, usual_s * high


def measure_all() -> list[Measured]:
    """Return all configurations, planned."""
    known = read_configurations()
    with (HERE / "public_gpus.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    planner = Planner(known["models"], equal_blocks)
    found = []
    for name, c in known["configurations"].items():
        own = [row for row in rows if row["configuration"] == name]
        planned = planner.plan(c)
        if planned.fit is None:
            raise SystemExit(f"{name}: is not predicted: {planned.reason}")
        failed = own[0]["fails_at_batch"]
        on_failed = None
        if failed:
            larger = c["experiment"] | {"per_worker_batch": int(failed)}
            on_failed = planner.plan({**c, "experiment": larger}).fit.memory_verdict
        batch, threads = planned.subject.samples_per_step, planned.fit.resident_threads
        last = planned.footprint.footprints_of_stages[-1]
        allocated_bytes = last.compute_training_peak(batch, threads).n_bytes
        reserved_bytes = last.compute_reserved_bytes(batch, threads)
        found.append(Measured(name, c, own, planned, on_failed, allocated_bytes, reserved_bytes))
        print(f"{name}: {time.process_time():.0f} s", file=sys.stderr, flush=True)
    return found


def memory_rows(all_: Iterable[Measured]) -> Iterator[str]:
    """Yield the table of memory: by kind of measured figure, all and those that can be said."""
    for kind in dict.fromkeys(KINDS.values()):
        of_kind = [(m, m.peaks_gib()[kind]) for m in all_ if kind in m.peaks_gib()]
        for what, kept in (
            ("all", of_kind),
            ("can be said", [p for p in of_kind if not p[0].unsaid]),
        ):
            errors = [m.error_percent(kind, gib) for m, gib in kept]
            sizes = [abs(e) for e in errors]
            within = sum(e <= 10 for e in sizes)
            yield (
                f"| {kind}, {what} | {len(errors)} | {median(errors):+.1f} | {median(sizes):.1f} | "
                f"{within} of {len(errors)} | {max(errors, key=abs):+.0f} |"
            )


def verdict_rows(all_: Iterable[Measured]) -> Iterator[str]:
    """Yield the table of verdicts on what ran and on what ran out of memory."""
    stated = [m for m in all_ if m.gpu_is_stated]
    ran = [m.planned.fit.memory_verdict for m in stated]
    failed = [m.verdict_on_failed for m in stated if m.verdict_on_failed]
    for what, verdicts in (("ran", ran), ("ran out of memory", failed)):
        counts = " | ".join(str(verdicts.count(v)) for v in (FITS, TIGHT, DOES_NOT_FIT))
        yield f"| {what} | {len(verdicts)} | {counts} |"


def time_rows(all_: Iterable[Measured]) -> Iterator[str]:
    """Yield the table of times, by GPU."""
    steps = [(m, step_s) for m in all_ for step_s in m.steps_s]
    gpus = dict.fromkeys(m.planned.fit.device for m, _ in steps)
    groups = {name: [p for p in steps if p[0].planned.fit.device == name] for name in gpus}
    groups["narrowed by public runs"] = [p for p in steps if p[0].narrowed]
    groups["in the general range"] = [p for p in steps if not p[0].narrowed]
    groups["all"] = steps
    for name, each in groups.items():
        inside = sum(m.range_s[0] <= s <= m.range_s[1] for m, s in each)
        faster = sum(s < m.range_s[0] for m, s in each)
        left_out = sum(m.left_out_s[0] <= s <= m.left_out_s[1] for m, s in each)
        width = median(m.range_s[1] / m.range_s[0] for m, _ in each)
        yield (
            f"| {name} | {len(each)} | {inside} | {faster} | {len(each) - inside - faster} | {width:.1f} | "
            f"{left_out} |"
        )


def each_rows(all_: Iterable[Measured]) -> Iterator[str]:
    """Yield a line for each configuration."""
    for m in all_:
        peaks = m.peaks_gib() or {"": None}
        low, high = m.range_s
        steps = ", ".join(f"{s:.3g}" for s in m.steps_s)
        for kind, gib in peaks.items():
            error = "" if gib is None else f"{m.error_percent(kind, gib):+.1f}"
            yield (
                f"| {m.name} | {m.rows[0]['source']} | {kind} | {'' if gib is None else f'{gib:.2f}'} | "
                f"{m.planned_gib(kind):.2f} | {error} | {m.planned.fit.memory_verdict} | {steps} | "
                f"{low:.3g} to {high:.3g} | {m.unsaid or ''} |"
            )


PAGE = """# The plan beside public measurements on real GPUs

`{command}`, {seconds:.0f} CPU-seconds in one process.

{count} configurations of public sources (`benchmarks/prediction/public_gpus.csv` has source and licence of
each figure). Nothing was run on a GPU here. An error is that of the planned peak, in % of the measured one.
Figures of reserved memory and of nvidia-smi are held to what PyTorch's allocator reserves by the plan. A
configuration can be said where the last column of the last table is empty.

## Memory

| measured figure | configurations | median error | median size of error | within 10 % | largest |
|---|---|---|---|---|---|
{memory}

## Whether it fits

| it | configurations | fits | tight | does not fit |
|---|---|---|---|---|
{verdicts}

Only where the source states the GPU. What ran out of memory is the next larger batch that was tried.

## Time of a step

| GPU | steps | inside the range | faster | slower | median width | inside without its model |
|---|---|---|---|---|---|---|
{times}

The width is the range's upper end over its lower one. In the last column, public runs of the same model are
left out of the range.

## Each configuration

Measured and planned peaks are in GiB.

| configuration | source | kind | measured | planned | error, % | verdict | steps, s | range, s | not said |
|---|---|---|---|---|---|---|---|---|---|
{each}
"""


def page(all_: list[Measured]) -> str:
    """Return the page with all tables."""
    tables = {
        "memory": memory_rows,
        "verdicts": verdict_rows,
        "times": time_rows,
        "each": each_rows,
    }
    return PAGE.format(
        command=COMMAND,
        seconds=time.process_time(),
        count=len(all_),
        **{name: "\n".join(rows(all_)) for name, rows in tables.items()},
    )


if __name__ == "__main__":
    print(page(measure_all()), end="")
