"""A mistake in the command line is one sentence that names what is allowed; a user's own error keeps its traceback."""

import importlib
import re
import shlex
import sys
import traceback

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from scent_lightning.cli import main
from scent_lightning.failure import TRACEBACK, failure
from tests.conftest import ROOT

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
NO_FILES = ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
DRO = ["--config", str(ROOT / "configs" / "dro_diabetes.yaml"), *QUIET, "--trainer.max_epochs", "2"]
XC = ["--config", str(ROOT / "configs" / "xc_synthetic.yaml"), *QUIET, *NO_FILES, "--data.num_classes", "50"]
XC += ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "0"]
CLIP = ["--config", str(ROOT / "configs" / "clip_shapes.yaml"), *QUIET, *NO_FILES, "--data.rows", "16"]
CLIP += ["--data.val_rows", "8", "--data.batch_size", "8", "--trainer.max_steps", "1"]

OWN = """
import lightning as L
import torch
from scent_lightning.duals import BSGD
from scent_lightning.tasks import DRORegressionTask

class Own(BSGD):
    pass

class Raises(BSGD):
    def __init__(self, share: float = 0.5):
        raise ValueError("of the user's update")

class Task(DRORegressionTask):
    def training_step(self, batch, batch_idx):
        raise ValueError("of the user's step")

class Rates(DRORegressionTask):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=-1)

class Needs(L.Callback):
    def __init__(self, update: BSGD, rate: float = 0.5):
        self.update = update

class Opens(L.Callback):
    def on_train_start(self, trainer, pl_module):
        open("nothing/at/all")

class Breaks(L.Callback):
    def __init__(self, share: float = 0.5):
        raise TypeError("of the user's callback")

class Narrow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, features):
        return self.linear(features)

class TwoOutputs(torch.nn.Linear):
    def __init__(self):
        super().__init__(10, 2)

class Frozen(torch.nn.Linear):
    def __init__(self):
        super().__init__(10, 1)
        self.requires_grad_(False)

class ThreeWide(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 3)

class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise OSError("of the user's data set")

class Data(L.LightningDataModule):
    num_anchors, num_features, num_classes = 8, 10, None
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Broken(), num_workers=1)
"""
MODULES = {
    "own_classes.py": OWN,
    "own_without_a_module.py": "import not_there_at_all\n",
    "own_typing_error.py": "class Own(:\n",
    "own_error_at_the_top.py": "raise KeyError('of the user at the top')\n",
}
CONFIGS = {
    "broken.yaml": "model: [1, {\n",
    "text.yaml": "just text\n",
    "optimizer.yaml": "model: {init_args: {optimizer: {class_path: torch.optim.A}}}\n",
    "betas.yaml": "model: {init_args: {optimizer: {class_path: torch.optim.Adam, init_args: {betas: 3}}}}\n",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with modules of the user's; afterwards they are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TRACEBACK, raising=False)
    for name, text in {**MODULES, **CONFIGS}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(bytes(range(256)))
    importlib.invalidate_caches()
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def sentence(capsys, *arguments) -> str:
    path = list(sys.path)
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    assert sys.path == path
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if line.startswith("scent-lightning: error: "))
    assert error.splitlines()[-1] == line
    return line.removeprefix("scent-lightning: error: ")


