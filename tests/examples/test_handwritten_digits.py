"""Tests the example on scikit-learn's images of digits."""

import doctest
import io
import re
import sys

import handwritten_digits
import numpy as np
import pytest
from completion.report import Report
from rich.console import Console


def test_examples_in_docstrings_pass():
    found = doctest.testmod(handwritten_digits)
    assert found.attempted > 0
    assert found.failed == 0


def test_an_image_is_a_list_of_its_squares():
    image = np.zeros([8, 8])
    # The middle of the three levels is 6 to 11, and the last level 12 to 16.
    image[0, 0], image[0, 1], image[1, 1] = 6, 11, 16
    (ids,) = handwritten_digits.ids_of(image[None])
    # A square is read from its upper left corner to its lower right corner.
    assert ids[0] == 27 * 1 + 9 * 1 + 3 * 0 + 2
    assert ids[1] - 81 == 27 * 1 + 9 * 0 + 3 * 2 + 0
    assert ids[-1] == 81 * 48
    assert handwritten_digits.ids_of(np.full([1, 8, 8], 16)).max() == (
        81 * 49 - 1
    )


def test_shifted_copies_have_the_order_of_the_images():
    images = np.arange(1, 129, dtype=np.float64).reshape(2, 8, 8)
    shifted = handwritten_digits.with_shifts(images)
    assert shifted.shape == (10, 8, 8)
    np.testing.assert_array_equal(shifted[:2], images)
    # The first copy is shifted down, and its upper row is empty.
    np.testing.assert_array_equal(shifted[3, 1:], images[1, :-1])
    assert not shifted[3, 0].any()


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        handwritten_digits.load()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_learning_curve_rises():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    printed = io.StringIO()
    history = handwritten_digits.run(
        Report(Console(file=printed, width=100)),
        epochs=2,
        num_shards=3,
        seed=1,
    )
    curve = history["val_accuracy"]
    assert 0.9 < curve[0] < curve[1]
    assert re.findall(r"epoch (\d) of 2: accuracy", printed.getvalue()) == [
        "1",
        "2",
    ]
