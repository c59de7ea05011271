"""Resources that a worker job requests from SLURM. Snakemake rules pass them to the launcher as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stratbench.study.resources import JobRequest

#: Name of sbatch's option by name of Snakemake's resource.
_NAMED = {
    "slurm_partition": "partition",
    "slurm_account": "account",
    "qos": "qos",
    "constraint": "constraint",
}


@dataclass(frozen=True)
class WorkerJob:
    """Resources that one worker job requests from SLURM.

    `sbatch_options` are further options from the Snakemake profile. If `mem_mib` is 0, no memory per node is
    requested.
    """

    gpus: int
    cpus: int
    mem_mib: int
    runtime_min: int
    sbatch_options: tuple[str, ...] = ()
    gpu_type: str | None = None

    @classmethod
    def from_request(
        cls, request: JobRequest, resources: Mapping[str, Any], partition: str | None
    ) -> WorkerJob:
        """Make a worker job's request, with the sbatch options of the cell's own job.

        Args:
            request: Request of a worker.
            resources: Snakemake's resources of the cell's own job.
            partition: SLURM partition of worker jobs; None for the partition of the cell's own job.
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
    def sbatch_arguments(self) -> list[str]:
        """Command-line options of sbatch that request these resources."""
        request = JobRequest(
            1, self.gpus, self.cpus, self.mem_mib, self.runtime_min, gpu_type=self.gpu_type
        )
        return [*request.sbatch_options, *self.sbatch_options]

    def as_json(self) -> str:
        """Return the request as JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, json_text: str) -> WorkerJob:
        """Make a request from the JSON that `as_json` wrote."""
        fields = json.loads(json_text)
        return cls(**fields | {"sbatch_options": tuple(fields["sbatch_options"])})
