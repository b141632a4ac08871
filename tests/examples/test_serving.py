"""The exported model's answers are held against the trained model's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

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


def test_where_it_serves_this_package_cannot_be_imported():
    program = ("import sys; sys.path.insert(0, sys.argv[1])\n"
               "import served_elsewhere\n"
               "sys.meta_path.insert(0, served_elsewhere.Refuse())\n"
               "import json\n"
               "try:\n    import tf_layoutmap\n"
               "except ModuleNotFoundError as error:\n    print(error)\n")
    folder = Path(serving.__file__).parent
    ended = subprocess.run([sys.executable, "-I", "-c", program, str(folder)],
                           capture_output=True, text=True, check=True)
    assert ended.stdout == "No module named 'tf_layoutmap'\n"
