"""What `ShardedEmbedding` is in every Keras version."""

# DOC-MERGE: What `ShardedEmbedding` reads of its arguments, and of ids.
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base import (
    initial_values,
    key_table,
    tables,
    weight_files,
)
from tf_layoutmap.layers.base.keras_version_guard import LayerBase
from tf_layoutmap.layers.base.row_optimizer import (
    refuse_constraint,
    refuse_replicas,
)
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.serving import report
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Vocabulary


def count_shards(
    num_shards: Any,
    partitioner: Callable[..., list[int]] | None,
    most: int,
    shape: tuple[int, int],
    dtype: str,
    where: str,
) -> int:
    """Returns the number of shards that the arguments ask for.

    Args:
      num_shards: Shards at most, or None.
      partitioner: Instead, a callable of shape and dtype; or None.
      most: Shards that the table can have.
      shape: Of the table, `[input_dim, output_dim]`.
      dtype: Of its rows.
      where: The layer, for messages.

    Raises:
      TypeError, ValueError: If both are given, or one is no such argument.
    """
    if num_shards is not None and partitioner is not None:
        raise ValueError(
            "Arguments `num_shards` and `partitioner` must not both be "
            f"given. Received: {num_shards!r} and {partitioner!r} "
            f"({where})."
        )
    if partitioner is None:
        num_shards = 1 if num_shards is None else num_shards
        return min(
            most,
            _core_checks.check_int(
                "num_shards", num_shards, lowest=1, where=where
            ),
        )
    if not callable(partitioner):
        raise TypeError(
            _core_checks.message("partitioner", "callable", partitioner, where)
        )
    counts = list(partitioner(tf.TensorShape(shape), tf.as_dtype(dtype)))
    if len(counts) != 2 or counts[1] != 1:
        raise ValueError(
            "Argument `partitioner` must cut the rows only, "
            f"[num_shards, 1]. Received: {counts} ({where})."
        )
    return _core_checks.check_int(
        "num_shards", counts[0], lowest=1, highest=most, where=where
    )


def check_inputs(inputs: Any, layer: str) -> None:
    """Refuses Python values in place of tensors, which Keras explains badly.

    Args:
      inputs: Of a call of a Keras 3 layer, nested or not.
      layer: Its name.

    Raises:
      TypeError: If a leaf is a Python number or string.
    """
    for one in tf.nest.flatten(inputs):
        if isinstance(one, bool | int | float | str | bytes):
            raise TypeError(
                "Ids must be a tensor or an array, such as "
                "tf.constant([1, 2]), not Python numbers, strings or lists of "
                f"them. Received: {one!r} (layer {layer!r})."
            )


def read_ids(inputs: Any, num_rows: int, name: str) -> tf.Tensor:
    """Returns ids as int32 or int64.

    Args:
      inputs: Dense tensor of numbers.
      num_rows: Of the table.
      name: Of the layer.

    Raises:
      TypeError: If numbers of their type do not tell all rows apart.
      tf.errors.InvalidArgumentError: If a number is not whole.
    """
    ids = tf.convert_to_tensor(inputs)
    if ids.dtype in (tf.int32, tf.int64):
        return ids
    if ids.dtype.is_integer and ids.dtype != tf.uint64:
        return tf.cast(ids, tf.int64 if ids.dtype.size > 2 else tf.int32)
    # Keras' Sequential without an Input makes floats of all numbers.
    exact = (
        2 ** (tf.experimental.numpy.finfo(ids.dtype.as_numpy_dtype).nmant + 1)
        if ids.dtype.is_floating
        else 0
    )
    if ids.dtype == tf.string:
        raise TypeError(
            f"Ids of layer {name!r} must be integers in [0, {num_rows}). "
            "Received: strings. For a layer that takes strings, pass "
            "`input_dim=tlm.OpenVocabulary(capacity)` and an `optimizer` when "
            "it is made."
        )
    if num_rows > exact:
        raise TypeError(
            "Ids must be integers; declare them, as by "
            'keras.Input(shape, dtype="int64"). Received: dtype '
            f"{ids.dtype.name}, which does not tell all ids below "
            f"{num_rows} from each other (layer {name!r})."
        )
    flat = tf.reshape(ids, [-1])
    is_whole = tf.equal(flat, tf.round(flat))
    checks = assertions.require(
        tf.reduce_all(is_whole),
        f"Ids of layer {name!r} must be whole numbers. Received: ",
        tf.boolean_mask(flat, tf.logical_not(is_whole))
        if tf.executing_eagerly()
        else flat,
    )
    with tf.control_dependencies(checks):
        return tf.cast(ids, tf.int64)


