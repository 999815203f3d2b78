r"""Turn images into the files that FeatureDataModule reads: OUT/SPLIT/features.npy and OUT/SPLIT/labels.npy.

The images are a folder with a folder per class, a data set of torchvision, or the shards of a web data set. The
backbone is a classifier of torchvision without its last linear layer, or the image tower of open_clip, each with the
transform that belongs to it. Features are float16 unless told otherwise, labels int64, rows in the source's order.

    python examples/extract_features.py --image-folder imagenet/train --split train --out features/imagenet \
        --backbone torchvision:resnet50 --weights IMAGENET1K_V2 --num-workers 8
    python examples/extract_features.py --image-folder imagenet/val --split val --out features/imagenet \
        --backbone torchvision:resnet50 --weights IMAGENET1K_V2 --num-workers 8
    python examples/extract_features.py --torchvision-dataset CIFAR10 --root data --download --out features/cifar10 \
        --backbone open_clip:ViT-B-32 --weights laion2b_s34b_b79k --normalize
    python examples/extract_features.py --webdataset 'shards/train-{0000..1023}.tar' --out features/shards \
        --backbone open_clip:ViT-B-32 --weights weights.pt

A run that was stopped, however hard, continues with the same command and ends with the same bytes: after every batch
SPLIT/progress.json says how many rows are on disk and with which settings; until all are, the files are called
features.npy.part and labels.npy.part. Other settings in the same folder are refused. An image that cannot be read stops
the run with its name; put it right and continue. In memory are a batch, and the list of a folder's files or of one
shard's samples.

Needs torchvision; open_clip_torch for its backbones, and braceexpand (which webdataset brings along) for shards.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import inspect
import io
import json
import logging
import operator
import os
import re
import shutil
import sys
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from scent_lightning.data.image_folder import IMAGE_ENDINGS, class_folders, images_in, images_of_classes, passed_over
from scent_lightning.data.images import read_rgb, to_rgb
from scent_lightning.data.tar_members import sample_and_kind, tar_members
from scent_lightning.errors import InputError

IMAGE_KEYS = ("jpg", "png", "webp", "jpeg")
LABEL_KEY = "cls"
FINAL = ("features.npy", "labels.npy")
PARTS = tuple(f"{name}.part" for name in FINAL)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Transform = Callable[[Image.Image], Tensor]


def require(module: str, package: str) -> Any:
    """An optional module, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{module} cannot be imported ({reason(error)}); pip install {package}") from error


def reason(error: BaseException) -> str:
    """The first sentence of another library's message."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".") or type(error).__name__


def alike(name: str, known: Iterable[str]) -> str:
    """What may have been meant by an unknown name, or all there is if that is little."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or (names if len(names) <= 12 else [])
    return f"; did you mean {' or '.join(near)}?" if near else ""


def write_json(path: Path, content: Any) -> None:
    """Write all or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} as JSON: {reason(error)}") from error


def digest(parts: Iterable[bytes]) -> str:
    """A short hash, to tell one file or list from another."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()[:16]


# Sources: all raise InputError with the name of the sample that is at fault.


class Source:
    """Images with labels, in a fixed order."""

    settings: dict[str, Any]  # what tells this source from another
    classes: list[str] | None = None  # their names in the order of the labels, if known

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What to call a sample in an error."""
        raise NotImplementedError

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Image and label."""
        raise NotImplementedError


class FolderSource(Source):
    """A folder per class; hidden ones and those without an image are none.

    Args:
        folder: has the classes' folders.
        classes: file with the classes in the order of their labels, as a JSON list; None sorts the folders.
    """

    def __init__(self, folder: Path, classes: Path | None) -> None:
        if not folder.is_dir():
            raise InputError(f"--image-folder {folder}: there is no such folder")
        found, others = class_folders(folder)
        if not found:
            lacks = f": its folders hold none of {', '.join(IMAGE_ENDINGS)}" if others else ""
            raise InputError(
                f"--image-folder {folder} has no images{lacks or ': it must hold a folder for each class'}"
            )
        self.classes = found if classes is None else self._listed(classes)
        unknown = [name for name in found if name not in set(self.classes)]
        if unknown:
            raise InputError(f"folder {folder / unknown[0]} is not a class of {classes}")
        self.folder = folder
        labels = {name: label for label, name in enumerate(self.classes) if name in found}
        self.samples, counts = images_of_classes(folder, labels)
        stray, more = images_in(folder)
        counts += more
        counts.update({"in no folder of a class": len(stray)} if stray else {})
        left_out = [passed_over(counts)] if counts else []
        if others:
            left_out.append(f"folders that are hidden or without an image ({', '.join(others)})")
        if left_out:
            print(f"passed over in {folder}: {'; '.join(left_out)}", file=sys.stderr)
        listing = digest(f"{os.path.relpath(path, folder)}\t{label}\n".encode() for path, label in self.samples)
        self.settings = {"source": f"image folder {folder.resolve()}", "list of files": listing}

    @staticmethod
    def _listed(path: Path) -> list[str]:
        names = read_json(path)
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"--classes {path} must hold a JSON list of class names")
        double = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if double is not None:
            raise InputError(f"--classes {path} has {double!r} more than once")
        return names

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return f"image {self.samples[index][0]}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        path, label = self.samples[index]
        return read_rgb(path), label


