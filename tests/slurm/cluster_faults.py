"""Ways in which a cluster misbehaves: commands of SLURM that fail, and a cell too large for its job."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from cluster_workflow import ClusterWorkflow

#: Fails until a file is there; what it printed is SLURM's own.
TIMES_OUT = """
case "$*" in *--parsable*) ;; *) exec REAL "$@" ;; esac
[ -e OVER ] && exec REAL "$@"
echo x >> TRIES
BEFORE
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""


def stub(workflow: ClusterWorkflow, folder: Path, name: str, script: str) -> None:
    """Put a shell script before one of SLURM's commands; `REAL` in it is the command itself."""
    path = workflow.variables.get("PATH", workflow.cluster.env["PATH"])
    real = shutil.which(name, path=workflow.cluster.env["PATH"])
    file = folder / "bin" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script.replace('REAL', shlex.quote(real))}\n")
    file.chmod(0o755)
    if str(file.parent) not in path.split(":"):
        workflow.variables["PATH"] = f"{file.parent}:{path}"


def hungry_config(config: dict) -> dict:
    """The same config, but that the experiment `hungry` needs more memory than its job may have."""
    config["cluster"]["mem_mib_per_cpu_worker"] = 1500
    images = config["datasets"]["tiny-images"]
    config["datasets"]["big-batch"] = images | {"train_samples": 8192, "channels": 3, "size": 32}
    hungry = config["studies"]["tiny"]["experiments"]["hungry"]
    hungry |= {"dataset": "big-batch", "global_batch": 8192}
    return config
