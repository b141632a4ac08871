"""Tests IdReport.sparse_core_limits, which computes limits of SparseCores.

`tests/embedding/tpu/test_sparse_core_ops.py` compares the same numbers with
TensorFlow's ops.
"""

import collections
import io
import json
import math
import xml.dom.minidom

import numpy as np
import pytest
import tensorflow as tf
from rich import console

import tf_layoutmap as tlm
from tf_layoutmap.embedding.inspection import sparse_core_counts

tpu = tf.tpu.experimental.embedding
Cores = tlm.planning.SparseCores


def config():
    """Two tables that TensorFlow stacks, and one of another dimension."""
    adam = tpu.Adam(0.1)
    ads = tpu.TableConfig(70, 8, name="ads", optimizer=adam)
    bids = tpu.TableConfig(100, 8, name="bids", optimizer=adam)
    users = tpu.TableConfig(40, 16, name="users", optimizer=adam)
    return {
        "ad": tpu.FeatureConfig(ads),
        "bid": tpu.FeatureConfig(bids),
        "seen": tpu.FeatureConfig(ads),
        "user": tpu.FeatureConfig(users),
    }


def ragged(generator, num_samples, high=70):
    sizes = generator.integers(0, 5, num_samples)
    ids = generator.integers(0, high, sizes.sum())
    return tf.RaggedTensor.from_row_lengths(ids, sizes)


def batch(generator, num_samples):
    return {
        "ad": ragged(generator, num_samples),
        "bid": ragged(generator, num_samples, 3),
        "seen": ragged(generator, 2 * num_samples, 9),
        "user": tf.constant(generator.integers(0, 40, num_samples)),
    }


