"""The parameter server: `run_server(config, secret)` runs one server until its run is over.

One thread accepts connections. Each worker has one thread that receives and applies its pushes, and one that
sends. One thread writes snapshots, and the calling thread checks deadlines. PyTorch and the kernel release
Python's interpreter lock during their work.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.ps.server_run import ServerRun
from stratbench.extensions.servers.wire.gate import Gate
from stratbench.extensions.servers.wire.transport import Listeners


def run_server(
    config: ServerConfig,
    secret: bytes,
    make_run: Callable[[Any, bytes], ServerRun] = ServerRun,
) -> dict[str, Any]:
    """Run one server until the run is over, and return its statistics.

    The statistics are those of `ServerRun.statistics`, which are also written to `config.stats_path`. PyTorch
    is set to one thread, since the threads of the workers share the cores.

    Args:
        config: Settings of the server.
        secret: Secret of the job.
        make_run: Class or function that creates the run from the settings and the secret.

    Returns:
        The statistics. Their `status` is "lost", with the reason in `error`, if a lost worker ended the run.
    """
    torch.set_num_threads(1)
    run = make_run(config, secret)
    gate = Gate(secret, config.handshake_deadline_s, run.refusals, run.admit_connection)
    listeners = Listeners(config.bind_address, config.advertised_address)
    accepting = threading.Thread(target=gate.accept, args=(listeners,), daemon=True)
    accepting.start()
    listeners.publish_addresses(config.rendezvous, config.server, run.incarnation)
    try:
        run.watch_members()
    finally:
        run.over.set()
        gate.close()
        run.close()
        accepting.join()
        listeners.close()
    statistics = run.statistics()
    if config.stats_path:
        write_text_atomically(config.stats_path, json.dumps(statistics, indent=1))
    return statistics
