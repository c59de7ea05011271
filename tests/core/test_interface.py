"""The interface that gloo takes on several nodes, whose hosts files are those of Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import LIMIT_S, WORKFLOW
from stratbench.train.nodes import interface

#: Two processes form a group and add numbers.
MEET = """
import os, sys
from datetime import timedelta
from stratbench.train.nodes import interface

rank, other, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
interface.list_other_nodes = lambda own: [other]
interface.set_gloo_interface()
import torch, torch.distributed as dist

host = os.uname().nodename if rank == 0 else other
store = dist.TCPStore(host, port, 2, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT))
total = torch.tensor([1.0 + rank])
dist.all_reduce(total)
print(total.item())
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Commands that run a program on one of two nodes, each of which is 127.0.1.1 to itself."""
    names = [f"sb{os.getpid()}{letter}" for letter in "ab"]
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("no networks can be made here")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "link0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "link0",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{1 + i}/24", "dev", "link0")
            run("ip", "-n", name, "link", "set", "link0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            hosts = f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.{2 - i} {names[1 - i]}\n"
            (tmp_path / name).write_text(hosts)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no networks can be made here: {error.stderr!r}")
    else:
        begin = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        yield [
            [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "--mount",
                "sh",
                "-c",
                begin,
                name,
                str(tmp_path / name),
            ]
            for name in names
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_that_are_loopback_to_themselves_meet_by_the_interface_between_them(nodes):
    code = MEET.replace("LIMIT", str(LIMIT_S))
    environment = {k: v for k, v in os.environ.items() if k != interface.VARIABLE}
    processes = [
        subprocess.Popen(
            [*node, sys.executable, "-c", code, str(rank), nodes[1 - rank][-2], "29500"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": str(WORKFLOW)},
        )
        for rank, node in enumerate(nodes)
    ]
    printed = [process.communicate()[0].strip() for process in processes]
    assert printed == ["3.0", "3.0"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the variable, as after the test."""
    monkeypatch.setenv(interface.VARIABLE, "")
    monkeypatch.delenv(interface.VARIABLE)
    return monkeypatch


def test_the_users_interface_stays_and_a_name_that_others_reach_needs_none(environment):
    environment.setattr(interface, "find_interface_to_host", lambda host: "eth7")
    environment.setattr(interface, "is_loopback", lambda host: False)
    interface.set_gloo_interface()
    assert interface.VARIABLE not in os.environ
    environment.setattr(interface, "is_loopback", lambda host: True)
    interface.set_gloo_interface()
    assert os.environ[interface.VARIABLE] == "eth7"
    environment.setenv(interface.VARIABLE, "ib0")
    interface.set_gloo_interface()
    assert os.environ[interface.VARIABLE] == "ib0"


def test_a_node_that_reaches_no_other_names_no_interface(environment):
    environment.setattr(interface, "is_loopback", lambda host: True)
    environment.setattr(interface, "_ANYWHERE", "127.0.0.1")
    environment.setattr(
        interface, "list_other_nodes", lambda own: ["no-such-host.invalid", "127.0.1.1"]
    )
    interface.set_gloo_interface()
    assert interface.VARIABLE not in os.environ


def test_other_nodes_are_those_of_slurms_list(monkeypatch):
    asked = []
    monkeypatch.setattr(
        interface, "read_command_output", lambda command: asked.append(command) or "n1\nn2\nn3\n"
    )
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-3]")
    assert interface.list_other_nodes("n2") == ["n1", "n3"]
    assert asked == [["scontrol", "show", "hostnames", "n[1-3]"]]
