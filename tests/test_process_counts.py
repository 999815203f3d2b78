"""One, two and four processes on the same global batches end with the same weights and the same ν."""

from functools import partial

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from scent_lightning.data import (
    FeatureDataModule,
    ImageTextDataModule,
    ImbalancedImageDataModule,
    InteractionsDataModule,
    TabularRegressionDataModule,
)
from scent_lightning.duals import MSVR, SOX
from scent_lightning.tasks import CLIPTask, DRORegressionTask, ExtremeClassificationTask, PartialAUCTask, RetrievalTask
from tests.helpers import ddp_trainer, quiet_trainer, under_trainers
from tests.settings import ARCHITECTURE, SETTINGS, classification, letters, lists, moved_by, once, recommendation

GLOBAL_BATCH = 16  # of 101 rows: the last of an epoch's seven batches has 5, in uneven shares
STEPS = {2: 100, 4: 35}  # four processes on fewer cores wait for each other more than they work
THOROUGH = 200
# Adam divides by the gradients' size, so that float32's rounding of small ones grows: in float64, but ν.
PRECISION = {"contrastive": "64-true", "recommendation": "64-true"}


def _fit(rank, folder, setting, world, precision, steps):
    L.seed_everything(3, verbose=False)
    task, data = setting(folder, GLOBAL_BATCH // world)
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    make(max_steps=steps, limit_val_batches=0, precision=precision).fit(task, datamodule=data)
    return {key: value.double().numpy() for key, value in task.state_dict().items()}


def assert_equal_states(folder, setting, thorough, precision="32-true", worlds=(2, 4), tolerance=1e-5, steps=STEPS):
    for world in worlds:
        taken = THOROUGH if thorough else steps[world]
        fit = partial(_fit, folder=folder, setting=setting, precision=precision, steps=taken)
        alone = fit(0, world=1)
        for state in under_trainers(partial(fit, world=world), world):
            state.pop("ddp_placeholder.0", None)
            assert set(state) == set(alone)
            for key, expected in alone.items():
                torch.testing.assert_close(
                    torch.from_numpy(state[key]),
                    torch.from_numpy(expected),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, key=key, world=world: f"{key} with {world} processes: {text}",
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_same_weights_and_duals(name, tmp_path, thorough):
    assert_equal_states(tmp_path, SETTINGS[name], thorough, PRECISION.get(name, "32-true"))


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["uniform", "all"])
def test_same_weights_and_duals_with_other_negatives(negatives, tmp_path, thorough):
    assert_equal_states(tmp_path, partial(classification, negatives=negatives), thorough, worlds=(2,))


@pytest.mark.slow
def test_same_weights_and_duals_of_lists(tmp_path, thorough):
    assert_equal_states(tmp_path, lists, thorough, worlds=(2,), steps={2: 25})


@pytest.mark.slow
def test_same_weights_and_duals_of_queries_with_mined_negatives(tmp_path, thorough):
    options = {"anchor": "query", "num_mined": 3, "mask_hits": True, "include_target": True}
    assert_equal_states(tmp_path, partial(recommendation, **options), thorough, "64-true", worlds=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_same_weights_and_duals_with_previous_weights(name, tmp_path, thorough):
    """The rows of a sparse gradient that are kept are those of all processes."""
    setting, precision = moved_by(MSVR(0.5, 0.5), SETTINGS[name]), PRECISION.get(name, "32-true")
    assert_equal_states(tmp_path, setting, thorough, precision, worlds=(2,), steps={2: 25})


def _evaluations(folder):
    """Tasks and data of each kind to evaluate, with 101 rows, 5 and 1."""
    for rows in (101, 5, 1):
        place = folder / str(rows)
        generator = np.random.default_rng(rows)
        features = generator.standard_normal((rows, 10)).astype(np.float32)
        labels = np.arange(rows) % 2
        if not place.exists():
            (place / "test").mkdir(parents=True)
            np.save(place / "test" / "features.npy", features)
            np.save(place / "test" / "labels.npy", labels)
            pd.DataFrame(features).assign(y=labels).to_csv(place / "t.csv", index=False)
        columns = [str(number) for number in range(10)]
        table = TabularRegressionDataModule(str(place / "t.csv"), target="y", batch_size=1)
        table.load_state_dict({"columns": columns, "rows": 1, "fingerprint": ""})
        L.seed_everything(3, verbose=False)  # what a run draws depends on the number of processes
        yield DRORegressionTask(10, SOX(0.5)), table
        few = FeatureDataModule(str(place), eval_batch_size=16)
        few.load_state_dict({"num_features": 10, "num_classes": 7, "rows": 1, "fingerprint": ""})
        L.seed_everything(3, verbose=False)
        yield ExtremeClassificationTask(10, 7, 1, SOX(0.5), backbone=nn.Linear(10, 10)), few
        if rows > 1:
            binary = ImbalancedImageDataModule(str(place), "features", eval_batch_size=8)
            groups = torch.tensor([0, 1])
            binary.load_state_dict(
                {"classes": [0, 1], "groups": groups, "num_features": 10, "rows": 1, "fingerprint": ""}
            )
            L.seed_everything(3, verbose=False)
            yield PartialAUCTask(1, SOX(0.5), 10), binary
        pairs = ImageTextDataModule(
            source="shapes", image_size=16, tokenizer=letters, rows=8, val_rows=rows, eval_batch_size=16
        )
        L.seed_everything(3, verbose=False)
        yield CLIPTask(8, SOX(0.5), architecture=ARCHITECTURE), pairs
        bought = [
            f"u{row},i{row * i % 11},{s}" for row in range(rows) for i, s in ((1, "train"), (3, "test"), (5, "test"))
        ]
        once(place / "bought", partial(write_lines, ["user,item,split", *bought]))
        items = InteractionsDataModule(
            str(place / "bought" / "t.csv"), "user", "item", split="split", batch_size=1, eval_batch_size=16
        )
        L.seed_everything(3, verbose=False)
        if rows > 1:  # of one row all items are seen
            sizes = items.num_queries, items.num_items, items.num_anchors
            yield RetrievalTask(*sizes, SOX(0.5), ks=(3,)), items


def _evaluate(rank, folder, world):
    found = []
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    for task, data in _evaluations(folder):
        trainer = make()
        trainer.test(task, data, verbose=False)
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.predict(task, data, return_predictions=False)
        found.append(values)
    return found


def write_lines(lines, folder):
    (folder / "t.csv").write_text("\n".join(lines))


@pytest.mark.slow
def test_every_row_is_evaluated_once(tmp_path):
    """Also where a process has no row."""
    alone = _evaluate(0, tmp_path, 1)
    assert len(alone) == 13
    for found in under_trainers(partial(_evaluate, folder=tmp_path, world=2), 2):
        assert len(found) == 13
        for values, expected in zip(found, alone, strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)
