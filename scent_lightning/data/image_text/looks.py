"""How images and captions become the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scent_lightning.data.image_text.tokenizer import Tokenizer, load_tokenizer
from scent_lightning.data.loading import shuffle_seed
from scent_lightning.data.transforms import Normalise, Transform, bicubic_part, check_channels, random_part
from scent_lightning.errors import InputError
from scent_lightning.validation import checked_integer

__all__ = ["MEAN", "STD", "Look", "Looks"]

# open_clip.OPENAI_DATASET_MEAN and open_clip.OPENAI_DATASET_STD
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Look:
    """How pairs become batches.

    Attributes:
        image_size: height and width S of the images.
        tokenizer: of a list of n captions; gives shape (n, L).
        normalise: of a batch of images.
        transform: takes one image as it is in its file to S × S.
        seed: of the transform, if it is random; None if it is not.
        keep: keep decoded images: as they are where the transform is random, and else transformed.
    """

    image_size: int
    tokenizer: Tokenizer
    normalise: Normalise
    transform: Transform
    seed: int | None
    keep: bool


class Looks:
    """Checks the data module's arguments on images and captions, see there, and makes a :class:`Look` of them."""

    def __init__(
        self,
        image_size: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        crop_scale: tuple[float, float],
        tokenizer: Any,
        context_length: int | None,
        in_memory: bool,
    ) -> None:
        self.image_size: int = checked_integer("image_size", image_size)
        checked_integer("context_length", context_length, least=3, or_none=True)
        if context_length is not None and callable(tokenizer):
            raise InputError(f"context_length is for a tokenizer given by its name, got {context_length}")
        check_channels(mean, std)
        if len(crop_scale) != 2 or not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise InputError(f"crop_scale must be two ascending numbers in (0, 1], got {crop_scale!r}")
        self.normalise = Normalise(mean or MEAN, std or STD)
        self.crop_scale = crop_scale
        self.in_memory = in_memory
        self._to_load = tokenizer, context_length
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(*self._to_load)
        return self._tokenizer

    @property
    def shown(self) -> Transform:
        """What evaluation does with an image: uint8 (3, H, W) to uint8 (3, S, S)."""
        return bicubic_part(self.image_size)

    def look(self, augment: bool) -> Look:
        """For training, if images are augmented, or for evaluation."""
        transform = random_part(self.image_size, self.crop_scale) if augment else self.shown
        seed = shuffle_seed() if augment else None
        return Look(self.image_size, self.tokenizer, self.normalise, transform, seed, self.in_memory)
