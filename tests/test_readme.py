"""The README's code runs, its files exist, and its commands are the ones that CI runs."""

import re

import torch

from tests.conftest import ROOT
from tests.helpers import SoftmaxData, quiet_trainer

TEXT = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_blocks_run():
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    task = names["Classifier"](24, features=4, classes=5)
    quiet_trainer(max_epochs=1, limit_val_batches=0).fit(task, SoftmaxData())
    assert task.duals["nu"].visited.all()
    assert names["HalfWay"](0.5).step(torch.zeros(1), torch.ones(1, 2)).item() == 0.5


def test_files_named_exist():
    for path in re.findall(r"(?:configs|examples)/[\w./]+\.(?:yaml|py|png)", TEXT):
        assert (ROOT / path).is_file(), path


def test_ci_runs_the_commands_of_the_first_screen():
    _, test = blocks("bash")[:2]
    steps = (ROOT / ".ci" / "run").read_text()
    assert 'pip install -e ".[dev]"' in test
    assert '--editable ".[dev]"' in steps
    assert test.strip().endswith("python -m pytest -n auto")
    assert steps.strip().endswith("python -m pytest -n auto")
