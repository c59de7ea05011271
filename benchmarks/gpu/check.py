"""Checks the engine on this machine's GPU: nine stages, at most ten minutes, one file of evidence.

    make gpu-check        or: python benchmarks/gpu/check.py [--stages matrix server] [--out FILE]

Needs PyTorch 2.11 or newer with torchvision, Python 3.11, numpy and psutil; no Snakemake, no config file.
Each stage runs in a process of its own with a time limit; one that fails does not stop the others. The
evidence is written again after every stage. Exit code 1 when anything failed. Without a GPU, the checks
that need none are made, and the others are listed as not looked at.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WORKFLOW = REPOSITORY / "workflow"
#: Where the invariants of records are.
TESTS = REPOSITORY / "tests"
OUT = REPOSITORY / "results" / "gpu-check.json"
#: Without a GPU there is no promise of ten minutes, and other work may be on the same cores.
CPU_PATIENCE = 4
#: What ends the check, and the stage at work with it.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Listed:
    """A stage: the module that has its `run`, its time limit, and what it is about."""

    name: str
    limit_s: float
    about: str


STAGES = (
    Listed("preflight", 20, "versions, driver, memory; fork and CUDA"),
    Listed("cells", 95, "cells by the launcher, and their records"),
    Listed("matrix", 120, "families x precisions x strategies, equal to single"),
    Listed("steps", 80, "step times of single, ddp and fsdp, interleaved"),
    Listed("memory", 90, "peaks beside the plan's"),
    Listed("server", 70, "the parameter server: overlap, pinning, overflow, transports"),
    Listed("clock", 20, "what the step clock costs"),
    Listed("power", 40, "NVML, energy and MFU"),
    Listed("failures", 60, "out of memory, killed workers, time limits"),
)
#: What no run on one GPU can show.
UNPROVEN = (
    "NCCL between several GPUs: correctness, algorithms, hangs",
    "several nodes: rendezvous, sockets between hosts, InfiniBand",
    "exposed communication, overlap of all-reduce and gather with computation",
    "scaling: every ratio between different numbers of GPUs",
    "peer-to-peer topology, NVLink counters",
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment()
    began = time.monotonic()
    evidence: dict[str, Any] = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "outcome": "unfinished",
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages(),
        "missing_packages": [name for name, version in packages().items() if version is None],
        "device": args.device,
        "stages": {},
        "unproven": list(UNPROVEN),
    }
    try:
        # Once, for all stages: they are forked, as the workers of a cell are.
        import stratbench.workload.with_torch  # noqa: I001
        import stratbench.train.worker  # noqa: F401
        from stratbench.cell import software_gpu
        from stratbench.telemetry.git import read_git_state
        from stratbench.train import agent
    except ImportError as e:
        evidence |= {"outcome": "failed", "reason": f"the worker cannot be imported: {e}"}
        write(args.out, evidence)
        print(f"gpu-check: {evidence['reason']} ({args.out})")
        return 1
    evidence["git"] = read_git_state(REPOSITORY)
    if software_gpu.is_software_gpu_installed():
        evidence["unproven"].insert(
            0, "all figures and times: this is the software GPU of the tests"
        )
    device = args.device
    agent.handle_stop_signals(agent.raise_stopped_error)
    with tempfile.TemporaryDirectory(prefix="stratbench-gpu-check-") as scratch:
        for listed in (s for s in STAGES if s.name in args.stages):
            if device == "auto" and listed.name != "preflight":
                device = "cpu"
            try:
                found = run_stage(listed, device, args.small, Path(scratch))
            except agent.Stopped as stopped:
                reason = f"stopped by {stopped}"
                kept = noted(listed, Path(scratch)) | {"outcome": "failed", "reason": reason}
                evidence["stages"][listed.name] = kept
                write(args.out, evidence)
                print(
                    f"gpu-check: {reason}; the evidence holds what was found until then: {args.out}"
                )
                return 128 + stopped.signum
            if listed.name == "preflight":
                device = found["figures"].get("device", "cpu" if device == "auto" else device)
                evidence |= {"device": device, "hardware": found["figures"].get("hardware")}
                if device == "cuda":  # one of them is enough, and found without NVML
                    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
                else:
                    print("no GPU: only what needs none is checked", flush=True)
            evidence["stages"][listed.name] = found
            write(args.out, evidence)
            tell(listed, found)
    evidence["wall_s"] = round(time.monotonic() - began, 1)
    return conclude(args.out, evidence)


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [s.name for s in STAGES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", choices=names, default=names, metavar="STAGE")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=OUT, help="the evidence")
    parser.add_argument("--small", action="store_true", help="least sizes, for the tests")
    args = parser.parse_args(argv)
    # Preflight says what there is to run on; without it, the device must be named.
    if args.device == "auto" and "preflight" not in args.stages:
        args.stages = ["preflight", *args.stages]
    return args


def prepare_environment() -> None:
    """What every stage and every launcher that it starts finds in its environment."""
    sys.path[:0] = [str(WORKFLOW)]
    sys.path.append(str(TESTS))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(WORKFLOW), os.environ.get("PYTHONPATH", "")) if p
    )
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking does not spoil a fork
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("STRATBENCH_NO_DOWNLOAD", "1")


def packages() -> dict[str, str | None]:
    """Versions of the project's requirements here; None where one is missing."""
    lines = (REPOSITORY / "envs" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str | None] = {}
    for name in (m[0] for line in lines if (m := re.match(r"[A-Za-z0-9-]+", line))):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def run_stage(listed: Listed, device: str, small: bool, scratch: Path) -> dict[str, Any]:
    """Run a stage in a forked process; returns what it found, with `outcome`, `seconds`, `log`."""
    from stage import end_tree

    limit_s = listed.limit_s * (1 if device == "cuda" else CPU_PATIENCE)
    out, log = scratch / f"{listed.name}.json", scratch / f"{listed.name}.log"
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until it is known what is to be ended
    pid = os.fork()
    if pid == 0:
        in_stage(listed, device, small, scratch, out, log, limit_s)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        code = wait(pid, began + limit_s)
    finally:
        end_tree(pid)
    seconds = time.monotonic() - began
    found = noted(listed, scratch)
    failed = [c for c in found["checks"] if not c["holds"]]
    if code is None:
        reason = f"not done after {limit_s:.0f} s"
    elif code != 0:
        reason = f"ended with code {code}"
    else:
        reason = f"{len(failed)} of {len(found['checks'])} checks" if failed else None
    found |= {"outcome": "failed" if reason else "passed", "reason": reason}
    found |= {"seconds": round(seconds, 1), "device": device}
    if reason:
        found["log"] = log.read_text(encoding="utf-8", errors="replace")[-6000:]
    return found


