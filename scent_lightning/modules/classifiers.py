"""Networks that end in a linear layer, their classifier."""

from __future__ import annotations

import difflib
from typing import cast

from torch import nn

from scent_lightning.errors import InputError

__all__ = ["binary_classifier", "last_linear"]


def last_linear(network: nn.Module) -> str | None:
    """Name of the network's last linear layer ("" if it is the network itself), or None."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return names[-1] if names else None


def binary_classifier(name: str, weights: str | None) -> nn.Module:
    """A classifier of torchvision with one output.

    Args:
        name: torchvision's, of a model that ends in a linear layer, which starts anew.
        weights: pretrained weights of it by name ("DEFAULT", say); downloaded.

    Raises:
        InputError: a name or weights that torchvision does not know, or a model of another kind.
    """
    from torchvision.models import get_model, list_models

    known = [model for model in list_models() if "/" not in model]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=5) or known[:5]
        raise InputError(f"torchvision_model {name!r} is not known; known are {', '.join(near)}, …")
    try:
        network: nn.Module = get_model(name, weights=weights)
    except (KeyError, ValueError) as error:
        raise InputError(f"torchvision_weights {weights!r} are not known for {name}") from error
    classifier = last_linear(network)
    if not classifier:
        raise InputError(f"torchvision_model {name!r} does not end in a linear layer, which would be its classifier")
    parent, _, last = classifier.rpartition(".")
    width = cast(nn.Linear, network.get_submodule(classifier)).in_features
    setattr(network.get_submodule(parent), last, nn.Linear(width, 1))
    return network