UPDATES = "known are ASGD, BSGD, MSVR, SCENT, SOX, ProximalPoint, SoftplusASGD, UMax, or the import path of your own"
ABSENT = "there is no module 'my_project' in the working folder or among what is installed"
OF_ITS_OWN = [
    ("--dual my_project.HalfWay", f"--dual my_project.HalfWay: {ABSENT}"),
    ("--model.network my_project.nets.Net", f"--model.network my_project.nets.Net: {ABSENT}"),
    ("--trainer.callbacks+=my_project.Shows", f"--trainer.callbacks my_project.Shows: {ABSENT}"),
    ("--dual own_classes.Other", "--dual own_classes.Other: module 'own_classes' has no name 'Other'"),
    ("--dual own_classes.Own.Other", "--dual own_classes.Own.Other: class 'Own' has no name 'Other'"),
    ("--model.optimizer torch.optim.A", "--model.optimizer torch.optim.A: module 'torch.optim' has no name 'A'"),
    ("--dual own_classes", f"unknown dual update 'own_classes' for --dual: {UPDATES}"),
    ("--dual torch.nn.Linear", f"--dual torch.nn.Linear is no dual update: {UPDATES}"),
    ("--model.network own_classes.Own", "--model.network own_classes.Own is no Module: give the import path of your"),
    ("--model.loss hinge", "--model.loss must be one of squared, absolute, huber, got hinge"),
    ("--dual.schedule linear", "--dual.schedule must be one of constant, cosine, got linear"),
    (
        "--model PartialAUCTask --model.surrogate x",
        "--model.surrogate must be one of squared_hinge, squared, hinge, lo",
    ),
    ("--if_changed_data stay", "--if_changed_data must be one of error, grow, reset, got stay"),
    ("--trainer.precision 17", "--trainer.precision must be one of 64, 32, 16, .*bf16-mixed, .*, null, got 17"),
    ("--trainer.deterministic maybe", "--trainer.deterministic must be warn or bool or null, got maybe"),
    ("--trainer.limit_val_batches few", "--trainer.limit_val_batches must be float or int or null, got few"),
    ("--model.optimizer Adam --model.optimizer.lr x", "--model.optimizer.lr must be float, got x"),
    ("--model.optimizer Adam --model.optimizer.rate 1", "--model.optimizer Adam has no argument 'rate'; --model.optim"),
    (
        "--trainer.callbacks Other",
        "unknown Callback 'Other' for --trainer.callbacks: known are .*, EarlyStopping, .*Tim",
    ),
    ("--trainer.callbacks '[{class_path: Other}]'", "unknown Callback 'Other' for --trainer.callbacks: known are .*"),
    ("--model.optimizer Other", "unknown Optimizer 'Other' for --model.optimizer: known are .*Adam, .*SGD, .*"),
    ("--trainer.logger Other", "unknown Logger 'Other' for --trainer.logger: known are CSVLogger, .*TensorBoardLogger"),
    ("--trainer.callbacks EarlyStopping", "--trainer.callbacks EarlyStopping needs its argument.s. monitor, as --tra"),
    (
        "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor a --trainer.callbacks.patience long",
        "--trainer.callbacks.patience must be int, got long",
    ),
    ("--trainer.callbacks own_classes.Needs --trainer.callbacks.update Other", "unknown .*'Other' for --trainer.callb"),
    ("--trainer.callbacks own_classes.Needs --trainer.callbacks.update 3", "unknown .*'3' for --trainer.callbacks.upd"),
    ("--model.loss ''", "--model.loss must be one of squared, absolute, huber, got ''"),
    ("--model ''", "unknown task '' for --model: known are CLIPTask, DRORegressionTask, "),
    ("--trainer.callbacks '[3]'", "--trainer.callbacks must be a Callback, got .3.: known are "),
    ("--dual '{class_path: 3}'", f"--dual must be a DualUpdate, got .*: {UPDATES}"),
    ("--trainer null", "--trainer: Unable to load config 'null'"),
    ("--config nothing.yaml", "config nothing.yaml is neither a file nor one of the package's configurations"),
    ("--config broken.yaml", "Problems parsing config: while parsing a flow node .* line 2"),
    ("--config bytes.yaml", "a --config file cannot be read as text: 'utf-8' codec can't decode"),
    ("--config text.yaml", "Unexpected config: just text"),
    ("--config optimizer.yaml", "--model.optimizer torch.optim.A: module 'torch.optim' has no name 'A'"),
    ("--config betas.yaml", "--model.optimizer.betas must be tuple, got 3$"),
]


@pytest.mark.parametrize(("arguments", "message"), OF_ITS_OWN, ids=[arguments for arguments, _ in OF_ITS_OWN])
def test_arguments(here, capsys, monkeypatch, arguments, message):
    if "callbacks" in arguments:  # of which other tests have many of their own
        monkeypatch.setattr("scent_lightning.arguments.MOST_SHOWN", 1000)
    line = sentence(capsys, "fit", *DRO, *shlex.split(arguments))
    assert re.match(message, line), line
    assert "NoneType" not in line
    assert "Namespace" not in line


