"""The table of GPU peaks: found by the names that drivers report, and by nothing near them."""

from __future__ import annotations

import pytest

from stratbench.telemetry.machine import hardware
from stratbench.telemetry.machine.hardware import find_datasheet


@pytest.mark.parametrize(
    ("device_name", "bf16_tflops", "memory_gib"),
    [
        ("Tesla P40", None, 24),
        ("NVIDIA A10", 125, 24),
        ("NVIDIA A10G", 70, 24),
        ("NVIDIA A100-SXM4-40GB", 312, 40),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("NVIDIA A100-PCIE-40GB", 312, 40),
        ("NVIDIA A100 80GB PCIe", 312, 80),
        ("NVIDIA H100 80GB HBM3", 989.4, 80),
        ("NVIDIA H100", 989.4, 96),
        ("NVIDIA H100 PCIe", 756, 80),
        ("NVIDIA H200", 989.4, 141),
        ("NVIDIA B200", 2250, 180),
        ("NVIDIA GB200", 2500, 186),
        ("NVIDIA L4", 121, 24),
        ("NVIDIA L40S", 362, 48),
        ("Tesla V100-SXM2-16GB", None, 16),
        ("Tesla V100-SXM2-32GB", None, 32),
        ("Tesla V100-PCIE-16GB", None, 16),
        ("Tesla T4", None, 16),
        ("NVIDIA RTX A6000", 154.8, 48),
        ("NVIDIA GeForce RTX 3090", 71, 24),
        ("NVIDIA GeForce RTX 4090", 165.2, 24),
    ],
)
def test_reported_names_are_found(device_name, bf16_tflops, memory_gib):
    peak = find_datasheet(device_name)
    assert peak.get_peak_tflops("bf16") == bf16_tflops
    assert peak.memory_gib == memory_gib


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10-24Q",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_other_devices_with_similar_names_are_not(device_name):
    assert find_datasheet(device_name) is None


def test_figures_are_consistent():
    for _, peak in hardware._TABLE:
        assert peak.tf32_tflops is None or peak.fp32_tflops <= peak.tf32_tflops
        assert peak.fp16_tflops is None or peak.fp16_tflops > peak.fp32_tflops
        assert peak.bf16_tflops in (None, peak.fp16_tflops)
        # Dense Ampere and later tensor cores: half precision is twice TF32.
        if peak.tf32_tflops and peak.bf16_tflops:
            assert peak.fp16_tflops / peak.tf32_tflops == pytest.approx(2, rel=0.03)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="int8"):
        find_datasheet("NVIDIA L4").get_peak_tflops("int8")
