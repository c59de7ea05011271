"""The SLURM request of an elastic cell's worker, as the rules hand it to the launcher."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stratbench.study.resources import JobRequest

#: Of Snakemake's resources those that are options of sbatch, by their name there.
_NAMED = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "constraint": "constraint",
}


@dataclass(frozen=True)
class WorkerJob:
    """One worker's request: GPUs, CPU cores, MiB and minutes; `options` are sbatch's, from the profile.

    If `mem_mib` is 0, no memory per node is requested.
    """

    gpus: int
    cpus: int
    mem_mib: int
    runtime_min: int
    options: tuple[str, ...] = ()
    gpu_type: str | None = None

    @classmethod
    def of(
        cls, request: JobRequest, resources: Mapping[str, Any], partition: str | None
    ) -> WorkerJob:
        """Return the worker's request, completed from the profile of the cell's own job.

        Args:
            request: Request of a worker.
            resources: Snakemake's resources of the cell's job.
            partition: Overrides the profile's partition, unless None.
        """
        named = {option: resources.get(name) for name, option in _NAMED.items()}
        named["partition"] = partition or named["partition"]
        options = [f"--{option}={value}" for option, value in named.items() if value]
        mem_mib = request.mem_mib if resources.get("mem_mb", request.mem_mib) else 0
        if per_cpu := resources.get("mem_mb_per_cpu"):
            mem_mib = 0
            options.append(f"--mem-per-cpu={per_cpu}M")
        extra = shlex.split(str(resources.get("slurm_extra") or ""))
        asks = (request.gpus, request.cpus, mem_mib, request.runtime_min)
        return cls(*asks, (*options, *extra), request.gpu_type)

    @property
    def arguments(self) -> list[str]:
        """The options of sbatch."""
        request = JobRequest(
            1, self.gpus, self.cpus, self.mem_mib, self.runtime_min, gpu_type=self.gpu_type
        )
        return [*request.options, *self.options]

    def as_json(self) -> str:
        """Return a text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerJob:
        """Return the request that `as_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"options": tuple(fields["options"])})
