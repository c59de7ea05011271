"""`make gpu-check` without a GPU: its own half runs, and no stage can take the others with it."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from test_worker import BARE

from launching import LIMIT_S
from stratbench.telemetry.machine.hardware import list_datasheets

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def part(monkeypatch):
    """A function that imports a file of the check."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


class Noted:
    """Stands for a stage: keeps the outcomes."""

    on_cuda = True

    def __init__(self):
        self.outcomes, self.skipped = {}, []

    def check(self, what, holds, said=""):
        self.outcomes[what] = holds

    def skip(self, what, why):
        self.skipped.append(what)

    def figures(self, **figures):
        pass

    def needs_gpu(self, *names):
        return True


def run_check(*arguments, code=None, path=""):
    """Exit code, output and evidence of the check, or of `code` that calls it; imports from `path`, too."""
    command = [sys.executable, *(["-c", code] if code else [str(FOLDER / "check.py")]), *arguments]
    env = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    out = Path(arguments[arguments.index("--out") + 1])
    assert out.exists(), done.stderr
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_what_needs_no_gpu_holds(tmp_path):
    """Nothing is installed but what the check says that it needs."""
    (tmp_path / "sitecustomize.py").write_text(BARE, encoding="utf-8")
    stages = ("preflight", "matrix", "steps", "memory", "server", "clock", "power")
    code, output, evidence = run_check(
        "--device", "cpu", "--small", "--stages", *stages, "--out", str(tmp_path / "evidence.json"),
        path=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert evidence["outcome"] == "passed"
    assert list(evidence["stages"]) == list(stages)
    assert "no GPU" in output
    assert all(output.count(f"PASSED  {name}") == 1 for name in stages)
    matrix = evidence["stages"]["matrix"]["checks"]
    assert sum("is single" in check["what"] for check in matrix) == 2 * 4
    assert any("NCCL" in what for what in evidence["unproven"])
    assert "stage cells: not asked for" in evidence["unproven"]
    assert evidence["git"]["revision"]
    assert evidence["packages"]["torch"]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])
    ]


STAGES = {
    "hangs": textwrap.dedent("""
        import time
        def run(stage):
            stage.check('first', True)
            stage.skip('another', 'why')
            stage.figures(blocks_ms=[1, 2])
            time.sleep(600)
    """),
    "dies": "import os\ndef run(stage):\n    stage.check('first', True)\n    os.kill(os.getpid(), 9)\n",
    "raises": "def run(stage):\n    with stage.attempt('second'):\n        raise ValueError('why')\n",
    "works": "def run(stage):\n    stage.check('last', True, 'figures')\n",
}


ASLEEP = """
    import os, subprocess, sys
    def run(stage):
        stage.check('first', True)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(os.getpid(), child.pid, file=open({pids!r} + ".new", "w"), flush=True)
        os.replace({pids!r} + ".new", {pids!r})
        child.wait()
"""


@pytest.mark.slow
def test_the_stage_at_work_is_ended_with_the_check(tmp_path):
    """By SIGHUP: that of the launcher's signals which only a terminal's end sends."""
    signum = signal.SIGHUP
    pids, out = tmp_path / "pids", tmp_path / "evidence.json"
    text = textwrap.dedent(ASLEEP).format(pids=str(pids))
    (tmp_path / "asleep.py").write_text(text, encoding="utf-8")
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(FOLDER)!r}, {str(tmp_path)!r}]
        import check
        check.STAGES = (check.Listed("asleep", 600, "test"),)
        sys.exit(check.main(["--device", "cpu", "--out", {str(out)!r}]))
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    family = []
    try:
        while not pids.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        process.send_signal(signum)
        output, _ = process.communicate(timeout=LIMIT_S)
        _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
        assert alive == []
    finally:
        process.kill()
        for left in family:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    assert process.returncode == 128 + signum
    assert f"stopped by {signum.name}" in output
    found = json.loads(out.read_text(encoding="utf-8"))["stages"]["asleep"]
    assert found["reason"] == f"stopped by {signum.name}"
    assert [check["what"] for check in found["checks"]] == ["first"]


