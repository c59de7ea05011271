"""Writes the answer for one model as a sentence and a table."""

from __future__ import annotations

import json

from stratbench.cell.text.words import GIB, format_bytes, format_count, format_hours, wrap_lines
from stratbench.extensions.plan.one_model.model_answer import Answer, StrategyAnswer
from stratbench.extensions.plan.quantities import format_in_unit
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS
from stratbench.study.resources import count_nodes_of_workers

NOTES = """\
micro: largest number of samples that fit at once on a GPU, or on the GPUs that share one copy of the model. \
fits: needs at most 81 % of the GPU's memory. tight: needs at most 103 %, so that only a short run shows \
whether it fits. alloc.: value of torch.cuda.max_memory_allocated. reserv.: memory of PyTorch's allocator \
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; without it up to a third more. smi: value of \
nvidia-smi, with the CUDA context and NCCL. {counts}/s: one value to compare by, and its range{runs}. \
GPU-hours follow from the value to compare by."""
#: Columns with words or ranges, which are aligned to the left.
LEFT = (0, 1, 2, 7)


def format_answer(answer: Answer) -> str:
    """Return the text that `stratbench plan --model NAME --gpus N` prints."""
    above = wrap_lines([_format_heading(answer), "", _describe_best(answer), ""])
    below = [f"{told}: {reason}" for reason, told in _group_by_reason(answer).items()]
    below += [f"left out: {reason}" for reason in answer.left_out_strategies]
    below += [f"not planned: {answer.unplanned_text}."]
    if variants := _format_variants(answer):
        below += ["", f"In config.yaml: variants: {{{variants}}}"]
    below.append("")
    sources = {c.time_source for c in answer.strategy_answers if c.time_source}
    runs = f", with * from {sources.pop()}" if sources else ""
    below.append(NOTES.format(counts=answer.throughput_unit, runs=runs))
    return "\n".join([above, *_list_table_lines(answer), wrap_lines(below)])


def format_first_traced(answer: Answer) -> str:
    """Return a line on the first strategy that was traced."""
    return wrap_lines([f"first: {_describe_choice(answer, answer.strategy_answers[0])}"])


def _format_heading(answer: Answer) -> str:
    shape, gpus, millions = answer.data.shape, answer.question.gpus, answer.parameters / 1e6
    samples = (
        f"texts of {shape[0]} tokens"
        if answer.data.is_text
        else f"{answer.throughput_unit} of {'x'.join(map(str, shape))}"
    )
    nodes = count_nodes_of_workers(gpus, answer.cluster)
    where = f" on {nodes} nodes" if nodes > 1 else ""
    size = f"{millions / 1e3:.3g} billion" if millions >= 1000 else f"{millions:.3g} million"
    return (
        f"{answer.question.model} ({size} parameters) on {gpus} x {answer.gpu.name} "
        f"{answer.gpu.memory_gib:g} GiB{where}: {samples}, {answer.optimizer}, {answer.precision}"
    )


def _describe_best(answer: Answer) -> str:
    first = answer.strategy_answers[0]
    if first.verdict != FITS:
        tight = [c for c in answer.strategy_answers if c.verdict and c.verdict != DOES_NOT_FIT]
        if not tight:
            known = any(c.verdict for c in answer.strategy_answers)
            return "No strategy fits: take more GPUs or larger ones." if known else "No prediction."
        return f"No strategy fits for certain. {_describe_choice(answer, tight[0])}"
    said = _describe_choice(answer, first)
    if first.step_s is None:
        return said
    gpu_hours = _compute_gpu_hours(answer, first)
    cost = _format_cost(answer, gpu_hours)
    amount = f"{answer.training_amount:g} {answer.throughput_unit}".replace("e+0", "e").replace(
        "e+", "e"
    )
    return (
        f"{said} Training on {amount} takes {format_hours(gpu_hours / answer.question.gpus)} h, "
        f"{format_hours(gpu_hours)} GPU-hours{f', at a cost of {cost}' if cost else ''}."
    )


