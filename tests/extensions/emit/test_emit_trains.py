"""Files of `stratbench emit` train what their cell trained: the same losses, from 2 CPU processes.

`make test-transformers` runs what needs Accelerate and transformers, `make test-deepspeed` what needs
DeepSpeed. Without them that is skipped.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from emitting import MALLOC, record_of
from process_groups import forking

from launching import LIMIT_S, WORKFLOW, settings
from stratbench.extensions.emit import table
from stratbench.extensions.emit.choice import ChosenCell
from stratbench.strategies import get_option_defaults
from stratbench.workload.network import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
with_accelerate = pytest.mark.skipif(
    util.find_spec("accelerate") is None, reason="pip install accelerate"
)
with_deepspeed = pytest.mark.skipif(
    util.find_spec("deepspeed") is None, reason="pip install deepspeed"
)
with_transformers = pytest.mark.skipif(
    util.find_spec("transformers") is None or util.find_spec("accelerate") is None,
    reason="pip install transformers accelerate",
)
#: What a schedule, accumulation, clipping and checkpointing change.
HARDER = {
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.7, "schedule": "cosine", "lr_warmup_steps": 2,
    "final_lr": 0.01,
    "weight_decay": 0.01, "nesterov": True, "activation_checkpointing": True,
}  # fmt: skip
ADAMW = {"optimizer": "adamw", "momentum": 0.0, "betas": [0.8, 0.99], "eps": 1e-7, "lr": 0.003}
#: Strategy, options beside the defaults, settings.
CELLS = {
    "ddp": ("ddp", {}, {}),
    "ddp-harder": ("ddp", {"bucket_cap_mb": 1}, {**HARDER, "augment": True}),
    "fsdp-harder": ("fsdp", {"reshard_after_forward": "never", "shard_group_size": 1}, HARDER),
    "fsdp-layers-adamw-host": (
        "fsdp",
        {"offload": "cpu"},
        {**ADAMW, "model": "vgg-compact", "data_placement": "host", "max_grad_norm": 0.5},
    ),
    "fsdp-selective": (
        "fsdp",
        {"gradient_sync": "last-part"},
        {**ADAMW, "gradient_accumulation_steps": 2, "activation_checkpointing": "selective",
        "optimizer_impl": "foreach"},
    ),
    "ddp-every-2": (
        "ddp", {}, {**ADAMW, "activation_checkpointing": "every-2", "optimizer_impl": "for-loop"},
    ),
    "ddp-bf16-true": ("ddp", {}, {"precision": "bf16-true", "gradient_accumulation_steps": 2}),
    "zero1": ("zero1", {}, HARDER),
    "zero1-torch": ("zero1-torch", {}, ADAMW),
    "single": ("single", {}, {"gpus": 1, "per_worker_batch": 16}),
}  # fmt: skip
#: A script for Accelerate, as its users write them, with what the file's comments ask of it.
TRAIN = """
import sys
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from stratbench.extensions.emit.work import Work

