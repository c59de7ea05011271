"""Writes a cell as a DeepSpeed config in JSON, for `--to deepspeed`.

Comments are the value of a key that DeepSpeed does not read.
"""

from __future__ import annotations

import json

from stratbench.extensions.emit.choice import ChosenCell
from stratbench.extensions.emit.targets.checkpointing import add_checkpointing_comment
from stratbench.extensions.emit.targets.deepspeed_config import make_deepspeed_config
from stratbench.extensions.emit.targets.hyperparameters import (
    add_training_length_and_data_comments,
    format_lr_schedule_lines,
    format_optimizer_call,
)


def format_target_file(choice: ChosenCell, target_strategy: str) -> str:
    """Return the cell as a DeepSpeed config in JSON.

    Args:
        choice: The cell.
        target_strategy: Unused.
    """
    config = make_deepspeed_config(choice)
    choice.add_file_comment(
        f"initialize(model=model, optimizer={format_optimizer_call(choice)}, config=FILE)",
        "optimizer",
        "lr",
    )
    if lines := format_lr_schedule_lines(choice):
        text = "; ".join(line.strip() for line in lines)
        choice.add_file_comment(
            f"in the script, LambdaLR(optimizer, share_of_lr) with {text}", "schedule"
        )
    add_checkpointing_comment(choice)
    add_training_length_and_data_comments(choice)
    workers = choice.get_setting_to_write("gpus")
    start = f"start: deepspeed --num_nodes {choice.num_nodes} --num_gpus {choice.workers_per_node} train.py"
    comments = [*choice.cell_comments, f"{start} ({workers} workers)", *choice.file_comments]
    return json.dumps({"comments": comments, **config}, indent=2) + "\n"