class EmbeddingCore(LayerBase):
    """A mixin before the `Layer` of one Keras version.

    The layer's class has `_keras`, the module of its version, and
    `_row_optimizer`, its optimizer class. Its `build` makes the table, by
    `_make_table`, and tells Keras about the weights.
    """

    _keras: Any
    _row_optimizer: Any
    _table: ShardedVariable | None
    _table_class: type[ShardedVariable] = ShardedVariable
    # Of a layer with an open vocabulary, instead of `_table`.
    _key_table: key_table.KeyTable | None

    def __init__(
        self,
        input_dim: int | OpenVocabulary,
        output_dim: int,
        *,
        num_shards: int | None = None,
        partitioner: Callable[..., list[int]] | None = None,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        optimizer: Any = None,
        mask_zero: bool = False,
        **kwargs: Any,
    ):
        """Makes the layer.

        Args:
          input_dim: Rows of the table; ids are in `[0, input_dim)`. Or a
            `tlm.OpenVocabulary`: ids are any int64 or strings, and get rows
            in the steps that train them.
          output_dim: Columns of the table.
          num_shards: Shards at most; 1 when nothing is said. On a mesh
            neither this nor `partitioner` may be given.
          partitioner: Instead, one of `tlm.partitioners`.
          embeddings_initializer: Name or object of a Keras initializer, or a
            callable as `ShardedVariable.create` takes it. Those of Keras give
            the values of `Embedding` with the same seed for any number of
            shards; a callable of your own that takes no `shard_info` is asked
            once for the whole table.
          embeddings_regularizer: None, or the name or object of a Keras
            regularizer, or a callable. With an `optimizer` it sees the rows
            that a call looks up, each once; else the whole table.
          embeddings_constraint: None, or the name or object of a Keras
            constraint, or a callable. With an `optimizer` it is applied to
            the rows that a step has changed, and must treat each row by
            itself (`axis=1`); else to the whole table.
          optimizer: Trains the table: `"sgd"`, `"adagrad"`, or an object of
            `tf.tpu.experimental.embedding`, such as `Adagrad(0.05)`, whose
            learning rate may also be a Keras schedule. None leaves the shards
            to the model's optimizer, whose steps touch every row.
          mask_zero: Whether id 0 is padding, to be masked. With an open
            vocabulary 0, or the empty string, is no key then: it looks up
            zeros.
          **kwargs: Those of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: An argument is none of these, or `optimizer`
            is given and the layer's variables are not float32; or a layer
            with an open vocabulary has no optimizer, or an initializer whose
            values cannot be drawn for one key, or a regularizer or constraint.
        """
        # Before Keras looks at attributes, so that it does not track them.
        vars(self).update(_table=None, _key_table=None)
        # Ids must not become float16.
        super().__init__(**{"autocast": False, **kwargs})
        # XLA has no kernels for our ops, and would drop the check of ids. Keras
        # 3 asks for this; tf_keras compiles for XLA only where it is told to.
        self.supports_jit = False
        where = f"layer {self.name!r}"
        settings = input_dim if isinstance(input_dim, OpenVocabulary) else None
        self.input_dim = (
            settings.num_rows
            if settings
            else _core_checks.check_int(
                "input_dim", input_dim, lowest=1, where=where
            )
        )
        self.output_dim = _core_checks.check_int(
            "output_dim", output_dim, lowest=1, where=where
        )
        # A shard holds whole buckets of keys.
        self.num_shards = count_shards(
            num_shards,
            partitioner,
            settings.num_buckets if settings else self.input_dim,
            (self.input_dim, self.output_dim),
            self.variable_dtype,
            where,
        )
        self._is_cut_by_hand = not num_shards is partitioner is None
        self.embeddings_initializer = self._keras.initializers.get(
            embeddings_initializer
        )
        self.optimizer = self._row_optimizer.read(optimizer, self.name)
        self.embeddings_regularizer = tables.check_callable(
            "embeddings_regularizer",
            self._keras.regularizers.get(embeddings_regularizer),
            where,
        )
        self.embeddings_constraint = tables.check_callable(
            "embeddings_constraint",
            self._keras.constraints.get(embeddings_constraint),
            where,
        )
        if self.optimizer:
            tables.check_by_row(self.embeddings_constraint, where)
            vars(self.optimizer)["row_constraint"] = self.embeddings_constraint
        if self.optimizer and self.variable_dtype != "float32":
            raise ValueError(
                "Argument `optimizer` must be None unless variables are "
                f"float32. Received: {self.variable_dtype} ({where})."
            )
        self.mask_zero = _core_checks.check_type(
            "mask_zero", mask_zero, bool, "a bool", where=where
        )
        self.supports_masking = self.mask_zero
        if settings is not None:
            self._open(settings)

    def _open(self, settings: OpenVocabulary) -> None:
        """Makes the embedding of a table that takes ids as they come."""
        where = f"layer {self.name!r} with an open vocabulary"
        if self.optimizer is None:
            raise ValueError(
                _core_checks.message(
                    "optimizer",
                    "given: a row that changes hands takes its slot "
                    "variables with it, which the model's optimizer would keep",
                    None,
                    where,
                )
            )
        for name in ("embeddings_regularizer", "embeddings_constraint"):
            if getattr(self, name) is not None:
                raise ValueError(
                    _core_checks.message(
                        name,
                        "None; `activity_regularizer` sees what a call looks "
                        "up",
                        getattr(self, name),
                        where,
                    )
                )
        table = key_table.KeyTable(
            self.name,
            settings,
            self.output_dim,
            initializer=self.embeddings_initializer,
            optimizer=self.optimizer,
            num_shards=self.num_shards,
            mask_zero=self.mask_zero,
        )
        vars(self)["_key_table"] = table
        vars(self.optimizer)["_engine_slots"] = lambda: table.slots
        self._track_embedding(table.embedding)

    def _track_embedding(self, embedding: TPUEmbedding) -> None:
        """Lets checkpoints find what holds the table with keys."""
        self.embedding = embedding

    # The table.

    def _check_can_build(self) -> None:
        """Refuses strategies under which the table would not train.

        Raises:
          RuntimeError: If there are several replicas.
          NotImplementedError: If what the layer has does not work over
            parameter servers.
        """
        refuse_replicas(self.name)
        if self.optimizer and self.embeddings_constraint is not None:
            refuse_constraint(self.name)

    def _make_table(self) -> ShardedVariable:
        """Returns the table, which the first call makes."""
        table = self._table
        if table is None:
            # The name is whole: tf_keras builds in a scope of the layer's.
            with tf.init_scope(), tf.device(HOST), tf.name_scope(""):
                table = vars(self)["_table"] = self._table_class.create(
                    self._first_values(),
                    shape=(self.input_dim, self.output_dim),
                    dtype=tf.as_dtype(self.variable_dtype),
                    num_shards=self.num_shards,
                    name=f"{self.name}/embeddings",
                )
        return table

    def _first_values(self) -> Callable[..., Any]:
        """What gives each shard its first rows."""
        initializer = self.embeddings_initializer
        simple = self._keras.initializers
        if not isinstance(initializer, simple.Initializer) or isinstance(
            initializer, simple.Zeros | simple.Ones
        ):
            return initializer
        return initial_values.of_one_table(
            initializer,
            (self.input_dim, self.output_dim),
            tf.as_dtype(self.variable_dtype),
            lambda initializer: initial_values.draw_of(
                self._keras.initializers, initializer, self._stateless_seed
            ),
        )

    def _stateless_seed(self, initializer: Any) -> tf.Tensor | None:
        """The seed of its next numbers, `[2]` int32; None if not known."""
        raise NotImplementedError

    @property
    def embeddings(self) -> ShardedVariable:
        """The table, `[input_dim, output_dim]`."""
        if self._key_table is not None and self.built:
            return self._key_table.rows
        if self._table is None:
            raise AttributeError(
                f"The table of layer {self.name!r} is made when the layer is "
                "built; call the layer, or `build`, first."
            )
        return self._table

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The keys that have rows; None of a layer whose ids are rows.

        Its `stats`, `contains`, `lookup`, `keys` and `evict` are those of
        `tlm.TPUEmbedding.vocabularies`.
        """
        if self._key_table is None:
            return None
        if not self.built:
            raise AttributeError(
                f"The vocabulary of layer {self.name!r} is made when the layer "
                "is built; call the layer, or `build`, first."
            )
        return self._key_table.vocabulary

    def _named_vocabularies(self) -> dict[str, Vocabulary]:
        """Its vocabulary by the layer's name, if it has one by now."""
        found = self.vocabulary if self.built else None
        return {} if found is None else {self.name: found}

    # The lookup.

    def call(self, inputs: Any) -> Any:
        """Returns the rows of `inputs`.

        Args:
          inputs: Tensor or `tf.RaggedTensor` of integers, of any shape; or
            of strings, if the vocabulary is open.

        Returns:
          `inputs.shape + [output_dim]` in the layer's compute dtype.

        Raises:
          TypeError: `inputs` are of another type.
          RuntimeError: A layer of the other Keras version calls.
          tf.errors.InvalidArgumentError: An id is outside the table.
        """
        self._refuse_other_keras(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.call, inputs)
        if isinstance(inputs, tf.Tensor) and self._is_traced_for_shapes():
            # Whatever the dtype: Keras builds a subclassed model that it loads
            # with floats for all inputs.
            return tf.zeros(
                tf.concat([tf.shape(inputs), [self.output_dim]], 0),
                self.compute_dtype,
            )
        ids = self._ids(inputs)
        if self._key_table is not None:
            return self._rows_of_keys(ids)
        stand_in = report.placeholder_of(self)
        if stand_in is not None:
            return tf.cast(stand_in(ids), self.compute_dtype)
        return tf.cast(self._rows(ids), self.compute_dtype)

    def _rows_of_keys(self, keys: tf.Tensor) -> tf.Tensor:
        assert self._key_table is not None
        return tf.cast(
            self._key_table.look_up(
                keys, self._marks_variable(), is_trained=self.trainable
            ),
            self.compute_dtype,
        )

    def _is_traced_for_shapes(self) -> bool:
        """Whether a call returns zeros, because only its shape is used."""
        if self._key_table is not None:
            return self._is_abstract()
        # Keras makes the weights later.
        return self._table is None and report.placeholder_of(self) is None

    def _is_abstract(self) -> bool:
        """Whether this call is for shapes only."""
        return False

    def _marks_variable(self) -> tf.Variable:
        """Of a layer with an open vocabulary: takes the marks."""
        raise NotImplementedError

    def _ids(self, inputs: Any) -> tf.Tensor:
        """Returns `inputs` as int32 or int64; or as keys."""
        if isinstance(inputs, tf.SparseTensor):
            raise TypeError(
                "Ids must be a dense or a ragged tensor. Received: a "
                f"tf.SparseTensor (layer {self.name!r})."
            )
        if self._key_table is not None:
            return key_table.read_keys(inputs, self.name)
        return read_ids(inputs, self.input_dim, self.name)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        if (
            self.optimizer
            and self.embeddings_regularizer is not None
            and not tf_private.in_save_context()
        ):
            self.add_loss(
                tables.loss_of_rows(
                    self.embeddings_regularizer, self.embeddings, ids
                )
            )
        if self.optimizer or not tf_private.in_save_context():
            return self.embeddings.sparse_read(ids)
        # An exported model holds the weights that Keras lists: each shard.
        return tables.stock_gather(self._exported_shards(), ids, self.name)

    def _exported_shards(self) -> list[tf.Variable]:
        raise NotImplementedError

    def _refuse_other_keras(self, inputs: Any) -> None:
        raise NotImplementedError

    # Saving: one table.

    def save_own_variables(self, store: Any) -> None:
        """Writes the table as one array; the optimizer writes its own."""
        if self._key_table is not None and self.built:
            self._key_table.save(store)
        elif self.built:
            weight_files.save_table(store, "0", self.embeddings)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of any number of shards wrote."""
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first."
            )
        if self._key_table is not None:
            self._key_table.load(store)
            return
        if sorted(store.keys()) != ["0"]:
            raise ValueError(
                f"The saved weights of layer {self.name!r} must be one "
                f"table. Received: {sorted(store.keys())}."
            )
        weight_files.load_table(store, "0", self.embeddings)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "input_dim": (
                self.input_dim
                if self._key_table is None
                else dataclasses.asdict(self._key_table.settings)
            ),
            "output_dim": self.output_dim,
            "num_shards": self.num_shards,
            "embeddings_initializer": self._keras.initializers.serialize(
                self.embeddings_initializer
            ),
            "embeddings_regularizer": self._keras.regularizers.serialize(
                self.embeddings_regularizer
            ),
            "embeddings_constraint": self._keras.constraints.serialize(
                self.embeddings_constraint
            ),
            "optimizer": (
                self.optimizer
                and self._keras.saving.serialize_keras_object(self.optimizer)
            ),
            "mask_zero": self.mask_zero,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a layer from what `get_config` returned."""
        optimizer, input_dim = config["optimizer"], config["input_dim"]
        if isinstance(optimizer, dict):
            optimizer = cls._keras.saving.deserialize_keras_object(optimizer)
        if isinstance(input_dim, dict):
            input_dim = OpenVocabulary(**input_dim)
        return cls(**{**config, "input_dim": input_dim, "optimizer": optimizer})
