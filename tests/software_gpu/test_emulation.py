"""The software GPU itself, where a wrong answer of it would hide a fault of the product."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from machine import Machine

from launching import until

pytestmark = pytest.mark.timeout(600)
LIMIT_S = 300


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program that uses PyTorch on the machine of the environment."""
    return subprocess.run(
        [sys.executable, "-c", f"import torch\n{program}"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def printed(program: str, **variables: str) -> list[str]:
    """The words that a program prints, which must end well."""
    done = run(program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


HOLD = """
import sys
x = torch.empty({gib} << 30, dtype=torch.uint8, device="cuda:{gpu}")
print("holds", flush=True)
sys.stdin.read()
"""


def test_memory_is_shared_by_processes_and_given_back_by_one_that_is_killed(
    machine: Machine, gpus: Callable[..., None]
) -> None:
    gpus(memory_mib=8192)
    program = f"import torch\n{HOLD.format(gib=6, gpu=1)}"
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "holds\n"
        held = next(p for p in machine.processes() if p.pid == holder.pid)
        assert held.used_bytes[1] == (6 << 30) + (450 << 20)  # and its context
        assert held.used_bytes[0] == 0
        refused = run(HOLD.format(gib=6, gpu=1))
        assert "torch.OutOfMemoryError" in refused.stderr
        assert f"Process {holder.pid} has" in refused.stderr
        assert run(HOLD.format(gib=6, gpu=0)).returncode == 0
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    free, total = map(int, printed('print(*torch.cuda.mem_get_info("cuda:1"))'))
    assert (total, free) == (8192 << 20, (8192 - 450) << 20)


RANKS = """
import os, sys
import torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
x = torch.full((4,), float(rank + 1), device="cuda")
dist.all_reduce(x)
print(x.tolist(), flush=True)
if sys.argv[3] == "other":
    dist.all_reduce(x) if rank else dist.broadcast(x, 0)
if sys.argv[3] == "longer":
    dist.all_reduce(torch.ones(4 + rank, device="cuda"))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("second", "told"),
    [("none", None), ("other", "calls broadcast_bytes of 4"), ("longer", "of 5 of type 7")],
)
def test_ranks_exchange_values_and_those_that_call_different_collectives_get_an_error(
    machine: Machine, tmp_path, second: str, told: str | None
) -> None:
    program = f"import torch\n{RANKS}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store"), second],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(p.communicate(timeout=LIMIT_S), p.returncode) for p in ranks]
    for (output, errors), code in ended:
        assert output == "[3.0, 3.0, 3.0, 3.0]\n", errors
        assert (code == 0) == (told is None)
    if told:
        (_, errors), _ = ended[0]
        assert told in errors
        assert "invalid usage" in errors


PINNED = """
import mmap
rt = torch.cuda.cudart()
torch.cuda.init()
pages = mmap.mmap(-1, 4 * 4096)
at = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
print(*(int(code) for code in (
    rt.cudaHostRegister(at, 4096, 0),
    rt.cudaHostRegister(at + 100, 50, 0),
    rt.cudaHostRegister(at + 4096, 100, 0),
    rt.cudaHostRegister(at + 4096 + 200, 100, 0),
    rt.cudaHostUnregister(at + 8192),
    rt.cudaHostUnregister(at),
    rt.cudaHostUnregister(at),
    rt.cudaHostRegister(at, 3 * 4096, 0),
    rt.cudaHostUnregister(at + 4096),
    rt.cudaHostRegister(at, 4 * 4096, 0),
)))
"""


def test_pages_are_registered_whole_and_once(machine: Machine) -> None:
    """As CUDA: what shares a page with a registered range is refused, and what is not registered, too."""
    fine, already, unknown = 0, 712, 713
    codes = [fine, already, fine, already, unknown, fine, unknown, already, fine, fine]
    assert list(map(int, printed(PINNED))) == codes


def test_what_a_host_may_not_do_ends_as_on_a_gpu(machine: Machine) -> None:
    touched = run('import ctypes; ctypes.string_at(torch.ones(8, device="cuda").data_ptr(), 4)')
    assert touched.returncode == -signal.SIGSEGV
    forked = run(
        "import os\n"
        'torch.ones(1, device="cuda")\n'
        "if os.fork() == 0:\n"
        '    torch._C._cuda_setDevice(0); torch.ones(1, device="cuda")\n'
        "os.wait()\n"
    )
    assert "initialization error" in forked.stderr or "re-initialize CUDA" in forked.stderr


EARLY = """
device = torch.full((1000,), 7.0, device="cuda")
torch.cuda.synchronize()
host = torch.zeros(1000, pin_memory=True)
host.copy_(device, non_blocking=True)
early = host[999].item()
torch.cuda.synchronize()
print(early, host[999].item())
"""


def test_a_host_that_does_not_wait_for_a_copy_sees_it_where_streams_are_lazy(
    machine: Machine,
) -> None:
    assert printed(EARLY) == ["7.0", "7.0"]
    assert printed(EARLY, SOFTWARE_GPU_LAZY="1") == ["0.0", "7.0"]


def test_the_names_of_its_gpus_and_of_its_driver_say_what_it_is(machine: Machine) -> None:
    program = (
        "import pynvml; pynvml.nvmlInit()\n"
        "print(*(torch.cuda.get_device_properties(i).uuid for i in range(4)))\n"
        "print(pynvml.nvmlSystemGetDriverVersion())\n"
    )
    *uuids, _, software, gpu = printed(program, SOFTWARE_GPU_NAME="Tesla", SOFTWARE_GPU_MAJOR="9")
    assert len(set(uuids)) == len({uuid[:8] for uuid in uuids}) == 4
    assert all(uuid.endswith("-736f-667477617265") for uuid in uuids)
    assert (software, gpu) == ("(software", "GPU)")


def test_a_process_that_ends_is_no_longer_on_the_gpu(machine: Machine) -> None:
    assert run('torch.ones(1, device="cuda:2")').returncode == 0
    program = (
        "import pynvml; pynvml.nvmlInit()\n"
        'x = torch.ones(1, device="cuda:2")\n'
        "h = pynvml.nvmlDeviceGetHandleByIndex(2)\n"
        "print(len(pynvml.nvmlDeviceGetComputeRunningProcesses(h)))\n"
    )
    assert printed(program) == ["1"]
    until(lambda: all(not os.path.exists(f"/proc/{p.pid}") for p in machine.processes()))
