"""Runs random programs of reads and writes, and compares them with numpy.

Each step draws arguments from a generator and runs one method of the table. It
then runs the equivalent code on a numpy array, and compares the returned value
and the full table.
"""

import numpy as np
import tensorflow as tf

# Numpy equivalents of the methods. TensorFlow and numpy both round each result
# to the dtype in the order of the ids, so tables are compared with `==`.
REFERENCES = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
    # If ids are equal, the last value is stored, as in numpy.
    "update": lambda table, ids, values: table.__setitem__(ids, values),
}
FACTORS = ("mul", "div")
READS = (
    "gather",
    "lookup",
    "unique",
    "row",
    "index",
    "slice",
    "mask",
    "gather_nd",
)
WRITES = (
    *(f"scatter_{verb}" for verb in REFERENCES),
    *(f"scatter_nd_{verb}" for verb in ("add", "sub", "min", "max", "update")),
    "assign",
    "assign_add",
    "assign_sub",
    "slice_assign",
    "slice_assign_add",
    "ids_assign",
    "column_assign",
    "batch",
)
DTYPES = (
    np.float32,
    np.float64,
    np.float16,
    tf.bfloat16.as_numpy_dtype,
    np.int32,
    np.int64,
    np.int8,
    np.uint8,
    np.complex64,
    np.bool_,
    np.object_,
)


def steps_of(dtype):
    """Returns the steps that `tf.Variable` supports for a dtype.

    Integer division is excluded, because numpy rounds down and TensorFlow
    rounds towards zero. The routing tests cover integer division.
    """
    kind = "f" if dtype == tf.bfloat16.as_numpy_dtype else np.dtype(dtype).kind
    left_out = {
        "f": (),
        "i": ("_div",),
        "u": ("_div",),
        "c": ("_min", "_max"),
        "b": ("_add", "_sub", "_mul", "_div", "_min", "_max"),
    }
    left_out["O"] = left_out["b"]
    return [
        step for step in READS + WRITES if not step.endswith(left_out[kind])
    ]


def values_of(rng, shape, dtype, choices=range(-4, 5)):
    """Returns random values of a dtype."""
    values = rng.choice(np.asarray(choices), shape)
    if dtype == np.object_:  # Strings.
        return np.asarray(
            np.asarray(values).astype(np.bytes_).astype(object), object
        )
    return (
        values.astype(np.int64).astype(dtype)
        if np.dtype(dtype).kind in "iu"
        else values.astype(dtype)
    )


