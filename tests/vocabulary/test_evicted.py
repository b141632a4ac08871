"""Evicted keys are reported with the values of their rows."""

import dataclasses
import os
import resource
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding.host import open_table_cases as cases
from tests.files import full_disk
from tf_layoutmap.vocabulary import evicted

tpu = tf.tpu.experimental.embedding


def by_key(one, config):
    """Returns the row and the accumulators of each key."""
    vocabulary = one.vocabularies["words"]
    keys = vocabulary.keys()
    rows = vocabulary.lookup(keys).numpy()
    table = cases.rows_of(one.embedding_tables[config])
    slot = cases.rows_of(one.slot_variables[config]["accumulators"])
    return {
        key: (*table[row].tolist(), *slot[row].tolist())
        for key, row in zip(keys.numpy().tolist(), rows)
    }


def reported(found):
    """Returns the records of a callback in the format of `by_key`."""
    return {
        key: (*row.tolist(), *slot.tolist())
        for one in found
        for key, row, slot in zip(
            one.keys.tolist(),
            one.rows.astype(np.float32),
            one.slots["accumulators"],
        )
    }


@pytest.mark.parametrize(
    ("arguments", "is_traced"),
    [
        ({}, False),
        ({"num_shards": 3, "table_dtypes": "bfloat16"}, False),
        ({"pipeline_execution_with_tensor_core": True}, True),
        ({}, True),
    ],
    ids=["eager", "bfloat16", "pipelined", "traced"],
)
def test_a_callback_receives_the_row_values_before_eviction(
    arguments, is_traced
):
    found = []
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(48, on_evict=found.append),
        tpu.Adagrad(0.25),
        **arguments,
    )
    one.build()
    rng = np.random.default_rng(0)

    def step(ids, gradient):
        one.enqueue({"ids": ids})
        one.dequeue()
        one.apply_gradients({"ids": gradient})

    run = tf.function(step) if is_traced else step
    num_evicted = 0
    for number in range(12):
        one.flush()
        before = by_key(one, config)
        run(
            tf.constant(rng.integers(0, 30, 12) + number * 9),
            tf.constant(rng.uniform(-1, 1, [12, 3]), tf.float32),
        )
        now = reported(found)
        assert now == {key: before[key] for key in now}
        assert (
            before.keys() - set(one.vocabularies["words"].keys().numpy())
            == now.keys()
        )
        num_evicted += len(now)
        found.clear()
    assert num_evicted == one.vocabularies["words"].stats()["num_evicted"] > 20


def test_explicitly_evicted_keys_are_reported():
    found = []
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(48, ttl_steps=1, on_evict=found.append),
        tpu.Adagrad(0.25),
    )
    for keys in ([1, 2, 3], [3, 4, 5], [5, 6, 7]):
        one.enqueue({"ids": tf.constant(keys)})
        one.dequeue()
        one.apply_gradients({"ids": tf.ones([3, 3])})
    before = by_key(one, config)
    one.vocabularies["words"].evict([3, 99])
    assert found[0].table == "words"
    assert reported(found) == {3: before[3]}
    found.clear()
    gone = one.vocabularies["words"].evict_expired().numpy().tolist()
    assert sorted(gone) == [1, 2, 4]
    assert reported(found) == {key: before[key] for key in gone}
    found.clear()
    one.vocabularies["words"].evict([99])
    one.enqueue({"ids": tf.constant([8])}, training=False)
    assert not found


def test_a_file_has_one_record_per_eviction(tmp_path):
    path = tmp_path / "some" / "evicted"
    for number in range(2):  # The second pass simulates a restarted program.
        one, config = cases.embedding(
            tlm.vocabulary.OpenVocabulary(8, on_evict=path), tpu.Adagrad(0.25)
        )
        wanted = []
        for first in range(0, 40, 8):
            one.enqueue({"ids": tf.range(first, first + 8)})
            one.dequeue()
            one.apply_gradients({"ids": tf.ones([8, 3])})
            wanted.append(by_key(one, config))
        records = list(tf.data.TFRecordDataset(f"{path}-{number:05d}"))
        assert len(records) == 4
        for record, before in zip(records, wanted):
            found = tf.io.parse_single_example(
                record,
                {
                    "table": tf.io.FixedLenFeature([], tf.string),
                    "keys": tf.io.FixedLenFeature([8], tf.int64),
                    "rows": tf.io.FixedLenFeature([8, 3], tf.float32),
                    "slot/accumulators": tf.io.FixedLenFeature(
                        [8, 3], tf.float32
                    ),
                },
            )
            assert found["table"] == b"words"
            assert before == {
                key: (*row.tolist(), *slot.tolist())
                for key, row, slot in zip(
                    found["keys"].numpy().tolist(),
                    found["rows"].numpy(),
                    found["slot/accumulators"].numpy(),
                )
            }


