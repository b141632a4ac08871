"""Each op has documentation, and docs/ops.md lists all ops."""

import pathlib
import re

import pytest

from tf_layoutmap._core import ops

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "ops.md"


def snake_case(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("name", ops._op_names())
def test_each_op_has_a_summary(name):
    doc = getattr(ops, name).__doc__
    assert doc.strip()
    assert "TODO" not in doc
    assert doc.strip().splitlines()[0].endswith(".")


def test_the_page_lists_the_ops_of_the_library():
    listed = re.findall(r"^\| `([A-Z]\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(map(snake_case, listed)) == ops._op_names()
