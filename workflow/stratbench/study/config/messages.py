"""Messages on mistakes in config.yaml: the key, the value, and the allowed values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from stratbench.cell.text.words import format_wrong_value


class ConfigError(ValueError):
    """A mistake in config.yaml. The message says what to change."""


def format_wrong_value_message(
    key_path: str, value: Any, problem: str, allowed: Iterable[str]
) -> str:
    """Return the message for a value that is not one of `allowed`.

    Args:
        key_path: Path of the key.
        value: The wrong value.
        problem: What is wrong with the value, such as `is not a model`.
        allowed: Allowed values.
    """
    allowed = list(allowed)
    listed = f"Allowed: {', '.join(allowed) or 'none'}."
    closest = suggest_closest_name(value, allowed)
    return f"config: {key_path} = {format_wrong_value(value)}: {problem}.{closest} {listed}"


def join_messages(messages: Iterable[str]) -> str:
    """Return messages about independent mistakes as lines, without repeated lists of allowed values."""
    lines = list(dict.fromkeys(messages))
    lists = [line.partition(" Allowed: ")[2] for line in lines]
    return "\n".join(
        line.partition(" Allowed: ")[0] if allowed and allowed in lists[i + 1 :] else line
        for i, (line, allowed) in enumerate(zip(lines, lists, strict=True))
    )


def format_strategy_remedy(strategy: str) -> str:
    """Return what to do about a strategy that an experiment's values do not allow."""
    return f"; remove {strategy} from strategies, or give it an experiment of its own"


def format_settings_source(strategies: Iterable[str]) -> str:
    """Return a remark that a message is about an experiment with the settings of variants."""
    return f" (with the settings of {', '.join(strategies)})"


def remove_strategy_remedy(message: str) -> str:
    """Return a message without remedies that name strategies, for studies that no user has written."""
    for text in (format_strategy_remedy("@"), format_settings_source("@")):
        message = re.sub(re.escape(text).replace("@", "[^;()]+"), "", message)
    return message


def format_config_path(path: Iterable[str | int]) -> str:
    """Return a path through the config as text: `studies.demo.experiments.digits.gpus[1]`."""
    names = (f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return "".join(n if n.isprintable() else repr(n)[1:-1] for n in names).lstrip(".")


#: Key of config.yaml with the same meaning, by the key of another training program.
ELSEWHERE = {
    "batch_size": "global_batch",
    "train_batch_size": "global_batch",
    "per_device_train_batch_size": "per_worker_batch",
    "micro_batch_size": "per_worker_batch",
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "gradient_clipping": "max_grad_norm",
    "gradient_checkpointing": "activation_checkpointing",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "torch_compile": "compile",
    "nproc_per_node": "gpus",
    "world_size": "gpus",
}

#: Value with the same meaning, by a value that others use.
VALUES_ELSEWHERE = {"gpu": "cuda"}

#: Present name of each renamed key and option, by its earlier name.
RENAMED = {
    "accumulate": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm",
    "shard": "wrap_classes",
    "heads": "num_heads",
    "pieces": "pipeline_modules",
    "worker_min": "worker_time_limit_min",
    "tensor_workers": "tensor_parallel_size",
    "sequence": "sequence_parallel",
    "data": "data_parallel",
    "pipeline_workers": "pipeline_parallel_size",
    "shard_workers": "shard_group_size",
    "tuned": "match_other_strategies",
    "rank": "powersgd_rank",
    "start": "powersgd_start_step",
    "width": "num_gpus",
    "hours": "training_hours",
    "worth": "sample_efficiency",
    "loss": "scaling_loss_per_worker",
}


def suggest_closest_name(wrong: Any, allowed: Iterable[str]) -> str:
    """Return ` Did you mean 'NAME'?` with the closest allowed name, or an empty text.

    A name that others or an older version used comes first, then the shortest allowed name that
    begins with the wrong one.
    """
    text, allowed = str(wrong), list(allowed)
    for names in (ELSEWHERE, RENAMED, VALUES_ELSEWHERE):
        if names.get(text) in allowed:
            return f" Did you mean {names[text]!r}?"
    longer = sorted((name for name in allowed if len(text) > 2 and name.startswith(text)), key=len)
    close = longer or difflib.get_close_matches(text, allowed, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
