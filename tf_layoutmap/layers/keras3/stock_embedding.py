"""Replaces `keras.layers.Embedding` layers of Keras 3 in place.

`ReplacedEmbedding` is the class of replaced layers. For a subclass of
`Embedding` such as `ReversibleEmbedding`, `replaced_class` creates a class in
which `ReplacedEmbedding` takes the place of `Embedding`. The class keeps the
name of the stock class, because Keras derives paths in weight files from it.
"""

import functools
import importlib
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layers.base import stock_embeddings, weight_files
from tf_layoutmap.layers.base.stock_embeddings import (
    ReplacedLayer,
    Replacer,
    Settings,
)
from tf_layoutmap.layers.keras3.host_weights import TableWeight
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer
from tf_layoutmap.layers.keras3.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.keras3.stock_adagrad import StockAdagrad
from tf_layoutmap.layout.keras3 import context as mesh_context

# Packages whose classes a saved model may name as stock class.
_PACKAGES = ("keras", "keras_hub", "keras_rs")


class ReplacedTable(TableWeight):
    """The table of a replaced layer."""

    def assign(self, value: Any) -> Any:
        """Applies a gradient inside an optimizer's `apply`, else writes."""
        optimizer = keras_private.applying_optimizer()
        if optimizer is not None and not self.follows_model:
            _warn_of_settings(optimizer, self.path)
        return super().assign(value)


def _warn_of_settings(optimizer: Any, path: str) -> None:
    used = [
        name
        for name in stock_embeddings.OTHER_SETTINGS
        if getattr(optimizer, name, None)
    ]
    if used:
        warnings.warn(
            f"{', '.join(used)} of the model's optimizer do not apply to "
            f"{path!r}, which `shard_embeddings` has replaced and which has a "
            "separate optimizer.",
            stacklevel=2,
        )


