"""The runs of all seeds at once are those of the Trainer."""

import math
from pathlib import Path

import lightning as L
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# Each update, clipped and not, both weight steps, a step size that is found, both schedules of the learning rate, one
# that is found, and a momentum that increases.
METHODS = [
    ("BSGD", "abalone_tau1.0"),
    ("SoftplusASGD", "abalone_tau5.0"),
    ("UMax", "abalone_tau1.0"),
    ("SOX proximal", "abalone_tau0.2"),
    ("SoftplusASGD proximal", "abalone_tau1.0"),
    ("SCENT clip", "abalone_tau0.2"),
    ("SCENT tuned", "abalone_tau5.0"),
    ("SCENT auto", "abalone_tau1.0"),
    ("SCENT default", "abalone_tau0.2"),
    ("SCENT auto lr", "abalone_tau1.0"),
    ("SCENT default", "abalone_tau1.0"),
]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import reproduce_dro_table

    # In this process the messages are to go on, and other tests to have their threads.
    monkeypatch.setattr(reproduce_dro_table, "silent_process", lambda seed: L.seed_everything(seed, verbose=False))
    return reproduce_dro_table


@pytest.mark.parametrize(("method", "cell"), METHODS)
def test_seeds_at_once_end_as_under_the_trainer(method, cell, table, data_dir):
    epochs = 60 if (method, cell) == ("SCENT default", "abalone_tau1.0") else 3  # of 42 steps: after 1,500 it increases
    together = table.run_at_once(cell, method, [3, 5], epochs, str(data_dir))
    alone = table.run(cell, method, 5, epochs, str(data_dir))[0]
    assert together[1]["objective"] == pytest.approx(alone["objective"], rel=2e-5)
    assert together[0]["objective"] != pytest.approx(together[1]["objective"], rel=1e-4)
    assert {name: together[1][name] for name in ("cell", "method", "seed", "epochs")} == {
        name: alone[name] for name in ("cell", "method", "seed", "epochs")
    }


def test_a_seed_that_diverges_leaves_the_others_alone(table, data_dir):
    """ASGD overflows with some orders and not with others, which go on as under the Trainer."""
    seeds = list(range(6))
    found = [row["objective"] for row in table.run_at_once("abalone_tau1.0", "ASGD", seeds, 5, str(data_dir))]
    assert any(map(math.isinf, found))
    assert not all(map(math.isinf, found))
    for seed in (found.index(math.inf), next(i for i, value in enumerate(found) if math.isfinite(value))):
        alone = table.run("abalone_tau1.0", "ASGD", seed, 5, str(data_dir))[0]["objective"]
        assert found[seed] == pytest.approx(alone, rel=1e-3)
