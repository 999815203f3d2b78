import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scent_lightning.errors import InputError
from scent_lightning.validation import checked_choice, checked_integer, checked_number


@given(st.integers(), st.integers(-5, 5), st.one_of(st.none(), st.integers(0, 20)))
def test_an_integer_passes_exactly_where_it_is_in_the_range(value, least, most):
    allowed = value >= least and (most is None or value <= most)
    if allowed:
        assert checked_integer("size", value, least, most) == value
    else:
        with pytest.raises(InputError, match=rf"^size must be an integer .*{least}.*, got {value}$"):
            checked_integer("size", value, least, most)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], math.nan])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(InputError, match="size must be an integer of at least 1, got"):
        checked_integer("size", value)
    assert checked_integer("size", None, or_none=True) is None


@given(st.floats(), st.sampled_from(["least", "above", "most", "below"]), st.floats(-10, 10))
def test_a_number_passes_exactly_where_it_is_finite_and_within_its_bound(value, bound, at):
    within = {"least": value >= at, "above": value > at, "most": value <= at, "below": value < at}[bound]
    if math.isfinite(value) and within:
        assert checked_number("rate", value, **{bound: at}) == value
    else:
        with pytest.raises(InputError, match=r"^rate must be a finite number"):
            checked_number("rate", value, **{bound: at})


@pytest.mark.parametrize("value", [True, "0.5", None, 1j, [0.5]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InputError, match=r"rate must be a number in \[0, 1\), got"):
        checked_number("rate", value, least=0, below=1)


def test_an_integer_counts_as_a_number_and_none_where_it_is_allowed():
    assert isinstance(checked_number("rate", 1), float)
    assert checked_number("rate", None, or_none=True) is None
    with pytest.raises(InputError, match="rate must be None or a finite number above 0, got 0; lower lr"):
        checked_number("rate", 0, above=0, or_none=True, hint="; lower lr")


@pytest.mark.parametrize("value", ["three", None, ["one"], {}, 1.0])
def test_a_choice_that_is_not_offered_is_refused_with_those_that_are(value):
    assert checked_choice("kind", "one", ("one", "two")) == "one"
    with pytest.raises(InputError, match=r"^kind must be one of one, two, got"):
        checked_choice("kind", value, ("one", "two"))
