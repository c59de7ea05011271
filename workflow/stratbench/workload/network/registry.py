"""The networks by name, and what is known of each before it is built. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.workload.network.own import OwnModel


@dataclass(frozen=True)
class Family:
    """What the networks of a family share.

    `batchnorm`: whether it normalises over the batch, which a batch of one sample cannot bear.
    `blocks`: the classes of its blocks, as `module:Class`. FSDP gathers one block at a time.
    `reads_text`: whether its input is tokens, and not images. None: not known before it is built.
    `tensor_plan`: how workers divide its layers, as `module:NAME` of a dictionary from the paths of
    modules to how each is divided (`extensions/splitting/tensor.py`); None: nobody has said so.
    `pipeline_modules`: its forward as a chain that can be cut into stages, as `module:NAME` of a plan
    (`workload/network/pieces.py`).
    """

    batchnorm: bool | None
    blocks: tuple[str, ...] = ()
    reads_text: bool | None = False
    tensor_plan: str | None = None
    pipeline_modules: str | None = None


@dataclass(frozen=True)
class Model:
    """What is known of a network before it is built.

    `parameters` is the number at 1000 classes and images of three channels and 224 pixels, the
    published one for the full-size networks; of a GPT, with the vocabulary and length of its text.
    `min_size` is the smallest image side in pixels that we give it; every side is a multiple of
    `patch`. `builder` is a function of (classes, input shape), as `module:function`, and the network
    takes the data's channels. Without one it is torchvision's network of the same name; it keeps its
    three input channels, so that its size stays the published one (greyscale is repeated).

    `own` is what a user says of a model that is not in MODELS; `parameters` is None then. `num_heads`: of its
    attention, where its layers can be divided among workers. `most_stages`: into which it can be cut.
    """

    family: str
    parameters: int | None
    min_size: int = 1
    builder: str | None = None
    patch: int = 1
    own: OwnModel | None = None
    num_heads: int | None = None
    most_stages: int | None = None

    @property
    def batchnorm(self) -> bool | None:
        """Whether it normalises over the batch, or None if that is not known before it is built."""
        return FAMILIES[self.family].batchnorm

    @property
    def reads_text(self) -> bool | None:
        """Whether its input is tokens, and not images, or None if both are possible."""
        return FAMILIES[self.family].reads_text

    @property
    def is_torchvisions(self) -> bool:
        """Whether it is torchvision's model, with its three input channels."""
        return self.builder is None and self.family != "own"


FAMILIES: dict[str, Family] = {
    "vgg": Family(  # its groups are made in `_vgg_groups`
        batchnorm=False, pipeline_modules="stratbench.workload.network.torchvisions:VGG"
    ),
    "efficientnet": Family(
        batchnorm=True,
        blocks=(
            "torchvision.models.efficientnet:MBConv",
            "torchvision.models.efficientnet:FusedMBConv",
        ),
    ),
    "convnext": Family(batchnorm=False, blocks=("torchvision.models.convnext:CNBlock",)),
    "resnet": Family(batchnorm=True, blocks=("torchvision.models.resnet:Bottleneck",)),
    "densenet": Family(
        batchnorm=True,
        blocks=(
            "torchvision.models.densenet:_DenseBlock",
            "torchvision.models.densenet:_Transition",
        ),
    ),
    "vit": Family(
        batchnorm=False,
        blocks=("torchvision.models.vision_transformer:EncoderBlock",),
        tensor_plan="stratbench.workload.network.torchvisions:VIT_TENSOR_PLAN",
        pipeline_modules="stratbench.workload.network.torchvisions:VIT",
    ),
    "gpt": Family(
        batchnorm=False,
        blocks=("stratbench.workload.network.gpt:Block",),
        reads_text=True,
        tensor_plan="stratbench.workload.network.gpt:TENSOR_PLAN",
        pipeline_modules="stratbench.workload.network.gpt:PIECES",
    ),
    "torchvision": Family(batchnorm=None),  # its other networks
    "own": Family(batchnorm=None, reads_text=None),
}

MODELS: dict[str, Model] = {
    "vgg16": Model("vgg", 138_357_544, 32, most_stages=8),
    "efficientnet_v2_l": Model("efficientnet", 118_515_272, 32),
    "convnext_large": Model("convnext", 197_767_336, 32),
    "resnet50": Model("resnet", 25_557_032, 32),
    "densenet121": Model("densenet", 7_978_856, 32),
    "vit_b_16": Model("vit", 86_567_656, 32, patch=16, num_heads=12, most_stages=14),
    "gpt-char": Model(
        "gpt",
        10_770_816,
        builder="stratbench.workload.network.gpt:char",
        num_heads=6,
        most_stages=8,
    ),
    "gpt2-small": Model(
        "gpt",
        124_439_808,
        builder="stratbench.workload.network.gpt:gpt2_small",
        num_heads=12,
        most_stages=14,
    ),
    "vgg-compact": Model(
        "vgg", 645_704, 16, "stratbench.workload.network.compact:vgg", most_stages=6
    ),
    "efficientnet-compact": Model(
        "efficientnet", 393_792, 16, "stratbench.workload.network.compact:efficientnet"
    ),
    "convnext-compact": Model(
        "convnext", 306_688, 16, "stratbench.workload.network.compact:convnext"
    ),
    "resnet-compact": Model("resnet", 882_744, 16, "stratbench.workload.network.compact:resnet"),
    "densenet-compact": Model(
        "densenet", 276_384, 16, "stratbench.workload.network.compact:densenet"
    ),
    "vit-compact": Model(
        "vit",
        469_032,
        16,
        "stratbench.workload.network.compact:vit",
        patch=4,
        num_heads=4,
        most_stages=6,
    ),
    "gpt-compact": Model(
        "gpt",
        809_856,
        builder="stratbench.workload.network.gpt:compact",
        num_heads=4,
        most_stages=6,
    ),
}


def facts_of(model: str | Model) -> Model:
    """Return the metadata of a model before it is built.

    Raises:
        ValueError: For an unknown name.
    """
    if isinstance(model, Model):
        return model
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known: {', '.join(MODELS)}")
    return MODELS[model]
