"""Replaces `tf_keras.layers.Embedding` layers in place.

`ReplacedEmbedding` is the class of replaced layers. The classes that
`replaced_class` creates keep the name of the stock class, because tf_keras
derives paths in weight files from it.
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.layers.base import stock_embeddings
from tf_layoutmap.layers.base.stock_embeddings import (
    ReplacedLayer,
    Replacer,
    Settings,
)
from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.layers.tf_keras.sharded_embedding import ShardedEmbedding


class _StockEmbedding(tf_keras.layers.Embedding):
    """The base class of replaced layers, whose `build` creates no weight."""

    def build(self, input_shape: Any = None) -> None:
        tf_keras.layers.Layer.build(self, input_shape)


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class ReplacedEmbedding(ReplacedLayer, ShardedEmbedding, _StockEmbedding):
    """A stock `Embedding` whose table has a `RowOptimizer`."""

    # Class of the stock layer; set in the classes of `replaced_class`.
    _replaced_class: type = tf_keras.layers.Embedding

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
        _StockEmbedding.__init__(self, input_dim, output_dim, **kwargs)
        self._set_up(optimizer, num_shards)

    def _adopt(self, rows: tf.Variable) -> None:
        """Creates the table with the values of `rows`."""
        self.__dict__["_is_converting"] = True
        # A name scope that ends with a slash does not extend the current one.
        with tf.name_scope(f"{rows.name.rpartition('/')[0] or self.name}/"):
            self.build(None)
        del self.__dict__["_is_converting"]
        self.embeddings.assign(rows)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the shape of the result, as the stock layer."""
        return tf.TensorShape(
            _StockEmbedding.compute_output_shape(self, input_shape)
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, and the stock class."""
        return {
            **super().get_config(),
            "replaced_class": tf_keras.saving.get_registered_name(
                self._replaced_class
            ),
        }

    @staticmethod
    def _saved_class(config: Any) -> type:
        return replaced_class(_stock_class(config))


def _stock_class(name: str) -> type:
    stock = tf_keras.saving.get_registered_object(name)
    if stock is None and name == "Embedding":
        stock = tf_keras.layers.Embedding
    if not isinstance(stock, type) or not issubclass(
        stock, tf_keras.layers.Embedding
    ):
        raise ValueError(
            "The class of a replaced layer must be a subclass of "
            "tf_keras.layers.Embedding that is registered with "
            "`tf_keras.saving.register_keras_serializable`. Received: "
            f"{name!r}."
        )
    return stock


@functools.cache
def replaced_class(stock: type) -> type:
    """Returns the class of replaced layers of a stock class."""
    return stock_embeddings.class_of_replaced_layers(
        stock, ReplacedEmbedding, tf_keras
    )


class TfKerasReplacer(Replacer):
    """Replaces the layers of tf_keras."""

    keras = tf_keras

    def __init__(self, settings: Settings):
        """Checks the settings."""
        self._rule = stock_embeddings.keras_rule(tf_keras, settings.optimizer)
        super().__init__(settings)

    def new_optimizer(self, layer: str) -> Any:
        if self._rule is None:
            return RowOptimizer.read(self.settings.optimizer, layer)
        return RowOptimizer(self._rule)

    def differences(self) -> Iterable[str]:
        name = self.new_optimizer("tables")._spec.name
        if name not in ("sgd", "adagrad"):
            yield (
                f"With {name}, rows that a step does not look up are not "
                "updated; Keras' optimizers update all rows."
            )

    def weight_of(self, layer: Any) -> Any | None:
        return layer.embeddings if layer.built else None

    def own_reason(self, layer: Any) -> str | None:
        if layer.sparse:
            return "it returns sparse tensors (sparse=True)"
        if layer._use_one_hot_matmul:
            return "it multiplies the full table (use_one_hot_matmul=True)"
        weight = self.weight_of(layer)
        if tf_keras_private.layout_map_in_use() is not None or (
            weight is not None and hasattr(weight, "layout")
        ):
            return "it is on a mesh"
        if weight is not None and isinstance(
            weight, tf.distribute.DistributedValues
        ):
            return "its weight is replicated by a strategy"
        return None

    def report_rule(self, kind: str) -> str:
        # Adagrad of tf_keras updates only the rows of a batch.
        return "rows" if kind == "Adagrad" else super().report_rule(kind)

    def is_without_effect(self, rule: Any) -> bool:
        # With a factor of 0, the gradient is dense, but has the same sums. In
        # Keras 3, Adagrad would square a dense gradient differently.
        return isinstance(
            rule,
            tf_keras.regularizers.L1
            | tf_keras.regularizers.L2
            | tf_keras.regularizers.L1L2,
        ) and not any(
            float(factor)
            for name, factor in rule.get_config().items()
            if name in ("l1", "l2")
        )

    def convert(self, layer: Any) -> None:
        if self.is_without_effect(layer.embeddings_regularizer):
            layer.embeddings_regularizer = None
        convert(layer, self.new_optimizer(layer.name), self.settings.num_shards)

    def is_optimizer_built(self, optimizer: Any) -> bool:
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            return bool(getattr(optimizer, "_built", False))
        return len(optimizer.variables()) > 1


def convert(layer: Any, optimizer: Any, num_shards: int) -> None:
    """Replaces a stock layer in place.

    Args:
      layer: An `Embedding` that `TfKerasReplacer` supports.
      optimizer: A new `RowOptimizer`.
      num_shards: Maximum number of shards.
    """
    old = layer.embeddings if layer.built else None
    if old is not None:
        trainable = layer.trainable
        layer._delete_tracking("embeddings")
        del layer.embeddings
        layer.built = False
        layer._callable_losses = [
            loss for loss in layer._callable_losses if not _reads(loss, old)
        ]
    object.__setattr__(layer, "__class__", replaced_class(type(layer)))
    layer._set_up(optimizer, num_shards)
    if old is not None:
        layer._adopt(old)
        layer.trainable = trainable
        stock_embeddings.free_variable(old)


def _reads(loss: Any, weight: Any) -> bool:
    """Returns whether a loss is the regularizer of a weight."""
    return isinstance(loss, functools.partial) and any(
        arg is weight for arg in loss.args
    )
