"""Images in a folder for each class, in a folder for each split."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning_utilities.core.rank_zero import rank_zero_info

from scent_lightning.data.fingerprint import fingerprint
from scent_lightning.data.image_folder import class_folders, images_in, images_of_classes, is_junk, passed_over
from scent_lightning.data.imbalanced.images import FileImages, Images
from scent_lightning.data.imbalanced.rows import ImageRows
from scent_lightning.data.imbalanced.source import FolderSource, ImageSource
from scent_lightning.data.transforms import shown_part
from scent_lightning.errors import InputError
from scent_lightning.words import listed

__all__ = ["ImageFolder"]

Array = npt.NDArray[Any]


class ImageFolder(FolderSource, ImageSource):
    """Classes are called by their folders in "train".

    A folder that is hidden, a system's own (such as ``__MACOSX``) or without an image is no class. Images are files
    that end in jpg, jpeg, jfif, jpe, png, apng, webp, gif, bmp, tif, tiff, ppm, pgm, pbm or pnm, in whatever case;
    others, and those that begin with a dot, are passed over and counted.
    """

    def classes(self) -> list[Any]:
        """Names of the folders, sorted."""
        self.check_there("train")
        folder = self.folder / "train"
        classes, others = class_folders(folder)
        if not classes:
            lacks = "image" if others else "class"
            raise InputError(f"split 'train' has no {lacks}: {folder} needs a folder of images for each class")
        return classes

    def known(self, classes: list[Any], by_position: bool) -> str:
        """The classes, and the folders that are none."""
        known = super().known(classes, by_position)
        others = class_folders(self.folder / "train")[1]
        return f"{known} (no classes, as they are hidden or without an image: {listed(others)})" if others else known

    def open(self, split: str, classes: list[Any]) -> FileImages:
        """The images of a split; says what is passed over."""
        folder = self.folder / split
        found, others = class_folders(folder)
        if not found and not others:
            raise InputError(f"split {split!r} has no class: {folder} needs a folder of images for each class")
        absent = [name for name in classes if name not in {*found, *others} and not is_junk(name)]
        differing = sorted({*found} - {*classes} | {*absent})
        if differing:
            raise InputError(f"classes of the splits differ: 'train' and {split!r} do not share {listed(differing)}")
        samples, counts = images_of_classes(folder, {name: i for i, name in enumerate(classes) if name in found})
        stray, more = images_in(folder)
        counts += more
        counts.update({"in no folder of a class": len(stray)} if stray else {})
        if not samples:
            raise InputError(f"split {split!r} has no image: {folder} needs a folder of images for each class")
        if counts:
            self.note(f"in {split!r} {passed_over(counts)}")
        if others:
            self.note(f"in {split!r} folders that are hidden or without an image ({listed(others)})")
        labels = np.array([label for _, label in samples], dtype=np.int64)
        return self._images([path for path, _ in samples], labels)

    def _images(self, paths: list[str], labels: Array) -> FileImages:
        size = self.options.image_size
        return FileImages(paths, labels, self.options.in_memory, None if size is None else shown_part(size))

    def to_predict(self) -> ImageRows | None:
        """All images in the folder "predict" and the folders in it, or else in ``path`` itself."""
        path = self.folder
        if (path / "predict").is_dir():
            return self._in_folder(path / "predict")
        return self._in_folder(path) if path.is_dir() and images_in(path)[0] else None

    def _in_folder(self, folder: Path) -> ImageRows:
        paths, others = images_in(folder)
        if not paths:
            inside = [images_in(place) for place in folder.iterdir() if place.is_dir() and not is_junk(place.name)]
            paths = sorted(path for found, _ in inside for path in found)
            others += sum((counts for _, counts in inside), Counter())
        said = f"; passed over: {passed_over(others)}" if others else ""
        if not paths:
            raise InputError(f"{folder} has no image{said}")
        if others:
            rank_zero_info(f"{len(paths):,} images to predict in {folder}{said}")
        return self.chosen(self._images(paths, np.empty(0, dtype=np.int64)), np.arange(len(paths)), None)

    def fingerprint(self, rows: Images, chosen: Array, labels: Array) -> str:
        """Hash of labels, names and sizes of the files."""
        assert isinstance(rows, FileImages)
        paths = [rows.paths[row] for row in chosen.tolist()]
        names = [os.path.relpath(path, self.folder) for path in paths]
        return fingerprint([labels, *names, np.array([os.path.getsize(path) for path in paths])])
