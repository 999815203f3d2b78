"""The README's code runs, its files exist, and its commands are the ones that CI runs."""

import re
import runpy
import shlex
import sys

import pytest

from scent_lightning.cli import OTHERS, main
from tests.conftest import ROOT
from tests.helpers import SoftmaxData, quiet_trainer

TEXT = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "configs" / "README.md").read_text()
GUIDES = [ROOT / name for name in ("README.md", "configs/README.md", "examples/README.md", "tests/README.md")]


def blocks(language, text=TEXT):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_front_page_is_short():
    assert len(TEXT) <= 12_000


def test_python_blocks_run():
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    task = names["Classifier"](24, features=4, classes=5)
    quiet_trainer(max_epochs=1, limit_val_batches=0).fit(task, SoftmaxData())
    assert task.duals["nu"].visited.all()


def test_files_named_exist():
    for path in re.findall(r"(?:configs|examples)/[\w./]+\.(?:yaml|py|png|md)", TEXT):
        assert (ROOT / path).is_file(), path
    for file in (*GUIDES, ROOT / ".github" / "CONTRIBUTING.md"):
        text = file.read_text()
        for path in re.findall(r"`(tests/[\w./]+)`", text):
            assert (ROOT / path).exists(), path
        headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in text.splitlines()}
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert (
                (link[1:] in headings) if link.startswith("#") else (file.parent / link.partition("#")[0]).is_file()
            ), link


@pytest.mark.parametrize(("folder", "ending"), [("configs", "yaml"), ("examples", "py")])
def test_every_configuration_and_example_is_in_the_index_of_its_folder(folder, ending):
    index = (ROOT / folder / "README.md").read_text()
    paths = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob(f"*.{ending}")]
    # Of the published settings their folders, which have a file for each method.
    files = {f"{path.parent}/" if path.parts[0] == "published" else path.as_posix() for path in paths}
    assert len(files) > 10
    assert [file for file in sorted(files) if f"`{file}`" not in index] == []


def test_ci_runs_the_commands_of_the_first_screen():
    _, test = blocks("bash")[:2]
    steps = (ROOT / ".ci" / "run").read_text()
    assert 'pip install -e ".[dev]"' in test
    assert '--editable ".[dev]"' in steps
    assert test.strip().endswith("python -m pytest -n auto")
    assert "\npython -m pytest -n auto\n" in steps


def commands(text):
    """Every command of a guide, as it is written, with its comment left out."""
    lines = "\n".join(blocks("bash", text)).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("scent-lightning ", "python "))]


# Of each run only a part: the commands are tried, not what they reach.
SHORT = [
    "--trainer.limit_train_batches",
    "2",
    "--trainer.limit_val_batches",
    "2",
    "--trainer.limit_predict_batches",
    "1",
]
SHORT += ["--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "least"), [(TEXT, 4), (RUNNING, 13)], ids=["README", "running"])
def test_commands_run_as_they_are_written(text, least, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "argv", ["small_data.py", "small_data"])
    runpy.run_path("examples/small_data.py", run_name="__main__")
    ran = 0
    for program, *arguments in commands(text):
        if program == "scent-lightning" and any(".help" in argument for argument in arguments):
            with pytest.raises(SystemExit, match="0"):
                main(arguments)
        elif program == "scent-lightning" and arguments[0] == "export":
            capsys.readouterr()
            main(arguments)
            names = {}
            exec(capsys.readouterr().out, names)
            assert names["model"].visual.image_size == (32, 32)
        elif program == "scent-lightning" and arguments[0] in OTHERS:
            main(arguments)
        elif program == "scent-lightning":
            epochs = {"--trainer.max_epochs"} & set(arguments)  # a run to go on with is longer
            monkeypatch.setattr(sys, "argv", ["scent-lightning"])
            main([*arguments, *SHORT, *([] if epochs or arguments[0] != "fit" else ["--trainer.max_epochs", "1"])])
        else:
            continue
        ran += 1
    assert ran >= least
