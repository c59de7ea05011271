"""What the test cluster needs to know of its host, and the programs it needs on it.

Whether a cluster may be started here, SLURM's Debian packages, free ports, running processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: In the environment of every daemon of a test cluster: the cluster's directory.
MARK = "STRATBENCH_TEST_CLUSTER"
#: Where an installed SLURM keeps its configuration. One of these present: the host is somebody's.
HOST_CONFIGURATION = (
    Path("/etc/slurm/slurm.conf"),
    Path("/etc/slurm-llnl/slurm.conf"),
    Path("/usr/local/etc/slurm.conf"),
)
SLURM_DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmstepd")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server-core", "mariadb-client-core")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")


class Unavailable(RuntimeError):
    """No cluster can be had here; the message says why, in words fit for `pytest.skip`."""


class Refused(Unavailable):
    """This host has a SLURM of its own."""


def processes() -> Iterator[tuple[int, str, dict[str, str] | None]]:
    """Pid, program name and initial environment (None: not ours to read) of what runs here.

    Zombies and kernel threads, which have no environment, are left out.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name = (entry / "comm").read_text().strip()
            raw = (entry / "environ").read_bytes()
        except PermissionError:
            yield int(entry.name), name, None
            continue
        except OSError:
            continue
        if raw:
            items = (item.partition(b"=") for item in raw.split(b"\0") if item)
            yield int(entry.name), name, {os.fsdecode(k): os.fsdecode(v) for k, _, v in items}


def cluster_processes(directory: Path, name: str) -> set[int]:
    """Pids of the daemons of the test cluster `name` in `directory`, and of its jobs."""
    marks = {(MARK, str(directory)), ("SLURM_CLUSTER_NAME", name)}
    return {pid for pid, _, env in processes() if marks & set((env or {}).items())}


def node_processes(directory: Path, name: str, node: str) -> set[int]:
    """Those of `cluster_processes` that run on one node: its daemon, its steps, their programs."""
    found = set()
    for pid in cluster_processes(directory, name):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(_stat(pid)[1])
        except (OSError, IndexError):
            continue
        if b"-N" in command and node.encode() in command:
            found.add(pid)
        elif f"SLURMD_NODENAME={node}".encode() in environ:
            found.add(pid)
            with contextlib.suppress(OSError):
                if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
                    found.add(parent)
    return found


def refusal(
    directory: Path,
    environ: Mapping[str, str] = os.environ,
    host_configuration: Sequence[Path] = HOST_CONFIGURATION,
) -> str | None:
    """Why no test cluster may be started in `directory` on this host; None when it may."""
    for path in host_configuration:
        if path.exists():
            return f"this host has a SLURM configuration of its own: {path}"
    configured = environ.get("SLURM_CONF")
    if configured and Path(configured).resolve() != (directory / "slurm.conf").resolve():
        return f"SLURM_CONF is set to {configured}, which is not this test cluster's"
    for pid, name, environment in processes():
        if name in SLURM_DAEMONS and MARK not in (environment or {}):
            return f"this host runs a SLURM of its own: {name}, process {pid}"
    return None


@contextlib.contextmanager
def _no_service_starts(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """While it lasts, installing a Debian package starts no daemon."""
    kept = policy.with_name("policy-rc.d.kept-by-stratbench")
    if policy.exists():
        policy.rename(kept)
    try:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
        if kept.exists():
            kept.rename(policy)


def which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def install(accounting: bool = False) -> None:
    """Have SLURM's programs, from Debian's packages if need be.

    Raises:
        Unavailable: they are missing and cannot be installed here.
    """
    with open(__file__) as lock:  # tests that run side by side install them once
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(accounting)


def _install(accounting: bool) -> None:
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [program for program in programs if which(program) is None]
    if not missing:
        return
    packages = PACKAGES + (ACCOUNTING_PACKAGES if accounting else ())
    wish = f"{', '.join(missing)} not found; install the packages {' '.join(packages)}"
    if os.geteuid() != 0 or which("apt-get") is None:
        raise Unavailable(f"{wish} (only root can, and only where there is apt-get)")
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_service_starts():
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            try:
                done = subprocess.run(
                    [*apt, *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
            except subprocess.TimeoutExpired as error:
                raise Unavailable(f"{wish} (apt-get {arguments[0]} took over 300 s)") from error
            if done.returncode != 0 and arguments[0] == "install":
                reason = (done.stderr.strip() or "no message").splitlines()[-1]
                raise Unavailable(f"{wish} (apt-get failed: {reason})")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below the range the kernel hands out for outgoing connections."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 400):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise Unavailable(f"fewer than {count} free TCP ports between 20000 and 32000")


def listening(ports: Sequence[int]) -> list[int]:
    """Those of `ports` that accept a connection on this host."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


def connects(path: Path) -> bool:
    """Whether somebody listens on the unix socket at `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie (nobody may reap those of a container)."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the program's name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def user_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
