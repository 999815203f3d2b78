"""CLIP: the step against the definition, any update, open_clip both ways, several processes."""

import copy
import json
import math
from functools import partial

import lightning as L
import open_clip
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from scent_lightning.data import IndexedTensorDataset
from scent_lightning.duals import ASGD, BSGD, MSVR, SCENT, SOX, DualDivergenceError, SoftplusASGD, UMax
from scent_lightning.errors import InputError
from scent_lightning.functional import contrastive_scores
from scent_lightning.tasks import CLIPTask
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers

TOWER = {"layers": 1, "width": 16}
ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {**TOWER, "image_size": 8, "patch_size": 4, "head_width": 8},
    "text_cfg": {**TOWER, "context_length": 4, "vocab_size": 20, "heads": 2},
}
N = 48
DUALS = [SCENT(2.0), SOX(0.5), MSVR(0.5, 0.5), BSGD(), ASGD(0.5), UMax(0.5, 1.0), SoftplusASGD(0.5, 1e-3)]


def pairs():
    """Images that their tokens tell of."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 20, (N, 4), generator=generator)
    centres = torch.randn(20, 3, 8, 8, generator=generator)
    images = centres[tokens].mean(dim=1) + 0.1 * torch.randn(N, 3, 8, 8, generator=generator)
    return IndexedTensorDataset(images, tokens)


def loader(batch_size=12, rank=0, world=1):
    """Batches in the order of the data; two processes have the halves of each."""
    rows = [list(range(start, start + batch_size)) for start in range(0, N, batch_size)]
    part = batch_size // world
    rows = [batch[rank * part : (rank + 1) * part] for batch in rows]
    return DataLoader(pairs(), batch_sampler=rows)


def task_of(dual=None, seed=0, **arguments):
    torch.manual_seed(seed)
    defaults = {"architecture": ARCHITECTURE, "lr": 1e-3, "weight_decay": 0.01, "tau_lr": 1e-4}
    return CLIPTask(N, dual or SCENT(2.0, max_log_weight=2.0), **{**defaults, **arguments})


@pytest.mark.parametrize("dual", DUALS, ids=repr)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_step_is_that_of_the_scores(dual, epsilon):
    """ν of both sides from the update's own step on the scores; the loss τ times its objective, ε e^−ν and 2τρ."""
    task = task_of(dual, epsilon=epsilon, rho=3.0)
    images, texts = (tensor[:6] for tensor in pairs().tensors)
    index = torch.tensor([5, 0, 40, 7, 9, 2])
    with torch.no_grad():
        first, second, mask = contrastive_scores(*task(images, texts), task.tau)
    for _ in range(2):
        expected, total = {}, 0.0
        for name, scores in (("image", first), ("text", second)):
            log_mean = scores.masked_fill(~mask, -torch.inf).logsumexp(dim=1) - math.log(5)
            floor = epsilon if not dual.needs_scores else 0.0
            if floor:
                log_mean = torch.logaddexp(log_mean, torch.tensor(math.log(floor)))
            variable = task.duals[name]
            nu = torch.where(variable.visited[index], variable.nu[index], log_mean)
            if dual.needs_scores:
                nu = dual.step(nu, scores, mask)
            else:  # the weights stay between the steps
                nu = dual.step_with_previous(nu, log_mean, log_mean).float()
            expected[name] = nu
            total = total + (dual.objective(nu, scores, mask) + floor * torch.exp(-nu)).mean()
        loss = task.training_step((images, texts, index), 0)
        assert loss.item() == pytest.approx((task.tau * (total + 6.0)).item(), rel=1e-4)
        for name, nu in expected.items():
            torch.testing.assert_close(task.duals[name].nu[index], nu, rtol=1e-4, atol=1e-4)
            assert task.duals[name].visited.sum() == 6


