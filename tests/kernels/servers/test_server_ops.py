"""Ops of steps over parameter servers match a list-based reference."""

import gc
import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.kernels import cases
from tests.kernels.servers.server_cases import (
    DIMS,
    FEATURES,
    HYPERPARAMETERS,
    OFFSETS,
    OPTIMIZERS,
    Cluster,
    batches,
    combine,
    inputs,
    needed,
    plan_attrs,
    shardings,
    tokens,
    wires,
)
from tests.reference import host_engine, servers
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.servers import closures

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError


@given(
    sharding=shardings,
    batch=batches(),
    id_type=st.sampled_from(cases.ID_TYPES),
    wire=wires,
)
def test_each_server_receives_a_request_for_its_unique_rows(
    sharding, batch, id_type, wire
):
    cluster = Cluster(sharding, wire=wire)
    _, requests = cluster.plan(batch, id_type)
    for ref, request in zip(cluster.refs, requests, strict=True):
        cases.assert_bitwise_equal(
            request, servers.fetch(needed(batch, ref.shards), wire)
        )


@given(
    sharding=shardings,
    batch=batches(),
    num_updates=st.integers(0, 2**62),
    wire=wires,
)
def test_a_server_returns_rows_and_its_number_of_updates(
    sharding, batch, num_updates, wire
):
    cluster = Cluster(sharding, wire=wire)
    for server, request in enumerate(cluster.plan(batch).requests):
        own = cluster.variables[server]["applied"]
        own.assign(tf.tensor_scatter_nd_update(own, [[2]], [num_updates]))
        shards = cluster.refs[server].shards
        cases.assert_bitwise_equal(
            cluster.fetch(server, request),
            servers.fetched(num_updates, needed(batch, shards), shards, wire),
        )


@given(sharding=shardings, batch=batches(), wire=wires)
def test_combined_rows_match_the_host_engine(sharding, batch, wire):
    cluster = Cluster(sharding, wire=wire)
    plan, requests = cluster.plan(batch)
    activations = combine(
        plan, [cluster.fetch(*one) for one in enumerate(requests)]
    )
    rows = [
        cases.floats(offsets[-1], DIMS[t], seed=t)
        for t, offsets in enumerate(OFFSETS)
    ]
    # The reference starts from rows that were rounded to the wire format. All
    # other operations are bitwise identical.
    tables = [
        host_engine.Table(
            servers.off_wire(servers.on_wire(one, wire), wire).reshape(
                one.shape
            ),
            OPTIMIZERS[t],
            [],
        )
        for t, one in enumerate(rows)
    ]
    engine = host_engine.HostEngine(
        tables, FEATURES, num_replicas=1, max_pending_steps=1
    )
    engine.enqueue(0, True, batch)
    for found, expected in zip(activations, engine.dequeue(0), strict=True):
        cases.assert_bitwise_equal(found, expected)


@given(
    sharding=shardings,
    batch=batches(),
    seed=st.integers(0, 9),
    token=tokens,
    wire=wires,
    next_batch=st.none() | batches(),
    fetched_size=st.sampled_from([None, 8, 0]),
)
def test_gradients_are_summed_row_by_row(
    sharding, batch, seed, token, wire, next_batch, fetched_size
):
    cluster = Cluster(sharding, wire=wire)
    plan, requests = cluster.plan(batch)
    fetched = [cluster.fetch(*one) for one in enumerate(requests)]
    gradients = [
        cases.floats(*one.shape, seed=seed) for one in combine(plan, fetched)
    ]
    messages = ops.fold_gradients(
        plan=plan,
        fetched=[]
        if fetched_size == 0
        else [one[:fetched_size] for one in fetched],
        gradients=gradients,
        hyperparameters=HYPERPARAMETERS,
        token=np.array(token, np.int64),
        next=[] if next_batch is None else cluster.plan(next_batch).requests,
        num_servers=2,
    )
    flat = [one.reshape(-1, one.shape[-1]) for one in gradients]
    for ref, message in zip(cluster.refs, messages, strict=True):
        expected = servers.apply_message(
            token,
            -1 if fetched_size == 0 else 0,
            needed(batch, ref.shards),
            [HYPERPARAMETERS[one.table] for one in ref.shards],
            [servers.sums(FEATURES, batch, flat, one) for one in ref.shards],
            wire,
        )
        if next_batch is not None:
            expected = servers.joined(
                expected, servers.fetch(needed(next_batch, ref.shards), wire)
            )
        cases.assert_bitwise_equal(message, expected)


