"""``scent-lightning export``: a checkpoint's weights for other libraries."""

from __future__ import annotations

from pathlib import Path

from scent_lightning.commands.parser import CommandParser

__all__ = ["main"]

_DESCRIPTION = """Write the weights of a checkpoint for other libraries, and print the line of Python that loads them.

A CLIPTask becomes a file that open_clip loads. A model of open_clip's by name is then
open_clip.create_model("ViT-B-32", pretrained="clip.pt"). Where the task's architecture was a configuration, by itself
or in a JSON file, it is written beside the weights as clip.json, and open_clip.add_model_config("clip.json") makes it
known by the name "clip". The other way: such a file is the task's pretrained.

A linear classifier or model becomes an array (K, D) in a .npy or .pt file, with its bias beside it as NAME_bias.
VectorExport, a callback of predict, writes the vectors of RetrievalTask's items and queries."""


def main(arguments: list[str]) -> None:
    """Export.

    Raises:
        InputError: as :func:`scent_lightning.export.export`.
    """
    parser = CommandParser("export", _DESCRIPTION)
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a CLIPTask, or of a task with a linear model")
    parser.add_argument("out", type=Path, help="file to write: .pt, .pth or .bin; also .npy for a linear model")
    parser.add_argument(
        "--architecture", metavar="FILE", help="JSON file of CLIP's architecture, where the checkpoint's is gone"
    )
    given = parser.parse_args(arguments)
    from scent_lightning.export import export  # which takes torch

    print(export(given.checkpoint, given.out, given.architecture))
