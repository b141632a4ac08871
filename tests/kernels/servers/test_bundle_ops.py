"""Ops that update several embeddings on a server match separate updates."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from tests.kernels import cases
from tests.kernels.servers.server_cases import (
    DIMS,
    HYPERPARAMETERS,
    Cluster,
    shardings,
    tokens,
    wires,
)
from tests.reference import servers
from tf_layoutmap._core import ops

InvalidArgument = tf.errors.InvalidArgumentError
SHARDING = [0, 1, 0, 1, 0]


def apply_bundle(clusters, server, bundle):
    return ops.apply_rows_of_bundle(
        servers=[one.server(server) for one in clusters], bundle=bundle
    )


def update_of(cluster, server, token, seed, wire="float32"):
    """Returns random rows, their gradients, and the request for the update."""
    random = np.random.default_rng(seed)
    rows, gradients = [], []
    for shard in cluster.refs[server].shards:
        size = len(shard.rows)
        own = np.flatnonzero(random.integers(0, 2, size)).tolist()
        rows.append(own)
        gradients.append(cases.floats(len(own), DIMS[shard.table], seed=seed))
    request = servers.apply_message(
        token,
        0,
        rows,
        [HYPERPARAMETERS[t] for t in cluster.tables[server]],
        gradients,
        wire,
    )
    return rows, gradients, request


@given(
    st.lists(
        hypothesis_numpy.arrays(np.uint8, st.integers(0, 20)),
        min_size=1,
        max_size=4,
    )
)
def test_a_bundle_contains_the_requests(requests):
    found = ops.bundle_requests(requests=requests)
    cases.assert_bitwise_equal(found, servers.bundle(requests))


@given(
    layouts=st.lists(shardings, min_size=1, max_size=3),
    steps=st.lists(tokens, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    wire=wires,
)
def test_each_embedding_is_updated_as_by_a_separate_op(
    layouts, steps, seed, wire
):
    bundled = [Cluster(one, wire=wire) for one in layouts]
    separate = [Cluster(one, wire=wire) for one in layouts]
    for step, token in enumerate(steps):
        requests = [
            update_of(one, 0, token, seed + 7 * step + i, wire)[-1]
            for i, one in enumerate(bundled)
        ]
        try:
            expected = [
                bool(one.apply(0, request))
                for one, request in zip(separate, requests, strict=True)
            ]
        except tf.errors.FailedPreconditionError:
            # The same closure was already applied, or is late. All embeddings
            # have applied the same closures.
            with pytest.raises(tf.errors.FailedPreconditionError):
                apply_bundle(bundled, 0, servers.bundle(requests))
        else:
            found = apply_bundle(bundled, 0, servers.bundle(requests))
            assert found.numpy().tolist() == expected
        for one, other in zip(bundled, separate, strict=True):
            for name, variables in one.variables[0].items():
                for found, expected_one in zip(
                    tf.nest.flatten(variables),
                    tf.nest.flatten(other.variables[0][name]),
                    strict=True,
                ):
                    cases.assert_bitwise_equal(found, expected_one.numpy())


def test_the_same_embedding_can_have_several_updates():
    cluster = Cluster(SHARDING)
    requests = [
        update_of(cluster, 0, (1, number, 0), seed=number)[-1]
        for number in range(3)
    ]
    expected = Cluster(SHARDING)
    for request in requests:
        expected.apply(0, request)
    found = apply_bundle([cluster] * 3, 0, servers.bundle(requests))
    assert found.numpy().tolist() == [True] * 3
    for one, other in zip(
        cluster.variables[0]["shards"],
        expected.variables[0]["shards"],
        strict=True,
    ):
        cases.assert_bitwise_equal(one, other.numpy())


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda whole, second: whole[:-1], "which do not match the sizes"),
        (lambda whole, second: whole[:15], "sizes of 2 messages"),
        (
            lambda whole, second: np.concatenate(
                [whole, np.zeros(8, np.uint8)]
            ),
            "which do not match the sizes",
        ),
        (
            lambda whole, second: servers.bundle([second, second[:-1]]),
            "Received: too few|must have",
        ),
        (
            lambda whole, second: servers.bundle([second, second[:31]]),
            "a closure header of 32 bytes",
        ),
        (lambda whole, second: whole[None], "`bundle` must have rank 1"),
    ],
)
def test_a_bundle_that_is_not_valid_changes_nothing(change, words):
    clusters = [Cluster(SHARDING), Cluster(SHARDING)]
    requests = [
        servers.apply_message(
            (1, 0, 0),
            0,
            [[2], [], []],
            [HYPERPARAMETERS[t] for t in one.tables[0]],
            [np.ones([1, 3], np.float32), *[np.zeros([0, 16], np.float32)] * 2],
        )
        for one in clusters
    ]
    whole = servers.bundle(requests)
    with pytest.raises(InvalidArgument, match=words):
        apply_bundle(clusters, 0, change(whole, requests[1]))
    for one in clusters:
        one.check()
    assert apply_bundle(clusters, 0, whole).numpy().tolist() == [True, True]


def test_requests_must_be_vectors():
    with pytest.raises(InvalidArgument, match="`requests` must have rank 1"):
        ops.bundle_requests(requests=[np.zeros([1, 2], np.uint8)])
