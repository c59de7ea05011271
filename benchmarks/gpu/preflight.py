"""Stage 1: describes this machine, and checks that a forked process can use its GPU."""

from __future__ import annotations

import os
import sys
from glob import glob

import torch

from stage import Stage, in_child
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.memory import get_cuda_uuid
from stratbench.telemetry.provenance import collect_host_facts
from stratbench.train.gpu_locks import DEVICE_FILES

TORCH, PYTHON = (2, 11), (3, 11)


def run(stage: Stage) -> None:
    import torchvision

    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    stage.check("PyTorch is new enough", version >= TORCH, torch.__version__)
    stage.check("Python is new enough", sys.version_info[:2] >= PYTHON, sys.version.split()[0])
    # The worker is imported (by the process that forked this one).
    stage.check(
        "importing the worker leaves CUDA alone", not torch.cuda.is_initialized(), "not initialised"
    )
    with stage.attempt("this machine's device is known"):
        hardware = in_child(stage, describe)
        asked = stage.device
        device = ("cuda" if hardware["cuda"] else "cpu") if asked == "auto" else asked
        stage.device = device
        stage.figures(
            device=device, torch=torch.__version__, torchvision=torchvision.__version__,
            hardware=hardware,
        )  # fmt: skip
        files = glob(DEVICE_FILES) if asked == "auto" else []
        stage.check(
            "a GPU that is there is seen",
            bool(hardware["cuda"]) or not files,
            f"{len(files)} device files, CUDA {'works' if hardware['cuda'] else 'does not work'}",
        )
        if asked == "cuda":
            stage.check("there is a GPU, as asked for", hardware["cuda"], str(hardware["cuda"]))
    with stage.attempt("a forked child computes on the device"):
        total = in_child(stage, compute, stage.device)
        stage.check("a forked child computes on the device", total == 1000.0, f"sum {total}")
    if stage.needs_gpu("NVML knows the GPU that CUDA uses", "free memory"):
        reason = str(hardware["nvml_reason"])
        if "ModuleNotFoundError" in reason:
            stage.skip("NVML knows the GPU that CUDA uses", "nvidia-ml-py is not installed")
        else:
            known = hardware["nvml"] is not None
            stage.check("NVML knows the GPU that CUDA uses", known, reason)
        share = hardware["free_bytes"] / hardware["memory_bytes"]
        said = f"{share:.0%} of {hardware['memory_bytes'] / 2**30:.0f} GiB"
        stage.check("nearly all of the GPU's memory is free", share > 0.95, said)


def compute(device: str) -> float:
    """A sum over a thousand ones on `device`."""
    return float(torch.ones(1000, device=device).sum())


def describe() -> dict[str, object]:
    """The host, and the GPU as CUDA, its libraries and NVML see it."""
    found: dict[str, object] = {"host": collect_host_facts(), "cuda": torch.cuda.is_available()}
    found["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    nvml = Nvml()
    found |= {"driver": nvml.read_driver_versions(), "nvml": None, "nvml_reason": nvml.reason}
    if not found["cuda"]:
        return found
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    gpu = nvml.find_gpu_by_uuid(get_cuda_uuid(torch.device("cuda", 0)))
    return found | {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": [properties.major, properties.minor],
        "memory_bytes": total_bytes,
        "free_bytes": free_bytes,
        "uuid": get_cuda_uuid(torch.device("cuda", 0)),
        "nvml": gpu.read_identity_and_settings() if gpu else None,
        "cuda_runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
