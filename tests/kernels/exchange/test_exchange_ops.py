"""Ops for tables sharded over processes match a list-based reference."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.kernels.servers.test_server_ops import (
    DIMS,
    FEATURES,
    batches,
    inputs,
    plan_attrs,
)
from tests.reference import exchange, servers
from tf_layoutmap._core import ops

InvalidArgument = tf.errors.InvalidArgumentError

# `OWNERS` contains the owner of each shard of the two tables. `OWNED` contains
# the shards of each owner as tuples (table, first row, number of rows).
OWNERS = [0, 1, 0, 1, 2]
OWNED = [[(0, 0, 4), (1, 0, 2)], [(0, 4, 3), (1, 2, 0)], [(1, 2, 3)]]


def plan(batch, id_type=np.int64, training=True, **changes):
    attrs = plan_attrs(OWNERS, 3, **changes)
    return ops.plan_exchange(
        **inputs(batch, id_type),
        training=training,
        num_owners=attrs.pop("num_servers"),
        shard_owners=attrs.pop("shard_servers"),
        **attrs,
    )


def parts_of(batch, owner):
    """Returns for each feature the samples that use the shards of an owner."""
    found = []
    for feature, samples in zip(FEATURES, batch, strict=True):
        own = [
            one for one in OWNED[owner] if one[0] == feature.table and one[2]
        ]
        found.append(
            exchange.part(feature, samples, *own[0][1:]) if own else ([], [])
        )
    return found


@given(batch=batches(), id_type=st.sampled_from(cases.ID_TYPES))
def test_an_owner_receives_its_part_of_each_feature(batch, id_type):
    found = plan(batch, id_type)
    assert found.error.numpy() == b""
    for owner, words in enumerate(found.contributions):
        read = ops.read_contributions(words=words, num_features=len(FEATURES))
        expected = exchange.inputs(parts_of(batch, owner))
        for f, (ids, splits, gains) in enumerate(expected):
            cases.assert_bitwise_equal(read.ids[f], ids)
            cases.assert_bitwise_equal(read.splits[f], splits)
            assert read.num_samples[f] == len(splits) - 1
            weights = read.weights[f].numpy()
            # Weights are not sent if all of them are 1 after the combiner was
            # applied.
            cases.assert_bitwise_equal(
                weights if len(weights) else np.ones_like(gains), gains
            )


@given(batch=batches())
def test_requests_and_sizes_match_the_rows(batch):
    found = plan(batch)
    for owner, request in enumerate(found.requests):
        shards = [
            servers.Shard(t, first, np.zeros([size, DIMS[t]]), [])
            for t, first, size in OWNED[owner]
        ]
        rows = [
            servers.rows_of_shard(FEATURES, batch, shard) for shard in shards
        ]
        num_rows = [len(one) for one in rows]
        words = np.array([*num_rows, *sum(rows, [])], np.uint32)
        cases.assert_bitwise_equal(request, words)
        cases.assert_bitwise_equal(
            ops.write_request(words=request, num_shards=len(shards)),
            servers.fetch(rows),
        )
        outputs = [len(one) for one, _ in parts_of(batch, owner)]
        assert found.sizes[owner].numpy().tolist() == [
            len(words),
            found.contributions[owner].shape[0],
            2
            + sum(
                count * DIMS[t]
                for count, (t, *_) in zip(num_rows, OWNED[owner], strict=True)
            ),
            sum(
                count * DIMS[feature.table]
                for count, feature in zip(outputs, FEATURES, strict=True)
            ),
        ]


@given(batch=batches(), seed=st.integers(0, 9))
def test_an_owner_receives_the_gradients_of_its_outputs(batch, seed):
    found = plan(batch)
    gradients = [
        cases.floats(
            len(samples) * max(1, feature.max_sequence_length),
            DIMS[feature.table],
            seed=seed,
        )
        for feature, samples in zip(FEATURES, batch, strict=True)
    ]
    values = ops.split_gradients(
        plan=found.plan, gradients=gradients, num_owners=3
    )
    for owner, own in enumerate(values):
        cases.assert_bitwise_equal(
            own, exchange.gradients(parts_of(batch, owner), gradients)
        )


@pytest.mark.parametrize(
    "words", [[], [1], [1, 0], [2, 0, 5], [0, 0, 5], [2**32 - 1, 2**32 - 1, 1]]
)
def test_a_request_for_other_shards_raises(words):
    with pytest.raises(
        InvalidArgument,
        match=(
            "`words` must be the number of rows of each of 2 shards.*"
            f"Received: {len(words)} words"
        ),
    ):
        ops.write_request(words=np.array(words, np.uint32), num_shards=2)


def test_a_forward_only_step_contributes_nothing():
    found = plan([[[(1, 1.0)]] for _ in FEATURES], training=False)
    assert [one.shape[0] for one in found.contributions] == [0, 0, 0]
    assert sum(one.shape[0] for one in found.requests) > 5
    read = ops.read_contributions(words=found.contributions[0], num_features=2)
    assert read.num_samples.numpy().tolist() == [0, 0]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "Feature 'clicked', sample 1: id -1"),
        ({"num_samples": np.array([2, 2, 2], np.int64)}, "num_samples"),
    ],
)
def test_batch_errors_are_returned_and_not_raised(changes, words):
    batch = [[[(0, 1.0)], [(-1, 1.0)]], *([[], []] for _ in FEATURES[1:])]
    attrs = plan_attrs(OWNERS, 3)
    found = ops.plan_exchange(
        **{**inputs(batch), **changes},
        training=True,
        num_owners=attrs.pop("num_servers"),
        shard_owners=attrs.pop("shard_servers"),
        **attrs,
    )
    assert words in found.error.numpy().decode()
    assert not found.sizes.numpy().any()
    with pytest.raises(InvalidArgument, match="must be an output of"):
        ops.split_gradients(
            plan=found.plan,
            gradients=[np.zeros([2, 3], np.float32)],
            num_owners=3,
        )


def test_malformed_contributions_raise():
    with pytest.raises(InvalidArgument, match="contributions of 2 features"):
        ops.read_contributions(
            words=np.array([1, 2, 0], np.uint32), num_features=2
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_owners": 2}, "num_owners"),
        ({"gradients": [np.zeros([1, 3], np.float32)]}, "num_features"),
        (
            {
                "gradients": [
                    np.zeros([2, DIMS[one.table]], np.float32)
                    for one in FEATURES
                ]
            },
            "shape|must have|Received",
        ),
    ],
)
def test_gradients_of_another_batch_raise(changes, words):
    batch = [[[(1, 1.0)]] for _ in FEATURES]
    found = plan(batch)
    good = {
        "gradients": [
            np.zeros(
                [max(1, one.max_sequence_length), DIMS[one.table]], np.float32
            )
            for one in FEATURES
        ],
        "num_owners": 3,
    }
    ops.split_gradients(plan=found.plan, **good)
    with pytest.raises(InvalidArgument, match=words):
        ops.split_gradients(plan=found.plan, **{**good, **changes})
