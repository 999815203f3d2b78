"""A pilot finds log α, and leaves no trace but that."""

import copy
import math

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.callbacks import DualStepSizeFinder
from scent_lightning.duals import SCENT, SOX
from scent_lightning.errors import DualDivergenceError, InputError
from tests.helpers import SoftmaxData, SoftmaxTask, ddp_trainer, quiet_trainer, under_two_trainers

ROWS, EPOCHS = 48, 40  # six steps an epoch


class Watched(SoftmaxTask):
    """Keeps what training saw, with random numbers of its own and a buffer that no checkpoint has."""

    def __init__(self, dual):
        super().__init__(ROWS, dual)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.seen.append((self.global_step, batch[2].tolist(), torch.rand(1).item(), self.calls.item()))
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(task, *callbacks, epochs=EPOCHS, **arguments):
    trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0, callbacks=list(callbacks), **arguments)
    torch.manual_seed(7)
    trainer.fit(task, SoftmaxData(rows=ROWS))
    return trainer


def task_with(dual):
    torch.manual_seed(0)
    return Watched(dual)


def test_finds_a_value_and_trains_as_if_it_had_been_set():
    finder = DualStepSizeFinder(fraction=0.1)
    found = task_with(SCENT())
    fit(found, finder)
    update = found.duals["nu"].update
    expected = SCENT(finder.log_alpha["nu"], schedule="cosine", max_log_weight=finder.max_log_weight["nu"])
    assert repr(update) == repr(expected)
    assert finder.max_log_weight["nu"] == 1.0  # four visits of an anchor
    by_hand = task_with(copy.deepcopy(update))
    fit(by_hand)
    # The pilot is a run of its own, over a tenth of the steps; what comes after is the run without one.
    pilot, seen = found.seen[:24], found.seen[24:]
    assert [step for step, *_ in pilot] == list(range(24))
    assert seen == by_hand.seen
    assert torch.equal(found.linear.weight, by_hand.linear.weight)
    assert torch.equal(found.duals["nu"].nu, by_hand.duals["nu"].nu)


def test_the_value_is_near_where_nu_settles():
    finder = DualStepSizeFinder(fraction=0.5)
    task = task_with(SCENT())
    fit(task, finder)
    settled = task.duals["nu"].nu.mean().item()
    assert -4.0 < -finder.log_alpha["nu"] - settled < 4.0 + abs(settled) / 2
    curves = finder.curves["nu"]
    assert curves["step"] == list(range(1, 121))
    assert math.isnan(curves["reference"][0])
    references = [value for value in curves["reference"] if not math.isnan(value)]
    assert references == sorted(references, reverse=True)
    assert len({len(values) for values in curves.values()}) == 1


def test_a_number_is_replaced_and_the_rest_of_the_update_stays():
    task = task_with(SCENT(log_alpha=30.0, schedule="cosine", final=-3.0, max_log_weight=1.5))
    finder = DualStepSizeFinder(num_steps=30)
    fit(task, finder)
    found = finder.log_alpha["nu"]
    assert repr(task.duals["nu"].update) == repr(SCENT(found, schedule="cosine", final=-3.0, max_log_weight=1.5))
    assert len(task.seen) == 30 + 240


def test_equal_updates_get_one_value_and_others_none():
    class Two(SoftmaxTask):
        def __init__(self):
            super().__init__(ROWS, SCENT())
            self.add_dual("other", ROWS, SCENT())
            self.add_dual("own", ROWS, SCENT(max_log_weight=2.0))
            self.add_dual("average", ROWS, SOX(0.5))

        def loss(self, batch):
            features, labels, index = batch
            logits = self.linear(features)
            scores = logits - logits.gather(1, labels.unsqueeze(1))
            total = self.entropic_risk("nu", scores, index) + self.entropic_risk("average", scores, index)
            return total + sum(self.entropic_risk(name, scores + 9.0, index) for name in ("other", "own"))

    torch.manual_seed(0)
    task, finder = Two(), DualStepSizeFinder()
    fit(task, finder)
    assert set(finder.log_alpha) == {"nu", "other", "own"}
    assert finder.log_alpha["nu"] == finder.log_alpha["other"]
    assert finder.log_alpha["own"] == pytest.approx(finder.log_alpha["nu"] - 4.5, abs=0.02)  # shifted by 9
    assert repr(task.duals["average"].update) == "SOX(gamma=0.5)"


