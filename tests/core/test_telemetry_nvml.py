"""NVML against a fake library: units, names, and that no failure of it reaches the caller."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from fake_nvml import INSTANCES, UUIDS, FakeNvml, GpuIsLost, NotSupported, NVMLError

from stratbench.telemetry.machine.nvml import Nvml


def test_counters_are_in_the_units_of_their_names():
    counters = Nvml(FakeNvml()).list_gpus()[0].read_counters()
    assert counters == {
        "gpu_util_pct": 97,
        "mem_bus_util_pct": 41,
        "mem_used_bytes": 12884901888,
        "power_w": pytest.approx(312.5),
        "energy_j": pytest.approx(5000),
        "temperature_c": 61,
        "sm_clock_mhz": 1410,
        "mem_clock_mhz": 1593,
        "throttle": "sw_power_cap;hw_thermal_slowdown",
        "nvlink_tx_bytes": 102400,
        "nvlink_rx_bytes": 204800,
    }
    snapshot = Nvml(FakeNvml()).list_gpus()[0].measure_pcie_bytes_per_s()
    assert snapshot == {"pcie_tx_bytes_per_s": 1_500_000, "pcie_rx_bytes_per_s": 2_500_000}


def test_what_a_gpu_does_not_offer_is_absent_and_the_rest_stays():
    failures = {
        "nvmlDeviceGetTotalEnergyConsumption": NotSupported(),
        "nvmlDeviceGetUtilizationRates": NotSupported(),
        "nvmlDeviceGetFieldValues": NotSupported(),
        "nvmlDeviceGetPcieThroughput": NotSupported(),
    }
    counters = Nvml(FakeNvml(failures=failures)).list_gpus()[0].read_counters()
    assert counters.keys() == {
        "mem_used_bytes",
        "power_w",
        "temperature_c",
        "sm_clock_mhz",
        "mem_clock_mhz",
        "throttle",
    }


def test_a_lost_gpu_answers_nothing_and_raises_nothing():
    library = FakeNvml()
    gpu = Nvml(library).list_gpus()[0]
    names = [name for name in dir(FakeNvml) if name.startswith("_nvmlDevice")]
    library._failures = {name[1:]: GpuIsLost() for name in names} | {
        name: GpuIsLost() for name in library._answers
    }
    assert gpu.read_counters() == {}
    assert gpu.read_identity_and_settings() == {"index": 0}
    assert gpu.read_memory_bytes_by_pid() == {}
    assert gpu.read_own_process_memory_bytes() is None


def test_free_clocks_are_an_empty_text_and_an_unknown_state_is_absent():
    free = FakeNvml(answers={"nvmlDeviceGetCurrentClocksEventReasons": 0})
    assert Nvml(free).list_gpus()[0].read_counters()["throttle"] == ""
    neither = (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    )
    assert "throttle" not in Nvml(FakeNvml(missing=neither)).list_gpus()[0].read_counters()


def test_older_drivers_throttle_reasons_are_read_by_their_older_name():
    library = FakeNvml(
        missing=("nvmlDeviceGetCurrentClocksEventReasons",),
        answers={"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20},
    )
    assert Nvml(library).list_gpus()[0].read_counters()["throttle"] == "sw_thermal_slowdown"


def test_a_counter_of_pcie_that_wraps_between_two_samples_is_none():
    def field(value: int, kind: int) -> SimpleNamespace:
        return SimpleNamespace(nvmlReturn=0, valueType=kind, value=SimpleNamespace(ullVal=value))

    for kind, known in ((3, True), (1, False)):  # of 64 bits, and of 32
        library = FakeNvml(answers={"nvmlDeviceGetFieldValues": [field(9, kind)] * 4})
        counters = Nvml(library).list_gpus()[0].read_counters()
        assert counters.get("pcie_tx_bytes") == (9 if known else None)
        assert "nvmlDeviceGetPcieThroughput" not in library.calls  # it blocks


def test_static_facts_identify_the_gpu():
    nvml = Nvml(FakeNvml(gpus=2))
    assert nvml.list_gpus()[1].read_identity_and_settings() == {
        "index": 1,
        "name": "NVIDIA A100-SXM4-80GB",
        "uuid": UUIDS[1],
        "pci_bus_id": "00000000:07:00.0",
        "memory_bytes": 85899345920,
        "power_limit_w": pytest.approx(400),
        "max_sm_clock_mhz": 1410,
        "max_mem_clock_mhz": 1593,
        "application_sm_clock_mhz": 1275,
        "pcie_generation": 4,
        "pcie_width": 16,
        "nvlinks_active": 10,
    }
    assert nvml.read_driver_versions() == {
        "driver_version": "550.54.15",
        "cuda_driver_version": "12.4",
    }
    assert nvml.list_gpu_pair_pcie_paths() == [{"gpus": [0, 1], "path": "PXB"}]


def test_gpu_of_finds_by_uuid_and_only_by_it():
    nvml = Nvml(FakeNvml(gpus=2))
    assert nvml.find_gpu_by_uuid(UUIDS[1]).index == 1
    assert nvml.find_gpu_by_uuid("GPU-unknown") is None
    assert nvml.find_gpu_by_uuid(None) is None


def test_an_instance_is_found_by_the_uuid_that_cuda_tells_and_has_no_power_of_its_gpu():
    nvml = Nvml(FakeNvml(gpus=2, mig=True))
    for told in (INSTANCES[1], INSTANCES[1].replace("MIG", "GPU")):  # CUDA tells no prefix
        instance = nvml.find_gpu_by_uuid(told)
        assert instance.index is None  # NVML's would be that of the first GPU
        assert instance.read_identity_and_settings()["uuid"] == INSTANCES[1]
        assert instance.read_used_memory_bytes() == 12884901888
        assert instance.read_counters().keys().isdisjoint({"power_w", "energy_j"})
    assert nvml.find_gpu_by_uuid(UUIDS[0]) is None  # CUDA may tell the GPU's for an instance


@pytest.mark.parametrize(
    ("name", "mig", "expected"),
    [
        ("1", False, UUIDS[1]),
        ("01", False, UUIDS[1]),
        ("2", False, None),
        (UUIDS[0], False, UUIDS[0]),
        ("GPU-666", False, UUIDS[1]),
        ("GPU-", False, None),  # of both
        ("GPU-7", False, None),
        (INSTANCES[0], False, None),
        (INSTANCES[0], True, INSTANCES[0]),
        ("MIG-aaaab", True, INSTANCES[1]),
        ("MIG-aaaa", True, None),
    ],
)
def test_what_a_name_in_cuda_visible_devices_stands_for(name, mig, expected):
    assert Nvml(FakeNvml(gpus=2, mig=mig)).find_gpu_uuid(name) == expected


def test_memory_of_this_process(monkeypatch):
    gpu = Nvml(FakeNvml()).list_gpus()[0]
    assert list(gpu.read_memory_bytes_by_pid()) == [4242]
    assert gpu.read_own_process_memory_bytes() is None
    monkeypatch.setattr("os.getpid", lambda: 4242)
    assert gpu.read_own_process_memory_bytes() == 1 << 30


def test_memory_info_falls_back_to_its_first_version():
    class OnlyFirst(FakeNvml):
        def __getattr__(self, name):
            if name == "nvmlDeviceGetMemoryInfo":
                # Takes no version: a second argument is a TypeError, as in old pynvml.
                return lambda handle: SimpleNamespace(total=10, used=7)
            return super().__getattr__(name)

    assert Nvml(OnlyFirst()).list_gpus()[0].read_used_memory_bytes() == 7


def test_without_a_driver_there_are_no_gpus_and_a_reason():
    nvml = Nvml(FakeNvml(failures={"nvmlInit": NVMLError("Driver Not Loaded")}))
    assert nvml.list_gpus() == []
    assert nvml.read_driver_versions() == {}
    assert nvml.list_gpu_pair_pcie_paths() == []
    assert "Driver Not Loaded" in nvml.reason


def test_without_the_library_there_are_no_gpus_and_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = Nvml()
    assert nvml.list_gpus() == []
    assert "pynvml" in nvml.reason
