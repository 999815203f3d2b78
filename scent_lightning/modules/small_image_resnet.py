"""A residual network for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scent_lightning.validation import checked_choice, checked_integer

__all__ = ["SmallImageResNet"]

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class SmallImageResNet(nn.Module):
    """ResNet (He et al. 2016) for images of about 32 pixels: its first convolution keeps the size, and nothing pools.

    torchvision's own shrinks an image by 4 before the first block, which leaves 1 × 1 of a 32-pixel image at the end.
    The blocks are torchvision's. With ``width`` 64 and ``depth`` 18 it is the ResNet-18 that is usual for CIFAR (11.2
    million weights); the cost falls with the square of the width.

    Args:
        depth: 18 or 34 layers.
        width: channels of the first stage, at least 1; each further stage has twice as many.
        num_outputs: outputs of the classifier, at least 1.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> network = SmallImageResNet(width=4)
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 1])
    """

    def __init__(self, depth: int = 18, width: int = 64, num_outputs: int = 1) -> None:
        super().__init__()
        checked_choice("depth", depth, _BLOCKS)
        checked_integer("width", width)
        checked_integer("num_outputs", num_outputs)
        from torchvision.models.resnet import BasicBlock, conv1x1, conv3x3

        self.stem = nn.Sequential(conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        channels = width
        for stage, blocks in enumerate(_BLOCKS[depth]):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                shortcut = None
                if channels != width * 2**stage:
                    shortcut = nn.Sequential(
                        conv1x1(channels, width * 2**stage, stride), nn.BatchNorm2d(width * 2**stage)
                    )
                stages.append(BasicBlock(channels, width * 2**stage, stride, shortcut))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # The layout in which convolutions are fastest, on CPUs as on GPUs.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, images: Tensor) -> Tensor:
        """What the classifier sees: shape ``(B, 8 · width)`` for images of shape ``(B, 3, H, W)``."""
        images = images.contiguous(memory_format=torch.channels_last)
        return torch.mean(self.blocks(self.stem(images)), dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Outputs, shape ``(B, num_outputs)``, for images of shape ``(B, 3, H, W)``."""
        outputs: Tensor = self.classifier(self.features(images))
        return outputs
