"""Fixtures: a machine with GPUs in software, and cells that the real launcher trains on it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from design import IMAGES
from machine import LIBRARIES, Machine

sys.path.append(str(Path(__file__).parents[1] / "workflow"))  # for copies of the workflow

from launching import LaunchedCell
from stratbench.cell import record, software_gpu
from stratbench.cell.record import Record
from stratbench.cell.settings import Settings
from stratbench.workload.data.prepare import prepare_data_set

if not software_gpu.is_software_gpu_installed():
    raise pytest.UsageError(
        f"{sys.prefix} has no software GPU (tests/software_gpu/README.md): run make test-gpu-path"
    )

# For NVML, which is found by its name alone.
os.environ["LD_LIBRARY_PATH"] = f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}"
for name in [name for name in os.environ if name.startswith("SOFTWARE_GPU_")]:
    del os.environ[name]
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

#: For a cell of a busy machine, in seconds; a test waits for events.
LIMIT_S = 540


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine of this test's own, with 4 GPUs of 80 GB, on which all that it starts runs."""
    found = Machine(Path("/dev/shm", f"software-gpu-test-{uuid.uuid4().hex[:12]}"))
    monkeypatch.setenv("SOFTWARE_GPU_STATE", str(found.path))
    yield found
    found.remove()


@pytest.fixture
def gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that gives the machine other properties: `gpus(count=8, memory_mib=4096)`."""

    def change(**settings: Any) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"SOFTWARE_GPU_{name.upper()}", str(value))

    return change


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 images of 16x16 pixels in 3 colours and 3 classes, prepared."""
    folder = tmp_path_factory.mktemp("data") / "images"
    prepare_data_set("images", folder, spec=IMAGES["data_spec"])
    return folder


@pytest.fixture
def trained(
    machine: Machine, start_cell: Callable[..., LaunchedCell], data: Path
) -> Callable[..., Record]:
    """A function that has the launcher train a cell to a result; returns its valid record."""

    def train(s: Settings, **options: Any) -> Record:
        launched = start_cell(s, **{"data_dir": data, **options})
        code, output = launched.finish(LIMIT_S)
        assert code == 0, output
        return record.read_record(launched.record)

    return train