class TorchvisionSource(Source):
    """A data set of torchvision.

    Args:
        name: class in torchvision.datasets.
        root: its folder; None for those that have none.
        download: whether it may be fetched.
        arguments: further arguments of its constructor.
    """

    def __init__(self, name: str, root: Path | None, download: bool, arguments: dict[str, Any]) -> None:
        datasets = require("torchvision.datasets", "torchvision")
        if name not in datasets.__all__:
            raise InputError(f"torchvision has no data set {name!r}{alike(name, datasets.__all__)}")
        parameters = inspect.signature(getattr(datasets, name)).parameters
        given = dict(arguments)
        if "root" in parameters:
            if root is None:
                raise InputError(f"--torchvision-dataset {name} needs --root, the folder that it is in")
            given["root"] = str(root)
        if "loader" in parameters or name == "ImageNet":  # or Pillow would run programs on files of some formats
            given.setdefault("loader", read_rgb)
        if download:
            if "download" not in parameters:
                raise InputError(f"--torchvision-dataset {name} cannot be downloaded by torchvision")
            given["download"] = True
        try:
            self.dataset = getattr(datasets, name)(**given)
            self.rows = len(self.dataset)
        except Exception as error:  # each data set has its own
            raise InputError(f"--torchvision-dataset {name} cannot be opened: {reason(error)}") from error
        if self.rows == 0:
            raise InputError(f"--torchvision-dataset {name} has no images")
        names = getattr(self.dataset, "classes", None)
        if names:
            self.classes = [", ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in names]
        place = {} if "root" not in parameters else {"root": str(Path(given["root"]).resolve())}
        self.settings = {"source": f"torchvision data set {name}", **place, "arguments": arguments}

    def __len__(self) -> int:
        return self.rows

    def name(self, index: int) -> str:
        return f"sample {index} of {type(self.dataset).__name__}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        sample = self.dataset[index]
        if not isinstance(sample, tuple) or len(sample) != 2 or not isinstance(sample[0], Image.Image):
            raise InputError(f"{self.name(index)} is not an image with a label")
        return to_rgb(sample[0]), sample[1]


class ShardSample(NamedTuple):
    key: str
    image: tuple[int, int]  # place and length in the shard
    label: tuple[int, int]


class ShardSource(Source):
    """Shards in the format of webdataset, read where the samples lie, so that any row can be the first.

    A shard's index is read when its first sample is; of those before only the numbers of samples are kept.

    Args:
        urls: paths of uncompressed tar files, with braces.
        rows: how many samples to take; None counts them in all shards.
    """

    def __init__(self, urls: str, rows: int | None) -> None:
        expand = require("braceexpand", "braceexpand")
        try:
            self.shards = [Path(path) for part in urls.split("::") for path in expand.braceexpand(part)]
        except ValueError as error:
            raise InputError(f"--webdataset {urls!r} has unbalanced braces") from error
        missing = next((shard for shard in self.shards if not shard.is_file()), None)
        if missing is not None:
            remote = "; shards must be local files" if re.match(r"(\w+:/|pipe:)", str(missing)) else ""
            raise InputError(f"--webdataset: there is no file {missing}{remote}")
        if len(set(self.shards)) < len(self.shards):
            twice = next(shard for number, shard in enumerate(self.shards) if shard in self.shards[:number])
            raise InputError(f"--webdataset {urls!r} names {twice} more than once")
        self.ends: list[int] = []  # of the shards looked at, the number of samples up to there
        self.current = -1
        self.index: list[ShardSample] = []
        if rows is None:
            for number in tqdm(range(len(self.shards)), desc="counting", unit="shard", disable=len(self.shards) < 2):
                self._open(number)
            rows = self.ends[-1]
            if rows == 0:
                raise InputError(f"--webdataset {urls!r} has no images")
        self.rows = rows
        listing = digest(f"{shard.name}\t{shard.stat().st_size}\n".encode() for shard in self.shards)
        self.settings = {"source": f"web data set {urls}", "list of shards": listing}

    def __len__(self) -> int:
        return self.rows

    def _open(self, number: int) -> None:
        """Read the index of a shard."""
        shard = self.shards[number]
        found: dict[str, dict[str, tuple[int, int]]] = {}
        key = None
        try:
            for member in tar_members(shard):
                parts = sample_and_kind(member.name)
                if parts is None or re.match(r"__[^/]*__($|/)", member.name):
                    continue
                if parts[0] != key and parts[0] in found:
                    raise InputError(f"sample {parts[0]} of {shard} is there twice, or its files are not together")
                key, kind = parts
                files = found.setdefault(key, {})
                if kind in files:
                    raise InputError(f"sample {key} of {shard} has two files of the kind {kind}")
                files[kind] = (member.offset_data, member.size)
        except InputError:
            raise
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read {shard} as a whole, uncompressed tar file: {reason(error)}") from error
        self.index = []
        for key, files in found.items():
            image = next((files[name] for name in IMAGE_KEYS if name in files), None)
            if image is None:
                raise InputError(f"sample {key} of {shard} has no image ({', '.join(IMAGE_KEYS)})")
            if LABEL_KEY not in files:
                raise InputError(f"sample {key} of {shard} has no label ({LABEL_KEY})")
            self.index.append(ShardSample(key, image, files[LABEL_KEY]))
        self.current = number
        if number == len(self.ends):
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self.index))

    def _find(self, index: int) -> ShardSample:
        while not self.ends or index >= self.ends[-1]:
            if len(self.ends) == len(self.shards):
                raise InputError(f"--num-samples is {self.rows}, but the shards have only {self.ends[-1]} samples")
            self._open(len(self.ends))
        number = bisect_right(self.ends, index)
        if number != self.current:
            self._open(number)
        return self.index[index - (self.ends[number - 1] if number else 0)]

    def name(self, index: int) -> str:
        return f"sample {self._find(index).key} of {self.shards[self.current]}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        sample = self._find(index)
        with self.shards[self.current].open("rb") as file:
            file.seek(sample.label[0])
            label = file.read(sample.label[1]).decode("utf-8-sig", errors="replace").strip()
            file.seek(sample.image[0])
            content = file.read(sample.image[1])
        if re.fullmatch(r"-?\d+", label) is None:
            raise InputError(f"{self.name(index)} has the label {label!r}, which is not an integer")
        return read_rgb(io.BytesIO(content)), int(label)


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


