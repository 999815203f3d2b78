"""A checkpoint goes on under another number of processes, in another precision, with other data, in a later format."""

from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from scent_lightning.data import FeatureDataModule, TabularRegressionDataModule
from scent_lightning.duals import SOX
from scent_lightning.errors import InputError
from scent_lightning.runs.reading import read_run
from scent_lightning.tasks import DRORegressionTask, ExtremeClassificationTask
from tests.forked import finished, start_command
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, quiet_trainer, under_trainers
from tests.settings import SETTINGS, regression

FORMATS = sorted((Path(__file__).parent / "checkpoints").glob("format_*.ckpt"))
GLOBAL_BATCH, EPOCHS, STOP = 16, 4, 11  # of 7 steps an epoch


def _fit(rank, folder, setting, world, run, resume):
    """Train to the end, keeping the state of step STOP if it is not resumed from there."""
    L.seed_everything(3, verbose=False)
    task, data = setting(folder, GLOBAL_BATCH // world)
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    keep = ModelCheckpoint(run, filename="kept", every_n_train_steps=STOP, save_top_k=-1)
    callbacks = [] if resume else [keep]
    trainer = make(max_epochs=EPOCHS, limit_val_batches=0, callbacks=callbacks, enable_checkpointing=not resume)
    trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
    return {key: value.double().numpy() for key, value in task.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regression", "classification", "ranking"])
def test_another_number_of_processes(name, tmp_path):
    """In the middle of an epoch from one to two and from two to one; the end is that of the run that never changed."""
    fit = partial(_fit, folder=tmp_path, setting=SETTINGS[name])
    alone = fit(0, world=1, run=tmp_path / "one", resume=None)
    first, second = under_trainers(partial(fit, world=2, run=tmp_path / "two", resume=None), 2)
    to_two = under_trainers(partial(fit, world=2, run=None, resume=str(tmp_path / "one" / "kept.ckpt")), 2)
    to_one = fit(0, world=1, run=None, resume=str(tmp_path / "two" / "kept.ckpt"))
    for found in (first, second, *to_two, to_one):
        found.pop("ddp_placeholder.0", None)
        assert set(found) == set(alone)
        for key, value in found.items():
            np.testing.assert_allclose(value, alone[key], rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("before", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("after", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_another_precision(before, after, tmp_path):
    data = SoftmaxData()
    task = SoftmaxTask(data.num_anchors, SOX(0.5))
    trainer = quiet_trainer(max_epochs=2, precision=before, limit_val_batches=0)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved["duals.nu.nu"].dtype == torch.float32
    resumed = SoftmaxTask(data.num_anchors, SOX(0.5))

    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            assert torch.equal(pl_module.duals["nu"].nu, saved["duals.nu.nu"])

    trainer = quiet_trainer(max_epochs=4, precision=after, limit_val_batches=0, callbacks=[Before()])
    trainer.fit(resumed, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert resumed.duals["nu"].nu.dtype == torch.float32
    assert resumed.duals["nu"].nu.isfinite().all()
    assert not torch.equal(resumed.duals["nu"].nu, saved["duals.nu.nu"])


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.stem)
def test_every_format_goes_on(path):
    saved = torch.load(path, weights_only=True)
    data = SoftmaxData()
    task = SoftmaxTask.load_from_checkpoint(path)
    assert torch.equal(task.duals["nu"].nu, saved["state_dict"]["duals.nu.nu"])
    assert repr(task.duals["nu"].update) == "SOX(gamma=0.5)"
    resumed = SoftmaxTask(data.num_anchors, SOX(0.5))
    trainer = quiet_trainer(max_epochs=3, limit_val_batches=0)
    trainer.fit(resumed, data, ckpt_path=path, weights_only=True)
    assert trainer.global_step == saved["global_step"] + 3
    assert not torch.equal(resumed.duals["nu"].nu, saved["state_dict"]["duals.nu.nu"])


def test_a_format_of_the_future(tmp_path):
    saved = torch.load(FORMATS[-1], weights_only=True)
    saved["scent_lightning"] = {"format": 1000}
    torch.save(saved, tmp_path / "a.ckpt")
    with pytest.raises(InputError, match="format 1000 of a newer scent_lightning; this one knows 0 to"):
        SoftmaxTask.load_from_checkpoint(tmp_path / "a.ckpt")


def test_unknown_way_with_changed_data():
    task = SoftmaxTask(24)
    task.if_changed_data = "ignore"
    with pytest.raises(InputError, match="if_changed_data must be one of error, grow, reset, got 'ignore'"):
        quiet_trainer(max_epochs=3).fit(task, SoftmaxData(), ckpt_path=FORMATS[0], weights_only=True)


@pytest.mark.parametrize("way", ["grow", "reset"])
def test_changed_data(way):
    saved = torch.load(FORMATS[0], weights_only=True)["state_dict"]["duals.nu.nu"]
    data = SoftmaxData(rows=30)
    task = SoftmaxTask(data.num_anchors, SOX(0.5))
    task.if_changed_data = way
    before = {}

    class Before(L.Callback):
        def on_train_start(self, trainer, pl_module):
            dual = pl_module.duals["nu"]
            before.update(nu=dual.nu.clone(), visited=dual.visited.clone())

    trainer = quiet_trainer(max_epochs=3, limit_val_batches=0, callbacks=[Before()])
    trainer.fit(task, data, ckpt_path=FORMATS[0], weights_only=True)
    kept = 24 if way == "grow" else 0
    assert torch.equal(before["nu"][:kept], saved[:kept])
    assert before["visited"].tolist() == [True] * kept + [False] * (30 - kept)
    assert task.duals["nu"].visited.all()
    task.reset_duals()
    assert not task.duals["nu"].visited.any()
    task.grow_duals(40)
    assert task.duals["nu"].num_anchors == 40


@pytest.mark.slow
def test_changed_data_on_the_command_line(tmp_path):
    config = Path(__file__).parent.parent / "configs" / "xc_synthetic.yaml"
    common = ["--config", str(config), "--trainer.limit_val_batches", "0"]
    common += ["--trainer.limit_train_batches", "3", "--data.num_workers", "0"]

    def fit(*arguments):
        return finished(start_command(tmp_path, "fit", *common, *arguments), check=False)

    assert fit("--trainer.max_epochs", "1", "--data.rows", "1000").returncode == 0
    more = ["--trainer.max_epochs", "2", "--data.rows", "1200"]
    more += ["--ckpt_path", "lightning_logs/version_0/checkpoints/last.ckpt"]
    (tmp_path / "before.ckpt").write_bytes((tmp_path / more[-1]).read_bytes())
    refused = fit(*more)
    assert refused.returncode == 2
    assert read_run((tmp_path / more[-1]).parents[1]).status == "finished"
    assert not list(tmp_path.rglob("config_from_step_*"))
    said = refused.stderr.strip().splitlines()[-1]
    assert said.startswith("scent-lightning: error: cannot train dual variable 'nu': the checkpoint holds 1000 anchors")
    assert 'set if_changed_data (--if_changed_data) to "grow" if rows were appended to it' in said
    grown = fit(*more, "--if_changed_data", "grow")
    assert grown.returncode == 0, grown.stderr
    states = [
        torch.load(tmp_path / path, weights_only=True)["state_dict"]
        for path in ("before.ckpt", "lightning_logs/version_0/checkpoints/last.ckpt")
    ]
    visited = [state["duals.nu.visited"] for state in states]
    assert visited[1].shape == (1200,)
    assert (visited[1][:1000] >= visited[0]).all()
    assert visited[1].sum() > visited[0].sum()


def test_grown_in_memory(tmp_path):
    task, _ = regression(tmp_path, 16)
    task.grow_duals(1)
    assert task.duals["nu"].num_anchors == 1


def _table(path, rows):
    generator = np.random.default_rng(0)
    table = generator.standard_normal((60, 3))
    np.savetxt(path, table[rows], delimiter=",", header="a,b,y", comments="")
    return TabularRegressionDataModule(str(path), target="y", batch_size=10)


def _features(path, rows):
    generator = np.random.default_rng(0)
    (path / "train").mkdir(parents=True)
    np.save(path / "train" / "features.npy", generator.standard_normal((60, 4)).astype(np.float32)[rows])
    np.save(path / "train" / "labels.npy", (np.arange(60) % 5)[rows])
    return FeatureDataModule(str(path), batch_size=10)


OTHER_ROWS = {
    "the same": (range(40), "none"),
    "as many others": (range(20, 60), "replaced"),
    "one other": ([*range(17), 59, *range(18, 40)], "replaced"),
    "another order": (range(39, -1, -1), "replaced"),
    "appended": (range(50), "appended"),
    "put before the others": ([50, 51, *range(40)], "replaced"),
    "put in the middle": ([*range(20), 55, *range(20, 40)], "replaced"),
    "fewer": (range(30), "replaced"),
}


@pytest.mark.parametrize("kind", [_table, _features])
@pytest.mark.parametrize("rows", OTHER_ROWS)
@pytest.mark.parametrize("allowed", ["error", "grow", "reset"])
def test_rows_that_changed(kind, rows, allowed, tmp_path):
    """As many other rows are as wrong as more or fewer: what belongs to a row is by its place."""

    def fit(data, resume=None, epochs=1):
        data.setup("fit")
        if kind is _table:
            task = DRORegressionTask(data.num_features, SOX(0.5), initial="zeros")
        else:
            task = ExtremeClassificationTask(data.num_features, 5, data.num_anchors, SOX(0.5))
        task.if_changed_data = allowed
        trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0)
        trainer.fit(task, datamodule=data, ckpt_path=resume, weights_only=True)
        return trainer

    fit(kind(tmp_path / "before", list(range(40)))).save_checkpoint(tmp_path / "a.ckpt")
    chosen, change = OTHER_ROWS[rows]
    after = kind(tmp_path / "after", list(chosen))
    goes_on = change == "none" or allowed == "reset" or (change, allowed) == ("appended", "grow")
    if goes_on:
        assert fit(after, tmp_path / "a.ckpt", 2).current_epoch == 2
    else:
        with pytest.raises(InputError, match="set if_changed_data"):
            fit(after, tmp_path / "a.ckpt", 2)
