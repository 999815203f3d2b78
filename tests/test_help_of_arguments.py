"""Every argument is explained where it is asked for, and ``--print_config`` gives a file that runs."""

import contextlib
import inspect
import re

import pytest
from jsonargparse import ArgumentParser

from scent_lightning import callbacks, data, tasks, updates
from scent_lightning.cli import main
from tests.conftest import ROOT

CLASSES = [getattr(module, name) for module in (tasks, callbacks, updates) for name in module.__all__]
CLASSES += [getattr(data, name) for name in data.__all__ if name.endswith("DataModule")]
# A word of these is in the description of a number: what it counts or measures, or the range that it is in.
UNITS = r"number|in \[|in \(|above|at least|at most|below|fraction|second|epoch|step|pixel|row|image|pair|quer|document"
UNITS += r"|item|class|interaction|process|column|token|batch|caption|entr|unit|radian|nats|None"
# What is to be looked up elsewhere on a page where it may stand alone.
ELSEWHERE = (
    r"see above|likewise|as of the other|^like |^that of|^those of|^one with|^its |\b[AB] of them|(two|three) above"
)


def arguments_of(cls):
    """(name, description, default, type) of what the command line takes for a class."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "it")
    for action in parser._actions:
        option = action.option_strings[0] if action.option_strings else ""
        if action.dest.startswith("it.") and not option.endswith(".help"):
            yield action.dest[3:], " ".join((action.help or "").split()), action.default, str(action._typehint)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if inspect.isclass(cls)], ids=lambda cls: cls.__name__)
def test_every_argument_has_a_sentence_with_its_unit_and_what_none_means(cls):
    required = {
        name for name, each in inspect.signature(cls).parameters.items() if each.default is inspect.Parameter.empty
    }
    for name, description, default, kind in arguments_of(cls):
        said = f"{cls.__name__}.{name}: {description!r}"
        assert len(description) >= 15, said
        assert not re.search(ELSEWHERE, description), said
        if default is None and name not in required:
            assert "None" in description, said
        if re.search(r"\b(int|float)\b", kind):
            assert re.search(UNITS, description), said


def test_the_walk_sees_what_the_command_line_takes():
    for cls, some in (
        (tasks.DRORegressionTask, {"tau", "lr", "optimizer", "weight_step"}),
        (data.TabularRegressionDataModule, {"dataset", "batch_size", "num_workers"}),
        (updates.SOX, {"gamma", "final", "max_log_weight"}),
        (callbacks.DualVariableMonitor, {"histogram", "detail"}),
    ):
        assert some <= {name for name, *_ in arguments_of(cls)}


def page(capsys, *arguments):
    with contextlib.suppress(SystemExit):
        main(list(arguments))
    return capsys.readouterr().out


OF_DATA = [
    f"--data.help {name}" for name in data.__all__ if name.endswith("DataModule") and name != "IndexedDataModule"
]
OF_OTHERS = ["--dual.help SCENT", "--dual.help MSVR", "--trainer.callbacks.help DualVariableMonitor"]
OF_OTHERS += ["--trainer.callbacks.help ZeroShotBenchmark", "--model.optimizer.help RowSparseSGD"]


@pytest.mark.parametrize("asked", [*OF_DATA, *OF_OTHERS])
def test_a_page_is_short_and_lists_no_classes_of_torch(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    before = ["--model", "ExtremeClassificationTask"] if asked.startswith("--model.") else []
    said = page(capsys, "fit", *before, *asked.split())
    assert 5 < said.count("\n") < 150
    assert "torch.nn." not in said
    assert "torch.optim." not in said
    assert "known subclasses" not in said


OWN = "--model DRORegressionTask --data TabularRegressionDataModule --data.dataset diabetes --dual SCENT"
PRINTED = {
    "configuration": f"--config {ROOT}/configs/dro_diabetes.yaml --dual SOX --dual.gamma 0.5",
    "no configuration": f"{OWN} --model.optimizer AdamW --trainer.callbacks+=DualStepSizeFinder",
    "classes": f"--config {ROOT}/configs/xc_synthetic.yaml --data.rows 256 --data.val_rows 64 --data.num_classes 50",
    "items": f"--config {ROOT}/configs/retrieval_dependencies.yaml --data.dataset bought.csv --data.query user "
    "--data.item item --data.batch_size 8",
}


@pytest.mark.parametrize("given", PRINTED.values(), ids=PRINTED)
def test_a_printed_configuration_runs(given, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"u{row % 7},i{row % 11}" for row in range(77)]
    (tmp_path / "bought.csv").write_text("\n".join(["user,item", *rows]))
    printed = page(capsys, "fit", *given.split(), "--print_config")
    (tmp_path / "own.yaml").write_text(printed)
    main(["fit", "--config", "own.yaml", "--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu"])
    capsys.readouterr()
    again = page(capsys, "fit", "--config", "own.yaml", "--print_config")
    assert again == printed