@given(sharding=shardings, data=st.data(), wire=wires)
def test_each_closure_is_applied_once(sharding, data, wire):
    cluster = Cluster(sharding, wire=wire)
    server = data.draw(st.integers(0, 1))
    ref = cluster.refs[server]
    for step in range(data.draw(st.integers(1, 6))):
        token = data.draw(tokens)
        rows, gradients = [], []
        for shard in ref.shards:
            rows.append(
                sorted(
                    data.draw(
                        st.sets(
                            st.integers(0, max(len(shard.rows) - 1, 0)),
                            max_size=len(shard.rows),
                        )
                    )
                )
            )
            gradients.append(
                cases.floats(len(rows[-1]), shard.rows.shape[1], seed=step)
            )
        rates = [HYPERPARAMETERS[one.table] for one in ref.shards]
        message = servers.apply_message(token, 0, rows, rates, gradients, wire)
        expected = ref.apply(
            token,
            rows,
            [
                servers.off_wire(servers.on_wire(one, wire), wire).reshape(
                    one.shape
                )
                for one in gradients
            ],
            rates,
        )
        try:
            if data.draw(st.booleans()):
                found = bool(cluster.apply(server, message))
            else:
                request = servers.fetch(rows, wire)
                is_new, fetched = cluster.apply_and_fetch(
                    server, servers.joined(message, request)
                )
                found = bool(is_new)
                # The op reads the rows after the update.
                cases.assert_bitwise_equal(
                    fetched, cluster.fetch(server, request)
                )
        except FailedPrecondition:
            found = None
        assert found is expected, token
        cluster.check()


VALUES = [
    0.0,
    -0.0,
    1.0,
    1 + 2**-8,
    1 + 3 * 2**-8,
    1 + 2**-8 + 2**-20,
    1e-40,
    3.4e38,
    -3.4e38,
    np.inf,
    -np.inf,
    np.nan,
]


@given(
    st.lists(
        st.one_of(st.sampled_from(VALUES), st.floats(width=32)),
        min_size=3,
        max_size=3,
    )
)
def test_bfloat16_on_the_wire_rounds_to_nearest(values):
    cluster = Cluster([0, 1, 0, 1, 0])
    cluster.variables[0]["shards"][0][1].assign(values)
    request = servers.fetch([[1], [], []], "bfloat16")
    found = cluster.fetch(0, request).numpy()[8:].view(np.uint16)
    cases.assert_bitwise_equal(found, servers.on_wire(values, "bfloat16"))
    back, exact = servers.off_wire(found, "bfloat16"), np.float32(values)
    normal = (
        np.isfinite(exact) & (abs(exact) >= 2**-126) & (abs(exact) < 3.38e38)
    )
    back, exact = back[normal], exact[normal]
    assert (abs(back - exact) <= 2**-8 * abs(exact)).all()


def fetch_without_a_server(shards, dims, request, applied=None):
    """Calls `FetchRows`, which gets variables instead of a server."""
    if applied is None:
        applied = tf.Variable(tf.zeros([closures.NUM_APPLIED], tf.int64))
    return ops.fetch_rows(
        shards=cases.handles(shards),
        applied=applied.handle,
        request=request,
        tables=[f"table_{i}" for i in range(len(shards))],
        dims=dims,
        dtypes=[one.dtype for one in shards],
    )


