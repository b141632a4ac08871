"""Tests plans for tables: bytes, workloads, suggestions and partitioning."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import local
from tests.planning.resident_variables import variables_of
from tf_layoutmap.embedding import inputs, tables
from tf_layoutmap.embedding.configs import config, open_tables, table_dtypes
from tf_layoutmap.planning import search, table_choices
from tf_layoutmap.planning.table_choices import Lookups
from tf_layoutmap.vocabulary import first_values

tpu = tf.tpu.experimental.embedding
COSTS = tlm.planning.MachineCosts.typical()
OPTIMIZERS = {
    "sgd": lambda: tpu.SGD(0.1),
    "adagrad": lambda: tpu.Adagrad(0.1),
    "adam": lambda: tpu.Adam(0.1),
    "rowwise": lambda: tlm.optimizers.RowwiseAdagrad(0.1),
    "none": lambda: None,
}


def features(rows, dim=4, **options):
    """Returns a feature config with one table per entry of `rows`."""
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(
                count, dim, tf.zeros_initializer(), name=name, **options
            )
        )
        for name, count in rows.items()
    }


def vocabulary(capacity, **options):
    return tlm.vocabulary.OpenVocabulary(capacity, **options)


def plan(rows, **options):
    arguments = {"memory": "1GiB", "costs": COSTS, "optimizer": tpu.SGD(0.1)}
    return tlm.plan(features(rows), **{**arguments, **options})


def bytes_by_device(embedding):
    """Returns the bytes of all variables of an embedding on each device."""
    found = collections.Counter()
    for one in variables_of(embedding):
        size = one.dtype.size * int(np.prod(one.shape))
        found[int(one.device.rpartition(":")[2])] += size
    return found


TABLES = {
    "rows": {},
    "half": {"table_dtypes": "bfloat16"},
    "open": {"vocabularies": lambda: {"words": vocabulary(1000)}},
    "sketch": {
        "vocabularies": lambda: {
            "words": vocabulary(1000, admission="count", min_count=2)
        }
    },
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", TABLES)
def test_bytes_in_one_process_are_exact(kind, optimizer):
    options = {
        key: value() if callable(value) else value
        for key, value in TABLES[kind].items()
    }
    configs = features({"words": 1000, "users": 7})
    for one in configs.values():
        one.table.initializer = tf.constant_initializer(0.0)
    rule = OPTIMIZERS[optimizer]()
    embedding = tlm.TPUEmbedding(configs, rule, **options)
    embedding.build()
    spec = spec_of(configs, rule, **options)
    planned = sum(
        table_choices.largest_shard(one, 1, by_segment=False).total
        for one in spec.tables
    )
    assert planned == sum(bytes_by_device(embedding).values())


def spec_of(configs, optimizer, *, table_dtypes=None, vocabularies=None):
    spec, table_configs = config.read_feature_config(
        inputs.flatten_with_paths(configs), optimizer
    )
    spec = dtypes_of(spec, table_configs, table_dtypes)
    return open_tables.with_vocabularies(
        spec,
        table_configs,
        vocabularies,
        tlm.vocabulary.OpenVocabulary,
        first_values.read_initializer,
    )


def dtypes_of(spec, table_configs, given):
    return table_dtypes.with_dtypes(spec, table_configs, given)


@pytest.mark.parametrize("kind", TABLES)
def test_bytes_on_servers_are_exact(kind):
    options = {
        key: value() if callable(value) else value
        for key, value in TABLES[kind].items()
    }
    configs = features({"words": 1000, "users": 8})
    for one in configs.values():
        one.table.initializer = tf.constant_initializer(0.0)
    rule = tpu.Adagrad(0.1)
    made = tlm.plan(
        configs,
        num_servers=4,
        memory="1GiB",
        optimizer=rule,
        pins={"words": "rows", "users": "table"},
        costs=COSTS,
        **options,
    )
    with local.servers(4):
        embedding = tlm.TPUEmbedding(configs, rule, partitioner=made, **options)
        embedding.build()
    found = bytes_by_device(embedding)
    planned = [
        sum(one.get(part, 0) for part in ("weights", "slot variables", "keys"))
        for one in made.solution.memory()
    ]
    for server, size in enumerate(planned):
        # The planned size is the size of the largest shard. An open vocabulary
        # has equal shards here, except for one row of 32 bytes.
        assert size - found[server] in (0, 16, 24, 32)


@pytest.mark.parametrize(
    "num_rows, num_shards",
    list(itertools.product([1, 5, 64, 1000], [1, 3, 4])),
)
def test_largest_shards_have_the_rows_of_the_partition(num_rows, num_shards):
    spec = spec_of(features({"words": num_rows}), tpu.Adam(0.1))
    shard = table_choices.largest_shard(
        spec.tables[0], num_shards, by_segment=True
    )
    rows = tlm.partitioners.FixedShardsPartitioner(num_shards)(
        (num_rows, 4), tf.float32
    )[0]
    assert shard.num_shards == rows
    assert shard.weights == -(-num_rows // rows) * 16
    assert shard.slots == 2 * shard.weights


def test_tables_are_placed_on_the_planned_servers():
    rows = {f"t{one}": 100 + one for one in range(6)}
    configs = features(rows)
    made = tlm.plan(
        configs,
        num_servers=3,
        memory="1GiB",
        optimizer=tpu.SGD(0.1),
        pins=dict.fromkeys(rows, "table"),
        costs=COSTS,
    )
    with local.servers(3):
        embedding = tlm.TPUEmbedding(configs, tpu.SGD(0.1), partitioner=made)
        embedding.build()
    for name in rows:
        (variable,) = tables.shards_of(embedding._variables[name]["parameters"])
        (server,) = made.servers_of(name)
        assert variable.device.endswith(f"CPU:{server}")
    assert len({tuple(made.servers_of(name)) for name in rows}) == 3


def test_a_plan_for_servers_raises_in_one_process():
    made = plan({"words": 100}, num_servers=2)
    embedding = tlm.TPUEmbedding(
        features({"words": 100}), tpu.SGD(0.1), partitioner=made
    )
    with pytest.raises(ValueError, match="2 servers.*used with one process"):
        embedding.build()


def test_a_plan_for_one_process_is_a_partitioner():
    made = plan({"words": 100})
    embedding = tlm.TPUEmbedding(
        features({"words": 100}), tpu.SGD(0.1), partitioner=made
    )
    embedding.build()
    assert (
        len(tables.shards_of(embedding._variables["words"]["parameters"])) == 1
    )


def test_a_plan_for_other_tables_raises():
    made = plan({"words": 100})
    embedding = tlm.TPUEmbedding(
        features({"words": 101}), tpu.SGD(0.1), partitioner=made
    )
    with pytest.raises(ValueError, match=r"\(100, 4\). Received: \(101, 4\)"):
        embedding.build()


def test_suggestions_fit():
    rows = {"words": 10_000}
    with pytest.raises(search.PlanDoesNotFitError) as caught:
        plan(
            rows,
            num_servers=2,
            memory=100_000,
            optimizer=tpu.Adagrad(0.1),
            batch_size=10,
        )
    message = str(caught.value)
    # The table needs 320 kB with Adagrad: 4 servers, or 200 kB with one
    # accumulator per row, or 160 kB with SGD or 240 kB with 16 bits.
    assert "4 servers (num_servers=4)" in message
    assert "the optimizer SGD" in message
    assert "16-bit rows" not in message
    assert plan(
        rows,
        num_servers=4,
        memory=100_000,
        optimizer=tpu.Adagrad(0.1),
        batch_size=10,
    )
    assert plan(rows, num_servers=2, memory=100_000, batch_size=10)
    budget = int(
        message.split("a budget of ")[1].split(" ")[0].replace(",", "")
    )
    options = {
        "num_servers": 2,
        "optimizer": tpu.Adagrad(0.1),
        "batch_size": 10,
    }
    assert plan(rows, memory=budget, **options)
    with pytest.raises(search.PlanDoesNotFitError, match="1 bytes are missing"):
        plan(rows, memory=budget - 1, **options)


def test_workers_store_copies_or_shards_of_all_tables():
    rows = {"words": 10_000, "users": 10}
    replicated = plan(rows, num_workers=2, pins={"words": "replicate"})
    assert replicated.over_processes == "replicated"
    sharded = plan(rows, num_workers=2, memory=120_000, batch_size=16)
    assert sharded.over_processes == "sharded"
    with pytest.raises(ValueError, match="both about 'tables'"):
        plan(rows, num_workers=2, pins={"words": "replicate", "users": "rows"})
    with pytest.raises(ValueError, match="`over_processes` requires.*workers"):
        _ = plan(rows).over_processes
    with pytest.raises(ValueError, match="`partitioner` must be.*2 workers"):
        sharded((10, 4), tf.float32, name="users")


def batches():
    rng = np.random.default_rng(0)
    return [
        {
            "words": tf.constant(rng.integers(0, 50, [64, 2]), tf.int64),
            "users": tf.constant(rng.integers(0, 3, [64, 1]), tf.int64),
        }
        for _ in range(8)
    ]


def test_the_workload_is_read_from_a_report_of_ids():
    rows = {"words": 100, "users": 10}
    report = tlm.inspect_ids(batches(), features(rows), optimizer=None)
    made = plan(rows, num_servers=2, id_report=report)
    items = {one.name: one for one in made.solution.problem.items}
    assert items["users"].amount == 3
    assert 40 < items["words"].amount <= 50
    assert "64 samples" in made.notes[0] and "8 batches" in made.notes[0]
    as_dict = plan(rows, num_servers=2, id_report=report.to_dict())
    assert as_dict == made
    small = plan(rows, num_servers=2, id_report=report, batch_size=32)
    amount = {one.name: one for one in small.solution.problem.items}
    # All batches have the same users, and almost the same words.
    assert amount["users"].amount == 3
    assert amount["words"].amount <= items["words"].amount
    with pytest.raises(ValueError, match="same feature config.*'items'"):
        plan({"items": 5}, id_report=report)
    with pytest.raises(TypeError, match="a report of tlm.inspect_ids"):
        plan(rows, id_report=3)


def test_a_hot_table_is_sharded_over_servers():
    rows = {f"t{one}": 50_000 for one in range(8)}
    spec = spec_of(features(rows, dim=64), tpu.Adagrad(0.1))
    lookups = [Lookups(100_000.0, 2e5, 1e3)] + [Lookups(2000.0, 2e3, 1e3)] * 7
    problem = table_choices.problem_for_servers(
        spec, lookups, COSTS, [1 << 30] * 4
    )
    solution = search.solve(problem)
    assert solution.selected["t0"] == "rows over 4 servers"
    assert any(one.startswith("table") for one in solution.selected.values())


def test_tables_of_one_column_and_one_row():
    made = tlm.plan(
        features({"a": 1, "b": 2}, dim=1),
        num_servers=4,
        memory="1MiB",
        optimizer=tpu.SGD(0.1),
        costs=COSTS,
    )
    assert {one.split(" ")[0] for one in made.choices.values()} == {"table"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_servers": 2, "num_workers": 2}, "must not both be given"),
        ({"num_servers": 0}, "`num_servers` must be at least 1"),
        ({"memory": "24 gigs"}, "`memory`.*'24 gigs'"),
        ({"memory": None}, "`memory` must be a size"),
        ({"memory": ["1GiB"], "num_servers": 2}, "each of the 2 devices"),
        ({"mesh": {"model": 2}}, "`mesh` must be None for a feature config"),
        ({"pins": {"wrods": "rows"}}, "'words'.*Received: 'wrods'"),
        ({"wire_dtype": "int8"}, "`wire_dtype`"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
    ],
)
def test_wrong_arguments_raise(options, words):
    with pytest.raises(ValueError, match=words):
        plan({"words": 100}, **options)


def test_pins_may_be_table_configs():
    configs = features({"words": 100})
    made = tlm.plan(
        configs,
        num_servers=2,
        memory="1GiB",
        optimizer=tpu.SGD(0.1),
        pins={configs["words"].table: "table"},
        costs=COSTS,
    )
    assert made.choices["words"].startswith("table")


def test_tables_that_share_a_vocabulary_store_its_keys_once():
    tables = {"deep": 100, "wide": 100}
    shared = {"deep": vocabulary(100), "wide": "deep"}
    embedding = tlm.TPUEmbedding(
        features(tables), tpu.SGD(0.1), vocabularies=shared
    )
    spec = embedding._state.spec
    deep, wide = (
        table_choices.largest_shard(table, 1, by_segment=False)
        for table in spec.tables
    )
    assert wide == dataclasses.replace(deep, keys=0)
    plan(tables, vocabularies=shared)
    with pytest.raises(NotImplementedError, match="if `num_servers` is passed"):
        plan(tables, vocabularies=shared, num_servers=2)


def test_a_plan_names_tables_whose_slot_variables_are_missing():
    config = features({"a": 100, "b": 200})
    config["c"] = tpu.FeatureConfig(
        tpu.TableConfig(10, 4, optimizer=tpu.Adam(0.1), name="c")
    )
    made = tlm.plan(config, memory="1GiB", costs=COSTS)
    (note,) = [one for one in made.notes if "no slot variables" in one]
    assert "without an optimizer: a, b. If" in note
    assert note in str(made)
    assert not [one for one in plan({"a": 100}).notes if "slot" in one]
