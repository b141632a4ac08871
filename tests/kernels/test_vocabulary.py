"""Open vocabularies of the C++ core match a reference in plain Python."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import vocabulary as reference
from tf_layoutmap._core.ops import native
from tf_layoutmap.vocabulary import sketch_conversion

COUNTS = (
    "num_lookups",
    "num_known",
    "num_admitted",
    "num_rejected",
    "num_full",
    "num_evicted",
    "num_expired",
)


def int64(values) -> np.ndarray:
    return np.array(list(values), np.int64)


class Pair:
    """Vocabulary of the C++ core and its reference; both get the same calls."""

    def __init__(self, capacity, *, num_shards=1, num_threads=1, **policy):
        self.core = native.Vocabulary(
            capacity, num_shards=num_shards, num_threads=num_threads, **policy
        )
        self.reference = reference.Vocabulary(capacity, **policy)
        self.num_shards = num_shards

    def admit(self, keys, step, oldest_in_flight, pinned_rows=()):
        pinned_rows = sorted(pinned_rows)
        keys = int64(keys)
        try:
            expected = self.reference.admit(
                keys.tolist(), step, oldest_in_flight, pinned_rows
            )
        except RuntimeError:
            with pytest.raises(RuntimeError, match="has no free row"):
                self.core.admit(
                    keys, step, oldest_in_flight, int64(pinned_rows)
                )
            return None
        found = self.core.admit(
            keys, step, oldest_in_flight, int64(pinned_rows)
        )
        assert found["rows"].tolist() == expected["rows"]
        assert (
            list(
                zip(
                    found["new_rows"].tolist(),
                    found["new_keys"].tolist(),
                    found["evicted"].tolist(),
                )
            )
            == expected["new"]
        )
        for name in COUNTS:
            assert found[name] == expected.get(name, 0), name
        return found

    def evict(self, keys, step, oldest_in_flight):
        try:
            expected = self.reference.evict(keys, oldest_in_flight)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="in flight uses its row"):
                self.core.evict(int64(keys), step, oldest_in_flight, int64([]))
            return
        assert (
            self.core.evict(
                int64(keys), step, oldest_in_flight, int64([])
            ).tolist()
            == expected
        )

    def evict_expired(self, step, oldest_in_flight):
        assert self.core.evict_expired(
            step, oldest_in_flight
        ).tolist() == self.reference.evict_expired(step, oldest_in_flight)

    def write(self, keys, step, last_steps=None, counts=None):
        keys = list(dict.fromkeys(keys))
        values = [
            None
            if one is None
            else [one[i % len(one)] for i in range(len(keys))]
            for one in (last_steps, counts)
        ]
        expected_rows, expected_new = self.reference.write(keys, step, *values)
        rows, new, num_full = self.core.write(
            int64(keys),
            *(np.array(one or [], np.int32) for one in values),
            step,
        )
        assert rows.tolist() == expected_rows
        assert new.tolist() == expected_new
        assert num_full == expected_rows.count(-1)

    def resize(self, capacity, step, num_shards):
        old = self.core.state()
        before, after = self.core.resize(capacity, num_shards, step)
        if self.reference.admission == "count":
            segments = len(old["seen"])
            self.core.set_sketch(
                *sketch_conversion.convert(
                    old["sketch"].reshape([segments, 2, -1]),
                    old["seen"],
                    self.core.num_rows // 8,
                )
            )
        assert list(
            zip(before.tolist(), after.tolist())
        ) == self.reference.resize(capacity, step)

    def check(self, keys):
        assert self.core.find(int64(keys)).tolist() == self.reference.find(keys)
        state = self.core.state()
        for name, expected in self.reference.state().items():
            np.testing.assert_array_equal(state[name], expected, name)
        if self.reference.admission == "count":
            sketch, seen = self.reference.sketch()
            np.testing.assert_array_equal(state["sketch"], sketch.ravel())
            np.testing.assert_array_equal(state["seen"], seen)
        has_key = np.flatnonzero(state["keys"] != reference.EMPTY)
        assert self.reference.export() == list(
            zip(
                state["keys"][has_key].tolist(),
                has_key.tolist(),
                state["last_step"][has_key].tolist(),
                state["count"][has_key].tolist(),
            )
        )


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "admission": st.sampled_from(["all", "count", "probability"]),
        "min_count": st.integers(1, 4),
        "probability": st.sampled_from([0.0, 0.3, 1.0]),
        "evict": st.sampled_from(["none", "lru", "lfu"]),
        "half_life_steps": st.integers(0, 3),
        "ttl_steps": st.integers(0, 5),
        "fails_when_full": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@st.composite
def calls(draw):
    """Draws the next operation on a vocabulary and its arguments."""
    kind = draw(
        st.sampled_from(
            ["admit"] * 6 + ["write"] * 2 + ["evict", "evict_expired", "resize"]
        )
    )
    keys = draw(
        st.lists(
            st.one_of(
                st.integers(-5, 120), st.integers(-(2**63) + 1, 2**63 - 1)
            ),
            max_size=60,
        )
    )
    return (
        kind,
        keys,
        draw(st.integers(0, 3)),
        draw(st.integers(1, 90)),
        draw(st.sets(st.integers(0, 63), max_size=8)),
    )


@given(
    capacity=st.integers(1, 90),
    num_shards=st.integers(1, 5),
    num_threads=st.sampled_from([1, 2, 8]),
    policy=POLICIES,
    program=st.lists(calls(), max_size=12),
)
def test_the_core_matches_the_reference(
    capacity, num_shards, num_threads, policy, program
):
    pair = Pair(
        capacity, num_shards=num_shards, num_threads=num_threads, **policy
    )
    step = 0
    for kind, keys, num_in_flight, size, pinned_rows in program:
        step += 1
        oldest = max(1, step - num_in_flight)
        if kind == "admit":
            pair.admit(keys, step, oldest, pinned_rows)
        elif kind == "evict":
            pair.evict(keys, step, oldest)
        elif kind == "evict_expired":
            pair.evict_expired(step, oldest)
        elif kind == "write":
            # The arguments are optional, so a quarter of the writes has none.
            pair.write(
                keys,
                step,
                [one % (step + 1) for one in pinned_rows] or None
                if size % 2
                else None,
                [size, 0, 2**31 - 1] if num_in_flight % 2 else None,
            )
        else:
            pair.resize(size, step, num_shards)
        pair.check(keys)


@pytest.mark.parametrize(
    "policy",
    [
        {"evict": "lru"},
        {
            "admission": "count",
            "min_count": 3,
            "evict": "lfu",
            "half_life_steps": 50,
            "ttl_steps": 400,
        },
    ],
    ids=["lru", "count_lfu"],
)
def test_half_a_million_operations_match_the_reference(policy):
    """The two parameters together run one million operations in 64 segments."""
    rng = np.random.default_rng(0)
    pair = Pair(2048, num_shards=3, num_threads=2, **policy)
    done, step = 0, 0
    while done < 500_000:
        step += 1
        # The frequent keys change over time.
        keys = (rng.zipf(1.3, 1000) * 7919 + step // 40) % 30_000
        pair.admit(
            keys,
            step,
            max(1, step - int(rng.integers(0, 4))),
            rng.integers(0, 2048, step % 3 * 2).tolist(),
        )
        done += len(keys)
        if step % 20 == 0:
            pair.evict((rng.integers(0, 30_000, 100)).tolist(), step, step)
            pair.evict_expired(step, step)
            pair.check(keys.tolist())
            done += 100
        if step % 7 == 0:
            written = rng.integers(-(2**40), 2**40, 50).tolist()
            pair.write(
                written + keys[:20].tolist(),
                step,
                rng.integers(0, step + 1, 70).tolist() if step % 2 else None,
                rng.integers(0, 9, 70).tolist() if step % 3 else None,
            )
            done += 70
        if step % 50 == 0:  # The vocabulary is moved to a different capacity.
            pair.resize(
                int(rng.integers(1500, 2600)), step, int(rng.integers(1, 8))
            )
            done += len(pair.reference.known)
    pair.check(range(30_000))


@pytest.mark.parametrize("admission", ["all", "count", "probability"])
def test_results_do_not_depend_on_threads_and_shards(admission):
    def run(num_shards, num_threads):
        rng = np.random.default_rng(1)
        one = native.Vocabulary(
            3000,
            admission=admission,
            min_count=2,
            probability=0.5,
            evict="lfu",
            half_life_steps=3,
            ttl_steps=9,
            num_shards=num_shards,
            num_threads=num_threads,
        )
        found = []
        for step in range(1, 13):
            keys = rng.zipf(1.2, 4000) % 20_000
            found.append(
                one.admit(
                    keys, step, max(1, step - 3), int64(range(0, 3000, 50))
                )
            )
        return [*found, one.state()]

    expected = run(1, 1)
    for num_shards in (1, 3, 7):
        for num_threads in (1, 2, 8):
            for found, wanted in zip(run(num_shards, num_threads), expected):
                for name, value in wanted.items():
                    np.testing.assert_array_equal(found[name], value, name)


def test_rows_in_flight_are_never_evicted():
    one = native.Vocabulary(8, evict="lru")
    one.admit(int64(range(8)), 1, 1, int64([]))
    found = one.admit(int64(range(8, 16)), 2, 1, int64([]))
    assert found["num_full"] == 8
    assert (found["rows"] == -1).all()
    kept = one.find(int64([3]))
    found = one.admit(int64(range(8, 16)), 3, 3, kept)
    assert (found["num_admitted"], found["num_full"]) == (7, 1)
    assert one.find(int64([3])) == kept


def test_a_known_key_is_not_evicted_by_new_keys_of_its_step():
    one = native.Vocabulary(8, evict="lru")
    one.admit(int64(range(8)), 1, 1, int64([]))
    # Seven new keys precede key 0, which has the least recently used row.
    found = one.admit(int64([*range(10, 17), 0]), 2, 2, int64([]))
    assert (found["rows"] >= 0).all()
    assert found["evicted"].tolist() == list(range(1, 8))


def test_a_step_without_free_rows_changes_nothing():
    one = native.Vocabulary(
        8, evict="none", fails_when_full=True, admission="count", min_count=2
    )
    one.admit(int64([1, 1, 2, 2, 3]), 1, 1, int64([]))
    before = one.state()
    with pytest.raises(
        RuntimeError,
        match=(
            "Key 16 has no free row: all 8 rows of its buckets are in use, of "
            "8 in the vocabulary"
        ),
    ):
        one.admit(
            int64([1, 3, *range(11, 18), *range(11, 19)]), 2, 2, int64([])
        )
    for name, value in one.state().items():
        np.testing.assert_array_equal(value, before[name], name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"in \[1, 2\^32\]. Received: 0"),
        ({"capacity": 2**32 + 1}, r"in \[1, 2\^32\]"),
        (
            {"capacity": 8, "min_count": 256},
            r"`min_count` must be in \[1, 255\]",
        ),
        ({"capacity": 8, "ttl_steps": -1}, "must be at least 0"),
        ({"capacity": 8, "probability": 1.5}, r"must be in \[0, 1\]"),
        ({"capacity": 8, "evict": "fifo"}, "one of none, lru, lfu"),
        (
            {"capacity": 8, "admission": "maybe"},
            "one of all, count, probability",
        ),
    ],
)
def test_invalid_vocabulary_settings_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        native.Vocabulary(**arguments)


def test_the_empty_key_value_raises():
    one = native.Vocabulary(8)
    with pytest.raises(ValueError, match="A key must not be -9223372036854"):
        one.admit(int64([5, reference.EMPTY]), 1, 1, int64([]))
    assert one.find(int64([5, reference.EMPTY])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("keys", "last_steps", "counts", "message"),
    [
        ([5, 6, 5], [], [], "Keys must be unique. Received twice: 5"),
        ([5, reference.EMPTY], [], [], "A key must not be -9223372036854"),
        ([5], [4], [], r"`last_steps` must be in \[0, 3\]. Received: 4"),
        ([5], [], [-1], r"`counts` must be in \[0, 2147483647\]. Received: -1"),
        (
            [5, 6],
            [1],
            [],
            "`last_steps` must have one value for each of 2 keys",
        ),
    ],
)
def test_an_invalid_write_raises_and_changes_nothing(
    keys, last_steps, counts, message
):
    one = native.Vocabulary(8)
    one.admit(int64([5]), 1, 1, int64([]))
    before = one.state()
    with pytest.raises(ValueError, match=message):
        one.write(
            int64(keys),
            np.array(last_steps, np.int32),
            np.array(counts, np.int32),
            3,
        )
    for name, value in one.state().items():
        np.testing.assert_array_equal(value, before[name], name)


@given(
    kind=st.sampled_from(["constant", "uniform", "normal", "truncated_normal"]),
    a=st.floats(-3, 3, width=32),
    b=st.floats(0, 3, width=32),
    seed=st.integers(0, 2**64 - 1),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    dim=st.integers(0, 9),
)
def test_initial_values_match_the_reference(kind, a, b, seed, keys, dim):
    found = native.first_values(kind, a, b, seed, int64(keys), dim)
    expected = reference.first_values(kind, a, b, seed, keys, dim)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["normal", "truncated_normal"])
def test_initial_values_have_the_requested_distribution(kind):
    found = (
        native.first_values(kind, 0.0, 1.0, 7, np.arange(2000), 50)
        .ravel()
        .astype(float)
    )
    normal = statistics.NormalDist()
    low = normal.cdf(-2) if kind == "truncated_normal" else 0.0
    quantiles = np.linspace(0.01, 0.99, 33)
    expected = [normal.inv_cdf(low + one * (1 - 2 * low)) for one in quantiles]
    # For 100,000 draws, the standard deviation of each quantile is below 0.012.
    np.testing.assert_allclose(
        np.quantile(found, quantiles), expected, atol=0.04
    )
    if kind == "truncated_normal":
        assert 1.98 < np.abs(found).max() <= 2.0
    else:
        assert 3.9 < np.abs(found).max() < 6.0
