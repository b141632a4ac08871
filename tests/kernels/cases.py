"""Hypothesis strategies and helpers for the tests of ops."""

import dataclasses

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.reference import partition

PLACEMENTS = ("div", "mod", "offsets")
ID_TYPES = (np.int32, np.int64)
DIMS = (1, 3, 16, 64, 67, 200)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Placement and offsets of a sharded table."""

    placement: str
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    @property
    def num_shards(self) -> int:
        return len(self.offsets) - 1

    def attrs(self) -> dict:
        return {
            "offsets": np.array(self.offsets, np.int64),
            "placement": self.placement,
        }


@st.composite
def shardings(draw, *, min_rows=1):
    """Draws a placement, possibly with empty shards or too many shards."""
    placement = draw(st.sampled_from(PLACEMENTS))
    if placement == "offsets":
        sizes = draw(
            st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(
                lambda sizes: sum(sizes) >= min_rows
            )
        )
        return Sharding(placement, (0, *np.cumsum(sizes).tolist()))
    num_rows = draw(st.integers(min_rows, 25))
    num_shards = draw(st.integers(1, 30))
    offsets = partition.even_offsets(num_rows, num_shards)
    return Sharding(placement, tuple(offsets.tolist()))


@st.composite
def ragged(draw, num_rows, *, dtype=None, max_samples=6):
    """Draws (ids, row_splits): samples of 0 to 5 ids, with many duplicates."""
    dtype = dtype or draw(st.sampled_from(ID_TYPES))
    sizes = draw(st.lists(st.integers(0, 5), max_size=max_samples))
    ids = draw(
        st.lists(
            st.integers(0, num_rows - 1),
            min_size=sum(sizes),
            max_size=sum(sizes),
        )
    )
    return (
        np.array(ids, dtype),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def floats(*shape, seed=0) -> np.ndarray:
    """Returns values in [-1, 1) whose sums must be rounded."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def shard_variables(table: np.ndarray, sharding: Sharding) -> list[tf.Variable]:
    return [
        tf.Variable(shard)
        for shard in partition.split(
            table, sharding.offsets, sharding.placement
        )
    ]


def joined(variables, sharding: Sharding) -> np.ndarray:
    return partition.join(
        [variable.numpy() for variable in variables],
        sharding.offsets,
        sharding.placement,
    )


def handles(variables) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]


def assert_bitwise_equal(actual, expected):
    """Asserts that two values have equal bits, dtypes and shapes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes(), (actual, expected)
