"""Row-sparse SGD against torch's, and against its own rule written out row by row."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from scent_lightning.errors import InputError
from scent_lightning.optim import RowSparseAdam, RowSparseSGD, average_sparse_gradient, clip_gradients
from tests.helpers import in_two_processes


def batches(steps=12, rows=9):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randperm(rows, generator=generator)[:3], torch.randn(3, 4, generator=generator)


def loss_of(weight, rows, factors, sparse):
    return (F.embedding(rows, weight, sparse=sparse) * factors).square().sum()


def start():
    return torch.nn.Parameter(torch.randn(9, 4, generator=torch.Generator().manual_seed(1)))


def test_without_momentum_it_is_torchs_sgd_exactly():
    ours, theirs = start(), start()
    first, second = RowSparseSGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=12) for o in (first, second)]
    for rows, factors in batches():
        for weight, optimizer, sparse in ((ours, first, True), (theirs, second, False)):
            optimizer.zero_grad()
            loss_of(weight, rows, factors, sparse).backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert torch.equal(ours, theirs)


def test_accumulated_without_momentum_it_is_torchs_sgd_exactly():
    """A row in several gradients moves by their sum, as a dense one does."""
    ours, theirs = start(), start()
    first, second = RowSparseSGD([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    data = list(batches())
    for number in range(0, 12, 3):
        for weight, optimizer, sparse in ((ours, first, True), (theirs, second, False)):
            optimizer.zero_grad()
            for rows, factors in data[number : number + 3]:
                loss_of(weight, rows, factors, sparse).backward()
            optimizer.step()
        assert torch.equal(ours, theirs)


def test_hooks_records_and_zeroing_are_those_of_every_optimiser():
    weight, called = start(), []
    optimizer = RowSparseSGD([weight], lr=0.1)
    rows, factors = next(batches())
    before = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    after = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    loss_of(weight, rows, factors, sparse=True).backward()
    optimizer.step()
    assert called == ["before", "after"]
    before.remove()
    after.remove()
    with torch.profiler.profile() as profiler:
        optimizer.step()
    assert any(event.name == "Optimizer.step#RowSparseSGD.step" for event in profiler.events())
    assert called == ["before", "after"]
    assert optimizer.step(lambda: torch.tensor(5.0)) == 5.0
    weight.grad = torch.ones(9, 4)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(weight.grad, torch.zeros(9, 4))
    optimizer.zero_grad()
    assert weight.grad is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_dense_parameters_get_torchs_sgd(momentum, weight_decay):
    ours, theirs = start(), start()
    settings = {"lr": 0.05, "momentum": momentum, "weight_decay": weight_decay}
    first, second = RowSparseSGD([ours], **settings), torch.optim.SGD([theirs], **settings)
    for rows, factors in batches():
        for weight, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            loss_of(weight, rows, factors, sparse=False).backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_momentum_and_decay_of_touched_rows():
    lr, mu, decay = 0.05, 0.8, 0.1
    weight = start()
    optimizer = RowSparseSGD([weight], lr=lr, momentum=mu, weight_decay=decay)
    expected = weight.detach().double().clone()
    velocity, last = torch.zeros_like(expected), [0] * 9
    for step, (rows, factors) in enumerate(batches(), start=1):
        optimizer.zero_grad()
        loss_of(weight, rows, factors, sparse=True).backward()
        optimizer.step()
        for row, factor in zip(rows.tolist(), factors.double(), strict=True):
            gradient = 2 * factor.square() * expected[row] + decay * expected[row]
            velocity[row] = mu ** (step - last[row]) * velocity[row] + gradient
            expected[row] -= lr * velocity[row]
            last[row] = step
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_and_state_dict():
    """Repeated rows of an accumulated gradient are one; a restored optimiser goes on as if never stopped."""
    data = list(batches())
    whole, part = start(), start()
    one = RowSparseSGD([whole], lr=0.05, momentum=0.9)
    two = RowSparseSGD([part], lr=0.05, momentum=0.9)
    for number in range(0, 12, 2):
        if number == 6:
            state = copy.deepcopy(two.state_dict())
            two = RowSparseSGD([part], lr=1.0)
            two.load_state_dict(state)
        for weight, optimizer in ((whole, one), (part, two)):
            optimizer.zero_grad()
            for rows, factors in data[number : number + 2]:
                loss_of(weight, rows, factors, sparse=True).backward()
            optimizer.step()
    assert torch.equal(whole, part)
    dense = start()
    reference = torch.optim.SGD([dense], lr=0.05)
    sparse = start()
    ours = RowSparseSGD([sparse], lr=0.05)
    for weight, optimizer, is_sparse in ((dense, reference, False), (sparse, ours, True)):
        for rows, factors in data[:2]:
            loss_of(weight, rows, factors, sparse=is_sparse).backward()
        optimizer.step()
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("by", ["norm", "value"])
@pytest.mark.parametrize("limit", [0.3, 1e3])
def test_clipping_equals_torchs_on_the_dense_gradient(by, limit):
    sparse, dense, extra, other = start(), start(), start(), start()
    for weight, second, is_sparse in ((sparse, extra, True), (dense, other, False)):
        for rows, factors in list(batches())[:2]:
            (loss_of(weight, rows, factors, is_sparse) + second.square().sum()).backward()
    clip_gradients([sparse, extra, torch.nn.Parameter(torch.ones(2))], limit, by)
    if by == "norm":
        torch.nn.utils.clip_grad_norm_([dense, other], limit)
    else:
        torch.nn.utils.clip_grad_value_([dense, other], limit)
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)
    torch.testing.assert_close(extra.grad, other.grad)


def _averaged(rank):
    weight = start()
    rows, factors = list(batches())[rank]
    rows, factors = rows[: 3 - rank], factors[: 3 - rank]  # the ranks touch different numbers of rows
    loss_of(weight, rows, factors, sparse=True).backward()
    average_sparse_gradient(weight)
    gradient = weight.grad.coalesce()
    return gradient.indices().tolist(), gradient.values().tolist()


def test_average_over_processes(tmp_path):
    first, second = in_two_processes(_averaged, tmp_path)
    assert first == second
    expected = torch.zeros(9, 4)
    for rank in range(2):
        weight = start()
        rows, factors = list(batches())[rank]
        loss_of(weight, rows[: 3 - rank], factors[: 3 - rank], sparse=False).backward()
        expected += weight.grad / 2
    found = torch.sparse_coo_tensor(torch.tensor(first[0]), torch.tensor(first[1]), (9, 4)).to_dense()
    torch.testing.assert_close(found, expected)


def test_closure():
    weight = start()
    optimizer = RowSparseSGD([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(weight, torch.tensor([0, 1]), torch.ones(2, 4), sparse=True)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > closure().item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        RowSparseSGD([start()], **{"lr": 0.1, **arguments})


def test_steps_stay_integers_through_a_checkpoint():
    """torch casts an optimiser's state to the parameter's dtype; 257 is no bfloat16."""
    parameter = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    optimizer = RowSparseSGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(257):
        rows = torch.tensor([[1]])
        parameter.grad = torch.sparse_coo_tensor(rows, torch.ones(1, 2, dtype=torch.bfloat16), (4, 2))
        optimizer.step()
    state = optimizer.state_dict()
    loaded = RowSparseSGD([parameter], lr=0.1, momentum=0.9)
    loaded.load_state_dict(state)
    assert loaded.state[parameter]["last_step"].dtype == torch.int64
    assert loaded.state[parameter]["last_step"].tolist() == [0, 257, 0, 0]
    assert loaded.state[parameter]["last_step"] is not state["state"][0]["last_step"]


@pytest.mark.parametrize("by", ["norm", "value"])
@pytest.mark.parametrize("limit", [0, 0.0, -1, -1e-9])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_limit_of_zero_or_less_does_not_clip(by, limit, sparse):
    """Lightning's own clipping passes over these values, too."""
    weight = start()
    rows, factors = next(batches())
    loss_of(weight, rows, factors, sparse).backward()
    before = weight.grad.clone().to_dense()
    clip_gradients([weight], limit, by=by)
    assert torch.equal(weight.grad.to_dense(), before)
    assert before.abs().max() > 0


