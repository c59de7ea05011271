"""Keys and values that were removed from config.yaml, each with its replacement."""

from __future__ import annotations

#: A sentence on the replacement of each removed key. A key of the top level is `NAME`, that of a block
#: `cluster.NAME` or `decide.NAME`, and a setting `experiment.NAME`.
REMOVED_KEYS: dict[str, str] = {
    "cluster.cells_per_job": "each cell is a SLURM job of its own (docs/slurm.md, Many small cells)",
    "cluster.submit_workers": (
        "the cell's own job submits its worker jobs, so compute nodes must be allowed to call sbatch"
    ),
    "container": (
        "jobs run in the Python that runs Snakemake, or with --sdm conda in that of envs/stratbench.yaml"
    ),
    "experiment.partition": (
        "all workers draw from the whole training set, which each epoch shuffles; remove the key"
    ),
    "experiment.scattered": (
        "a cell has equal nodes (cluster.gpus_per_node); workers that are jobs of their own run on any node"
    ),
}


def explain_removed_key(mapping_path: tuple[str | int, ...], key: str) -> str | None:
    """Return the replacement of a removed key, or None if the key never existed.

    Args:
        mapping_path: The path through the config to the mapping that holds the key.
        key: The unknown key.
    """
    section = "experiment" if "experiments" in mapping_path else ".".join(map(str, mapping_path))
    return REMOVED_KEYS.get(f"{section}.{key}".lstrip("."))
