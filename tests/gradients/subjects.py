"""Small models with each kind of table, and the same model of stock Keras.

The model looks up one row per sample and multiplies it by a kernel. All models
have the same initial values, and train with SGD.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tests.strategies import mirrored
from tf_layoutmap.sharded.routing import parts

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM, RATE = 8, 2, 0.125
BATCH_SIZE, CAPACITY = 4, 32
KERNEL = np.array([[1.0], [-2.0]], np.float32)
# Ids repeat, and each step looks up rows of several shards.
BATCHES = [
    (tf.constant(ids, tf.int64), tf.constant(labels, tf.float32))
    for ids, labels in [
        ([1, 7, 1, 3], [1, 2, 3, 4]),
        ([7, 0, 3, 3], [2, -1, 0, 1]),
        ([3, 5, 1, 7], [0, 1, -2, 3]),
    ]
]
LAYERS = {keras: tlm.layers, tf_keras: tlm.layers.tf_keras}


class Program:
    """A model, its optimizer and the strategy in which it runs."""

    strategy: tf.distribute.Strategy = tf.distribute.get_strategy()

    def forward(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the predictions for ids, `[batch, 1]`."""
        raise NotImplementedError

    def weights(self) -> list[Any]:
        """Returns the weights whose gradients `apply` receives."""
        raise NotImplementedError

    def kernel(self) -> Any:
        """Returns the kernel."""
        raise NotImplementedError

    def apply(self, gradients: Any) -> None:
        """Applies the gradients of one step."""
        raise NotImplementedError

    def values(self) -> dict[str, np.ndarray]:
        """Returns the rows of all ids, and the kernel."""
        raise NotImplementedError

    def fit(self, first: str) -> list[float]:
        """Trains the model with Keras' loop."""
        raise NotImplementedError

    def place(self, *batch: tf.Tensor) -> tuple[Any, ...]:
        """Returns a batch as arguments of `run`."""
        return batch

    def run(self, call: Callable, *batch: tf.Tensor) -> Any:
        """Calls a function in each replica; returns the sum of the results."""
        return call(*batch)


class Table(Program):
    """A `ShardedVariable` or a `tf.Variable`, trained by a loop."""

    def __init__(self, table: Any):
        self._table = table
        self._kernel = tf.Variable(KERNEL)

    def forward(self, ids):
        return tf.nn.embedding_lookup(self._table, ids) @ self._kernel

    def weights(self):
        return [self._table, self._kernel]

    def kernel(self):
        return self._kernel

    def apply(self, gradients):
        for weight, gradient in zip(self.weights(), gradients):
            if isinstance(gradient, tf.IndexedSlices):
                weight.scatter_sub(
                    tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                )
            else:
                weight.assign_sub(RATE * gradient)

    def values(self):
        return {"rows": self._table.numpy(), "kernel": self._kernel.numpy()}