def test_a_full_disk_leaves_complete_records(tmp_path):
    path = str(tmp_path / "evicted")
    tell = evicted._as_callback(path)

    def record(number, size):
        return evicted.EvictedKeys(
            "words", np.full([size], number), np.ones([size, 1]), {}
        )

    with mock.patch.object(evicted.logging, "warning") as warning:
        tell(record(0, 1))
        tell(record(0, 1))
    (call,) = warning.call_args_list
    assert call.args[0] % call.args[1:] == (
        f"Evicted keys of `on_evict={path!r}` are written to the TFRecord file "
        f"'{path}-00000'."
    )
    for size in (500, 500):
        with pytest.raises(OSError, match="File too large.*evicted'"):
            with full_disk.full_disk():
                tell(record(1, size))
    tell(record(2, 1))
    assert sorted(os.listdir(tmp_path)) == ["evicted-00000", "evicted-00001"]
    for file, size in (("evicted-00000", 2), ("evicted-00001", 1)):
        records = tf.data.TFRecordDataset(str(tmp_path / file))
        assert len(list(records)) == size


def test_a_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        evicted._as_callback(tmp_path / "file" / "evicted")(
            evicted.EvictedKeys("words", np.ones([1]), np.ones([1, 1]), {})
        )


class RecordingCallback:
    """Callback that raises an error while `is_full` is True."""

    def __init__(self):
        self.is_full = False
        self.keys = []

    def __call__(self, evicted):
        if self.is_full:
            raise OSError(f"no room for {len(evicted.keys)}")
        self.keys.extend(evicted.keys.tolist())


def all_of(one, config):
    """Returns all state that a step may change."""
    vocabulary = one.vocabularies["words"]
    return [
        cases.rows_of(one.embedding_tables[config]),
        *(cases.rows_of(slot) for slot in one.slot_variables[config].values()),
        *(
            tf.convert_to_tensor(variable).numpy()
            for variable in vocabulary._variables.values()
        ),
    ]


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_shards": 3, "table_dtypes": "bfloat16"},
        {"pipeline_execution_with_tensor_core": True},
    ],
    ids=["one", "bfloat16", "pipelined"],
)
def test_an_enqueue_whose_callback_raises_is_undone(is_traced, arguments):
    callback = RecordingCallback()
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(
            8, admission="count", min_count=1, on_evict=callback
        ),
        tpu.Adagrad(0.25),
        **arguments,
    )
    one.build()

    def enqueue(ids):
        one.enqueue({"ids": ids})

    run = tf.function(enqueue) if is_traced else enqueue

    def finish():
        found = one.dequeue()["ids"]
        one.apply_gradients({"ids": tf.ones([8, 3])})
        one.flush()
        return found.numpy()

    run(tf.range(8))
    finish()
    before, stats = all_of(one, config), one.stats()
    callback.is_full = True
    error = tf.errors.UnknownError if is_traced else OSError
    for first in (8, 16):
        with pytest.raises(error, match="no room for 8"):
            run(tf.range(first, first + 8))
        assert one.stats() == stats
        for mine, old in zip(all_of(one, config), before):
            np.testing.assert_array_equal(mine, old)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="needs an enqueued step"
    ):
        one.dequeue()
    callback.is_full = False
    # If the program skips the failed batch, the next gradients must be applied
    # to the next batch.
    run(tf.range(4, 12))
    rows = one.vocabularies["words"].lookup(tf.range(4, 12)).numpy()
    table = cases.rows_of(one.embedding_tables[config]).astype(np.float32)
    np.testing.assert_array_equal(finish(), table[rows])
    assert sorted(callback.keys) == [0, 1, 2, 3]


