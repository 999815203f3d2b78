"""One, two and four processes on the same global batches end with the same weights and the same ν."""

from functools import partial

import lightning as L
import pytest
import torch

from tests.helpers import ddp_trainer, quiet_trainer, under_trainers
from tests.settings import SETTINGS, classification

GLOBAL_BATCH, STEPS = 16, 200  # of 101 rows: the last batch of an epoch has 5, in uneven shares


def _fit(rank, folder, setting, world, precision):
    L.seed_everything(3, verbose=False)
    task, data = setting(folder, GLOBAL_BATCH // world)
    make = quiet_trainer if world == 1 else partial(ddp_trainer, world=world)
    make(max_steps=STEPS, limit_val_batches=0, precision=precision).fit(task, datamodule=data)
    return {key: value.double().numpy() for key, value in task.state_dict().items()}


def assert_equal_states(folder, setting, precision="32-true", worlds=(2, 4), tolerance=1e-5):
    alone = _fit(0, folder, setting, 1, precision)
    for world in worlds:
        for state in under_trainers(
            partial(_fit, folder=folder, setting=setting, world=world, precision=precision), world
        ):
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
def test_same_weights_and_duals(name, tmp_path):
    # AdamW divides by the gradients' size, so that float32's rounding of small ones grows: in float64, but ν.
    assert_equal_states(tmp_path, SETTINGS[name], "64-true" if name == "contrastive" else "32-true")


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["uniform", "all"])
def test_same_weights_and_duals_with_other_negatives(negatives, tmp_path):
    assert_equal_states(tmp_path, partial(classification, negatives=negatives), worlds=(2,))
