"""Check messages contain the requirement, the value, and its location."""

import re

import numpy as np
import pytest

from tf_layoutmap._core import checks


def test_a_message_has_requirement_value_and_place():
    assert checks.message("dim", "at least 1", 0, "table 'ads'") == (
        "Argument `dim` must be at least 1. Received: dim=0 (table 'ads')."
    )


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3)])
def test_integers_are_converted_to_python_ints(value):
    checked = checks.check_int("dim", value, lowest=3, highest=3)
    assert checked == 3 and type(checked) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.float32(3)])
def test_a_non_integer_raises_type_error(value):
    with pytest.raises(TypeError, match="`dim` must be an integer"):
        checks.check_int("dim", value)


@pytest.mark.parametrize(
    "value, words", [(0, "at least 1"), (-7, "at least 1"), (10, "at most 9")]
)
def test_an_out_of_bounds_number_raises_value_error(value, words):
    with pytest.raises(
        ValueError, match=re.escape(f"must be {words}. Received: dim={value}.")
    ):
        checks.check_int("dim", value, lowest=1, highest=9)


def test_one_of_lists_all_choices():
    assert checks.check_one_of("combiner", "sum", ("sum", "mean")) == "sum"
    with pytest.raises(ValueError, match=r"one of \('sum', 'mean'\).*'max'"):
        checks.check_one_of("combiner", "max", ("sum", "mean"))


def test_an_invalid_type_raises_with_a_description():
    assert checks.check_type("name", "ads", str, "a string") == "ads"
    with pytest.raises(TypeError, match="`name` must be a string"):
        checks.check_type("name", 3, str, "a string")