def test_a_limit_must_be_a_number():
    with pytest.raises(InputError, match="max_value must be a number, got nan"):
        clip_gradients([start()], float("nan"))


def embedded(rows, weight):
    """A loss of some rows of a parameter, in which a row may occur several times."""
    return torch.nn.functional.embedding(torch.tensor(rows), weight, sparse=True).pow(2).mul(torch.arange(1.0, 4)).sum()


ROWS = [[3, 7, 3], [0, 8], [3], [7, 1, 1, 0], [3, 8], [5]]
BETAS = [(0.9, 0.999), (0.0, 0.9), (0.5, 0.0)]


@pytest.mark.parametrize("betas", BETAS)
def test_adam_of_sparse_gradients_is_sparse_adam(betas):
    torch.manual_seed(0)
    start = torch.randn(9, 3)
    weights = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = RowSparseAdam([weights[0]], lr=0.1, betas=betas), torch.optim.SparseAdam([weights[1]], 0.1, betas)
    for rows in ROWS:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            embedded(rows, weight).backward()
            optimizer.step()
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", BETAS)
def test_adam_of_dense_gradients_is_adam(betas, weight_decay):
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    weights = [start.clone().requires_grad_() for _ in range(2)]
    options = {"lr": 0.1, "betas": betas, "weight_decay": weight_decay}
    optimizers = RowSparseAdam([weights[0]], **options), torch.optim.Adam([weights[1]], **options)
    for step in range(6):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            (weight * (weight - step)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_adam_of_both_goes_on_from_its_state():
    def fit(steps, state=None, weights=None):
        torch.manual_seed(0)
        table, dense = [w.clone().requires_grad_() for w in weights or (torch.randn(9, 3), torch.randn(3, 3))]
        optimizer = RowSparseAdam([table, dense], lr=0.1, weight_decay=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        for rows in steps:
            optimizer.zero_grad()
            (torch.nn.functional.embedding(torch.tensor(rows), table, sparse=True) @ dense).pow(2).sum().backward()
            optimizer.step()
        return [table.detach(), dense.detach()], optimizer.state_dict()

    whole, state = fit(ROWS)
    part, kept = fit(ROWS[:3])
    resumed, after = fit(ROWS[3:], kept, part)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)
    for number, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][number][name])), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"betas": (0.9, 1.0)}, r"each of betas must be a number in \[0, 1\), got 1.0"),
        ({"eps": 0.0}, "eps must be a finite number above 0"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0"),
    ],
)
def test_bad_arguments_of_adam(arguments, message):
    with pytest.raises(InputError, match=message):
        RowSparseAdam([torch.nn.Parameter(torch.ones(1))], **arguments)
