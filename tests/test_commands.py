"""The page of all commands, and what holds for the commands beside Lightning's."""

import re
import subprocess
import sys

import pytest

from scent_lightning.cli import OF_LIGHTNING, OTHERS, main
from tests.conftest import ROOT

COMMANDS = {**OF_LIGHTNING, **OTHERS}


def page(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_page_has_a_line_for_each_command(capsys, option):
    said = page(capsys, option)
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S.{{20,}}$", said, re.MULTILINE)
    assert set(re.findall(r"^  ([a-z]+)  ", said, re.MULTILINE)) == set(COMMANDS)
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("command", OTHERS)
def test_every_argument_of_a_command_has_a_sentence(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "120")
    said = page(capsys, command, "--help")
    assert said.startswith(f"usage: scent-lightning {command}")
    lists = said[
        min(
            said.index(f"{head}:\n")
            for head in ("positional arguments", "options", "source, one of them")
            if f"{head}:\n" in said
        ) :
    ]
    entries = re.findall(r"^  \S.*(?:\n {4,}\S.*)*", lists.partition("example:")[0], re.MULTILINE)
    assert entries
    for entry in entries:
        name, *sentence = re.split(r"\s{2,}", entry.strip(), maxsplit=1)
        assert len(" ".join(sentence).split()) > 2, name


def test_what_needs_no_torch_does_not_take_it():
    """Importing it takes seconds."""
    code = """
import contextlib, io, sys
from scent_lightning.cli import OTHERS, main
commands = [["--help"], ["--version"], ["configs"], *([name, "--help"] for name in OTHERS)]
commands.append(["sweep", "dro_diabetes", "--model.tau", "1", "2", "--dry_run"])
for arguments in commands:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
    assert "torch" not in sys.modules, arguments
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compar"], "unknown command 'compar': did you mean compare?"),
        (["fitt", "--config", "x"], "unknown command 'fitt': did you mean fit?"),
        (["zzz"], "unknown command 'zzz': fit, validate, test, predict, configs, "),
        ([], "a command is needed: fit, validate, "),
        (["compare"], "the following arguments are required: folders (scent-lightning compare --help has all"),
        (["configs", "x"], "unrecognized arguments: x (scent-lightning configs --help"),
        (["export", "missing.ckpt", "a.pt"], "checkpoint missing.ckpt cannot be read: No such file"),
        (["extract", "--image_folder=a", "--backbone=x", "--weights=none", "--out=b"], "--image-folder a: there is no"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scent-lightning"])
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"scent-lightning: error: {message}")
