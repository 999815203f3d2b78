"""Every published setting as the command line reads it, against the numbers of the paper."""

import re

import pytest
from lightning import LightningDataModule, LightningModule

from scent_lightning.duals import DualUpdate
from scent_lightning.lightning_cli import ScentCLI
from tests.conftest import ROOT

PUBLISHED = ROOT / "configs" / "published"
FILES = sorted(PUBLISHED.rglob("*.yaml"))
SIX = {
    "bsgd": "BSGD",
    "asgd": "ASGD",
    "softplus_asgd": "SoftplusASGD",
    "umax": "UMax",
    "sox": "SOX",
    "scent": "SCENT",
}
FIVE = [method for method in SIX if method != "asgd"]
# The appendix' tables of hyperparameters: for each method the learning rate; α (SCENT: its logarithm); γ of SOX.
TABLES = """
xc_glint360k                   | 1.0  0.5  0.5  0.5  5.0  5.0  | 1.0  1.0  1.0  12  | 0.0
xc_glint360k_momentum          | 2e-3 1e-3 1e-3 1e-3 2e-3 1e-3 | 0.5  0.5  0.5  30  | 0.2
xc_treeoflife10m               | 2e-4 1e-3 1e-3 1e-3 5e-4 2e-2 | 2.0  2.0  2.0  3   | 0.2
xc_treeoflife10m_momentum      | 5e-4 2e-4 2e-4 2e-4 1e-3 2e-3 | 1.0  1.0  1.0  10  | 0.6
pauc_cifar100_tau0.1           | 1e-2 5e-3 1e-3 5e-3 5e-3 5e-3 | 1.0  1e-3 1e-1 -6  | 0.9
pauc_cifar100_tau0.05          | 1e-3 1e-2 1e-3 1e-2 5e-3 5e-3 | 1.0  1e-2 1e-1 -15 | 0.7
pauc_cifar100_tau0.1_momentum  | 1e-3 1e-4 2e-4 1e-3 1e-3 1e-3 | 1.0  1e-2 1.0  -4  | 0.7
pauc_cifar100_tau0.05_momentum | 5e-4 1e-4 1e-4 1e-3 2e-4 1e-3 | 1e-2 1e-2 1e-1 -15 | 0.7
pauc_cifar10_tau0.1            | 1e-3 1e-2 1e-3 1e-2 5e-3 5e-3 | 1.0  1e-2 1e-1 -7  | 0.7
pauc_cifar10_tau0.05           | 1e-2 1e-2 1e-3 1e-2 1e-2 1e-2 | 1.0  1e-3 1e-1 -16 | 0.9
pauc_cifar10_tau0.1_momentum   | 1e-4 1e-4 2e-4 2e-4 2e-4 5e-4 | 1.0  1e-2 1.0  -7  | 0.3
pauc_cifar10_tau0.05_momentum  | 1e-3 1e-3 2e-4 1e-3 1e-3 1e-3 | 1e-1 1e-2 1e-1 -16 | 0.9
clip_dfn14m                    | 5e-4 5e-4 5e-4 5e-4 5e-4 5e-4 | 0.1  0.1  0.1  10  | 0.4
dro_california_tau0.2          | 1e-5 1e-6 1e-5 5e-6 1e-5      | 1e-6 1e-0 -22      | 0.5
dro_california_tau1.0          | 5e-6 1e-6 5e-6 5e-6 5e-6      | 1e-6 1e-0 -4       | 0.4
dro_california_tau5.0          | 5e-6 1e-5 1e-4 1e-5 1e-5      | 1e-5 1e-0 -1.1     | 0.8
dro_abalone_tau0.2             | 1e-5 5e-5 5e-5 5e-5 1e-4      | 5e-5 1e-0 -38      | 0.3
dro_abalone_tau1.0             | 1e-5 5e-5 1e-4 1e-5 5e-5      | 5e-5 1e-0 -10      | 0.1
dro_abalone_tau5.0             | 1e-4 1e-4 1e-4 1e-4 1e-4      | 1e-4 1e-1 -4       | 0.9
"""


def rows():
    """For each cell its name, the methods, and the learning rate and step size (None: there is none) of each."""
    for line in TABLES.strip().splitlines():
        cell, *columns = line.split("|")
        rates, sizes, (gamma,) = ([float(number) for number in column.split()] for column in columns)
        yield cell.strip(), list(SIX) if len(rates) == 6 else FIVE, rates, [None, *sizes[:-1], gamma, sizes[-1]]


