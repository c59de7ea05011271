"""Profiles extra steps after the training and its measurements (setting `profile: true`)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as profiler

from stratbench.strategies.base import Strategy, Worker
from stratbench.train.beside.beside import Beside
from stratbench.train.job import Job
from stratbench.workload.data.device_data import DeviceData

#: Numbers of steps under the profiler: first those that it only warms up, then those that it records.
WARM_UP, RECORDED_STEPS = 2, 3


class Profile(Beside):
    """Activity that profiles extra steps after the training. All workers take them; one records."""

    @classmethod
    def is_active_in(cls, job: Job) -> bool:
        return job.settings.profile

    def end(self, status: str, reports_for_all: bool) -> dict[str, Any]:
        if status == "ok" and (reports_for_all or self.strategy.kind == "collective"):
            with self.phases("profile"):
                trace = self.job.folder.profile_trace_path if reports_for_all else None
                record_profiler_trace(self.strategy, self.data, self.worker, trace)
        return {}


def record_profiler_trace(
    strategy: Strategy, data: DeviceData, worker: Worker, trace: Path | None
) -> None:
    """Take a few steps after all measurements, and record them with torch's profiler.

    Every worker of a collective must call it. The training state is not restored. A worker of a server only
    computes: the servers have ended.

    Args:
        strategy: The strategy after training.
        data: The data set.
        worker: This worker.
        trace: File to write, or None if this worker only takes part.
    """
    worker.mark_phase_end = lambda phase: None
    batch = data.create_warmup_batch_function(
        strategy.samples_per_step(worker.settings), worker.settings
    )
    activities = [ProfilerActivity.CPU]
    if worker.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    recording = (
        profiler(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=RECORDED_STEPS),
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        )
        if trace is not None
        else nullcontext()
    )
    with recording:
        for _ in range(WARM_UP + RECORDED_STEPS):
            strategy.step(*batch())
            if worker.heartbeat is not None:
                worker.heartbeat.record_progress()
            if trace is not None:
                recording.step()