def _describe_choice(answer: Answer, choice: StrategyAnswer) -> str:
    if not choice.verdict:
        return f"{_format_choice_name(choice)}: {choice.reason}"
    noun = answer.throughput_unit.removesuffix("s") if not answer.data.is_text else "text"
    verdict = {FITS: FITS, DOES_NOT_FIT: DOES_NOT_FIT}.get(choice.verdict, f"is {choice.verdict}")
    text = f"{_format_choice_name(choice)} {verdict} with {format_count(choice.micro_batch, noun)} at once"
    held = f"{text}: {format_bytes(choice.memory.allocated_bytes)} per GPU."
    if choice.verdict == DOES_NOT_FIT:
        return held
    if choice.step_s is None:
        return f"{held} Its time is unknown, since {answer.gpu.name} has no rate for {answer.precision}."
    low, high, usual = answer.compute_throughput(choice)
    return (
        f"{text}, {choice.global_batch} per step on all GPUs: {usual:,.0f} {answer.throughput_unit} "
        f"per second ({low:,.0f} to {high:,.0f}"
        f"{f', from {choice.time_source}' if choice.time_source else ''})."
    )


def _format_choice_name(choice: StrategyAnswer) -> str:
    return f"{choice.strategy}{' with checkpointing' if choice.uses_checkpointing else ''}"


def _list_table_lines(answer: Answer) -> list[str]:
    """Return the lines of the table of predictions, or no lines without predictions."""
    heads = ["strategy", "ckpt", "verdict", "micro", "alloc.", "reserv.", "smi"]
    heads += [f"{answer.throughput_unit}/s (range)", "GPU-h", "cost"]
    rows = [
        heads,
        *(_make_table_row(answer, c) for c in answer.strategy_answers if c.memory is not None),
    ]
    if len(rows) == 1:
        return []
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        fields = [
            text.ljust(width) if i in LEFT else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(fields).rstrip())
    return [f"{' ' * lines[0].index('alloc.')}GiB per GPU", *lines]


def _make_table_row(answer: Answer, c: StrategyAnswer) -> list[str]:
    memory = (c.memory.allocated_bytes, c.memory.reserved_bytes, c.memory.shown_bytes)
    row = [c.strategy, "yes" if c.uses_checkpointing else "no", c.verdict, str(c.micro_batch)]
    row += [format_in_unit(n, GIB) for n in memory]
    if c.verdict == DOES_NOT_FIT or c.step_s is None:
        return [*row, "", "", ""]
    low, high, usual = map(_format_rate, answer.compute_throughput(c))
    gpu_hours = _compute_gpu_hours(answer, c)
    mark = "*" if c.time_source else ""
    return [
        *row,
        f"{usual} ({low}-{high}){mark}",
        format_hours(gpu_hours),
        _format_cost(answer, gpu_hours),
    ]


def _compute_gpu_hours(answer: Answer, choice: StrategyAnswer) -> float:
    return (
        answer.training_amount / answer.compute_throughput(choice)[2] / 3600 * answer.question.gpus
    )


def _format_rate(number: float) -> str:
    """Return a rate with three digits, such as 4.21, 68.4k or 1.2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{format_in_unit(number, unit)}{name}"
    return f"{number:.3g}"


def _format_cost(answer: Answer, gpu_hours: float) -> str:
    price = answer.cluster["price_per_gpu_hour"]
    return "" if price is None else format_hours(gpu_hours * price)


def _group_by_reason(answer: Answer) -> dict[str, str]:
    """Return why choices have no prediction: each reason once, with the names of its choices."""
    names: dict[str, list[str]] = {}
    for c in answer.strategy_answers:
        if c.reason:
            names.setdefault(c.reason, []).append(_format_choice_name(c))
    if len(names) == 1 and len(next(iter(names.values()))) == len(answer.strategy_answers):
        return dict.fromkeys(names, "not predicted")
    return {reason: f"not predicted, {', '.join(each)}" for reason, each in names.items()}


def _format_variants(answer: Answer) -> str:
    """Return the entries of `variants` for the strategies that may fit."""
    used = {c.strategy for c in answer.strategy_answers if c.verdict not in ("", DOES_NOT_FIT)}
    entries = {name: values for name, values in answer.variants.items() if name in used}
    return ", ".join(
        f"{name}: {json.dumps(values)}".replace('"', "") for name, values in entries.items()
    )
