"""Builds small versions of image models, from torchvision's own blocks, for CPUs and demos.

Each has the property that makes its family costly to distribute: in VGG most parameters are in one layer,
DenseNet has many small tensors. They have 100,000 to 500,000 parameters and take images of at least 16
pixels. They have no dropout and no stochastic depth, since few parameters and few epochs need no
regularisation. `registry.MODELS` names the functions.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.densenet import DenseNet
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import VisionTransformer


class CompactVGG(nn.Module):
    """A small VGG: 3x3 convolutions and three linear layers, of which the first is the largest."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = channels
        for stage in ([16], [32], [64, 64]):
            for out in stage:
                layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True)]
                width = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, 256),
            nn.ReLU(inplace=True),
            nn.Linear(256, classes),
        )
        # The weights are initialised as section 3.1 of the VGG paper recommends. With torchvision's
        # initialisation the loss does not fall for epochs. With He's it diverges at learning rates that suit
        # other models.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(images)))


def build_vgg(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small VGG with three linear layers, the first of which has most parameters."""
    return CompactVGG(classes, shape[0])


def build_efficientnet(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small EfficientNetV2: fused MBConv blocks, then MBConv with squeeze-and-excitation."""
    model = EfficientNet(
        [
            FusedMBConvConfig(1, 3, 1, 16, 16, 1),
            FusedMBConvConfig(4, 3, 2, 16, 32, 1),
            MBConvConfig(4, 3, 2, 32, 64, 1),
            MBConvConfig(4, 3, 1, 64, 64, 2),
        ],
        dropout=0.0,
        stochastic_depth_prob=0.0,
        num_classes=classes,
        norm_layer=partial(nn.BatchNorm2d, eps=1e-3),
        last_channel=256,
    )
    stem = nn.Conv2d(shape[0], 16, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    model.features[0][0] = stem
    return model


def build_convnext(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small ConvNeXt, whose first convolution has 2x2 pixels."""
    model = ConvNeXt(
        [CNBlockConfig(24, 48, 1), CNBlockConfig(48, 96, 1), CNBlockConfig(96, None, 2)],
        # With the published value 1e-6, the blocks would have no effect in a short training.
        layer_scale=1.0,
        num_classes=classes,
    )
    stem = nn.Conv2d(shape[0], 24, 2, stride=2)
    nn.init.trunc_normal_(stem.weight, std=0.02)
    nn.init.zeros_(stem.bias)
    model.features[0][0] = stem
    return model


def build_resnet(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small ResNet: four stages of one bottleneck block each.

    The stages follow a 3x3 stem that halves the image.
    """
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(shape[0], 16, 3, stride=2, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(16)),
        ("relu", nn.ReLU(inplace=True)),
    ]
    width = 16
    for stage, planes in enumerate((16, 32, 64, 112)):
        stride, out = 1 if stage == 0 else 2, planes * Bottleneck.expansion
        shortcut = nn.Sequential(
            nn.Conv2d(width, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
        )
        layers.append((f"layer{stage + 1}", Bottleneck(width, planes, stride, shortcut)))
        width = out
    layers += [
        ("avgpool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(width, classes)),
    ]
    model = nn.Sequential(OrderedDict(layers))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def build_densenet(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small DenseNet-BC with growth rate 16, for small images."""
    model = DenseNet(16, (3, 4, 4), num_init_features=32, num_classes=classes)
    stem = nn.Conv2d(shape[0], 32, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight)
    model.features.conv0 = stem
    del model.features.pool0
    return model


def build_vit(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a small vision transformer: four layers of width 64 on patches of 4x4 pixels."""
    channels, size, _ = shape
    model = VisionTransformer(size, 4, 4, 4, hidden_dim=64, mlp_dim=256, num_classes=classes)
    stem = nn.Conv2d(channels, 64, 4, stride=4)
    nn.init.trunc_normal_(stem.weight, std=(1 / (channels * 4 * 4)) ** 0.5)
    nn.init.zeros_(stem.bias)
    model.conv_proj = stem
    # With torchvision's head of zeros, no other layer would get a gradient in the first step.
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
    return model
