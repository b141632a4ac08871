"""`RowOptimizer` for tf_keras."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.embedding.configs.optimizer_specs import OptimizerSpec
from tf_layoutmap.layers.base.model_optimizer import FollowsModel
from tf_layoutmap.layers.base.row_optimizer import RowUpdates
from tf_layoutmap.layers.base.tables import HOST


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class RowOptimizer(RowUpdates, tf_keras.optimizers.Optimizer):
    """The optimizer of a `tlm.layers.tf_keras.ShardedEmbedding`.

    The class works like `tlm.layers.RowOptimizer`, for tf_keras. The learning
    rate may be a schedule of `tf_keras.optimizers.schedules`.
    """

    _keras = tf_keras

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Creates the optimizer. Only `ShardedEmbedding` calls this method.

        Args:
          spec: The rule. The learning rate may also be a
            `tf_keras.optimizers.schedules.LearningRateSchedule`.
          name: Name of the optimizer.
        """
        super().__init__(name=name or f"row_{spec.name}", jit_compile=False)
        self._spec = spec
        self._rate: Any = spec.learning_rate
        if not callable(self._rate):
            with tf.init_scope():
                self._rate = tf.Variable(
                    self._rate,
                    dtype=tf.float32,
                    trainable=False,
                    name="learning_rate",
                )

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next step: a variable, or a number."""
        if isinstance(self._rate, self._schedule()):
            return self._rate(self.iterations)
        return self._rate() if callable(self._rate) else self._rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not isinstance(self._rate, tf.Variable):
            raise TypeError(
                "The learning rate must be a number to be set. Received: "
                f"{self._rate!r} ({self.name!r})."
            )
        self._rate.assign(value)

    def apply_gradients(
        self, grads_and_vars: object, *args: object, **kwargs: object
    ) -> NoReturn:
        """Raises `RuntimeError`, like `build`."""
        self.build(grads_and_vars)

    def update_step(self, gradient: object, variable: object) -> NoReturn:
        """Raises `RuntimeError`, like `build`."""
        self.build([variable])

    def _scalars(self) -> list[tf.Variable]:
        is_variable = isinstance(self._rate, tf.Variable)
        return [self.iterations, *[self._rate] * is_variable]

    def _rate_config(self) -> Any:
        if isinstance(self._rate, self._schedule()):
            return tf_keras.optimizers.schedules.serialize(self._rate)
        rate: Any = self.learning_rate
        # A variable of a strategy cannot be converted to a Python number.
        return float(rate.numpy() if tf.is_tensor(rate) else rate)

    @classmethod
    def _new_follower(cls) -> ModelRowOptimizer:
        """Returns an optimizer that follows the optimizer of a model."""
        return ModelRowOptimizer()

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        # The base class caches its list of children. If a checkpoint was
        # created before the layer was built, the cached list would not contain
        # the slot variables.
        return super(tf_keras_private.BaseOptimizer, self)._trackable_children(
            save_type, **kwargs
        )


class ModelRowOptimizer(FollowsModel, RowOptimizer):
    """The optimizer of a table with `optimizer="model"`.

    The class works like the class of the same name for Keras 3.
    """

    def _uses_weight_decay(self, optimizer: Any) -> bool:
        return tf_keras_private.uses_weight_decay(
            optimizer, self._table.variable
        )

    def _slot_device(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(HOST)
