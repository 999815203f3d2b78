"""``scent-lightning extract``: images to the files that FeatureDataModule reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scent_lightning.commands.parser import CommandParser

__all__ = ["main"]

_DESCRIPTION = """Turn images into what FeatureDataModule reads: OUT/SPLIT/features.npy and OUT/SPLIT/labels.npy.

The images are a folder with a folder per class, a data set of torchvision, or the shards of a web data set. The
backbone is a classifier of torchvision without its last linear layer, or the image tower of open_clip, each with the
transform that belongs to it. Features are float16 unless told otherwise, labels int64, rows in the source's order.

  scent-lightning extract --image-folder imagenet/train --split train --out features/imagenet \\
      --backbone torchvision:resnet50 --weights IMAGENET1K_V2 --num-workers 8
  scent-lightning extract --torchvision-dataset CIFAR10 --root data --download --out features/cifar10 \\
      --backbone open_clip:ViT-B-32 --weights laion2b_s34b_b79k --normalize
  scent-lightning extract --webdataset 'shards/train-{0000..1023}.tar' --out features/shards \\
      --backbone open_clip:ViT-B-32 --weights weights.pt

A run that was stopped, however hard, continues with the same command and ends with the same bytes: after every batch
SPLIT/progress.json says how many rows are on disk and with which settings; until all are, the files are called
features.npy.part and labels.npy.part. Other settings in the same folder are refused. An image that cannot be read stops
the run with its name; put it right and continue. In memory are a batch, and the list of a folder's files or of one
shard's samples.

Backbones of open_clip and shards need the extra: pip install 'scent-lightning[vision]'."""


def main(arguments: list[str]) -> None:
    """Extract features.

    Raises:
        InputError: an argument, a file or an image that cannot be used.
        SystemExit: with code 130 where the user stops it.
    """
    parser = CommandParser("extract", _DESCRIPTION)
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
    given = parser.parse_args([_with_dashes(argument) for argument in arguments])
    from scent_lightning.extraction.extract import extract  # which takes torch

    try:
        extract(given)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(130) from None


def _with_dashes(argument: str) -> str:
    """An option by either way of writing its name: --image_folder, as the other commands have it, or --image-folder."""
    option, equals, value = argument.partition("=")
    return option.replace("_", "-") + equals + value if re.fullmatch(r"--[a-z_-]+", option) else argument
