"""What is wrong with an argument of the command line, in one sentence that names what would be right."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import lightning as L
from lightning.pytorch.accelerators import (
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from lightning.pytorch.strategies import StrategyRegistry

from scent_lightning import data, duals, tasks
from scent_lightning.duals import DualUpdate
from scent_lightning.errors import InputError

__all__ = ["check_trainer", "explain"]


def _known(package: Any, base: type) -> list[str]:
    return [
        name
        for name in package.__all__
        if isinstance(found := getattr(package, name), type) and issubclass(found, base)
    ]


KNOWN = {
    "dual": [name for name in _known(duals, DualUpdate) if name not in ("DualUpdate", "ScheduledUpdate")],
    "model": [name for name in _known(tasks, L.LightningModule) if name != "BaseTask"],
    "data": [name for name in _known(data, L.LightningDataModule) if name != "IndexedDataModule"],
}
KINDS = {"dual": "dual update", "model": "task", "data": "data module"}
SUBCOMMANDS = ("fit", "validate", "test", "predict")
# Of more classes than this a list helps nobody.
MOST_SHOWN = 60


def explain(message: str) -> str:
    """Turn a message of jsonargparse into one sentence; one that is not understood is left as it is.

    Such a message is a tree of what was tried: the arguments' names on the way down, and at each end why not.
    """
    required = re.match(r"the following arguments are required: (.+)", message)
    if required:
        names = [name.rpartition(".")[2] for name in required[1].split(", ")]
        texts = [f"--{name}" + (f" (one of {', '.join(KNOWN[name])})" if name in KNOWN else "") for name in names]
        return f"needed, in a --config file or by itself: {', '.join(texts)}"
    places = list(re.finditer(r'Parser key "([^"]+)":', message))
    if not places:
        return " ".join(message.split())
    key = ".".join(dict.fromkeys(place[1] for place in places)).removeprefix("init_args.")
    key = re.sub(rf"^(?:{'|'.join(SUBCOMMANDS)})\.", "", key)
    # The innermost name, where it comes first: a list of types repeats it.
    inner = _block(message, next(place.end() for place in places if place[1] == places[-1][1]))
    value = _value(inner)
    for reason in (_of_class_arguments, _of_path, _of_types):
        if (sentence := reason(f"--{key}", value, inner)) is not None:
            return sentence
    if value is not None and _is_of_class(inner):
        return f"--{key} must be a {_base_name(inner)}, got {value or repr('')}: {_allowed(key, inner)}"
    return f"--{key}: {' '.join((inner.strip() or message[places[0].end() :]).split())}"


def _block(message: str, start: int) -> str:
    """What is said from a place on, as far as it is indented by more than the line of that place."""
    first, *lines = message[start:].split("\n")
    indent = _indent(message[message.rfind("\n", 0, start) + 1 :])
    inside = takewhile(lambda line: not line.strip() or _indent(line) > indent, lines)
    return "\n".join([first, *inside])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _value(text: str) -> str | None:
    """What was given, as the innermost attempt tells it."""
    given = re.search(r"Given value: (.*?)(?=\. Got value: |$)", text, re.MULTILINE)
    if given is None:
        given = re.search(r"Got value: (.*?)(?=\. Got value: |$)", text, re.MULTILINE)
    if given is None:
        return None
    nested = re.fullmatch(r"NestedArg\(key='[^']*', val=(.+)\)", given[1])
    return nested[1].strip("'\"") if nested else given[1]


def _of_path(argument: str, value: str | None, text: str) -> str | None:
    """A class that is not there, by its name or by its import path."""
    key = argument.removeprefix("--")
    kind = f"{KINDS[key]} " if key in KINDS else ""
    path = re.search(r"Problem with given class_path '([^']+)':", text)
    path = path or re.match(r".*\bclass_path'?[:=] ?'([^']+)'", value or "")
    shown = path[1] if path else value
    if module := re.search(r"No module named '([^']+)'", text):
        return (
            f"{argument} {shown}: there is no module {module[1]!r} in the working folder or among what is installed"
            if shown
            else None
        )
    if lacks := re.search(r"(module|type object) '([^']+)' has no attribute '([^']+)'", text):
        what = "module" if lacks[1] == "module" else "class"
        return f"{argument} {shown}: {what} {lacks[2]!r} has no name {lacks[3]!r}"
    if another := re.search(r"Import path does not correspond to a subclass of (\w+)", text):
        return f"{argument} {shown} is no {kind or another[1]}".rstrip() + f": {_allowed(key, text)}"
    name = re.search(r"Expected a dot import path string: (\S*)", text) or re.search(
        r"Unexpected import path format: (\S+)", text
    )
    if name is None or _is_number(text):
        return None
    what = kind or f"{_base_name(text)} "
    return f"unknown {what}{name[1]!r} for {argument}: {_allowed(key, text)}"


def _is_of_class(text: str) -> bool:
    """Whether the argument is a class with its own arguments."""
    return any(_bases(text)) and not _is_number(text)


def _is_number(text: str) -> bool:
    """Whether the argument is a number first of all: that it may be a class (a tensor) is beside the point."""
    return re.search(r"Expected a <class '(?:float|int)'>", text) is not None


def _of_class_arguments(argument: str, value: str | None, text: str) -> str | None:
    """Arguments of a class that are missing or not its own."""
    missing = re.search(r"class_path '[\w.]*?(\w+)':\s*the following arguments are required: ([^\n]+)", text)
    if missing:
        return f"{argument} {missing[1]} needs its argument(s) {missing[2]}, as {argument}.NAME VALUE"
    refused = re.search(r"class_path '[\w.]*?(\w+)':\s*Option '([^']+)' is not accepted", text)
    if refused is None and (option := re.search(r"Option '([^']+)' is not accepted", text)):
        refused = re.search(rf"class_path='[\w.]*?(\w+)'.*?\b({re.escape(option[1])})\b", text)
    if refused:
        return f"{argument} {refused[1]} has no argument {refused[2]!r}; {argument}.help {refused[1]} lists them"
    return None


def _of_types(argument: str, value: str | None, text: str) -> str | None:
    """A value of another type than the argument's, or none of its choices."""
    expected = dict.fromkeys(re.findall(r"Expected a ((?:typing\.)?Literal\[.+?\](?=\s|\.|$)|<class '[\w.]+'>)", text))
    choices = [choice for wanted in expected if "Literal" in wanted for choice in _choices(wanted)]
    types = [wanted[8:-2].rpartition(".")[2] for wanted in expected if wanted.startswith("<class")]
    optional = "NoneType" in types
    types = [name for name in types if name not in ("NoneType", "Iterable")]
    if value is None or not (choices or types) or _is_of_class(text):
        return None
    value = value or "''"
    parts = list(dict.fromkeys(choices))
    if parts and not types:
        return f"{argument} must be one of {', '.join(parts + ['null'] * optional)}, got {value}"
    return f"{argument} must be {' or '.join(parts + types + ['null'] * optional)}, got {value}"


