"""`CountKeys` and `SampleKeys` match a reference in plain Python."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops


def trained(capacity, steps, **policy):
    """Returns a reference vocabulary after steps, and its last step."""
    one = reference.Vocabulary(capacity, **policy)
    for step, keys in enumerate(steps, 1):
        one.admit(keys, step, step)
    return one, len(steps)


class Shards:
    """Variables with the state of a reference vocabulary, in shards."""

    def __init__(self, one, step, sizes=None, first=0):
        self.num_buckets, self.first = one.num_buckets, first
        sizes = sizes or [one.num_buckets]
        ends = first + np.cumsum([0, *sizes])
        state = one.state()
        self.lanes = [
            tf.Variable(state[name].reshape([-1, 8])[begin:end])
            for name in ("keys", "last_step", "count")
            for begin, end in zip(ends, ends[1:])
        ]
        self.numbers = tf.Variable(tf.constant([step] + [0] * 9, tf.int64))
        self.common = {
            "lanes": [lane.handle for lane in self.lanes],
            "numbers": self.numbers.handle,
            "offsets": np.cumsum([0, *sizes]),
            "half_life_steps": one.half_life,
            "first_bucket": first,
            "table": "words",
        }

    def counts(self, keys, **changed):
        return ops.count_keys(
            **{
                **self.common,
                "keys": np.array(keys, np.int64),
                "vocabulary_buckets": self.num_buckets,
                **changed,
            }
        )

    def sample(self, num_sampled, by="count", seed=(1, 2), **changed):
        return ops.sample_keys(
            **{
                **self.common,
                "num_sampled": tf.constant(num_sampled, tf.int64),
                "seed": np.array(seed, np.int64),
                "by": by,
                **changed,
            }
        )


def check_sample(found, expected, total):
    for values, name in zip(zip(*expected), ("keys", "rows", "weights")):
        assert getattr(found, name).numpy().tolist() == list(values), name
    assert len(found.keys) == len(expected)
    assert int(found.total) == total


@given(data=st.data())
def test_ops_match_the_reference(data):
    half_life = data.draw(st.integers(0, 3), "half_life")
    policy = {"evict": "lfu", "half_life_steps": half_life} if half_life else {}
    key = st.integers(-50, 50) | st.integers(-(2**63) + 1, 2**63 - 1)
    steps = data.draw(
        st.lists(st.lists(key, min_size=1, max_size=40), max_size=6), "steps"
    )
    one, step = trained(
        data.draw(st.integers(1, 700), "capacity"), steps, **policy
    )
    step += data.draw(st.integers(0, 9), "steps_later")
    num_shards = data.draw(st.integers(1, min(4, one.num_buckets)), "shards")
    cuts = np.linspace(0, one.num_buckets, num_shards + 1).astype(int)
    shards = Shards(one, step, np.diff(cuts).tolist())
    keys = [*one.known, *data.draw(st.lists(key, max_size=9)), reference.EMPTY]
    assert shards.counts(keys).numpy().tolist() == one.counts(keys, step)
    seed = data.draw(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2))
    for by in ("count", "uniform"):
        num_sampled = data.draw(st.integers(0, 50))
        check_sample(
            shards.sample(num_sampled, by, seed),
            *one.sample(num_sampled, by, seed, step),
        )


def test_large_vocabularies_are_sampled_in_blocks():
    # 2,560 buckets are 40 blocks.
    draw = np.random.default_rng(0)
    one, step = trained(20_000, [draw.integers(0, 10**6, 15_000).tolist()] * 2)
    shards = Shards(one, step, [1, one.num_buckets - 1])
    for by in ("count", "uniform"):
        check_sample(
            shards.sample(3000, by), *one.sample(3000, by, (1, 2), step)
        )


def test_frequencies_match_the_probabilities():
    one, step = trained(64, [[5] * 7 + [9] * 2 + [11]])
    counts = {5: 7, 9: 2, 11: 1}
    shards = Shards(one, step)
    num_sampled = 100_000
    for by, weights in (
        ("count", counts),
        ("uniform", dict.fromkeys(counts, 1)),
    ):
        found = collections.Counter(
            shards.sample(num_sampled, by).keys.numpy().tolist()
        )
        assert found.keys() == counts.keys()
        for key, weight in weights.items():
            p = weight / sum(weights.values())
            # Five standard deviations.
            bound = 5 * (num_sampled * p * (1 - p)) ** 0.5
            assert abs(found[key] - num_sampled * p) < bound


def test_keys_with_the_count_0_are_sampled_like_keys_with_the_count_1():
    one, _ = trained(64, [[5, 9]])
    one.write([5], 1, counts=[0])
    found = Shards(one, 1).sample(200)
    assert set(found.keys.numpy().tolist()) == {5, 9}
    assert set(found.weights.numpy().tolist()) == {1}
    assert int(found.total) == 2


def test_counts_up_to_the_largest_are_exact():
    one, _ = trained(64, [[5, 9, 11]])
    one.write([5, 9], 1, counts=[2**31 - 1] * 2)
    shards = Shards(one, 1)
    assert shards.counts([5]).numpy().tolist() == [2**31 - 1]
    check_sample(shards.sample(99), *one.sample(99, "count", (1, 2), 1))
    assert int(shards.sample(0).total) == 2**32 - 1


def test_an_empty_vocabulary_gives_empty_samples():
    found = Shards(*trained(64, [])).sample(5)
    assert [len(one) for one in found[:3]] == [0, 0, 0]
    assert int(found.total) == 0


def test_parts_of_a_vocabulary_hold_their_own_keys():
    one, step = trained(4096, [range(1000)])
    per_segment = one.per_segment
    sizes = [per_segment * 5, one.num_buckets - per_segment * 5]
    parts = [
        Shards(one, step, [sizes[0]]),
        Shards(one, step, [sizes[1]], sizes[0]),
    ]
    keys = list(range(1100))
    total = sum(part.counts(keys).numpy() for part in parts)
    assert total.tolist() == one.counts(keys, step)
    for part in parts:
        found = part.sample(100)
        assert one.find(found.keys.numpy()) == found.rows.numpy().tolist()
    assert sum(int(part.sample(0).total) for part in parts) == 1000


def test_shapes_of_keys_are_kept():
    shards = Shards(*trained(64, [[5, 5, 9]]))

    @tf.function
    def count(keys):
        found = shards.counts(keys)
        assert found.shape.as_list() == [2, 2]
        return found

    assert count([[5, 9], [5, 1]]).numpy().tolist() == [[2, 1], [2, 0]]
    assert shards.counts(np.zeros([0, 3])).shape == [0, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_sampled": tf.constant(-1, tf.int64)}, "at least 0.*-1"),
        ({"seed": [1, 2, 3]}, "two values.*3"),
        ({"offsets": [0, 7]}, "words"),
        ({"offsets": [0, 1, 8]}, "lanes"),
    ],
)
def test_invalid_inputs_raise(changed, message):
    shards = Shards(*trained(64, [[5]]))
    changed = {
        name: np.array(value, np.int64) if isinstance(value, list) else value
        for name, value in changed.items()
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        shards.sample(**{"num_sampled": 3, **changed})


def test_counts_outside_of_the_vocabulary_raise():
    shards = Shards(*trained(64, [[5]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="8 buckets"):
        shards.counts([5], first_bucket=1)
