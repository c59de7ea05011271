"""Writes the strategy and the Trainer of Lightning, for `--to lightning`."""

from __future__ import annotations

from typing import Any

from stratbench.extensions.emit.choice import Choice, format_comments
from stratbench.extensions.emit.targets.checkpointing import note_checkpointing
from stratbench.extensions.emit.targets.ddp_options import (
    choose_comm_hook,
    list_ddp_arguments,
    write_powersgd_state,
)
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    note_length_and_data,
    note_missing_cpu_support,
    write_optimizer_call,
    write_schedule_lines,
)
from stratbench.extensions.emit.targets.python_text import Code, fold_call, write_call
from stratbench.extensions.emit.targets.sharding_lines import write_sharding_lines

#: Code that frees gradients after each step. Lightning frees them after the next forward, where they add to
#: the memory of activations, or of DDP's new buckets.
FREE_GRADIENTS = (
    "def optimizer_step(self, epoch, batch, optimizer, closure):  # of your LightningModule",
    "    optimizer.step(closure)",
    "    optimizer.zero_grad()  # else gradients are in memory in the next forward, too",
)
#: Lightning's `precision`, by the setting. tf32 is a separate switch of torch.
PRECISION = {
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "bf16-true": "bf16-true",
    "fp64": "64-true",
}


def write(choice: Choice, called: str) -> str:
    """Return the cell as Python code for Lightning.

    Args:
        choice: The cell.
        called: Class of Lightning's strategy, or `auto`.
    """
    s = choice.settings
    imports = ["import torch", "from lightning.pytorch import Trainer"]
    if called != "auto":
        imports.append(f"from lightning.pytorch.strategies import {called}")
    model: list[str] = []
    if called == "DDPStrategy":
        strategy = write_ddp_strategy(choice, imports)
    elif called == "ModelParallelStrategy":
        strategy = f"{called}(data_parallel_size={s.gpus}, tensor_parallel_size=1)\n"
        model = write_configure_model(choice, imports)
    elif called == "DeepSpeedStrategy":
        config = make_deepspeed_config(choice)
        # Lightning sets these keys itself.
        for key in ("gradient_accumulation_steps", "train_batch_size"):
            del config[key]
        strategy = write_call(called, {"config": config})
        note_missing_cpu_support(choice, "Lightning", "DeepSpeed")
    else:
        strategy = "'auto'\n"
    if called != "ModelParallelStrategy":
        note_checkpointing(choice, place="in configure_model")
    if choice.take_setting("compile"):
        choice.add_note("in configure_model, self.model = torch.compile(self.model)", "compile")
    arguments = list_trainer_arguments(choice, called)
    optimizers = ["def configure_optimizers(self):  # of your LightningModule"]
    optimizers.append(f"    optimizer = {write_optimizer_call(choice, 'self.parameters()')}")
    schedule = write_schedule_lines(choice)
    if schedule:
        imports.insert(0, "import math")
        optimizers += [
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)",
            "    return [optimizer], [{'scheduler': schedule, 'interval': 'step'}]",
        ]
    else:
        optimizers.append("    return optimizer")
    choice.add_note(f"in the script, DataLoader(batch_size={choice.micro_batch_size}, drop_last=True)",
                "global_batch", "per_worker_batch")  # fmt: skip
    note_length_and_data(choice, length=False)
    switches = []
    if s.precision in ("fp32", "tf32") and choice.device == "cuda":
        value = s.precision == "tf32"
        switches = [f"torch.backends.cuda.matmul.allow_tf32 = {value}"]
        switches.append(f"torch.backends.cudnn.allow_tf32 = {value}")
    freeing = [] if called == "DeepSpeedStrategy" else list(FREE_GRADIENTS)
    blocks = [imports, switches, schedule, model, optimizers, freeing]
    body = "\n\n".join("\n".join(map(fold_call, lines)) for lines in blocks if lines)
    head = format_comments(
        [
            *choice.title_comments,
            "start: python train.py (Lightning starts the others)",
            *choice.comments,
        ]
    )
    return f"{head}\n{body}\n\nstrategy = {strategy}" + write_call("trainer = Trainer", arguments)


def list_trainer_arguments(choice: Choice, called: str) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer by name."""
    s = choice.settings
    arguments: dict[str, Any] = {
        "accelerator": "cpu" if choice.device == "cpu" else "gpu",
        "devices": choice.workers_per_node,
        "num_nodes": choice.num_nodes,
        "strategy": Code("strategy"),
        "precision": PRECISION.get(choice.take_setting("precision"), "32-true"),
        "accumulate_grad_batches": choice.take_setting("gradient_accumulation_steps"),
        # By default Lightning writes a checkpoint at the end. It is complete in memory, with the
        # optimizer's states.
        "enable_checkpointing": False,
    }
    choice.take_setting("gpus")
    by_itself = choice.options.get("mixed_precision") == "policy"
    if s.precision == "bf16-true":
        if called != "DeepSpeedStrategy":
            choice.add_note("in training_step, the loss of outputs.float()", "precision")
    elif called == "DeepSpeedStrategy" or by_itself:
        arguments["precision"] = "32-true"  # the strategy does the mixed precision
    elif called == "ModelParallelStrategy" and s.precision in ("fp16", "fp64"):
        arguments["precision"] = "32-true"
        choice.add_note(
            "ModelParallelStrategy does not take it from the Trainer: do it in training_step",
            "precision",
        )
    if (norm := choice.take_setting("max_grad_norm")) is not None and called != "DeepSpeedStrategy":
        arguments["gradient_clip_val"] = norm
    sync = choice.take_option("gradient_sync")
    if s.gradient_accumulation_steps > 1 and sync == "last-part":
        choice.add_note(
            "Lightning reduces gradients with each part; the cell did with the last",
            "gradient_sync",
        )
    elif s.gradient_accumulation_steps > 1 and sync is not None:
        choice.add_note("Lightning reduces gradients with each part, too", "gradient_sync")
    epochs, steps = choice.take_setting("epochs"), choice.take_setting("steps")
    return arguments | ({"max_steps": steps} if steps else {"max_epochs": epochs})


def write_ddp_strategy(choice: Choice, imports: list[str]) -> str:
    """Return the code that creates Lightning's DDP strategy."""
    arguments, hook = list_ddp_arguments(choice), choose_comm_hook(choice)
    if hook is not None:
        module = "powerSGD_hook" if hook == "powerSGD_hook" else "default_hooks"
        imports.append(f"from torch.distributed.algorithms.ddp_comm_hooks import {module}")
        arguments["ddp_comm_hook"] = Code(f"{module}.{hook}")
        if module == "powerSGD_hook":
            arguments["ddp_comm_state"] = Code(write_powersgd_state(choice))
    return write_call("DDPStrategy", arguments)


def write_configure_model(choice: Choice, imports: list[str]) -> list[str]:
    """Return the LightningModule's method that shards its network `self.model` by FSDP2."""
    s = choice.settings
    mixed = choice.take_option("mixed_precision")
    lines, needed = write_sharding_lines(choice, "self.model", mixed == "policy")
    imports += needed
    if choice.shard_group_size < s.gpus:
        choice.add_note(
            "Lightning's mesh has one dimension of data parallelism, and no groups: here all workers hold "
            "one model between them",
            "shard_group_size",
        )
    if mixed == "autocast" and s.precision in ("bf16", "fp16"):
        choice.add_note("torch.autocast by the Trainer, as in the cell", "mixed_precision")
    return [
        "def configure_model(self):  # of your LightningModule, whose network is self.model",
        "    mesh = self.device_mesh['data_parallel']",
        *(f"    {line}" for line in lines),
    ]
