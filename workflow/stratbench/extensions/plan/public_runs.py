"""The range of time from public runs: measured steps over the plan's time for each of them.

The runs are in workflow/reference/public_runs.csv, restated from the source that each row names.
benchmarks/prediction/public_steps.py makes that file, and holds each run to the range of other models' runs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from stratbench.cell.installation import REFERENCE
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.duration import PlannedStep, Span

PUBLIC_RUNS = REFERENCE / "public_runs.csv"
#: GPUs of the generations that the runs are on, linked by NVLink as there.
GPUS = ("A100 SXM 40 GB", "A100 SXM 80 GB", "H100 SXM", "H100 96 GB", "H200 SXM")
#: No run waits for links by the plan's one time; a cell is like them up to this share of its step.
MAX_WAITING_SHARE = 0.05


class Band(NamedTuple):
    """Minimum and maximum of measured times over the plan's time, and their source.

    `least_s`: the shortest step of the runs by the plan's time; of shorter ones nothing is known.
    """

    low: float
    high: float
    least_s: float
    source: str


def is_like(s: Settings, reads_text: bool) -> bool:
    """Return whether a cell is like the runs: a text decoder in bf16, sharded by FSDP's policy."""
    if not reads_text or s.task is not None or s.precision != "bf16" or s.compile:
        return False
    return s.options.get("mixed_precision") == "policy" and s.options["offload"] == "none"


def span_from_runs(
    device: str, s: Settings, reads_text: bool, step: PlannedStep, steps: int
) -> Span | None:
    """Return the range of `steps` steps from public runs.

    Return None where the cell is not like them.

    Args:
        device: The GPU's name in the table of GPUs.
        s: The cell's settings.
        reads_text: Whether it trains on texts.
        step: Its step by the plan's one time.
        steps: The steps of its training.
    """
    runs = band()
    if device not in GPUS or not is_like(s, reads_text) or step.seconds < runs.least_s:
        return None
    if step.waiting_share > MAX_WAITING_SHARE:
        return None
    return Span(step.seconds * steps * runs.low, step.seconds * steps * runs.high, runs.source)


@cache
def band() -> Band:
    """Return the band of all runs."""
    return make_band(read_runs())


def make_band(runs: Iterable[Mapping[str, str]]) -> Band:
    """Return the band of these rows of the table."""
    times = [(float(run["step_s"]), float(run["planned_s"])) for run in runs]
    ratios = [step_s / planned_s for step_s, planned_s in times]
    least_s = min(planned_s for _, planned_s in times)
    return Band(min(ratios), max(ratios), least_s, f"{len(times)} public runs on A100 and H100")


@cache
def read_runs() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with PUBLIC_RUNS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
