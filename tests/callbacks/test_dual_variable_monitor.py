"""The monitor's event file, read back with TensorBoard's own reader and checked against the run."""

import math
import re

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from scent_lightning import functional as F
from scent_lightning.callbacks import DualVariableMonitor, dual_variable_monitor
from scent_lightning.callbacks.dual_variable_monitor import batch_statistics, table_statistics
from scent_lightning.duals import BSGD, SCENT, SOX, DualVariable, SoftplusASGD
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

BATCH_TAGS = ("mean", "min", "max", "std", "change", "weight", "weight_max", "guarded", "kappa", "effective_samples")
FEW_TAGS = {"mean", "weight", "weight_max", "guarded", "effective_samples", "gamma"}
FEW_TABLE_TAGS = {"table_mean", "table_q01", "table_q50", "table_q99", "visited"}
TABLE_TAGS = ("table_mean", "table_q01", "table_q25", "table_q50", "table_q75", "table_q99", "visited")


class Recorder(L.Callback):
    """What the tags must hold, worked out anew from the batch and the table before and after the step."""

    def __init__(self):
        self.expected = {}
        self.tables = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        variable = pl_module.duals["nu"]
        features, labels, index = batch
        logits = pl_module.linear(features)
        scores = (logits - logits.gather(1, labels.unsqueeze(1))).detach()
        log_mean = F.log_mean_exp(scores).float()
        self.sums = scores.double().exp().sum(dim=1), (2 * scores.double()).exp().sum(dim=1), scores.shape[1]
        self.before = torch.where(variable.visited[index], variable.nu[index], log_mean), log_mean, index

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before, log_mean, index = self.before
        update = pl_module.duals["nu"].update
        nu = pl_module.duals["nu"].nu[index]
        progress = (trainer.global_step - 1) / 9
        log_alpha = update.step_sizes(progress)["log_alpha"]
        plain = F.proximal_mirror_descent_step(before, log_mean, log_alpha).float()
        weight = torch.exp(log_mean - nu)
        gamma = torch.sigmoid(before + log_alpha)
        sums, squares, samples = self.sums
        self.expected[trainer.global_step - 1] = {
            "mean": nu.mean(),
            "min": nu.min(),
            "max": nu.max(),
            "std": nu.std(unbiased=False),
            "change": (nu - before).abs().mean(),
            "weight": weight.mean(),
            "weight_max": weight.max(),
            "guarded": (nu > plain + 1e-5).float().mean(),
            "kappa": (samples * squares / sums**2).mean(),
            "effective_samples": (sums**2 / squares).mean(),
            "log_alpha": torch.tensor(log_alpha),
            "effective_gamma": gamma.mean(),
            "effective_gamma_min": gamma.min(),
            "effective_gamma_max": gamma.max(),
        }

    def on_train_epoch_end(self, trainer, pl_module):
        variable = pl_module.duals["nu"]
        self.tables[trainer.global_step - 1] = variable.nu[variable.visited].numpy().copy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    L.seed_everything(0, verbose=False)
    data = SoftmaxData(rows=30, batch_size=8)
    task = SoftmaxTask(30, SCENT(-2.0, schedule="cosine", max_log_weight=0.3), lr=0.3)
    recorder, logger = Recorder(), TensorBoardLogger(folder)
    # 24 of the 30 rows an epoch: some anchors stay unvisited in the first.
    trainer = quiet_trainer(
        max_epochs=3,
        limit_train_batches=3,
        limit_val_batches=0,
        log_every_n_steps=2,
        logger=logger,
        callbacks=[recorder, DualVariableMonitor(detail=True)],
    )
    trainer.fit(task, data)
    events = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    return events, recorder


def test_batch_tags_have_the_right_values_at_logging_steps(run):
    events, recorder = run
    names = (*BATCH_TAGS, "log_alpha", "effective_gamma", "effective_gamma_min", "effective_gamma_max")
    for name in names:
        found = {event.step: event.value for event in events.Scalars(f"dual/nu/{name}")}
        assert list(found) == [1, 3, 5, 7]
        for step, value in found.items():
            assert value == pytest.approx(recorder.expected[step][name].item(), rel=1e-4, abs=1e-5), (name, step)
    assert max(event.value for event in events.Scalars("dual/nu/guarded")) > 0


def test_table_tags_once_an_epoch(run):
    events, recorder = run
    assert list(recorder.tables) == [2, 5, 8]
    for step, values in recorder.tables.items():
        expected = {"table_mean": values.mean(), "visited": values.size / 30}
        for quantile in (1, 25, 50, 75, 99):
            expected[f"table_q{quantile:02d}"] = np.quantile(values, quantile / 100)
        assert set(expected) == set(TABLE_TAGS)
        for name, value in expected.items():
            found = {event.step: event.value for event in events.Scalars(f"dual/nu/{name}")}
            assert found[step] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, step)
    assert events.Scalars("dual/nu/visited")[0].value == pytest.approx(24 / 30)