def _choices(literal: str) -> list[str]:
    shown = literal[literal.index("[") :]
    try:
        return [str(value) for value in ast.literal_eval(shown)]
    except (SyntaxError, ValueError):  # members of an enumeration
        return shown[1:-1].split(", ")


def _allowed(key: str, text: str) -> str:
    names = KNOWN.get(key) or sorted({name for base in _bases(text) for name in _subclasses(base)})
    own = "the import path of your own"
    return f"known are {', '.join(names)}, or {own}" if names and len(names) <= MOST_SHOWN else f"give {own}"


def _base_name(text: str) -> str:
    return " or ".join(dict.fromkeys(base.__name__ for base in _bases(text))) or "class"


def _bases(text: str) -> Iterator[type]:
    """The classes of which a message says that one was expected."""
    subtypes = re.search(r"Subtypes: (.+)", text)
    for module, name in re.findall(r"([\w.]+)\.([A-Z]\w+)", subtypes[1] if subtypes else ""):
        found = getattr(sys.modules.get(module), name, None)
        if inspect.isclass(found) and not module.startswith(("collections", "typing")):
            yield found


def _subclasses(base: type) -> Iterator[str]:
    """Names of the classes of a kind that a user may give: those that a library shows, and the user's own."""
    kinds: list[Any] = base.__subclasses__()
    for found in kinds:
        module = sys.modules.get(found.__module__)
        package = sys.modules.get(found.__module__.rpartition(".")[0])
        library = found.__module__.partition(".")[0]
        is_of_library = library in ("torch", "lightning", "scent_lightning")
        is_shown = getattr(package, found.__name__, None) is found
        if library != "scent_lightning":  # which shows in a package what is for its users, and in a module all
            is_shown = is_shown or found.__name__ in getattr(module, "__all__", ())
        if not found.__name__.startswith("_") and not inspect.isabstract(found) and (is_shown or not is_of_library):
            yield found.__name__
        yield from _subclasses(found)


