"""Programs with ops, variables, lookups and checkpoints on one device."""

import os
import tempfile

import numpy as np
import tensorflow as tf

from tests.stock.outcome import attempts, program

raw = tf.raw_ops
X = tf.reshape(tf.range(24, dtype=tf.float32), [2, 3, 4]) / 8

CALLS = {
    "concat": lambda x: tf.concat([x, x], 1),
    "concat of one": lambda x: tf.concat([x], 0),
    "concat, no such axis": lambda x: tf.concat([x, x], 5),
    "concat, other shapes": lambda x: tf.concat([x, x[:, :1]], 0),
    "raw concat": lambda x: raw.ConcatV2(values=[x, x], axis=2),
    "raw concat by position": lambda x: raw.ConcatV2([x, x], 2),
    "slice": lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 3]),
    "slice, too long": lambda x: tf.slice(x, [0, 1, 0], [2, 9, 3]),
    "slice, wrong rank": lambda x: tf.slice(x, [0], [1]),
    "raw slice, missing": lambda x: raw.Slice(input=x, begin=[0, 0, 0]),
    "parts": lambda x: x[..., 1:3, None][0, ::2],
    "backwards": lambda x: x[::-1, :, ::-2],
    "no such part": lambda x: x[5],
    "by a string": lambda x: x["a"],
    "step of zero": lambda x: x[::0],
    "update": lambda x: tf.tensor_scatter_nd_update(x, [[0]], x[:1] * 2),
    "strided update": lambda x: raw.TensorStridedSliceUpdate(
        input=x, begin=[0], end=[1], strides=[1], value=x[:1] + 1
    ),
    "strided gradient": lambda x: raw.StridedSliceGrad(
        shape=[4], begin=[1], end=[3], strides=[1], dy=[1.0, 2.0]
    ),
    "einsum": lambda x: tf.einsum("abc,dbc->ad", x, x),
    "einsum with dots": lambda x: tf.einsum("...c,dc->...d", x, x[0]),
    "einsum, wrong": lambda x: tf.einsum("ab,bc->ac", x, x),
    "bias": lambda x: tf.nn.bias_add(x, x[0, 0]),
    "bias first": lambda x: tf.nn.bias_add(
        x[..., None], x[0, :, 0], data_format="NCHW"
    ),
    "bias, wrong": lambda x: tf.nn.bias_add(x, x[0, :, 0]),
    "bias, wrong format": lambda x: tf.nn.bias_add(
        x, x[0, 0], data_format="XY"
    ),
    "raw bias": lambda x: raw.BiasAdd(value=x, bias=x[0, 0]),
    "classes": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 3], x[:, 0]
    ),
    "no such class": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 9], x[:, 0]
    ),
    "scatter": lambda x: tf.scatter_nd([[1], [0]], x, [4, 3, 4]),
    "scatter, outside": lambda x: tf.scatter_nd([[9], [0]], x, [4, 3, 4]),
    "scatter, old": lambda x: tf.compat.v1.scatter_nd([[1]], x[:1], [3, 3, 4]),
    "reverse": lambda x: tf.reverse(x, [0, 2]),
    "reverse, no such axis": lambda x: tf.reverse(x, [7]),
    "reverse, text": lambda x: tf.reverse(["a", "b"], [0]),
    "reverse by position": lambda x: tf.reverse(x, [1], "named"),
    "where": lambda x: tf.where(x > 1),
    "choice": lambda x: tf.where(x > 1, x, 0.0),
    "gather": lambda x: tf.gather(x, [2, 0], axis=1),
    "gather by batch": lambda x: tf.gather(x, [[0], [2]], batch_dims=1),
    "gather, outside": lambda x: tf.gather(x, [9]),
    "gather nd": lambda x: tf.gather_nd(x, [[0, 1], [1, 2]]),
    "mask": lambda x: tf.boolean_mask(x, [True, False]),
    "top": lambda x: tf.math.top_k(x, 2),
    "sort": lambda x: tf.sort(x, direction="DESCENDING"),
    "tile": lambda x: tf.tile(x, [1, 2, 1]),
    "pad": lambda x: tf.pad(x, [[0, 1], [1, 0], [0, 0]]),
    "convolution": lambda x: tf.nn.conv1d(x, x[:, :, :2], 1, "SAME"),
    "resize": lambda x: tf.image.resize(x[..., None], [4, 4]),
    "ragged": lambda x: tf.RaggedTensor.from_tensor(x)[:, 1:],
    "moments": lambda x: tf.nn.moments(x, [0]),
    "product": lambda x: tf.reduce_prod(x + 1, axis=1),
    "dtype": lambda x: x + tf.constant(1),
    "shape": lambda x: x + tf.ones([5]),
}


