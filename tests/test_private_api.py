"""Canaries: each private name of Lightning and torch that the package uses is there, and means what we take it for."""

import argparse
import ast
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.plugins.precision import amp
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import scent_lightning
from scent_lightning import private_api
from scent_lightning.duals import SCENT, DualVariable
from scent_lightning.errors import InputError
from scent_lightning.lightning_cli import ScentCLI
from scent_lightning.optim import RowSparseSGD
from scent_lightning.progress import ProgressLR
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer


class Watched(SoftmaxTask):
    """Keeps what the names of the fit are while it runs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.hooks, self.skips = set(), []

    def training_step(self, batch, batch_idx):
        self.hooks.add(vars(self)[private_api.HOOK_NAME])
        self.skips.append(private_api.skips_backward(self.trainer))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.hooks.add(vars(self)[private_api.HOOK_NAME])
        self.loaders = private_api.loaders(self.trainer.fit_loop)


@pytest.fixture
def fitted():
    data, task = SoftmaxData(), Watched(24)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, datamodule=data)
    return trainer, task


def test_the_trainer_notes_hooks_and_passes(fitted):
    _, task = fitted
    assert task.hooks == {"training_step", "on_train_epoch_end"}
    assert task.skips == [False] * 3


def test_averaging_skips_backward():
    """The pass for the statistics of batch norm is the one that the name tells of."""

    class WithNorm(Watched):
        def __init__(self):
            super().__init__(24)
            self.norm = torch.nn.BatchNorm1d(4)

    task = WithNorm()
    trainer = quiet_trainer(max_epochs=2, callbacks=[StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)])
    trainer.fit(task, datamodule=SoftmaxData())
    assert task.skips == [False] * 6 + [True] * 3


def test_the_attached_trainer(fitted):
    trainer, task = fitted
    assert private_api.trainer_of(task) is trainer
    assert "_trainer" in vars(task)
    assert private_api.trainer_of(SoftmaxTask(3)) is None
    del task.__dict__["_trainer"]
    task.__class__ = type("Renamed", (Watched,), {"trainer": property(lambda self: "the public one")})
    assert private_api.trainer_of(task) == "the public one"


def test_the_loaders_of_a_fit(fitted):
    trainer, task = fitted
    assert [type(loader) for loader in task.loaders] == [type(SoftmaxData().train_dataloader())]
    assert private_api.loader_states(trainer.fit_loop) == []
    private_api.forget_loaders(trainer.fit_loop)
    assert private_api.loaders(trainer.fit_loop) == []


class Resumed(Watched):
    """Notes the states that its loaders wait for, before training starts and after."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 6  # has the loaders built
        return super().configure_optimizers()

    def on_train_start(self):
        loop = self.trainer.fit_loop
        self.waiting = [list(private_api.loader_states(loop))]
        super().on_train_start()
        self.waiting.append(private_api.loader_states(loop))


def test_waiting_loader_states_are_restored(tmp_path):
    writer = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[writer]).fit(SoftmaxTask(24), SoftmaxData())
    task = Resumed(24)
    quiet_trainer(max_epochs=2).fit(task, datamodule=SoftmaxData(), ckpt_path=tmp_path / "step=2.ckpt")
    assert task.waiting == [[{"epoch": 0, "batches": 2, "global_batch": 8}], []]
    assert len(task.skips) == 4


def test_hyperparameters_for_checkpoints_and_loggers():
    task = SoftmaxTask(24, SCENT(1.0))
    assert task.hparams_initial["dual"] == task.hparams["dual"] == SCENT(1.0).config()
    private_api.replace_hyperparameters(task, {"lr": 1.0})
    assert dict(task.hparams) == dict(task.hparams_initial) == {"lr": 1.0}
    assert task.hparams.lr == 1.0


def test_a_class_method_of_a_class_alone():
    class Model(L.LightningModule):
        @private_api.restricted_classmethod
        def load_from_checkpoint(cls, path):
            return cls, path

    assert Model.load_from_checkpoint("a") == (Model, "a")
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        Model().load_from_checkpoint("a")