def test_histogram_of_visited_anchors(run):
    events, recorder = run
    histograms = events.Histograms("dual/nu/histogram")
    assert [event.step for event in histograms] == list(recorder.tables)
    for event in histograms:
        values = recorder.tables[event.step]
        assert event.histogram_value.num == values.size
        assert event.histogram_value.min == pytest.approx(values.min())
        assert event.histogram_value.max == pytest.approx(values.max())
        assert sum(event.histogram_value.bucket) == values.size


def test_other_loggers_get_the_scalars(tmp_path):
    data = SoftmaxData()
    logger = CSVLogger(tmp_path)
    quiet_trainer(
        max_epochs=2, log_every_n_steps=1, logger=logger, callbacks=[DualVariableMonitor()], limit_val_batches=0
    ).fit(SoftmaxTask(24, SOX(0.5)), data)
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    logged = {name for name in header if name.startswith("dual/")}
    assert logged == {f"dual/nu/{name}" for name in FEW_TAGS | FEW_TABLE_TAGS}


def test_no_histogram_when_switched_off_and_no_logger_needed(tmp_path):
    data = SoftmaxData()
    logger = TensorBoardLogger(tmp_path)
    quiet_trainer(max_epochs=1, logger=logger, callbacks=[DualVariableMonitor(histogram=False)]).fit(
        SoftmaxTask(24), data
    )
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["histograms"] == []
    quiet_trainer(max_epochs=1, callbacks=[DualVariableMonitor()]).fit(SoftmaxTask(24), data)


class OneAnchor(SoftmaxTask):
    """All rows are samples of one anchor."""

    def __init__(self, dual):
        super().__init__(1, dual)

    def loss(self, batch):
        features, _, _ = batch
        return self.entropic_risk("nu", self.linear(features)[:, :1].T, torch.zeros(1, dtype=torch.int64))


def events_of(task, tmp_path, limit_val_batches=0, **arguments):
    logger = TensorBoardLogger(tmp_path)
    quiet_trainer(
        max_epochs=3,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[DualVariableMonitor(**arguments)],
        limit_val_batches=limit_val_batches,
    ).fit(task, SoftmaxData())
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_one_anchor_has_six_tags_and_no_histogram(tmp_path):
    events = events_of(OneAnchor(SCENT()), tmp_path)
    found = {tag for tag in events.Tags()["scalars"] if tag.startswith("dual/")}
    names = {"mean", "weight", "guarded", "effective_samples", "log_alpha", "effective_gamma"}
    assert found == {f"dual/nu/{name}" for name in names}
    assert not events.Tags()["histograms"]
    # In the first epoch of "auto" α is infinite, which no curve can show.
    steps = [event.step for event in events.Scalars("dual/nu/log_alpha")]
    assert 0 < len(steps) < len(events.Scalars("dual/nu/effective_gamma"))
    assert all(math.isfinite(event.value) for event in events.Scalars("dual/nu/log_alpha"))


def test_detail_of_one_anchor(tmp_path):
    events = events_of(OneAnchor(SCENT(0.0)), tmp_path, detail=True)
    assert {f"dual/nu/{name}" for name in (*BATCH_TAGS, *TABLE_TAGS)} <= set(events.Tags()["scalars"])


def layouts(events):
    """Each layout that was written, in order: charts by their titles, for each category by its title."""
    found = []
    for event in events.Tensors("custom_scalars__config__"):
        content = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
        found.append({each.title: {chart.title: chart for chart in each.chart} for each in content.category})
    return found


@pytest.mark.parametrize(("task", "chart"), [(SoftmaxTask(24), "margin"), (OneAnchor(SOX(0.5)), "multiline")])
def test_the_layout_names_tags_that_are_there(task, chart, tmp_path):
    events = events_of(task, tmp_path)
    tags = events.Tags()["scalars"]
    run, dual = layouts(events)[-1].items()
    assert (run[0], dual[0]) == ("training and validation", "dual variable nu")
    nu, *charts = dual[1].values()
    assert nu.WhichOneof("content") == chart
    if chart == "margin":
        (series,) = nu.margin.series
        assert {series.value, series.lower, series.upper} == {f"dual/nu/table_q{q}" for q in ("50", "01", "99")}
        assert {series.value, series.lower, series.upper} <= set(tags)
    for each in (*charts, *([] if chart == "margin" else [nu])):
        for pattern in each.multiline.tag:
            assert any(re.search(pattern, tag) for tag in tags), pattern


