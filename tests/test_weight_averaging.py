"""Averages of the weights leave ν, its flags and the rule alone, and are themselves what they should be."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from scent_lightning.callbacks import LastCheckpoint
from scent_lightning.cli import main
from scent_lightning.duals import SCENT
from tests.conftest import ROOT
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer
from tests.settings import SETTINGS

CALLBACKS = {
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "EMA without buffers": lambda: EMAWeightAveraging(decay=0.9, use_buffers=False),
    "mean": WeightAveraging,
    "mean without buffers": lambda: WeightAveraging(use_buffers=False),
}
KINDS = ["softmax", "auto", "regression", "classification"]


def setting(kind, folder):
    L.seed_everything(0, verbose=False)
    if kind in SETTINGS:
        return SETTINGS[kind](folder / "data", 16)
    data = SoftmaxData()
    return SoftmaxTask(data.num_anchors, SCENT() if kind == "auto" else SCENT(0.0)), data


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path


def duals(task) -> dict:
    """ν, flags and the rule's state, as plain data."""
    state = {key: value for key, value in task.state_dict().items() if key.startswith("duals.")}
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for key, value in state.items()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=0, atol=0, equal_nan=True)


class Weights(L.Callback):
    """Keeps the weights and the duals after each optimiser step, and the duals as validation sees them."""

    def __init__(self):
        self.after, self.trained, self.validated = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.after.append([parameter.detach().clone() for parameter in module.parameters()])
        self.trained.append(duals(module))

    def on_validation_batch_start(self, trainer, module, *_):
        self.validated.append(duals(module))


def fit(kind, folder, *callbacks, epochs=2, ckpt_path=None, **arguments):
    task, data = setting(kind, folder)
    trainer = quiet_trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=list(callbacks), **arguments)
    trainer.fit(task, data, ckpt_path=ckpt_path)
    return task


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_leave_the_duals_alone(folder, kind, name):
    plain, averaged = Weights(), Weights()
    alone = fit(kind, folder, plain)
    task = fit(kind, folder, averaged, CALLBACKS[name]())
    assert_equal(duals(task), duals(alone))
    assert len(plain.validated) == len(averaged.validated)
    for one, other in zip(plain.validated, averaged.validated, strict=True):
        assert_equal(one, other)
    expected = plain.after[0]
    for number, weights in enumerate(plain.after[1:], 1):
        share = 0.1 if "EMA" in name else 1 / (number + 1)
        expected = [(1 - share) * old + share * new for old, new in zip(expected, weights, strict=True)]
    torch.testing.assert_close([p.detach() for p in task.parameters()], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_weight_averaging(folder, kind):
    plain, averaged = Weights(), Weights()
    fit(kind, folder, plain, StochasticWeightAveraging(0.1, swa_epoch_start=9))  # which never begins
    task = fit(kind, folder, averaged, StochasticWeightAveraging(0.1, swa_epoch_start=2), epochs=2)
    steps = len(averaged.after) // 2
    torch.testing.assert_close([p.detach() for p in task.parameters()], averaged.after[steps - 1])
    assert_equal(plain.trained[steps - 1], averaged.trained[steps - 1])
    assert_equal(duals(task), averaged.trained[-1])


def test_the_pass_for_batch_norm_does_not_move_nu(folder):
    class Normed(SoftmaxTask):
        def __init__(self, num_anchors):
            super().__init__(num_anchors)
            self.linear = torch.nn.Sequential(torch.nn.BatchNorm1d(4), self.linear)

    seen = Weights()
    data = SoftmaxData()
    task = Normed(data.num_anchors)
    swa = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[seen, swa]).fit(task, data)
    assert len(seen.trained) > 6
    assert_equal(duals(task), seen.trained[5])


@pytest.mark.parametrize("average", [None, get_ema_avg_fn(0.9), "multi"], ids=["mean", "EMA", "multi"])
@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "classification"])
def test_averaged_model_in_a_plain_loop(folder, kind, use_buffers, average):
    task, data = setting(kind, folder)
    functions = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if average == "multi" else {"avg_fn": average}
    averaged = AveragedModel(task, use_buffers=use_buffers, **functions)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    if kind == "softmax":
        batches = list(data.train_dataloader())
    else:
        batches = [(torch.randn(8, 6), torch.arange(8), torch.arange(k, k + 8)) for k in range(0, 24, 8)]
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        task.training_step(batch, number).backward()
        optimizer.step()
        averaged.update_parameters(task)
        before = duals(task)
        averaged.module.training_step(batch, number)  # reads ν, though in training mode
        assert_equal(duals(task), before)
        assert_equal(duals(averaged.module), before)
    task.double().float()
    assert next(iter(averaged.module.duals.values())).nu is next(iter(task.duals.values())).nu


def test_other_copies_are_on_their_own():
    task = SoftmaxTask(8)
    copied = copy.deepcopy(task)
    task.training_step((torch.randn(2, 4), torch.tensor([0, 1]), torch.tensor([0, 1])), 0)
    assert not copied.duals["nu"].visited.any()
    assert int(task.duals["nu"].visited.sum()) == 2
    assert not copied.duals["nu"].is_shared