@given(sharding=shardings, batch=batches(), wire=wires)
def test_variables_are_read_as_the_shards_of_a_server(sharding, batch, wire):
    cluster = Cluster(sharding, wire=wire)
    for server, request in enumerate(cluster.plan(batch).requests):
        own = cluster.variables[server]
        own["applied"].assign(tf.fill([closures.NUM_APPLIED], np.int64(7)))
        cases.assert_bitwise_equal(
            fetch_without_a_server(
                own["shards"],
                [DIMS[t] for t in cluster.tables[server]],
                request,
                own["applied"],
            ),
            cluster.fetch(server, request),
        )


def test_a_server_follows_assigned_values_and_keeps_its_variables():
    """A restored checkpoint assigns values to the same variables."""
    cluster = Cluster([0, 1, 0, 1, 0])
    server = cluster.server(0)
    shards = cluster.variables[0]["shards"]
    request = servers.fetch([[2], [], []])

    def row():
        return (
            ops.fetch_server_rows(server=server, request=request)
            .numpy()[8:]
            .view(np.float32)
        )

    cases.assert_bitwise_equal(row(), shards[0].numpy()[2])
    value = cases.floats(*shards[0].shape, seed=9)
    shards[0].assign(value)
    cases.assert_bitwise_equal(row(), value[2])
    copy = shards[0].read_value()
    ops.apply_rows(
        server=server,
        request=servers.apply_message(
            (1, 0, 0),
            0,
            [[2], [], []],
            [HYPERPARAMETERS[t] for t in cluster.tables[0]],
            [np.ones([1, 3], np.float32), *[np.zeros([0, 16], np.float32)] * 2],
        ),
    )
    assert (row() < value[2]).all()
    cases.assert_bitwise_equal(copy, value)
    # The resource keeps its variables after the program has deleted them.
    expected = row()
    del cluster.variables[0], shards
    gc.collect()
    cases.assert_bitwise_equal(row(), expected)


def test_16_bit_rows_are_sent_unchanged_or_as_nearest_bfloat16():
    for dtype in (tf.bfloat16, tf.float16):
        table = tf.Variable(tf.cast([[1 + 2**-7, 3 + 2**-9]], dtype))
        found = (
            fetch_without_a_server(
                [table], [2], servers.fetch([[0]], "bfloat16")
            )
            .numpy()[8:]
            .view(np.uint16)
        )
        cases.assert_bitwise_equal(
            found,
            servers.on_wire(tf.cast(table, tf.float32).numpy(), "bfloat16"),
        )


def test_an_unaligned_message_is_read_correctly():
    cluster = Cluster([0, 1, 0, 1, 0])
    request = servers.fetch([[1, 2], [], [0]])
    part = tf.concat([tf.zeros([3], tf.uint8), request], 0)[3:]
    cases.assert_bitwise_equal(
        cluster.fetch(0, part), cluster.fetch(0, request)
    )


@pytest.mark.parametrize(
    "ids, words",
    [
        ([[(7, 1.0)]], "Feature 'clicked', sample 0: id 7.*'ads' with 7 rows"),
        ([[(0, 1.0)], [(-1, 1.0)]], "Feature 'clicked', sample 1: id -1"),
    ],
)
def test_an_invalid_id_raises_with_feature_and_sample(ids, words):
    with pytest.raises(InvalidArgument, match=words):
        Cluster([0, 1, 0, 1, 0]).plan(
            [ids, *([[] for _ in ids] for _ in FEATURES[1:])]
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"shard_servers": [0, 1]}, "each of 5 shards"),
        ({"shard_servers": [0, 1, 2, 0, 0]}, r"in \[0, 2\)"),
        (
            {
                "table_placements": ["mod", "offsets"],
                "table_offsets": [0, 4, 7, 0, 2, 2, 5],
            },
            "contiguous rows",
        ),
        ({"table_optimizers": ["adagrad"]}, "too few values"),
    ],
)
def test_a_plan_of_other_tables_raises(changes, words):
    attrs = {**plan_attrs([0, 1, 0, 1, 0], 2), **changes}
    with pytest.raises(InvalidArgument, match=words):
        ops.plan_step(**inputs([[] for _ in FEATURES]), **attrs)