def noted(listed: Listed, scratch: Path) -> dict[str, Any]:
    """What the stage has found, as far as it came."""
    out = scratch / f"{listed.name}.json"
    if not out.exists():
        return {"checks": [], "skipped": [], "figures": {}}
    return json.loads(out.read_text(encoding="utf-8"))


def in_stage(
    listed: Listed,
    device: str,
    small: bool,
    scratch: Path,
    out: Path,
    log: Path,
    limit_s: float,
) -> None:
    """The stage's own process; never returns."""
    from stage import Stage

    code = 1
    try:
        for signum in ENDING:
            if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        deadline_s = time.monotonic() + limit_s
        stage = Stage(listed.name, device, small, out, scratch, deadline_s)
        stage._save()
        importlib.import_module(listed.name).run(stage)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, until_s: float) -> int | None:
    """The exit code of `pid` (negative: a signal's number), None where it still runs at `until_s`."""
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def tell(listed: Listed, found: dict[str, Any]) -> None:
    """A line for the stage, one for each check that failed, and its short figures."""
    done = sum(c["holds"] for c in found["checks"])
    line = f"{found['outcome'].upper():7} {listed.name:10} {found['seconds']:5.1f} s  "
    line += f"{done} of {len(found['checks'])} checks hold"
    if found["skipped"]:
        line += f", {len(found['skipped'])} not looked at"
    print(f"{line}  ({listed.about})")
    if found["reason"] and not any(not c["holds"] for c in found["checks"]):
        last = found["log"].strip().splitlines()[-1:]
        print(f"        {found['reason']}: {last[0] if last else 'no log'}")
    for c in found["checks"]:
        if not c["holds"]:
            print(f"        FAILED {c['what']}: {c['said']}")
    for name, value in found["figures"].items():
        if isinstance(value, (str, int, float)):
            print(f"        {name}: {value}")
    sys.stdout.flush()


def conclude(out: Path, evidence: dict[str, Any]) -> int:
    """Write the evidence for the last time, print a summary; returns the exit code."""
    stages = evidence["stages"]
    failed = [name for name, found in stages.items() if found["outcome"] != "passed"]
    evidence["outcome"] = "failed" if failed else "passed"
    evidence["unproven"] += [
        f"{name}: {skipped['what']} ({skipped['why']})"
        for name, found in stages.items()
        for skipped in found["skipped"]
    ]
    evidence["unproven"] += [
        f"stage {s.name}: not asked for" for s in STAGES if s.name not in stages
    ]
    write(out, evidence)
    checks = [c["holds"] for found in stages.values() for c in found["checks"]]
    print(
        f"gpu-check on {evidence.get('device')}: {evidence['outcome']}"
        + (f" ({', '.join(failed)})" if failed else "")
        + f"; {sum(checks)} of {len(checks)} checks hold in {len(stages)} stages, "
        f"{evidence['wall_s']:.0f} s; {len(evidence['unproven'])} things unproven; "
        f"evidence: {out}"
    )
    if missing := evidence["missing_packages"]:
        print(f"not installed here: {', '.join(missing)}")
    return 1 if failed else 0


def write(out: Path, evidence: dict[str, Any]) -> None:
    """The evidence, whole or as it was before."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


if __name__ == "__main__":
    sys.exit(main())
