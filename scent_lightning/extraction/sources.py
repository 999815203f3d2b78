"""Images with labels, in a fixed order: all sources raise InputError with the name of the sample that is at fault."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from scent_lightning.data.image_folder import IMAGE_ENDINGS, class_folders, images_in, images_of_classes, passed_over
from scent_lightning.data.images import read_rgb, to_rgb
from scent_lightning.errors import InputError
from scent_lightning.extraction.words import alike, digest, read_json, reason

__all__ = ["FolderSource", "Source", "TorchvisionSource"]


class Source:
    """Images with labels, in a fixed order."""

    settings: dict[str, Any]  # what tells this source from another
    classes: list[str] | None = None  # their names in the order of the labels, if known

    def __len__(self) -> int:
        """Number of images."""
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
        """What to call a sample in an error."""
        return f"image {self.samples[index][0]}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Image and label."""
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
        from torchvision import datasets

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
        """What to call a sample in an error."""
        return f"sample {index} of {type(self.dataset).__name__}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Image and label."""
        sample = self.dataset[index]
        if not isinstance(sample, tuple) or len(sample) != 2 or not isinstance(sample[0], Image.Image):
            raise InputError(f"{self.name(index)} is not an image with a label")
        return to_rgb(sample[0]), sample[1]
