"""The process of one parameter server of a cell."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.cell.run_folder import RunFolder, format_server_name
from stratbench.extensions.servers.ps.server import run_server
from stratbench.extensions.servers.ps.server_config import ServerConfig
from stratbench.extensions.servers.wire.handshake import load_secret
from stratbench.train.locks import lock_cell_as_worker
from stratbench.train.worker import (
    EXIT_ERROR,
    exit_immediately,
    redirect_output,
    write_stacks_on_signal,
)


def serve_parameters(config_json: str, run_dir: str) -> None:
    """Run a parameter server in this process.

    The process exits with 0 after success, and with 1 after a failure.
    """
    serve_as_process(ServerConfig(**json.loads(config_json)), run_dir, run_server)


def serve_as_process(
    config: ServerConfig, run_dir: str, serve: Callable[[Any, bytes], dict[str, Any]]
) -> None:
    """Run one server in this process, then end the process.

    Args:
        config: Config of the server.
        run_dir: Run folder of the cell.
        serve: Function of the config and the secret that runs the server.
    """
    folder = RunFolder(Path(run_dir))
    redirect_output(folder.get_log_path(format_server_name(config.server)))
    write_stacks_on_signal(folder.get_stack_trace_path(format_server_name(config.server)))
    lock_cell_as_worker(folder.log_dir)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        status = serve(config, load_secret(folder.job_secret_path))["status"]
    except Exception:
        traceback.print_exc()
        exit_immediately(EXIT_ERROR)
    exit_immediately(0 if status == "ok" else EXIT_ERROR)
