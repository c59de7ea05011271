"""Builds models, and forms their shard groups (modules that FSDP gathers together).

The Snakefile imports this module, so torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stratbench.cell.extensions import import_attribute
from stratbench.workload import users_code
from stratbench.workload.data.dataset import get_sample_kind
from stratbench.workload.network import libraries, own
from stratbench.workload.network.own import OwnModel
from stratbench.workload.network.registry import FAMILIES, MODELS, Model, get_model_metadata

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stratbench.cell.settings import Settings
    from stratbench.workload.network.sharding import ShardGroups
    from stratbench.workload.network.trial import Trial
    from stratbench.workload.tasks import Task


#: Reason why activation checkpointing would have no effect on a model.
NO_BLOCKS = (
    "activation_checkpointing recomputes blocks, but each shard group of this model is a single layer, which "
    "would save no memory; set it to false"
)


def _get_model_name(model_or_name: str | Model) -> str:
    return model_or_name if isinstance(model_or_name, str) else model_or_name.own_model.name


def get_model_or_name(settings: Settings) -> str | Model:
    """Return the model of a cell. It is the name of a built-in model, or the metadata of a user's model."""
    return make_metadata_or_keep_name(settings.model, settings.own_model)


def make_metadata_or_keep_name(name: str, spec: Mapping[str, Any] | None) -> str | Model:
    """Return a built-in model's name, or the metadata of a model that a user specifies.

    Args:
        name: Name of the model.
        spec: Fields of OwnModel, or None for a built-in model.
    """
    if spec is None:
        return name
    keys = {f.name for f in fields(OwnModel)}
    own = OwnModel(name, **{key: value for key, value in spec.items() if key in keys})
    torchvisions = own.torchvision_name
    if torchvisions is None:
        return Model("own", None, own_model=own)
    patch = int(torchvisions.rpartition("_")[2]) if torchvisions.startswith("vit_") else 1
    patch = _SIDES.get(torchvisions, patch)
    return Model(
        "torchvision", None, _SMALLEST.get(torchvisions, 32), patch_size=patch, own_model=own
    )


#: Smallest side in pixels of the images that some of torchvision's models take. For others it is 32.
_SMALLEST = {"alexnet": 64, "inception_v3": 96, "maxvit_t": 224}
#: For some of torchvision's models: the sides of an image must be multiples of this number of pixels.
_SIDES = {"maxvit_t": 224}