# Backbones


class Backbone(NamedTuple):
    model: nn.Module  # images to features
    transform: Transform
    weights: str  # by which a run is recognised


class ImageTower(nn.Module):
    """The part of an open_clip model that encodes images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model.encode_image(images)  # type: ignore[operator]
        return features


def file_weights(path: str) -> str:
    """A name for the weights in a file that goes by what is in it."""
    with open(path, "rb") as file:
        return f"file with SHA-256 {digest(iter(lambda: file.read(2**20), b''))}"


def unavailable(backbone: str, weights: str, error: Exception) -> InputError:
    return InputError(
        f"weights {weights} of {backbone} could not be loaded: {reason(error)}; without a network, give --weights a "
        "file that was downloaded elsewhere"
    )


def torchvision_backbone(name: str, weights: str, image_size: int | None, seed: int) -> Backbone:
    """A classifier without its last linear layer."""
    models = require("torchvision.models", "torchvision")
    transforms = require("torchvision.transforms", "torchvision")
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
    open_clip = require("open_clip", "open_clip_torch")
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


# The output


class Output:
    """The files of a split, which fill up batch by batch.

    Args:
        folder: OUT/SPLIT.
        settings: of the run; with the number of rows under "rows" and the width under "features".
        overwrite: whether files of other settings, or complete ones, may go.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
        self.folder = folder
        self.settings = settings
        self.rows, self.width = int(settings["rows"]), int(settings["features"])
        self.progress = folder / "progress.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done = 0
        if self.progress.exists():
            self.done = self._resume(overwrite)
        elif not overwrite:
            there = next((folder / name for name in FINAL if (folder / name).exists()), None)
            if there is not None:
                raise InputError(f"{there} exists and has no progress.json beside it; --overwrite replaces it")
        if self.done == 0:
            self._create()

    def _resume(self, overwrite: bool) -> int:
        record = read_json(self.progress)
        before = record.get("settings") if isinstance(record, dict) else None
        if not isinstance(before, dict) or not isinstance(record.get("rows_done"), int):
            if overwrite:
                return 0
            raise InputError(f"{self.progress} is not one of this program; --overwrite starts anew")
        now = self.settings
        if before != now:
            if overwrite:
                return 0
            names = dict.fromkeys([*now, *before])
            changes = [f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names]
            differences = "; ".join(
                change for name, change in zip(names, changes, strict=True) if before.get(name) != now.get(name)
            )
            raise InputError(f"{self.folder} holds a run with other settings ({differences}); --overwrite replaces it")
        done = int(record["rows_done"])
        if done == self.rows and overwrite:
            return 0
        for final, part in zip(FINAL, PARTS, strict=True):
            # Of a complete run killed while it renamed its files, each has one of the names.
            names_left = (part, final) if done == self.rows else (part,)
            if done and not any((self.folder / name).is_file() for name in names_left):
                if overwrite:
                    return 0
                raise InputError(
                    f"{self.progress} counts {done} rows, but {self.folder / names_left[0]} is gone; --overwrite "
                    "starts anew"
                )
        return done

    def _create(self) -> None:
        for path in [self.progress, *(self.folder / name for name in FINAL + PARTS)]:
            path.unlink(missing_ok=True)
        dtype = np.dtype(self.settings["dtype"])
        size = self.rows * (self.width * dtype.itemsize + 8)
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise InputError(f"{self.folder} needs {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free there")
        shapes: list[tuple[npt.DTypeLike, tuple[int, ...]]] = [
            (dtype, (self.rows, self.width)),
            (np.int64, (self.rows,)),
        ]
        for name, (kind, shape) in zip(PARTS, shapes, strict=True):
            np.lib.format.open_memmap(self.folder / name, mode="w+", dtype=kind, shape=shape).flush()
        self._record()

    def _record(self) -> None:
        write_json(self.progress, {"rows_done": self.done, "settings": self.settings})

    def append(self, *arrays: npt.NDArray[Any]) -> None:
        """Write features, shape (B, D), and labels, shape (B,), and count them once they are on disk."""
        count = len(arrays[0])
        for name, array in zip(PARTS, arrays, strict=True):
            # Mapped anew each time: pages written before do not count as this process's memory.
            mapped = np.lib.format.open_memmap(self.folder / name, mode="r+")
            mapped[self.done : self.done + count] = array
            mapped.flush()
        self.done += count
        self._record()

    def finish(self) -> None:
        """Give the files their names."""
        for final, part in zip(FINAL, PARTS, strict=True):
            if (self.folder / part).exists():
                os.replace(self.folder / part, self.folder / final)