REFUSED = [
    (DRO, "--trainer.accelerator tpu", "--trainer.accelerator tpu: torch finds none here; there is cpu"),
    (DRO, "--trainer.accelerator npu", "--trainer.accelerator must be one of auto, gpu, cpu, cuda, mps, tpu, got npu"),
    (DRO, "--trainer.devices 0", "--trainer.devices must be a number from 1 on, a list of the devices' numbers, -1"),
    (DRO, "--trainer.devices=-3", "--trainer.devices must be .*, got -3"),
    (DRO, "--trainer.accumulate_grad_batches 0", "--trainer.accumulate_grad_batches must be at least 1, got 0"),
    (DRO, "--trainer.check_val_every_n_epoch 0", "--trainer.check_val_every_n_epoch must be at least 1, got 0"),
    (DRO, "--trainer.gradient_clip_val -1", "--trainer.gradient_clip_val must be at least 0, got -1"),
    (DRO, "--trainer.log_every_n_steps -1", "--trainer.log_every_n_steps must be at least 0, got -1"),
    (DRO, "--trainer.val_check_interval 9999", ".val_check_interval. .9999. must be less than or equal to the number"),
    (DRO, "--trainer.limit_train_batches 3.5", "You have passed invalid value 3.5 for limit_train_batches, it has to"),
    (DRO, "--trainer.strategy dpp", "--trainer.strategy must be one of auto, ddp, .*, got dpp"),
    (DRO, "--trainer.strategy deepspeed", "To use the .DeepSpeedStrategy., you must have DeepSpeed installed"),
    (
        DRO,
        "--trainer.profiler slow",
        "When passing string value for the .profiler. parameter of .Trainer., it can only",
    ),
    (DRO, "--trainer.max_time long", ".Timer.duration='long'.. is not a valid duration. Expected a string in the form"),
    (DRO, "--trainer.logger WandbLogger", "Requirement 'wandb>=.*' not met"),
    (DRO, "--trainer.callbacks RichProgressBar", ".RichProgressBar. requires .rich. >= .* Install it by running"),
    (
        DRO,
        "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor a --trainer.check_val_every_n_epoch 1",
        "Early stopping conditioned on metric .a. which is not available. Pass in .*train/loss.*val/rmse",
    ),
    (
        DRO,
        "--trainer.callbacks ModelCheckpoint --trainer.callbacks.monitor a --trainer.check_val_every_n_epoch 1",
        ".ModelCheckpoint.monitor='a'.. could not find the monitored key in the returned metrics: .*'val/rmse'",
    ),
    (DRO, "--trainer.callbacks ModelCheckpoint --trainer.callbacks.mode up", ".mode. can be min, max but got up"),
    (DRO, "--trainer.callbacks LastCheckpoint --trainer.callbacks.at_most_every_s -1", "at_most_every_s must be at l"),
    (DRO, "--model.optimizer Adam --model.optimizer.lr -1", "Invalid learning rate: -1.0"),
    (DRO, "--model.network own_classes.TwoOutputs --model.initial zeros", "network must give one prediction a row: ex"),
    (DRO, "--model.network own_classes.Frozen --model.initial zeros", "nothing is left to train: .*; give a network t"),
    (XC, "--model.optimizer Adam", "optimizer Adam takes no sparse gradients, .* set it to SGD, Adagrad or SparseAdam"),
    (XC, "--model.optimizer RMSprop", "optimizer RMSprop takes no sparse gradients, which the sampled classes'"),
    (XC, "--model.optimizer SGD --model.optimizer.weight_decay 0.1", "optimizer SGD with weight_decay takes no sparse"),
    (XC, "--model.backbone own_classes.ThreeWide", "backbone must give num_features = 64 features a row: expected sha"),
    (
        CLIP,
        "--model.lock_image true --model.lock_text true --model.learn_tau false",
        "nothing is left to train: .*; set lock_image or lock_text to false, or learn_tau to true",
    ),
]


@pytest.mark.parametrize(("base", "arguments", "message"), REFUSED, ids=[arguments for _, arguments, _ in REFUSED])
def test_what_lightning_or_torch_notices(here, capsys, base, arguments, message):
    line = sentence(capsys, "fit", *base, *shlex.split(arguments))
    assert re.match(message, line), line


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam", "LBFGS"])
def test_optimisers_of_sparse_gradients(here, optimizer):
    main(["fit", *XC, "--model.optimizer", optimizer])


def test_a_run_shorter_than_its_checkpoint(here, capsys):
    main(["fit", *DRO, "--trainer.logger", "false"])
    line = sentence(capsys, "fit", *DRO, "--ckpt_path", "checkpoints/last.ckpt", "--trainer.max_epochs", "1")
    assert re.match("You restored a checkpoint with current_epoch=2, but you have set .*max_epochs=1", line), line


def test_a_monitor_that_a_run_without_validation_does_not_log(here):
    callback = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/rmse"]
    with pytest.warns(
        UserWarning, match="EarlyStopping monitors 'val/rmse', which was not logged in this run; logged "
    ):
        main(["fit", *DRO, "--trainer.check_val_every_n_epoch", "5", *callback])


