"""Writes a script that trains the cell in plain PyTorch, for `--to pytorch`."""

from __future__ import annotations

from stratbench.extensions.emit.choice import ChosenCell, format_comment_lines
from stratbench.extensions.emit.targets.checkpointing import format_checkpointing_code
from stratbench.extensions.emit.targets.ddp_options import (
    choose_communication_hook_name,
    format_powersgd_state_call,
    list_ddp_arguments,
)
from stratbench.extensions.emit.targets.hyperparameters import (
    AUTOCAST,
    add_loss_chunks_comment,
    format_lr_schedule_lines,
    format_optimizer_call,
    get_optimizer_class_and_arguments,
)
from stratbench.extensions.emit.targets.python_text import wrap_long_call_line
from stratbench.extensions.emit.targets.sharding_lines import (
    format_block_list_lines,
    format_sharding_code,
)

#: Comment in the script, above the lines that users replace by their own model and data.
REPLACE_COMMENT = (
    "# Yours in place of the cell's: a network on the device, its loss, and this worker's batches."
)


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as a Python script that trains in plain PyTorch.

    Args:
        choice: The cell.
        target_strategy: PyTorch's class or function that wraps the model or the optimizer, or "".
    """
    s, on_cpu = choice.settings, choice.device_type == "cpu"
    imports = ["import sys", "import torch", "import torch.distributed as dist"]
    imports.append("from stratbench.extensions.emit.work import Work")
    choice.mark_as_written(
        *("gpus", "global_batch", "per_worker_batch", "epochs", "steps", "seed"),
        *("data_placement", "augment"),
    )
    add_loss_chunks_comment(choice)
    model = format_model_wrapping_lines(choice, target_strategy, imports)
    optimizer = format_optimizer_creation_lines(choice, target_strategy, imports)
    blocks = [
        format_process_group_lines(choice, imports),
        [REPLACE_COMMENT, "work = Work(*sys.argv[1:], rank, device)", "model = work.model"],
    ]
    if s.precision == "bf16-true":
        blocks[1][-1] += ".to(torch.bfloat16)"
    if not on_cpu and s.precision in ("fp32", "tf32"):
        value = choice.get_setting_to_write("precision") == "tf32"
        blocks[0].append(f"torch.backends.cuda.matmul.allow_tf32 = {value}")
        blocks[0].append(f"torch.backends.cudnn.allow_tf32 = {value}")
    schedule = format_lr_schedule_lines(choice)
    if schedule:
        imports.append("import math")
        optimizer.append("scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)")
    if choice.get_setting_to_write("compile"):
        model.append("model = torch.compile(model)")
    blocks += [
        model,
        schedule,
        optimizer,
        format_training_loop_lines(choice, target_strategy, imports),
    ]
    if choice.record["task"].get("loss_weighs"):
        choice.add_file_comment(
            "the cell divides the loss by the weight of the global batch; here each worker by its own"
        )
    if s.slowdown is not None:
        choice.add_file_comment(
            "the cell slowed workers on purpose; this file does not", "slowdown"
        )
    per_node = f"--nproc-per-node {choice.workers_per_node}"
    if choice.num_nodes > 1:
        per_node = (
            f"--nnodes {choice.num_nodes} {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        )
    start = f"start: torchrun {per_node} FILE RECORD DATA (the cell's record, its prepared data)"
    head = format_comment_lines([*choice.cell_comments, start, *choice.file_comments])
    text = "\n\n".join("\n".join(map(wrap_long_call_line, lines)) for lines in blocks if lines)
    return f"{head}{format_sorted_imports(imports)}\n\n{text}\n"


def format_sorted_imports(imports: list[str]) -> str:
    """Return sorted import lines without repetition: `import` first, then `from`."""
    return "\n".join(sorted(set(imports), key=lambda line: (line.startswith("from"), line)))


def format_process_group_lines(choice: ChosenCell, imports: list[str]) -> list[str]:
    """Return the code lines that join the process group and set the worker's device."""
    on_cpu = choice.device_type == "cpu"
    lines = [
        f"dist.init_process_group({'gloo' if on_cpu else 'nccl'!r})",
        "rank, workers = dist.get_rank(), dist.get_world_size()",
    ]
    if on_cpu:
        lines.append("device = torch.device('cpu')")
    else:
        imports.append("import os")
        lines += [
            "device = torch.device('cuda', int(os.environ['LOCAL_RANK']))",
            "torch.cuda.set_device(device)",
            "torch.backends.cudnn.benchmark = True",
        ]
    if threads := choice.get_setting_to_write("threads"):
        lines.append(f"torch.set_num_threads({threads})")
    return [*lines, f"assert workers == {choice.settings.gpus}"]


