"""What a worker calls on CUDA, called on fake tensors on `cuda:0`: no GPU, but the code of one.

Not covered: what only a real device does, such as asynchrony, numbers, NCCL, cuDNN's search.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import FOLDERS, WORKFLOW

HERE = Path(__file__).parent
STRATEGIES = [
    ("single", {}),
    ("ddp", {}),
    ("fsdp", {}),
    ("fsdp", {"mixed_precision": "policy"}),
    ("ps-sync", {}),
]
#: (strategy, options, model, precision). The quickest family in fp16, which has all there is, in fp32, which
#: has another layout, and whole in the other number formats; one with BatchNorm under each strategy; one that
#: concatenates outputs, and one whose blocks own parameters, which FSDP shards with them.
CASES = [
    *((*s, "vgg-compact", "fp16") for s in STRATEGIES),
    *((*s, "vgg-compact", "fp32") for s in STRATEGIES if s[1] == {}),
    *(("single", {}, "vgg-compact", precision) for precision in ("bf16", "tf32")),
    ("ddp", {"gradient_as_bucket_view": False}, "vgg-compact", "fp16"),
    ("fsdp", {"reshard_after_forward": "never"}, "vgg-compact", "fp16"),
    *((*s, "resnet-compact", "fp16") for s in STRATEGIES if s[1] == {}),
    ("single", {}, "densenet-compact", "fp16"),
    *((strategy, {}, "convnext-compact", "fp16") for strategy in ("single", "fsdp")),
]

PROGRAM = """
import ctypes, sys
assert ctypes.CDLL(sys.argv[1]).install_cuda_guard() == 1
import fake_cuda
fake_cuda.main(sys.argv[2])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stand-in with"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has its own CUDA"),
]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that cuda_guard.cpp makes."""
    torch_dir, out = Path(torch.__file__).parent, tmp_path_factory.mktemp("guard") / "guard.so"
    command = [
        "g++", "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch_dir / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(HERE / "cuda_guard.cpp"), "-o", str(out), f"-L{torch_dir / 'lib'}", "-lc10",
        "-ltorch_cpu", f"-Wl,-rpath,{torch_dir / 'lib'}",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def answers(guard: Path) -> dict[str, dict[str, Any]]:
    """What fake_cuda.py said of each case, all in one process."""
    command = [sys.executable, "-c", PROGRAM, str(guard), json.dumps(CASES)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (WORKFLOW, *FOLDERS)))}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=350)
    lines = done.stdout.splitlines()
    assert len(lines) == len(CASES), f"ended with {done.returncode} in case {CASES[len(lines)]}"
    return {str(case): json.loads(line) for case, line in zip(CASES, lines, strict=True)}


def name_of(case: tuple) -> str:
    strategy, options, model, precision = case
    return "-".join((model, precision, strategy, *map(str, options.values())))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_worker_warms_up_trains_and_evaluates(answers, case):
    """Among what would raise: anything that waits for the device, and layouts the kernels refuse."""
    assert answers[str(case)]["error"] is None, answers[str(case)]["error"]
    _, _, model, precision = case
    layouts = answers[str(case)]["layouts"]
    assert layouts
    # Every strategy's convolutions and normalisations compute in the same layout, the wanted one.
    assert layouts == answers[str(("single", {}, model, precision))]["layouts"]
    wanted = "plain" if precision == "fp32" else "last"
    assert set(layouts.values()) <= {wanted, "either"}
    assert wanted in layouts.values()
