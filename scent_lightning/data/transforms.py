"""What is done to images before a model sees them: random parts of them, one size, and numbers around 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scent_lightning.errors import InputError

__all__ = [
    "Normalise",
    "PaddedCrop",
    "ResizedPart",
    "Transform",
    "bicubic_part",
    "check_channels",
    "normalise",
    "random_part",
    "shown_part",
]

Transform = Callable[[Tensor], Tensor]


def check_channels(mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    """Raise InputError unless each is None or 3 finite numbers, those of ``std`` above 0."""
    for name, channels, above in (("mean", mean, -math.inf), ("std", std, 0.0)):
        if channels is not None and (len(channels) != 3 or not all(above < value < math.inf for value in channels)):
            raise InputError(f"{name} must be 3 finite numbers{' above 0' if name == 'std' else ''}, got {channels!r}")


class Normalise:
    """Bytes to float32, divided by 255, minus the mean, divided by the standard deviation, in two passes over them.

    Args:
        mean: of each channel.
        std: of each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.scale = 1 / (255 * torch.tensor(std)).view(3, 1, 1)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(3, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 to float32, shape (…, 3, H, W)."""
        return images.to(torch.float32).mul_(self.scale).add_(self.shift)


def normalise(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """The same as torchvision does it: rounded at other places."""
    from torchvision.transforms import v2

    to_float = v2.ToDtype(torch.float32, scale=True)
    transform: Transform = v2.Compose([to_float, v2.Normalize(list(mean), list(std), inplace=True)])
    return transform


class PaddedCrop:
    """Random crop of the image, padded with black by an eighth of its size, and flip."""

    def __call__(self, height: int, width: int) -> Transform:
        """The transform of images of one size."""
        from torchvision.transforms import v2

        crop = v2.RandomCrop((height, width), padding=[width // 8, height // 8])
        transform: Transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
        return transform


class ResizedPart:
    """Random part of the image, resized to ``size`` × ``size``, and flip."""

    def __init__(self, size: int) -> None:
        from torchvision.transforms import v2

        self.transform: Transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])

    def __call__(self, height: int, width: int) -> Transform:
        """The transform, which is the same for images of all sizes."""
        return self.transform


def random_part(size: int, scale: tuple[float, float]) -> Transform:
    """A random part of the image, of between two fractions of its area, resized, as open_clip trains."""
    from torchvision.transforms import InterpolationMode, v2

    transform: Transform = v2.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BICUBIC)
    return transform


def bicubic_part(size: int) -> Transform:
    """The short side resized, and of that the centre, as open_clip evaluates."""
    from torchvision.transforms import InterpolationMode, v2

    resize = v2.Resize(size, interpolation=InterpolationMode.BICUBIC)
    transform: Transform = v2.Compose([resize, v2.CenterCrop(size)])
    return transform


def shown_part(size: int) -> Transform:
    """The short side resized to 8/7 of ``size``, and of that the centre."""
    from torchvision.transforms import v2

    resize = v2.Resize(round(size * 8 / 7), antialias=True)
    transform: Transform = v2.Compose([resize, v2.CenterCrop(size)])
    return transform
