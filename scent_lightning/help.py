"""Help of the command line: which tasks, data modules and dual updates there are, and pages without other classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import lightning as L
from jsonargparse import DefaultHelpFormatter

from scent_lightning import data, tasks, updates

__all__ = ["ShortHelp", "asked_for", "classes_in_words"]

_OWN = "scent_lightning."
_CLASSES: dict[str, tuple[str, ModuleType, type]] = {
    "--model.help": ("tasks", tasks, L.LightningModule),
    "--data.help": ("data modules", data, L.LightningDataModule),
    "--dual.help": ("dual updates", updates, updates.DualUpdate),
}
_SIGNS = {
    r"\nu": "ν",
    r"\ell": "ℓ",
    r"\alpha": "α",
    r"\gamma": "γ",
    r"\tau": "τ",
    r"\leftarrow": "←",
    r"\cdot": "·",
    r"\_": "_",
    "e^{": "exp{",
}
_BASES = ("BaseTask", "IndexedDataModule", "DualUpdate", "ScheduledUpdate", "ScheduledAlpha")
# Of networks those that take the place of one: not the tasks, metrics and tables, which are modules of torch as well.
_NETWORKS = f"{_OWN}modules."


class ShortHelp(DefaultHelpFormatter):
    """As jsonargparse's, but of the classes that an argument may name only this package's are listed.

    Of ``torch.nn.Module`` and the like there are hundreds; they are given by their import path.
    """

    def _get_help_string(self, action: Any) -> str:
        return _plain(re.sub(r", known subclasses: ([^()]*)\)$", _own_classes, super()._get_help_string(action)))


def _own_classes(found: re.Match[str]) -> str:
    every = found[1].split(", ")
    of = _NETWORKS if any(name.startswith("torch.nn.") for name in every) else _OWN
    names = [name for name in every if name.startswith(of) and not name.endswith(_BASES)]
    listed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return f", one of {listed}, or an import path)" if listed else ", an import path)"


def asked_for(arguments: Sequence[str]) -> str | None:
    """The option that asks which classes there are: ``--model.help``, ``--data.help`` or ``--dual.help`` by itself."""
    for position, argument in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else "-"
        if argument in _CLASSES and following.startswith("-"):
            return argument
    return None


def classes_in_words(option: str) -> str:
    """What an option of :func:`asked_for` is answered: each class with its first sentence."""
    kind, module, base = _CLASSES[option]
    found = {name: getattr(module, name) for name in module.__all__ if name not in _BASES}
    classes = {name: each for name, each in found.items() if inspect.isclass(each) and issubclass(each, base)}
    width = max(map(len, classes))
    lines = [f"The {kind} of the package; {option} NAME has all about one:", ""]
    lines += [f"  {name:<{width}}  {_first_line(each)}" for name, each in classes.items()]
    return "\n".join([*lines, "", "One of your own is given by its import path, such as my_project.MyClass."])


def _first_line(each: type) -> str:
    return _plain((inspect.getdoc(each) or "").partition("\n\n")[0].replace("\n", " ").rstrip("."))


def _plain(text: str) -> str:
    """A docstring's text without marks that only a web page shows."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([^`]+)`", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"\1", text)
    for name, sign in _SIGNS.items():
        text = text.replace(name, sign)
    return text
