"""`ShardedEmbedding`: a Keras layer over one table in many shards."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _checks, _keras_private, _tf_private
from tf_layoutmap.layers import (
    mesh_table,
    row_optimizer,
    stock_lookup,
    table_store,
)
from tf_layoutmap.layers.table_weight import HOST, ShardWeight, TableWeight
from tf_layoutmap.layout import divided_rows, mesh_home
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import ShardedVariable, initial_value


@keras.saving.register_keras_serializable("tf_layoutmap")
class ShardedEmbedding(keras.layers.Layer):
    """Turns ids into rows of a table that is held in shards.

    Used as `keras.layers.Embedding`. With an `optimizer` of its own, a
    training step reads and writes the rows of the batch and no others, so its
    time does not grow with the table; equal ids count as one row that gets the
    sum of their gradients.

    >>> import keras, numpy as np
    >>> import tf_layoutmap as tlm
    >>> model = keras.Sequential([
    ...     keras.Input([2], dtype="int64"),
    ...     tlm.layers.ShardedEmbedding(
    ...         5, 1, num_shards=2, optimizer="sgd",
    ...         embeddings_initializer="zeros", name="words"),
    ...     keras.layers.Flatten(),
    ... ])
    >>> table = model.get_layer("words")
    >>> table.optimizer.learning_rate = 1.0
    >>> model.compile("adam", loss=lambda y, x: keras.ops.sum(x, axis=1))
    >>> _ = model.fit(np.array([[3, 3]]), np.zeros([1]), verbose=0)
    >>> table.embeddings.numpy().ravel().tolist()
    [0.0, 0.0, 0.0, -2.0, 0.0]

    The table is initialised shard by shard, and is one array in `.keras` and
    `.weights.h5` files and in checkpoints: those load into any number of
    shards, and checkpoints also from and into `keras.layers.Embedding`. An
    exported model uses TensorFlow's own operations only.

    The table's step is taken when the model's optimizer is applied: in `fit`
    and `train_on_batch`, and in a loop of your own by `apply_gradients` with
    the gradients of `trainable_variables`. The layer may be called several
    times in a step. Settings of the model's optimizer other than its loss
    scale (clipping, weight decay, averaging) do not reach the table.

    Under `tlm.layout_map_scope` the table is one weight on the mesh, whose
    rows the layout of `<layer>.embeddings` divides among the devices.

    Attributes:
      optimizer: The `RowOptimizer`, or None.
      num_shards: Into how many shards the table is cut; on a mesh the layout
        says so.
    """

    def __init__(self, input_dim: int, output_dim: int, *,
                 num_shards: int | None = None,
                 partitioner: Callable[..., list[int]] | None = None,
                 embeddings_initializer: Any = "uniform",
                 optimizer: Any = None, mask_zero: bool = False,
                 **kwargs: Any):
        """Makes the layer.

        Args:
          input_dim: Rows of the table; ids are in `[0, input_dim)`.
          output_dim: Columns of the table.
          num_shards: Shards at most; 1 when nothing is said. On a mesh
            neither this nor `partitioner` may be given.
          partitioner: Instead, one of `tlm.partitioners`.
          embeddings_initializer: Name or object of a Keras initializer, or a
            callable as `ShardedVariable.create` takes it. It is asked for one
            shard at a time, so it must not depend on the whole shape.
          optimizer: Trains the table: `"sgd"`, `"adagrad"`, or an object of
            `tf.tpu.experimental.embedding`, such as `Adagrad(0.05)`, whose
            learning rate may also be a Keras schedule. None leaves the shards
            to the model's optimizer, whose steps touch every row.
          mask_zero: Whether id 0 is padding, to be masked.
          **kwargs: Those of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: An argument is none of these, or `optimizer`
            is given and the layer's variables are not float32.
        """
        super().__init__(**kwargs)
        where = f"layer {self.name!r}"
        self.input_dim = _checks.check_int(
            "input_dim", input_dim, lowest=1, where=where)
        self.output_dim = _checks.check_int(
            "output_dim", output_dim, lowest=1, where=where)
        self.num_shards = self._count_shards(num_shards, partitioner)
        self._is_cut_by_hand = not num_shards is partitioner is None
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer)
        self.optimizer = row_optimizer.read(optimizer, self.name)
        if self.optimizer and self.variable_dtype != "float32":
            raise ValueError(
                "Argument `optimizer` must be None unless variables are "
                f"float32. Received: {self.variable_dtype} ({where}).")
        self.mask_zero = _checks.check_type(
            "mask_zero", mask_zero, bool, "a bool", where=where)
        self.supports_masking = self.mask_zero
        # XLA has no kernels for our ops, and would drop the check of ids. And
        # ids must not become float16.
        self.supports_jit = False
        self.autocast = False
        self._table = None
        self._is_on_mesh = False

    def _count_shards(self, num_shards: Any, partitioner: Any) -> int:
        where = f"layer {self.name!r}"
        if num_shards is not None and partitioner is not None:
            raise ValueError(
                "Arguments `num_shards` and `partitioner` must not both be "
                f"given. Received: {num_shards!r} and {partitioner!r} "
                f"({where}).")
        if partitioner is None:
            num_shards = 1 if num_shards is None else num_shards
            return min(self.input_dim, _checks.check_int(
                "num_shards", num_shards, lowest=1, where=where))
        if not callable(partitioner):
            raise TypeError(_checks.message(
                "partitioner", "callable", partitioner, where))
        counts = list(partitioner(
            tf.TensorShape([self.input_dim, self.output_dim]),
            tf.as_dtype(self.variable_dtype)))
        if len(counts) != 2 or counts[1] != 1:
            raise ValueError(
                "Argument `partitioner` must cut the rows only, "
                f"[num_shards, 1]. Received: {counts} ({where}).")
        return _checks.check_int("num_shards", counts[0], lowest=1,
                                 highest=self.input_dim, where=where)

    def build(self, input_shape: Any = None) -> None:
        """Makes the table."""
        if self.built:
            return
        row_optimizer.refuse_replicas(self.name)
        shape = (self.input_dim, self.output_dim)
        home, owner, _ = mesh_home.home_of_new_variable()
        self._is_on_mesh = home is not None
        if self._is_on_mesh:
            self._build_on_mesh(home, owner, shape)
        elif self.optimizer:
            self._embeddings = TableWeight(
                self._make_table, shape, optimizer=self.optimizer)
        else:
            sizes = RowPartition.div(self.input_dim, self.num_shards).sizes
            self._shard_weights = [
                ShardWeight(self._make_table, shard, (size, self.output_dim),
                            dtype=self.variable_dtype)
                for shard, size in enumerate(sizes)]
        for weight in self._trainable_variables:
            weight.trainable = self.trainable
        self.built = True

    def _build_on_mesh(self, home: Any, owner: Any,
                       shape: tuple[int, int]) -> None:
        if self._is_cut_by_hand:
            raise ValueError(
                "Arguments `num_shards` and `partitioner` must be None on a "
                "mesh, where the LayoutMap cuts tables. Received: "
                f"num_shards={self.num_shards} (layer {self.name!r}).")
        initializer = self._whole_table_initializer(home.init)
        if self.optimizer:
            self._embeddings = mesh_table.MeshTableWeight(
                home, owner, initializer, shape, optimizer=self.optimizer)
        else:
            self._embeddings = self.add_weight(
                shape, initializer, name="embeddings", autocast=False)

    def _whole_table_initializer(self, init: str) -> Callable[..., Any]:
        initializer = self.embeddings_initializer
        if init == "sharded" and isinstance(
                initializer, keras.initializers.Initializer):
            return initializer

        # As a table in one shard asks for it: the same bits.
        def whole(shape: Any, dtype: Any = None) -> tf.Tensor:
            return initial_value.of_shard(
                initializer, tuple(shape), tf.as_dtype(dtype),
                RowPartition.div(shape[0], 1), 0, self.name)

        return whole

    def problems_of_layout(self, axes: tuple[str | None, ...]) -> list[str]:
        """Returns why the table cannot have a layout; for layout maps."""
        return mesh_table.layout_problems(self, axes)

    def _make_table(self) -> ShardedVariable:
        """Returns the table, which the first call makes."""
        if self._table is None:
            with tf.init_scope(), tf.device(HOST):
                self._table = ShardedVariable.create(
                    self.embeddings_initializer,
                    shape=(self.input_dim, self.output_dim),
                    dtype=tf.as_dtype(self.variable_dtype),
                    num_shards=self.num_shards,
                    name=f"{self.name}/embeddings")
        return self._table

    @property
    def embeddings(self) -> Any:
        """The table, `[input_dim, output_dim]`.

        A `ShardedVariable`; on a mesh, the `keras.Variable`.
        """
        if self._is_on_mesh:
            return self._embeddings
        if self._table is None:
            raise AttributeError(
                f"The table of layer {self.name!r} is made when the layer is "
                "built; call the layer, or `build`, first.")
        return self._table

    def call(self, inputs: Any) -> Any:
        """Returns the rows of `inputs`.

        Args:
          inputs: Tensor or `tf.RaggedTensor` of integers, of any shape.

        Returns:
          `inputs.shape + [output_dim]` in the layer's compute dtype.

        Raises:
          TypeError: `inputs` are not integers.
          tf.errors.InvalidArgumentError: An id is outside the table.
        """
        if self._is_on_mesh:
            return self._call_on_mesh(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.call, inputs)
        ids = self._ids(inputs)
        if self._table is None:
            # Keras is only after the shape, and makes the table later.
            return tf.zeros(tf.concat([tf.shape(ids), [self.output_dim]], 0),
                            self.compute_dtype)
        return tf.cast(self._rows(ids), self.compute_dtype)

    def _ids(self, inputs: Any) -> tf.Tensor:
        """Returns `inputs` as int32 or int64."""
        if isinstance(inputs, tf.SparseTensor):
            raise TypeError(
                "Ids must be a dense or a ragged tensor. Received: a "
                f"tf.SparseTensor (layer {self.name!r}).")
        ids = tf.convert_to_tensor(inputs)
        if ids.dtype in (tf.int32, tf.int64):
            return ids
        if ids.dtype.is_integer and ids.dtype != tf.uint64:
            return tf.cast(ids, tf.int64 if ids.dtype.size > 2 else tf.int32)
        # Keras' Sequential without an Input makes floats of all numbers.
        exact = 2 ** (tf.experimental.numpy.finfo(
            ids.dtype.as_numpy_dtype).nmant + 1) if ids.dtype.is_floating else 0
        if self.input_dim > exact:
            raise TypeError(
                "Ids must be integers; declare them, as by "
                'keras.Input(shape, dtype="int64"). Received: dtype '
                f"{ids.dtype.name}, which does not tell all ids below "
                f"{self.input_dim} from each other (layer {self.name!r}).")
        whole = tf.debugging.Assert(
            tf.reduce_all(tf.equal(ids, tf.round(ids))),
            [f"Ids of layer {self.name!r} must be whole numbers.", ids])
        with tf.control_dependencies([] if whole is None else [whole]):
            return tf.cast(ids, tf.int64)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        if self.optimizer or not _tf_private.in_save_context():
            return self.embeddings.sparse_read(ids)
        # An exported model holds the weights that Keras lists: each shard.
        return stock_lookup.gather(
            [weight.value for weight in self._shard_weights], ids, self.name)

    def _call_on_mesh(self, inputs: Any) -> Any:
        ids = tf.convert_to_tensor(inputs) if not isinstance(
            inputs, tf.RaggedTensor | tf.SparseTensor) else inputs
        if not isinstance(ids, tf.Tensor) or not ids.dtype.is_integer:
            raise TypeError(
                "On a mesh, ids must be a dense tensor of integers; declare "
                'them, as by keras.Input(shape, dtype="int64"). Received: '
                f"{type(inputs).__name__} of {ids.dtype.name} (layer "
                f"{self.name!r}).")
        ids = self._ids(ids)
        if _keras_private.is_abstract():
            # Keras is only after the shape.
            rows = tf.zeros(tf.concat([tf.shape(ids), [self.output_dim]], 0))
        elif _tf_private.in_save_context() or (
                not ids.shape.is_fully_defined()):
            # DTensor compiles no sizes that it does not know: an export.
            rows = stock_lookup.gather([self._embeddings.value], ids,
                                       self.name)
        elif self.optimizer:
            rows = divided_rows.lookup(self._embeddings, ids)
        else:
            rows = stock_lookup.gather_with_dense_gradient(
                self._embeddings.value, ids)
        return tf.cast(rows, self.compute_dtype)

    # Shapes and masks, as of keras.layers.Embedding.

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns which ids are not padding; None without `mask_zero`."""
        del mask
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> tuple:
        """Returns `input_shape + (output_dim,)`."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns the same as a `KerasTensor`."""
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape), dtype=self.compute_dtype,
            ragged=getattr(inputs, "ragged", False))

    # Saving: one table.

    def save_own_variables(self, store: Any) -> None:
        """Writes the table as one array; the optimizer writes its own."""
        if self.built:
            table_store.save(store, "0", self.embeddings)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of any number of shards wrote."""
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first.")
        if sorted(store.keys()) != ["0"]:
            raise ValueError(
                f"The saved weights of layer {self.name!r} must be one "
                f"table. Received: {sorted(store.keys())}.")
        table_store.load(store, "0", self.embeddings)

    def _trackable_children(self, save_type: str = "checkpoint",
                            **kwargs: Any) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        # The weights or the table, and not both: they are the same rows.
        children.pop("_table", None)
        if self._table is not None and not self.optimizer:
            children.pop("_shard_weights", None)
            if save_type == "checkpoint":
                children["_embeddings"] = self._table
            else:
                children["_shard_weights"] = list(self._shard_weights)
        return children

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "num_shards": None if self._is_on_mesh else self.num_shards,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer),
            "optimizer": (self.optimizer and
                          keras.saving.serialize_keras_object(self.optimizer)),
            "mask_zero": self.mask_zero,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ShardedEmbedding":
        """Makes a layer from what `get_config` returned."""
        optimizer = config["optimizer"]
        if isinstance(optimizer, dict):
            optimizer = keras.saving.deserialize_keras_object(optimizer)
        if mesh_home.active_home() is not None:
            # The mesh cuts the table anew, however it was cut before.
            config = {**config, "num_shards": None}
        return cls(**{**config, "optimizer": optimizer})