class Model(Program):
    """A Keras model with a layer that looks up rows."""

    def __init__(
        self,
        version: Any,
        make_layer: Callable[[], Any],
        rows: Callable[[Any], Any] = lambda layer: layer.embeddings,
        *,
        training: bool | None = None,
        num_replicas: int = 1,
    ):
        self.strategy = mirrored(num_replicas)
        self._version, self._rows, self._training = version, rows, training
        with self.strategy.scope():
            self._layer = make_layer()
            self._dense = version.layers.Dense(
                1,
                use_bias=False,
                kernel_initializer=version.initializers.Constant(KERNEL),
            )
            self._model = self._build(self._layer)
            self._optimizer = version.optimizers.SGD(RATE)
            if version is keras:
                self._optimizer.build(self._model.trainable_variables)
            else:
                with contextlib.suppress(AttributeError):
                    self._optimizer.build(self._model.trainable_variables)

    def _build(self, look_up: Callable) -> Any:
        inputs = self._version.Input([], dtype="int64")
        return self._version.Model(inputs, self._dense(look_up(inputs)))

    def forward(self, ids):
        return self._model(ids, training=self._training)

    def weights(self):
        return self._model.trainable_variables

    def kernel(self):
        return self._dense.kernel

    def apply(self, gradients):
        self._optimizer.apply_gradients(zip(gradients, self.weights()))

    def values(self):
        return {
            "rows": np.asarray(self._rows(self._layer)),
            "kernel": self._dense.kernel.numpy(),
        }

    def place(self, *batch):
        if self.strategy.num_replicas_in_sync == 1:
            return batch
        return tuple(
            self.strategy.experimental_distribute_values_from_function(
                lambda context, one=one: tf.split(one, 2)[
                    context.replica_id_in_sync_group
                ]
            )
            for one in batch
        )

    def run(self, call, *batch):
        if self.strategy.num_replicas_in_sync == 1:
            return call(*batch)
        per_replica = self.strategy.run(call, batch)
        return self.strategy.reduce("SUM", per_replica, axis=None)

    def fit(self, first):
        layer = self._layer

        class Outer(self._version.layers.Layer):
            def __init__(self):
                super().__init__()
                self.inner = layer

            @tf.function
            def call(self, ids):
                return self.inner(ids)

        with self.strategy.scope():
            model = self._build(Outer())
            model.compile(self._optimizer, "mse")
        ids = tf.concat([ids for ids, _ in BATCHES], 0)
        labels = tf.concat([labels for _, labels in BATCHES], 0)
        if first == "evaluation":
            model.evaluate(ids, labels, batch_size=BATCH_SIZE, verbose=0)
        losses = []

        class Losses(self._version.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                losses.append(logs["loss"])

        model.fit(
            ids,
            labels,
            batch_size=BATCH_SIZE,
            shuffle=False,
            verbose=0,
            callbacks=[Losses()],
        )
        # Keras reports means over the steps of the epoch.
        totals = [loss * number for number, loss in enumerate(losses, 1)]
        return list(np.diff([0.0, *totals]))


class MeshModel(Model):
    """A model of Keras 3 on a mesh."""

    def __init__(
        self,
        is_sharded: bool,
        *arguments: Any,
        **options: Any,
    ):
        self._mesh = mesh_of(batch=2, model=2)
        layout_map = tlm.LayoutMap(self._mesh)
        if is_sharded:
            layout_map["words.embeddings"] = layout_of(
                self._mesh, "model", None
            )
        with tlm.layout_map_scope(layout_map):
            super().__init__(keras, *arguments, **options)

    def place(self, *batch):
        return tuple(
            tlm.layout.to_mesh(
                one,
                tf.experimental.dtensor.Layout.batch_sharded(
                    self._mesh, "batch", one.ndim
                ),
            )
            for one in batch
        )


def _table(**options: Any) -> Table:
    return Table(
        tlm.ShardedVariable.create(
            np.ones([NUM_ROWS, DIM], np.float32), **options
        )
    )


def _options(rows: Any = NUM_ROWS) -> dict[str, Any]:
    return dict(
        input_dim=rows,
        output_dim=DIM,
        embeddings_initializer="ones",
        name="words",
    )


def _embedding(version: Any, rows: Any = NUM_ROWS, **options: Any) -> Callable:
    return lambda: LAYERS[version].ShardedEmbedding(**_options(rows), **options)


def _vocabulary() -> tlm.vocabulary.OpenVocabulary:
    return tlm.vocabulary.OpenVocabulary(CAPACITY)


def _tpu_embedding(
    version: Any, num_rows: int = NUM_ROWS, **options: Any
) -> Callable:
    table = tpu.TableConfig(
        num_rows, DIM, tf.ones_initializer(), combiner="sum", name="words"
    )
    return lambda: LAYERS[version].TPUEmbedding(
        tpu.FeatureConfig(table), tpu.SGD(RATE), name="words", **options
    )


def _rows_of_keys(rows: Any, vocabulary: Any) -> np.ndarray:
    """Returns the rows of all ids, ones for ids that are no keys."""
    keys = tf.range(NUM_ROWS, dtype=tf.int64)
    is_key = vocabulary.contains(keys)
    found = tf.gather(rows, tf.where(is_key, vocabulary.lookup(keys), 0))
    return np.where(is_key[:, tf.newaxis], found, 1.0)


def _open_rows(layer: Any) -> np.ndarray:
    return _rows_of_keys(layer.embeddings, layer.vocabulary)


def _tpu_rows(layer: Any) -> Any:
    (rows,) = layer.embedding_tables.values()
    vocabularies = layer.embedding.vocabularies
    if not vocabularies:
        return rows.numpy()
    return _rows_of_keys(rows, vocabularies["words"])


def _stock_embedding(version: Any) -> Callable:
    return lambda: version.layers.Embedding(**_options())


def _replaced_embedding(version: Any) -> Callable:
    def make_layer() -> Any:
        with tlm.layers.sharded_embeddings(
            optimizer=tpu.SGD(RATE), num_shards=3, min_rows=1
        ):
            return version.layers.Embedding(**_options())

    return make_layer


TABLES: dict[str, Callable[[], Table]] = {
    "variable": lambda: _table(num_shards=1),
    "variable of 3 shards": lambda: _table(num_shards=3),
    "variable by mod": lambda: _table(num_shards=3, placement="mod"),
    "variable with stock ops": lambda: _table(num_shards=3),
}

# Maps the kind of a layer to a function of the Keras version, which returns the
# arguments of `Model`.
LAYERS_BY_KIND: dict[str, Callable[[Any], tuple]] = {
    "embedding": lambda version: (_embedding(version),),
    "embedding of 3 shards": lambda version: (
        _embedding(version, num_shards=3),
    ),
    "embedding with optimizer": lambda version: (
        _embedding(version, num_shards=3, optimizer=tpu.SGD(RATE)),
    ),
    "replaced embedding": lambda version: (_replaced_embedding(version),),
    "open embedding": lambda version: (
        _embedding(version, _vocabulary(), optimizer=tpu.SGD(RATE)),
        _open_rows,
    ),
    "tpu embedding": lambda version: (_tpu_embedding(version), _tpu_rows),
    "open tpu embedding": lambda version: (
        _tpu_embedding(
            version, CAPACITY, vocabularies={"words": _vocabulary()}
        ),
        _tpu_rows,
    ),
}
# These kinds support several replicas.
REPLICATED = ("open embedding", "tpu embedding", "open tpu embedding")

# Maps the kind of a layer on a mesh to a function that returns whether the rows
# are sharded, and the arguments of `Model`.
ON_MESH: dict[str, Callable[[], tuple]] = {
    "stock layer": lambda: (False, _stock_embedding(keras)),
    "sharded stock layer": lambda: (True, _stock_embedding(keras)),
    "embedding": lambda: (False, _embedding(keras)),
    "embedding with optimizer": lambda: (
        True,
        _embedding(keras, optimizer=tpu.SGD(RATE)),
    ),
    # The table is on the host.
    "open embedding": lambda: (
        False,
        _embedding(keras, _vocabulary(), optimizer=tpu.SGD(RATE)),
        _open_rows,
    ),
}

VERSIONS = {"keras": keras, "tf_keras": tf_keras}


def kinds() -> list[tuple[str, str]]:
    """Returns the pairs of a kind and a runtime."""
    return [
        *[(kind, "loop") for kind in TABLES],
        *[(kind, runtime) for kind in LAYERS_BY_KIND for runtime in VERSIONS],
        *[
            (kind, f"{runtime}, two replicas")
            for kind in REPLICATED
            for runtime in VERSIONS
        ],
        *[(f"{kind} on a mesh", "mesh") for kind in ON_MESH],
    ]


@contextlib.contextmanager
def created(kind: str, runtime: str, training: bool | None):
    """Yields the program of a kind of table."""
    with contextlib.ExitStack() as stack:
        if kind == "variable with stock ops":
            original = parts.is_local_cpu
            parts.is_local_cpu = lambda device: False
            stack.callback(setattr, parts, "is_local_cpu", original)
        if runtime == "loop":
            yield TABLES[kind]()
        elif runtime == "mesh":
            yield MeshModel(
                *ON_MESH[kind.removesuffix(" on a mesh")](), training=training
            )
        else:
            version, _, replicas = runtime.partition(", ")
            yield Model(
                VERSIONS[version],
                *LAYERS_BY_KIND[kind](VERSIONS[version]),
                training=training,
                num_replicas=2 if replicas else 1,
            )


def stock(runtime: str) -> Program:
    """Returns the program of stock TensorFlow or Keras for a runtime."""
    if runtime == "loop":
        return Table(tf.Variable(tf.ones([NUM_ROWS, DIM])))
    version = VERSIONS["tf_keras" if runtime.startswith("tf_") else "keras"]
    return Model(version, _stock_embedding(version))