def format_model_wrapping_lines(
    choice: ChosenCell, target_strategy: str, imports: list[str]
) -> list[str]:
    """Return the code lines that wrap `model` by DDP or FSDP2, if the strategy does.

    Args:
        choice: The cell.
        target_strategy: PyTorch's class or function that wraps the model or the optimizer, or "".
        imports: Imports of the script, extended in place.
    """
    s = choice.settings
    if target_strategy == "fully_shard":
        mixed = choice.get_option_to_write("mixed_precision")
        lines, needed = format_sharding_code(choice, "model", mixed == "policy")
        imports += ["from torch.distributed.device_mesh import init_device_mesh", *needed]
        shards = choice.shard_group_size
        shape = f"({s.gpus},)"
        if shards < s.gpus:
            shape = f"({s.gpus // shards}, {shards}), mesh_dim_names=('groups', 'shards')"
        return [f"mesh = init_device_mesh(device.type, {shape})", *lines]
    lines, needed = format_checkpointing_code(choice)
    imports += needed
    if lines:
        lines = [*format_block_list_lines(choice, "model"), *lines]
    if not target_strategy:
        return lines
    imports.append("from torch.nn.parallel import DistributedDataParallel")
    keywords = "".join(f", {key}={value!r}" for key, value in list_ddp_arguments(choice).items())
    devices = "" if choice.device_type == "cpu" else ", device_ids=[device]"
    lines.append(f"model = DistributedDataParallel(model{devices}{keywords})")
    if hook := choose_communication_hook_name(choice):
        module = "powerSGD_hook" if hook == "powerSGD_hook" else "default_hooks"
        imports.append(f"from torch.distributed.algorithms.ddp_comm_hooks import {module}")
        state = format_powersgd_state_call(choice) if module == "powerSGD_hook" else "None"
        lines.append(f"model.register_comm_hook({state}, {module}.{hook})")
    return lines


def format_optimizer_creation_lines(
    choice: ChosenCell, target_strategy: str, imports: list[str]
) -> list[str]:
    """Return the code lines that create the optimizer.

    Args:
        choice: The cell.
        target_strategy: PyTorch's class or function that wraps the model or the optimizer, or "".
        imports: Imports of the script, extended in place.
    """
    if target_strategy != "ZeroRedundancyOptimizer":
        return [f"optimizer = {format_optimizer_call(choice)}"]
    imports.append(f"from torch.distributed.optim import {target_strategy}")
    kind, arguments = get_optimizer_class_and_arguments(choice)
    whole = choice.get_option_to_write("parameters_as_bucket_view", True)
    arguments = {"parameters_as_bucket_view": whole, **arguments}
    keywords = "".join(f", {key}={value!r}" for key, value in arguments.items())
    if choice.settings.strategy == "zero1":
        choice.add_file_comment(
            "the cell ran stratbench's zero1, which divides the state number by number and sends less; "
            "torch's ZeroRedundancyOptimizer gives whole tensors to workers"
        )
    return [
        f"optimizer = {target_strategy}(model.parameters(), optimizer_class=torch.optim.{kind}{keywords})"
    ]


def format_training_loop_lines(
    choice: ChosenCell, target_strategy: str, imports: list[str]
) -> list[str]:
    """Return the code lines of the training loop.

    Args:
        choice: The cell.
        target_strategy: PyTorch's class or function that wraps the model or the optimizer, or "".
        imports: Imports of the script, extended in place.
    """
    s, parts = choice.settings, choice.get_setting_to_write("gradient_accumulation_steps")
    forward, indent = "work.loss(model(x), y)", " " * 8
    sync = choice.get_option_to_write("gradient_sync")
    by_policy = choice.options.get("mixed_precision") == "policy"
    scaled = choice.get_setting_to_write("precision") == "fp16"
    if s.precision == "fp64":
        choice.add_file_comment("network and batches are float64", "precision")
    if s.precision == "bf16-true":
        forward = "work.loss(model(x).float(), y)"
        choice.add_file_comment(
            "network and batches are bfloat16, scores and loss float32", "precision"
        )
    if s.precision in AUTOCAST and not by_policy:
        context = f"with torch.autocast(device.type, dtype={AUTOCAST[s.precision]}):"
        step = [context, f"    loss = {forward}"]
    else:
        step = [f"loss = {forward}"]
    if parts > 1:
        step[-1] += f" / {parts}"
    step += [
        "scaler.scale(loss).backward()" if scaled else "loss.backward()",
        "total += loss.detach()",
    ]
    if parts > 1:
        head = [f"for part, (x, y) in enumerate(zip(x.chunk({parts}), y.chunk({parts})), 1):"]
        if target_strategy == "fully_shard":
            if sync == "last-part":
                head.append(f"    model.set_requires_gradient_sync(part == {parts})")
            elif choice.shard_group_size < s.gpus:
                head.append(f"    model.set_requires_all_reduce(part == {parts})")
        elif target_strategy:
            imports.append("from contextlib import nullcontext")
            head.append(f"    with nullcontext() if part == {parts} else model.no_sync():")
            step = [f"    {line}" for line in step]
        step = [*head, *(f"    {line}" for line in step)]
    if (norm := choice.get_setting_to_write("max_grad_norm")) is not None:
        step += ["scaler.unscale_(optimizer)"] if scaled else []
        step.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm!r})")
    step += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    step.append("optimizer.zero_grad(set_to_none=True)")
    if s.has_changing_lr:
        step.append("scheduler.step()")
    passes = s.count_training_set_passes(choice.record["data"]["train_samples"])
    return [
        *(["scaler = torch.amp.GradScaler(device.type)"] if scaled else []),
        f"for epoch in range({passes}):",
        "    total, steps = torch.zeros((), device=device), 0",
        "    for x, y in work.batches(epoch):",
        *(indent + line for line in [*step, "steps += 1"]),
        "    dist.all_reduce(total)",
        "    if rank == 0:",
        "        print(f'epoch {epoch + 1}: training loss {total.item() / steps / workers:.7f}')",
        "dist.destroy_process_group()",
    ]
