"""Lists peak rates of GPUs, from their vendors' public datasheets.

All compute rates are for dense matrices: a datasheet's rate "with sparsity" is twice as high. Half precision
accumulates in fp32, as training does. This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Datasheet:
    """Peak rates and memory of one GPU model, from its datasheet. None: the format is unsupported.

    Attributes:
        name: Short name of the GPU.
        fp32_tflops: Peak in TFLOP/s in fp32, without tensor cores.
        tf32_tflops: Peak in TFLOP/s with TensorFloat-32.
        fp16_tflops: Peak in TFLOP/s with fp16.
        bf16_tflops: Peak in TFLOP/s with bfloat16.
        memory_gib: Advertised memory in GiB; the driver offers up to 6 % less (ECC, reserve).
        memory_gb_per_s: Rate of the memory in GB/s.
        link: Name of the fastest link between two GPUs of a node, such as NVLink 4.
        link_gb_per_s: Rate of this link in GB/s in one direction, half of the datasheet's value for NVLink.
        resident_threads: Largest number of threads that the GPU's multiprocessors can hold at once.
    """

    name: str
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    memory_gib: float
    memory_gb_per_s: float
    link: str
    link_gb_per_s: float
    resident_threads: int

    def get_peak_tflops(self, precision: str) -> float | None:
        """Return the GPU's peak rate in TFLOP/s in a precision other than fp64.

        The result is None if the GPU does not support the precision.
        """
        precision = precision.removesuffix("-true")
        known = ("fp32", "tf32", "fp16", "bf16")
        if precision not in known:
            raise ValueError(
                f"precision {precision!r}: peak rates are known only for {', '.join(known)}; use one of these"
            )
        return getattr(self, f"{precision}_tflops")


_GEN3, _GEN4, _GEN5 = ("PCIe 3 x16", 16), ("PCIe 4 x16", 32), ("PCIe 5 x16", 64)
_NV2, _NV3 = ("NVLink 2", 150), ("NVLink 3", 300)
_NV4, _NV5 = ("NVLink 4", 450), ("NVLink 5", 900)

# Resident threads per GPU: the number of multiprocessors times the threads that each can hold (CUDA C++
# Programming Guide, technical specifications). cudaGetDeviceProperties reports both numbers.
_P40, _V100, _A100, _H100, _H100_PCIE, _B200 = (n * 2048 for n in (30, 80, 108, 132, 114, 148))
_A10, _A10G, _A6000, _L4, _L40S, _RTX3090, _RTX4090 = (
    n * 1536 for n in (72, 80, 84, 58, 142, 82, 128)
)
_T4 = 40 * 1024

# Pattern of a GPU's name, and its datasheet. A pattern must match the whole name that torch and NVML report,
# with or without vendor prefixes: a longer name (a MIG slice, a laptop GPU, a Ti) means other rates.
_TABLE: tuple[tuple[str, Datasheet], ...] = (
    # Source: NVIDIA P40 datasheet. It states no rate for half precision, which is not faster on this GPU.
    (r"P40", Datasheet("P40", 12, None, None, None, 24, 346, *_GEN3, _P40)),
    # Source: NVIDIA T4 datasheet.
    (r"T4", Datasheet("T4", 8.1, None, 65, None, 16, 320, *_GEN3, _T4)),
    # Source: NVIDIA V100 datasheet.
    (r"V100-SXM2-16GB", Datasheet("V100 SXM2 16 GB", 15.7, None, 125, None, 16, 900, *_NV2, _V100)),
    (
        r"V100-SXM[23]-32GB",
        Datasheet("V100 SXM 32 GB", 15.7, None, 125, None, 32, 900, *_NV2, _V100),
    ),
    (r"V100-PCIE-16GB", Datasheet("V100 PCIe 16 GB", 14, None, 112, None, 16, 900, *_GEN3, _V100)),
    (r"V100-PCIE-32GB", Datasheet("V100 PCIe 32 GB", 14, None, 112, None, 32, 900, *_GEN3, _V100)),
    # Source: NVIDIA A10 datasheet.
    (r"A10", Datasheet("A10", 31.2, 62.5, 125, 125, 24, 600, *_GEN4, _A10)),
    # Source: datasheet of the A10G (a variant of the A10 in AWS G5).
    (r"A10G", Datasheet("A10G", 35, 35, 70, 70, 24, 600, *_GEN4, _A10G)),
    # Source: NVIDIA A100 datasheet.
    (r"A100-SXM4-40GB", Datasheet("A100 SXM 40 GB", 19.5, 156, 312, 312, 40, 1555, *_NV3, _A100)),
    (r"A100-SXM4-80GB", Datasheet("A100 SXM 80 GB", 19.5, 156, 312, 312, 80, 2039, *_NV3, _A100)),
    (r"A100-PCIE-40GB", Datasheet("A100 PCIe 40 GB", 19.5, 156, 312, 312, 40, 1555, *_GEN4, _A100)),
    (r"A100 80GB PCIe", Datasheet("A100 PCIe 80 GB", 19.5, 156, 312, 312, 80, 1935, *_GEN4, _A100)),
    # Source: NVIDIA H100 datasheet.
    (r"H100 80GB HBM3", Datasheet("H100 SXM", 67, 494.7, 989.4, 989.4, 80, 3350, *_NV4, _H100)),
    (r"H100 PCIe", Datasheet("H100 PCIe", 51, 378, 756, 756, 80, 2000, *_GEN5, _H100_PCIE)),
    (r"H100 NVL", Datasheet("H100 NVL", 60, 417.5, 835.5, 835.5, 94, 3900, *_GEN5, _H100)),
    # The H100 with 96 GB of HBM2e reports the name "NVIDIA H100". By "H100" users mean the H100 SXM, whose
    # rates are used here. Its memory is as in torchtitan's benchmarks/llama3_h100_202412_torchtitan.md.
    (r"NVIDIA H100", Datasheet("H100 96 GB", 67, 494.7, 989.4, 989.4, 96, 2400, *_NV4, _H100)),
    # Source: NVIDIA H200 datasheet.
    (r"H200", Datasheet("H200 SXM", 67, 494.7, 989.4, 989.4, 141, 4800, *_NV4, _H100)),
    (r"H200 NVL", Datasheet("H200 NVL", 60, 417.5, 835.5, 835.5, 141, 4800, *_GEN5, _H100)),
    # Source: NVIDIA Blackwell architecture brief, HGX B200.
    (r"B200", Datasheet("B200", 80, 1100, 2250, 2250, 180, 8000, *_NV5, _B200)),
    # Source: NVIDIA GB200 NVL72 datasheet; the rates are half of those of a superchip, which has two GPUs.
    # The threads are those of the B200, since the datasheet states none.
    (r"GB200", Datasheet("GB200", 80, 1250, 2500, 2500, 186, 8000, *_NV5, _B200)),
    # Source: NVIDIA L4 and L40S datasheets.
    (r"L4", Datasheet("L4", 30.3, 60, 121, 121, 24, 300, *_GEN4, _L4)),
    (r"L40S", Datasheet("L40S", 91.6, 183, 362, 362, 48, 864, *_GEN4, _L40S)),
    # Source: NVIDIA GA102 and AD102 architecture whitepapers; tensor cores accumulate in fp32.
    (r"RTX A6000", Datasheet("RTX A6000", 38.7, 77.4, 154.8, 154.8, 48, 768, *_GEN4, _A6000)),
    (r"RTX 3090", Datasheet("RTX 3090", 35.6, 35.6, 71, 71, 24, 936, *_GEN4, _RTX3090)),
    (r"RTX 4090", Datasheet("RTX 4090", 82.6, 82.6, 165.2, 165.2, 24, 1008, *_GEN4, _RTX4090)),
)


def find_datasheet(device_name: str) -> Datasheet | None:
    """Return the datasheet of the GPU with this torch or NVML name. None if unknown.

    PCIe boards are listed with their PCIe link, although a bridge between two boards is faster.
    """
    name = device_name.strip()
    bare = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", name)
    for pattern, peak in _TABLE:
        if any(re.fullmatch(pattern, known, re.IGNORECASE) for known in (name, bare)):
            return peak
    return None


def list_datasheets() -> list[Datasheet]:
    """Return the datasheets of all known GPUs, in the order of the table."""
    return [peak for _, peak in _TABLE]
