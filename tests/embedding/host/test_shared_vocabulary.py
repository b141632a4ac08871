"""Tests tables of different dims that share one open vocabulary."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.deltas.cases import save, tensors
from tests.embedding.host import open_table_cases as cases
from tests.embedding.host import shared_vocabulary_cases as shared_cases
from tests.embedding.host.shared_vocabulary_cases import (
    DIMS,
    POLICY,
    check_same,
    create,
    keys_of,
    train,
)
from tf_layoutmap._core import ops
from tf_layoutmap.embedding import key_editor, tables

tpu = tf.tpu.experimental.embedding


def spec_of(one, table):
    return next(spec for spec in one._state.spec.tables if spec.name == table)


def contents(one):
    return {
        table: {name: cases.rows_of(value) for name, value in by_name.items()}
        for table, by_name in one._variables.items()
    }


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        ({"evict": "lru"}, {}),
        (POLICY, {"pipeline_execution_with_tensor_core": True}),
        (
            {**POLICY, "oov_embedding": "trainable"},
            {"table_dtypes": {"wide": "bfloat16"}, "rounding_seed": 3},
        ),
    ],
    ids=["lru", "count", "unknown_row"],
)
@pytest.mark.parametrize(("owner", "num_shards"), [("deep", 3), ("wide", 1)])
def test_equal_ids_train_like_two_separate_tables(
    policy, arguments, owner, num_shards
):
    """Both tables look up the same ids, so each id is counted once."""
    pair = [
        create(
            64,
            shared=shared,
            owner=owner,
            num_shards=num_shards,
            arguments=arguments,
            **policy,
        )[0]
        for shared in (True, False)
    ]
    rng = np.random.default_rng(0)
    for _ in range(12):
        keys = keys_of(rng)
        found, expected = (train(one, keys, keys) for one in pair)
        check_same(found, expected)
    for one in pair:
        one.flush()
    shared, separate = (contents(one) for one in pair)
    check_same(shared[owner], separate[owner])
    (other,) = DIMS.keys() - {owner}
    for name, value in shared[other].items():
        np.testing.assert_array_equal(value, separate[other][name], name)
    assert not any(name.startswith("vocab") for name in shared[other])
    stats = pair[0].vocabularies["wide"].stats()
    assert stats == pair[0].vocabularies["deep"].stats()
    assert stats == pair[1].vocabularies["deep"].stats()
    assert stats["num_evicted"] > 0


def test_a_key_of_one_table_gets_a_row_in_both():
    one, configs = create(64)
    train(one, [5], [7, 7])
    rows = one.vocabularies["wide"].lookup([5, 7]).numpy()
    np.testing.assert_array_equal(one.vocabularies["deep"].lookup([5, 7]), rows)
    for name, number in (("wide", 1), ("deep", 0)):
        spec = spec_of(one, name)
        values = spec.vocabulary.first_values
        # The row of the key that only the other table has looked up has its
        # initial values.
        key = [5, 7][number]
        np.testing.assert_array_equal(
            cases.rows_of(one.embedding_tables[configs[name]])[rows[number]],
            ops.first_rows(
                keys=tf.constant([key], tf.int64),
                kind=values.kind,
                limits=values.limits,
                seed=values.seed,
                dim=spec.dim,
            )[0],
        )
    assert (
        spec_of(one, "wide").vocabulary.first_values.seed
        != spec_of(one, "deep").vocabulary.first_values.seed
    )


def test_a_key_counts_as_in_the_table_with_most_occurrences():
    one, _ = create(64, admission="count", min_count=3)
    shared_cases.check_occurrences(one)


def test_steps_in_flight_of_either_table_pin_the_rows_of_both():
    one, _ = create(8, evict="lru")
    empty = np.zeros([0], np.int64)
    train(one, np.arange(8), empty)
    one.enqueue(
        {"wide": tf.constant(np.arange(8)), "deep": tf.constant(empty)},
        training=False,
    )
    # All rows are pinned by a forward-only step of the other table.
    one.enqueue(
        {"wide": tf.constant(empty), "deep": tf.constant(np.arange(100, 108))}
    )
    words = one.vocabularies["deep"]
    assert words.stats()["num_full"] == 8
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="cannot be evicted"
    ):
        words.evict([3])
    one.reset()
    assert words.evict([3]).numpy().tolist() == [3]
    assert not bool(one.vocabularies["wide"].contains(3))


def test_the_fields_of_evicted_keys_are_reported_for_each_table():
    gone = []
    one, configs = create(
        8, on_evict=gone.append, initializer=tf.ones_initializer(), evict="lru"
    )
    train(one, np.arange(8), np.arange(8), scale=0.0, shift=2.0)
    before = {
        name: cases.rows_of(one.embedding_tables[configs[name]])
        for name in DIMS
    }
    rows = one.vocabularies["deep"].lookup(np.arange(8)).numpy()
    train(one, [100], [200, 201])
    assert [found.table for found in gone] == ["deep", "wide"]
    assert gone[0].keys.tolist() == gone[1].keys.tolist()
    assert len(gone[0].keys) == 3
    for found in gone:
        np.testing.assert_array_equal(
            found.rows, before[found.table][rows[found.keys]]
        )
    assert list(gone[0].slots) == ["accumulators"]
    assert list(gone[1].slots) == []
    gone.clear()
    one.vocabularies["wide"].evict([100])
    assert [found.table for found in gone] == ["deep", "wide"]
    np.testing.assert_array_equal(gone[0].keys, [100])
    # The update of the wide table has changed its row.
    assert gone[1].rows.shape == (1, 1) and gone[0].rows.shape == (1, 3)


@pytest.mark.parametrize("fails_for", ["wide", "deep"])
def test_a_failed_report_undoes_the_step_in_both_tables(fails_for):
    gone = []

    def on_evict(found):
        gone.append(found.table)
        if found.table == fails_for and len(gone) <= 2:
            raise OSError("no space left")

    one, _ = create(8, on_evict=on_evict, evict="lru")
    train(one, np.arange(8), np.arange(8))
    before = contents(one)
    batch = {"wide": tf.range(100, 104), "deep": tf.range(100, 104)}
    with pytest.raises(OSError, match="no space left"):
        one.enqueue(batch)
    for table, values in contents(one).items():
        check_same(values, before[table])
    gone += ["", ""]
    one.enqueue(batch)
    assert one.vocabularies["wide"].stats()["num_evicted"] == 4


@pytest.mark.parametrize("table", ["wide", "deep"])
def test_a_failed_report_undoes_an_eviction(table):
    def on_evict(found):
        if found.table == table:
            raise OSError("no space left")

    one, _ = create(8, on_evict=on_evict)
    train(one, np.arange(8), np.arange(8))
    before = contents(one)
    with pytest.raises(OSError, match="no space left"):
        one.vocabularies["wide"].evict([3])
    for name, values in contents(one).items():
        check_same(values, before[name])


def test_a_full_vocabulary_changes_no_table():
    one, _ = create(8, evict="none", on_full="error")
    shared_cases.check_full_vocabulary(one, contents)


def test_a_written_key_gets_initial_values_in_the_other_table(tmp_path):
    pair = [create(64, num_shards=2, shared=shared)[0] for shared in (1, 0)]
    rng = np.random.default_rng(1)
    for one in pair:
        train(one, [5, 9], [5, 9])
    keys = np.array([5, 7, 11])
    rows = rng.normal(size=[3, 1]).astype(np.float32)
    written = pair[0].vocabularies["wide"].write(keys, rows)
    assert (written.num_new, written.num_written) == (2, 3)
    pair[1].vocabularies["wide"].write(keys, rows)
    pair[1].vocabularies["deep"].write(keys)
    for one in pair:
        found = one({"wide": keys, "deep": keys})
        np.testing.assert_array_equal(found["wide"], rows)
    for name in DIMS:
        blocks = [next(iter(one.vocabularies[name].blocks())) for one in pair]
        for field in ("keys", "rows", "last_steps", "counts"):
            np.testing.assert_array_equal(
                *(getattr(block, field) for block in blocks)
            )
        check_same(*(block.slots for block in blocks))
    # The rows of both tables are exported, and imported into another capacity.
    other = create(500)[0]
    for name in DIMS:
        pair[0].vocabularies[name].export(tmp_path / name)
        tlm.vocabulary.import_rows(tmp_path / name, other.vocabularies[name])
    all_keys = np.array([5, 9, 7, 11])
    for name in DIMS:
        np.testing.assert_array_equal(
            *(
                one({"wide": all_keys, "deep": all_keys})[name]
                for one in (pair[0], other)
            )
        )


@pytest.mark.parametrize("capacity", [5000, 20])
@pytest.mark.parametrize("by", ["wide", "deep"])
def test_resize_equals_a_converted_checkpoint(tmp_path, capacity, by):
    gone = []
    one, _ = create(64, num_shards=2, on_evict=gone.append, evict="lru")
    rng = np.random.default_rng(2)
    for _ in range(4):
        train(one, keys_of(rng, 15), keys_of(rng, 15))
    before = save(one, tmp_path / "before")
    converted = tlm.vocabulary.convert(
        before,
        str(tmp_path / "converted"),
        {
            "deep": tlm.vocabulary.OpenVocabulary(capacity, evict="lru"),
            "wide": "deep",
        },
    )
    assert converted["wide"] == converted["deep"]
    gone.clear()
    older = one.vocabularies
    assert one.vocabularies[by].resize(capacity) == converted[by]
    # Objects that the program has read before follow the resize.
    for name, vocabulary in one.vocabularies.items():
        assert older[name].settings.capacity == capacity
        assert older[name].stats() == vocabulary.stats()
        np.testing.assert_array_equal(older[name].keys(), vocabulary.keys())
    if capacity == 20:
        assert [found.table for found in gone] == ["deep", "wide"]
        assert len(gone[0].keys) == converted[by].num_dropped > 0
    assert tensors(save(one, tmp_path / "after")) == tensors(
        str(tmp_path / "converted")
    )
    other, _ = create(capacity, num_shards=3, evict="lru")
    tf.train.Checkpoint(embedding=other).restore(str(tmp_path / "converted"))
    for each in (one, other):
        rng = np.random.default_rng(3)
        for _ in range(4):
            train(each, keys_of(rng, 15), keys_of(rng, 15))
    assert tensors(save(one, tmp_path / "one")) == tensors(
        save(other, tmp_path / "other")
    )


def test_checkpoints_with_other_vocabularies_raise(tmp_path):
    shared, _ = create(64)
    separate, _ = create(64, shared=False)
    train(shared, [1, 2], [3])
    paths = {
        "shared": save(shared, tmp_path / "shared"),
        "separate": save(separate, tmp_path / "separate"),
    }
    for one, path, received in (
        (shared, "separate", "a separate vocabulary or no vocabulary"),
        (separate, "shared", "the vocabulary of table 'deep'"),
    ):
        before = contents(one)
        with pytest.raises(
            ValueError,
            match=f"Table 'wide' with .*Received: a table with {received}",
        ):
            tf.train.Checkpoint(embedding=one).restore(paths[path])
        for table, values in contents(one).items():
            check_same(values, before[table])
    larger = tlm.vocabulary.OpenVocabulary(500)
    for path, wanted in (
        ("shared", {"deep": larger}),
        (
            "shared",
            {"deep": larger, "wide": tlm.vocabulary.OpenVocabulary(500)},
        ),
        ("separate", {"deep": larger, "wide": "deep"}),
        ("shared", {"wide": larger, "deep": "wide"}),
    ):
        with pytest.raises(ValueError, match="must convert tables that share"):
            tlm.vocabulary.convert(
                paths[path], str(tmp_path / "converted"), wanted
            )
    assert not list(tmp_path.glob("converted*"))


def test_deltas_restore_both_tables(tmp_path):
    one, _ = create(64, num_shards=2, evict="lru")
    rng = np.random.default_rng(4)
    train(one, keys_of(rng), keys_of(rng))
    base = save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    for step in range(3):
        train(one, keys_of(rng), keys_of(rng))
        if step == 1:
            one.vocabularies["wide"].evict(one.vocabularies["wide"].keys()[:3])
            one.vocabularies["wide"].write([10**12], [[2.0]])
        writer.write()
    full = tlm.deltas.apply(base, tmp_path / "deltas")
    assert tensors(full) == tensors(save(one, tmp_path / "full"))
    # A writer that compares all rows finds no difference.
    again = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    assert all(
        table["num_rows"] == 0 for table in again.write().meta.tables.values()
    )


def test_deltas_of_served_models_raise(tmp_path):
    one, _ = create(64)
    train(one, [1], [1])
    base = save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    for call in (
        lambda: tlm.export(one, str(tmp_path / "served"), delta_writer=writer),
        lambda: writer.mark_export(tmp_path / "served"),
    ):
        with pytest.raises(
            NotImplementedError, match="tables that share a vocabulary"
        ):
            call()
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("kind", ["saved_model", "export"])
def test_an_export_contains_one_copy_of_the_keys(tmp_path, kind):
    one, _ = create(64, evict="lru")
    rng = np.random.default_rng(5)
    for _ in range(3):
        train(one, keys_of(rng), keys_of(rng))
    path = str(tmp_path / "served")
    ids = cases.ragged(keys_of(rng), np.arange(41))
    expected = one({"wide": ids, "deep": ids})
    if kind == "export":
        tlm.export(one, path)
    else:
        module = tf.Module()
        module.embedding = one
        module.serve = tf.function(
            one.__call__,
            input_signature=[
                dict.fromkeys(DIMS, tf.RaggedTensorSpec([None, None], tf.int64))
            ],
        )
        tf.saved_model.save(module, path)
    served = tf.saved_model.load(path)
    check_same(served.serve({"wide": ids, "deep": ids}), expected)
    stored = [
        shape
        for _, shape in tf.train.list_variables(f"{path}/variables/variables")
    ]
    assert stored.count([8, 8]) == (1 if kind == "export" else 3)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_train_the_tables_of_one_replica(num_replicas):
    def run(strategy):
        count = strategy.num_replicas_in_sync
        size = 12 // count
        with strategy.scope():
            one, _ = create(8, num_shards=1, **POLICY)

        @tf.function
        def step(batches):
            def of_replica(batch):
                one.enqueue(batch)
                found = one.dequeue()
                one.apply_gradients(
                    {name: value * 0.5 + 0.125 for name, value in found.items()}
                )

            strategy.run(of_replica, (batches,))

        rng = np.random.default_rng(6)
        for _ in range(12):
            keys = rng.zipf(1.4, [2, 12]) % 300
            step(
                strategy.experimental_distribute_values_from_function(
                    lambda context, keys=keys: {
                        name: tf.constant(
                            keys[
                                row,
                                context.replica_id_in_sync_group * size : (
                                    context.replica_id_in_sync_group + 1
                                )
                                * size,
                            ]
                        )
                        for row, name in enumerate(DIMS)
                    }
                )
            )
        assert one.vocabularies["wide"].stats()["num_evicted"] > 0
        return contents(one)

    found, expected = (
        run(strategies.mirrored(count)) for count in (num_replicas, 1)
    )
    for table, values in expected.items():
        check_same(found[table], values)


def test_keys_of_different_kinds_raise():
    one, _ = create(64)
    with pytest.raises(ValueError, match="one open vocabulary must all have"):
        one.enqueue({"wide": tf.constant(["a"]), "deep": tf.constant([1])})
    one.enqueue({"wide": tf.constant(["a"]), "deep": tf.constant(["a"])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        one.vocabularies["wide"].lookup([1])


@pytest.mark.parametrize(
    ("vocabularies", "error", "message"),
    [
        (
            {"wide": "deep"},
            ValueError,
            "that has a tlm.vocabulary.OpenVocabulary in this",
        ),
        (
            {"wide": "wide"},
            ValueError,
            "that has a tlm.vocabulary.OpenVocabulary in this",
        ),
        (
            {"wide": "dep", "deep": tlm.vocabulary.OpenVocabulary(64)},
            ValueError,
            "'dep'",
        ),
        ({"wide": 5}, TypeError, "or the name of the table"),
        (
            dict.fromkeys(DIMS, tlm.vocabulary.OpenVocabulary(64)),
            ValueError,
            r"\{'wide': tlm.vocabulary.OpenVocabulary\(...\), 'deep': 'wide'\}",
        ),
        (
            {"wide": "deep", "deep": tlm.vocabulary.OpenVocabulary(65)},
            ValueError,
            "`vocabulary_size`",
        ),
    ],
)
def test_invalid_vocabularies_raise(vocabularies, error, message):
    with pytest.raises(error, match=message):
        tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        64,
                        dim,
                        name=name,
                        initializer=tf.ones_initializer(),
                    )
                )
                for name, dim in DIMS.items()
            },
            tpu.SGD(0.1),
            vocabularies=vocabularies,
        )


def test_a_table_config_can_name_the_owner():
    configs = [
        tpu.TableConfig(64, dim, name=name, initializer=tf.ones_initializer())
        for name, dim in DIMS.items()
    ]
    one = tlm.TPUEmbedding(
        [tpu.FeatureConfig(table) for table in configs],
        tpu.SGD(0.1),
        vocabularies={
            configs[0]: tlm.vocabulary.OpenVocabulary(64),
            configs[1]: configs[0],
        },
    )
    one.vocabularies["deep"].write([4])
    assert bool(one.vocabularies["wide"].contains(4))


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([1, 0], "of tables that own a vocabulary"),
        ([1, 2], "of tables that own a vocabulary"),
        ([-1, 1], "of tables that own a vocabulary"),
        ([1], "must have the same size"),
    ],
)
def test_the_op_rejects_invalid_owners(owners, message):
    one, _ = create(8)
    one._state.backend.engine._keys._attrs["vocabulary_of"] = owners
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(one, [1], [1])
    assert not len(one.vocabularies["deep"].keys())


def test_the_ops_reject_tables_of_another_size():
    shared, _ = create(8)
    separate = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    size, 2, name=name, initializer=tf.ones_initializer()
                )
            )
            for name, size in {"small": 8, "large": 40}.items()
        },
        tpu.SGD(0.1),
        vocabularies={
            "small": tlm.vocabulary.OpenVocabulary(8),
            "large": tlm.vocabulary.OpenVocabulary(40),
        },
    )
    separate.build()
    backend = separate._state.backend
    first, second = (
        part for table in (0, 1) for part in backend.store.parts(table)
    )
    arguments = {
        "engine": backend.engine.handle,
        "state": tables.handles(first.state),
        "shards": [
            handle
            for part in (first, second)
            for handle in tables.handles(part.variables[tables.PARAMETERS])
        ],
        "slots": [],
        "keys": tf.constant([3], tf.int64),
        "expired": False,
        "table": 0,
        "Tvalues": [tf.float32, tf.float32],
        **tlm.vocabulary.OpenVocabulary(8).policy(),
    }
    for sharing, message in (
        ([1], "must have the same number of rows"),
        ([2], r"must be in \[0, 2\)"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ops.evict_keys(**arguments, sharing=sharing)
    variables_of = key_editor.KeyEditor._rows_and_slots

    def without_slots_of_table_0(editor, part):
        rows, slots = variables_of(editor, part)
        return rows, slots if part.table else []

    with (
        mock.patch.object(
            key_editor.KeyEditor, "_rows_and_slots", without_slots_of_table_0
        ),
        pytest.raises(
            tf.errors.InvalidArgumentError, match="sharing_shards.*Received: 1"
        ),
    ):
        shared.vocabularies["wide"].write([3])
    assert shared.vocabularies["wide"].write([3]).num_new == 1