def test_a_table_without_a_callback_is_undone_with_the_others():
    callback = RecordingCallback()
    callback.is_full = True
    words, names = cases.table(8), cases.table(8, name="names")
    one = tlm.TPUEmbedding(
        {"words": tpu.FeatureConfig(words), "names": tpu.FeatureConfig(names)},
        tpu.Adagrad(0.25),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(8, on_evict=callback),
            "names": tlm.vocabulary.OpenVocabulary(8),
        },
    )
    one.enqueue({"words": tf.range(8), "names": tf.range(8)})
    one.dequeue()
    one.apply_gradients({"words": tf.ones([8, 3]), "names": tf.ones([8, 3])})
    before = cases.rows_of(one.embedding_tables[names])
    with pytest.raises(OSError, match="no room for 8"):
        one.enqueue({"words": tf.range(8, 16), "names": tf.range(8, 16)})
    np.testing.assert_array_equal(
        cases.rows_of(one.embedding_tables[names]), before
    )
    assert sorted(one.vocabularies["names"].keys().numpy()) == list(range(8))


def test_an_eviction_whose_callback_raises_keeps_its_keys():
    callback = RecordingCallback()
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(48, ttl_steps=1, on_evict=callback),
        tpu.Adagrad(0.25),
    )
    for keys in ([1, 2, 3], [3, 4, 5], [5, 6, 7]):
        one.enqueue({"ids": tf.constant(keys)})
        one.dequeue()
        one.apply_gradients({"ids": tf.ones([3, 3])})
    before = all_of(one, config)
    vocabulary = one.vocabularies["words"]
    callback.is_full = True
    calls = {
        "evict": lambda: vocabulary.evict([3, 99]),
        "evict_expired": vocabulary.evict_expired,
        "traced": tf.function(lambda: vocabulary.evict([3])),
    }
    for name, call in calls.items():
        with pytest.raises(
            (OSError, tf.errors.UnknownError), match="no room for"
        ):
            call()
        for mine, old in zip(all_of(one, config), before):
            np.testing.assert_array_equal(mine, old, err_msg=name)
    callback.is_full = False
    assert vocabulary.evict([3]).numpy().tolist() == [3] == callback.keys


def test_a_resize_whose_callback_raises_is_undone():
    callback = RecordingCallback()
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(48, on_evict=callback), tpu.Adagrad(0.25)
    )
    one.enqueue({"ids": tf.range(40)})
    one.dequeue()
    one.apply_gradients({"ids": tf.ones([40, 3])})
    before = by_key(one, config)
    callback.is_full = True
    with pytest.raises(OSError, match="no room for"):
        one.vocabularies["words"].resize(8)
    assert by_key(one, config) == before
    assert one.vocabularies["words"].settings.capacity == 48
    callback.is_full = False
    assert one.vocabularies["words"].resize(8).num_dropped == len(callback.keys)
    assert len(by_key(one, config)) == 40 - len(callback.keys)


def test_a_layer_whose_callback_raises_opens_no_lookup():
    callback = RecordingCallback()
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(cases.table(8)),
        tpu.Adagrad(0.25),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(8, on_evict=callback)
        },
    )
    ids = keras.Input([1], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")

    def train(first):
        model.train_on_batch(
            np.arange(first, first + 8).reshape(-1, 1), np.ones([8, 1])
        )

    train(0)
    # `reset` releases the rows of this lookup, which are otherwise not evicted
    # while its gradients may still arrive.
    layer.embedding.reset()
    callback.is_full = True
    for _ in range(2):
        with pytest.raises(tf.errors.UnknownError, match="no room for 8"):
            train(8)
    assert sorted(layer.embedding.vocabularies["words"].keys().numpy()) == list(
        range(8)
    )
    callback.is_full = False
    train(8)
    assert sorted(callback.keys) == list(range(8))


def test_a_step_that_the_callback_used_is_not_undone():
    def use(evicted):
        one.dequeue()
        raise OSError(f"no room for {len(evicted.keys)}")

    one, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8, on_evict=use), tpu.Adagrad(0.25)
    )
    one.enqueue({"ids": tf.range(8)})
    one.dequeue()
    one.apply_gradients({"ids": tf.ones([8, 3])})
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="(?s)no room for 8.*could not be undone",
    ):
        one.enqueue({"ids": tf.range(8, 16)})


def test_a_process_of_several_stops_when_its_callback_raises():
    """One process cannot undo a step that other processes have run."""
    callback = RecordingCallback()
    one, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8, on_evict=callback), tpu.Adagrad(0.25)
    )
    one.enqueue({"ids": tf.range(8)})
    one.dequeue()
    one.apply_gradients({"ids": tf.ones([8, 3])})
    # Simulates a process of a `MultiWorkerMirroredStrategy`.
    one._state.backend.engine._keys._in_processes = True
    callback.is_full = True
    with pytest.raises(OSError, match="no room for 8"):
        one.enqueue({"ids": tf.range(8, 16)})
    callback.is_full = False
    for call in (lambda: one.enqueue({"ids": tf.range(8, 16)}), one.dequeue):
        with pytest.raises(
            tf.errors.FailedPreconditionError,
            match="(?s)`on_evict` raised.*Call `reset`",
        ):
            call()
    assert sorted(one.vocabularies["words"].keys().numpy()) == list(
        range(8, 16)
    )
    one.reset()
    one.enqueue({"ids": tf.range(8, 16)})