THEIRS = [
    ("--dual own_classes.Raises", ValueError, "of the user's update"),
    ("--model own_classes.Task", ValueError, "of the user's step"),
    ("--model own_classes.Rates", ValueError, "Invalid learning rate"),
    ("--model.network own_classes.Narrow --model.initial zeros", RuntimeError, "mat1 and mat2 shapes"),
    ("--trainer.callbacks own_classes.Opens", FileNotFoundError, "nothing/at/all"),
    ("--trainer.callbacks own_classes.Breaks", TypeError, "of the user's callback"),
    ("--data own_classes.Data --model.initial zeros", OSError, "of the user's data set"),
    ("--dual own_without_a_module.Own", ModuleNotFoundError, "No module named 'not_there_at_all'"),
    ("--dual own_typing_error.Own", SyntaxError, "invalid syntax"),
    ("--dual own_error_at_the_top.Own", KeyError, "of the user at the top"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), THEIRS, ids=[arguments for arguments, _, _ in THEIRS])
def test_the_users_own_error_keeps_its_traceback(here, capsys, arguments, kind, message):
    with pytest.raises(kind, match=message) as raised:
        main(["fit", *DRO, *NO_FILES, *shlex.split(arguments)])
    shown = "".join(traceback.format_exception(raised.value))
    assert re.search(r"own_\w+\.py", shown)
    assert "Union subtypes" not in shown
    assert "scent-lightning: error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--trainer.profiler", "slow"], "in _init_profiler"),
        (["--data.batch_size", "500"], "InputError: batch_size 500"),
        (["--model.loss", "hinge"], "jsonargparse"),
    ],
)
def test_the_whole_traceback_for_the_asking(here, capsys, monkeypatch, arguments, place):
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *DRO, *NO_FILES, *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert place in error
    assert error.splitlines()[-1].startswith("scent-lightning: error: ")


def test_classes_of_the_working_folder(here):
    main(["fit", *DRO, *NO_FILES, "--dual", "own_classes.Own"])
    assert sys.modules["own_classes"].__file__ == str(here / "own_classes.py")
    assert str(here) not in sys.path


def test_a_file_of_the_working_folder_stands_in_for_nothing_installed(here):
    (here / "wave.py").write_text("raise SystemError('imported')")
    (here / "braceexpand.py").write_text("raise SystemError('imported')")
    for name in ("wave", "braceexpand"):
        sys.modules.pop(name, None)
    with pytest.raises(SystemExit):
        main(["fit", *DRO, "--dual", "wave.Own"])
    with pytest.raises(SystemExit):
        main(["fit", *DRO, "--dual", "braceexpand.Own"])


@pytest.mark.parametrize("word", ["checkpoints/last.ckpt", "last"])
def test_a_checkpoint_imports_nothing_from_the_working_folder(here, word):
    main(["fit", *DRO, "--trainer.logger", "false"])
    state = torch.load("checkpoints/last.ckpt", weights_only=True)
    state["hyper_parameters"] |= {"dual": {"class_path": "own_error_at_the_top.Own"}, "_class_path": "own_classes.Task"}
    state["hyper_parameters"]["_instantiator"] = "own_typing_error.instantiate"
    torch.save(state, "checkpoints/last.ckpt")
    main(["validate", *DRO, "--trainer.logger", "false", "--ckpt_path", word])
    main(["fit", *DRO, "--trainer.logger", "false", "--ckpt_path", word, "--trainer.max_epochs", "3"])
    assert not {name.removesuffix(".py") for name in MODULES} & set(sys.modules)


@pytest.mark.parametrize(
    ("raised", "file", "known"),
    [
        (
            "scent_lightning.errors.InputError: rows are missing",
            "scent_lightning/data/tabular.py",
            (2, "rows are missing"),
        ),
        ("scent_lightning.errors.DualDivergenceError: diverged", "own_classes.py", (1, "diverged")),
        ("ValueError: of the user's", "own_classes.py", None),
    ],
)
def test_what_a_spawned_process_raised(raised, file, known):
    """torch hands it on as the text of that process's traceback."""
    lines = ["", "-- Process 1 terminated with the following error:", "Traceback (most recent call last):"]
    lines += [f'  File "/home/one/{file}", line 3, in call', "    raise it", raised]
    error = ProcessRaisedException("\n".join(lines), 1, 4711)
    assert failure(error) == known