def check_classes(out: Path, split: str, classes: list[str] | None, overwrite: bool) -> None:
    """Write OUT/classes.json, or compare: all splits must number the classes alike."""
    path = out / "classes.json"
    if classes is None:
        return
    if path.exists():
        before = read_json(path)
        if before == classes:
            return
        others = [
            entry.name
            for entry in out.iterdir()
            if entry.name != split and any((entry / name).exists() for name in (*FINAL, "progress.json"))
        ]
        if others or not overwrite:
            position = next(
                (i for i, (old, new) in enumerate(zip(before, classes, strict=False)) if old != new),
                min(len(before), len(classes)),
            )
            old, new = (repr(names[position]) if position < len(names) else "none" for names in (before, classes))
            raise InputError(
                f"the class order does not match {path}, which an earlier split wrote: class {position} is {new}, "
                f"there {old}; for the same order give an image folder --classes {path}"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, classes)


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


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("source, one of them")
    source.add_argument("--image-folder", type=Path, metavar="DIR", help="a folder with a folder per class")
    source.add_argument("--torchvision-dataset", metavar="NAME", help="a data set of torchvision, such as CIFAR10")
    source.add_argument("--webdataset", metavar="URLS", help="local tar files, such as 'train-{000..127}.tar'")
    source.add_argument("--classes", type=Path, metavar="FILE", help="image folder: JSON list, the order of classes")
    source.add_argument("--root", type=Path, metavar="DIR", help="torchvision: the data set's folder")
    source.add_argument("--download", action="store_true", help="torchvision: download what is not there")
    source.add_argument("--torchvision-args", metavar="JSON", help='torchvision: arguments, such as {"train": false}')
    source.add_argument("--num-samples", type=int, metavar="N", help="web data set: how many, instead of counting")
    model = parser.add_argument_group("backbone")
    model.add_argument("--backbone", required=True, help="torchvision:MODEL or open_clip:MODEL")
    model.add_argument(
        "--weights",
        required=True,
        help="torchvision's name (such as DEFAULT) or open_clip's tag, a file with a state dict, or none for random",
    )
    model.add_argument("--image-size", type=int, metavar="PIXELS", help="without torchvision's named weights (224)")
    model.add_argument("--seed", type=int, default=0, help="of random weights (0)")
    model.add_argument("--normalize", action="store_true", help="scale features to length 1")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder that FeatureDataModule reads"
    )
    parser.add_argument("--split", default="train", help="folder in it: train, val, test (train)")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of the features (float16)")
    parser.add_argument("--batch-size", type=int, default=256, help="images at a time (256)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load images (0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is complete or has other settings in OUT/SPLIT"
    )
    try:
        extract(parser.parse_args(command))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
