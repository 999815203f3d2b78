r"""Margins on the own class of a normalised head: the row has to be right by so much.

With :math:`\cos\theta` the similarity of a row and its own class, the own logit is

* additive cosine (Wang et al. 2018, "CosFace"): scale · (cos θ − m);
* additive angular (Deng et al. 2019, "ArcFace"): scale · cos(θ + m), and beyond θ = π − m, where that would rise again,
  scale · (cos θ − m sin m).

The other logits are as they were.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32
from scent_lightning.validation import checked_choice, checked_number

__all__ = ["MarginType", "checked_margin", "with_margin"]

MarginType = Literal["cosine", "angular"]
LEAST_SINE_SQUARED = 1e-6  # the slope is cot θ there, which is infinite where a row is on its class


def checked_margin(margin: float, margin_type: MarginType, normalize: bool) -> float:
    """Return ``margin`` if it is one.

    Raises:
        InputError: it is below 0, an angle of π/2 or more, or above 0 without ``normalize``; an unknown type.
    """
    checked_choice("margin_type", margin_type, get_args(MarginType))
    margin = checked_number("margin", margin, least=0)
    if margin_type == "angular" and margin >= math.pi / 2:
        raise InputError(f"margin must be an angle below π/2 with margin_type 'angular', got {margin:g}")
    if margin > 0 and not normalize:
        raise InputError(f"margin needs normalize=True, which makes the logits cosines, got {margin:g} without")
    return margin


def with_margin(own: Tensor, margin: float, margin_type: MarginType, scale: float) -> tuple[Tensor, Tensor | float]:
    """The own logits with the margin, and their derivative by what they were; detached.

    Args:
        own: scale · cos θ, any shape.
        margin: m, at least 0; an angle in radians where ``margin_type`` is "angular".
        margin_type: "cosine" or "angular".
        scale: of the logits.
    """
    dtype, own = own.dtype, at_least_float32(own.detach())
    if margin_type == "cosine" or margin == 0:
        return (own - scale * margin).to(dtype), 1.0
    cosine = own / scale
    square = 1 - cosine.square()
    sine = square.clamp(min=LEAST_SINE_SQUARED).sqrt()
    turned = cosine * math.cos(margin) - sine * math.sin(margin)
    slope = math.cos(margin) + torch.where(square > LEAST_SINE_SQUARED, cosine / sine, 0.0) * math.sin(margin)
    is_far = cosine < -math.cos(margin)
    far = cosine - margin * math.sin(margin)
    return (scale * torch.where(is_far, far, turned)).to(dtype), torch.where(is_far, 1.0, slope).to(dtype)