def test_ddp_leaves_parameters_alone():
    """torch's wrapper and Lightning's synchronisation read the list that we write."""
    module, reference = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    private_api.keep_from_ddp(module, "weight")
    private_api.keep_from_ddp(module, "weight")
    private_api.keep_from_ddp(module, "bias")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(reference, ["weight", "bias"])
    (name,) = set(vars(reference)) - set(vars(torch.nn.Linear(2, 1)))
    assert vars(module)[name] == vars(reference)[name]
    for reader in (DistributedDataParallel.__init__, _sync_module_states):
        assert name in inspect.getsource(reader)


def test_last_checkpoint_at_any_time(tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    trainer = quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(SoftmaxTask(24), datamodule=SoftmaxData())
    trainer.state.fn = "fit"
    (tmp_path / "last.ckpt").unlink()
    assert not private_api.write_last(callback, trainer), "nothing is new since"
    private_api.forget_written(callback)
    assert private_api.write_last(callback, trainer)
    assert (tmp_path / "last.ckpt").exists()


def test_a_strategys_own_checkpoints():
    assert private_api.checkpoint_io_given(SingleDeviceStrategy()) is None
    given = TorchCheckpointIO()
    assert private_api.checkpoint_io_given(SingleDeviceStrategy(checkpoint_io=given)) is given
    assert private_api.checkpoint_io_given("ddp") is None


def calls_of_hooks(watch):
    """How often a hook is called in a step of our optimiser."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = RowSparseSGD([weight], lr=0.1)
    calls = []
    handle = watch(optimizer)(lambda *arguments: calls.append(1))
    weight.sum().backward()
    assert private_api.is_watched(optimizer)
    optimizer.step()
    handle.remove()
    assert not private_api.is_watched(optimizer)
    return len(calls)


@pytest.mark.parametrize(
    "watch",
    [
        lambda optimizer: optimizer.register_step_pre_hook,
        lambda optimizer: optimizer.register_step_post_hook,
        lambda optimizer: register_optimizer_step_pre_hook,
        lambda optimizer: register_optimizer_step_post_hook,
    ],
)
def test_hooks_of_a_step_are_called_once(watch):
    assert calls_of_hooks(watch) == 1


def test_the_profiler_records_a_step_once():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = RowSparseSGD([weight], lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert private_api.is_watched(optimizer)
        optimizer.step()
    assert [event.name for event in profiler.events()].count("Optimizer.step#RowSparseSGD.step") == 1


def test_torch_leaves_a_marked_step_as_it_is():
    class Marked(torch.optim.SGD):
        @private_api.takes_own_records
        def step(self, closure=None):
            return None

    class Unmarked(torch.optim.SGD):
        def step(self, closure=None):
            return None

    for kind, is_kept in ((Marked, True), (Unmarked, False)):
        step = kind.step
        kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        assert (kind.step is step) == is_kept


def test_what_a_schedule_counts():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = ProgressLR(optimizer, lambda progress, step: 1.0, quiet_trainer())
    own = private_api.schedule_state(schedule)
    assert own == {"_step_count": 1, "_last_lr": [0.5]}
    optimizer.step()
    schedule.step()
    assert private_api.schedule_state(schedule)["_step_count"] == 2
    private_api.set_last_rates(schedule, [0.25])
    assert schedule.get_last_lr() == [0.25]


def test_entries_of_a_gradient_with_repeats():
    gradient = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=False)
    indices, values = private_api.entries(gradient)
    assert indices.tolist() == [[1, 1]]
    assert values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("together", [False, True])
def test_norms_and_multiples_of_many(count, dtype, together, monkeypatch):
    """The launch of many at once, which is a GPU's, is what each by itself is."""
    tensors = [torch.linspace(1, 300, 50 + i).to(dtype) for i in range(count)]
    expected = [t.double().norm() for t in tensors], [t.double() * 0.25 for t in tensors]
    monkeypatch.setattr(private_api, "_together", lambda tensors: together)
    for found, norm in zip(private_api.norms(tensors), expected[0], strict=True):
        assert found.itemsize >= 4
        assert found.item() == pytest.approx(norm.item(), rel=1e-3)
    private_api.multiply(tensors, 0.25)
    for tensor, multiple in zip(tensors, expected[1], strict=True):
        assert torch.allclose(tensor.double(), multiple, rtol=1e-3)


def test_optimisers_that_unscale_themselves():
    """As Lightning's mixed precision asks."""
    parameter = torch.nn.Parameter(torch.ones(1))
    assert private_api.unscales_itself(torch.optim.SGD([parameter], lr=0.1, fused=True))
    assert not private_api.unscales_itself(torch.optim.SGD([parameter], lr=0.1))
    assert "_step_supports_amp_scaling" in inspect.getsource(amp)


def test_methods_that_torch_and_lightning_call_by_name():
    """Those that a class of ours overrides in its own place."""
    variable = DualVariable(3, SCENT(0.0))
    assert {"nu", "visited"} <= set(variable.state_dict())
    assert variable.to("meta").nu.device.type == "meta"
    for owner, name, caller in (
        (torch.nn.Module, "_apply", torch.nn.Module.to),
        (torch.nn.Module, "_save_to_state_dict", torch.nn.Module.state_dict),
        (torch.nn.Module, "_load_from_state_dict", torch.nn.Module.load_state_dict),
        (LightningCLI, "_parse_ckpt_path", LightningCLI.__init__),
        (DefaultHelpFormatter, "_get_help_string", argparse.HelpFormatter._expand_help),
    ):
        assert callable(getattr(owner, name))
        assert re.search(rf"\.{name}\(", inspect.getsource(caller))
    assert ScentCLI._parse_ckpt_path is not LightningCLI._parse_ckpt_path


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (private_api.load_loader_states, "_load_combined_loader_states"),
        (private_api.forget_loaders, "_combined_loader"),
        (private_api.loader_states, "_combined_loader_states_to_load"),
        (lambda bare: private_api.write_last(bare, None), "_should_skip_saving_checkpoint"),
    ],
)
def test_a_missing_name_is_one_error_with_the_version(call, name):
    class Bare:
        restarting = True

    with pytest.raises(InputError, match=rf"Bare\.{name}.* lightning {re.escape(L.__version__)} does not have"):
        call(Bare())


