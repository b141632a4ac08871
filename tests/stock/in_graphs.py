"""Programs that create, copy, save and load graphs and custom gradients."""

import gc
import inspect
import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import (
    convert_variables_to_constants_v2,
)

from tests.stock.outcome import attempts, exhaustive_program, program

SPEC = tf.TensorSpec([2], name="x")
X = tf.constant([1.0, 3.0])


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda dy: -dy


@tf.custom_gradient
def scaled_gradient(x):
    mean = tf.reduce_mean(x)
    return x * 2, lambda dy: dy * mean


def gradient_of(function, x=X):
    # The original graph is freed before its copy is differentiated.
    gc.collect()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nest.flatten(function(x))[0]
    return [y, tape.gradient(y, x)]


@exhaustive_program
def custom_gradients():
    def concrete(f=reversed_gradient):
        return tf.function(f).get_concrete_function(SPEC)

    def pruned(f=reversed_gradient):
        wrapped = tf.compat.v1.wrap_function(f, [SPEC])
        return wrapped.prune(wrapped.inputs, wrapped.outputs)

    def frozen():
        factor = tf.Variable(2.0)
        return convert_variables_to_constants_v2(
            concrete(lambda x: reversed_gradient(x) * factor)
        )

    def imported(read):
        graph = concrete().graph
        graph_def, output = graph.as_graph_def(), graph.outputs[0].name
        del graph
        gc.collect()
        return tf.compat.v1.wrap_function(
            lambda x: read(graph_def, x, output), [SPEC]
        )

    def from_graph_def(graph_def, x, output):
        return tf.graph_util.import_graph_def(
            graph_def, input_map={"x:0": x}, return_elements=[output]
        )[0]

    def from_meta_graph(graph_def, x, output):
        meta = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
        meta.meta_info_def.tensorflow_version = "2"
        tf.compat.v1.train.import_meta_graph(meta, input_map={"x:0": x})
        return tf.compat.v1.get_default_graph().get_tensor_by_name(output)

    def loaded(keeps):
        module = tf.Module()
        module.call = tf.function(scaled_gradient, input_signature=[SPEC])
        with tempfile.TemporaryDirectory() as folder:
            tf.saved_model.save(
                module,
                folder,
                options=tf.saved_model.SaveOptions(
                    experimental_custom_gradients=keeps
                ),
            )
            del module
            gc.collect()
            return tf.saved_model.load(folder).call

    def in_session():
        graph = tf.Graph()
        with graph.as_default():
            x = tf.constant([1.0, 3.0])
            y = scaled_gradient(x)
            (gradient,) = tf.gradients(y, x)
            with tf.compat.v1.Session() as session:
                return session.run([y, gradient])

    def with_variable():
        factor = tf.Variable(3.0)

        @tf.custom_gradient
        def times(x):
            def gradient(dy, variables=None):
                return dy * 5, [tf.reduce_sum(dy) * 7 for _ in variables]

            return x * factor, gradient

        @tf.function
        def both(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = times(x)
            return tape.gradient(y, [x, factor])

        return both(X)

    return attempts(
        eager=lambda: gradient_of(scaled_gradient),
        traced=lambda: gradient_of(concrete(scaled_gradient)),
        pruned=lambda: gradient_of(pruned()),
        pruned_scaled=lambda: gradient_of(pruned(scaled_gradient)),
        frozen=lambda: gradient_of(frozen()),
        graph_def=lambda: gradient_of(imported(from_graph_def)),
        meta_graph=lambda: gradient_of(imported(from_meta_graph)),
        saved=lambda: gradient_of(loaded(True)),
        saved_without=lambda: gradient_of(loaded(False)),
        again=lambda: gradient_of(tf.recompute_grad(scaled_gradient)),
        session=in_session,
        variable=with_variable,
        keywords=lambda: tf.function(lambda x: reversed_gradient(x=x))(X),
        wrong=lambda: gradient_of(
            tf.function(tf.custom_gradient(lambda x: (x, lambda dy: (dy, dy))))
        ),
    )


@program
def loops():
    def counted(n):
        return tf.while_loop(
            lambda i, x: i < n, lambda i, x: (i + 1, x * 1.5), (0, X)
        )

    @tf.function
    def written(n):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in tf.range(n):
            array = array.write(i, tf.cast(i, tf.float32) * X)
        return array.stack()

    @tf.function
    def branches(x):
        if tf.reduce_sum(x) > 2:
            return tf.scan(lambda a, b: a + b, x)
        return tf.map_fn(lambda a: a * 2, x)

    @tf.function
    def grown(x):
        return tf.gradients(
            tf.while_loop(
                lambda i, _: i < 3, lambda i, x: (i + 1, x * x), (0, x)
            )[1],
            x,
        )

    return attempts(
        eager=lambda: counted(3),
        traced=lambda: tf.function(counted)(4),
        written=lambda: written(tf.constant(3)),
        branches=lambda: branches(X),
        other=lambda: branches(X / 8),
        gradient=lambda: grown(X),
        limit=lambda: tf.while_loop(
            lambda i: True, lambda i: [i + 1], [0], maximum_iterations=5
        ),
        wrong=lambda: tf.function(
            lambda: tf.while_loop(lambda i: i < 2, lambda i: (i, i), [0])
        )(),
        shape=lambda: tf.function(
            lambda: tf.while_loop(
                lambda i, x: i < 2,
                lambda i, x: (i + 1, tf.concat([x, x], 0)),
                (0, X),
            )
        )(),
        no_such_element=lambda: tf.TensorArray(tf.float32, 2).read(5),
    )


@program
def functions():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(reduce_retracing=True)
    def step(x, *, scale=2):
        variable.assign_add(x * scale)
        return variable.read_value(), tf.shape(x)

    @tf.function
    def makes_variables():
        return tf.Variable(1.0)

    return attempts(
        called=lambda: step(X),
        again=lambda: step(X, scale=3),
        number=step.experimental_get_tracing_count,
        wrong=lambda: step(X, X),
        missing=lambda: step(),
        shapes=lambda: step(tf.ones([3])),
        makes=makes_variables,
        name=lambda: step.__name__,
        concrete=lambda: [
            op.type
            for op in step.get_concrete_function(
                tf.TensorSpec([2])
            ).graph.get_operations()
        ],
        jit=lambda: tf.function(lambda x: x * 2, jit_compile=True)(X),
        numpy=lambda: tf.function(
            lambda x: tf.numpy_function(np.negative, [x], tf.float32)
        )(X),
    )


@program
def saved_models():
    module = tf.Module()
    module.table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))
    module.call = tf.function(
        lambda ids: tf.nn.embedding_lookup(module.table, ids),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
        return attempts(
            called=lambda: loaded.call(tf.constant([1, 5], tf.int64)),
            outside=lambda: loaded.call(tf.constant([9], tf.int64)),
            dtype=lambda: loaded.call(X),
            names=lambda: sorted(
                name
                for name, _ in tf.train.list_variables(
                    os.path.join(folder, "variables", "variables")
                )
            ),
            missing=lambda: tf.saved_model.load(folder + "/no/such"),
        )


PUBLIC = (
    tf.concat,
    tf.reverse,
    tf.scatter_nd,
    tf.where,
    tf.gather,
    tf.slice,
    tf.strided_slice,
    tf.while_loop,
    tf.raw_ops.ConcatV2,
    tf.raw_ops.Slice,
    tf.raw_ops.BiasAdd,
    tf.raw_ops.Einsum,
    tf.raw_ops.RandomStandardNormal,
    tf.raw_ops.AssignAddVariableOp,
    tf.nn.bias_add,
    tf.compat.v1.reverse,
    tf.Variable.assign,
    tf.train.Checkpoint.save,
)


@program
def signatures():
    """Returns attributes of functions that editors and libraries read."""
    return [
        [
            one.__name__,
            str(inspect.signature(one)),
            len(inspect.getdoc(one) or ""),
        ]
        for one in PUBLIC
    ]