def expected_counts(features, rotations, cores, num_replicas):
    """Counts with dictionaries; `features` maps names to (table, samples)."""
    pairs = collections.defaultdict(set)
    num_blocks = num_replicas * cores.cores_per_chip
    for name, (table, samples) in features.items():
        for sample, ids in enumerate(samples):
            block = sample * num_blocks // len(samples)
            for row in ids:
                shard = (row + rotations[table]) % cores.num_cores
                pairs[block, shard].add((name, sample, table, row))
    unique = {
        place: {(table, row) for _, _, table, row in found}
        for place, found in pairs.items()
    }
    per_chip = [0] * num_replicas
    for (block, _), found in pairs.items():
        per_chip[block // cores.cores_per_chip] += 8 * math.ceil(len(found) / 8)
    num_samples = sum(len(samples) for _, samples in features.values())
    num_samples //= num_replicas
    per_sample = 1
    while (
        per_sample * num_samples < max(per_chip) or per_sample * num_samples % 8
    ):
        per_sample += 1
    return (
        max(map(len, pairs.values()), default=0),
        max(map(len, unique.values()), default=0),
        per_sample,
    )


@pytest.mark.parametrize("num_cores, per_chip", [(1, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("replicas", [None, 1])
def test_counts_equal_those_of_a_simple_program(num_cores, per_chip, replicas):
    cores = Cores(num_cores, per_chip, replicas)
    generator = np.random.default_rng(num_cores)
    batches = [batch(generator, 16) for _ in range(3)]
    report = tlm.inspect_ids(batches, config(), sparse_cores=cores)
    stacks = report.sparse_cores[num_cores]["stacks"]
    assert list(stacks) == ["ads_bids", "users"]
    assert stacks["ads_bids"]["tables"] == ["ads", "bids"]
    # TensorFlow rotates the second table by the cores of one chip.
    rotations = [0, per_chip % num_cores]
    for index, values in enumerate(batches):
        features = {
            name: (table, values[name].to_list())
            for name, table in (("ad", 0), ("bid", 1), ("seen", 0))
        }
        found = tuple(
            stacks["ads_bids"][kind][index]
            for kind in ("max_ids", "max_unique_ids", "ids_per_chip_per_sample")
        )
        assert found == expected_counts(
            features, rotations, cores, replicas or num_cores // per_chip
        )
        users = {"user": (0, [[row] for row in values["user"].numpy()])}
        assert (
            stacks["users"]["max_ids"][index]
            == (
                expected_counts(
                    users, [0], cores, replicas or num_cores // per_chip
                )[0]
            )
        )


def report_of(*max_ids, **options):
    """A report with one batch per number of different ids of one core."""
    words = tpu.TableConfig(10_000, 8, name="words", optimizer=tpu.SGD(0.1))
    batches = [
        {"x": tf.RaggedTensor.from_row_lengths(range(count), [count, 0])}
        for count in max_ids
    ]
    return tlm.inspect_ids(
        batches,
        {"x": tpu.FeatureConfig(words)},
        sparse_cores=Cores(1, 1),
        **options,
    )


def test_a_limit_holds_for_the_requested_share_of_the_batches():
    report = report_of(10, 40, 20, 300)
    limits = report.sparse_core_limits(confidence=0.75)
    assert limits.max_ids_per_table == {"words": 40}
    assert limits.max_unique_ids_per_table == {"words": 40}
    assert limits.overflow_share == 0.25
    assert limits.default_overflow_share == 0.25
    assert limits.curves["words"]["max_ids"] == [
        (10, 0.75),
        (20, 0.5),
        (40, 0.25),
        (300, 0.0),
    ]
    limits = report.sparse_core_limits()
    assert limits.max_ids_per_table == {"words": 300}
    # Two samples share a buffer of 304 ids.
    assert limits.max_ids_per_chip_per_sample == 152
    assert limits.overflow_share == 0


def test_limits_are_arguments_of_tensorflows_config():
    limits = report_of(10).sparse_core_limits()
    found = tpu.SparseCoreEmbeddingConfig(
        max_ids_per_chip_per_sample=limits.max_ids_per_chip_per_sample,
        max_ids_per_table=limits.max_ids_per_table,
        max_unique_ids_per_table=limits.max_unique_ids_per_table,
    )
    assert found.max_ids_per_table == {"words": 10}


def test_a_limit_is_positive_without_ids():
    limits = report_of(0).sparse_core_limits()
    assert limits.max_ids_per_table == {"words": 1}


def test_equal_ids_of_a_sample_are_merged():
    words = tpu.TableConfig(64, 8, name="words", optimizer=tpu.SGD(0.1))
    features = {"x": tpu.FeatureConfig(words)}
    ids = [[3, 5, 3, 3], [3, 0, 0, 0]]
    for value, expected in (
        (tf.ragged.constant(ids, dtype=tf.int64), (4, 3)),
        # The sparse tensor has no ids 0.
        (tf.sparse.from_dense(ids), (3, 2)),
        # Each element of a dense tensor is a sample.
        (tf.constant(ids), (8, 3)),
    ):
        limits = tlm.inspect_ids(
            [{"x": value}], features, sparse_cores=Cores(1, 1)
        ).sparse_core_limits()
        assert limits.max_ids_per_table["words"] == expected[0]
        assert limits.max_unique_ids_per_table["words"] == expected[1]


def test_ids_out_of_range_are_counted_as_by_tensorflow():
    words = tpu.TableConfig(8, 8, name="words", optimizer=tpu.SGD(0.1))
    limits = tlm.inspect_ids(
        [{"x": tf.constant([1_000_000, -1, 2, 3])}],
        {"x": tpu.FeatureConfig(words)},
        sparse_cores=Cores(4, 4),
    ).sparse_core_limits()
    assert limits.max_ids_per_table == {"words": 1}


def test_a_smaller_batch_is_extended_with_empty_samples():
    generator = np.random.default_rng(0)
    first, last = batch(generator, 16), batch(generator, 6)
    cores = Cores(8, 4)
    report = tlm.inspect_ids([first, last], config(), sparse_cores=cores)
    stack = report.sparse_cores[8]["stacks"]["ads_bids"]
    padded = {
        name: (
            table,
            last[name].to_list()
            + [[]] * (first[name].nrows() - last[name].nrows()).numpy(),
        )
        for name, table in (("ad", 0), ("bid", 1), ("seen", 0))
    }
    expected = expected_counts(padded, [0, 4], cores, 2)
    assert stack["max_ids"][1] == expected[0]
    with pytest.raises(ValueError, match="not have more samples than the fir"):
        tlm.inspect_ids([last, first], config(), sparse_cores=Cores(2, 2))


def test_several_numbers_of_cores_are_counted_in_one_pass():
    generator = np.random.default_rng(1)
    report = tlm.inspect_ids(
        iter([batch(generator, 16)]),
        config(),
        sparse_cores=[Cores(4), Cores(2, 2), Cores(16, table_stacking=False)],
    )
    by_cores = [
        report.sparse_core_limits(num_cores=cores).max_ids_per_table
        for cores in (2, 4)
    ]
    assert by_cores[0]["ads_bids"] > by_cores[1]["ads_bids"]
    unstacked = report.sparse_core_limits(num_cores=16).max_ids_per_table
    assert sorted(unstacked) == ["ads", "bids", "users"]
    with pytest.raises(ValueError, match=r"\[4, 2, 16\].*num_cores=None"):
        report.sparse_core_limits()


def test_the_report_shows_the_numbers():
    report = report_of(10, 400)
    text = io.StringIO()
    report.print(console.Console(file=text, width=160))
    assert "SparseCores" in text.getvalue()
    assert "400" in text.getvalue()
    page = report.html()
    assert "default is 256" in page
    xml.dom.minidom.parseString(
        page.partition("<body>")[2]
        .partition("<h2>SparseCores</h2>")[2]
        .partition("<figure>")[2]
        .partition("</figure>")[0]
        .partition("</figcaption>")[2]
    )
    counts = json.loads(json.dumps(report.to_dict()))["sparse_cores"]["1"]
    assert counts["stacks"]["words"]["max_ids"] == [10, 400]
    without = tlm.inspect_ids([], config(), optimizer=tpu.SGD(0.1))
    assert "SparseCores" not in without.html()


def test_the_configs_of_the_caller_are_not_changed():
    features = config()
    generator = np.random.default_rng(2)
    tlm.inspect_ids([batch(generator, 16)], features, sparse_cores=Cores(16))
    table = features["ad"].table
    assert (table.vocabulary_size, table.layout) == (70, None)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((6, 2), "power of two"),
        ((2, 4), "divisible by `cores_per_chip`"),
        ((8, 8), "cores_per_chip"),
        ((8, 4, 3), "replicas_per_batch"),
        ((8, 4, 1, 1), "table_stacking"),
    ],
)
def test_invalid_numbers_of_cores_raise(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Cores(*arguments)


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="multiple of 4.*replicas_per_batch"):
        tlm.inspect_ids(
            [{"x": tf.constant([1, 2, 3])}],
            {"x": config()["ad"]},
            sparse_cores=Cores(4),
        )
    with pytest.raises(ValueError, match="must be empty if `open_tables`"):
        report_of(1, open_tables=["words"])
    with pytest.raises(TypeError, match="tlm.planning.SparseCores"):
        tlm.inspect_ids([], config(), sparse_cores=[4])
    with pytest.raises(ValueError, match="different numbers of cores"):
        tlm.inspect_ids([], config(), sparse_cores=[Cores(4), Cores(4, 2)])
    with pytest.raises(ValueError, match=r"number in \(0, 1\]"):
        report_of(1).sparse_core_limits(confidence=0)
    with pytest.raises(ValueError, match="at least one batch"):
        report_of().sparse_core_limits()
    with pytest.raises(ValueError, match="passed to tlm.inspect_ids"):
        report_of(1).sparse_core_limits(num_cores=2)


def test_a_quantile_is_not_rounded_up():
    # 0.7 * 10 is 7.000000000000001 in floats for some factors.
    values = list(range(1, 101))
    for percent in range(1, 101):
        assert sparse_core_counts.limit_of(values, percent / 100) == percent