@pytest.mark.parametrize("name", ["EMA", "mean"])
@pytest.mark.parametrize("kind", ["softmax", "auto", "classification"])
def test_checkpoints(folder, kind, name):
    def saves():
        return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)

    whole = fit(kind, folder, CALLBACKS[name](), saves(), epochs=3, enable_checkpointing=True)
    checkpoint = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    for key in duals(whole):
        torch.testing.assert_close(
            checkpoint["state_dict"][key], checkpoint["current_model_state"][key], rtol=0, atol=0
        )
    resumed = fit(kind, folder, CALLBACKS[name](), epochs=3, ckpt_path=folder / "epoch=1.ckpt")
    assert_equal(whole.state_dict(), resumed.state_dict())


def run(folder, config, *arguments):
    """A run of the command line with constant rates; its last checkpoint."""
    main(
        [
            *("fit", "--config", str(ROOT / "configs" / config), "--trainer.default_root_dir", str(folder)),
            *("--trainer.accelerator=cpu", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"),
            *("--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging", "--trainer.callbacks.decay=0.9"),
            *("--model.lr_schedule=constant", "--dual", "SCENT", "--dual.log_alpha=0", *arguments),
        ]
    )
    return folder / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"


REGRESSION = ["dro_diabetes.yaml", "--trainer.log_every_n_steps=5", "--model.warmup_epochs=0"]
SPARSE = ["xc_synthetic.yaml", "--data.num_classes=50", "--data.rows=300", "--data.val_rows=20", "--data.batch_size=64"]
SPARSE += ["--model.momentum=0.9", "--model.negatives=uniform", "--model.num_negatives=8", "--model.lr=0.01"]
SPARSE += ["--model.include_target=false"]  # gradual, the loss is another where the run is longer


@pytest.mark.parametrize("kind", [REGRESSION, SPARSE], ids=["regression", "row-sparse"])
def test_the_command_line_resumes_a_finished_run(tmp_path, kind):
    """The average takes the place of the weights once a run is over: what is resumed needs the weights as well."""
    whole = torch.load(run(tmp_path / "whole", *kind, "--trainer.max_epochs=4"), weights_only=True)
    first = run(tmp_path / "half", *kind, "--trainer.max_epochs=2")
    rest = run(tmp_path / "rest", *kind, "--trainer.max_epochs=4", "--ckpt_path", str(first))
    resumed = torch.load(rest, weights_only=True)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_equal(whole[key], resumed[key])


class Stop(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= 4


@pytest.mark.parametrize(
    "end",
    [{"max_epochs": 2}, {"max_steps": 4}, {"max_epochs": 9, "callbacks": [Stop()]}],
    ids=["epochs", "steps", "stopped"],
)
def test_the_last_checkpoint_has_the_weights_however_the_run_ends(tmp_path, end):
    def ended(*callbacks):
        task, data = setting("softmax", tmp_path)
        given = {**end, "callbacks": [*end.get("callbacks", []), *callbacks], "default_root_dir": tmp_path}
        quiet_trainer(enable_checkpointing=True, **given).fit(task, data)
        return task

    plain, averaged = ended(LastCheckpoint()), ended(CALLBACKS["EMA"](), LastCheckpoint())
    checkpoint = torch.load(tmp_path / "checkpoints" / "last-v1.ckpt", weights_only=True)
    assert_equal(checkpoint["current_model_state"], plain.state_dict())
    assert_equal(checkpoint["state_dict"], averaged.state_dict())
    assert (averaged.linear.weight != plain.linear.weight).any()


def test_the_average_of_clip_leaves_the_task_with_its_temperature(folder):
    L.seed_everything(0, verbose=False)
    task, data = SETTINGS["contrastive"](folder / "data", 16)
    task.tau_lr = 0.02
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    quiet_trainer(max_epochs=2, callbacks=[CALLBACKS["mean"](), saves], enable_checkpointing=True).fit(task, data)
    state = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    assert (state["state_dict"]["tau"] != state["current_model_state"]["tau"]).all()
    for weights in (state["state_dict"], state["current_model_state"], task.state_dict()):
        assert weights["model.logit_scale"] == -weights["tau"].log()


@pytest.mark.parametrize("dual", [SCENT(0.0), SCENT()], ids=repr)
@pytest.mark.parametrize(("if_changed", "kept"), [("grow", 24), ("reset", 0)])
def test_a_checkpoint_of_averages_where_the_data_have_changed(folder, dual, if_changed, kept):
    class Visited(L.Callback):
        def on_train_start(self, trainer, module):
            self.at_start = duals(module)

    def run(task, rows, *callbacks, **arguments):
        trainer = quiet_trainer(limit_val_batches=0, callbacks=[CALLBACKS["EMA"](), *callbacks], **arguments)
        trainer.fit(task, SoftmaxData(rows), ckpt_path=folder / "a.ckpt" if rows > 24 else None)

    old, new, seen = SoftmaxTask(24, dual), SoftmaxTask(30, dual), Visited()
    run(old, 24, ModelCheckpoint(folder, filename="a"), max_epochs=2, enable_checkpointing=True)
    new.if_changed_data = if_changed
    run(new, 30, seen, max_epochs=3)
    assert int(seen.at_start["duals.nu.visited"].sum()) == kept
    assert torch.equal(seen.at_start["duals.nu.nu"][:kept], old.duals["nu"].nu[:kept])
