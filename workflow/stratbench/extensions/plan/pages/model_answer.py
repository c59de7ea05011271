"""Writes the answer for one model as a sentence and a table."""

from __future__ import annotations

import json

from stratbench.cell.text.words import GIB, format_bytes, format_count, format_hours, wrap_lines
from stratbench.extensions.plan.one_model.model_answer import Answer, StrategyAnswer
from stratbench.extensions.plan.quantities import format_bytes_in_unit
from stratbench.extensions.plan.schedule import DOES_NOT_FIT, FITS
from stratbench.study.resources import count_nodes_of_workers

#: Explanations of the table's columns, which follow the table.
NOTES = (
    "micro: largest number of samples that fit at once on a GPU, or on the GPUs that share one copy of the "
    "model.",
    "fits: needs at most 81 % of the GPU's memory.",
    "tight: needs at most 103 % of the GPU's memory; only a short run shows whether it fits.",
    "alloc.: value of torch.cuda.max_memory_allocated.",
    "reserv.: memory of PyTorch's allocator with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; without "
    "this setting up to a third more.",
    "smi: memory that nvidia-smi shows, with the CUDA context and NCCL.",
    "{throughput_unit}/s: one throughput to compare by, and its range{from_public_runs}.",
    "GPU-hours follow from the throughput to compare by.",
)
#: Indices of the table's columns that are aligned to the left, since they have words or ranges.
LEFT = (0, 1, 2, 7)


def format_model_answer(answer: Answer) -> str:
    """Return the text that `stratbench plan --model NAME --gpus N` prints."""
    above = wrap_lines(
        [_format_answer_heading(answer), "", _describe_fastest_fitting_strategy(answer), ""]
    )
    below = [f"{told}: {reason}" for reason, told in _list_strategies_by_reason(answer).items()]
    below += [f"left out: {reason}" for reason in answer.reasons_for_left_out_strategies]
    below += [f"not planned: {answer.text_on_unplanned_variants}."]
    if variants := _format_variants_for_config(answer):
        below += ["", f"In config.yaml: variants: {{{variants}}}"]
    below.append("")
    sources = {c.time_source for c in answer.strategy_answers if c.time_source}
    from_public_runs = f", with * from {sources.pop()}" if sources else ""
    notes = " ".join(NOTES)
    below.append(
        notes.format(throughput_unit=answer.throughput_unit, from_public_runs=from_public_runs)
    )
    return "\n".join([above, *_list_table_lines(answer), wrap_lines(below)])


def format_first_traced_strategy(answer: Answer) -> str:
    """Return a line with the answer for the strategy that was traced before all others."""
    return wrap_lines([f"first: {_describe_strategy_answer(answer, answer.strategy_answers[0])}"])


def _format_answer_heading(answer: Answer) -> str:
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


def _describe_fastest_fitting_strategy(answer: Answer) -> str:
    first = answer.strategy_answers[0]
    if first.verdict != FITS:
        tight = [c for c in answer.strategy_answers if c.verdict and c.verdict != DOES_NOT_FIT]
        if not tight:
            known = any(c.verdict for c in answer.strategy_answers)
            return "No strategy fits: use more or larger GPUs." if known else "No prediction."
        return f"No strategy fits for certain. {_describe_strategy_answer(answer, tight[0])}"
    fits_with_speed = _describe_strategy_answer(answer, first)
    if first.step_s is None:
        return fits_with_speed
    gpu_hours = _compute_gpu_hours(answer, first)
    cost = _format_cost(answer, gpu_hours)
    amount = f"{answer.num_training_samples_or_tokens:g} {answer.throughput_unit}".replace(
        "e+0", "e"
    ).replace("e+", "e")
    hours, total_gpu_hours = format_hours(gpu_hours / answer.question.gpus), format_hours(gpu_hours)
    at_a_cost = f", at a cost of {cost}" if cost else ""
    return f"{fits_with_speed} Training on {amount} takes {hours} h, {total_gpu_hours} GPU-hours{at_a_cost}."


