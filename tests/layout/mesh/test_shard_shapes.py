import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.layout.mesh import shard_shapes

MESH = {"batch": 2, "model": 4}


def test_valid_layout_has_no_problems():
    assert shard_shapes.fit_problems((None, "model"), (3, 8), MESH) == []
    assert shard_shapes.fit_problems((), (), MESH) == []


@pytest.mark.parametrize(
    ("axes", "shape", "words"),
    [
        (("modle",), (8,), "mesh axis 'modle' is unknown"),
        (("modle",), (8,), "did you mean 'model'"),
        (("model", "model"), (8, 8), "dimensions 0 and 1"),
        (
            ("model",),
            (6,),
            "size 6, which mesh axis 'model' of size 4 does not",
        ),
        (("model",), (6,), "next: 8"),
        (
            (None, "model"),
            (8,),
            "rank 2, the variable has rank 1: use "
            r"\('model',\)",
        ),
    ],
)
def test_each_problem_is_reported(axes, shape, words):
    problems = shard_shapes.fit_problems(axes, shape, MESH)
    assert len(problems) == 1
    pytest.raises(ValueError, _raise, problems[0]).match(words)


def _raise(text):
    raise ValueError(text)


@given(
    rows=st.integers(0, 3),
    columns=st.integers(0, 3),
    axes=st.sampled_from(
        [(None, None), ("batch", None), ("model", "batch"), (None, "model")]
    ),
)
def test_shards_cover_each_element_exactly_once(rows, columns, axes):
    shape = (rows * 4, columns * 4)
    seen = np.zeros(shape, int)
    used = [a for a in axes if a]
    for place in itertools.product(*(range(MESH[a]) for a in used)):
        location = {"batch": 0, "model": 0, **dict(zip(used, place))}
        slices = shard_shapes.shard_slices(axes, shape, MESH, location)
        seen[slices] += 1
        assert seen[slices].shape == shard_shapes.local_shape(axes, shape, MESH)
    assert (seen == 1).all()
