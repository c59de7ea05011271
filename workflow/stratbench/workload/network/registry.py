"""Lists the built-in models and their metadata. It needs neither PyTorch nor a built model."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.workload.network.own import OwnModel


@dataclass(frozen=True)
class Family:
    """Properties that are the same for all models of a family, such as GPT.

    Attributes:
        batchnorm: Whether the family's models normalise over the batch, so that a batch of one
            sample fails. None if unknown before a model is built.
        block_classes: Classes of the models' blocks, as `module:Class`. FSDP gathers one block at a time.
        reads_text: Whether the models' input is tokens instead of images. None if unknown before a model is
            built.
        tensor_plan: `module:NAME` of a dictionary from module paths to how workers divide each module
            (`extensions/splitting/tensor.py`), or None.
        pipeline_modules: `module:NAME` of a plan that cuts forward into a chain of pieces
            (`extensions/splitting/pieces.py`), or None.
    """

    batchnorm: bool | None
    block_classes: tuple[str, ...] = ()
    reads_text: bool | None = False
    tensor_plan: str | None = None
    pipeline_modules: str | None = None


@dataclass(frozen=True)
class Model:
    """Properties of a model that are known before it is built.

    Without a `builder_path` the model is torchvision's of the same name. It keeps its three input
    channels, to which greyscale is repeated, so that its number of parameters stays the published one.

    Attributes:
        family: Name of the model's family.
        parameters: Number of parameters with 1000 classes and images of three channels and 224 pixels; for a
            GPT with the vocabulary and length of its text. None for a user's model.
        min_size: Smallest side of the model's images in pixels.
        builder_path: `module:function` of a function of (classes, input shape), whose model takes the data's
            channels.
        patch_size: Number of pixels of which each side of an image is a multiple.
        own_model: Specification of a user's model that is not in MODELS.
        num_heads: Number of attention heads, if its layers can be divided among workers.
        max_pipeline_stages: Maximum number of pipeline stages into which the model can be cut.
    """

    family: str
    parameters: int | None
    min_size: int = 1
    builder_path: str | None = None
    patch_size: int = 1
    own_model: OwnModel | None = None
    num_heads: int | None = None
    max_pipeline_stages: int | None = None

    @property
    def batchnorm(self) -> bool | None:
        """Whether the model has BatchNorm. None if this is unknown before the model is built."""
        return FAMILIES[self.family].batchnorm

    @property
    def reads_text(self) -> bool | None:
        """Whether the model takes tokens instead of images, or None if this is unknown."""
        return FAMILIES[self.family].reads_text

    @property
    def is_from_torchvision(self) -> bool:
        """Whether the model is one of torchvision's, which have three input channels."""
        return self.builder_path is None and self.family != "own"


FAMILIES: dict[str, Family] = {
    # VGG has no block classes, since `models._group_vgg_layers` forms its shard groups.
    "vgg": Family(batchnorm=False, pipeline_modules="stratbench.workload.network.torchvisions:VGG"),
    "efficientnet": Family(
        batchnorm=True,
        block_classes=(
            "torchvision.models.efficientnet:MBConv",
            "torchvision.models.efficientnet:FusedMBConv",
        ),
    ),
    "convnext": Family(batchnorm=False, block_classes=("torchvision.models.convnext:CNBlock",)),
    "resnet": Family(batchnorm=True, block_classes=("torchvision.models.resnet:Bottleneck",)),
    "densenet": Family(
        batchnorm=True,
        block_classes=(
            "torchvision.models.densenet:_DenseBlock",
            "torchvision.models.densenet:_Transition",
        ),
    ),
    "vit": Family(
        batchnorm=False,
        block_classes=("torchvision.models.vision_transformer:EncoderBlock",),
        tensor_plan="stratbench.workload.network.torchvisions:VIT_TENSOR_PLAN",
        pipeline_modules="stratbench.workload.network.torchvisions:VIT",
    ),
    "gpt": Family(
        batchnorm=False,
        block_classes=("stratbench.workload.network.gpt:Block",),
        reads_text=True,
        tensor_plan="stratbench.workload.network.gpt:TENSOR_PLAN",
        pipeline_modules="stratbench.workload.network.gpt:PIECES",
    ),
    # All models of torchvision that are not listed in MODELS.
    "torchvision": Family(batchnorm=None),
    "own": Family(batchnorm=None, reads_text=None),
}

MODELS: dict[str, Model] = {
    "vgg16": Model("vgg", 138_357_544, 32, max_pipeline_stages=8),
    "efficientnet_v2_l": Model("efficientnet", 118_515_272, 32),
    "convnext_large": Model("convnext", 197_767_336, 32),
    "resnet50": Model("resnet", 25_557_032, 32),
    "densenet121": Model("densenet", 7_978_856, 32),
    "vit_b_16": Model("vit", 86_567_656, 32, patch_size=16, num_heads=12, max_pipeline_stages=14),
    "gpt-char": Model(
        "gpt",
        10_770_816,
        builder_path="stratbench.workload.network.gpt:build_character_gpt",
        num_heads=6,
        max_pipeline_stages=8,
    ),
    "gpt2-small": Model(
        "gpt",
        124_439_808,
        builder_path="stratbench.workload.network.gpt:build_gpt2_small",
        num_heads=12,
        max_pipeline_stages=14,
    ),
    "vgg-compact": Model(
        "vgg", 645_704, 16, "stratbench.workload.network.compact:build_vgg", max_pipeline_stages=6
    ),
    "efficientnet-compact": Model(
        "efficientnet", 393_792, 16, "stratbench.workload.network.compact:build_efficientnet"
    ),
    "convnext-compact": Model(
        "convnext", 306_688, 16, "stratbench.workload.network.compact:build_convnext"
    ),
    "resnet-compact": Model(
        "resnet", 882_744, 16, "stratbench.workload.network.compact:build_resnet"
    ),
    "densenet-compact": Model(
        "densenet", 276_384, 16, "stratbench.workload.network.compact:build_densenet"
    ),
    "vit-compact": Model(
        "vit",
        469_032,
        16,
        "stratbench.workload.network.compact:build_vit",
        patch_size=4,
        num_heads=4,
        max_pipeline_stages=6,
    ),
    "gpt-compact": Model(
        "gpt",
        809_856,
        builder_path="stratbench.workload.network.gpt:build_compact_gpt",
        num_heads=4,
        max_pipeline_stages=6,
    ),
}


def get_model_metadata(model_or_name: str | Model) -> Model:
    """Return the metadata of a model, which need not be built.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(model_or_name, Model):
        return model_or_name
    if model_or_name not in MODELS:
        raise ValueError(f"model {model_or_name!r}: is unknown; use one of {', '.join(MODELS)}")
    return MODELS[model_or_name]