def fetch_bytes(counts, rows, wire=0):
    return np.concatenate(
        [
            np.array([wire, *counts], np.uint32).view(np.uint8),
            np.array(rows, np.uint8),
        ]
    )


@pytest.mark.parametrize(
    "request_bytes, words",
    [
        (np.zeros(0, np.uint8), "too few"),
        (fetch_bytes([9, 0, 0], []), "9 rows for shard 0"),
        (fetch_bytes([1, 0, 0], [4]), "below 4"),
        (fetch_bytes([2, 0, 0], [3, 1]), "below 4"),
        (fetch_bytes([0, 0, 0], [1]), "1 bytes more"),
        (fetch_bytes([0, 0, 0], [], 2), "Received: type 2"),
        (fetch_bytes([1, 0, 0], [128]), "too few"),
        (fetch_bytes([2**32 - 1] * 3, []), "too few"),
    ],
)
def test_a_malformed_request_raises(request_bytes, words):
    cluster = Cluster([0, 1, 0, 1, 0])
    with pytest.raises(InvalidArgument, match=words):
        cluster.fetch(0, request_bytes)
    cluster.check()


def update_bytes(counts=(0, 0, 0), values=(0.0, 0.0, 0.0), rows=(), wire=0):
    return np.concatenate(
        [
            np.array([1, 0, 0, 0], np.int64).view(np.uint8),
            np.array([wire, *counts], np.uint32).view(np.uint8),
            np.array(values, np.float32).view(np.uint8),
            np.array(rows, np.uint8),
        ]
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"request": update_bytes(values=[0, 0])}, "12 bytes.*Received: 8"),
        ({"request": update_bytes([1, 0, 0], rows=[1])}, "24 bytes"),
        ({"request": update_bytes([2**32 - 1] * 3)}, "gradient for each row"),
        ({"request": update_bytes([1, 0, 0], [0] * 6, [4])}, "below 4"),
        ({"request": update_bytes(rows=[4])}, "1 bytes more"),
        ({"request": update_bytes(wire=7)}, "type 7"),
        ({"request": update_bytes(values=[-1, 0, 0])}, "learning rate"),
        ({"request": update_bytes()[None]}, "`request` must have rank 1"),
        ({"request": np.zeros(31, np.uint8)}, "a closure header of 32 bytes"),
        ({"dims": [3, 16, 0]}, "`dims` must be at least 1"),
        ({"dims": [4, 16, 16]}, "'ads'"),
        ({"num_hyperparameters": [1, 1, -1]}, "must not be negative"),
        (
            {"num_hyperparameters": [2**62, 2**62, 1]},
            "the hyperparameters of all",
        ),
        (
            {"optimizers": ["sgd"]},
            "`optimizers` must have one value for each of 3",
        ),
        ({"slots": []}, "need 1 `slots`. Received: 0"),
        ({"open_pieces": [3]}, "lists about shards of open tables"),
    ],
)
def test_a_malformed_update_changes_nothing(changes, words):
    cluster = Cluster([0, 1, 0, 1, 0])
    with pytest.raises(InvalidArgument, match=words):
        cluster.apply(0, **{"request": update_bytes(), **changes})
    cluster.check()


def test_a_state_of_the_wrong_size_raises():
    cluster = Cluster([0, 1, 0, 1, 0])
    cluster.variables[0]["applied"] = tf.Variable(tf.zeros([9], tf.int64))
    with pytest.raises(InvalidArgument, match="closures applied"):
        cluster.fetch(0, fetch_bytes([0, 0, 0], []))


