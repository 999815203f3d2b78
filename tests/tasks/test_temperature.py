"""What a fit of robust regression says of its temperature, at its start and its end."""

import logging
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.duals import SCENT
from scent_lightning.functional import effective_rows
from scent_lightning.tasks import DRORegressionTask
from scent_lightning.tasks.temperature import TemperatureOfRows
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers


def table(folder, unit=1.0, outlier=0.0, rows=200):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 2))
    y = x @ [1.0, -2.0] + random.normal(size=rows)
    y[3] += outlier
    path = folder / "rows.csv"
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": unit * y}).to_csv(path, index=False)
    return path


def at_least_squares(path):
    frame = pd.read_csv(path)
    rows = np.hstack([frame[["a", "b"]].to_numpy(), np.ones((len(frame), 1))])
    solution = np.linalg.lstsq(rows, frame["y"].to_numpy(), rcond=None)[0]
    return torch.from_numpy((rows @ solution - frame["y"].to_numpy()) ** 2)


def fit(path, tau, epochs=1, network=None, initial="least_squares", logger=False, **data):
    module = TabularRegressionDataModule(str(path), target="y", batch_size=50, **data)
    task = DRORegressionTask(2, SCENT(), tau=tau, network=network, initial=initial)
    trainer = quiet_trainer(max_epochs=epochs, logger=logger)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(task, module)
    said = [str(each.message) for each in caught if "tau" in str(each.message)]
    return task, trainer, said


@pytest.mark.parametrize(
    "start",
    [
        {},
        {"initial": "zeros"},
        {"network": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))},
    ],
)
def test_the_curve_is_that_of_least_squares(tmp_path, caplog, start):
    path = table(tmp_path)
    with caplog.at_level(logging.INFO):
        task, _, warned = fit(path, 20.0, logger=TensorBoardLogger(tmp_path), **start)
    losses = at_least_squares(path)
    torch.testing.assert_close(task.temperature.losses.sort().values, losses.sort().values, rtol=1e-4, atol=1e-5)
    said = task.temperature.in_words()
    rows = effective_rows(losses, 20.0).item()
    assert said.startswith(f"tau 20 looks at {rows:.1f} of 200 rows at least squares; at 1 %, 10 %, 50 % of them with")
    assert f"temperature: {said}" in caplog.text
    for part, tau in task.temperature.temperatures.items():
        assert effective_rows(losses, tau).item() == pytest.approx(200 * part, rel=2e-3)
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["temperature/effective_rows"]
    assert warned == []


def test_units_that_do_not_fit_are_told_before_training(tmp_path):
    """A target in dollars with a temperature for hundreds of thousands of them."""
    path = table(tmp_path, unit=1e5)
    _, _, (warned, *_) = fit(path, 2.0)
    assert "times below the largest loss" in warned
    assert "float32 cannot hold such exponents" in warned
    tenth = float(warned.split("with tau ")[1].split()[0])
    assert effective_rows(at_least_squares(path), tenth).item() == pytest.approx(20, rel=0.02)
    assert fit(path, tenth)[2] == []


def test_one_row_that_carries_the_objective_is_told_at_the_end(tmp_path):
    path = table(tmp_path, outlier=300.0)
    _, trainer, warned = fit(path, 5.0)
    assert trainer.callback_metrics["val/effective_rows"] < 2
    assert len(warned) == 1
    assert warned[0].startswith("the objective hangs on 1.0 effective rows")
    assert fit(path, 1e5)[2] == []  # at a temperature that looks at all


def test_the_metric_is_that_of_the_predictions(tmp_path):
    path = table(tmp_path)
    task, trainer, _ = fit(path, 2.0, epochs=5)
    logged = trainer.callback_metrics["val/effective_rows"].item()
    weights = torch.cat([batch["weight"] for batch in trainer.predict(task, trainer.datamodule)])
    assert logged == pytest.approx(1 / weights.square().sum().item())


@pytest.mark.parametrize("losses", [[0.0] * 50, [1.0] * 40 + [0.0] * 20, [7.0] * 3, [0.0, 1e30]])
def test_losses_that_hardly_differ_or_hardly_fit(losses):
    found = TemperatureOfRows(torch.tensor(losses), 1.0)
    assert found.in_words().startswith("tau 1 looks at ")
    assert (found.warning() is not None) == (max(losses) > 1e6)
    assert found.figure().axes


def test_millions_of_rows_are_thinned_out():
    losses = -torch.log1p(-(torch.arange(3_000_000, dtype=torch.float64) + 0.5) / 3_000_000)
    found = TemperatureOfRows(losses, 10.0)
    assert len(found.losses) == 1_000_000
    assert found.temperatures[0.5] < found.tau


def _in_two(rank):
    task = DRORegressionTask(10, SCENT(), tau=0.3)
    data = TabularRegressionDataModule("diabetes", batch_size=64)
    ddp_trainer(max_epochs=1, limit_val_batches=0).fit(task, data)
    return task.temperature.losses


def test_processes_see_all_rows():
    seen = under_two_trainers(_in_two)
    task = DRORegressionTask(10, SCENT(), tau=0.3)
    quiet_trainer(max_epochs=1, limit_val_batches=0).fit(task, TabularRegressionDataModule("diabetes", batch_size=64))
    whole = task.temperature
    for losses in seen:
        assert TemperatureOfRows(losses, 0.3).rows(0.3) == pytest.approx(whole.rows(0.3), rel=0.02)


def test_random_numbers_are_as_without_it(tmp_path):
    """A network's dropout draws what it drew before the losses were looked at."""
    path = table(tmp_path)

    def weights(looks):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        task = DRORegressionTask(2, SCENT(), tau=2.0, network=network)
        if not looks:
            task._look_at_temperature = lambda *_: None
        module = TabularRegressionDataModule(str(path), target="y", batch_size=50)
        quiet_trainer(max_epochs=2, limit_val_batches=0).fit(task, module)
        return network[2].weight.detach()

    assert torch.equal(weights(True), weights(False))
