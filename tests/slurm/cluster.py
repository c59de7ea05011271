"""A real SLURM cluster for tests: two pretend nodes on this host, in a directory of its own.

Nothing of the host's own is used: configuration, munge key and socket, ports, state, logs and
(pretend) GPUs all lie in or belong to that directory, and a host that runs SLURM is refused.

    python tests/slurm/cluster.py up DIR [--accounting] [--cpus 16] [--gpus 4]
    eval "$(python tests/slurm/cluster.py env DIR)"
    python tests/slurm/cluster.py down DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from cluster_conf import CGROUP_CONF, gres_conf, slurm_conf, slurmdbd_conf
from cluster_host import (
    MARK,
    Refused,
    Unavailable,
    alive,
    cluster_processes,
    connects,
    free_ports,
    install,
    listening,
    node_processes,
    refusal,
    user_name,
    which,
)

NODES = ("node1", "node2")
#: The account that accounting knows, and without which it lets no job in.
ACCOUNT = "bench"
#: The longest that a command of SLURM, a daemon's start or its end may take, in seconds: each takes a
#: moment, but on a very busy machine minutes.
PATIENCE_S = 600.0
#: A unix socket's path has at most 107 characters.
MAX_DIRECTORY_LENGTH = 80


class SlurmCluster:
    """Two SLURM nodes on this host, up between `start` and `stop` (or `with`).

    When the process that called `start(guarded=True)` ends in whatever way, SIGKILL included, a
    guard process takes the cluster down.
    """

    def __init__(
        self,
        directory: Path,
        accounting: bool = False,
        cpus: int = 16,
        gpus: int = 4,
        memory_mib: int = 24000,
        control_groups: bool = False,
    ) -> None:
        """Describe a cluster in `directory`, whose nodes each offer `cpus`, `gpus`, `memory_mib`.

        They are pretend figures: SLURM counts them, the host need not have them. With `control_groups` the
        kernel keeps a job's limit of memory.
        """
        self.control_groups = control_groups
        self.directory = Path(directory).resolve()
        self.accounting = accounting
        self.cpus = cpus
        self.gpus = gpus
        self.memory_mib = memory_mib
        self.name = ""
        self.ports: dict[str, int] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def existing(cls, directory: Path) -> SlurmCluster:
        """The cluster that another process started in `directory`."""
        cluster = cls(directory)
        try:
            state = json.loads((cluster.directory / "cluster.json").read_text())
        except FileNotFoundError:
            raise Unavailable(f"no cluster was started in {directory}") from None
        for key, value in state.items():
            setattr(cluster, key, value)
        return cluster

    # What a user of the cluster needs

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, turned to this cluster: for `subprocess` calls."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_"))
        }
        path = kept.get("PATH", "/usr/bin:/bin")
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": f"{path}:/usr/sbin"}

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> str:
        """The standard output of a SLURM command against this cluster.

        Raises:
            RuntimeError: it failed; the message holds what it wrote to standard error.
            subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        done = subprocess.run(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, out: Path, script: str, *options: str) -> str:
        """Submit a job that runs a line of shell, and prints to the file `out`; its id."""
        return self.run("sbatch", "--parsable", "-o", str(out), *options, "--wrap", script)

    def node_states(self) -> dict[str, str]:
        """SLURM's state of each node, such as `{"node1": "idle", "node2": "mixed"}`."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def processes(self) -> list[int]:
        """Pids of this cluster's daemons and of what runs in its jobs."""
        found = cluster_processes(self.directory, self.name)
        return sorted(found - {os.getpid(), self._guard.pid if self._guard else 0})

    # Breaking

    def lose_node(self, node: str) -> None:
        """Kill everything on a node at once, as a power cut does, and wait for that; SLURM is not told.

        All of it is stopped first: a daemon that still ran would report that its job was killed.
        """
        for pid in self.freeze_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Or else `restore_node` might take them for a node that is up.
        self._wait(node, lambda: not node_processes(self.directory, self.name, node))

    def freeze_node(self, node: str) -> set[int]:
        """Stop everything on a node: nothing answers, and no connection closes. Returns the pids."""
        stopped: set[int] = set()
        while found := node_processes(self.directory, self.name, node) - stopped:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        return stopped

    @contextlib.contextmanager
    def controller_away(self) -> Iterator[None]:
        """Stop the controller, and start it again at the end of the block: it knows its jobs as before."""
        pid = int((self.directory / "run" / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)  # it saves its state first, as one that is started anew
        self._wait("its end", lambda: not alive(pid))
        try:
            yield
        finally:
            self._start_controller()

    def restore_node(self, node: str) -> None:
        """Boot a node after `lose_node` or put it back after it was set down; wait for it."""
        if not node_processes(self.directory, self.name, node):
            self._start_slurmd(node)
        with contextlib.suppress(RuntimeError):
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
        up = ("idle", "mix", "alloc")  # jobs that wait for it start at once
        self._wait(node, lambda: self.node_states()[node] in up)

    # Starting

    def start(self, guarded: bool = True) -> None:
        """Bring both nodes up, in less than a minute.

        Raises:
            Refused: the host has a SLURM of its own.
            Unavailable: it cannot be done here; the message says why.
        """
        reason = refusal(self.directory)
        if reason:
            raise Refused(reason)
        if len(str(self.directory)) > MAX_DIRECTORY_LENGTH:
            raise Unavailable(
                f"the directory's path is too long for a socket (over {MAX_DIRECTORY_LENGTH} "
                f"characters): {self.directory}"
            )
        install(self.accounting)
        self._clear()
        self._configure()
        if guarded:
            self._guard = self._start_guard()
        try:
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def _clear(self) -> None:
        """Empty the directory of an earlier cluster, and of nothing else."""
        if not self.directory.exists() or not any(self.directory.iterdir()):
            return
        if not (self.directory / "cluster.json").exists():
            raise Unavailable(f"{self.directory} is neither empty nor a test cluster's directory")
        if self.existing(self.directory).processes():
            raise Unavailable(f"a cluster already runs in {self.directory}; take it down first")
        shutil.rmtree(self.directory)

    def _configure(self) -> None:
        self.name = f"stratbench-{secrets.token_hex(4)}"
        names = ("slurmctld", *NODES) + (("slurmdbd",) if self.accounting else ())
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        for part in ("run", "log", "dev", "state", *(f"spool-{node}" for node in NODES)):
            (self.directory / part).mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for index in range(self.gpus):
            device = self.directory / "dev" / f"nvidia{index}"
            if not device.exists():
                try:
                    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
                except PermissionError:
                    device.touch()
        host = socket.gethostname().split(".")[0]
        self.conf.write_text(
            slurm_conf(
                self.directory,
                self.name,
                host,
                user_name(),
                self.ports,
                NODES,
                self.cpus,
                self.gpus,
                self.memory_mib,
                self.control_groups,
            )
        )
        if self.control_groups:
            (self.directory / "cgroup.conf").write_text(CGROUP_CONF)
        (self.directory / "gres.conf").write_text(gres_conf(self.directory, NODES, self.gpus))
        if self.accounting:
            slurmdbd = self.directory / "slurmdbd.conf"
            slurmdbd.touch(mode=0o600)
            slurmdbd.write_text(
                slurmdbd_conf(self.directory, host, user_name(), self.ports["slurmdbd"])
            )
        state = {"name": self.name, "ports": self.ports, "accounting": self.accounting}
        (self.directory / "cluster.json").write_text(json.dumps(state))

    def _daemon(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        environment = {**self.env, MARK: str(self.directory)}
        # Accounting's database listens on a socket in the cluster's directory, on no port.
        environment["MYSQL_UNIX_PORT"] = str(self.directory / "run" / "db.socket")
        with (self.directory / "log" / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                [which(command[0]) or command[0], *command[1:]],
                env=environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_daemons(self) -> None:
        here = self.directory
        munged = self._daemon(
            "munged",
            "munged",
            "--foreground",
            "--force",  # its parent folder may be private to the user, as pytest's are
            f"--socket={here}/run/munge.socket",
            f"--key-file={here}/munge.key",
            f"--pid-file={here}/run/munged.pid",
            f"--log-file={here}/log/munged.log",
            f"--seed-file={here}/run/munged.seed",
        )
        self._wait("munged", (here / "run" / "munge.socket").exists, munged)
        if self.accounting:
            self._start_accounting()
        self._start_controller()
        for node in NODES:
            self._start_slurmd(node)
        self._wait("both nodes", lambda: set(self.node_states().values()) == {"idle"})

    def _start_controller(self) -> None:
        slurmctld = self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self._wait("slurmctld", lambda: "is UP" in self.run("scontrol", "ping"), slurmctld)

    def _start_slurmd(self, node: str) -> None:
        self._daemon(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def _start_accounting(self) -> None:
        database = self.directory / "db"
        if not (database / "mysql").exists():
            self._daemon(
                "install-db",
                "mariadb-install-db",
                "--no-defaults",
                f"--user={user_name()}",
                f"--datadir={database}",
                "--skip-test-db",
                "--auth-root-authentication-method=socket",
                f"--auth-root-socket-user={user_name()}",
            ).wait(timeout=PATIENCE_S)
        mariadb = self._daemon(
            "mariadb",
            "mariadbd",
            "--no-defaults",
            f"--user={user_name()}",
            f"--datadir={database}",
            f"--socket={self.directory}/run/db.socket",
            "--skip-networking",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
        )
        self._wait("mariadb", lambda: connects(self.directory / "run" / "db.socket"), mariadb)
        slurmdbd = self._daemon("slurmdbd", "slurmdbd", "-D")
        self._wait("slurmdbd", lambda: bool(listening([self.ports["slurmdbd"]])), slurmdbd)
        for entity in (
            ("cluster", self.name),
            ("account", ACCOUNT, f"Cluster={self.name}"),
            ("user", user_name(), f"Account={ACCOUNT}", f"DefaultAccount={ACCOUNT}"),
        ):
            self.run("sacctmgr", "-iQ", "add", *entity)

    def _wait(
        self,
        what: str,
        ready: Callable[[], bool],
        daemon: subprocess.Popen[bytes] | None = None,
    ) -> None:
        deadline = time.monotonic() + PATIENCE_S
        last = ""
        while time.monotonic() < deadline and (daemon is None or daemon.poll() is None):
            try:
                if ready():
                    return
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                last = f": {error}"
            time.sleep(0.1)
        tails = [
            f"{log.name}: {lines[-1]}"
            for log in sorted((self.directory / "log").iterdir())
            if (lines := log.read_text(errors="replace").splitlines())
        ]
        raise Unavailable(
            f"{what} not up within {PATIENCE_S:.0f} s{last}\nLast lines of {self.directory}/log:\n"
            + "\n".join(tails)
        )

    def _start_guard(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, __file__, "guard", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    # Stopping

    def cancel_all(self) -> None:
        """Cancel every job and wait until SLURM is rid of them."""
        self.run("scancel", "--quiet", "--user", user_name())
        self._wait("an empty queue", lambda: not self.run("squeue", "-h"))

    def stop(self) -> None:
        """Cancel every job, end every daemon and check that no process is left.

        Raises:
            RuntimeError: something is still there; the message says what.
        """
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired, FileNotFoundError):
            if listening([self.ports.get("slurmctld", 0)]):
                self.cancel_all()
        left = self.processes()
        for number, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, PATIENCE_S)):
            deadline = time.monotonic() + patience_s
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while left and time.monotonic() < deadline:
                time.sleep(0.05)
                # An exiting process has no environment any more, so the known ones are asked for.
                left = sorted({*filter(alive, left), *self.processes()})
        if self._guard is not None:
            self._guard.stdin.close()
            self._guard.wait(timeout=PATIENCE_S)
            self._guard = None
        if left:
            raise RuntimeError(f"processes of the cluster in {self.directory} are left: {left}")
        ports = listening(list(self.ports.values()))
        if ports:
            raise RuntimeError(f"ports of the cluster in {self.directory} still listen: {ports}")

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["up", "down", "env", "guard"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd and a database")
    parser.add_argument("--cpus", type=int, default=16, help="pretend CPUs of a node")
    parser.add_argument("--gpus", type=int, default=4, help="pretend GPUs of a node")
    options = parser.parse_args(arguments)
    try:
        if options.action == "up":
            started_s = time.monotonic()
            cluster = SlurmCluster(
                options.directory, options.accounting, options.cpus, options.gpus
            )
            cluster.start(guarded=False)
            print(f"two nodes idle after {time.monotonic() - started_s:.1f} s", file=sys.stderr)
            print(cluster.run("sinfo", "-N", "-o", "%N %t %c %m %G"), file=sys.stderr)
        elif options.action == "env":
            cluster = SlurmCluster.existing(options.directory)
            for key in ("SLURM_CONF", "PATH"):
                print(f"export {key}={shlex.quote(cluster.env[key])}")
        else:
            if options.action == "guard":
                sys.stdin.buffer.read()
            SlurmCluster.existing(options.directory).stop()
    except (Unavailable, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