ddp = DistributedDataParallelKwargs(bucket_cap_mb=25, gradient_as_bucket_view=True)
accelerator = Accelerator(kwargs_handlers=[ddp])
work = Work(*sys.argv[1:], accelerator.process_index, accelerator.device)
optimizer = torch.optim.SGD(work.model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = accelerator.prepare(work.model, optimizer)
for epoch in range(2):
    losses = []
    for x, y in work.batches(epoch):
        loss = work.loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
    if accelerator.is_main_process:
        print(f"epoch {epoch + 1}: training loss {mean:.7f}")
        print(accelerator.distributed_type, accelerator.num_processes)
"""


#: A script for DeepSpeed, with the optimizer that the file's comments state.
DEEPSPEED = """
import sys
import torch
import torch.distributed as dist
from stratbench.extensions.emit.work import Work
from stratbench.extensions.deepspeed.strategy import import_deepspeed

deepspeed = import_deepspeed("cpu")
dist.init_process_group("gloo")
config, record, data = sys.argv[1:]
work = Work(record, data, dist.get_rank(), torch.device("cpu"))
s = work.settings
optimizer = torch.optim.SGD(work.model.parameters(), lr=s.lr, momentum=s.momentum)
engine, *_ = deepspeed.initialize(
    model=work.model, optimizer=optimizer, config=config, dist_init_required=False
)
for epoch in range(s.epochs):
    losses = []
    for x, y in work.batches(epoch):
        for part, target in zip(x.chunk(s.gradient_accumulation_steps),
        y.chunk(s.gradient_accumulation_steps)):
            loss = work.loss(engine(part), target)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: training loss {mean.item() / 2:.7f}")
"""


def trained(
    start_cell: Any, strategy: str, options: dict[str, Any], changes: dict[str, Any], **given: Any
) -> Any:
    """A cell that has trained: its launcher's paths. `given` is for `start_cell`."""
    changes = {"model": "vit-compact", "epochs": 2, **changes}
    s = settings(strategy, options=get_option_defaults(strategy) | options)
    launched = start_cell(replace(s, **changes), **given)
    code, output = launched.finish()
    assert code == 0, output
    return launched


def emitted(strategy: str, target: str, options: dict[str, Any], **changes: Any) -> str:
    """The file of a cell that need not be trained."""
    return table.format_file_for_target(
        ChosenCell(record_of(strategy, options=options, model="gpt-compact", **changes)), target
    )


def emit(launched: Any, target: str, folder: Path) -> Path:
    file = folder / {"accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json"}.get(
        target, "train.py"
    )
    file.write_text(table.format_file_for_target(ChosenCell(launched.read_record()), target))
    return file


def run(*command: str | Path, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(WORKFLOW), "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}  # as the files say
    environment["LOCAL_SIZE"] = "2"  # else DeepSpeed asks numactl
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_forked(script: Path, arguments: list[str], workers: int) -> str:
    """Run a script as torchrun does, but in processes that have imported PyTorch; returns its output."""
    printed, store = script.with_suffix(".out"), dist.TCPStore("127.0.0.1", 0, None, True)
    printed.touch()
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    processes = []
    for rank in range(workers):
        environment = {k: str(v) for k, v in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        process = forking().Process(
            target=run_here, args=(script, arguments, environment, printed), daemon=True
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * workers, printed.read_text()
    return printed.read_text()


def run_here(
    script: Path, arguments: list[str], environment: dict[str, str], printed: Path
) -> None:
    """Become the process of a script, whose output goes to a file's end."""
    with printed.open("a") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script), *arguments]
    # Kept: on a busy machine PyTorch may wait for itself where what holds the process group is deleted.
    _names = runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


def losses_of(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"training loss ([\d.]+)", output)]


def losses_of_cell(launched: Any) -> list[float]:
    return [epoch["train_loss"] for epoch in launched.read_record()["score"]["per_epoch"]]


@pytest.mark.parametrize("name", CELLS)
def test_the_plain_script_reaches_the_cells_losses(start_cell, warm, tiny_data, tmp_path, name):
    launched = trained(start_cell, *CELLS[name], env=warm)
    script = emit(launched, "pytorch", tmp_path)
    arguments = [str(launched.record), str(tiny_data)]
    gpus = launched.read_record()["settings"]["gpus"]
    output = run_forked(script, arguments, gpus)
    assert losses_of(output) == pytest.approx(losses_of_cell(launched), rel=2e-5)


#: Prints the peak in bytes of the largest process that a command starts. Linux counts for a process what its
#: parent held when it was started. A process of tests may hold more than the command.
RUN_AND_PRINT_PEAK = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


def test_torchrun_runs_the_plain_script_in_the_cells_memory(start_cell, tiny_data, tmp_path):
    """A network of 24 million parameters, of which a further copy would be a tenth of the memory.

    The one script by torchrun itself, which has each process import PyTorch.
    """
    two_steps = {"epochs": 1, "global_batch": 32, "per_worker_batch": 16}
    changes = {**ADAMW, **two_steps, "model": "resnet50"}
    environment = os.environ | MALLOC | {"PYTHONPATH": str(WORKFLOW), "OMP_NUM_THREADS": "1"}
    launched = trained(start_cell, "ddp", {}, changes, env=environment)
    script = emit(launched, "pytorch", tmp_path)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, "-m", *torchrun, script, launched.record, tiny_data]
    memory = launched.read_record()["memory"]
    assert memory["method"] == "vmhwm"
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_PRINT_PEAK, *map(str, command)],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of(done.stdout) == pytest.approx(losses_of_cell(launched), rel=2e-5)
    # The record's peak is that of the largest rank.
    peak_bytes = int(done.stdout.split()[-1])
    assert peak_bytes == pytest.approx(memory["peak_bytes"], rel=0.05)