def test_a_file_at_its_size_limit_ends_with_a_complete_record(tmp_path):
    path = tmp_path / "evicted"
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8, on_evict=path), tpu.Adagrad(0.25)
    )

    def step(first):
        one.enqueue({"ids": tf.range(first, first + 8)})
        one.dequeue()
        one.apply_gradients({"ids": tf.ones([8, 3])})

    step(0)
    step(8)
    size = (tmp_path / "evicted-00000").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = by_key(one, config)
    # Python ignores SIGXFSZ, so a write beyond the limit raises an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(OSError):
            step(16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert by_key(one, config) == before
    step(16)
    assert [
        len(list(tf.data.TFRecordDataset(f"{path}-{number:05d}")))
        for number in range(2)
    ] == [1, 1]


def test_a_layer_reports_evictions_during_fit():
    found = []
    # A layer does not evict the rows of its most recent lookups, so the table
    # is large enough for them.
    config = cases.table(64)
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(config),
        tpu.Adagrad(0.25),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(64, on_evict=found.append)
        },
    )
    ids = keras.Input([1], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    model.fit(
        np.arange(200).reshape(-1, 1),
        np.ones([200, 1]),
        batch_size=4,
        verbose=0,
    )
    keys = [key for one in found for key in one.keys.tolist()]
    assert len(set(keys)) == len(keys) > 20
    config = layer.get_config()
    assert config["vocabularies"]["words"]["on_evict"] is None
    again = tlm.layers.TPUEmbedding.from_config(config)
    assert again.get_config() == config


def test_replace_keeps_on_evict_and_repr_shows_it():
    words = tlm.vocabulary.OpenVocabulary(8, on_evict=print)
    assert dataclasses.replace(words, seed=3).on_evict is words.on_evict
    assert "print" in repr(words)


def test_an_unsupported_on_evict_raises():
    with pytest.raises(TypeError, match="`on_evict` must be a callable, a pat"):
        tlm.vocabulary.OpenVocabulary(8, on_evict=5)


def test_replicas_report_each_eviction_once():
    found = []
    with strategies.mirrored(2).scope():
        one, _ = cases.embedding(
            tlm.vocabulary.OpenVocabulary(48, on_evict=found.append),
            tpu.Adagrad(0.25),
        )
    one.build()
    strategy = one._state.replicas.strategy

    @tf.function
    def step(first):
        def run():
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
            one.enqueue(
                {"ids": first + replica * 8 + tf.range(12, dtype=tf.int64)}
            )
            one.apply_gradients({"ids": tf.ones_like(one.dequeue()["ids"])})

        strategy.run(run)

    for number in range(8):
        step(tf.constant(20 * number, tf.int64))
    keys = [key for each in found for key in each.keys.tolist()]
    stats = one.vocabularies["words"].stats()
    assert len(set(keys)) == len(keys) == stats["num_evicted"] > 80


@pytest.mark.parametrize("to_file", [False, True])
def test_records_contain_the_layer_name(to_file, tmp_path):
    records = []
    words = tlm.vocabulary.OpenVocabulary(
        8, on_evict=str(tmp_path / "gone") if to_file else records.append
    )
    for name in ("first", "second"):
        layer = tlm.layers.ShardedEmbedding(
            words, 2, optimizer="adagrad", name=name
        )
        model = keras.Sequential(
            [keras.Input([], dtype="int64"), layer, keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        for start in (0, 8):
            model.fit(
                np.arange(start, start + 8),
                np.ones([8, 1]),
                batch_size=8,
                verbose=0,
            )
        assert layer.vocabulary.settings.on_evict is words.on_evict
    if to_file:
        records = [
            tf.train.Example.FromString(one.numpy())
            for number in (0, 1)
            for one in tf.data.TFRecordDataset(
                str(tmp_path / f"gone-{number:05d}")
            )
        ]
        names = [
            one.features.feature["table"].bytes_list.value[0].decode()
            for one in records
        ]
    else:
        names = [one.table for one in records]
    assert names == ["first", "second"]