def differentiated(call):
    with tf.GradientTape() as tape:
        tape.watch(X)
        values = tf.nest.flatten(call(X))
    return [
        *values,
        tape.gradient([one for one in values if one.dtype.is_floating], X),
    ]


# These programs run eagerly, because in a function the error comes from either
# the operation or its gradient, depending on which runs first.
EAGERLY = ("scatter, outside", "gather, outside", "no such class")


@program
def operations():
    return {
        name: attempts(
            eager=lambda call=call: differentiated(call),
            traced=lambda call=call, name=name: (
                None
                if name in EAGERLY
                else (
                    tf.function(lambda: differentiated(call), autograph=False)()
                )
            ),
        )
        for name, call in CALLS.items()
    }


DRAWS = {
    "normal": lambda: tf.random.normal([3]),
    "normal, seeded": lambda: tf.random.normal([3], seed=3),
    "truncated": lambda: tf.random.truncated_normal([3]),
    "uniform": lambda: tf.random.uniform([3]),
    "integers": lambda: tf.random.uniform([3], 0, 9, tf.int32),
    "integers, no end": lambda: tf.random.uniform([3], dtype=tf.int32),
    "gamma": lambda: tf.random.gamma([3], 2.0),
    "poisson": lambda: tf.random.poisson([3], 2.0),
    "categories": lambda: tf.random.categorical([[0.1, 0.9]], 4),
    "shuffled": lambda: tf.random.shuffle(tf.range(5)),
    "stateless": lambda: tf.random.stateless_normal([3], [1, 2]),
    "stateless integers": lambda: tf.random.stateless_uniform(
        [3], [1, 2], 0, 9, tf.int32
    ),
    "generator": lambda: tf.random.Generator.from_seed(1).normal([3]),
    "dropout": lambda: tf.nn.dropout(tf.ones([8]), 0.5),
    "raw": lambda: raw.RandomStandardNormal(
        shape=[3], dtype=tf.float32, seed=1, seed2=2
    ),
    "raw uniform": lambda: raw.RandomUniform(
        shape=[3], dtype=tf.float32, seed=1, seed2=2
    ),
    "raw, wrong": lambda: raw.RandomStandardNormal(shape=[3], dtype=tf.int32),
    "no shape": lambda: tf.random.normal("a"),
    "initializer": lambda: tf.keras.initializers.GlorotUniform(3)([2, 2]),
}


@program
def random_numbers():
    return {
        name: attempts(
            first=draw, second=draw, traced=tf.function(draw, autograph=False)
        )
        for name, draw in DRAWS.items()
    }


@program
def variables():
    variable = tf.Variable(X, name="mine")
    scope = tf.GradientTape()

    def scattered():
        variable.scatter_add(tf.IndexedSlices(tf.ones([1, 3, 4]), [1]))
        variable.scatter_nd_update([[0]], tf.zeros([1, 3, 4]))
        return variable

    def differentiated():
        with scope as tape:
            y = tf.reduce_sum(tf.gather(variable, [1, 1]) ** 2)
        return tape.gradient(y, variable)

    def raw_add():
        raw.AssignAddVariableOp(
            resource=variable.handle, value=tf.ones([2, 3, 4])
        )
        raw.AssignSubVariableOp(resource=variable.handle, value=X)
        return variable

    @tf.function
    def traced():
        variable.assign_add(X)
        return variable.assign_sub(X / 2, read_value=True)

    return attempts(
        assign=lambda: variable.assign(X * 2),
        add=lambda: variable.assign_add(X, use_locking=True),
        sub=lambda: variable.assign_sub(X, name="s", read_value=False),
        scattered=scattered,
        gradient=differentiated,
        raw=raw_add,
        traced=traced,
        shape=lambda: variable.assign(tf.ones([3])),
        dtype=lambda: variable.assign(tf.constant([[["a"]]])),
        slices=lambda: variable[0, 1].assign(tf.zeros([4])),
        twice=lambda: variable.assign(X, X, X, X, X),
        shown=lambda: repr(variable)[:60],
        handle=lambda: variable.handle.shape,
        copied=lambda: tf.Variable(variable, trainable=False).trainable,
        synchronized=lambda: str(variable.synchronization),
    )