def test_a_resumed_run_keeps_its_value(tmp_path):
    finder, task = DualStepSizeFinder(), task_with(SCENT())
    trainer = fit(task, finder, epochs=20)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, again = task_with(SCENT()), DualStepSizeFinder()
    trainer = quiet_trainer(max_epochs=30, limit_val_batches=0, callbacks=[again])
    trainer.fit(resumed, SoftmaxData(rows=ROWS), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert again.log_alpha == finder.log_alpha
    assert repr(resumed.duals["nu"].update) == repr(task.duals["nu"].update)
    assert len(resumed.seen) == 60  # no pilot
    plain = fit(task_with(SCENT()), epochs=2)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    late, none = task_with(SCENT()), DualStepSizeFinder()
    trainer = quiet_trainer(max_epochs=4, limit_val_batches=0, callbacks=[none])
    with pytest.warns(UserWarning, match="a run that is resumed and had no pilot"):
        trainer.fit(late, SoftmaxData(rows=ROWS), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    assert none.log_alpha == {}
    assert late.duals["nu"].auto is not None


def test_the_figure(tmp_path):
    finder = DualStepSizeFinder()
    logger = TensorBoardLogger(tmp_path)
    fit(task_with(SCENT()), finder, logger=logger)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert "dual/nu/step_size" in events.Tags()["images"]
    axes = finder.plot("nu", tmp_path / "pilot.png").axes[0]
    assert (tmp_path / "pilot.png").stat().st_size > 5000
    *_, line = axes.get_lines()
    assert line.get_ydata()[0] == -finder.log_alpha["nu"]
    assert f"{-finder.log_alpha['nu']:.2f}" in line.get_label()
    with pytest.raises(InputError, match="that of a dual variable of the pilot \\('nu'\\), got 'image'"):
        finder.plot("image")
    with pytest.raises(InputError, match="\\(none\\), got None"):
        DualStepSizeFinder().plot()


def test_errors(tmp_path):
    for arguments, message in (
        ({"fraction": 0.0}, r"fraction must be a number in \(0, 1\], got 0.0"),
        ({"fraction": "half"}, r"fraction must be a number in \(0, 1\], got 'half'"),
        ({"num_steps": 0}, "num_steps must be None or an integer of at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            DualStepSizeFinder(**arguments)
    with pytest.raises(InputError, match="needs a dual variable that SCENT updates; the module has none"):
        fit(task_with(SOX(0.5)), DualStepSizeFinder())
    with pytest.raises(InputError, match="a pilot of 3 steps is too short"):
        fit(task_with(SCENT()), DualStepSizeFinder(num_steps=3))
    with pytest.warns(UserWarning, match="does nothing in a fast_dev_run"):
        quiet_trainer(fast_dev_run=True, callbacks=[DualStepSizeFinder()]).fit(
            task_with(SCENT()), SoftmaxData(rows=ROWS)
        )


def test_all_is_as_before_after_a_pilot_that_diverges():
    class Diverging(Watched):
        def loss(self, batch):
            return super().loss(batch) * (math.nan if len(self.seen) == 9 else 1.0)

        def training_step(self, batch, batch_idx):
            if len(self.seen) == 9:
                batch = (batch[0] * math.nan, *batch[1:])
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    task, finder = Diverging(SCENT()), DualStepSizeFinder(fraction=0.1)
    weight = task.linear.weight.detach().clone()
    with pytest.raises(DualDivergenceError):
        fit(task, finder)
    assert torch.equal(task.linear.weight, weight)
    assert not bool(task.duals["nu"].visited.any())
    assert repr(task.duals["nu"].update) == "SCENT()"
    assert finder.log_alpha == {}


def _ranks(rank):
    task, finder = task_with(SCENT()), DualStepSizeFinder()
    trainer = ddp_trainer(max_epochs=EPOCHS, limit_val_batches=0, callbacks=[finder])
    trainer.fit(task, SoftmaxData(rows=ROWS, batch_size=4))
    return finder.log_alpha["nu"], task.linear.weight.tolist(), task.duals["nu"].nu.tolist()


def test_the_same_in_every_process():
    first, second = under_two_trainers(_ranks)
    assert first == second
