"""Provenance: no secret, nothing invented, and a hash of weights that wrappers do not change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fake_nvml import UUIDS, FakeNvml
from torch import nn

from stratbench.telemetry import provenance
from stratbench.telemetry.git import read_git_state
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.provenance import collect_worker_provenance, hash_state_dict


def test_facts_of_a_cpu_worker_are_there_and_ready_for_json(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    facts = json.loads(json.dumps(collect_worker_provenance("cpu")))
    assert facts["software"]["torch"] == torch.__version__
    assert facts["software"]["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["host"]["threads"] == torch.get_num_threads()
    assert facts["host"]["memory_bytes"] > 1 << 28
    assert facts["host"]["cpu_model"]
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert facts["load_1m"] >= 0
    assert "gpu" not in facts


def test_environment_is_taken_by_an_allow_list_and_secrets_never(monkeypatch):
    taken = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "0"}
    left = {
        "NCCL_AUTH_TOKEN": "x",
        "TORCH_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "STRATBENCH_SECRET": "x",
        "HOME_PAGE": "x",
    }
    for name, value in (taken | left).items():
        monkeypatch.setenv(name, value)
    environment = collect_worker_provenance("cpu")["environment"]
    assert taken.items() <= environment.items()
    assert not left.keys() & environment.keys()


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("TORCH_HUB_URL", "https://user:pa55word@mirror.example.com/hub", True),
        ("TORCH_HUB_URL", "https://mirror.example.com:8080/hub", False),
        ("PYTORCH_EXTRA", "region=eu,token=abc", True),
        ("PYTORCH_EXTRA", "API_KEY: abc", True),
        ("TORCH_HF", "hf_abcdefghijklmnopqrst", True),
        ("CUDA_X", "ghp_0123456789abcdefghijABCDEFGHIJ012345", True),
        ("CUDA_X", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", True),
        ("CUDA_X", "d41d8cd98f00b204e9800998ecf8427e", True),
        ("CUDA_X", "wJalrXUtnFEMI7K7MDENGbPxRfiCYEXAMPLEKEY", True),
        (
            "CUDA_VISIBLE_DEVICES",
            "GPU-8f2a6d1c-3b7e-4a59-9c0d-1e2f3a4b5c6d,MIG-8f2a6d1c3b7e",
            False,
        ),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0,0xffffffffffffffffffffffffffffffff", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128", False),
        (
            "LD_PRELOAD",
            "/opt/pkgs/lib-1.2-d41d8cd98f00b204e9800998ecf8427e/libtcmalloc.so.4",
            False,
        ),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7", False),
    ],
)
def test_a_value_that_looks_like_a_secret_is_left_out(monkeypatch, name, value, secret):
    monkeypatch.setenv(name, value)
    assert (name not in collect_worker_provenance("cpu")["environment"]) is secret


def test_slurm_job_is_named_inside_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JWT", "secret")
    slurm = collect_worker_provenance("cpu")["slurm"]
    assert slurm["SLURM_JOB_ID"] == "77"
    assert "SLURM_JWT" not in slurm


def test_flags_follow_the_settings():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert collect_worker_provenance("cpu")["flags"]["float32_matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_gpu_facts_join_torchs_and_nvmls(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA A100-SXM4-80GB",
        total_memory=84_000_000_000,
        multi_processor_count=108,
        major=8,
        minor=0,
        uuid=UUIDS[1].removeprefix("GPU-"),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = collect_worker_provenance("cuda:0", nvml=Nvml(FakeNvml(gpus=2)))
    # CUDA's first device is NVML's second: found by UUID, not by number.
    assert facts["gpu"]["index"] == 1
    assert facts["gpu"]["uuid"] == UUIDS[1]
    assert facts["gpu"]["capability"] == "8.0"
    assert facts["driver"]["driver_version"] == "550.54.15"
    assert facts["topology"] == [{"gpus": [0, 1], "path": "PXB"}]
    without = Nvml(FakeNvml(failures={"nvmlInit": OSError("no driver")}))
    facts = collect_worker_provenance("cuda:0", nvml=without)
    assert facts["gpu"]["name"] == "NVIDIA A100-SXM4-80GB"
    assert "driver" not in facts
    assert facts["nvml_reason"] == "OSError: no driver"


@pytest.mark.slow
def test_torchvision_is_not_imported_for_its_version():
    program = (
        "import sys; from stratbench.telemetry.provenance import collect_worker_provenance;"
        "collect_worker_provenance('cpu'); sys.exit('torchvision' in sys.modules)"
    )
    root = Path(provenance.__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=300)


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
            timeout=300,
        )

    git("init", "-q")
    (tmp_path / "code.py").write_text("one")
    git("add", "code.py")
    read_git_state.cache_clear()
    yield tmp_path, git
    read_git_state.cache_clear()


def test_git_state_knows_clean_changed_and_untracked_code(checkout):
    root, git = checkout
    assert read_git_state(root) is None  # no commit yet
    git("commit", "-q", "-m", "first")
    read_git_state.cache_clear()
    state = read_git_state(root)
    assert len(state["revision"]) == 40
    assert state["dirty"] is False
    (root / "results.txt").write_text("untracked, but no code")
    read_git_state.cache_clear()
    assert read_git_state(root)["dirty"] is False
    (root / "new.py").write_text("untracked code")
    read_git_state.cache_clear()
    assert read_git_state(root)["dirty"] is True
    (root / "new.py").unlink()
    (root / "code.py").write_text("two")
    read_git_state.cache_clear()
    assert read_git_state(root)["dirty"] is True


def test_git_state_is_none_without_a_checkout_or_git(tmp_path, monkeypatch):
    read_git_state.cache_clear()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git_state(tmp_path) is None
    read_git_state.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git_state(tmp_path) is None
    read_git_state.cache_clear()


def weights() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(7)}


def test_hash_does_not_depend_on_order_layout_or_wrapper():
    expected = hash_state_dict(weights())
    other = weights()
    assert hash_state_dict({"a": other["a"], "b": other["b"]}) == expected
    column_major = other["b"].t().contiguous().t()
    assert hash_state_dict({"a": other["a"], "b": column_major}) == expected
    flat = torch.arange(10.0)  # a view into a larger flat buffer
    assert hash_state_dict({"a": other["a"], "b": flat[:6].view(2, 3)}) == expected
    assert hash_state_dict({f"module.{name}": t for name, t in other.items()}) == expected
    assert hash_state_dict({f"_orig_mod.{name}": t for name, t in other.items()}) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w["b"].view(-1)[0].add_(1e-7),
        lambda w: w.update(b=w["b"].reshape(3, 2)),
        lambda w: w.update(b=w["b"].double()),
        lambda w: w.update(b=w["b"].view(torch.int32)),
        lambda w: w.update(c=w.pop("b")),
        lambda w: w.pop("a"),
        lambda w: w.update(b=-w["b"] * -1.0 * torch.tensor([[1.0, 1, 1], [1, 1, -1]])),
    ],
    ids=["value", "shape", "dtype", "same bytes, other dtype", "name", "missing", "sign"],
)
def test_hash_changes_with(change):
    changed = weights()
    change(changed)
    assert hash_state_dict(changed) != hash_state_dict(weights())


def test_hash_takes_bfloat16_and_empty_tensors_and_no_other_entries():
    state = {"half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0, 4)}
    assert len(hash_state_dict(state)) == 64
    with pytest.raises(TypeError, match="'extra' of type dict"):
        hash_state_dict({"extra": {}})


def sharded_hash(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7))
    plain = hash_state_dict(model.state_dict())
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    Path(folder, f"{rank}.json").write_text(
        json.dumps([plain, hash_state_dict(model.state_dict())])
    )
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hash_of_sharded_weights_is_that_of_the_whole_ones(tmp_path):
    mp.start_processes(sharded_hash, (str(tmp_path),), nprocs=2, start_method="forkserver")
    hashes = {h for rank in (0, 1) for h in json.loads((tmp_path / f"{rank}.json").read_text())}
    assert len(hashes) == 1