def test_a_joined_request_that_is_not_valid_changes_nothing():
    cluster = Cluster([0, 1, 0, 1, 0])
    update = servers.apply_message(
        (1, 0, 0),
        0,
        [[2], [], []],
        [HYPERPARAMETERS[t] for t in cluster.tables[0]],
        [np.ones([1, 3], np.float32), *[np.zeros([0, 16], np.float32)] * 2],
    )
    request = servers.fetch([[1], [], []])
    whole = servers.joined(update, request)
    for message, words in [
        (whole[:7], "Received: 7 bytes, too few"),
        (whole[: len(update)], "the size of an update, the update"),
        (whole[: -len(request)], "the number of rows for each of the 3 shards"),
        (whole[:-1], "must have 1 rows"),
        (servers.joined(update, request[:-1]), "must have 1 rows"),
        (servers.joined(update[:-1], request), "must have 1 rows"),
        (servers.joined(update, servers.fetch([[99], [], []])), "rows below"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            cluster.apply_and_fetch(0, message)
        cluster.check()
    is_new, fetched = cluster.apply_and_fetch(0, whole)
    assert bool(is_new)
    cases.assert_bitwise_equal(fetched, cluster.fetch(0, request))


def test_a_server_with_the_same_variable_twice_raises():
    cluster = Cluster([0, 1, 0, 1, 0])
    with pytest.raises(InvalidArgument, match="the same variable twice"):
        cluster.server(
            0, slots=cases.handles(cluster.variables[0]["shards"][:1])
        )


def test_keys_require_a_server_that_records_fetched_steps():
    cluster = Cluster([0, 1, 0, 1, 0])
    with pytest.raises(InvalidArgument, match="created with `fetched_steps`"):
        ops.fetch_keys(server=cluster.server(0), request=np.zeros(48, np.uint8))


def test_a_process_reports_its_versions():
    found = json.loads(ops.describe_process().numpy())
    assert found == {
        "tensorflow": tf.__version__,
        "tf_layoutmap": tlm.__version__,
    }


def test_malformed_plans_and_answers_raise():
    cluster = Cluster([0, 1, 0, 1, 0])
    plan, requests = cluster.plan([[] for _ in FEATURES])
    fetched = [cluster.fetch(*one) for one in enumerate(requests)]
    gradients = [tf.zeros(one.shape) for one in combine(plan, fetched)]
    fold = {
        "plan": plan,
        "fetched": fetched,
        "gradients": gradients,
        "hyperparameters": HYPERPARAMETERS,
        "token": np.array([1, 0, 0], np.int64),
        "next": [],
        "num_servers": 2,
    }
    ops.fold_gradients(**fold)
    for changes, words in [
        (
            {
                "plan": tf.raw_ops.EmptyTensorList(
                    element_shape=tf.constant([], tf.int32),
                    max_num_elements=0,
                    element_dtype=tf.float32,
                )
            },
            "must be an output of `PlanStep`",
        ),
        (
            {"fetched": [tf.zeros([9], tf.uint8), fetched[1]]},
            "must have 8 bytes",
        ),
        ({"fetched": fetched[:1]}, "each of 2 servers"),
        ({"gradients": gradients[:1]}, "`num_features` must be 4"),
        ({"gradients": [tf.zeros([1, 3]), *gradients[1:]]}, "'clicked'"),
        ({"hyperparameters": [[0.5]]}, "`num_tables` must be 2"),
        ({"hyperparameters": [[0.5], [-1.0]]}, "Table 'words'"),
        ({"token": np.array([1, 0], np.int64)}, "epoch, number and"),
        ({"num_servers": 1}, "`num_servers` must be 2"),
        ({"num_servers": 3}, "`num_servers` must be 2"),
        ({"next": requests[:1]}, "`num_next` must be 2"),
        ({"next": [requests[0], requests[1:]]}, "`next` must have rank 1"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            ops.fold_gradients(**{**fold, **changes})
    with pytest.raises(InvalidArgument, match="`num_features` must be 4"):
        combine(
            plan, fetched, num_features=1, dims=[3], max_sequence_lengths=[0]
        )
