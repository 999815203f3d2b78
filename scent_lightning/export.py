"""A checkpoint's weights in files that other libraries read: open_clip's models, arrays of NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scent_lightning.checkpoint import read_checkpoint
from scent_lightning.errors import InputError

__all__ = ["export"]

_MODELS = (".pt", ".bin", ".pth")
_HEADS = ("head.weight", "network.weight")  # of ExtremeClassificationTask; of a linear model of the other tasks


def export(checkpoint: Path, out: Path, architecture: str | None = None) -> str:
    """Write the weights of a checkpoint's model.

    Of a CLIPTask the file is what open_clip loads, with the configuration beside it if it is not one of open_clip's; of
    a linear classifier or model ``out`` is its weights, float32 of shape ``(K, D)``, as ``.npy`` or ``.pt``, and its
    bias, where it has one, lies beside them as ``NAME_bias``.

    Args:
        checkpoint: of a run.
        out: the file for the weights; a configuration comes beside it, with the ending .json.
        architecture: JSON file of CLIP's architecture, where the checkpoint only names one that is gone.

    Returns:
        A line of Python that loads what was written.

    Raises:
        InputError: the checkpoint cannot be read, has neither kind of model, or the file's ending is another.
    """
    state = read_checkpoint(checkpoint)
    if "model.logit_scale" in state["state_dict"]:
        return _export_clip(checkpoint, state, out, architecture)
    if architecture is not None:
        raise InputError(f"architecture is for checkpoints of CLIPTask, and {checkpoint} is none")
    return _export_linear(checkpoint, state["state_dict"], out)


def _export_clip(checkpoint: Path, state: Mapping[str, Any], out: Path, architecture: str | None) -> str:
    from scent_lightning.modules.open_clip_model import read_architecture  # which takes open_clip

    if out.suffix not in _MODELS:
        raise InputError(f"out must end in .pt, .pth or .bin, which open_clip reads, got {str(out)!r}")
    named = architecture or state.get("hyper_parameters", {}).get("architecture")
    if named is None:
        raise InputError(f"{checkpoint} does not name its architecture: give it with --architecture FILE")
    if isinstance(named, str) and named.endswith(".json") and not Path(named).is_file():
        raise InputError(
            f"{checkpoint} names {named} for its architecture, which is not there: give it with --architecture FILE"
        )
    known = read_architecture(named)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    weights = state["state_dict"].items()
    torch.save({name.removeprefix("model."): each for name, each in weights if name.startswith("model.")}, out)
    if isinstance(known, str):
        return f"import open_clip; model = open_clip.create_model({known!r}, pretrained={str(out)!r})"
    config = out.with_suffix(".json")
    config.write_text(json.dumps(known, indent=2))
    return (
        f"import open_clip; open_clip.add_model_config({str(config)!r}); "
        f"model = open_clip.create_model({out.stem!r}, pretrained={str(out)!r})"
    )


def _export_linear(checkpoint: Path, state: Mapping[str, Any], out: Path) -> str:
    names = [name for name in _HEADS if isinstance(state.get(name), Tensor) and state[name].ndim == 2]
    networks = [name for name in state if name.startswith("network.")]
    if not names or (names[0] == "network.weight" and set(networks) - {"network.weight", "network.bias"}):
        raise InputError(
            f"{checkpoint} has neither a model of open_clip (CLIPTask) nor a linear classifier or model; "
            "load_from_checkpoint of its task gives the network"
        )
    if out.suffix not in (".npy", *_MODELS):
        raise InputError(f"out must end in .npy or .pt, got {str(out)!r}")
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    bias = state.get(f"{names[0].rpartition('.')[0]}.bias")
    parts = {out: state[names[0]]} | ({out.with_stem(f"{out.stem}_bias"): bias} if isinstance(bias, Tensor) else {})
    for path, values in parts.items():
        if out.suffix == ".npy":
            np.save(path, values.float().numpy())
        else:
            torch.save(values.float(), path)
    load = "import numpy; {} = numpy.load({!r})" if out.suffix == ".npy" else "import torch; {} = torch.load({!r})"
    lines = [load.format(name, str(path)) for name, path in zip(("weights", "bias"), parts, strict=False)]
    return "; ".join(lines)