@program
def lookups():
    table = tf.Variable(tf.reshape(tf.range(24, dtype=tf.float32), [8, 3]))
    parts = [tf.Variable(table[::2]), tf.Variable(table[1::2])]
    ids = tf.sparse.from_dense([[1, 2], [3, 0]])

    def gradient():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 1, 5]) ** 2)
        return tape.gradient(y, table)

    return attempts(
        one=lambda: tf.nn.embedding_lookup(table, [[1, 7], [0, 0]]),
        parts=lambda: tf.nn.embedding_lookup(parts, [0, 1, 7]),
        divided=lambda: tf.compat.v1.nn.embedding_lookup(
            parts, [0, 1, 7], partition_strategy="div"
        ),
        outside=lambda: tf.nn.embedding_lookup(table, [8]),
        floats=lambda: tf.nn.embedding_lookup(table, [1.5]),
        empty=lambda: tf.nn.embedding_lookup([], [1]),
        text=lambda: tf.nn.embedding_lookup(table, ["a"]),
        norm=lambda: tf.nn.embedding_lookup(table, [3], max_norm=1.0),
        ragged=lambda: tf.nn.embedding_lookup(
            table, tf.ragged.constant([[1], [2, 3]])
        ),
        sparse=lambda: tf.nn.embedding_lookup_sparse(
            table, ids, None, combiner="sqrtn"
        ),
        weighted=lambda: tf.nn.embedding_lookup_sparse(
            table, ids, tf.sparse.map_values(tf.cast, ids, tf.float32)
        ),
        combiner=lambda: tf.nn.embedding_lookup_sparse(
            table, ids, None, combiner="most"
        ),
        safe=lambda: tf.nn.safe_embedding_lookup_sparse(table, ids),
        gradient=gradient,
        traced=lambda: tf.function(
            lambda: tf.nn.embedding_lookup(table, [2, 5])
        )(),
    )


@program
def checkpoints():
    def saved(**options):
        first = tf.train.Checkpoint(
            a=tf.Variable(X), b=[tf.Variable(1), tf.Variable("text")]
        )
        with tempfile.TemporaryDirectory() as folder:
            path = first.save(
                os.path.join(folder, "ck"),
                options=tf.train.CheckpointOptions(**options),
            )
            first.sync()
            second = tf.train.Checkpoint(
                a=tf.Variable(X * 0), b=[tf.Variable(0), tf.Variable("")]
            )
            second.restore(path).assert_consumed()
            return [
                second.a,
                *second.b,
                tf.train.list_variables(path),
                sorted(os.listdir(folder)),
            ]

    def other_shape():
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(a=tf.Variable(X)).write(folder + "/ck")
            return tf.train.Checkpoint(a=tf.Variable([1.0])).restore(path)

    def managed():
        with tempfile.TemporaryDirectory() as folder:
            manager = tf.train.CheckpointManager(
                tf.train.Checkpoint(a=tf.Variable(1.0)), folder, max_to_keep=2
            )
            for _ in range(3):
                manager.save()
            return [os.path.basename(path) for path in manager.checkpoints]

    return attempts(
        plain=saved,
        host=lambda: saved(experimental_io_device="CPU:0"),
        later=lambda: saved(experimental_enable_async_checkpoint=True),
        shape=other_shape,
        managed=managed,
        no_file=lambda: tf.train.Checkpoint().restore("/no/such/ck"),
    )


@program
def numpy_and_types():
    return attempts(
        array=lambda: np.asarray(X),
        added=lambda: np.ones([4]) + X,
        number=lambda: float(X[0, 0, 1]),
        several=lambda: float(X),
        truth=lambda: bool(X),
        text=lambda: str(X[0, 0]),
        symbolic=lambda: tf.function(lambda x: x.numpy())(X),
        iterated=lambda: [one for one in X[0, 0]],
        equal=lambda: X[0, 0] == X[0, 1],
        hashed=lambda: hash(X),
        named=lambda: tf.identity(X, name="n"),
    )
