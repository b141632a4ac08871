"""Random tables, inputs and gradients of the random programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.partition import FixedShardsPartitioner

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
    "row": {"evict": "lfu", "oov_embedding": "trainable"},
    "count_row": {
        "admission": "count",
        "min_count": 2,
        "evict": "none",
        "oov_embedding": "trainable",
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
            return tlm.vocabulary.OpenVocabulary(
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
                tf.constant(rng.integers(2, 9, sizes.sum()) / 4, tf.float32)
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
    """Returns all rows of a table, a slot variable, or another variable."""
    return np.asarray(variable.numpy())


def variables(one):
    """Returns all variables of an embedding, except for rows without a key."""
    values = {
        (table, name): full_value(variable)
        for table, by_name in one._variables.items()
        for name, variable in by_name.items()
    }
    found = {}
    for (table, name), value in values.items():
        owner = OWNERS.get(table)
        if owner is not None:
            keys = values[owner, "vocabulary_keys"]
            has_key = np.append(keys.ravel() != EMPTY, True)
            if value.ndim == 2 and len(value) == len(has_key):
                value = value[has_key]
        found[f"{table}/{name}"] = value
    return found


def assert_same(found, expected, where=""):
    """Checks that two nested structures of values are bitwise equal."""
    one, other = dict(flat(found)), dict(flat(expected))
    assert one.keys() == other.keys(), where
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, f"{where} {name}")
        assert bits(one[name]) == bits(value), f"{where} {name}"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays in a nested structure, as npz files can store them."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from flat(one, f"{name}/{number}")
        yield f"{name}/size", np.asarray(len(value))
    else:
        array = np.asarray(str(value) if value is None else value)
        if array.dtype == object:
            array = array.astype(bytes)
        # NumPy does not store bfloat16.
        is_stored = array.dtype.kind in "biufSU"
        yield name, array if is_stored else array.view(np.uint16)


def bits(array: Any) -> tuple[Any, ...]:
    """Returns what two bitwise equal arrays have in common."""
    return array.dtype, array.shape, array.tobytes()
