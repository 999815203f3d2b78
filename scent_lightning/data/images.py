"""The one decoder of images: of named formats only, to 8 bits a channel, whatever their depth."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "UnreadableImageError", "decode_image", "first_line", "read_rgb", "to_rgb"]

# Formats that Pillow decodes by itself: for others, such as EPS, it runs a program on the file, whatever its name.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
DEEP_MODES = ("I", "F")  # what modes of more than 8 bits begin with
BITS, WHITE_IS_ZERO, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
UNSIGNED = 1


class UnreadableImageError(Exception):
    """No image, or one that cannot be shown in 8 bits; the message is the reason."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _tag(image: Image, number: int, otherwise: int) -> int:
    """The first value of a tag of a TIFF image; ``otherwise`` where it has none, or is of another format."""
    value: Any = getattr(image, "tag_v2", {}).get(number, otherwise)
    return int(value[0] if isinstance(value, tuple) else value)


def _in_8_bits(image: Image) -> npt.NDArray[np.uint8]:
    """A grey image of 9 to 16 bits, 0 to its depth's largest value, as 0 to 255, rounded; shape (H, W)."""
    if image.mode == "F":
        raise UnreadableImageError("its pixels are floating-point numbers, of which nothing says how bright they are")
    # Where Pillow has 16 bits as 32: of PNG in older versions, and of PGM whatever its largest value.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        raise UnreadableImageError(
            "its pixels are integers of 32 bits or with a sign; at most 16, without, can be read"
        )
    largest = 2 ** _tag(image, BITS, 16) - 1
    values = np.asarray(image).astype(np.uint32)
    if _tag(image, WHITE_IS_ZERO, 1) == 0:  # which Pillow sees to for 8 bits and fewer only
        values = largest - values
    scaled: npt.NDArray[np.uint8] = ((values * 255 + largest // 2) // largest).astype(np.uint8)
    return scaled


def to_rgb(image: Image) -> Image:
    """An image in 8-bit RGB, without transparency; of several frames the one it is at.

    Pillow's own conversion cuts off what is above 255: all of a 16-bit grey image would be white.

    Args:
        image: of any mode.

    Returns:
        Mode "RGB". 8 bits and fewer are as Pillow converts them; of 16-bit colour it has the upper 8 bits; 16-bit grey
        (and 9 to 15 bits, where the file says so) is scaled and rounded.

    Raises:
        UnreadableImageError: pixels that are floating-point numbers, signed, or 32-bit integers.
    """
    if _tag(image, SAMPLE_FORMAT, UNSIGNED) == 2:
        raise UnreadableImageError("its pixels are integers with a sign, of which nothing says how bright they are")
    if not image.mode.startswith(DEEP_MODES):
        return image.convert("RGB")
    from PIL import Image

    return Image.fromarray(_in_8_bits(image)).convert("RGB")


def read_rgb(file: str | Path | io.BytesIO) -> Image:
    """The image in a file in 8-bit RGB, see :func:`to_rgb`; of several frames the first.

    Args:
        file: path, or what is in the file.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableImageError: it is of none of ``FORMATS``, whatever its name, damaged, or of a depth that is not read.
    """
    from PIL import Image

    Image.init()  # once; else the formats have no decoder before others were tried
    try:
        with Image.open(file, formats=FORMATS) as image:
            return to_rgb(image)
    except (UnreadableImageError, FileNotFoundError):
        raise
    except Exception as error:  # what a decoder raises on corrupt bytes depends on the format
        named = not isinstance(file, io.BytesIO)
        raise UnreadableImageError(first_line(error) if named else "no image can be decoded from it") from error


def decode_image(file: str | Path | io.BytesIO) -> Tensor:
    """As :func:`read_rgb`, with its errors, as a tensor.

    Args:
        file: path, or what is in the file.

    Returns:
        uint8, shape (3, H, W).
    """
    return torch.from_numpy(np.array(read_rgb(file))).permute(2, 0, 1)