def get_model_specification(name: str, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the specification of a model, or None for a built-in model.

    A name that `entries`, the config's `models`, does not have is that of a torchvision model.
    """
    if name in MODELS:
        return None
    call = {"call": f"torchvision.models.{name}", "kwargs": {}, "wrap_classes": None}
    return dict(entries.get(name, call))


def check_model_takes_sample_kind(model_or_name: str | Model, sample_kind: str) -> None:
    """Raise ValueError if a model does not take samples of a kind, such as `texts`."""
    reads_text = get_model_metadata(model_or_name).reads_text
    reads = "texts" if reads_text else "images"
    if reads_text is not None and reads != sample_kind:
        raise ValueError(
            f"{_get_model_name(model_or_name)} takes {reads}, but the data set has {sample_kind}; use "
            "another model"
        )


def compute_input_shape(
    model_or_name: str | Model, sample_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of a model's input for samples of a given shape.

    Images (channels, height, width) are enlarged if the model needs it. Other samples keep their shape.

    Raises:
        ValueError: If the model does not take such samples.
    """
    check_model_takes_sample_kind(model_or_name, get_sample_kind(sample_shape))
    model, name = get_model_metadata(model_or_name), _get_model_name(model_or_name)
    if model.reads_text is None:
        return tuple(sample_shape)
    if model.reads_text:
        return sample_shape
    channels, height, width = sample_shape
    if model.is_from_torchvision and channels not in (1, 3):
        raise ValueError(
            f"{name} takes images with 3 channels or 1, but those of the data set have {channels}; use "
            "another model"
        )
    if model.patch_size > 1 and height != width:
        raise ValueError(
            f"{name} takes square images, but those of the data set have {height}x{width} pixels; use "
            "another model"
        )
    height, width = (
        -(-max(side, model.min_size) // model.patch_size) * model.patch_size
        for side in (height, width)
    )
    return 3 if model.is_from_torchvision else channels, height, width


def build_model(
    model_or_name: str | Model, classes: int, shape: tuple[int, ...] = (3, 224, 224)
) -> nn.Module:
    """Build a model with random weights, drawn from the global random generators.

    Args:
        model_or_name: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input, from `compute_input_shape`.
    """
    model = get_model_metadata(model_or_name)
    import_torchvision()
    if model.own_model:
        return own.build_own_model(model.own_model, classes, shape)
    if model.builder_path:
        return import_attribute(model.builder_path)(classes, shape)
    if shape[0] != 3:
        raise ValueError(
            f"{model_or_name} takes images with 3 channels, not {shape[0]}; repeat the single channel of the "
            "images"
        )
    from torchvision import models

    size = {"image_size": shape[1]} if model.patch_size > 1 else {}
    return models.get_model(model_or_name, weights=None, num_classes=classes, **size)


def build_fake_model(model_or_name: str | Model, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Build a model of fake tensors, which take no memory.

    The caller has entered a fake-tensor mode. Other tensors that the model's code creates are fake, too. A
    user's model whose code reads a tensor's values is first built on the CPU.

    Args:
        model_or_name: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
    """
    import torch

    from stratbench.workload.torch_internals import unset_fake_temporarily

    try:
        with _skip_drawing_weights():
            return build_model(model_or_name, classes, shape)
    except users_code.ModelError:
        with unset_fake_temporarily(), _skip_drawing_weights():
            made = build_model(model_or_name, classes, shape)
        replace_model_tensors(
            made, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        )
        return made


@contextmanager
def _skip_drawing_weights() -> Iterator[None]:
    """Skip the random initialisation of weights within the block, so that no memory is written."""
    from torch.overrides import TorchFunctionMode

    from stratbench.workload.torch_internals import skip_truncated_normals

    class Undrawn(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "").removeprefix("kaiming_") in ("normal_", "uniform_"):
                return args[0] if args else kwargs["tensor"]
            return func(*args, **kwargs)

    with skip_truncated_normals(), Undrawn():
        yield


def build_model_for_training(
    model_or_name: str | Model,
    classes: int,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    build_function: Callable[[str | Model, int, tuple[int, ...]], nn.Module] = build_model,
    checkpointing_mode: bool | str = False,
) -> nn.Module:
    """Build a model on a device in training mode, for strategies and the plan.

    The initial weights depend on `seed` alone: they are drawn on the CPU in float32. Parameters and buffers
    stay the objects that the model's code has created.

    Args:
        model_or_name: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
        seed: Seed of the weights.
        device: Device of the model.
        dtype: Type of the weights.
        build_function: Builds the model.
        checkpointing_mode: The setting `activation_checkpointing`.

    Raises:
        ModelError: If checkpointing would have no effect.
    """
    from stratbench.workload.generators import seed_random_generators

    seed_random_generators(seed)
    model = build_function(model_or_name, classes, shape)
    _made_in[model] = _list_parameter_dtypes(model)
    move_model_tensors(model, device, dtype)
    model.train()
    if checkpointing_mode:
        from stratbench.workload.network.checkpointing import (
            checkpoint_and_count_blocks,
            list_checkpointable_blocks,
        )

        groups = list_shard_groups(model_or_name, model)
        if not checkpoint_and_count_blocks(groups, checkpointing_mode):
            count = len(list_checkpointable_blocks(groups))
            too_few = (
                f"activation_checkpointing = {checkpointing_mode!r}: it has only {count} blocks; "
                "lower N"
            )
            why_not_checkpointed = too_few if count else NO_BLOCKS
            model_label = get_model_metadata(model_or_name).own_model or model_or_name
            raise users_code.ModelError(f"{model_label}: {why_not_checkpointed}")
    return model


#: For each built model: the dtypes in which its code created its floating-point parameters.
_made_in: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def _list_parameter_dtypes(model: nn.Module) -> tuple[str, ...]:
    real = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in real))


def changed_parameter_dtypes_reason(model: nn.Module) -> str | None:
    """Return a message if a model's code creates parameters in another number format than training.

    Return None for the usual float32, which the user's code need not have chosen.
    """
    others = [
        f for f in _made_in.get(model, ()) if f not in ("float32", *_list_parameter_dtypes(model))
    ]
    if not others:
        return None
    return (
        f"its code creates parameters in {', '.join(others)}, but all strategies train them in "
        f"{', '.join(_list_parameter_dtypes(model))} (`precision`)"
    )


def run_model_trial(
    model_or_name: str | Model,
    model: nn.Module,
    classes: int,
    shape: tuple[int, ...],
    shard_groups: ShardGroups,
    task: Task,
    dtype: torch.dtype,
) -> Trial:
    """Run trial steps of a model with two samples. Return the properties that the model shows in them.

    The model's state does not change.

    Args:
        model_or_name: The model.
        model: The model that `build_model_for_training` has built.
        classes: Number of classes or tokens.
        shape: Shape of the input.
        shard_groups: Shard groups of the model.
        task: Task, which determines the shape of the outputs.
        dtype: Type of the samples, if they are images.

    Raises:
        ModelError: If the model cannot be trained on such samples.
    """
    import torch

    from stratbench.workload import tasks
    from stratbench.workload.data.device_data import make_example_batch
    from stratbench.workload.network import trial

    device = next(model.parameters()).device
    values, layout = tasks.has_value_targets(task), torch.contiguous_format
    own = get_model_metadata(model_or_name).own_model
    vocabulary = own and own.vocabulary
    x, y = make_example_batch(
        trial.SAMPLES, shape, classes, device, dtype, layout, values, vocabulary is not None
    )
    # A model of transformers may have scores for more tokens than the data set has.
    outputs = tasks.compute_output_shape(task, y.shape, getattr(model, "scores", classes))
    try:
        tokens = vocabulary or classes
        return trial.run_trial_steps(
            describe_model(model_or_name), model, x, y, outputs, shard_groups, tokens
        )
    except users_code.ModelError as e:
        if "dtype" not in str(e) or (formats := changed_parameter_dtypes_reason(model)) is None:
            raise
        cast = "cast a layer's input to the dtype of its weight"
        raise type(e)(f"{e}; {formats}: {cast}") from e


def is_built_by_user_program(model_or_name: str | Model) -> bool:
    """Return whether only a user's own training program can build the model."""
    own = get_model_metadata(model_or_name).own_model
    return own is not None and own.call == libraries.NAME_ALONE


def describe_model(model_or_name: str | Model) -> str:
    """Return the text that names a model in a sentence."""
    own = get_model_metadata(model_or_name).own_model
    return str(own) if own is not None else f"model {_get_model_name(model_or_name)!r}"


def move_model_tensors(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move all tensors of a model to a device, in place.

    Real tensors also get the number format `dtype`. The tensor objects stay the same, so that hooks,
    attributes and other references stay valid. A tensor with gaps or overlaps in memory gets dense memory of
    its own.

    Args:
        model: The model.
        device: New device.
        dtype: New type of real tensors.
    """
    import torch

    from stratbench.workload.torch_internals import FakeTensor, overlaps_itself

    for t in [*model.parameters(), *model.buffers()]:
        placed = t.data.to(device, dtype if t.is_floating_point() else t.dtype)
        t.data = placed
        # A fake tensor has its device in an attribute, too.
        if isinstance(t, FakeTensor):
            t.fake_device = placed.fake_device
        if overlaps_itself(t):
            t.data = t.data.clone(memory_format=torch.contiguous_format)


def replace_model_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a model by another tensor.

    Shared parameters stay shared. Real tensors have to be replaced by fake ones in this way, since their
    memory cannot be replaced in place.
    """
    from torch import nn

    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in list(module.named_parameters(recurse=False)):
            if p not in placed:
                placed[p] = nn.Parameter(replacement(p), requires_grad=p.requires_grad)
            setattr(module, key, placed[p])
        for key, b in list(module.named_buffers(recurse=False)):
            setattr(module, key, replacement(b))


def list_shard_groups(model_or_name: str | Model, model: nn.Module) -> ShardGroups:
    """Return a model's shard groups in the order of forward. Each has a label and its modules.

    `sharding` defines the groups of a user's model. Other models have the blocks of their family. In VGG, the
    convolutions between two poolings are a group, and so is each linear layer. Modules in no group (stem,
    head) are sharded with the root.
    """
    if (own := get_model_metadata(model_or_name).own_model) is not None:
        from stratbench.workload.network import sharding

        if shard := own.wrap_classes or sharding.find_declared_wrap_classes(model):
            return sharding.group_modules_by_class(model, shard, own)
        return sharding.group_modules_by_size(model)
    family = get_model_metadata(model_or_name).family
    if family == "vgg":
        return _group_vgg_layers(model)
    blocks = tuple(import_attribute(path) for path in FAMILIES[family].block_classes)
    return [(label, [m]) for label, m in model.named_modules() if isinstance(m, blocks)]


def describe_sharding_rule(model_or_name: str | Model, built_model: nn.Module | None = None) -> str:
    """Return a text that says by which rule a model's shard groups are formed.

    Args:
        model_or_name: The model.
        built_model: The built model, if any.
    """
    model = get_model_metadata(model_or_name)
    if model.own_model:
        from stratbench.workload.network import sharding

        return sharding.describe_shard_group_rule(
            model.own_model.wrap_classes
            or (built_model and sharding.find_declared_wrap_classes(built_model))
        )
    blocks = [path.partition(":")[2] for path in FAMILIES[model.family].block_classes]
    return f"instances of {', '.join(blocks)}" if blocks else "stages and linear layers"


def _group_vgg_layers(model: nn.Module) -> ShardGroups:
    from torch import nn

    stages: list[list[nn.Module]] = [[]]
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            stages[-1].append(layer)
        elif isinstance(layer, nn.MaxPool2d):
            stages.append([])
    groups = [(f"features.stage{i}", stage) for i, stage in enumerate(stages, 1) if stage]
    linear = [(i, m) for i, m in enumerate(model.classifier) if isinstance(m, nn.Linear)]
    return groups + [(f"classifier.{i}", [module]) for i, module in linear]


def describe_own_model_for_record(
    model: Model, built_model: nn.Module, classes: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return a record's entry on a user's model. It has the call arguments and the rule of the shard groups.

    Args:
        model: The model.
        built_model: The built model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
    """
    return {
        "arguments": own.collect_call_arguments(model.own_model, classes, shape),
        "sharding": describe_sharding_rule(model, built_model),
    }


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a model has BatchNorm, which normalises over a worker's batch."""
    from stratbench.workload.torch_internals import BatchNorm

    return any(isinstance(module, BatchNorm) for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model has dropout or stochastic depth with a probability above 0."""
    from torchvision.ops import StochasticDepth

    from stratbench.workload.torch_internals import Dropout

    return any(
        isinstance(module, Dropout | StochasticDepth) and module.p > 0 for module in model.modules()
    )


#: Operators for which torchvision registers fake implementations at import, even if the operators are
#: missing.
_FAKED_OPERATORS = ("nms", "qnms")
_libraries: list[object] = []


def import_torchvision() -> None:
    """Import torchvision, even if its compiled part does not load.

    With a torch for CPUs, a torchvision for CUDA fails with "operator torchvision::nms does not exist". Since
    only models are used and none of the operators, defining the operators' schemas makes the import succeed.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _FAKED_OPERATORS:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # PyTorch would remove the schemas again if the library object were freed.
        _libraries.append(library)
        import torchvision  # noqa: F401
