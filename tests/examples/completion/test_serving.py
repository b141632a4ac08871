"""Tests the comparison of the exported model with the trained model."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import elsewhere
from completion import serving

NAMES = [["self", "path", "len"]]
SCORES = np.array([[3.0, 2.0, 1.0]], np.float32)


def test_equal_offers_have_no_difference():
    assert serving.compare_answers(NAMES, SCORES, NAMES, SCORES) == 0.0


def test_different_score_raises():
    other = SCORES + np.array([[0.0, 0.01, 0.0]], np.float32)
    with pytest.raises(RuntimeError, match="must have equal scores"):
        serving.compare_answers(NAMES, SCORES, NAMES, other)


def test_nan_score_raises():
    broken = np.full_like(SCORES, np.nan)
    with pytest.raises(RuntimeError, match="must have equal scores"):
        serving.compare_answers(NAMES, SCORES, NAMES, broken)


def test_different_offer_with_equal_score_raises():
    names = [["self", "open", "len"]]
    with pytest.raises(RuntimeError, match="must return the offers"):
        serving.compare_answers(NAMES, SCORES, names, SCORES)


def test_offers_of_equal_score_may_be_swapped():
    tied = np.array([[3.0, 3.0, 1.0]], np.float32)
    names = [["path", "self", "len"]]
    assert serving.compare_answers(NAMES, tied, names, tied) == 0.0


def test_serving_process_cannot_import_this_package(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("def answer(package):\n    __import__(package)\n")
    elsewhere.run(program, "numpy")
    with pytest.raises(RuntimeError, match="No module named 'tf_layoutmap'"):
        elsewhere.run(program, "tf_layoutmap")


def test_loaded_package_in_the_serving_process_raises(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\ndef answer():\n"
        "    sys.modules['tf_layoutmap.other'] = sys\n"
    )
    with pytest.raises(RuntimeError, match="must not be loaded.*other"):
        elsewhere.run(program)


def test_finder_of_an_editable_install_is_allowed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\ndef answer():\n"
        "    sys.modules['__editable___tf_layoutmap_0_1_0_finder'] = sys\n"
    )
    elsewhere.run(program)
