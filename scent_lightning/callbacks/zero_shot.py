"""What callbacks do with an open_clip model that is not trained for it: classifiers of names, embeddings of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module

__all__ = [
    "check_validates",
    "checked_data",
    "checked_templates",
    "encoded_images",
    "encoded_texts",
    "zero_shot_classifier",
]


def checked_data(callback: L.Callback, trainer: L.Trainer, module: L.LightningModule, *needed: str) -> Any:
    """The data module.

    Args:
        callback: asks for it.
        trainer: its Trainer.
        module: has to have open_clip's model.
        needed: what the data module has to have.

    Raises:
        InputError: open_clip is not installed, the module has no model of it, or the data module lacks something.
    """
    name = type(callback).__name__
    optional_module("open_clip", name)
    model = getattr(module, "model", None)
    if not hasattr(model, "encode_image") or not hasattr(model, "encode_text"):
        raise InputError(
            f"{name} needs a module whose 'model' is open_clip's, with encode_image and encode_text, got "
            f"{type(module).__name__}"
        )
    data = getattr(trainer, "datamodule", None)
    if lacking := [method for method in needed if not hasattr(data, method)]:
        raise InputError(
            f"{name} needs a data module with {' and '.join(lacking)}, such as ImageTextDataModule, got "
            f"{type(data).__name__}"
        )
    return data


def check_validates(callback: L.Callback, trainer: L.Trainer, does: str) -> None:
    """Raise InputError for a fit without validation, in which the callback would do nothing."""
    loaders: Any = trainer.val_dataloaders
    if isinstance(loaders, list) and not loaders:
        raise InputError(
            f"{type(callback).__name__} {does} at the end of a validation, and the data module has no validation rows"
        )


def checked_templates(templates: Any, argument: str = "templates must be 'openai', 'simple', or texts") -> list[str]:
    """Return templates, one or several, as a list if each has one {} for the name of a class.

    Raises:
        InputError: that begins with ``argument``.
    """
    several = [templates] if isinstance(templates, str) else templates
    if not isinstance(several, (list, tuple)) or not several:
        raise InputError(f"{argument} with {{}}, at least one, got {templates!r}")
    for template in several:
        try:
            complete = template.format("A") != template.format("B")
        except (AttributeError, IndexError, KeyError, ValueError):
            complete = False
        if not complete:
            raise InputError(f"{argument} with {{}} for the class's name, got {template!r}")
    return list(several)


def zero_shot_classifier(
    trainer: L.Trainer, module: L.LightningModule, names: list[str], templates: list[str] | str
) -> Tensor:
    """Normalised embeddings of K classes, float32, shape ``(D, K)``; in the Trainer's precision.

    Args:
        trainer: its data module tokenises.
        module: has open_clip's model.
        names: of the classes.
        templates: texts with {} for the name, or "openai" or "simple".
    """
    open_clip = optional_module("open_clip", "a zero-shot classifier")
    prompts: Sequence[str | Callable[[str], str]] = templates
    if isinstance(templates, str):
        prompts = getattr(open_clip, f"{templates.upper()}_IMAGENET_TEMPLATES")
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    with trainer.precision_plugin.forward_context():
        classifier: Tensor = open_clip.build_zero_shot_classifier(
            module.model, data.tokenize, names, prompts, device=module.device, use_tqdm=False
        )
    return classifier.float()


def encoded_images(trainer: L.Trainer, module: L.LightningModule, images: Tensor) -> Tensor:
    """Normalised embeddings of images as the data module transforms them, float32, shape ``(B, D)``."""
    model: Any = module.model
    images = trainer.precision_plugin.convert_input(images.to(module.device))
    with trainer.precision_plugin.forward_context():
        features: Tensor = model.encode_image(images, normalize=True)
    return features.float()


def encoded_texts(trainer: L.Trainer, module: L.LightningModule, texts: list[str], batch_size: int) -> Tensor:
    """Normalised embeddings of M texts, float32, shape ``(M, D)``."""
    model: Any = module.model
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    parts = []
    for start in range(0, len(texts), batch_size):
        tokens = data.tokenize(texts[start : start + batch_size]).to(module.device)
        with trainer.precision_plugin.forward_context():
            parts.append(model.encode_text(tokens, normalize=True).float())
    return torch.cat(parts)
