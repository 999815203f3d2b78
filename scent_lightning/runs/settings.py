"""What a run was set to, in words: ``{"dual": "SCENT(log_alpha=auto)", "tau": 0.2, "seed": 1}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["SEED", "Setting", "class_in_words", "of_task_and_data", "settings_of"]

Setting = bool | int | float | str
SEED = "seed"
# Where a run is and what is shown of it make no difference to what comes out of it.
_OF_THE_PLACE = frozenset(("ckpt_path", "config", "name", "print_config", "verbose", "weights_only"))
_OF_THE_TRAINER = frozenset(("default_root_dir", "enable_model_summary", "enable_progress_bar", "logger", "profiler"))
# Arguments of a class that say nothing where they are what they are by default; nulls never do.
_SAYS_NOTHING = {"schedule": "constant", "alpha_multiplier": 1.0, "floor": 0.1, "compare": "new"}
# What says which data they are, of the arguments of a data module.
_NAMES_OF_DATA = ("dataset", "path", "source")


def settings_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings of a run that bear on its result; nulls are left out.

    Args:
        config: as in the ``config.yaml`` of the run.

    Returns:
        ``task``, ``data`` and ``dual`` (classes), ``seed``; the arguments of the task as ``tau``, those of the data
        module as ``data.batch_size``, the Trainer's as ``trainer.max_epochs``.
    """
    found: dict[str, Setting] = {}
    for key, value in config.items():
        if key == "seed_everything":
            found[SEED] = _plain(value)
        elif key == "model":
            found |= _of_class("task", "", value)
        elif key == "data":
            found |= _of_class("data", "data.", value)
        elif key == "trainer" and isinstance(value, Mapping):
            kept = {name: each for name, each in value.items() if name not in _OF_THE_TRAINER}
            found |= dict(_entries("trainer.", kept))
        elif key not in _OF_THE_PLACE and value is not None:
            found[key] = _plain(value)
    return found


def of_task_and_data(config: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings of task, dual update and data, the seed and the number of epochs: what the HParams page shows.

    The data are shown with what they are of: ``TabularRegressionDataModule(dataset=california_housing)``.
    """
    found = settings_of(config)
    shown = {name: value for name, value in found.items() if not name.startswith(("trainer.", "if_changed"))}
    for name in _NAMES_OF_DATA:
        if (value := shown.pop(f"data.{name}", None)) is not None and "(" not in str(shown["data"]):
            shown["data"] = f"{shown['data']}({name}={value})"
    if (epochs := found.get("trainer.max_epochs")) is not None:
        shown["max_epochs"] = epochs
    first = [name for name in (SEED, "task", "data", "dual") if name in shown]
    return {name: shown[name] for name in [*first, *shown]}


def class_in_words(value: Mapping[str, Any]) -> str:
    """A class with the arguments that are set: ``SOX(gamma=0.5)``.

    Args:
        value: its ``class_path`` and ``init_args``.
    """
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    kept = {name: each for name, each in arguments.items() if each is not None and each != _SAYS_NOTHING.get(name)}
    inside = ", ".join(f"{name}={each}" for name, each in _entries("", kept))
    return f"{_name(value)}({inside})" if inside else _name(value)


def _of_class(name: str, prefix: str, value: Any) -> dict[str, Setting]:
    """A class by its name, and its arguments each on its own."""
    if not isinstance(value, Mapping) or "class_path" not in value:
        return {} if value is None else {name: _plain(value)}
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    # The dual update is linked into the task, and is a setting of its own.
    kept = {key: each for key, each in arguments.items() if (name, key) != ("task", "dual")}
    return {name: _name(value), **dict(_entries(prefix, kept))}


def _entries(prefix: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    for name, value in arguments.items():
        if value is not None:
            yield f"{prefix}{name}", _plain(value)


def _name(value: Mapping[str, Any]) -> str:
    return str(value["class_path"]).rpartition(".")[2]


def _plain(value: Any) -> Setting:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if "class_path" in value:
            return class_in_words(value)
        return f"{{{', '.join(f'{name}: {each}' for name, each in _entries('', value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_plain(each)) for each in value)}]"
    return str(value)
