"""Programs that use DTensor, on a mesh that `tf_layoutmap` did not create."""

import os
import tempfile

import numpy as np
import tensorflow as tf
import tf_keras

from tests.stock.outcome import attempts, program

dtensor = tf.experimental.dtensor
U = dtensor.UNSHARDED


def mesh():
    return dtensor.create_mesh(
        [("x", 2), ("y", 2)], devices=[f"CPU:{i}" for i in range(4)]
    )


def layout(*axes):
    return dtensor.Layout(list(axes), mesh())


def numbers(*shape):
    return tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape) / 8


def put(value, *axes):
    value = tf.convert_to_tensor(value)
    replicated = dtensor.copy_to_mesh(
        value, dtensor.Layout.replicated(mesh(), value.shape.rank)
    )
    return dtensor.relayout(replicated, layout(*axes))


@program
def call_with_layout():
    both = layout("x", "y")
    return attempts(
        normal=lambda: dtensor.call_with_layout(
            lambda: tf.random.normal([8, 8], seed=3), both
        ),
        uniform=lambda: dtensor.call_with_layout(
            lambda: tf.random.uniform([8, 8], seed=3), both
        ),
        raw=lambda: dtensor.call_with_layout(
            tf.raw_ops.StatelessRandomNormalV2,
            both,
            shape=[8, 8],
            key=tf.constant([1], tf.uint64),
            counter=tf.zeros([2], tf.uint64),
            alg=1,
        ),
        ones=lambda: dtensor.call_with_layout(tf.ones, both, [4, 4]),
        sums=lambda: dtensor.call_with_layout(
            lambda: tf.ones([4, 4]) + 1.0, both
        ),
        host=lambda: dtensor.call_with_layout(
            lambda: numbers(4, 4) * 2.0, both
        ),
        copied=lambda: dtensor.call_with_layout(
            lambda: dtensor.copy_to_mesh(tf.ones([4, 4]), layout(U, U)),
            layout(U, U),
        ),
    )


@program
def drawn_on_a_mesh():
    with dtensor.default_mesh(mesh()):
        return attempts(
            normal=lambda: tf.random.normal([4], seed=3),
            truncated=lambda: tf.random.truncated_normal([4], seed=3),
            uniform=lambda: tf.random.uniform([4], seed=3),
            stateless=lambda: tf.random.stateless_uniform([4], [1, 2]),
            raw=lambda: tf.raw_ops.RandomStandardNormal(
                shape=[4], dtype=tf.float32, seed=1, seed2=2
            ),
        )


@program
def copies():
    x = put(numbers(4, 4), "x", U)
    return [
        x,
        dtensor.pack(dtensor.unpack(x), layout("x", U)),
        dtensor.relayout(x, layout("x", "y")),
        dtensor.relayout(x, layout(U, U)),
        dtensor.fetch_layout(x).mesh.shape(),
    ]


@program
def values():
    """Returns values of sharded and replicated tensors and variables."""
    sharded, full = put(numbers(4, 4), "x", U), put(numbers(4, 4), U, U)
    found = {}
    for name, x in (
        ("sharded", sharded),
        ("replicated", full),
        ("sharded variable", dtensor.DVariable(sharded)),
        ("replicated variable", dtensor.DVariable(full)),
    ):
        found[name] = attempts(
            read=lambda x=x: x.numpy(),
            array=lambda x=x: np.asarray(x),
            copied=lambda x=x: np.array(x, np.float64),
            constant=lambda x=x: tf.function(lambda: tf.constant(x))(),
            number=lambda x=x: float(x[0, 0]),
            truth=lambda x=x: bool(x[0, 0]),
        )
    return found


@program
def arithmetic():
    x, y = put(numbers(4, 4), "x", U), put(numbers(4, 4), U, "y")

    @tf.function
    def traced(x, y):
        return tf.matmul(x, y) + tf.reduce_sum(x)

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = tf.reduce_sum(tf.matmul(x, y) ** 2)
        return tape.gradient(z, x)

    return attempts(
        eager=lambda: tf.matmul(x, y),
        traced=lambda: traced(x, y),
        number=lambda: x * 2,
        host=lambda: x * numbers(4, 4),
        gradient=gradient,
    )


OPERATIONS = {
    "concat": lambda x: tf.concat([x, x], 0),
    "slice": lambda x: tf.slice(x, [0, 0], [2, 4]),
    "part": lambda x: x[1:3],
    "einsum": lambda x: tf.einsum("ab,bc->ac", x, x),
    "reverse": lambda x: tf.reverse(x, [0]),
    "where": lambda x: tf.where(x > 0),
    "split": lambda x: tf.split(x, 2, axis=0),
    "gather": lambda x: tf.gather(x, [0, 1], axis=1),
    "scatter": lambda x: tf.scatter_nd([[0], [1]], x[:2], [4, 4]),
    "classes": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 1, 2, 3], x
    ),
    "top": lambda x: tf.math.top_k(x, 2),
    "cumsum": tf.cumsum,
    "softmax": tf.nn.softmax,
    "loop": lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, x * 2), (0, x)
    ),
    "host tensor": lambda x: x + numbers(4, 4),
}
# DTensor has no rules for these operations. `enable_missing_ops` adds the rules
# for the whole process.
ADDED = ("reverse", "where", "top")