@with_deepspeed
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("zero1", {}), *(("deepspeed", {"stage": stage}) for stage in (1, 2, 3))],
)
def test_the_deepspeed_file_reaches_the_cells_losses(
    start_cell, tiny_data, tmp_path, strategy, options
):
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.7}
    launched = trained(start_cell, strategy, options, changes)
    config = emit(launched, "deepspeed", tmp_path)
    (tmp_path / "script.py").write_text(DEEPSPEED)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(*torchrun, "script.py", config, launched.record, tiny_data, folder=tmp_path)
    assert losses_of(output) == pytest.approx(losses_of_cell(launched), rel=2e-5)


@with_deepspeed
def test_deepspeed_trains_in_bfloat16_with_less_rounding(start_cell, tiny_data, tmp_path):
    launched = trained(start_cell, "zero1", {}, {"precision": "bf16-true"})
    config = emit(launched, "deepspeed", tmp_path)
    script = DEEPSPEED.replace("engine(part)", "engine(part).float()")
    (tmp_path / "script.py").write_text(script)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(*torchrun, "script.py", config, launched.record, tiny_data, folder=tmp_path)
    assert losses_of(output) == pytest.approx(losses_of_cell(launched), rel=5e-3)


@with_accelerate
def test_the_accelerate_file_reaches_the_cells_losses(start_cell, tiny_data, tmp_path):
    launched = trained(start_cell, *CELLS["ddp"])
    config = emit(launched, "accelerate", tmp_path)
    (tmp_path / "script.py").write_text(TRAIN)
    launch = ("accelerate.commands.launch", "--config_file", config, "--main_process_port", "0")
    output = run(*launch, "script.py", launched.record, tiny_data, folder=tmp_path)
    assert "MULTI_CPU 2" in output
    assert losses_of(output) == pytest.approx(losses_of_cell(launched), rel=2e-5)


@with_accelerate
@pytest.mark.parametrize("options", [{}, {"shard_group_size": 2, "reshard_after_forward": "never"}])
def test_accelerate_reads_each_key_of_the_fsdp_file(tmp_path, monkeypatch, options):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "accelerate.yaml"
    file.write_text(emitted("fsdp", "accelerate", options, gpus=4))
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is ("reshard_after_forward" not in options)
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    assert (arguments.num_processes, arguments.use_fsdp) == (4, True)
    if options:
        mesh = ParallelismConfig()
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 2)


@with_transformers
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    "changes",
    [{}, HARDER, ADAMW, {"activation_checkpointing": "every-2"}],
    ids=["plain", "harder", "adamw", "every-2"],
)
def test_transformers_takes_the_arguments(tmp_path, strategy, changes):
    models.import_torchvision()
    from transformers.trainer_optimizer import _parse_optim_args

    found: dict[str, Any] = {}
    exec(emitted(strategy, "trainer", {}, gpus=1 if strategy == "single" else 2, **changes), found)
    arguments = found["args"]
    assert arguments.learning_rate == changes.get("lr", 0.05)
    assert arguments.max_grad_norm == changes.get("max_grad_norm", 0.0)
    assert arguments.gradient_accumulation_steps == changes.get("gradient_accumulation_steps", 1)
    expected = {"HARDER": "cosine_with_min_lr"}.get(
        "HARDER" if changes is HARDER else "", "constant"
    )
    assert arguments.lr_scheduler_type == expected
    if changes is not ADAMW:
        assert _parse_optim_args(arguments.optim_args)["momentum"] == "0.9"
    whole = changes.get("activation_checkpointing")
    assert arguments.activation_checkpointing == (bool(whole) and strategy != "fsdp")
    if whole == "every-2" and strategy != "fsdp":
        assert arguments.activation_checkpointing_kwargs == {"every_n_layers": 2}
    if strategy == "fsdp":
        each = {"sync_each_batch": True} if changes is HARDER else None
        assert arguments.accelerator_config.gradient_accumulation_kwargs == each
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2
        assert arguments.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "Block"
