"""The networks: how each is built, and how its layers are shared out.

The Snakefile imports this, so torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stratbench.workload import users_code
from stratbench.workload.data.dataset import kind_of
from stratbench.workload.network import libraries, own
from stratbench.workload.network.own import OwnModel
from stratbench.workload.network.registry import FAMILIES, MODELS, Model, facts_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stratbench.cell.settings import Settings
    from stratbench.workload.network.pieces import Piece
    from stratbench.workload.network.trial import Trial
    from stratbench.workload.tasks import Task


#: Why a model's activations cannot be checkpointed.
NO_BLOCKS = (
    "activation_checkpointing computes blocks again, and all that is sharded together here are single "
    "layers, which would save nothing; set it to false"
)


def _import_name(path: str) -> Any:
    """Return the object that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _name(model: str | Model) -> str:
    return model if isinstance(model, str) else model.own.name


def model_of(s: Settings) -> str | Model:
    """Return the model of a cell as functions here take it: its name, or a `Model`."""
    return named_model(s.model, s.own_model)


def named_model(name: str, spec: Mapping[str, Any] | None) -> str | Model:
    """Return the model of a name, with `spec` (the fields of OwnModel) if it is a user's own."""
    if spec is None:
        return name
    keys = {f.name for f in fields(OwnModel)}
    own = OwnModel(name, **{key: value for key, value in spec.items() if key in keys})
    torchvisions = own.torchvision_name
    if torchvisions is None:
        return Model("own", None, own=own)
    patch = int(torchvisions.rpartition("_")[2]) if torchvisions.startswith("vit_") else 1
    patch = _SIDES.get(torchvisions, patch)
    return Model("torchvision", None, _SMALLEST.get(torchvisions, 32), patch=patch, own=own)


#: Torchvision's networks that need more than 32 pixels a side, and one that takes multiples only.
_SMALLEST = {"alexnet": 64, "inception_v3": 96, "maxvit_t": 224}
_SIDES = {"maxvit_t": 224}