def check_trainer(config: Mapping[str, Any]) -> None:
    """Raise InputError for arguments of the Trainer of which Lightning says nothing, or too little.

    Args:
        config: the Trainer's arguments, as parsed.
    """
    for name, least in (
        ("accumulate_grad_batches", 1),
        ("check_val_every_n_epoch", 1),
        ("num_nodes", 1),
        ("gradient_clip_val", 0),
        ("log_every_n_steps", 0),
    ):
        value = config.get(name)
        if isinstance(value, int | float) and not value >= least:
            raise InputError(f"--trainer.{name} must be at least {least}, got {value}")
    _check_devices(config.get("devices"))
    _check_accelerator(config.get("accelerator"))
    strategy, strategies = config.get("strategy"), sorted(StrategyRegistry.available_strategies())
    if isinstance(strategy, str) and strategy.lower() not in ("auto", *strategies):
        raise InputError(f"--trainer.strategy must be one of auto, {', '.join(strategies)}, got {strategy}")


def _check_devices(devices: Any) -> None:
    allowed = "a number from 1 on, a list of the devices' numbers, -1 (all) or auto"
    if isinstance(devices, str):
        number = re.fullmatch(r"\s*([+-]?\d+)\s*", devices)
        is_right = int(number[1]) >= -1 and int(number[1]) != 0 if number else devices == "auto" or "," in devices
    else:
        is_right = devices is None or (devices >= -1 and devices != 0 if isinstance(devices, int) else bool(devices))
    if not is_right:
        raise InputError(f"--trainer.devices must be {allowed}, got {devices}")


def _check_accelerator(accelerator: Any) -> None:
    if not isinstance(accelerator, str) or accelerator == "auto":
        return
    there = [name for name in sorted(AcceleratorRegistry.available_accelerators()) if _is_there(name)]
    known = ["auto", "gpu", *sorted(AcceleratorRegistry.available_accelerators())]
    if accelerator not in known:
        raise InputError(f"--trainer.accelerator must be one of {', '.join(known)}, got {accelerator}")
    if accelerator not in there and not (accelerator == "gpu" and {"cuda", "mps"} & set(there)):
        raise InputError(f"--trainer.accelerator {accelerator}: torch finds none here; there is {', '.join(there)}")


def _is_there(accelerator: str) -> bool:
    kinds: dict[str, Callable[[], bool]] = {
        "cpu": CPUAccelerator.is_available,
        "cuda": CUDAAccelerator.is_available,
        "mps": MPSAccelerator.is_available,
        "tpu": XLAAccelerator.is_available,
    }
    return kinds[accelerator]() if accelerator in kinds else True  # one that a user has registered
