"""Pairs of embeddings for random programs: on servers, and in one process.

`Setup` describes the tables. `Pair` makes the same calls of both embeddings and
compares all results bitwise.
"""

import dataclasses
import tempfile

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.deltas.cases import save, tensors
from tests.embedding.servers import local
from tf_layoutmap.embedding import tables
from tf_layoutmap.partition import FixedShardsPartitioner
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

tpu = tf.tpu.experimental.embedding

# Tables with an open vocabulary, and the table that owns the vocabulary.
OWNERS = {"words": "words", "deep": "deep", "wide": "deep"}
DIMS = {"words": 3, "deep": 2, "wide": 1, "ads": 4, "few": 2}
# The sizes of closed tables.
SIZES = {"ads": 23, "few": 3}
# The tables of an embedding.
NAMES = (
    ("words",),
    ("deep", "wide"),
    ("ads", "words"),
    ("deep", "few", "wide"),
    ("wide", "words", "deep", "ads"),
    ("ads", "few"),
)
EMPTY = -(2**63)

POLICIES = {
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu", "half_life_steps": 2, "ttl_steps": 3},
    "ttl": {"evict": "none", "ttl_steps": 2},
    "count": {"admission": "count", "min_count": 2},
    "count_ttl": {"admission": "count", "min_count": 3, "ttl_steps": 1},
    "probability": {"admission": "probability", "probability": 0.5},
    "row": {"evict": "lfu", "unknown": "row"},
    "count_row": {
        "admission": "count",
        "min_count": 2,
        "evict": "none",
        "unknown": "row",
    },
}
OPTIMIZERS = {
    "sgd": lambda: tpu.SGD(0.5),
    "adagrad": lambda: tpu.Adagrad(0.3),
    "adagrad_each": lambda: tpu.Adagrad(0.3, use_gradient_accumulation=False),
    "clipped": lambda: tpu.SGD(
        0.5,
        use_gradient_accumulation=True,
        clipvalue=0.5,
        weight_decay_factor=0.1,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
    "momentum": lambda: tpu.AdagradMomentum(0.3, momentum=0.5),
    "adam": lambda: tpu.Adam(0.3),
    "adam_lazy_off": lambda: tpu.Adam(0.3, lazy_adam=False),
    "ftrl": lambda: tpu.FTRL(0.3),
}
COMBINERS = ("sum", "mean", "sqrtn")
DTYPES = ("float32", "float32", "bfloat16", "float16")


def keys_to_write(rng, known):
    """Returns known and other keys in random order, each key once."""
    others = rng.integers(0, 500, 9) * 1_003 - 5
    return rng.permutation(np.unique(np.concatenate([known, others])))


@dataclasses.dataclass(frozen=True)
class Setup:
    """Tables and features of an embedding.

    Attributes:
      names: Names of the tables.
      capacity: Capacity of all vocabularies.
      policy: Key of `POLICIES`.
      optimizers: Keys of `OPTIMIZERS`, by table.
      combiners: Combiners by table.
      dtypes: Dtypes of the rows, by table.
      sequences: Names of the tables with a second, sequential feature.
      out_of_range: As for `TPUEmbedding`.
      strings: Whether the keys are strings.
    """

    names: tuple[str, ...]
    capacity: int
    policy: str
    optimizers: dict[str, str]
    combiners: dict[str, str]
    dtypes: dict[str, str]
    sequences: tuple[str, ...]
    out_of_range: str
    strings: bool = False

    def features(self):
        """Returns the names of the features with the names of their tables."""
        found = {name: name for name in self.names}
        return found | {f"{name}_seq": name for name in self.sequences}

    def create(self, on_evict, num_shards=None, **options):
        """Returns a built embedding."""
        capacity = self.capacity
        configs = {
            name: tpu.TableConfig(
                capacity if name in OWNERS else SIZES[name],
                DIMS[name],
                combiner=self.combiners[name],
                name=name,
                optimizer=OPTIMIZERS[self.optimizers[name]](),
                initializer=tf.random_uniform_initializer(-1.0, 1.0)
                if name in OWNERS
                else tf.constant_initializer(0.25),
            )
            for name in self.names
        }

        def vocabulary():
            return tlm.OpenVocabulary(
                capacity, on_evict=on_evict, **POLICIES[self.policy]
            )

        found = tlm.TPUEmbedding(
            {
                feature: tpu.FeatureConfig(
                    configs[name],
                    max_sequence_length=2 if feature != name else 0,
                    name=feature,
                )
                for feature, name in self.features().items()
            },
            None,
            vocabularies={
                name: vocabulary() if OWNERS[name] == name else OWNERS[name]
                for name in self.names
                if name in OWNERS
            },
            table_dtypes=self.dtypes,
            rounding_seed=3,
            out_of_range=self.out_of_range,
            partitioner=num_shards and FixedShardsPartitioner(num_shards),
            **options,
        )
        found.build()
        return found


class Batches:
    """Random inputs and gradients of a setup."""

    def __init__(self, setup):
        self.setup = setup

    def ids(self, rng, table, size):
        if table in OWNERS:
            most = int(rng.choice([20, 400, 2**40]))
            return self.keys(
                rng.zipf(1.3, size).astype(np.int64) % most * 1_003 - 5
            )
        if self.setup.out_of_range == "error":
            return rng.integers(0, SIZES[table], size)
        return rng.integers(-3, SIZES[table] + 3, size)

    def tensor(self, table, ids):
        is_string = self.setup.strings and table in OWNERS
        return tf.constant(ids, tf.string if is_string else tf.int64)

    def keys(self, numbers):
        """Returns numbers as keys."""
        if not self.setup.strings:
            return numbers
        return np.array([b"%d" % one for one in numbers], object)

    def read(self, seed, form_seed=None):
        """Returns the inputs and weights of a batch.

        Args:
          seed: Seed of the ids and of the number of samples.
          form_seed: Seed of the classes of the inputs. By default, `seed`.
        """
        forms = np.random.default_rng(seed if form_seed is None else form_seed)
        rng = np.random.default_rng(seed)
        num_samples = int(rng.choice([0, 1, 3, 8, 20]))
        most = int(rng.choice([1, 3, 9]))
        inputs, weights = {}, {}
        for feature, table in self.setup.features().items():
            form = forms.choice(["ragged", "ragged", "sparse", "dense"])
            has_weights = feature == table and bool(forms.integers(2))
            sizes = rng.integers(0, most, num_samples)
            if rng.integers(4) == 0:
                sizes[:] = 0
            weights[feature] = None
            if form == "dense" and feature == table:
                inputs[feature] = self.tensor(
                    table, self.ids(rng, table, num_samples)
                )
                continue
            ids = self.tensor(table, self.ids(rng, table, sizes.sum()))
            ragged = tf.RaggedTensor.from_row_lengths(ids, sizes)
            by_id = ragged.with_values(
                tf.constant(rng.uniform(0.5, 2.0, sizes.sum()), tf.float32)
            )
            if form == "sparse":
                ragged, by_id = ragged.to_sparse(), by_id.to_sparse()
            inputs[feature] = ragged
            if has_weights:
                weights[feature] = by_id
        return inputs, weights


def gradients(activations):
    """Returns gradients that depend on the activations."""
    return {name: tf.sin(7 * one) + 0.1 for name, one in activations.items()}


def full_value(variable):
    shards = [np.asarray(one.numpy()) for one in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


def contents(one):
    """Returns all variables as bytes, except for rows without a key."""
    found = {}
    for table, by_name in one._variables.items():
        owner = OWNERS.get(table)
        has_key = None
        if owner is not None:
            keys = full_value(one._variables[owner]["vocabulary_keys"])
            has_key = np.append(keys.ravel() != EMPTY, True)
        for name, variable in by_name.items():
            value = full_value(variable)
            if (
                has_key is not None
                and value.ndim == 2
                and len(value) == len(has_key)
            ):
                value = value[has_key]
            found[f"{table}/{name}"] = value.tobytes()
    return found


def by_table(reports):
    """Returns the keys, rows and slots of each table, sorted by key."""
    found = {}
    for table in {one.table for one in reports}:
        own = [one for one in reports if one.table == table]
        keys = np.concatenate([one.keys for one in own])
        order = np.argsort(keys, kind="stable")
        arrays = [keys, np.concatenate([one.rows for one in own])]
        arrays += [
            np.concatenate([one.slots[name] for one in own])
            for name in own[0].slots
        ]
        found[table] = [
            (str(one.dtype), one.shape, one[order].tobytes()) for one in arrays
        ]
    return found


def joined(blocks):
    """Returns the arrays of some blocks, concatenated."""
    blocks = list(blocks)
    parts = [
        {
            "keys": one.keys,
            "rows": one.rows,
            "counts": one.counts,
            "last_steps": one.last_steps,
            **one.slots,
        }
        for one in blocks
    ]
    return {
        name: np.concatenate([one[name] for one in parts])
        for name in (parts[0] if parts else ())
    }


def outcome(call, one):
    """Returns the result of a call, or its error."""
    try:
        return call(one)
    except (
        ValueError,
        RuntimeError,
        tf.errors.FailedPreconditionError,
    ) as error:
        return f"error: {type(error).__name__} {error}"


def slots_of(one, name):
    """Returns the slot variables of a table."""
    return next(
        by_name
        for config, by_name in one.slot_variables.items()
        if config.name == name
    )


class Pair:
    """Two equal embeddings and the keys that they evict.

    The element 0 of all lists belongs to the servers.
    """

    def __init__(self, setup, num_servers, num_shards):
        self.setup = setup
        self.capacities = {}
        self.num_servers, self.num_shards = num_servers, num_shards
        self.batches = Batches(setup)
        self.reports = [[], []]
        self.both = self.create()
        self.writers = None
        self.steps = None
        self.folder = tempfile.TemporaryDirectory()
        self.num_folders = 0

    def path(self, name):
        self.num_folders += 1
        return f"{self.folder.name}/{self.num_folders}_{name}"

    def create(self):
        with local.servers(self.num_servers):
            servers = self.setup.create(self.reports[0].append, self.num_shards)
        found = [
            servers,
            self.setup.create(self.reports[1].append, self.num_shards),
        ]
        for owner, capacity in self.capacities.items():
            for one in found:
                one.vocabularies[owner].resize(capacity)
        return found

    def each(self, call):
        """Makes a call of both embeddings, and compares the results."""
        found, expected = (outcome(call, one) for one in self.both)
        assert_same(found, expected)
        return found

    def run(self, kind, seed):
        getattr(self, f"do_{kind}")(seed)
        self.check()

    def check(self):
        found, expected = (contents(one) for one in self.both)
        assert found.keys() == expected.keys()
        assert [k for k in found if found[k] != expected[k]] == []
        for name in self.open_tables():
            self.each(lambda one: one.vocabularies[name].stats())

    def check_reports(self):
        names = self.open_tables()
        if names:
            self.both[0].vocabularies[names[0]].report_evicted()
        found, expected = map(by_table, self.reports)
        assert_same(found, expected)

    def open_tables(self):
        return [name for name in self.setup.names if name in OWNERS]

    def _train(self, one, seed, packed=False):
        inputs, weights = self.batches.read(seed)
        if packed:
            one.enqueue(*tlm.pack(inputs, weights))
        else:
            one.enqueue(inputs, weights)
        found = one.dequeue()
        one.apply_gradients(gradients(found))
        return found

    def do_train(self, seed):
        self.each(lambda one: self._train(one, seed))

    def do_packed(self, seed):
        self.each(lambda one: self._train(one, seed, packed=True))

    def do_traced(self, seed):
        inputs, weights = self.batches.read(seed)

        def call(one):
            @tf.function
            def step():
                one.enqueue(inputs, weights)
                found = one.dequeue()
                one.apply_gradients(gradients(found))
                one.enqueue(inputs, weights)
                other = one.dequeue()
                one.apply_gradients(gradients(other))
                return found, other

            return step()

        self.each(call)

    def do_forward(self, seed):
        inputs, weights = self.batches.read(seed)

        def call(one):
            one.enqueue(inputs, weights, training=False)
            return one.dequeue(), one(inputs, weights)

        self.each(call)

    def do_abandon(self, seed):
        inputs, weights = self.batches.read(seed)

        def call(one):
            one.enqueue(inputs, weights)
            found = one.dequeue()
            one.reset()
            return found

        self.each(call)

    def do_calls(self, seed):
        """A step with several lookups, as in a layer."""
        batches = [self.batches.read(seed + number) for number in range(3)]
        rng = np.random.default_rng(seed)
        used = np.flatnonzero([*rng.integers(0, 3, 2), 1])

        def call(one):
            backend = one._state.backend
            found, marks = [], []
            lookups = []
            for inputs, weights in batches:
                lookup, activations = backend.open(inputs, weights)
                lookups.append(lookup)
                found.append(activations)
            for number in used.tolist():
                marks.append(
                    backend.follow(
                        lookups[number],
                        [tf.sin(7 * each) + 0.1 for each in found[number]],
                    )
                )
            backend.apply_followed(tf.add_n(marks))
            # The host engine keeps lookups without gradients for some calls.
            one.reset()
            return found

        self.each(call)

    def known(self, name, seed, share=3):
        """Returns some keys of a vocabulary, and some other keys."""
        rng = np.random.default_rng(seed)
        keys = np.sort(self.both[1].vocabularies[name].keys().numpy())
        keys = keys[:: int(rng.integers(1, share + 1))]
        return np.concatenate([keys, np.array([10**14 + seed, -(10**13)])])

    def given(self, keys):
        """Returns stored keys as an argument."""
        return StoredKeys(tf.constant(keys, tf.int64))

    def some_table(self, seed):
        names = self.open_tables()
        return names[seed % len(names)] if names else None

    def do_evict(self, seed):
        name = self.some_table(seed)
        if name:
            keys = self.given(self.known(name, seed))
            self.each(
                lambda one: np.sort(one.vocabularies[name].evict(keys).numpy())
            )

    def do_expire(self, seed):
        name = self.some_table(seed)
        if name:
            self.each(
                lambda one: one.vocabularies[name].evict_expired().numpy()
            )

    def do_report(self, seed):
        del seed
        self.check_reports()

    def do_resize(self, seed):
        name = self.some_table(seed)
        if name and self.writers is None:
            rng = np.random.default_rng(seed)
            capacity = int(rng.choice([1, 9, 30, 100, 700]))
            try:
                self.each(lambda one: one.vocabularies[name].resize(capacity))
            except ValueError as error:
                assert "shards" in str(error), error
                return
            self.capacities[OWNERS[name]] = capacity
            self.check_reports()

    def do_write(self, seed):
        name = self.some_table(seed)
        if not name:
            return
        rng = np.random.default_rng(seed)
        keys = keys_to_write(rng, self.known(name, seed))
        if self.setup.strings and seed % 2:
            argument = tf.constant(self.batches.keys(keys), tf.string)
        else:
            argument = self.given(keys) if self.setup.strings else keys
        vocabulary = self.both[1].vocabularies[name]
        options = {}
        if rng.integers(4):
            options["rows"] = rng.normal(size=[len(keys), DIMS[name]])
        if rng.integers(2):
            options["counts"] = rng.integers(0, 99, len(keys))
        if rng.integers(2):
            options["last_steps"] = rng.integers(
                0, vocabulary.stats()["step"] + 1, len(keys)
            )
        if rng.integers(2):
            options["slots"] = {
                slot: rng.uniform(0, 1, size=[len(keys), DIMS[name]])
                for slot in sorted(slots_of(self.both[1], name))
            }

        def call(one):
            written = one.vocabularies[name].write(argument, **options)
            return (
                written.num_written,
                written.num_new,
                [*np.asarray(written.without_row)],
            )

        self.each(call)

    def do_read(self, seed):
        name = self.some_table(seed)
        self.each(
            lambda one: {
                config.name: table.numpy()
                for config, table in one.embedding_tables.items()
                if config.name not in OWNERS
            }
        )
        if not name:
            return
        keys = self.given(self.known(name, seed))
        for call in (
            lambda one: one.lookup(keys),
            lambda one: one.contains(keys),
            lambda one: one.keys(),
            lambda one: joined(one.blocks(8 + seed % 50)),
        ):
            self.each(lambda one, call=call: call(one.vocabularies[name]))
        self.check_reports()

    def do_export(self, seed):
        """Both import the files of the other, into new embeddings."""
        paths = [self.path("rows") for _ in self.both]
        new = self.create()
        for name in sorted(
            self.open_tables(), key=lambda name: (name + "a") * (seed % 2)
        ):
            for one, path in zip(self.both, paths):
                one.vocabularies[name].export(
                    f"{path}{name}", block_size=8 + seed % 50
                )
            for one, path in zip(new, reversed(paths)):
                tlm.import_rows(f"{path}{name}", one.vocabularies[name])
        self.check_reports()
        self.both, self.writers = new, None

    def do_checkpoint(self, seed):
        """Each restores the checkpoint of the other."""
        paths = [save(one, self.path("saved")) for one in self.both]
        assert tensors(paths[0]) == tensors(paths[1])
        self.check_reports()
        rng = np.random.default_rng(seed)
        self.num_servers = int(rng.integers(1, 4))
        if self.num_shards_may_change():
            self.num_shards = int(rng.integers(1, 5))
        if rng.integers(2):
            self.both, self.writers = self.create(), None
        for one, path in zip(self.both, reversed(paths)):
            tf.train.Checkpoint(embedding=one).restore(path).assert_consumed()

    def num_shards_may_change(self):
        return True

    def do_convert(self, seed):
        """Converts checkpoints to another capacity."""
        names = self.open_tables()
        if not names:
            return
        rng = np.random.default_rng(seed)
        capacity = int(rng.choice([1, 9, 30, 100, 700]))
        new = []

        def vocabulary():
            return tlm.OpenVocabulary(capacity, **POLICIES[self.setup.policy])

        for one in self.both:
            path = save(one, self.path("saved"))
            new.append(self.path("new"))
            tlm.convert_vocabularies(
                path,
                new[-1],
                {
                    name: vocabulary() if OWNERS[name] == name else OWNERS[name]
                    for name in names
                },
            )
        assert tensors(new[0]) == tensors(new[1])
        self.check_reports()
        self.capacities = {OWNERS[name]: capacity for name in names}
        self.num_servers = int(rng.integers(1, 4))
        self.both, self.writers = self.create(), None
        for one, path in zip(self.both, reversed(new)):
            tf.train.Checkpoint(embedding=one).restore(path)

    def do_delta(self, seed):
        """Writes deltas, and compares them with each other."""
        if self.writers is None:
            self.bases = [save(one, self.path("base")) for one in self.both]
            self.folders = [self.path("deltas") for _ in self.both]
            self.writers = [
                tlm.DeltaWriter(one, folder, base=base)
                for one, folder, base in zip(
                    self.both, self.folders, self.bases
                )
            ]
            self.check_reports()
            return
        if seed % 5 == 0:
            self.writers = [
                tlm.DeltaWriter(one, folder, base=base)
                for one, folder, base in zip(
                    self.both, self.folders, self.bases
                )
            ]
        deltas = [one.write(compare=seed % 7 == 0) for one in self.writers]
        assert deltas[0].meta.tables == deltas[1].meta.tables
        assert tensors(deltas[0].tensors) == tensors(deltas[1].tensors)
        # Without lazy updates, a step also changes rows that belong to no key.
        # Deltas do not contain such rows.
        is_lazy = all(
            self.setup.optimizers[name] != "adam_lazy_off"
            for name in self.open_tables()
        )
        if seed % 2 and is_lazy:
            full = tlm.apply_deltas(
                self.bases[0], self.folders[0], self.path("full")
            )
            assert tensors(full) == tensors(
                save(self.both[0], self.path("end"))
            )


def assert_same(found, expected, where=""):
    """Checks that two nested structures of values are bitwise equal."""
    assert isinstance(found, str) == isinstance(expected, str), (
        where,
        found,
        expected,
    )
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, f"{where}/{number}")
    elif hasattr(expected, "shape"):
        one, other = np.asarray(found), np.asarray(expected)
        np.testing.assert_array_equal(one, other, where)
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    else:
        assert found == expected, where