def spec_of(name: str, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """call, kwargs and shard of a model that is not built in.

    `entries`: the config's `models`.

    A name that is not there is a network of torchvision's. None for one of MODELS.
    """
    if name in MODELS:
        return None
    call = {"call": f"torchvision.models.{name}", "kwargs": {}, "wrap_classes": None}
    return dict(entries.get(name, call))


def check_reads(name: str | Model, kind: str) -> None:
    """Raise ValueError if the model takes other samples than those of the data, of `kind`."""
    reads_text = facts_of(name).reads_text
    reads = "texts" if reads_text else "images"
    if reads_text is not None and reads != kind:
        raise ValueError(f"{_name(name)} takes {reads}, and the data set has {kind}")


def input_shape(name: str | Model, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the model's input for samples of `shape`.

    Images (channels, height, width) are enlarged if the model needs it; others stay the same. Raises
    ValueError if the model does not take such data.
    """
    check_reads(name, kind_of(shape))
    model, name = facts_of(name), _name(name)
    if model.reads_text is None:
        return tuple(shape)
    if model.reads_text:
        return shape
    channels, height, width = shape
    if model.is_torchvisions and channels not in (1, 3):
        raise ValueError(
            f"{name} takes images of 3 channels (1 is repeated); these have {channels}"
        )
    if model.patch > 1 and height != width:
        raise ValueError(f"{name} takes square images; these have {height}x{width} pixels")
    height, width = (
        -(-max(side, model.min_size) // model.patch) * model.patch for side in (height, width)
    )
    return 3 if model.is_torchvisions else channels, height, width


def build(name: str | Model, classes: int, shape: tuple[int, ...] = (3, 224, 224)) -> nn.Module:
    """Return the untrained model.

    Weights come from the global generators: seed them before.

    Args:
        name: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input, from `input_shape`.
    """
    model = facts_of(name)
    import_torchvision()
    if model.own:
        return own.build(model.own, classes, shape)
    if model.builder:
        return _import_name(model.builder)(classes, shape)
    if shape[0] != 3:
        raise ValueError(f"{name} takes 3 channels, not {shape[0]}: repeat a single one")
    from torchvision import models

    size = {"image_size": shape[1]} if model.patch > 1 else {}
    return models.get_model(name, weights=None, num_classes=classes, **size)


def build_without_memory(model: str | Model, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return the model of fake tensors, in the active fake mode, without memory or time.

    Plain tensors that its code makes are fake, too. A user's model that reads a tensor's values is first
    built on the CPU.

    Args:
        model: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
    """
    import torch

    from stratbench.workload.torch_internals import unset_fake_temporarily

    try:
        with _undrawn():
            return build(model, classes, shape)
    except users_code.ModelError:
        with unset_fake_temporarily(), _undrawn():
            made = build(model, classes, shape)
        replace_tensors(made, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
        return made


@contextmanager
def _undrawn() -> Iterator[None]:
    """Skip the drawing of weights in the block: memory that is never written takes no space or time."""
    from torch.overrides import TorchFunctionMode

    from stratbench.workload.torch_internals import no_truncated_normals

    class Undrawn(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "").removeprefix("kaiming_") in ("normal_", "uniform_"):
                return args[0] if args else kwargs["tensor"]
            return func(*args, **kwargs)

    with no_truncated_normals(), Undrawn():
        yield


def for_training(
    name: str | Model,
    classes: int,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    build: Callable[[str | Model, int, tuple[int, ...]], nn.Module] = build,
    checkpointing: bool | str = False,
) -> nn.Module:
    """Return the model for every strategy, and the plan, on `device` in training mode.

    The initial weights follow from `seed` alone: they are drawn on the CPU in float32. Parameters and buffers
    stay the objects that the model's code made.

    Args:
        name: The model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
        seed: Seed of the weights.
        device: Device of the model.
        dtype: Type of the weights.
        build: Makes the model.
        checkpointing: The setting `activation_checkpointing`.

    Raises:
        ModelError: If checkpointing would change nothing.
    """
    from stratbench.workload.generators import seed_generators

    seed_generators(seed)
    model = build(name, classes, shape)
    _made_in[model] = _formats_of(model)
    place_tensors(model, device, dtype)
    model.train()
    if checkpointing:
        from stratbench.workload.network.checkpointing import blocks_of, checkpoint_blocks

        groups = wrap_groups(name, model)
        if not checkpoint_blocks(groups, checkpointing):
            count = len(blocks_of(groups))
            few = f"activation_checkpointing = {checkpointing!r}: it has {count} blocks; lower the number"
            reason = few if count else NO_BLOCKS
            raise users_code.ModelError(f"{facts_of(name).own or name}: {reason}")
    return model


#: Network -> the number formats of its real parameters as its code makes them.
_made_in: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def _formats_of(model: nn.Module) -> tuple[str, ...]:
    real = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in real))


def changed_formats(model: nn.Module) -> str | None:
    """Return a text on parameters in other formats than those of training, or None.

    The usual float32 is no declaration of the user.
    """
    others = [f for f in _made_in.get(model, ()) if f not in ("float32", *_formats_of(model))]
    if not others:
        return None
    return (
        f"its code makes parameters in {', '.join(others)}, and all strategies train them in "
        f"{', '.join(_formats_of(model))} (`precision`)"
    )


def trial_of(
    name: str | Model,
    model: nn.Module,
    classes: int,
    shape: tuple[int, ...],
    groups: list[tuple[str, list[nn.Module]]],
    task: Task,
    dtype: torch.dtype,
) -> Trial:
    """Return the trial steps of a model from `for_training`, on two samples each.

    It stays unchanged.

    Args:
        name: The model.
        model: The built model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
        groups: Its shard groups.
        task: Its task, which gives the shape of the outputs.
        dtype: Type of the samples, if they are images.

    Raises:
        ModelError: If something does not fit.
    """
    import torch

    from stratbench.workload import tasks
    from stratbench.workload.data.device_data import example_batch
    from stratbench.workload.network import trial

    device = next(model.parameters()).device
    values, layout = tasks.takes_values(task), torch.contiguous_format
    own = facts_of(name).own
    vocabulary = own and own.vocabulary
    x, y = example_batch(
        trial.SAMPLES, shape, classes, device, dtype, layout, values, vocabulary is not None
    )
    # A vocabulary may have more tokens than the data.
    outputs = tasks.outputs_of(task, y.shape, getattr(model, "scores", classes))
    try:
        tokens = vocabulary or classes
        return trial.take_trial(in_words(name), model, x, y, outputs, groups, tokens)
    except users_code.ModelError as e:
        if "dtype" not in str(e) or (formats := changed_formats(model)) is None:
            raise
        cast = "cast what a layer takes to the dtype of its weight"
        raise type(e)(f"{e}; {formats}: {cast}") from e


def has_name_alone(name: str | Model) -> bool:
    """Return whether a trainer of the user's builds the model, and nothing here can."""
    own = facts_of(name).own
    return own is not None and own.call == libraries.NAME_ALONE


def in_words(name: str | Model) -> str:
    """Return a model in a sentence about it."""
    own = facts_of(name).own
    return str(own) if own is not None else f"model {_name(name)!r}"


def place_tensors(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move all tensors to `device`, and the real ones among them to `dtype`, in place.

    Hooks, attributes, other references and shared tensors stay: only their memory is another. A tensor with
    gaps in memory, or with overlaps, gets dense memory of its own.

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
        if isinstance(t, FakeTensor):  # it states its device itself, whatever memory it is given
            t.fake_device = placed.fake_device
        if overlaps_itself(t):
            t.data = t.data.clone(memory_format=torch.contiguous_format)


def replace_tensors(model: nn.Module, replacement: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer.

    A shared parameter stays shared.

    Only for fakes of real tensors, which cannot be replaced in place.
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


def wrap_groups(name: str | Model, model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Return FSDP's gathering groups: (label, modules) in forward order, no module twice.

    A user's model has those that `sharding` defines, others the family's blocks. VGG has none: there, the
    convolutions between two poolings are one group, and each linear layer is one. Modules in no group (stem,
    head) belong to the root.
    """
    if (own := facts_of(name).own) is not None:
        from stratbench.workload.network import sharding

        if shard := own.wrap_classes or sharding.stated_classes(model):
            return sharding.groups_by_class(model, shard, own)
        return sharding.groups_by_size(model)
    family = facts_of(name).family
    if family == "vgg":
        return _vgg_groups(model)
    blocks = tuple(_import_name(path) for path in FAMILIES[family].blocks)
    return [(label, [m]) for label, m in model.named_modules() if isinstance(m, blocks)]


def _statement(network: str | Model, key: str, built: nn.Module) -> Any:
    """Return a model's declaration under `key`, or None.

    A user may name, as `module:NAME`, the declaration, or a function of the model that returns it.
    """
    model = facts_of(network)
    if model.own is None:
        path = getattr(FAMILIES[model.family], key)
        return path and _import_name(path)
    declared = getattr(model.own, key)
    if isinstance(declared, str):
        declared = users_code.import_name(model.own, declared)
    return declared(built) if callable(declared) else declared


def _states(network: str | Model, key: str) -> bool:
    """Return whether it has a declaration; nothing is imported."""
    model = facts_of(network)
    return getattr(model.own or FAMILIES[model.family], key) is not None


def has_tensor_plan(network: str | Model) -> bool:
    """Return whether the model has a tensor plan."""
    return _states(network, "tensor_plan")


def tensor_plan(network: str | Model, model: nn.Module) -> dict[str, str]:
    """Return how workers divide the layers of `model`, by module path (`*`: any name).

    ValueError if it has no plan.
    """
    return _statement(network, "tensor_plan", model)


def heads_of(network: str | Model, built: nn.Module | None = None) -> int:
    """Return the number of attention heads, or 0 without any, which any number divides.

    A `built` model may declare it itself.
    """
    model = facts_of(network)
    declared = model.own.num_heads if model.own else model.num_heads
    return declared or getattr(built, "num_heads", 0)


def has_pieces(network: str | Model) -> bool:
    """Return whether the model declares its forward as a chain of pieces."""
    return _states(network, "pipeline_modules")


def pieces_of(network: str | Model, model: nn.Module) -> list[Piece]:
    """Return the model's forward as a chain of pieces. ValueError if it has no such piece."""
    from stratbench.workload.network import pieces

    return pieces.pieces_of(model, _statement(network, "pipeline_modules", model))


def sharding_rule(name: str | Model, built: nn.Module | None = None) -> str:
    """Return a text on the rule by which `wrap_groups` makes its groups. `built`: the model."""
    model = facts_of(name)
    if model.own:
        from stratbench.workload.network import sharding

        return sharding.rule_of(
            model.own.wrap_classes or (built and sharding.stated_classes(built))
        )
    blocks = [path.partition(":")[2] for path in FAMILIES[model.family].blocks]
    return f"instances of {', '.join(blocks)}" if blocks else "stages and linear layers"


def _vgg_groups(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
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


def facts_of_own(
    model: Model, built: nn.Module, classes: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the record's entry of a user's model: the arguments of its call, and its sharding.

    Args:
        model: The model.
        built: The built model.
        classes: Number of classes or tokens.
        shape: Shape of the input.
    """
    return {
        "arguments": own.arguments(model.own, classes, shape),
        "sharding": sharding_rule(model, built),
    }


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether statistics over the (local) batch enter the training."""
    from stratbench.workload.torch_internals import BatchNorm

    return any(isinstance(module, BatchNorm) for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Return whether the forward pass has dropout or stochastic depth with p > 0."""
    from torchvision.ops import StochasticDepth

    from stratbench.workload.torch_internals import Dropout

    return any(
        isinstance(module, Dropout | StochasticDepth) and module.p > 0 for module in model.modules()
    )


#: Operators torchvision registers fakes for at import, even where its compiled part did not load.
_FAKED_OPERATORS = ("nms", "qnms")
_libraries: list[object] = []


def import_torchvision() -> None:
    """Import torchvision, also where its compiled part does not load.

    A torchvision built for CUDA next to a torch built for CPUs is a common accident and fails with
    "operator torchvision::nms does not exist". We use networks only, none of the operators: with
    their schemas defined by hand, the import succeeds.
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
        # Kept: the schemas go when the library object does.
        _libraries.append(library)
        import torchvision  # noqa: F401
