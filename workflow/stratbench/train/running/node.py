"""The agent of one node of several; the launcher has srun start one on each.

python -m stratbench.train.running.node JOB.json SPENT_S
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from stratbench.cell.run_folder import rank_of
from stratbench.train import agent
from stratbench.train.job import Job
from stratbench.train.locks import scratch
from stratbench.train.running.runner import runner_of


def main() -> None:
    """Run the node's processes; the exit code is 0 where the other nodes may go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="JSON file written by the launcher")
    parser.add_argument("spent_s", type=float, help="of the cell's time, when srun was called")
    args = parser.parse_args()
    job = Job.from_json(args.job.read_text(encoding="utf-8"))
    agent.on_signals(agent.raise_stopped)
    node = int(os.environ["SLURM_NODEID"])
    processes = runner_of(job.settings).processes
    try:
        with scratch() as local:
            exits = agent.run_node(job.on_another_node(args.spent_s, local), node, processes)
    except agent.Stopped as stopped:
        sys.exit(128 + stopped.signum)
    for p in exits.processes:
        print(f"node {node}: {p}", flush=True)
    # A worker lost to a parameter server ends nobody else's node; one that it never had does.
    failed = [p.name for p in exits.processes if p.exit_code != 0]
    if job.has_servers:
        ranks = {name: rank_of(name) for name in failed}
        failed = [
            name for name, rank in ranks.items() if rank is None or not agent.has_joined(job, rank)
        ]
    sys.exit(1 if exits.timed_out or exits.hung or failed else 0)


if __name__ == "__main__":
    main()