def _describe_strategy_answer(answer: Answer, strategy_answer: StrategyAnswer) -> str:
    if not strategy_answer.verdict:
        return f"{_format_strategy_name(strategy_answer)}: {strategy_answer.reason}"
    noun = answer.throughput_unit.removesuffix("s") if not answer.data.is_text else "text"
    verdict = {FITS: FITS, DOES_NOT_FIT: DOES_NOT_FIT}.get(
        strategy_answer.verdict, f"is {strategy_answer.verdict}"
    )
    samples = format_count(strategy_answer.micro_batch, noun)
    fits_at_once = f"{_format_strategy_name(strategy_answer)} {verdict} with {samples} at once"
    fits_with_memory = (
        f"{fits_at_once}: {format_bytes(strategy_answer.memory.allocated_bytes)} per GPU."
    )
    if strategy_answer.verdict == DOES_NOT_FIT:
        return fits_with_memory
    gpu, precision, unit = answer.gpu.name, answer.precision, answer.throughput_unit
    if strategy_answer.step_s is None:
        return f"{fits_with_memory} Its time is unknown, since {gpu} has no rate for {precision}."
    low, high, usual = answer.compute_low_high_usual_throughput(strategy_answer)
    from_public_runs = (
        f", from {strategy_answer.time_source}" if strategy_answer.time_source else ""
    )
    batch = strategy_answer.global_batch
    return (
        f"{fits_at_once}, {batch} per step on all GPUs: {usual:,.0f} {unit} per second "
        f"({low:,.0f} to {high:,.0f}{from_public_runs})."
    )


def _format_strategy_name(strategy_answer: StrategyAnswer) -> str:
    return f"{strategy_answer.strategy}{' with checkpointing' if strategy_answer.uses_checkpointing else ''}"


def _list_table_lines(answer: Answer) -> list[str]:
    """Return the lines of the table of predictions, or no lines without predictions."""
    heads = ["strategy", "ckpt", "verdict", "micro", "alloc.", "reserv.", "smi"]
    heads += [f"{answer.throughput_unit}/s (range)", "GPU-h", "cost"]
    rows = [
        heads,
        *(
            _make_strategy_table_row(answer, c)
            for c in answer.strategy_answers
            if c.memory is not None
        ),
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


def _make_strategy_table_row(answer: Answer, strategy_answer: StrategyAnswer) -> list[str]:
    memory = (
        strategy_answer.memory.allocated_bytes,
        strategy_answer.memory.reserved_bytes,
        strategy_answer.memory.shown_bytes,
    )
    row = [
        strategy_answer.strategy,
        "yes" if strategy_answer.uses_checkpointing else "no",
        strategy_answer.verdict,
        str(strategy_answer.micro_batch),
    ]
    row += [format_bytes_in_unit(n, GIB) for n in memory]
    if strategy_answer.verdict == DOES_NOT_FIT or strategy_answer.step_s is None:
        return [*row, "", "", ""]
    low, high, usual = map(
        _format_throughput, answer.compute_low_high_usual_throughput(strategy_answer)
    )
    gpu_hours = _compute_gpu_hours(answer, strategy_answer)
    mark = "*" if strategy_answer.time_source else ""
    return [
        *row,
        f"{usual} ({low}-{high}){mark}",
        format_hours(gpu_hours),
        _format_cost(answer, gpu_hours),
    ]


def _compute_gpu_hours(answer: Answer, strategy_answer: StrategyAnswer) -> float:
    return (
        answer.num_training_samples_or_tokens
        / answer.compute_low_high_usual_throughput(strategy_answer)[2]
        / 3600
        * answer.question.gpus
    )


def _format_throughput(number: float) -> str:
    """Return a throughput with three digits, such as 4.21, 68.4k or 1.2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{format_bytes_in_unit(number, unit)}{name}"
    return f"{number:.3g}"


def _format_cost(answer: Answer, gpu_hours: float) -> str:
    price = answer.cluster["price_per_gpu_hour"]
    return "" if price is None else format_hours(gpu_hours * price)


def _list_strategies_by_reason(answer: Answer) -> dict[str, str]:
    """Return the reasons for missing predictions, each with the names of its strategies."""
    names: dict[str, list[str]] = {}
    for c in answer.strategy_answers:
        if c.reason:
            names.setdefault(c.reason, []).append(_format_strategy_name(c))
    if len(names) == 1 and len(next(iter(names.values()))) == len(answer.strategy_answers):
        return dict.fromkeys(names, "not predicted")
    return {reason: f"not predicted, {', '.join(each)}" for reason, each in names.items()}


def _format_variants_for_config(answer: Answer) -> str:
    """Return the strategies that may fit as entries of `variants` in config.yaml."""
    used = {c.strategy for c in answer.strategy_answers if c.verdict not in ("", DOES_NOT_FIT)}
    entries = {name: values for name, values in answer.variants.items() if name in used}
    return ", ".join(
        f"{name}: {json.dumps(values)}".replace('"', "") for name, values in entries.items()
    )
