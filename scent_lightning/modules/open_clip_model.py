"""The models of open_clip, by name or by their configuration."""

from __future__ import annotations

import copy
import difflib
import json
import logging
from pathlib import Path
from typing import Any

from scent_lightning.checkpoint import read_plain
from scent_lightning.errors import InputError
from scent_lightning.optional import optional_module

__all__ = ["build_model", "read_architecture"]


def read_architecture(architecture: str | dict[str, Any]) -> str | dict[str, Any]:
    """A name of open_clip's as it is; a configuration file as its content.

    Raises:
        InputError: a file that is missing or no configuration, or a name that open_clip does not know.
    """
    if isinstance(architecture, dict):
        config = architecture
    elif architecture.endswith(".json"):
        try:
            config = json.loads(Path(architecture).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise InputError(f"architecture {architecture} cannot be read as JSON: {error}") from error
    else:
        if architecture not in (known := optional_module("open_clip", "CLIPTask").list_models()):
            near = difflib.get_close_matches(architecture, known, n=5, cutoff=0.4) or known[:5]
            raise InputError(f"architecture {architecture!r} is not known to open_clip; near are {', '.join(near)}")
        return architecture
    lacking = [
        key for key in ("embed_dim", "vision_cfg", "text_cfg") if not isinstance(config, dict) or key not in config
    ]
    if lacking:
        raise InputError(f"architecture must have embed_dim, vision_cfg and text_cfg, it lacks {', '.join(lacking)}")
    return dict(config)


def build_model(architecture: str | dict[str, Any], pretrained: str | None) -> Any:
    """The model of open_clip.

    Raises:
        InputError: the configuration does not make a model, or the weights cannot be loaded.
    """
    open_clip = optional_module("open_clip", "CLIPTask")
    file = Path(pretrained or "")
    if file.is_file() and file.suffix not in (".safetensors", ".npz", ".npy"):
        read_plain(file, f"pretrained {pretrained}", mmap=True)  # says what is wrong with it, if something is
    logging.getLogger().disabled, before = True, logging.getLogger().disabled
    try:
        if isinstance(architecture, str):
            try:
                return open_clip.create_model(architecture, pretrained=pretrained)
            except (RuntimeError, OSError, ValueError) as error:
                raise InputError(_weights_message(open_clip, architecture, pretrained, error)) from error
        config = copy.deepcopy(architecture)
        custom = config.pop("custom_text", False) or "hf_model_name" in config["text_cfg"]
        try:
            model = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**config)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise InputError(f"architecture makes no model of open_clip: {error}") from error
        if pretrained is not None:
            if not Path(pretrained).is_file():
                raise InputError(f"pretrained {pretrained} must be a file where the architecture is a configuration")
            try:
                open_clip.load_checkpoint(model, pretrained, weights_only=True)
            except Exception as error:
                raise InputError(f"pretrained {pretrained} does not fit the architecture: {_first(error)}") from error
        return model
    finally:
        logging.getLogger().disabled = before


def _weights_message(open_clip: Any, architecture: str, pretrained: str | None, error: Exception) -> str:
    if pretrained is None:
        return f"architecture {architecture!r} cannot be built: {_first(error)}"
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if Path(pretrained).is_file():
        return f"pretrained {pretrained} does not fit architecture {architecture!r}: {_first(error)}"
    if pretrained in tags:
        return f"pretrained {pretrained!r} could not be downloaded for {architecture!r}: {_first(error)}"
    return f"pretrained {pretrained!r} is no file and no tag of {architecture!r}; tags are {', '.join(tags) or 'none'}"


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:") if str(error).strip() else type(error).__name__