@keras.saving.register_keras_serializable("tf_layoutmap")
class ReplacedEmbedding(
    ReplacedLayer, ShardedEmbedding, keras.layers.Embedding
):
    """A stock `Embedding` whose table has a `RowOptimizer`."""

    # Class of the stock layer; set in the classes of `replaced_class`.
    _replaced_class: type = keras.layers.Embedding

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        optimizer: Any,
        num_shards: int = 1,
        **kwargs: Any,
    ):
        """Creates the layer; a saved model calls this method.

        Args:
          input_dim: Number of rows.
          output_dim: Number of columns.
          optimizer: A `RowOptimizer`.
          num_shards: Maximum number of shards.
          **kwargs: Arguments of the stock layer.
        """
        keras.layers.Embedding.__init__(self, input_dim, output_dim, **kwargs)
        self._set_up(optimizer, num_shards)

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        keras.layers.Embedding.build(self, input_shape)

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the table instead of the weight of the stock layer."""
        if kwargs.get("name") != "embeddings":
            return super().add_weight(*args, **kwargs)
        if mesh_context.context_of_new_variable()[0] is not None:
            raise NotImplementedError(
                "A replaced Embedding must be on one host. Received: layer "
                f"{self.name!r} on a mesh. Use tlm.layers.ShardedEmbedding, or "
                "do not call `shard_embeddings`."
            )
        self._check_can_build()
        weight = ReplacedTable(
            self._make_table,
            (self.input_dim, self.output_dim),
            optimizer=self.optimizer,
        )
        self._track_variable(weight)
        return weight

    def _adopt(self, old: Any) -> None:
        """Creates the table with the values of the stock weight `old`."""
        self._is_converting = True
        weight = ReplacedTable(
            self._make_table,
            (self.input_dim, self.output_dim),
            optimizer=self.optimizer,
        )
        self._is_converting = False
        weight.value.assign(old.value)
        weight._path = old.path
        # Weights are compared by identity, because `==` compares values.
        others = [
            variable
            for variable in self._trainable_variables
            if variable is not old
        ]
        self._tracker.unlock()
        for variable in (old, *others):
            self._untrack_variable(variable)
        self._tracker.unlock()
        # `Layer.__delattr__` would also run the garbage collector.
        super(keras.layers.Layer, self).__delattr__("_embeddings")
        self._embeddings = weight
        for variable in others:
            self._track_variable(variable)
        self._tracker.lock()
        weight.trainable = old.trainable

    def call(self, inputs: Any) -> Any:
        """Returns the rows of `inputs`; see `ShardedEmbedding.call`."""
        if isinstance(inputs, tf.SparseTensor):
            # The stock layer also looks up id 0 for missing values.
            inputs = tf.sparse.to_dense(inputs)
        return super().call(inputs)

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Raises an error, because LoRA requires the full table.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            "LoRA must be enabled on a stock Embedding. Received: layer "
            f"{self.name!r}, which `shard_embeddings` has replaced."
        )

    # Saved state.

    def save_own_variables(self, store: Any) -> None:
        """Writes the same arrays as the stock layer."""
        if not self.built:
            return
        weight_files.save_table(store, "0", self.embeddings)
        for number, weight in self._other_variables():
            store[str(number)] = weight.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads the arrays of the stock layer."""
        others = self._other_variables()
        expected = ["0", *(str(number) for number, _ in others)]
        if sorted(store.keys()) != expected:
            raise ValueError(
                f"The saved weights of layer {self.name!r} must be arrays "
                f"{expected}. Received: {sorted(store.keys())}."
            )
        weight_files.check_table(store, "0", self.embeddings)
        weight_files.load_table(store, "0", self.embeddings)
        for number, weight in others:
            weight.assign(store[str(number)])

    def _other_variables(self) -> list[tuple[int, Any]]:
        names = self.variable_serialization_spec[None]
        return [
            (number, getattr(self, name))
            for number, name in enumerate(names)
            if name != "embeddings"
        ]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, and the stock class."""
        stock = self._replaced_class
        return {
            **super().get_config(),
            "replaced_class": {
                "module": stock.__module__,
                "name": stock.__qualname__,
                "registered_name": keras.saving.get_registered_name(stock),
            },
        }

    @staticmethod
    def _saved_class(config: Any) -> type:
        return replaced_class(_stock_class(config))


def _stock_class(config: dict[str, str]) -> type:
    stock = keras.saving.get_registered_object(config["registered_name"])
    if stock is None and config["module"].partition(".")[0] in _PACKAGES:
        stock = getattr(
            importlib.import_module(config["module"]), config["name"], None
        )
    if not isinstance(stock, type) or not issubclass(
        stock, keras.layers.Embedding
    ):
        raise ValueError(
            "The class of a replaced layer must be a subclass of "
            "keras.layers.Embedding that is registered with "
            "`keras.saving.register_keras_serializable`. Received: "
            f"{config['module']}.{config['name']}."
        )
    return stock


@functools.cache
def replaced_class(stock: type) -> type:
    """Returns the class of replaced layers of a stock class."""
    return stock_embeddings.class_of_replaced_layers(
        stock, ReplacedEmbedding, keras
    )


class Keras3Replacer(Replacer):
    """Replaces the layers of Keras 3."""

    keras = keras
    known_classes = (
        f"{keras.layers.ReversibleEmbedding.__module__}.ReversibleEmbedding",
        "keras_rs.src.layers.embedding.embed_reduce.EmbedReduce",
    )

    def __init__(self, settings: Settings):
        """Checks the settings."""
        self._rule = stock_embeddings.keras_rule(keras, settings.optimizer)
        super().__init__(settings)

    def new_optimizer(self, layer: str) -> Any:
        if self._rule is None:
            return RowOptimizer.read(self.settings.optimizer, layer)
        kind = StockAdagrad if self._rule.name == "adagrad" else RowOptimizer
        return kind(self._rule)

    def differences(self) -> Iterable[str]:
        if self._rule is not None:
            return
        name = self.new_optimizer("tables")._spec.name
        if name == "adagrad":
            yield (
                "The gradients of an id that occurs several times in a step "
                "are summed before they are squared; Keras 3 squares each of "
                "them. Pass a keras.optimizers.Adagrad to train as Keras does."
            )
        elif name != "sgd":
            yield (
                f"With {name}, rows that a step does not look up are not "
                "updated; Keras' optimizers update all rows."
            )

    def weight_of(self, layer: Any) -> Any | None:
        return layer._embeddings if layer.built else None

    def own_reason(self, layer: Any) -> str | None:
        if layer.quantization_mode:
            return f"it is quantized ({layer.quantization_mode})"
        if layer.lora_enabled or layer.lora_rank:
            return "it has LoRA weights, which are added to the full table"
        weight = self.weight_of(layer)
        if mesh_context.active_context() is not None or (
            weight is not None and not isinstance(weight.value, tf.Variable)
        ):
            return "it is on a mesh; use tlm.layers.ShardedEmbedding"
        if weight is not None and hasattr(weight.value, "values"):
            return "its weight is replicated by a strategy"
        return None

    def convert(self, layer: Any) -> None:
        convert(layer, self.new_optimizer(layer.name), self.settings.num_shards)

    def is_optimizer_built(self, optimizer: Any) -> bool:
        return optimizer.built

    def replace(self, model: Any, *, dry_run: bool, **options: Any) -> Any:
        report = super().replace(model, dry_run=dry_run, **options)
        if report.replaced and not dry_run:
            for changed_model in self.models_of(list(model._flatten_layers())):
                if changed_model.compiled and changed_model.jit_compile:
                    # XLA has no kernels for the ops of tables.
                    changed_model.jit_compile = False
        return report


def convert(layer: Any, optimizer: Any, num_shards: int) -> None:
    """Replaces a stock layer in place.

    Args:
      layer: An `Embedding` that `Keras3Replacer` supports.
      optimizer: A new `RowOptimizer`.
      num_shards: Maximum number of shards.
    """
    old = layer._embeddings if layer.built else None
    object.__setattr__(layer, "__class__", replaced_class(type(layer)))
    layer._set_up(optimizer, num_shards)
    if old is not None:
        layer._adopt(old)
        stock_embeddings.free_variable(old.value)