@program
def operations_eagerly():
    return {
        f"{name} {axes}": attempts(
            of=lambda call=call, axes=axes: call(put(numbers(4, 4), *axes))
        )
        for name, call in OPERATIONS.items()
        if name not in ADDED
        for axes in ((U, U), ("x", U), (U, "y"))
    }


@program
def operations_in_functions():
    def run(call, axes):
        with dtensor.default_mesh(mesh()):
            return tf.function(call, autograph=False)(put(numbers(4, 4), *axes))

    return {
        f"{name} {axes}": attempts(
            of=lambda call=call, axes=axes: run(call, axes)
        )
        for name, call in OPERATIONS.items()
        if name not in ADDED
        for axes in ((U, U), ("x", U))
    }


@program
def channels_first():
    return {
        f"{axes} {own}": attempts(
            of=lambda axes=axes, own=own: tf.nn.bias_add(
                put(numbers(4, 4, 2, 2), *axes),
                put(numbers(4), own),
                data_format="NCHW",
            )
        )
        for axes in (("x", "y", U, U), ("x", U, U, U), (U, U, U, U))
        for own in (U, "x", "y")
    }


@program
def lookups():
    ids = put([1, 2, 3, 1], U)
    divided = dtensor.DVariable(put(numbers(8, 4), "x", U))
    columns = dtensor.DVariable(put(numbers(8, 4), U, "y"))
    return attempts(
        divided=lambda: tf.nn.embedding_lookup(divided, ids),
        again=lambda: tf.gather(divided, ids),
        columns=lambda: tf.nn.embedding_lookup(columns, ids),
        traced=lambda: tf.function(
            lambda ids: tf.nn.embedding_lookup(columns, ids)
        )(ids),
    )


@program
def variables():
    variable = dtensor.DVariable(put(numbers(4, 4), "x", U), name="mine")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        variable.assign_sub(0.25 * tape.gradient(loss, variable))
        return loss

    def on_the_mesh(step):
        with dtensor.default_mesh(mesh()):
            return step()

    return attempts(
        eager=lambda: on_the_mesh(step),
        after=variable.read_value,
        traced=lambda: on_the_mesh(tf.function(step)),
        later=variable.read_value,
        name=lambda: variable.name,
        wrong=lambda: variable.assign(put(numbers(2, 2), U, U)),
    )


@program
def checkpoints():
    def saved(options):
        variable = dtensor.DVariable(put(numbers(4, 4), "x", U))
        with tempfile.TemporaryDirectory() as folder:
            file = tf.train.Checkpoint(v=variable)
            path = file.save(os.path.join(folder, "ck"), options=options)
            shapes = tf.train.list_variables(path)
            variable.assign(put(numbers(4, 4) * 0, "x", U))
            file.restore(path, options=options)
            return [variable.read_value(), shapes]

    def on_its_device():
        return saved(
            tf.train.CheckpointOptions(
                experimental_io_device=dtensor.device_name()
            )
        )

    return attempts(on_its_device=on_its_device)


@program
def datasets():
    dataset = dtensor.DTensorDataset(
        tf.data.Dataset.range(12).batch(2, drop_remainder=True),
        mesh=mesh(),
        layouts=layout("x"),
        global_batch_size=4,
        batch_dim="x",
        dataset_already_batched=True,
    )
    iterator = iter(dataset)
    return [next(iterator), next(iterator)]


@program
def layout_map_of_tf_keras():
    experimental = tf_keras.dtensor.experimental
    layout_map = experimental.LayoutMap(mesh=mesh())
    layout_map["first.kernel"] = layout(U, "y")
    with layout_map.scope():
        inputs = tf_keras.Input((4,))
        hidden = tf_keras.layers.Dense(4, name="first")(inputs)
        model = tf_keras.Model(
            inputs, tf_keras.layers.Dense(2, name="last")(hidden)
        )
    optimizer = experimental.optimizers.SGD(0.1, mesh=mesh())

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
            )
        )
        return loss

    return attempts(
        layouts=lambda: [
            list(weight.layout.sharding_specs) for weight in model.weights
        ],
        step=lambda: step(put(numbers(4, 4), "x", U)),
        after=lambda: [weight.read_value() for weight in model.weights],
    )
