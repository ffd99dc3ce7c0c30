"""The recipes and what each of their fields does in the learner."""

import dataclasses

import pytest

from modeling.bagel.qwen2_navit import QkRounding
from train.recipe import CONSISTENT, UPSTREAM, recipe_named


def test_recipes_by_name():
    assert recipe_named("upstream") is UPSTREAM
    assert recipe_named("consistent") is CONSISTENT


@pytest.mark.parametrize("name", ["", "Upstream", "both"])
def test_unknown_recipes_are_refused(name):
    with pytest.raises(ValueError, match=f"R3_RECIPE='{name}': expected one of upstream, consist"):
        recipe_named(name)


def test_they_differ_in_every_field():
    for field in dataclasses.fields(UPSTREAM):
        assert getattr(UPSTREAM, field.name) != getattr(CONSISTENT, field.name), field.name


def test_consistent_has_one_numerics_on_both_sides():
    assert CONSISTENT.rollout_rounding == CONSISTENT.learner_rounding
    assert UPSTREAM.rollout_rounding == QkRounding(und=True, gen=False)
    assert UPSTREAM.learner_rounding == QkRounding(und=True, gen=True)
