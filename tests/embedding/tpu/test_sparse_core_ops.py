"""Tests the host ops of SparseCores, and the limits that they check.

`make test-tensorflow-tpu` runs these tests with the kernels of tensorflow-tpu.
`tests/emulation/programs/sparse_core_ops.py` runs them with the kernels of this
package. Both must have the results of `sparse_core_reference`.
"""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.embedding.tpu import sparse_core_batches
from tests.emulation import sparse_core_reference

tpu = tf.tpu.experimental.embedding

pytestmark = pytest.mark.skipif(
    not sparse_core_batches.have_kernels(),
    reason="the SparseCore ops have kernels only in tensorflow-tpu, and in "
    "programs that load the emulation",
)


def ragged(generator, num_samples, high):
    sizes = generator.integers(0, 6, num_samples)
    ids = generator.integers(0, high, sizes.sum())
    return tf.RaggedTensor.from_row_lengths(ids, sizes)


@pytest.mark.parametrize(
    "num_cores, per_chip", [(1, 1), (2, 2), (4, 4), (8, 2), (16, 4)]
)
def test_limits_equal_those_of_tensorflows_ops(num_cores, per_chip):
    adam = tpu.Adam(0.1)
    ads = tpu.TableConfig(70, 8, name="ads", optimizer=adam)
    bids = tpu.TableConfig(100, 8, name="bids", optimizer=adam)
    config = [tpu.FeatureConfig(table) for table in (ads, bids, ads, bids)]
    generator = np.random.default_rng(num_cores)
    num_replicas, num_samples = num_cores // per_chip, 8 * num_cores
    batches = []
    for _ in range(10):
        sparse = ragged(generator, num_samples, 7).to_sparse()
        batches.append(
            [
                ragged(generator, num_samples, 70),
                ragged(generator, num_samples, 100),
                sparse,
                tf.constant(generator.integers(0, 5, num_samples)),
            ]
        )
    report = tlm.inspect_ids(
        batches,
        config,
        sparse_cores=tlm.planning.SparseCores(num_cores, per_chip),
    )
    counts = report.sparse_cores[num_cores]["stacks"]["ads_bids"]
    for index, batch in enumerate(batches):
        stacks = [
            stack_of_replica(batch, replica, num_cores, per_chip)
            for replica in range(num_replicas)
        ]
        max_ids = counts["max_ids"][index]
        max_unique = counts["max_unique_ids"][index]
        per_sample = counts["ids_per_chip_per_sample"][index]
        ids, unique = zip(*(stack.stats() for stack in stacks))
        assert (max(ids), max(unique)) == (max_ids, max_unique)
        # The limits are sufficient.
        in_order = [stack.sort(max_ids, max_unique) for stack in stacks]
        for stack, ordered in zip(stacks, in_order):
            stack.buffers(ordered, per_sample)
        # Smaller limits are not sufficient.
        if max_unique > 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="gets"):
                [stack.sort(max_ids, max_unique - 1) for stack in stacks]
        with pytest.raises(tf.errors.InvalidArgumentError, match="gets"):
            [stack.sort(max_ids - 1, max_unique) for stack in stacks]
        with pytest.raises(tf.errors.InvalidArgumentError, match="per_chip"):
            for stack, ordered in zip(stacks, in_order):
                stack.buffers(ordered, per_sample - 1)