@pytest.mark.slow
def test_a_stage_that_hangs_dies_or_raises_does_not_stop_the_next(tmp_path):
    for name, text in STAGES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(FOLDER)!r}, {str(tmp_path)!r}]
        sys.modules["snakemake"] = sys.modules["fastjsonschema"] = None  # not installed
        import check
        check.STAGES = tuple(check.Listed(name, 0.5, "test") for name in {list(STAGES)})
        sys.exit(check.main(sys.argv[1:]))
    """)
    out = tmp_path / "evidence.json"
    status, output, evidence = run_check("--device", "cpu", "--out", str(out), code=code)
    found = evidence["stages"]
    assert status == 1, output
    assert {name: f["outcome"] for name, f in found.items()} == {
        "hangs": "failed", "dies": "failed", "raises": "failed", "works": "passed",
    }  # fmt: skip
    assert found["hangs"]["reason"] == "not done after 2 s"
    assert found["hangs"]["skipped"] == [{"what": "another", "why": "why"}]  # what it had is kept
    assert found["hangs"]["figures"] == {"blocks_ms": [1, 2]}
    assert found["dies"]["reason"] == "ended with code -9"
    assert [c["what"] for c in found["dies"]["checks"]] == ["first"]  # what it had is kept
    assert found["raises"]["checks"][0]["said"] == "ValueError: why"
    assert "FAILED second: ValueError: why" in output


# ---------------------------------------------------------------- what only a GPU's figures go through


@pytest.mark.parametrize(
    ("after", "layouts", "holds"),
    [(1.0, 3, True), (1.02, 3, False), (1.0, 2, False)],
)
def test_a_training_that_is_not_singles_is_found(part, after, layouts, holds):
    """Weights went from 0 to 1; two hundredths more of that way are too many in fp32."""
    matrix, stage = part("matrix"), Noted()

    def trained(weight, n):
        before, end = torch.zeros(4), torch.full((4,), weight)
        return matrix.Trained([2.0], [before], [end], {"contiguous": n}, None)

    single = trained(1.0, 3)
    matrix.compare(stage, "vgg-compact fp32 ddp", single, trained(after, layouts), "fp32")
    assert list(stage.outcomes.values()) == [holds]


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        ([2.3, 2.0, 1.9], True),
        ([6.8, 0.0], True),
        ([0.0, 0.0], False),
        ([-0.18, 2.0], False),
        ([7.0, 2.0], False),
        ([math.nan, 2.0], False),
    ],
)
def test_a_first_loss_that_cannot_be_is_found(part, losses, holds):
    matrix, stage = part("matrix"), Noted()
    weights = [torch.zeros(4)], [torch.ones(4)]
    single = matrix.Trained(losses, *weights, {}, None)
    matrix.compare(stage, "vgg-compact fp16 single", single, single, "fp16")
    assert stage.outcomes == {"vgg-compact fp16 single trains": holds}


@pytest.mark.parametrize(
    ("ratios", "holds"),
    [
        ([1.004, 1.005, 1.006, 1.005, 1.004, 1.005, 1.006, 1.2], True),
        ([1.05, 1.05, 1.051, 1.05, 1.05, 1.051, 1.05, 0.8], False),  # one lucky block
        ([1.02, 1.3, 1.1, 1.2, 1.4, 1.5, 1.2, 1.3], False),  # however much, more than the aim
        ([0.98, 1.0, 1.02, 1.0, 0.97, 1.01, 1.03, 1.0], None),
        ([0.7979, 245.1323, 18.0, 18.5, 1.1, 120.0, 3.0, 30.0], False),
        ([0.7979, 245.1323, 18.0, 18.5, 0.9, 120.0, 3.0, 30.0], None),
    ],
)
def test_the_cost_of_marks_is_the_median_of_blocks_that_agree(part, ratios, holds):
    clock, stage = part("clock"), Noted()
    clock.judge(stage, ratios)
    what = "phase marks cost less than 1 % of a step"
    assert stage.outcomes == ({} if holds is None else {what: holds})
    assert stage.skipped == ([what] if holds is None else [])


def test_overlap_is_the_share_of_copies_beside_kernels(part, tmp_path):
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 100},
        {"cat": "kernel", "name": "gemm", "ts": 50, "dur": 100},  # until 150, on another stream
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 100, "dur": 100},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0, "dur": 100},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 300, "dur": 100},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt", encoding="utf-8") as f:
        json.dump({"traceEvents": events}, f)
    found = part("server").overlapped(tmp_path / "trace.json.gz")
    assert found == {"copies_ms": 0.2, "share": 0.25}


@pytest.mark.parametrize(("counted_w", "holds"), [(300.0, True), (360.0, False)])
def test_the_energy_counter_is_held_against_power(part, counted_w, holds):
    stage = Noted()
    samples = [{"t_s": t / 20, "power_w": 300.0, "energy_j": counted_w * t / 20} for t in range(80)]
    part("power").energy_and_power(stage, "energy", samples)
    assert stage.outcomes == {"energy": holds}


@pytest.mark.parametrize(
    ("peak_mib", "states_off", "failing"),
    [(1005, 0, set()), (1030, 0, {"peak"}), (1000, 4, {"states"})],
)
def test_memory_is_held_against_the_plan(part, monkeypatch, peak_mib, states_off, failing):
    memory, mib = part("memory"), 2**20
    monkeypatch.setattr(memory, "compute_data_bytes", lambda *of: 0)
    states = {"parameters_bytes": 100}
    plan = SimpleNamespace(
        model_states_bytes=states,
        compute_training_peak=lambda batch, resident_threads: SimpleNamespace(n_bytes=1000 * mib),
    )
    found = {"model_states": {"parameters_bytes": 100 + states_off}, "steps": 1}
    found["resident_threads"], found["gpu_bytes"] = 132 * 2048, 80 * 1024 * mib
    found["memory"] = {
        "method": "cuda-allocator", "peak_bytes": (peak_mib + 94) * mib,  # whole blocks
        "requested_peak_bytes": (peak_mib + 64) * mib, "cublas_bytes": 64 * mib,
        "reserved_peak_bytes": 1100 * mib, "nvml_process_used_bytes": 1600 * mib,
    }  # fmt: skip
    stage = Noted()
    subject = part("subject")
    memory.look_at(stage, memory.Case("fsdp", 8), subject.settings("fsdp", "cuda"), found, plan)
    failed = {what for what, holds in stage.outcomes.items() if not holds}
    assert len(stage.outcomes) == 3
    assert {word for word in ("peak", "states") for what in failed if word in what} == failing


def test_step_ratios_fail_only_where_every_block_says_so(part):
    steps, stage = part("steps"), Noted()
    medians = {"single": [10.0, 10.0], "ddp": [10.0, 10.0], "fsdp-never": [10.0, 10.0]}
    setup = {variant: {"setup_s": 1.0} for variant in steps.VARIANTS}
    steps.judge(stage, "noisy", medians | {"fsdp": [10.2, 12.0]}, setup)
    steps.judge(stage, "slow", medians | {"fsdp": [11.0, 12.0]}, setup)
    assert [what.split(":")[0] for what, holds in stage.outcomes.items() if not holds] == ["slow"]


def test_blocks_that_were_measured_are_kept_when_a_later_one_is_not(part, monkeypatch, tmp_path):
    """A stage that is killed at its limit leaves what it has noted: so it notes every block."""
    steps, stage = part("steps"), part("stage")
    worker = SimpleNamespace(device=torch.device("cpu"))
    trainee = SimpleNamespace(strategy=None, data=None, worker=worker, log=None)
    trainees = dict.fromkeys(steps.VARIANTS, trainee)
    setup = {variant: {"setup_s": 1.0} for variant in steps.VARIANTS}
    monkeypatch.setattr(steps, "prepare", lambda *args: (trainees, setup))
    monkeypatch.setattr(steps, "StepClock", lambda device: SimpleNamespace(step_ms=[]))

    def train_epoch(strategy, data, worker, clock, log, block):
        if block == 2:
            raise KeyboardInterrupt
        clock.step_ms += [1.0 + block, 2.0 + block, 3.0 + block]

    monkeypatch.setattr(steps.loop, "train_epoch", train_epoch)
    out = tmp_path / "steps.json"
    kept = stage.Stage("steps", "cpu", True, out, tmp_path, time.monotonic() + 60)
    with pytest.raises(KeyboardInterrupt):
        steps.compare(kept, "net fp32", "net", "fp32", tmp_path, {"blocks": 3, "steps": 3})
    figures = json.loads(out.read_text(encoding="utf-8"))["figures"]["net fp32"]
    assert figures == {v: {"setup_s": 1.0, "blocks_ms": [2.0, 3.0]} for v in steps.VARIANTS}


def test_a_batch_too_large_is_so_for_want_of_memory(part):
    """No tensor is too long for cuDNN, and what backward needs of them is more than any GPU has."""
    failures, subject = part("failures"), part("subject")
    with torch.device("meta"):
        net = subject.models.build_model(failures.MODEL, 10, (3, 32, 32))
    sizes = []
    for module in net.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.BatchNorm2d)):
            module.register_forward_hook(lambda m, x, out: sizes.append(out.numel() // len(out)))
    net(torch.empty(2, 3, 32, 32, device="meta"))
    assert max(sizes) * failures.TOO_LARGE < 2**31
    assert (
        4 * sum(sizes) * failures.TOO_LARGE > max(p.memory_gib for p in list_datasheets()) * 2**30
    )
