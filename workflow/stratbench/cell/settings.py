"""Declares every setting of a training run (cell), with its type, limits, default and meaning.

The schema of config.yaml, the table in docs/configuration.md, the settings in a record and the settings that
affect the plan all follow from these declarations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from stratbench.cell.extensions import iter_extension_keys
from stratbench.cell.learning_rate import Schedule, compute_lr_factor
from stratbench.cell.options import build_dataclass_schema, build_json_schemas_of_fields

#: The argument `planned` of a setting whose value determines the planned memory or traffic.
EACH = "each value"


def setting(default: Any, help: str, planned: Any = None, **limits: Any) -> Any:
    """Return a dataclass field for a setting that config.yaml gives.

    Args:
        default: Default value; MISSING if config.yaml must give the setting.
        help: Meaning, as shown in the configuration's reference.
        planned: How planned memory and traffic depend on the setting. EACH: they depend on its value. None:
            they do not. Any other value: they depend on whether the setting is set (not null, 0 or false),
            and this value represents all set values.
        limits: Keywords of JSON Schema besides the type.
    """
    metadata = {"given": True, "rule": limits | {"description": help}, "planned": planned}
    if isinstance(default, dict | list):  # dataclasses do not allow mutable defaults
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def derived_field(
    help: str, default: Any = MISSING, planned: Any = None, default_factory: Any = MISSING
) -> Any:
    """Return a dataclass field for a setting that follows from the cell and the study.

    Args:
        help: Meaning, as shown in the reference of the record.
        default: Default value, if any.
        planned: How planned memory and traffic depend on the setting, as in `setting`.
        default_factory: Returns the default value, if any.
    """
    rule = {"description": help}
    metadata = {"given": False, "rule": rule, "planned": planned}
    return field(default=default, default_factory=default_factory, metadata=metadata)


#: Values of `activation_checkpointing` besides true and false.
CHECKPOINTING = "^(selective|every-([2-9]|[1-9][0-9]+))$"
#: JSON Schema of the setting `betas`.
BETAS = {
    "minItems": 2,
    "maxItems": 2,
    "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
}
# fmt: off
SLOWDOWN = {
    "additionalProperties": False,
    "properties": {
        "workers": {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0},
            "description": "Ranks of the slow workers; ranks that a cell does not have are ignored."},
        "factor": {"type": "number", "minimum": 1,
            "description": "Factor by which each step of a slow worker takes longer."},
        "sigma": {"type": "number", "minimum": 0,
            "description": "Standard deviation of the log of a random factor on each step's time (seeded)."},
    },
}
# fmt: on


class Keys:
    """Base class for an extension's keys in a block of config.yaml: a dataclass of `setting` fields."""

    #: Name of the extension. Only keys in the block of an experiment need it.
    extension: ClassVar[str]
    #: Whether each worker is a separate job in cells that have these keys.
    workers_are_jobs: ClassVar[bool] = False

    @classmethod
    def complete_values(cls, own: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that `more` of Settings or Constraints stores for the extension.

        Args:
            own: The extension's keys that the block gives.
            whole: All values of the experiment for a block of an experiment, else the config.
        """
        return own

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], whole: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message per contradiction between a config block and the extension's keys there.

        Args:
            block: Values of the block.
            whole: The study for a block of an experiment, else the config.
        """
        yield from ()


ExtensionKeys = TypeVar("ExtensionKeys", bound=Keys)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that a cell is trained with, defaults included. A change of any setting retrains the cell.

    The cell's time limit is left out on purpose: raising it must not retrain what has finished.
    """

    # fmt: off
    strategy: str = derived_field(help="Name of the strategy.")
    options: dict[str, Any] = derived_field(help="All options of the strategy.")
    model: str = derived_field(planned=EACH, help="Name of the model.")
    dataset: str = derived_field(help="Name of the data set.")
    gpus: int = derived_field(help="Number of workers; servers are not counted.")
    seed: int = derived_field(help="Seed of the weights and of the order of samples.")
    global_batch: int = derived_field(help="Samples of one step over all workers.")
    per_worker_batch: int = derived_field(
        help="Samples per step for one replica of the model. A replica is one worker, or several workers "
        "that share one model.")
    own_model: dict[str, Any] | None = derived_field(default=None, planned=EACH,
        help="Model that is not built in: call, kwargs, shard, and the sha256 of its code or its version. "
        "null: the model is built in.")
    own_task: dict[str, Any] | None = derived_field(default=None, planned=EACH,
        help="Task that is not built in: call, and the sha256 of its code or its version. null: the task is "
        "built in.")
    task: str | None = derived_field(default=None, planned=EACH,
        help="Built-in task, where the shape of the data set's samples does not determine it. null: the "
        "shape determines it.")
    data_spec: dict[str, Any] | None = derived_field(default=None,
        help="Specification of the data set's samples. Generated data: source, sizes and seed. Your own "
        "data: kind, keys, and the hash of files or code. null: the data set's name determines the samples.")
    epochs: int | None = setting(None, minimum=1,
        help="Passes over the training set, each followed by an evaluation. null: `steps` sets the length of "
        "the training.")
    steps: int | None = setting(None, minimum=1,
        help="Steps of the whole training, for cells of which only time and memory are wanted: nothing is "
        "evaluated, so there is no score. A data set with fewer batches is read again. null: `epochs` sets "
        "the length of the training.")
    lr: float = setting(MISSING, planned=0.1, exclusiveMinimum=0, help="Learning rate.")
    optimizer: Literal["sgd", "adamw"] = setting("sgd", planned=EACH,
        help="Optimizer that updates the weights, on the workers or on the servers: torch's SGD or AdamW. "
        "Servers whose update rule is made for one of the two refuse the other: "
        "docs/reference/strategies/servers.md lists them.")
    momentum: float = setting(0.9, planned=0.9, minimum=0, exclusiveMaximum=1,
        help="Momentum of SGD. AdamW uses `betas` instead.")
    weight_decay: float = setting(0.0, planned=1e-4, minimum=0,
        help="Weight decay. SGD adds it to the gradient; AdamW subtracts it from the weights.")
    nesterov: bool = setting(False, planned=EACH, help="Whether SGD uses Nesterov momentum.")
    betas: list[float] | None = setting(None, planned=[0.9, 0.999], **BETAS,
        help="Decay rates of AdamW's two moments. null: 0.9 and 0.999 with AdamW.")
    eps: float | None = setting(None, planned=1e-8, exclusiveMinimum=0,
        help="Constant that AdamW adds to the root of its second moment. null: 1e-8 with AdamW.")
    optimizer_impl: Literal["fused", "foreach", "for-loop"] = setting("fused", planned=EACH,
        help="PyTorch's implementation of the optimizer. fused: one kernel per step, without temporary "
        "tensors. foreach: operations on all tensors at once; AdamW then makes a temporary copy of them. "
        "for-loop: one tensor at a time. With fused, SGD on a CPU or with sparse gradients runs for-loop. "
        "Servers, `deepspeed` and precision fp16 support only fused.")
    gradient_accumulation_steps: int = setting(1, planned=EACH, minimum=1,
        help="Number of equal parts into which each worker divides its batch. The worker computes one part "
        "after the other, and sums the gradients. They are synchronised with the last part; `fsdp` reduces "
        "them after each part. A step needs the memory of one part. Its result is the same, except for "
        "BatchNorm, which normalises within a part. Servers do not support it.")
    activation_checkpointing: bool | str = setting(False, planned=EACH, pattern=CHECKPOINTING,
        help="Activations that are not stored, but computed again in backward, with the same result. A block "
        "is a group of layers that are sharded together. true: all activations of each block, for about a "
        "third more arithmetic. `selective`: all but attention, collectives and every second matrix product "
        "or convolution of each block, as in torchtitan. `every-N`, such as `every-2`: all activations of "
        "each N-th block. VGG does not support it, because its blocks are single layers.")
    loss_chunks: int = setting(1, planned=EACH, minimum=1,
        help="Number of chunks into which a text is divided to compute the logits and their loss. Only the "
        "logits of one chunk are in memory; backward computes them again. The loss is the same. Servers, "
        "`deepspeed`, `tensor`, `pipeline`, `compile`, images and your own tasks support only 1.")
    compile: bool = setting(False,
        help="Whether torch.compile compiles forward and backward of the training, after the strategy has "
        "wrapped the model. Evaluation and the optimizer are not compiled. The compilation happens in the "
        "warm-up, which has at least 3 steps; its time is recorded as `compile_s`. CPUs need g++, and GPUs "
        "need Triton. The plan predicts the memory of the uncompiled model. The planned time assumes half of "
        "the memory traffic and half of the kernel launches.")
    schedule: Schedule = setting("constant",
        help="How the learning rate falls from `lr` to `final_lr` over the steps of all epochs, after its "
        "warm-up. Servers count a step when they have received the gradients of a global batch.")
    lr_warmup_steps: int = setting(0, minimum=0,
        help="Number of first steps over which the learning rate rises linearly to `lr`. They are not the "
        "untimed `warmup_steps`.")
    final_lr: float = setting(0.0, minimum=0,
        help="Learning rate at the end of the schedule, which the step after the last one would have.")
    max_grad_norm: float | None = setting(None, planned=1.0, exclusiveMinimum=0,
        help="Largest Euclidean norm of the gradient of all parameters: a larger gradient is scaled down to "
        "it. null: no clipping. Servers refuse it.")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp64"] = setting(
        "fp32", planned=EACH,
        help="Number format of the arithmetic. tf32: fp32 with TensorFloat-32 matrix products (GPUs only). "
        "bf16 and fp16: mixed precision with fp32 weights; fp16 also has loss scaling. bf16-true: weights, "
        "gradients, the optimizer's states and all arithmetic but the loss in bfloat16. It needs half the "
        "memory, and rounding loses small updates. Servers and `deepspeed` do not support bf16-true.")
    augment: bool = setting(False,
        help="Whether training images get the data set's standard augmentation: a random crop, and a flip of "
        "natural images.")
    data_placement: Literal["device", "host"] = setting("device",
        help="Where the data set is stored. device: whole on each worker's device. host: in host memory, for "
        "data sets that do not fit on the device. A thread of each worker then gathers and copies the next "
        "batch while the device computes. Waiting for data is recorded as the phase `data`.")
    warmup_steps: int = setting(3, minimum=1,
        help="Steps before the clock starts. Their effect on the model and the optimizer is undone.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto",
        help="Device of a worker. auto: a GPU if there is one, else the CPU. cuda: a GPU, and an error if "
        "there is none.")
    threads: int | None = setting(None, minimum=1,
        help="CPU threads of a worker. null: an equal share of the node's cores, without those that a SLURM "
        "job requested for its servers.")
    profile: bool = setting(False,
        help="Whether torch's profiler writes a trace of a few more steps into the cell's log folder. These "
        "steps follow the training and count in no result.")
    slowdown: dict[str, Any] | None = setting(None, **SLOWDOWN,
        help="Artificial delay of chosen workers, to study stragglers. null: no worker is delayed.")
    #: Only extensions that the study uses have an entry. So no cell is retrained if another extension is
    #: added or deleted.
    more: dict[str, dict[str, Any]] = derived_field(default_factory=dict,
        help="Further settings: values of extensions' keys, by the extension's name. Only values that differ "
        "from the defaults are stored.")
    # fmt: on

    def __hash__(self) -> int:
        # These fields differ between most settings. Not all fields have a hash, because some are dicts.
        return hash((self.strategy, self.model, self.gpus, self.precision))

    def get_extension_keys(self, keys: type[ExtensionKeys]) -> ExtensionKeys:
        """Return an extension's keys, with defaults where the study gives no value."""
        return keys(**self.more.get(keys.extension, {}))

    @property
    def workers_are_jobs(self) -> bool:
        """Whether each worker is a separate job, so that the cell has no single allocation."""
        return any(
            keys.workers_are_jobs
            for name, keys in iter_extension_keys("experiment")
            if name in self.more
        )

    def compute_lr_factor(self, step: int, steps: int) -> float:
        """Return the factor by which the schedule multiplies the learning rate in one step."""
        return compute_lr_factor(
            self.schedule, step, steps, self.lr_warmup_steps, self.final_lr / self.lr
        )

    @property
    def has_changing_lr(self) -> bool:
        """Whether the learning rate differs between steps."""
        return self.schedule != "constant" or self.lr_warmup_steps > 0

    def count_steps(self, train_samples: int) -> int:
        """Return the number of steps of the whole training on `train_samples` samples."""
        return self.steps or self.epochs * (train_samples // self.global_batch)

    def count_training_set_passes(self, train_samples: int) -> int:
        """Return the number of passes over the training set. With `steps` the last may be incomplete."""
        return self.epochs or -(-self.steps // (train_samples // self.global_batch))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a record stores them, without `more` if that is empty."""
        values = asdict(self)
        return values if self.more else {k: v for k, v in values.items() if k != "more"}

    def as_json(self) -> str:
        """Return the settings as canonical JSON: equal settings give equal texts."""
        return json.dumps(self.as_dict(), sort_keys=True)

    def format_setting(self, key: str) -> str:
        """Return one setting as a text such as `lr=0.1`; equal values give equal texts."""
        return f"{key}={json.dumps(getattr(self, key), sort_keys=True)}"

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `as_json` wrote."""
        return cls(**json.loads(text))

    @classmethod
    def from_recorded_values(cls, recorded: Mapping[str, Any]) -> Settings:
        """Return the settings in a record, ignoring keys that are no longer settings."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in recorded.items() if key in known})


#: Names of the settings that an experiment in config.yaml may have.
GIVEN = tuple(f.name for f in fields(Settings) if f.metadata["given"])


#: Names of the settings that a variant may override, because they change only speed and memory.
OF_A_VARIANT = (
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "compile",
    "optimizer_impl",
)


def build_settings_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings in a record.

    A record has all settings of the core, and the given settings of extensions.
    """
    rules = build_json_schemas_of_fields(Settings)
    more = {
        name: {
            "type": "object",
            "description": f"Settings of the extension {name}.",
            "additionalProperties": False,
            "properties": build_json_schemas_of_fields(keys),
        }
        for name, keys in iter_extension_keys("experiment")
    }
    rules["more"] |= {"properties": more, "additionalProperties": False}
    return {"required": [name for name in rules if name != "more"], "properties": rules}


def build_experiment_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings that an experiment may give, with their defaults."""
    whole = build_dataclass_schema(Settings, GIVEN)
    for _, keys in iter_extension_keys("experiment"):
        each = build_dataclass_schema(keys, [f.name for f in fields(keys) if f.metadata["given"]])
        whole["required"] += each["required"]
        whole["properties"] |= each["properties"]
    return whole
