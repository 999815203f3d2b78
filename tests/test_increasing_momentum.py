"""SGD with a momentum that increases over the run."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook

from scent_lightning.errors import InputError
from scent_lightning.optim import IncreasingMomentumSGD, increasing_momentum

COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda pair: pickle.loads(pickle.dumps(pair)),
    "loaded": lambda pair: loaded(*pair),
}


def gradients(steps, seed=0):
    return torch.randn(steps, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(lr=0.01, **arguments):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return weight, IncreasingMomentumSGD([weight], lr=lr, **arguments)


def taken(weight, optimizer, rows):
    for row in rows:
        weight.grad = row.clone()
        optimizer.step()
    return weight.detach().clone()


def loaded(weight, optimizer):
    again, other = made(lr=0.3)
    with torch.no_grad():
        again.copy_(weight)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again, other


@given(st.integers(0, 10**9))
def test_a_gradient_goes_as_far_as_with_momentum_of_nine_tenths(steps):
    momentum, dampening = increasing_momentum(steps)
    assert 0.9 <= momentum < 1
    assert 0 <= dampening < 1
    assert (1 - dampening) / (1 - momentum) == pytest.approx(10, rel=1e-6)
    # With the gradient itself, the sum of what it does to the weights in units of the rate: 10 at first, 11 in the end.
    assert 10 - 1e-6 <= 1 + momentum * (1 - dampening) / (1 - momentum) < 11 + 1e-6
    assert 1 / (1 - momentum) == pytest.approx(max(10, steps / 150), rel=1e-6)
    assert increasing_momentum(steps + 1)[0] >= momentum


def test_the_first_steps_are_torchs_with_nine_tenths():
    rows = gradients(1500)
    weight, optimizer = made()
    other = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    plain = torch.optim.SGD([other], lr=0.01, momentum=0.9, nesterov=True)
    assert torch.equal(taken(weight, optimizer, rows), taken(other, plain, rows))
    assert not torch.equal(taken(weight, optimizer, rows), taken(other, plain, rows))


def test_each_step_is_its_formula():
    rows, (weight, optimizer) = gradients(4000), made(weight_decay=0.1)
    w, v = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for t, row in enumerate(rows):
        mu = 1 - 1 / max(10, t / 150)
        v = mu * v + 10 * (1 - mu) * (row + 0.1 * w)
        w = w - 0.01 * (row + 0.1 * w + mu * v)
    torch.testing.assert_close(taken(weight, optimizer, rows), w, rtol=1e-9, atol=1e-12)


def test_noise_that_adds_up_to_nothing_in_an_epoch_moves_the_weights_less():
    """Rows of an epoch of 20 steps that add up to 0, in a new order each: of a later step less is left."""
    generator, (weight, optimizer) = torch.Generator().manual_seed(0), made()
    epoch = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1).expand(20, 2)
    spreads = []
    for _ in range(3):
        seen = []
        for _ in range(300):
            taken(weight, optimizer, epoch[torch.randperm(20, generator=generator)])
            seen.append(optimizer.state[weight]["momentum_buffer"].norm().item())
        spreads.append(math.sqrt(sum(x * x for x in seen) / len(seen)))
    assert spreads[2] < spreads[0] / 5


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_as_the_run_does(how):
    rows = gradients(5000)
    weight, optimizer = made()
    taken(weight, optimizer, rows[:3000])
    again, other = COPIES[how]((weight, optimizer))
    assert other.param_groups[0]["steps"] == 3000
    assert torch.equal(taken(again, other, rows[3000:]), taken(weight, optimizer, rows[3000:]))
    assert other.param_groups[0]["steps"] == optimizer.param_groups[0]["steps"] == 5000


def test_a_state_of_another_sgd_is_where_it_begins():
    weight, optimizer = made()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.2, momentum=0.99, nesterov=True)
    optimizer.load_state_dict(plain.state_dict())
    taken(weight, optimizer, gradients(3))
    (group,) = optimizer.param_groups
    assert [group[name] for name in ("lr", "momentum", "dampening", "nesterov", "steps")] == [0.2, 0.9, 0.0, True, 3]


def test_groups_that_come_later_and_hooks():
    weight, optimizer = made()
    taken(weight, optimizer, gradients(2000))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    taken(weight, optimizer, gradients(1))
    handle.remove()
    assert seen == [1]
    assert [group["steps"] for group in optimizer.param_groups] == [2001, 1]
    assert [group["momentum"] for group in optimizer.param_groups] == [increasing_momentum(2000)[0], 0.9]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(InputError) as caught:
        made(**arguments)
    assert str(caught.value) == said
