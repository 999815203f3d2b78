"""Make a small data set for each task, in the file layout that the task reads.

    python examples/small_data.py small_data

* ``rows.csv``: a table of 500 rows with a header; five columns of features, and ``price``, of which one row in fifty is
  far out. For robust regression.
* ``features/train`` and ``features/val``: ``features.npy`` (n, 32), float32, and ``labels.npy`` (n,), int64, of 500
  classes. For extreme classification.
* ``labels/train`` and ``labels/val``: ``features.npy`` (n, 32), and ``labels.npz``, a sparse matrix (n, 300) of one to
  four labels a row. For extreme classification with several right classes.
* ``images/train/ok``, ``images/train/defect``, ``images/test/ok``, ``images/test/defect``: images of a surface, with a
  scratch where it is defect, a folder a class; in training one in six is defect. For partial AUC.
* ``bought.csv``: a table of interactions with the columns ``user`` and ``item``: 300 users, each with 3 to 12 of 120
  items, mostly of a kind that they like, and some that everyone has. For retrieval.
* ``pairs.tsv`` and ``pairs/``: a table with the columns ``filepath`` (relative to the table), ``title``, ``category``
  and ``split`` (train or val), and the images. For CLIP.
* ``queries/train.txt`` and ``queries/val.txt``: documents of queries in SVMlight's format, with a relevance of 0 to 3
  and five features. For ranking.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import sparse

from scent_lightning.data.shapes import CLASSES, Shapes

ROWS, CLASS_COUNT, WIDTH, SIZE = 500, 500, 32, 32
USERS, ITEMS, KINDS = 300, 120, 6


def table(path: Path, generator: np.random.Generator) -> None:
    """Prices that depend on five features, some of them far out."""
    features = generator.standard_normal((ROWS, 5))
    price = features @ np.array([3.0, -2.0, 1.0, 0.5, 0.0]) + 10 + 0.5 * generator.standard_normal(ROWS)
    price[:: ROWS // 10] += 8
    names = "size,age,rooms,distance,noise,price"
    np.savetxt(path, np.column_stack([features, price]), "%.4f", delimiter=",", header=names, comments="")


def features(folder: Path, generator: np.random.Generator) -> None:
    """Rows of unit norm around a centre for each class."""
    centres = generator.standard_normal((CLASS_COUNT, WIDTH))
    for split, each in (("train", 20), ("val", 2)):
        labels = np.repeat(np.arange(CLASS_COUNT), each)
        rows = centres[labels] + generator.standard_normal((len(labels), WIDTH))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        (folder / split).mkdir(parents=True, exist_ok=True)
        np.save(folder / split / "features.npy", rows.astype(np.float32))
        np.save(folder / split / "labels.npy", labels)


def labels(folder: Path, generator: np.random.Generator) -> None:
    """Rows of unit norm around the sum of their labels' centres; the first labels are the most frequent."""
    count = 300
    centres = generator.standard_normal((count, WIDTH))
    for split, rows in (("train", 4000), ("val", 400)):
        matrix = np.zeros((rows, count), dtype=np.float32)
        for row in matrix:
            row[(count * generator.random(generator.integers(1, 5)) ** 3).astype(int)] = 1
        features = matrix @ centres + generator.standard_normal((rows, WIDTH))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        (folder / split).mkdir(parents=True, exist_ok=True)
        np.save(folder / split / "features.npy", features.astype(np.float32))
        sparse.save_npz(folder / split / "labels.npz", sparse.csr_matrix(matrix))


def images(folder: Path, generator: np.random.Generator) -> None:
    """Grey noise; a defect is a line across a part of it."""
    for split, counts in (("train", {"ok": 600, "defect": 120}), ("test", {"ok": 100, "defect": 100})):
        for name, count in counts.items():
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = generator.integers(90, 170, (SIZE, SIZE))
                if name == "defect":
                    start, slope = generator.integers(8, 24), generator.uniform(-0.5, 0.5)
                    columns = np.arange(10, 22)
                    pixels[np.clip(start + slope * (columns - 16), 0, SIZE - 1).astype(int), columns] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{number:04}.png")


def bought(path: Path, generator: np.random.Generator) -> None:
    """Each user likes one of six kinds of items; within a kind the first ones are the popular ones."""
    rows = []
    for user in range(USERS):
        liked = int(generator.integers(KINDS))
        kinds = np.where(generator.random(12) < 0.8, liked, generator.integers(KINDS, size=12))
        places = np.minimum(generator.zipf(1.3, 12) - 1, ITEMS // KINDS - 1)
        items = np.unique(kinds * (ITEMS // KINDS) + places)[: generator.integers(3, 13)]
        rows += [f"user{user},item{item}" for item in items]
    path.write_text("\n".join(["user,item", *rows]) + "\n")


def pairs(path: Path) -> None:
    """Coloured shapes and what they are; the category is the colour."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["filepath", "title", "category", "split"])
        for split, count in (("train", 800), ("val", 100)):
            shapes, rows = Shapes(split, 0, SIZE), np.arange(count)
            numbers = shapes.numbers(rows)
            colours = Shapes.classes(numbers, "colour")
            for row, image in enumerate(shapes.draw(rows, numbers)):
                name = f"{folder.name}/{split}_{row:04}.png"
                Image.fromarray(image.transpose(1, 2, 0)).save(path.parent / name)
                colour = CLASSES["colour"][colours[row]]
                writer.writerow([name, Shapes.caption(int(numbers[row])), colour, split])


def queries(folder: Path, generator: np.random.Generator) -> None:
    """Documents whose relevance depends on some of their features; one query in twenty has none that is relevant."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 200), ("val", 50)):
        with (folder / f"{split}.txt").open("w") as file:
            for query in range(count):
                documents = generator.standard_normal((generator.integers(5, 60), 5))
                worth = documents @ np.array([2.0, -1.0, 0.5, 0.0, 0.0]) + generator.standard_normal(len(documents))
                relevance = np.digitize(worth, [2.0, 3.0, 4.0]) * (query % 20 != 19)
                for grade, row in zip(relevance, documents, strict=True):
                    values = " ".join(f"{number}:{value:.4f}" for number, value in enumerate(row, start=1))
                    file.write(f"{grade} qid:{query} {values}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to make them in")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    table(folder / "rows.csv", generator)
    features(folder / "features", generator)
    images(folder / "images", generator)
    pairs(folder / "pairs.tsv")
    bought(folder / "bought.csv", generator)
    queries(folder / "queries", generator)
    labels(folder / "labels", generator)
    print(f"{folder}: rows.csv, features/, images/, bought.csv, pairs.tsv, queries/, labels/")


if __name__ == "__main__":
    main()
