"""Networks that turn images into features: torchvision's without their classifier, and open_clip's image towers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from scent_lightning.errors import InputError
from scent_lightning.extraction.words import alike, digest, reason
from scent_lightning.optional import optional_module

__all__ = ["Backbone", "Transform", "features_of", "load_backbone"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Transform = Callable[[Image.Image], Tensor]


class Backbone(NamedTuple):
    """A network with the transform that belongs to it."""

    model: nn.Module  # images to features
    transform: Transform
    weights: str  # by which a run is recognised


class ImageTower(nn.Module):
    """The part of an open_clip model that encodes images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Features of images."""
        features: Tensor = self.model.encode_image(images)  # type: ignore[operator]
        return features


def file_weights(path: str) -> str:
    """A name for the weights in a file that goes by what is in it."""
    with open(path, "rb") as file:
        return f"file with SHA-256 {digest(iter(lambda: file.read(2**20), b''))}"


def unavailable(backbone: str, weights: str, error: Exception) -> InputError:
    """What to say where a library cannot get at weights."""
    return InputError(
        f"weights {weights} of {backbone} could not be loaded: {reason(error)}; without a network, give --weights a "
        "file that was downloaded elsewhere"
    )


def torchvision_backbone(name: str, weights: str, image_size: int | None, seed: int) -> Backbone:
    """A classifier without its last linear layer."""
    from torchvision import models, transforms

    known = models.list_models(module=models)
    if name not in known:
        raise InputError(f"unknown backbone torchvision:{name}{alike(name, known)}")
    named = models.get_model_weights(name).__members__
    state = None
    torch.manual_seed(seed)
    if weights in named:
        if image_size is not None:
            raise InputError(f"--image-size is for --weights none or a file: {weights} has its own transform")
        try:
            model = models.get_model(name, weights=named[weights])
        except Exception as error:  # of the network, the file system or the checksum
            raise unavailable(f"torchvision:{name}", weights, error) from error
        transform, label = named[weights].transforms(), named[weights].name
    else:
        if weights != "none" and not Path(weights).is_file():
            raise InputError(
                f"--weights {weights} is neither 'none' nor a file nor weights of torchvision:{name}"
                f"{alike(weights, named)}"
            )
        size = image_size or 224
        transform = transforms.Compose(
            [
                transforms.Resize(size * 256 // 224),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )
        model, label = models.get_model(name, weights=None), f"none, seed {seed}"
        if weights != "none":
            state, label = read_state(weights), file_weights(weights)
    head = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    if not head or model.get_submodule(head[0]).out_features != 1000:
        raise InputError(f"torchvision:{name} does not end in a linear classifier that could be taken off")
    parent, _, last = head[0].rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    if state is not None:
        # A classifier of any number of classes may be in the file.
        state = {key: value for key, value in state.items() if not key.startswith(f"{head[0]}.")}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()]
            first = (lines[1] if len(lines) > 1 else lines[0]).rstrip(".")
            raise InputError(f"weights {weights} do not fit torchvision:{name}: {first[:200]}") from error
    return Backbone(model, transform, label)


def read_state(path: str) -> dict[str, Tensor]:
    """The state dict in a file, or under "state_dict" in it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of several kinds, by what the file is
        raise InputError(f"cannot read weights {path}: {reason(error)}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise InputError(f"weights {path} must be a state dict, got {type(state).__name__}")
    return state


def open_clip_backbone(name: str, weights: str, image_size: int | None, seed: int) -> Backbone:
    """The image tower of a model of open_clip."""
    open_clip = optional_module("open_clip", f"--backbone open_clip:{name}")
    known = open_clip.list_models()
    if name not in known:
        raise InputError(f"unknown backbone open_clip:{name}{alike(name, known)}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights != "none" and weights not in tags and not Path(weights).is_file():
        raise InputError(
            f"--weights {weights} is neither 'none' nor a file nor pretrained weights of open_clip:{name}"
            f"{alike(weights, tags)}"
        )
    torch.manual_seed(seed)
    logging.disable(logging.ERROR)  # it logs what it raises
    try:
        model, _, transform = open_clip.create_model_and_transforms(
            name,
            pretrained=None if weights == "none" else weights,
            pretrained_text=False,
            force_image_size=image_size,
        )
    except Exception as error:  # of the network, the file system or torch
        raise unavailable(f"open_clip:{name}", weights, error) from error
    finally:
        logging.disable(logging.NOTSET)
    label = f"none, seed {seed}" if weights == "none" else weights if weights in tags else file_weights(weights)
    return Backbone(ImageTower(model), transform, label)


LIBRARIES = {"torchvision": torchvision_backbone, "open_clip": open_clip_backbone}


def load_backbone(backbone: str, weights: str, image_size: int | None, seed: int) -> Backbone:
    """The model in evaluation mode on the CPU, with its transform."""
    library, _, name = backbone.partition(":")
    if library not in LIBRARIES or not name:
        raise InputError(
            f"unknown backbone {backbone!r}: it must be torchvision:MODEL or open_clip:MODEL, such as "
            "torchvision:resnet50 or open_clip:ViT-B-32"
        )
    loaded = LIBRARIES[library](name, weights, image_size, seed)
    loaded.model.eval().requires_grad_(False)
    return loaded


@torch.inference_mode()
def features_of(model: nn.Module, images: Tensor, normalize: bool) -> Tensor:
    """Features, shape (B, D), float32, on the device of the images."""
    features = model(images).flatten(1).float()
    return nn.functional.normalize(features, dim=1) if normalize else features