class Program:
    """A table and its numpy reference, on which random steps are run.

    Args:
      table: The table under test.
      seed: Seed of all random draws.
      is_traced: Whether each kind of step is a `tf.function` that is traced
        once with unknown shapes.
    """

    def __init__(self, table, seed, is_traced):
        self.table, self.ref = table, table.numpy()
        self._steps = steps_of(self.ref.dtype)
        self.rng = np.random.default_rng(seed)
        self.is_traced = is_traced
        self._functions = {}

    def run(self, num_steps):
        """Runs random steps and returns the number of steps that ran."""
        for _ in range(num_steps):
            step = self.rng.choice(self._steps)
            if step in READS:
                found, wanted = self._read(step)
                # Numpy returns scalars for single elements and bytes for
                # strings.
                found, wanted = (
                    np.asarray(found.numpy()),
                    np.asarray(wanted, self.ref.dtype),
                )
                np.testing.assert_array_equal(found, wanted, err_msg=step)
                assert found.shape == wanted.shape, step
                continue
            self._write(step)
            np.testing.assert_array_equal(
                self.table.numpy(), self.ref, err_msg=step
            )
            if self.ref.dtype != np.object_:
                self._keep_in_range()
        return num_steps

    def _keep_in_range(self):
        magnitudes = np.abs(self.ref[self.ref != 0])
        if magnitudes.size and not (
            2.0**-6 < magnitudes.min() <= magnitudes.max() < 2.0**7
        ):
            self.ref = self._values(self.ref.shape)
            self.table.assign(self.ref)

    def _call(self, name, function, *args):
        args = [np.asarray(arg) for arg in args]
        # TensorFlow cannot infer the dtype of an empty object array.
        args = [
            tf.constant(
                arg, tf.string if arg.dtype == np.object_ else arg.dtype
            )
            for arg in args
        ]
        if not self.is_traced:
            return function(*args)
        key = name, *((arg.shape.rank, arg.dtype) for arg in args)
        if key not in self._functions:
            self._functions[key] = tf.function(
                function,
                input_signature=[
                    tf.TensorSpec([None] * arg.shape.rank, arg.dtype)
                    for arg in args
                ],
            )
        return self._functions[key](*args)

    def _ids(self, unique=False):
        num_rows = len(self.ref)
        num_ids = int(self.rng.integers(0, 9))
        ids = (
            self.rng.permutation(num_rows)[:num_ids]
            if unique
            else self.rng.integers(0, num_rows, num_ids)
        )
        return ids.astype(self.rng.choice([np.int32, np.int64]))

    def _values(self, shape, verb="add"):
        dtype = self.ref.dtype
        if verb not in FACTORS:
            return values_of(self.rng, shape, dtype)
        return values_of(
            self.rng,
            shape,
            dtype,
            [1, 2, 3, -1] if np.dtype(dtype).kind in "iu" else [0.5, 1, 2, -1],
        )

    def _bounds(self):
        return self.rng.integers(-len(self.ref) - 2, len(self.ref) + 3, 2)

    def _tuples(self, depth):
        shape = self.ref.shape[:depth]
        num = int(self.rng.integers(0, 7))
        return np.stack(
            [self.rng.integers(0, size, num) for size in shape], axis=1
        )

    def _read(self, step):
        table, ref = self.table, self.ref
        ids = self._ids()
        if step == "slice":
            start, stop = self._bounds()
            stride = int(self.rng.choice([-3, -2, -1, 1, 2, 3]))
            if self.is_traced:
                return self._call(
                    step, lambda a, b, c: table[a:b:c], start, stop, stride
                ), ref[start:stop:stride]
            return table[start:stop:stride], ref[start:stop:stride]
        if step == "row":
            row = self.rng.integers(-len(ref), len(ref))
            found = (
                self._call(step, lambda i: table[i], row)
                if self.is_traced
                else table[int(row)]
            )
            return found, ref[row]
        if step == "mask":
            mask = self.rng.random(len(ref)) < 0.4
            return self._call(step, lambda m: table[m], mask), ref[mask]
        if step == "index":
            ids = ids - self.rng.integers(0, 2) * np.asarray(
                len(ref), ids.dtype
            )
            return self._call(step, lambda i: table[i], ids), ref[ids]
        if step == "gather_nd":
            depth = int(self.rng.integers(1, ref.ndim + 1))
            tuples = self._tuples(depth)
            return self._call(
                f"{step}{depth}",
                lambda i: table.gather_nd(tf.ensure_shape(i, [None, depth])),
                tuples,
            ), ref[tuple(tuples.T)]
        if len(ids) % 2 == 0:
            ids = ids.reshape(2, -1)
        read = {
            "gather": lambda i: tf.gather(table, i),
            "lookup": lambda i: tf.nn.embedding_lookup(table, i),
            "unique": lambda i: table.gather_rows(i, unique=True),
        }[step]
        return self._call(step, read, ids), ref[ids]

    def _write(self, step):
        table, ref = self.table, self.ref
        if step.startswith("assign"):
            value = self._values(ref.shape)
            self._call(step, lambda v: getattr(table, step)(v) is None, value)
            self.ref = (
                value
                if step == "assign"
                else ref + value
                if step == "assign_add"
                else ref - value
            )
        elif step.startswith("scatter_nd"):
            verb = step.rpartition("_")[2]
            depth = int(self.rng.integers(1, ref.ndim + 1))
            tuples = self._tuples(depth)
            values = self._values((len(tuples), *ref.shape[depth:]))
            self._call(
                f"{step}{depth}",
                lambda i, v: (
                    getattr(table, step)(tf.ensure_shape(i, [None, depth]), v)
                    is None
                ),
                tuples,
                values,
            )
            REFERENCES[verb](ref, tuple(tuples.T), values)
        elif step.startswith("scatter"):
            verb = step.rpartition("_")[2]
            ids = self._ids()
            shape = ids.shape + ref.shape[1:] if self.rng.random() < 0.8 else ()
            values = self._values(shape, verb)
            self._call(
                step,
                lambda i, v: (
                    getattr(table, step)(tf.IndexedSlices(v, i)) is None
                ),
                ids,
                values,
            )
            REFERENCES[verb](ref, ids, values)
        elif step.startswith("slice_assign"):
            start, stop = self._bounds()
            values = self._values(ref[start:stop].shape)
            method = "assign_add" if step.endswith("add") else "assign"
            self._call(
                step,
                lambda a, b, v: getattr(table[a:b], method)(v) is None,
                start,
                stop,
                values,
            )
            if method == "assign":
                ref[start:stop] = values
            else:
                ref[start:stop] += values
        elif step == "ids_assign":
            ids = self._ids()
            values = self._values(ids.shape + ref.shape[1:])
            self._call(
                step, lambda i, v: table[i].assign(v) is None, ids, values
            )
            ref[ids] = values
        elif step == "column_assign":
            start, stop = self._bounds()
            if ref.ndim == 1:
                return
            column = int(self.rng.integers(0, ref.shape[1]))
            value = self._values(())
            self._call(
                f"{step}{column}",
                lambda a, b, v: table[a:b, column].assign(v) is None,
                start,
                stop,
                value,
            )
            ref[start:stop, column] = value
        else:
            ids = self._ids()
            values = self._values(ids.shape + ref.shape[1:])
            self._call(
                step,
                lambda i, v: (
                    table.batch_scatter_update(tf.IndexedSlices(v, i)) is None
                ),
                ids,
                values,
            )
            ref[ids] = values
