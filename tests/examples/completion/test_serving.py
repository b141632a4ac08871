"""The exported model's answers are held against the trained model's."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import elsewhere
from completion import serving

NAMES = [["self", "path", "len"]]
SCORES = np.array([[3.0, 2.0, 1.0]], np.float32)


def test_equal_answers_have_no_difference():
    assert serving.compare_answers(NAMES, SCORES, NAMES, SCORES) == 0.0


def test_another_score_is_refused():
    other = SCORES + np.array([[0.0, 0.01, 0.0]], np.float32)
    with pytest.raises(RuntimeError, match="must score as the trained one"):
        serving.compare_answers(NAMES, SCORES, NAMES, other)


def test_a_score_that_is_no_number_is_refused():
    broken = np.full_like(SCORES, np.nan)
    with pytest.raises(RuntimeError, match="must score as the trained one"):
        serving.compare_answers(NAMES, SCORES, NAMES, broken)


def test_another_offer_of_the_same_score_is_refused():
    names = [["self", "open", "len"]]
    with pytest.raises(RuntimeError, match="must make the offers"):
        serving.compare_answers(NAMES, SCORES, names, SCORES)


def test_offers_of_equal_scores_may_change_places():
    tied = np.array([[3.0, 3.0, 1.0]], np.float32)
    names = [["path", "self", "len"]]
    assert serving.compare_answers(NAMES, tied, names, tied) == 0.0


def test_where_it_serves_this_package_cannot_be_imported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("def answer(package):\n    __import__(package)\n")
    elsewhere.run(program, "numpy")
    with pytest.raises(RuntimeError, match="No module named 'tf_layoutmap'"):
        elsewhere.run(program, "tf_layoutmap")


def test_a_way_around_the_refusal_is_found(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\ndef answer():\n"
        "    sys.modules['tf_layoutmap.smuggled'] = sys\n"
    )
    with pytest.raises(RuntimeError, match="found a way in.*smuggled"):
        elsewhere.run(program)


def test_the_finder_of_an_editable_install_is_no_way_in(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\ndef answer():\n"
        "    sys.modules['__editable___tf_layoutmap_0_1_0_finder'] = sys\n"
    )
    elsewhere.run(program)
