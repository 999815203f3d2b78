"""The contributors' guide: each of its examples is one file that the command line takes as it stands."""

import math
import re
import shlex
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.cli import main
from tests.conftest import ROOT

TEXT = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
SHORT = ["--trainer.log_every_n_steps=5", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL).group(1)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Write the file of a section into a folder of its own and return the arguments of its commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def take(title):
        text = section(title)
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            name = re.match(r"# (\w+)\.py\n", block).group(1)
            monkeypatch.delitem(sys.modules, name, raising=False)
            (tmp_path / f"{name}.py").write_text(block)
        commands = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ").splitlines()
        return [[part.replace("configs/", f"{ROOT}/configs/") for part in shlex.split(line)[1:]] for line in commands]

    return take


def state_of(folder):
    (path,) = folder.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    return torch.load(path, weights_only=True)


def scalars(folder):
    log = EventAccumulator(str(folder / "lightning_logs" / "version_0"))
    log.Reload()
    return {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def test_an_update(example, tmp_path):
    (arguments,) = example("A dual update")
    main([*arguments, *SHORT, "--trainer.max_epochs=4"])
    checkpoint, logged = state_of(tmp_path), scalars(tmp_path)
    assert checkpoint["hyper_parameters"]["dual"]["class_path"] == "my_updates.ClippedAverage"
    assert math.isfinite(checkpoint["state_dict"]["duals.nu.nu"].item())
    assert logged["dual/nu/gamma"] == sorted(logged["dual/nu/gamma"], reverse=True)  # the schedule
    assert logged["dual/nu/gamma"][-1] < 0.1 < logged["dual/nu/gamma"][0]
    from my_updates import ClippedAverage

    nu, scores = torch.zeros(3), torch.tensor([[0.0, 9.0], [1.0, 1.0], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    by_hand = [math.log((1 + (1 + math.exp(3)) / 2) / 2), math.log((1 + math.e) / 2), 0.0]
    torch.testing.assert_close(ClippedAverage(0.5).step(nu, scores, mask), torch.tensor(by_hand))
    guarded = ClippedAverage(0.5, max_log_weight=1.0).step(nu, scores.bfloat16(), mask)
    torch.testing.assert_close(guarded[0].item(), math.log((1 + math.exp(9)) / 2) - 1, rtol=0, atol=1e-4)


def test_a_step_size_rule(example, tmp_path):
    (arguments,) = example("A step-size rule")
    main([*arguments, *SHORT, "--trainer.max_epochs=2"])
    whole, logged = state_of(tmp_path), scalars(tmp_path)
    visits = whole["state_dict"]["duals.nu.auto._extra_state"]["rows"]
    assert visits == whole["global_step"] > 5
    assert logged["dual/nu/visits"][-1] > logged["dual/nu/visits"][0]
    from my_rules import RunningMean

    from scent_lightning.duals import DualVariable

    variable, resumed = DualVariable(2, RunningMean()), DualVariable(2, RunningMean())
    scores = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for step, batch in enumerate(scores):
        if step == 3:
            resumed.load_state_dict(variable.state_dict())
        for table in (variable, resumed)[: 1 + (step >= 3)]:
            table.entropic_risk(batch, torch.arange(2), progress=0.0)
    expected = torch.logsumexp(scores.transpose(0, 1).flatten(1), dim=1) - math.log(18)
    torch.testing.assert_close(variable.nu.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(variable.nu, resumed.nu)
