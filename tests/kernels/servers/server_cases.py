"""Servers in one process with ops and a list-based reference."""

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import host_engine, servers
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.servers import closures

OFFSETS = [(0, 4, 7), (0, 2, 2, 5)]
DIMS = [3, 16]
OPTIMIZERS = ["adagrad", "sgd"]
FEATURES = [
    host_engine.Feature("clicked", 0, "mean"),
    host_engine.Feature("text", 1, "sum", max_sequence_length=2),
    host_engine.Feature("shown", 0, "sqrtn"),
    host_engine.Feature("bag", 1, "sum"),
]
HYPERPARAMETERS = [np.array([0.3], np.float32), np.array([0.5], np.float32)]
NAMES = ["ads", "words"]


def plan_attrs(shard_servers, num_servers, **changes) -> dict:
    return {
        "num_servers": num_servers,
        "shard_servers": shard_servers,
        "table_names": NAMES,
        "table_num_rows": [one[-1] for one in OFFSETS],
        "table_dims": DIMS,
        "table_num_shards": [len(one) - 1 for one in OFFSETS],
        "table_placements": ["offsets", "offsets"],
        "table_offsets": [o for one in OFFSETS for o in one],
        "table_optimizers": OPTIMIZERS,
        "feature_names": [one.name for one in FEATURES],
        "feature_tables": [one.table for one in FEATURES],
        "feature_combiners": [one.combiner for one in FEATURES],
        "feature_max_sequence_lengths": [
            one.max_sequence_length for one in FEATURES
        ],
        **changes,
    }


@st.composite
def batches(draw):
    """Draws a list of (id, weight) for each feature and sample."""
    num_samples = draw(st.integers(0, 4))
    batch = []
    for feature in FEATURES:
        row = st.integers(0, OFFSETS[feature.table][-1] - 1)
        weight = (
            st.just(1.0)
            if feature.max_sequence_length
            else st.sampled_from([1.0, 2.0, 3.0])
        )
        batch.append(
            [
                draw(st.lists(st.tuples(row, weight), max_size=5))
                for _ in range(num_samples)
            ]
        )
    return batch


def inputs(batch, id_type=np.int64) -> dict:
    flat = [[one for sample in samples for one in sample] for samples in batch]
    return {
        "ids": [np.array([i for i, _ in one], id_type) for one in flat],
        "splits": [
            np.cumsum([0, *map(len, samples)]).astype(np.int64)
            for samples in batch
        ],
        "num_samples": np.array([len(one) for one in batch], np.int64),
        "weights": [
            np.array([w for _, w in one], np.float32)
            if not feature.max_sequence_length
            else np.zeros(0, np.float32)
            for feature, one in zip(FEATURES, flat, strict=True)
        ],
    }


class Cluster:
    """Servers in one process: ops, and a reference with the same calls."""

    def __init__(self, shard_servers, num_servers=2, wire="float32"):
        self.plan_attrs = plan_attrs(
            shard_servers, num_servers, wire_dtype=tf.as_dtype(wire)
        )
        self.refs, self.variables = [], []
        self.tables = [[] for _ in range(num_servers)]
        shards = [[] for _ in range(num_servers)]
        places = iter(shard_servers)
        for t, offsets in enumerate(OFFSETS):
            rows = cases.floats(offsets[-1], DIMS[t], seed=t)
            for first, end in zip(offsets[:-1], offsets[1:], strict=True):
                server = next(places)
                own = rows[first:end].copy()
                slots = (
                    [np.full_like(own, 0.5)]
                    if OPTIMIZERS[t] == "adagrad"
                    else []
                )
                shards[server].append(servers.Shard(t, first, own, slots))
                self.tables[server].append(t)
        for own in shards:
            self.refs.append(
                servers.Server(own, [OPTIMIZERS[one.table] for one in own])
            )
            self.variables.append(
                {
                    "shards": [tf.Variable(one.rows) for one in own],
                    "slots": [
                        tf.Variable(slot) for one in own for slot in one.slots
                    ],
                    "applied": tf.Variable(
                        tf.zeros([closures.NUM_APPLIED], tf.int64)
                    ),
                }
            )

    def server(self, server, **changes):
        """Creates the resource of a server, with some changed arguments."""
        own, tables = self.variables[server], self.tables[server]
        return ops.create_server(
            **{
                "shards": cases.handles(own["shards"]),
                "slots": cases.handles(own["slots"]),
                "rounding_steps": [],
                "state": [],
                "fetched_steps": [],
                "applied": own["applied"].handle,
                "tables": [NAMES[t] for t in tables],
                "table_numbers": tables,
                "first_rows": [
                    one.first_row for one in self.refs[server].shards
                ],
                "dims": [DIMS[t] for t in tables],
                "dtypes": [tf.float32 for _ in tables],
                "optimizers": [OPTIMIZERS[t] for t in tables],
                "num_hyperparameters": [1 for _ in tables],
                **changes,
            }
        )

    def plan(self, batch, id_type=np.int64):
        return ops.plan_step(**inputs(batch, id_type), **self.plan_attrs)

    def fetch(self, server, request, **changes):
        return ops.fetch_server_rows(
            server=self.server(server, **changes), request=request
        )

    def apply(self, server, request, **changes):
        return ops.apply_rows(
            server=self.server(server, **changes), request=request
        )

    def apply_and_fetch(self, server, request):
        return ops.apply_and_fetch_rows(
            server=self.server(server), request=request
        )

    def check(self):
        for ref, own in zip(self.refs, self.variables, strict=True):
            slots = iter(own["slots"])
            for shard, variable in zip(ref.shards, own["shards"], strict=True):
                cases.assert_bitwise_equal(variable.numpy(), shard.rows)
                for slot in shard.slots:
                    cases.assert_bitwise_equal(next(slots).numpy(), slot)
            assert own["applied"].numpy()[2] == ref.num_updates


def combine(plan, fetched, **changes):
    return ops.combine_rows(
        **{
            "plan": plan,
            "fetched": fetched,
            "num_features": len(FEATURES),
            "dims": [DIMS[one.table] for one in FEATURES],
            "max_sequence_lengths": [
                one.max_sequence_length for one in FEATURES
            ],
            **changes,
        }
    )


def needed(batch, shards):
    return [servers.rows_of_shard(FEATURES, batch, one) for one in shards]


# Draws the server of each of the five shards. Some shards are empty, and a
# server can have a single shard.
shardings = st.lists(st.integers(0, 1), min_size=5, max_size=5).filter(
    lambda servers: set(servers) == {0, 1}
)
wires = st.sampled_from(sorted(servers.WIRES))
tokens = st.tuples(st.integers(1, 2), st.integers(-1, 4), st.integers(0, 3))
