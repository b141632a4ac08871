"""Tables and batches of the random programs of sharded tables."""

import numpy as np
import tensorflow as tf

from tests.contract import setups
from tf_layoutmap.embedding import tables


class Batches:
    """Random inputs and gradients of a setup."""

    def __init__(self, setup):
        self.setup = setup

    def ids(self, rng, table, size):
        if table in setups.OWNERS:
            most = int(rng.choice([20, 400, 2**40]))
            return self.keys(
                rng.zipf(1.3, size).astype(np.int64) % most * 1_003 - 5
            )
        if self.setup.out_of_range == "error":
            return rng.integers(0, setups.SIZES[table], size)
        return rng.integers(-3, setups.SIZES[table] + 3, size)

    def tensor(self, table, ids):
        is_string = self.setup.strings and table in setups.OWNERS
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


def full_value(variable):
    shards = [np.asarray(one.numpy()) for one in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


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


def slots_of(one, name):
    """Returns the slot variables of a table."""
    return next(
        by_name
        for config, by_name in one.slot_variables.items()
        if config.name == name
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
