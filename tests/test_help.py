"""What the command line's help says."""

import contextlib
import re

import pytest

from scent_lightning import data, tasks
from scent_lightning.cli import main
from scent_lightning.help import asked_for

TASKS = [name for name in tasks.__all__ if name.endswith("Task") and name != "BaseTask"]
DATA = [name for name in data.__all__ if name.endswith("DataModule") and name != "IndexedDataModule"]
MARKUP = re.compile(r":\w+:`|``|\\[a-z]+")


def page(*arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with contextlib.suppress(SystemExit):
        main(list(arguments))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--model.help", TASKS),
        ("--data.help", DATA),
        ("--dual.help", ["SCENT", "SOX", "BSGD", "MSVR", "ProximalPoint"]),
    ],
)
@pytest.mark.parametrize("after", [[], ["--trainer.max_epochs", "1"]])
def test_an_option_by_itself_lists_what_there_is(option, names, after, capsys, monkeypatch):
    said = page("fit", option, *after, capsys=capsys, monkeypatch=monkeypatch)
    for name in names:
        (line,) = re.findall(rf"^  {name} +(\S.*)$", said, re.MULTILINE)
        assert 20 < len(line) < 150
    assert "BaseTask" not in said
    assert not MARKUP.search(said)


@pytest.mark.parametrize("arguments", [["--model.help", "CLIPTask"], ["fit"], ["--model.helper"], []])
def test_other_arguments_ask_for_nothing(arguments):
    assert asked_for(arguments) is None


@pytest.mark.parametrize("name", TASKS)
def test_the_page_of_a_task_lists_no_classes_of_torch(name, capsys, monkeypatch):
    said = page("fit", "--model.help", name, capsys=capsys, monkeypatch=monkeypatch)
    assert said.count("\n") < 250
    assert "torch.nn." not in said
    assert "known subclasses" not in said
    assert "one of SCENT" in said.replace("\n", " ") or re.search(r"one\s+of[\s\w,]+SCENT", said)
    assert not re.search(r"``|:class:|:math:", said)
    for option in re.findall(r"^  --model\.(\w+) [A-Z{]", said, re.MULTILINE):
        assert re.search(rf"--model\.{option} [^\n]*\n? +\S", said), option


def test_the_page_of_fit_is_short_and_names_its_own_classes(capsys, monkeypatch):
    said = page("fit", "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert "known subclasses" not in said
    assert re.search(r"one\s+of\s+DualStepSizeFinder|DualVariableMonitor", said)