def stack_of_replica(batch, replica, num_cores, per_chip):
    """Returns the samples of one replica."""
    num_samples = 8 * per_chip
    rows = slice(replica * num_samples, (replica + 1) * num_samples)
    sparse = tf.sparse.slice(
        batch[2], [rows.start, 0], [num_samples, batch[2].shape[1]]
    )
    # The second table starts at the next multiple of 8 rows per core.
    offset = -(-70 // (8 * num_cores)) * 8 * num_cores
    rotation = per_chip % num_cores
    feature = sparse_core_batches.Feature
    return sparse_core_batches.Stack(
        {
            "0": feature(batch[0][rows], num_samples),
            "1": feature(batch[1][rows], num_samples, offset, rotation),
            "2": feature(sparse, num_samples),
            "3": feature(batch[3][rows], num_samples, offset, rotation),
        },
        num_cores=num_cores,
        cores_per_chip=per_chip,
    )


# Products with these weights are rounded.
WEIGHTS = (0.0, 0.1, 0.7, 1.0, 1.3, -0.3)


@st.composite
def features(draw, cores_per_chip):
    """One to four features of two tables."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        num_samples = cores_per_chip * draw(st.integers(1, 3))
        is_dense = draw(st.booleans())
        lengths = st.just(1) if is_dense else st.integers(0, 5)
        samples = [
            draw(st.lists(st.integers(0, 40), min_size=length, max_size=length))
            for length in draw(
                st.lists(lengths, min_size=num_samples, max_size=num_samples)
            )
        ]
        num_ids = sum(map(len, samples))
        weight = st.sampled_from(WEIGHTS)
        weights = draw(
            st.one_of(
                weight,
                st.lists(weight, min_size=num_ids, max_size=num_ids),
            )
        )
        # The tables begin at multiples of the number of cores.
        is_second = draw(st.booleans())
        found.append(
            sparse_core_reference.Feature(
                samples,
                weights,
                draw(st.sampled_from(["sum", "mean", "sqrtn"])),
                64 * is_second,
                cores_per_chip * is_second,
            )
        )
    return found


def triples_of(lists):
    """Returns (row, col, gain) triples with float32 gains."""
    return list(zip(*(values.numpy().tolist() for values in lists)))


def as_numbers(triples):
    return [(row, col, float(gain)) for row, col, gain in triples]


@hypothesis.given(st.data())
def test_results_equal_those_of_a_simple_program(data):
    cores_per_chip = data.draw(st.sampled_from([1, 2, 4]))
    num_cores = cores_per_chip * data.draw(st.sampled_from([1, 2, 4]))
    found = data.draw(features(cores_per_chip))
    kind = data.draw(st.sampled_from(["ragged", "sparse", "dense"]))
    stack = sparse_core_batches.stack_of(
        found, num_cores=num_cores, cores_per_chip=cores_per_chip, kind=kind
    )
    lists = sparse_core_reference.convert_all(found, num_cores, cores_per_chip)
    for core in range(cores_per_chip):
        names = ("row_ids_list", "col_ids_list", "gains_list")
        for index, (triples, _) in enumerate(lists[core]):
            converted = [stack.lists[core][name][index] for name in names]
            assert triples_of(converted) == as_numbers(triples)
    samples_per_core = stack.num_samples // cores_per_chip
    expected = [
        sparse_core_reference.sort(core, num_cores, samples_per_core)
        for core in lists
    ]
    max_ids = max(max(ids) for _, ids, _ in expected)
    max_unique = max(max(unique) for _, _, unique in expected)
    assert stack.stats() == (max_ids, max_unique)
    in_order = stack.sort(max(max_ids, 1), max(max_unique, 1))
    for ordered, (shards, ids, _) in zip(in_order, expected):
        assert triples_of(ordered[:3]) == as_numbers(
            [triple for shard in shards for triple in shard]
        )
        assert ordered[3].numpy().tolist() == [0, *np.cumsum(ids)]
    check_overflows(stack, expected, max_ids, max_unique)
    check_buffers(stack, in_order, [shards for shards, _, _ in expected], data)


def check_overflows(stack, expected, max_ids, max_unique):
    """Checks the messages if a limit is too small by one id."""
    for kind, count, index, limits in (
        ("ids", max_ids, 1, (max_ids - 1, 10_000)),
        ("unique ids", max_unique, 2, (10_000, max_unique - 1)),
    ):
        if count < 2:
            continue
        # The ops of the cores run one after the other.
        counts = next(core[index] for core in expected if count in core[index])
        message = (
            f"Sparse core {counts.index(count)} gets {count} {kind} while the "
            f"max {kind} per sparse core is set to be {count - 1} for table t"
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            stack.sort(*limits)


def check_buffers(stack, in_order, shards, data):
    per_sample = 8 * data.draw(st.integers(1, 4))
    drop = data.draw(st.booleans())
    capacity = per_sample * stack.num_samples
    expected = sparse_core_reference.buffers(shards, capacity, drop)
    if expected is None:
        message = f"max_ids_per_chip is set to be {capacity} which is not going"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            stack.buffers(in_order, per_sample, drop)
        return
    found = stack.buffers(in_order, per_sample, drop)
    pointers, triples = expected
    assert found.row_pointers_unpadded_size == len(pointers)
    assert found.ids_unpadded_size == len(triples)
    assert found.num_minibatches_per_sc == 1
    assert found.row_pointers.shape == [len(pointers)]
    assert found.row_pointers.numpy().tolist() == pointers
    values = [found.sorted_sample_ids, found.sorted_token_ids]
    values.append(found.sorted_gains)
    assert all(value.shape == [capacity] for value in values)
    # The other elements are not defined.
    assert triples_of([value[: len(triples)] for value in values]) == (
        as_numbers(triples)
    )


def test_minibatches_are_stored_one_after_the_other():
    """Two shards with 64 buckets; the split is in the middle."""
    counts = np.zeros([2 * 64 + 1], np.int32)
    # Shard 0 has an id in buckets 3 and 40, and shard 1 in bucket 31.
    counts[4:], counts[41:], counts[64 + 32 :] = 1, 2, 3
    ids = np.arange(3, dtype=np.int32)
    found = tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
        sorted_row_ids_list=[ids],
        sorted_col_ids_list=[ids + 10],
        sorted_gains_list=[np.ones(3, np.float32)],
        id_counts_list=[counts],
        splits=tf.constant(1, tf.int64),
        sample_count_per_sc=8,
        num_replica=2,
        max_minibatches_per_sc=4,
        max_ids_per_chip_per_sample=8,
        table_vocab_size=64,
        feature_width=8,
        table_name="t",
        allow_id_dropping=False,
    )
    assert found.num_minibatches_per_sc == 2
    # The parts of a minibatch without ids have no elements.
    assert found.row_pointers_unpadded_size == 16
    pointers = found.row_pointers.numpy()[:16].tolist()
    assert pointers == [1, 9, *[16] * 6, 17, 24, *[24] * 6]
    tokens = found.sorted_token_ids.numpy()
    assert tokens[[0, 8, 16]].tolist() == [10, 12, 11]
    assert found.ids_unpadded_size == 24


def convert(**changes):
    arguments = dict(
        indices_or_row_splits=np.array([0, 1, 2], np.int32),
        values=np.array([1, 2], np.int32),
        weights=1.0,
        sample_count=2,
        combiner="sum",
        num_sc_per_chip=1,
        row_offset=0,
        col_offset=0,
        col_shift=0,
        num_sc_shards=2,
        stacked_table_sample_count=2,
    )
    return tf.raw_ops.ConvertToListOfSparseCoreCooTensors(
        **{**arguments, **changes}
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(values=np.zeros([1, 2], np.int32)), "have dimension 1"),
        (dict(weights=np.ones([1], np.float32)), "2 elements for values and 1"),
        (dict(weights=np.ones([1, 2], np.float32)), "have dimension 0 or 1"),
        (dict(sample_count=3), "row_splits elements number the same"),
        (
            dict(indices_or_row_splits=np.zeros([0], np.int32), sample_count=3),
            "2 elements for values and sample count as 3",
        ),
        (
            dict(indices_or_row_splits=np.array([[1, 0], [0, 0]], np.int32)),
            "need to be sorted in ascending",
        ),
        (
            dict(indices_or_row_splits=np.array([[1, 0], [2, 0]], np.int32)),
            r"row_id 2 that was >= the sample count \(2\)",
        ),
        (dict(combiner="max"), 'Invalid combiner: only "sum", "mean".*max'),
        (dict(num_sc_shards=3), "num_sc_shards 3 is not a power of two"),
    ],
)
def test_invalid_inputs_raise_the_errors_of_tensorflow(changes, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        convert(**changes)
