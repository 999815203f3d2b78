"""The residual network for small images."""

import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.modules import SmallImageResNet


def test_sizes():
    network = SmallImageResNet(width=64)
    weights = sum(parameter.numel() for parameter in network.parameters())
    # Of the usual ResNet-18 for CIFAR-10, 11,173,962, but for its nine further outputs of 512 weights and a bias.
    assert weights == 11_173_962 - 9 * 513
    small = SmallImageResNet(width=4, num_outputs=3)
    maps = small.blocks(small.stem(torch.zeros(2, 3, 32, 32)))
    assert maps.shape == (2, 32, 4, 4)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert SmallImageResNet(34, 4)(torch.zeros(1, 3, 64, 64)).shape == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 20}, "depth must be one of 18, 34, got 20"),
        ({"width": 0}, "width must be an integer of at least 1, got 0"),
        ({"num_outputs": 1.0}, "num_outputs must be an integer of at least 1, got 1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        SmallImageResNet(**arguments)