class Named(SoftmaxTask):
    """Logs under given names: two in training steps, two in validation."""

    def __init__(self, train, val):
        super().__init__(24)
        self.names = train, val

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for name in self.names[0]:
            self.log(name, loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        for name in self.names[1]:
            self.log(name, 1.0)


@pytest.mark.parametrize(
    ("train", "val", "charts"),
    [
        (
            ("train/loss", "train/error"),
            ("val/error", "val/recall@20"),
            {
                "loss": {"train/loss_step", "train/loss_epoch"},
                "error": {"train/error_step", "train/error_epoch", "val/error"},
                "recall@20": {"val/recall@20"},
            },
        ),
        (("train_loss",), ("val_loss",), {"loss": {"train_loss_step", "train_loss_epoch", "val_loss"}}),
        ((), ("val/F(1)", "val/F(1)+"), {"F(1)": {"val/F(1)"}, "F(1)+": {"val/F(1)+"}}),
        ((), ("mine",), {"loss": set(), "validation": set()}),
    ],
)
def test_each_metric_has_its_chart_once_its_name_is_known(train, val, charts, tmp_path):
    """Of a module of one's own, whatever its names; training and validation share one, a longer name is another."""
    events = events_of(Named(train, val), tmp_path, limit_val_batches=1)
    first, *_, last = layouts(events)
    assert list(first["training and validation"]) == ["loss", "validation"]
    tags = events.Tags()["scalars"]
    found = {
        title: {tag for tag in tags for pattern in chart.multiline.tag if re.match(pattern, tag)}
        for title, chart in last["training and validation"].items()
    }
    assert found == charts
    assert len(layouts(events)) <= 3  # not one an epoch


def test_a_module_without_duals_is_left_alone(tmp_path):
    class Plain(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.linear(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet_trainer(
        max_epochs=1, logger=CSVLogger(tmp_path), callbacks=[DualVariableMonitor()], limit_val_batches=0
    )
    trainer.fit(Plain(), SoftmaxData())


@pytest.mark.parametrize("update", [BSGD(), SoftplusASGD(0.1, 1e-3, max_log_weight=1.0)], ids=repr)
def test_statistics_of_other_updates(update):
    variable = DualVariable(6, update)
    scores = 3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    variable.visited[:3] = True
    variable.entropic_risk(scores, torch.tensor([0, 1, 2, 5]), mask)
    found = batch_statistics(variable, variable.last_step)
    nu = variable.nu[[0, 1, 5]]  # row 2 had no sample
    log_mean = F.log_mean_exp(scores)[[0, 1, 3]]
    assert found["mean"] == pytest.approx(nu.mean().item(), rel=1e-6)
    assert found["weight"] == pytest.approx((log_mean - nu).exp().mean().item(), rel=1e-6)
    if update.max_log_weight is None:
        assert found["guarded"] == 0
    else:
        raised = nu <= log_mean - 1.0 + 1e-5
        assert found["guarded"] == pytest.approx(raised.double().mean().item())


def test_statistics_of_nothing():
    variable = DualVariable(3, SCENT(0.0))
    variable.entropic_risk(torch.zeros(2, 2), torch.tensor([0, 1]), torch.zeros(2, 2, dtype=torch.bool))
    assert batch_statistics(variable, variable.last_step) == {}
    assert table_statistics(variable, np.zeros(0, dtype=np.float32)) == {"visited": 0.0}


def test_statistics_of_a_large_table_are_those_of_a_part(monkeypatch, tmp_path):
    monkeypatch.setattr(dual_variable_monitor, "MOST_ANCHORS", 10)
    task = SoftmaxTask(100)
    task.duals["nu"].scatter(torch.arange(0, 100, 2), torch.arange(0.0, 100.0, 2.0))
    logger = CSVLogger(tmp_path)
    DualVariableMonitor().on_train_epoch_end(quiet_trainer(logger=logger), task)
    logger.save()
    logged = pd.read_csv(f"{logger.log_dir}/metrics.csv").iloc[0]
    assert logged["dual/nu/visited"] == 0.5
    assert logged["dual/nu/table_mean"] == 45.0  # of 0, 10, …, 90
    assert logged["dual/nu/table_q50"] == 45.0


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.nan] * 3, [1e30, -2e35], [0.0], [2.5] * 4], ids=str)
def test_a_table_of_any_values(values, tmp_path):
    """Infinite, beyond TensorBoard's bins, or all the same: statistics end no run, and what is finite is drawn."""
    task = SoftmaxTask(len(values))
    task.duals["nu"].nu[:] = torch.tensor(values)
    task.duals["nu"].visited[:] = True
    trainer = quiet_trainer(logger=TensorBoardLogger(tmp_path), max_epochs=1)
    monitor = DualVariableMonitor(detail=True)
    monitor.on_train_epoch_end(trainer, task)
    trainer.logger.experiment.flush()
    events = EventAccumulator(trainer.logger.log_dir, size_guidance={"histograms": 0})
    events.Reload()
    assert events.Tags()["scalars"]
    drawn = events.Tags()["histograms"]
    finite = sum(math.isfinite(value) for value in values)
    assert bool(drawn) == (finite > 0)
    if drawn:
        assert events.Histograms("dual/nu/histogram")[0].histogram_value.num == finite
