"""Estimates the range of a cell's time from published runs.

The range is the planned time, multiplied by the runs' ratios of measured to planned time. The runs are in
workflow/reference/public_runs.csv, whose rows name their sources. benchmarks/prediction/public_steps.py makes
that file, and tests each run against the range of other models' runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from stratbench.cell.files import read_csv_rows
from stratbench.cell.installation import REFERENCE
from stratbench.cell.settings import Settings
from stratbench.extensions.plan.duration import PlannedStep, Span

PUBLIC_RUNS = REFERENCE / "public_runs.csv"
#: GPUs to which the runs apply: of the same generations as in the runs, with NVLink.
GPUS = ("A100 SXM 40 GB", "A100 SXM 80 GB", "H100 SXM", "H100 96 GB", "H200 SXM")
#: Maximum fraction of a step without computation, with which a cell still resembles the public runs.
MAX_WAITING_SHARE = 0.05


class TimeRatioRange(NamedTuple):
    """Minimum and maximum ratio of measured to planned times in public runs.

    Attributes:
        low: Minimum ratio.
        high: Maximum ratio.
        least_s: Shortest planned step of the runs; the ratios do not apply to shorter steps.
        source: Text on the runs.
    """

    low: float
    high: float
    least_s: float
    source: str


def is_like_public_runs(s: Settings, reads_text: bool) -> bool:
    """Return whether a cell's settings resemble those of the public runs.

    The runs train a text decoder in bf16, sharded by FSDP's policy.
    """
    if not reads_text or s.task is not None or s.precision != "bf16" or s.compile:
        return False
    return s.options.get("mixed_precision") == "policy" and s.options["offload"] == "none"


def estimate_time_from_public_runs(
    gpu_name: str, s: Settings, reads_text: bool, step: PlannedStep, num_steps: int
) -> Span | None:
    """Estimate the time of some steps from public runs, or None without similar runs.

    Args:
        gpu_name: Name of the GPU in the table of GPUs.
        s: Settings of the cell.
        reads_text: Whether the cell trains on texts.
        step: The planned step of the cell.
        num_steps: Number of steps.
    """
    runs = get_public_time_ratios()
    if (
        gpu_name not in GPUS
        or not is_like_public_runs(s, reads_text)
        or step.seconds < runs.least_s
    ):
        return None
    if step.waiting_share > MAX_WAITING_SHARE:
        return None
    return Span(
        step.seconds * num_steps * runs.low, step.seconds * num_steps * runs.high, runs.source
    )


@cache
def get_public_time_ratios() -> TimeRatioRange:
    """Return the minimum and maximum ratio of measured to planned time, of all public runs."""
    return compute_time_ratios(read_public_runs())


def compute_time_ratios(runs: Iterable[Mapping[str, str]]) -> TimeRatioRange:
    """Compute the minimum and maximum ratio of measured to planned time, of some runs."""
    times = [(float(run["step_s"]), float(run["planned_s"])) for run in runs]
    ratios = [step_s / planned_s for step_s, planned_s in times]
    least_s = min(planned_s for _, planned_s in times)
    return TimeRatioRange(
        min(ratios), max(ratios), least_s, f"{len(times)} public runs on A100 and H100"
    )


@cache
def read_public_runs() -> list[dict[str, str]]:
    """Return the rows of the table of public runs."""
    return read_csv_rows(PUBLIC_RUNS)