def test_missing_names_that_only_save_time_or_a_case():
    class Bare:
        restarting = False

    bare = Bare()
    assert private_api.loader_states(bare) == private_api.loaders(bare) == []
    assert not private_api.skips_backward(bare)
    assert private_api.is_watched(bare)
    assert private_api.checkpoint_io_given(bare) is None


# Of NumPy's arrays in files, and the documented method of named tuples.
OTHERS = {"_mmap", "_replace"}


def test_no_private_name_of_others_is_used_elsewhere():
    """Every attribute with a leading underscore is one that the package itself defines."""
    root = Path(scent_lightning.__file__).parent
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    foreign = {name for kind in (L.LightningModule, torch.optim.Optimizer, ModelCheckpoint) for name in vars(kind)}
    overridden = {"_apply", "_save_to_state_dict", "_load_from_state_dict", "_parse_ckpt_path", "_get_help_string"}
    used = {
        (path.name, node.attr)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
        if node.attr not in own - foreign and node.attr not in overridden | OTHERS
    }
    imported = {
        (path.name, alias.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("scent_lightning")
        for alias in node.names
        if re.match(r"_[a-zA-Z]", alias.name)
    }
    assert {place for place in used | imported if place[0] != "private_api.py"} == set()


def _defined(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr if isinstance(node.value, ast.Name) and node.value.id == "self" else ""
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def test_the_parser_of_a_subcommand_and_targets_that_need_not_be_given():
    from jsonargparse import ArgumentParser

    from scent_lightning.lightning_cli import ScentArgumentParser

    assert "subcommand" in inspect.signature(LightningCLI._parser).parameters
    assert private_api.LINKED_TARGETS in inspect.signature(ArgumentParser.add_class_arguments).parameters or (
        private_api.LINKED_TARGETS in inspect.getsource(inspect.getmodule(ArgumentParser.add_class_arguments))
    )
    assert issubclass(ScentArgumentParser, ArgumentParser)
    with pytest.raises(InputError, match=r"needs object._parser, which lightning .* does not have"):
        private_api.parser_of(object())
