"""Write the model of a CLIPTask checkpoint as a file that open_clip loads.

    python examples/export_open_clip.py lightning_logs/version_0/checkpoints/last.ckpt clip.pt

A model of open_clip's by name is then ``open_clip.create_model("ViT-B-32", pretrained="clip.pt")``. Where the task's
architecture was a configuration, it is written beside the weights as clip.json, and
``open_clip.add_model_config("clip.json")`` makes it known by the name "clip". The other way: such a file is the task's
``pretrained``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from scent_lightning.checkpoint import read_checkpoint
from scent_lightning.errors import InputError


def export(checkpoint: Path, out: Path) -> str:
    """Write the weights, and the configuration if it is not one of open_clip's; returns how to load them."""
    if out.suffix not in (".pt", ".bin", ".pth"):
        raise InputError(f"out must end in .pt, .pth or .bin, which open_clip reads, got {str(out)!r}")
    state = read_checkpoint(checkpoint)
    weights = {
        name.removeprefix("model."): value for name, value in state["state_dict"].items() if name.startswith("model.")
    }
    architecture = state.get("hyper_parameters", {}).get("architecture")
    if "logit_scale" not in weights or architecture is None:
        raise InputError(f"{checkpoint} is no checkpoint of CLIPTask: it has no model of open_clip")
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(weights, out)
    if isinstance(architecture, str):
        return f'open_clip.create_model("{architecture}", pretrained="{out}")'
    config = out.with_suffix(".json")
    config.write_text(json.dumps(architecture, indent=2))
    return f'open_clip.add_model_config("{config}"); open_clip.create_model("{out.stem}", pretrained="{out}")'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a CLIPTask")
    parser.add_argument("out", type=Path, help="file to write (.pt)")
    arguments = parser.parse_args()
    try:
        print(export(arguments.checkpoint, arguments.out))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
