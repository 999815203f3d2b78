"""Compute the features of a source's images and write them."""

from __future__ import annotations

import argparse
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from scent_lightning.errors import InputError
from scent_lightning.extraction.backbones import Transform, features_of, load_backbone
from scent_lightning.extraction.output import Output, check_classes
from scent_lightning.extraction.shards import ShardSource
from scent_lightning.extraction.sources import FolderSource, Source, TorchvisionSource
from scent_lightning.extraction.words import reason

__all__ = ["Samples", "collate", "extract", "open_source"]


class Samples(Dataset[tuple[Tensor, int] | str]):
    """Transformed images with labels; an error is passed on as its message, which a loader process would bury."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source = source
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        try:
            image, target = self.source.read(index)
            tensor = self.transform(image)
        except InputError as error:
            return str(error)
        except Exception as error:  # an image library's, of many kinds
            return f"cannot read {self.source.name(index)}: {reason(error)}"
        try:
            label = operator.index(target)
        except TypeError:
            return f"{self.source.name(index)} has the label {target!r}, which is not one integer"
        return (tensor, label) if label >= 0 else f"{self.source.name(index)} has the negative label {label}"


def collate(samples: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    """A batch, or the message of its first error."""
    pairs = []
    for sample in samples:
        if isinstance(sample, str):
            return sample
        pairs.append(sample)
    return torch.stack([pair[0] for pair in pairs]), torch.tensor([pair[1] for pair in pairs])


def open_source(arguments: argparse.Namespace) -> Source:
    """The one source that is given."""
    options = ("image_folder", "torchvision_dataset", "webdataset")
    flags = [f"--{name.replace('_', '-')}" for name in options]
    given = [flag for flag, name in zip(flags, options, strict=True) if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise InputError(f"give one source of {', '.join(flags)}, got {' and '.join(given) or 'none'}")
    belongs = {
        "classes": flags[0],
        "root": flags[1],
        "download": flags[1],
        "torchvision_args": flags[1],
        "num_samples": flags[2],
    }
    for name, flag in belongs.items():
        if getattr(arguments, name) not in (None, False) and flag != given[0]:
            raise InputError(f"--{name.replace('_', '-')} goes with {flag}, not with {given[0]}")
    if arguments.image_folder is not None:
        return FolderSource(arguments.image_folder, arguments.classes)
    if arguments.webdataset is not None:
        return ShardSource(arguments.webdataset, arguments.num_samples)
    try:
        settings = json.loads(arguments.torchvision_args or "{}")
    except ValueError as error:
        raise InputError(f"--torchvision-args is not JSON: {reason(error)}") from error
    if not isinstance(settings, dict):
        raise InputError(f"--torchvision-args must be a JSON object, got {arguments.torchvision_args}")
    return TorchvisionSource(arguments.torchvision_dataset, arguments.root, arguments.download, settings)


def extract(arguments: argparse.Namespace) -> None:
    """Do what the command line says."""
    for name, least in (("batch_size", 1), ("num_workers", 0), ("image_size", 1), ("num_samples", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if arguments.split in ("", ".", "..") or Path(arguments.split).name != arguments.split:
        raise InputError(f"--split must be the name of a folder, got {arguments.split!r}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device")
    device = torch.device("cpu" if arguments.device == "cpu" or not torch.cuda.is_available() else "cuda")
    source = open_source(arguments)
    backbone = load_backbone(arguments.backbone, arguments.weights, arguments.image_size, arguments.seed)
    model = backbone.model.to(device)
    example = backbone.transform(Image.new("RGB", (64, 64)))[None].to(device)
    try:
        width = features_of(model, example, arguments.normalize).shape[1]
    except (RuntimeError, AssertionError, ValueError) as error:
        shape = "x".join(map(str, example.shape[2:]))
        raise InputError(f"{arguments.backbone} does not take images of {shape} pixels: {reason(error)}") from error

    check_classes(arguments.out, arguments.split, source.classes, arguments.overwrite)
    settings = {
        **source.settings,
        "rows": len(source),
        "backbone": arguments.backbone,
        "weights": backbone.weights,
        "image size": list(example.shape[2:]),
        "features": width,
        "normalize": arguments.normalize,
        "dtype": arguments.dtype,
    }
    output = Output(arguments.out / arguments.split, settings, arguments.overwrite)
    if output.done < output.rows:
        fill(output, Samples(source, backbone.transform), model, device, arguments)
    output.finish()
    print(f"{output.folder}: {output.rows} rows of {width} features, {arguments.dtype}")


def fill(
    output: Output, samples: Samples, model: nn.Module, device: torch.device, arguments: argparse.Namespace
) -> None:
    """Compute the rows that are not there yet."""
    torch.backends.cudnn.deterministic = True
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=arguments.batch_size,
        sampler=range(output.done, output.rows),
        num_workers=arguments.num_workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
    )
    with tqdm(total=output.rows, initial=output.done, desc=arguments.split, unit="image") as bar:
        for batch in loader:
            if isinstance(batch, str):
                raise InputError(f"{batch}; {output.done} rows are done, and the same command continues")
            images, labels = batch
            features = features_of(model, images.to(device, non_blocking=True), arguments.normalize).cpu().numpy()
            with np.errstate(over="ignore"):
                features = features.astype(arguments.dtype)
            bad = ~np.isfinite(features).all(axis=1)
            if bad.any():
                name = samples.source.name(output.done + int(bad.argmax()))
                hint = "; try --dtype float32 or --normalize" if arguments.dtype == "float16" else ""
                raise InputError(f"features of {name} are NaN or infinite in {arguments.dtype}{hint}")
            output.append(features, labels.numpy())
            bar.update(len(labels))
