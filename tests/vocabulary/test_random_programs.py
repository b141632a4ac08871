"""Random programs of open vocabularies match a reference in plain Python.

Two tables share one vocabulary, whose keys are integers, or strings that are
kept. The programs train, write rows by key, evict keys, and move the keys to
other capacities: in the running program, through a checkpoint, through the
arrays of a Keras file, and through exported files.
"""

import tempfile
import warnings

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.reference import shared_vocabulary
from tests.reference import vocabulary as reference
from tf_layoutmap.layers.base import weight_files
from tf_layoutmap.partition import FixedShardsPartitioner
from tf_layoutmap.vocabulary import key_tensors

tpu = tf.tpu.experimental.embedding

# The columns of the tables. The table "deep" owns the vocabulary.
DIMS = {"wide": 1, "deep": 3}
POLICIES = (
    {},
    {"admission": "count", "min_count": 2},
    {"evict": "lfu", "half_life_steps": 2, "ttl_steps": 1},
    {"admission": "count", "min_count": 2, "evict": "none", "ttl_steps": 2},
)
KINDS = (
    "train",
    "train",
    "same",
    "wide",
    "deep",
    "evict",
    "expire",
    "resize",
    "checkpoint",
    "weights",
    "numpy",
)
KEYS = st.lists(
    st.one_of(st.integers(-5, 60), st.integers(-(2**60), 2**60)), max_size=30
)