@pytest.mark.parametrize("dual", DUALS, ids=repr)
def test_learns_to_retrieve(dual):
    task = task_of(dual, lr=3e-3, rho=1.0, chunk=5)
    trainer = quiet_trainer(max_epochs=40, limit_val_batches=0)
    trainer.fit(task, loader())
    found = trainer.test(task, loader(), verbose=False)[0]
    assert found["test/image_to_text_R@1"] > 0.3  # by chance 1 in 48
    assert set(found) == {f"test/{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert all(bool(task.duals[name].visited.all()) for name in ("image", "text"))
    assert task.tau.item() != pytest.approx(0.07)


def test_temperature_stays_in_its_range_or_where_it_is():
    task = task_of(tau=0.05, min_tau=0.04, tau_lr=1.0, rho=100.0)
    quiet_trainer(max_epochs=1).fit(task, loader())
    assert task.tau.item() == pytest.approx(0.04)
    task = task_of(learn_tau=False)
    quiet_trainer(max_epochs=1).fit(task, loader())
    assert task.tau.item() == pytest.approx(0.07)


def test_groups_of_the_optimiser_and_warm_up():
    task = task_of(warmup_steps=4, lr=1e-2)
    trainer = quiet_trainer(max_epochs=2)
    rates = []

    class Rates(ModelCheckpoint):
        def on_train_batch_end(self, trainer, *_):
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    trainer.callbacks.append(Rates(save_top_k=0))
    trainer.fit(task, loader())
    plain, decayed, tau = trainer.optimizers[0].param_groups
    assert all(parameter.ndim < 2 for parameter in plain["params"])
    assert any(parameter.ndim == 2 for parameter in decayed["params"])
    assert tau["params"] == [task.tau]
    assert [plain["weight_decay"], decayed["weight_decay"], tau["weight_decay"]] == [0.0, 0.01, 0.0]
    assert [round(rate[0], 6) for rate in rates[:4]] == [0.005, 0.0075, 0.01, 0.01]
    assert rates[-1][0] == pytest.approx(0.0, abs=1e-9)
    assert rates[0][2] == pytest.approx(1e-4 * 0.5)


@pytest.mark.parametrize(
    ("locked", "names"),
    [
        ({}, {"/gains_and_biases", "/weights", "/tau"}),
        ({"learn_tau": False}, {"/gains_and_biases", "/weights"}),
        ({"lock_image": True, "lock_text": True}, {"/tau"}),
    ],
)
def test_learning_rates_are_logged_by_names_of_groups(locked, names, tmp_path):
    monitor = LearningRateMonitor()
    trainer = quiet_trainer(max_epochs=1, logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=1)
    trainer.fit(task_of(**locked), loader())
    assert set(monitor.lrs) == {f"lr-AdamW{name}" for name in names}


def test_a_checkpoint_from_before_the_groups_had_names_goes_on_the_same(tmp_path):
    def run(ckpt_path=None):
        L.seed_everything(0, verbose=False)
        task, keep = task_of(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        trainer = quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[keep], limit_val_batches=0)
        trainer.fit(task, loader(), ckpt_path=ckpt_path)
        return task.state_dict()

    straight = run()
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    for group in saved["optimizer_states"][0]["param_groups"]:
        del group["name"]
    torch.save(saved, tmp_path / "old.ckpt")
    resumed = run(tmp_path / "old.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items() if torch.is_tensor(value))


class RatesOfTau(L.Callback):
    """τ and its rate before each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, *_):
        (group,) = [g for g in trainer.optimizers[0].param_groups if g["params"][0] is module.tau]
        self.seen.append((module.tau.item(), group["lr"]))


FALLING = {"tau": 0.05, "rho": 100.0, "tau_lr": 2e-3, "warmup_steps": 3}


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("constant", {}),
        ("step_thresh", {"tau_threshold": 0.045}),
        ("step_thresh", {"tau_threshold": 0.05, "tau_lr_factor": 0.5}),  # from the start
        ("step_thresh", {"tau_threshold": 0.046, "lock_image": True, "lock_text": True}),
    ],
)
def test_the_rate_of_the_temperature_has_its_own_schedule(schedule, more):
    task, rates = task_of(**FALLING, tau_lr_schedule=schedule, **more), RatesOfTau()
    quiet_trainer(max_epochs=2, callbacks=[rates]).fit(task, loader())
    assert rates.seen[0][0] == pytest.approx(0.05)
    for tau, rate in rates.seen:
        low = schedule == "step_thresh" and tau <= task.tau_threshold + 1e-8
        assert rate == pytest.approx(2e-3 * (task.tau_lr_factor if low else 1.0)), tau
    assert len({rate for _, rate in rates.seen}) == (1 if schedule == "constant" or task.tau_threshold == 0.05 else 2)


def test_a_resumed_run_has_the_rate_of_its_temperature(tmp_path):
    """From before τ has passed the threshold, and from after it."""
    arguments = {**FALLING, "tau_lr_schedule": "step_thresh", "tau_threshold": 0.04}
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, rates = task_of(**arguments), RatesOfTau()
    quiet_trainer(max_epochs=3, callbacks=[rates, saves], enable_checkpointing=True).fit(whole, loader())
    assert rates.seen[4][1] > rates.seen[8][1]
    for epoch in (0, 1):
        again = RatesOfTau()
        resumed = task_of(seed=1, **arguments)
        quiet_trainer(max_epochs=3, callbacks=[again]).fit(
            resumed, loader(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt"
        )
        assert again.seen == rates.seen[4 * (epoch + 1) :]
        assert resumed.tau == whole.tau


def test_outside_training_nothing_is_written():
    task = task_of()
    images, texts = (tensor[:6] for tensor in pairs().tensors)
    task.eval()
    loss = task.contrastive_risk(*task(images, texts), torch.arange(6))
    assert loss.isfinite()
    assert not task.duals["image"].visited.any()


def test_a_bad_index_or_a_divergence_writes_nothing():
    task = task_of()
    images, texts = (tensor[:3] for tensor in pairs().tensors)
    with pytest.raises(IndexError, match=rf"index {N} of dual variable 'image' is out of range"):
        task.training_step((images, texts, torch.tensor([0, N, 1])), 0)
    images = images.clone()
    images[1] = torch.nan
    with pytest.raises(DualDivergenceError):
        task.training_step((images, texts, torch.tensor([0, 5, 1])), 0)
    assert not task.duals["image"].visited.any()
    assert not task.duals["text"].visited.any()


@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize(
    ("dual", "nu"),
    [
        (SCENT(-60.0), -500.0),  # a float64 would hold none of it
        (SCENT(-60.0), -110.0),  # nor does float32 of this
        (ASGD(1e-9), -500.0),
        (SoftplusASGD(1e-9, 1e-3), -3e38),
    ],
    ids=repr,
)
def test_the_error_is_of_the_table_at_fault_and_its_rows_and_nothing_is_written(side, dual, nu):
    task = task_of(dual)
    images, texts = (tensor[:6] for tensor in pairs().tensors)
    index = torch.tensor([3, 5, 0, 40, 7, 9])
    task.duals[side].nu[40] = nu
    task.duals[side].visited[40] = True
    before = {name: value.clone() for name, value in task.state_dict().items() if name.startswith("duals.")}
    with pytest.raises(DualDivergenceError, match=rf"'{side}'.* 1 anchor\(s\), first at index 40") as caught:
        task.training_step((images, texts, index), 0)
    assert caught.value.dual == side
    if isinstance(dual, SCENT):
        assert "a weight exp(score − ν) is too large" in str(caught.value)
    after = task.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def weights_of_temperature(tau, folder):
    task = task_of()
    task.model.logit_scale.data.fill_(-math.log(tau))
    torch.save(task.model.state_dict(), folder / "weights.pt")
    return str(folder / "weights.pt")


@pytest.mark.parametrize(
    ("trained", "given", "expected"),
    [(0.01, None, 0.01), (0.03, None, 0.03), (0.01, 0.07, 0.07), (0.03, 0.5, 0.5), (None, None, 0.07)],
)
@pytest.mark.filterwarnings("error:tau starts")
def test_the_temperature_starts_at_that_of_the_pretrained_weights(tmp_path, trained, given, expected):
    pretrained = None if trained is None else weights_of_temperature(trained, tmp_path)
    task = task_of(pretrained=pretrained, tau=given)
    assert task.tau.item() == pytest.approx(expected, rel=1e-5)
    assert task.model.logit_scale.exp().item() == pytest.approx(1 / expected, rel=1e-5)


@pytest.mark.parametrize(("trained", "expected"), [(0.001, 0.01), (5.0, 1.0)])
def test_a_pretrained_temperature_out_of_range_is_the_nearest_in_it(tmp_path, trained, expected):
    with pytest.warns(UserWarning, match=rf"tau starts at {expected:g}, the nearest to that of .* \({trained:g}\)"):
        task = task_of(pretrained=weights_of_temperature(trained, tmp_path))
    assert task.tau.item() == pytest.approx(expected)


def test_the_bias_of_sigmoid_losses_is_not_trained():
    """It has no gradient, for which several processes would wait."""
    bias = {**ARCHITECTURE, "init_logit_bias": -10.0}
    task = task_of(architecture=bias)
    images, texts = (tensor[:6] for tensor in pairs().tensors)
    task.training_step((images, texts, torch.arange(6)), 0).backward()
    waiting = [name for name, p in task.named_parameters() if p.requires_grad and p.grad is None]
    assert waiting == []
    assert task.model.logit_bias.item() == -10.0


def test_a_batch_of_one_is_skipped_and_warned_about_once():
    task = task_of()
    images, texts = (tensor[:1] for tensor in pairs().tensors)
    with pytest.warns(UserWarning, match="has no negatives and is skipped"):
        assert task.training_step((images, texts, torch.tensor([0])), 0) is None
    assert task.training_step((images[:0], texts[:0], torch.tensor([], dtype=torch.int64)), 0) is None
    assert task.skipped_batches == 2


# ---------------------------------------------------------------- open_clip


def test_architecture_by_name_file_and_content(tmp_path):
    (tmp_path / "small.json").write_text("\ufeff" + json.dumps(ARCHITECTURE), encoding="utf-8")
    by_file, by_content = task_of(architecture=str(tmp_path / "small.json")), task_of()
    images, texts = (tensor[:4] for tensor in pairs().tensors)
    for one, other in zip(by_file(images, texts), by_content(images, texts), strict=True):
        assert torch.equal(one, other)
    assert by_file.hparams["architecture"] == ARCHITECTURE
    named = CLIPTask(4, BSGD(), architecture="ViT-S-32-alt")
    assert type(named.model) is type(open_clip.create_model("ViT-S-32-alt"))


def test_checkpoint_goes_to_open_clip_and_back(tmp_path):
    task = task_of()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, loader())
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    checkpoint = torch.load(tmp_path / "task.ckpt", weights_only=True)
    weights = {
        name.removeprefix("model."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }
    torch.save(weights, tmp_path / "open_clip.pt")
    model = open_clip.CLIP(**copy.deepcopy(ARCHITECTURE))
    open_clip.load_checkpoint(model, str(tmp_path / "open_clip.pt"))
    images, texts = (tensor[:4] for tensor in pairs().tensors)
    model.eval()
    task.eval()
    torch.testing.assert_close(model.encode_image(images, normalize=True), task(images, texts)[0])
    assert model.logit_scale.exp().item() == pytest.approx(1 / task.tau.item(), rel=1e-6)
    again = task_of(seed=5, pretrained=str(tmp_path / "open_clip.pt"))
    torch.testing.assert_close(again.eval()(images, texts)[1], task(images, texts)[1])
    loaded = CLIPTask.load_from_checkpoint(tmp_path / "task.ckpt", weights_only=True)
    assert torch.equal(loaded.duals["text"].nu, task.duals["text"].nu)


def test_locked_towers_and_checkpointing():
    task = task_of(lock_image=True, grad_checkpointing=True)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    quiet_trainer(max_epochs=1).fit(task, loader())
    for name, value in task.model.state_dict().items():
        if name.startswith("visual."):
            assert torch.equal(value, before[name]), name
    assert not torch.equal(task.model.text_projection, before["text_projection"])


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(precision):
    losses = []
    for kind in ("32-true", precision):
        task = task_of(lr=1e-4)
        trainer = quiet_trainer(max_epochs=1, precision=kind)
        trainer.fit(task, loader())
        assert task.duals["image"].nu.dtype == torch.float32
        losses.append(task.duals["image"].nu.mean().item())
    assert losses[0] == pytest.approx(losses[1], rel=0.1, abs=0.3)


class StopAfterTwo(ModelCheckpoint):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == 2


def test_resumed_run_is_bit_identical(tmp_path):
    def fit(folder, callbacks=(), **arguments):
        task = task_of()
        checkpoint = ModelCheckpoint(dirpath=tmp_path / folder, save_last=True)
        trainer = quiet_trainer(max_epochs=4, enable_checkpointing=True, callbacks=[checkpoint, *callbacks])
        trainer.fit(task, loader(), **arguments)
        return task.state_dict()

    whole = fit("whole")
    fit("part", [StopAfterTwo(save_top_k=0)])
    resumed = fit("rest", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def _fit(rank, trainer_of, dual):
    task = task_of(dual, rho=1.0)
    trainer = trainer_of(max_epochs=6, use_distributed_sampler=False)
    trainer.fit(task, loader(12, rank, trainer.world_size))
    return {name: value.tolist() for name, value in task.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("dual", [SCENT(2.0, max_log_weight=2.0), SoftplusASGD(0.5, 1e-3)], ids=repr)
def test_two_processes_take_the_steps_of_one(dual):
    torch.set_num_threads(1)
    one = _fit(0, quiet_trainer, dual)
    first, second = under_two_trainers(partial(_fit, trainer_of=ddp_trainer, dual=dual))
    assert first == second
    for name, value in one.items():
        # AdamW divides by the size of the gradient, which magnifies rounding where that is small.
        tolerance = 1e-5 if name.startswith("duals") else 2e-4
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(value), rtol=tolerance, atol=tolerance)


def test_another_number_of_pairs_evaluates_but_does_not_train(tmp_path):
    task = task_of()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(task, loader())
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    other = CLIPTask(N + 1, SCENT(2.0), architecture=ARCHITECTURE)
    quiet_trainer().test(other, loader(), ckpt_path=tmp_path / "task.ckpt", verbose=False)
    with pytest.raises(InputError, match=f"the checkpoint holds {N} anchors and this model has {N + 1}"):
        quiet_trainer(max_epochs=2).fit(other, loader(), ckpt_path=tmp_path / "task.ckpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "ViT-B-33"}, "architecture 'ViT-B-33' is not known to open_clip; near are ViT-B-32"),
        ({"architecture": "none.json"}, "architecture none.json cannot be read as JSON"),
        ({"architecture": {"embed_dim": 8}}, "it lacks vision_cfg, text_cfg"),
        ({"architecture": {**ARCHITECTURE, "more": 1}}, "architecture makes no model of open_clip"),
        (
            {"architecture": "RN50", "pretrained": "nothing"},
            "'nothing' is no file and no tag of 'RN50'; tags are openai",
        ),
        ({"pretrained": "none.pt"}, "pretrained none.pt must be a file"),
        ({"tau": 0.0}, "tau must be a finite number above 0"),
        ({"tau": 0.001}, "min_tau, tau and max_tau must rise"),
        ({"epsilon": -1.0}, "epsilon must be a finite number of at least 0"),
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"beta1": 1.0}, r"beta1 must be a number in \[0, 1\)"),
        ({"chunk": 0}, "chunk must be None or an integer of at least 1"),
        ({"chunk": 5, "fused_loss": True}, "fused_loss keeps no rows of the matrix of pairs: leave chunk out, got 5"),
        ({"tau_lr_schedule": "step"}, "tau_lr_schedule must be one of cosine, constant, step_thresh, got 'step'"),
        ({"tau_lr_factor": 2}, r"tau_lr_factor must be a number in \(0, 1\], got 2"),
        (
            {"tau_lr_schedule": "step_thresh", "tau_threshold": 0.001},
            r"tau_threshold must be a number in \[0.01, 1\], got 0.001: it must lie between min_tau and max_tau",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        task_of(**arguments)