def base_of(cell):
    base = ROOT / "configs" / f"{cell}.yaml"
    return base if base.is_file() else base.with_name(f"{cell.removesuffix('_momentum')}.yaml")


class OnlyParsed(ScentCLI):
    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        pass


@pytest.fixture(scope="module")
def parse():
    classes = (LightningModule, LightningDataModule)
    how = {"subclass_mode_model": True, "subclass_mode_data": True, "auto_configure_optimizers": False, "run": False}
    first = ["--config", str(ROOT / "configs" / "dro_diabetes.yaml")]
    parser = OnlyParsed(*classes, **how, seed_everything_default=0, args=first).parser

    def parsed(*configs):
        return parser.parse_args([part for config in configs for part in ("--config", str(config))])

    return parsed


@pytest.mark.parametrize(("cell", "methods", "rates", "sizes"), rows(), ids=[cell for cell, *_ in rows()])
def test_the_settings_are_those_of_the_tables(parse, cell, methods, rates, sizes):
    assert sorted(file.stem for file in (PUBLISHED / cell).iterdir()) == sorted(methods)
    kind = cell.partition("_")[0]
    for method, rate, size in zip(methods, rates, sizes, strict=True):
        file = PUBLISHED / cell / f"{method}.yaml"
        assert f"configs/{base_of(cell).name}" in file.read_text()
        config = parse(base_of(cell), file)
        model, dual = config.model.init_args, DualUpdate.from_config(config.dual.as_dict())
        assert type(dual).__name__ == SIX[method]
        assert dual.max_log_weight is None
        assert model.lr == rate
        expected = {"momentum": 0.9 if kind == "dro" or "momentum" in cell else 0.0, "lr_schedule": "cosine"}
        for name, value in expected.items() if kind != "clip" else ():
            assert model.get(name) == value, name
        if "tau0" in cell or "tau1" in cell or "tau5" in cell:
            assert f"tau{model.tau}" in cell
        if kind == "dro":
            assert config.trainer.gradient_clip_val is None
        if kind == "xc":
            assert (model.negatives, model.correction) == ("in_batch", "none")
            assert (model.include_target, model.margin) == (False, 0)
            assert config.trainer.max_epochs == (20 if "momentum" in cell else 50)
        if method == "scent":
            assert (dual.log_alpha, dual.schedule) == (size, "constant")
        elif method == "sox":
            assert dual.gamma == pytest.approx(size, abs=1e-5)
            assert dual.schedule == ("cosine" if kind in ("xc", "clip") else "constant")
        elif size is not None:
            assert (dual.alpha, dual.schedule) == (size, "cosine")


def test_there_are_no_others():
    assert {file.parent.name for file in FILES} == {cell for cell, *_ in rows()}
    assert len(FILES) == (4 + 8 + 1) * 6 + 6 * 5
    assert {file.relative_to(PUBLISHED).as_posix() for file in PUBLISHED.rglob("*") if file.is_file()} == {
        file.relative_to(PUBLISHED).as_posix() for file in FILES
    }


def test_the_numbers_are_those_of_the_paper():
    """Of its source, where it is at hand."""
    folder = ROOT.parent / "shared" / "paper"
    texts = [text for file in folder.glob("*") if r"\label{tab:hyperparams_ec}" in (text := file.read_text())]
    if not texts:
        pytest.skip("the paper's source is not here")
    line = re.compile(r"(?<![\w-])(lr|\\\(\\alpha\\\)|\\\(\\gamma\\\)) +&([^\\]*(?:\\\(e[^\\]*\\\))?)")
    power, number = re.compile(r"\\\(e\^\{([^}]*)\}\\\)"), re.compile(r"(?<![\w.])-?\d[\d.]*(?:e-?\d+)?(?!\w)")
    printed = []
    for label in ("ec", "auc", "clip", "dro"):
        table = texts[0].partition(rf"\label{{tab:hyperparams_{label}}}")[0].rpartition(r"\toprule")[2]
        for name, cells in line.findall(table):
            found = number.findall(power.sub(r"\1", cells))
            printed.append((name.strip("\\()"), [float(one) for one in found]))
    expected = []
    for _, _, rates, sizes in rows():
        expected += [("lr", rates), ("alpha", [*sizes[1:-2], sizes[-1]]), ("gamma", [sizes[-2]])]
    assert printed == expected
