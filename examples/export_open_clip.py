"""Write the model of a CLIPTask checkpoint as a file that open_clip loads, and print the line that loads it.

    python examples/export_open_clip.py lightning_logs/version_0/checkpoints/last.ckpt clip.pt

A model of open_clip's by name is then ``open_clip.create_model("ViT-B-32", pretrained="clip.pt")``. Where the task's
architecture was a configuration, by itself or in a JSON file, it is written beside the weights as clip.json, and
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
from scent_lightning.modules.open_clip_model import read_architecture


def export(checkpoint: Path, out: Path, architecture: str | None = None) -> str:
    """Write the weights, and the configuration if it is not one of open_clip's.

    Args:
        checkpoint: of a CLIPTask.
        out: the file for the weights; a configuration comes beside it, with the ending .json.
        architecture: JSON file of the architecture, where the checkpoint only names one that is gone.

    Returns:
        The line of Python that loads the model.
    """
    if out.suffix not in (".pt", ".bin", ".pth"):
        raise InputError(f"out must end in .pt, .pth or .bin, which open_clip reads, got {str(out)!r}")
    state = read_checkpoint(checkpoint)
    weights = {
        name.removeprefix("model."): value for name, value in state["state_dict"].items() if name.startswith("model.")
    }
    named = architecture or state.get("hyper_parameters", {}).get("architecture")
    if "logit_scale" not in weights or named is None:
        raise InputError(f"{checkpoint} is no checkpoint of CLIPTask: it has no model of open_clip")
    if isinstance(named, str) and named.endswith(".json") and not Path(named).is_file():
        raise InputError(
            f"{checkpoint} names {named} for its architecture, which is not there: give it with --architecture FILE"
        )
    known = read_architecture(named)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(weights, out)
    if isinstance(known, str):
        return f"import open_clip; model = open_clip.create_model({known!r}, pretrained={str(out)!r})"
    config = out.with_suffix(".json")
    config.write_text(json.dumps(known, indent=2))
    return (
        f"import open_clip; open_clip.add_model_config({str(config)!r}); "
        f"model = open_clip.create_model({out.stem!r}, pretrained={str(out)!r})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a CLIPTask")
    parser.add_argument("out", type=Path, help="file to write (.pt)")
    parser.add_argument("--architecture", help="JSON file of the architecture, where the checkpoint's is gone")
    arguments = parser.parse_args()
    try:
        print(export(arguments.checkpoint, arguments.out, arguments.architecture))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