class Pair:
    """An embedding and its reference.

    The row of a key is the number of its lookups in a table in training steps
    since the key got its row, or since its row was written.
    """

    def __init__(self, capacity, num_shards, policy, keep_strings):
        self.num_shards = num_shards
        self.policy = policy
        self.keep_strings = keep_strings
        self.evicted = []
        self.embedding = self._create(capacity)
        self.model = self._new_model(capacity)
        self.strings = reference.Strings(self.model)
        self.step = 0
        # The value of each key in each table.
        self.values = {name: {} for name in DIMS}

    def _settings(self, capacity):
        return tlm.vocabulary.OpenVocabulary(
            capacity,
            on_evict=self.evicted.append,
            keep_strings=self.keep_strings,
            **self.policy,
        )

    def _create(self, capacity):
        one = tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        capacity,
                        dim,
                        combiner="sum",
                        name=name,
                        initializer=tf.zeros_initializer(),
                    )
                )
                for name, dim in DIMS.items()
            },
            tpu.SGD(1.0),
            vocabularies={"wide": "deep", "deep": self._settings(capacity)},
            partitioner=FixedShardsPartitioner(self.num_shards),
        )
        one.build()
        return one

    def _new_model(self, capacity):
        return reference.Vocabulary(capacity, **self.policy)

    def ids(self, numbers):
        """Returns the ids of an input and their keys, as lists."""
        if not self.keep_strings:
            return numbers, numbers
        texts = [f"id {number}\0".encode() for number in numbers]
        keys = key_tensors.hash_strings(tf.constant(texts, tf.string))
        return texts, keys.numpy().tolist()

    def tensor(self, ids):
        return tf.constant(ids, tf.string if self.keep_strings else tf.int64)

    def run(self, kind, number, first, second):
        """Runs a call, and compares the keys that it evicts."""
        before = dict(self.model.known)
        values = {name: dict(here) for name, here in self.values.items()}
        self.evicted.clear()
        if kind in ("train", "same"):
            self._train(first, first if kind == "same" else second)
        elif kind == "evict":
            self._evict(first)
        elif kind == "expire":
            found = self.embedding.vocabularies["deep"].evict_expired()
            self._check_result(
                found, self._rows_to_keys(before, self._expire())
            )
        elif kind in DIMS:
            self._write(kind, number, first)
        else:
            self._move(kind, 1 + len(first) + 2 * len(second))
        gone = {
            key: one
            for key, one in before.items()
            if self.model.known.get(key) is not one
            and (kind != "resize" or key not in self.model.known)
        }
        if kind in ("checkpoint", "weights", "numpy"):
            assert not self.evicted
            gone = {key: 0 for key in gone if key not in self.model.known}
        else:
            self._check_evicted(gone, values)
        for here in self.values.values():
            for key in gone:
                here.pop(key, None)
        if kind in ("train", "same"):
            self._count(first, first if kind == "same" else second)

    def _train(self, wide, deep):
        self.step += 1
        (wide_ids, wide_keys), (deep_ids, deep_keys) = map(
            self.ids, (wide, deep)
        )
        # The owner of the vocabulary is the first table of the reference.
        self.model.admit(
            shared_vocabulary.merge([deep_keys, wide_keys]),
            self.step,
            self.step,
        )
        self.strings.keep(wide_keys, wide_ids)
        self.strings.keep(deep_keys, deep_ids)
        self.embedding.enqueue(
            {"wide": self.tensor(wide_ids), "deep": self.tensor(deep_ids)}
        )
        found = self.embedding.dequeue()
        self.embedding.apply_gradients(
            {name: -tf.ones_like(value) for name, value in found.items()}
        )

    def _count(self, wide, deep):
        """Applies the updates of a step to the values of the keys."""
        for name, numbers in (("wide", wide), ("deep", deep)):
            here = self.values[name]
            for key in self.ids(numbers)[1]:
                if key in self.model.known:
                    here[key] = here.get(key, 0) + 1

    def _evict(self, numbers):
        ids, keys = self.ids(numbers)
        row_of = {key: one.row for key, one in self.model.known.items()}
        key_of = {row: key for key, row in row_of.items()}
        rows = self.model.evict(keys, self.step + 1)
        found = self.embedding.vocabularies["wide"].evict(self.tensor(ids))
        self._check_result(found, [key_of[row] for row in rows])

    def _expire(self):
        return self.model.evict_expired(self.step + 1, self.step + 1)

    @staticmethod
    def _rows_to_keys(known, rows):
        key_of = {one.row: key for key, one in known.items()}
        return [key_of[row] for row in rows]

    def _check_result(self, found, keys):
        """Checks the result of `evict` or `evict_expired`."""
        expected = keys
        if self.keep_strings:
            expected = [self.strings.name(key) for key in keys]
        assert sorted(found.numpy().tolist()) == sorted(expected)

    def _write(self, table, number, numbers):
        numbers = list(dict.fromkeys(numbers))
        ids, keys = self.ids(numbers)
        last_steps = counts = None
        if number % 2:
            order = np.arange(len(keys))
            last_steps = (7 * number + order) % (self.step + 1)
            counts = number + order
        written = self.embedding.vocabularies[table].write(
            self.tensor(ids),
            np.full([len(keys), DIMS[table]], number),
            last_steps=last_steps,
            counts=counts,
        )
        rows, new = self.model.write(keys, self.step, last_steps, counts)
        self.strings.keep(keys, ids)
        assert written.num_new == len(new)
        assert written.without_row.tolist() == [
            one for one, row in zip(ids, rows) if row < 0
        ]
        self.values[table].update(
            (key, number) for key, row in zip(keys, rows) if row >= 0
        )

    def _move(self, how, capacity):
        """Moves the keys to another capacity."""
        if how == "resize":
            self.embedding.vocabularies["wide"].resize(capacity)
        elif how == "numpy":
            self._export(capacity)
            return
        else:
            new = self._create(capacity)
            if how == "weights":
                is_equal = (
                    reference.num_buckets_for(capacity)
                    == self.model.num_buckets
                )
                store = {}
                weight_files.save_tables(self.embedding, store)
                with warnings.catch_warnings():
                    # There may be too many keys.
                    warnings.simplefilter("ignore", UserWarning)
                    weight_files.load_tables(new, store, layer="tables")
            else:
                is_equal = False
                self._convert(new, capacity)
            self.embedding = new
            if is_equal:
                return
        self.model.resize(capacity, self.step)

    def _convert(self, new, capacity):
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(one=self.embedding).save(folder + "/old")
            tlm.vocabulary.convert(
                path,
                folder + "/new",
                {"deep": self._settings(capacity), "wide": "deep"},
            )
            tf.train.Checkpoint(one=new).restore(folder + "/new")

    def _export(self, capacity):
        """Exports and imports the rows. The sketch is not exported."""
        new, old = self._create(capacity), self.model
        for name in ("deep", "wide"):
            with tempfile.TemporaryDirectory() as folder:
                self.embedding.vocabularies[name].export(
                    folder + "/rows", block_size=16
                )
                tlm.vocabulary.import_rows(
                    folder + "/rows", new.vocabularies[name]
                )
        self.embedding, self.model = new, self._new_model(capacity)
        self.strings.vocabulary = self.model
        keys = old.export()
        self.step = self.step if keys else 0
        # Each block is written by a separate call.
        self.model.write(
            [key for key, *_ in keys],
            self.step,
            [last_step for *_, last_step, _ in keys],
            [count for *_, count in keys],
        )

    def _check_evicted(self, gone, values):
        """Compares the arguments of `on_evict`."""
        for name in DIMS:
            here = [one for one in self.evicted if one.table == name]
            keys = [key for one in here for key in one.keys.tolist()]
            assert sorted(keys) == sorted(gone), name
            for one in here:
                expected = [values[name].get(key, 0) for key in one.keys]
                np.testing.assert_array_equal(
                    one.rows, np.repeat([expected], DIMS[name], axis=0).T
                )
                if self.keep_strings:
                    assert one.strings.tolist() == [
                        self.strings.name(key) for key in one.keys.tolist()
                    ]
                else:
                    assert one.strings is None

    def check(self, block_size):
        """Compares all keys and rows."""
        expected = self.model.export()
        for name, vocabulary in self.embedding.vocabularies.items():
            blocks = list(vocabulary.blocks(block_size))

            def column(of, blocks=blocks):
                return [one for block in blocks for one in of(block).tolist()]

            keys = column(lambda block: block.keys)
            assert keys == [key for key, *_ in expected]
            np.testing.assert_array_equal(
                vocabulary.lookup(
                    tlm.ops.StoredKeys(tf.constant(keys, tf.int64))
                ),
                [row for _, row, *_ in expected],
            )
            assert column(lambda block: block.last_steps) == [
                last_step for *_, last_step, _ in expected
            ]
            assert column(lambda block: block.counts) == [
                count for *_, count in expected
            ]
            assert column(lambda block: block.rows) == [
                [self.values[name].get(key, 0)] * DIMS[name] for key in keys
            ]
            stats = vocabulary.stats()
            assert stats["step"] == self.step
            assert stats["num_keys"] == len(keys)
            if self.keep_strings:
                names = self.strings.names()
                assert None not in names
                assert vocabulary.keys().numpy().tolist() == names
                assert column(lambda block: block.strings) == names
                assert stats["num_strings"] >= len(names)
                assert stats["num_collisions"] == 0
            else:
                assert vocabulary.keys().numpy().tolist() == keys


@given(
    capacity=st.integers(1, 90),
    num_shards=st.integers(1, 4),
    block_size=st.integers(8, 80),
    policy=st.sampled_from(POLICIES),
    keep_strings=st.booleans(),
    program=st.lists(st.tuples(st.sampled_from(KINDS), KEYS, KEYS), max_size=8),
)
@settings(max_examples=50)
def test_random_programs_match_the_reference(
    capacity, num_shards, block_size, policy, keep_strings, program
):
    pair = Pair(capacity, num_shards, policy, keep_strings)
    for number, (kind, first, second) in enumerate(program, 2):
        pair.run(kind, number, first, second)
        pair.check(block_size)
