"""Memory that cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.audit.rule import Found, Study, at, rule

#: From where on dividing by the number of workers does not explain it.
REDUCED = 1.05


@rule(
    "memory-reduced-too-much",
    "doubtful",
    "memory",
    "Sharding over N workers divides memory by N at most. Something else differs.",
)
def memory_reduced_too_much(study: Study) -> Iterator[Found]:
    columns = {"model_states_bytes": "model states", "peak_memory_bytes": "peak memory"}
    for key, rows in study.groups.items():
        experiment, model, strategy, gpus = key
        if study.says(key, "strategy_kind") == "server":
            continue  # its servers hold the rest
        # A CPU's resident set holds more than the tensors: only its model states compare.
        on_cpu = (rows["device_kind"] == "cpu").any()
        for column, name in columns.items():
            whole = study.median((experiment, model, "ddp", gpus), column)
            held = study.median(key, column)
            if not whole or not held or (on_cpu and column != "model_states_bytes"):
                continue
            if whole / held > REDUCED * gpus:
                figures = f"{name}: ddp {whole / 2**20:.4g} MiB, {strategy} {held / 2**20:.4g} MiB"
                yield Found(at(key), f"{figures}: {whole / held:.2f} times on {gpus}")
