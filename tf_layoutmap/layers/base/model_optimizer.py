"""Optimizer of a table that follows the optimizer of its model.

`FollowsModel` is a mixin for the `RowOptimizer` of a Keras version. The model's
optimizer determines the rule when it is built, and the learning rate and all
other settings in each step. `ModelStep` describes one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import user_warnings
from tf_layoutmap.embedding import backend
from tf_layoutmap.embedding.configs.optimizer_specs import (
    OptimizerSpec,
    SlotSpec,
)
from tf_layoutmap.embedding.tpu_program import ReplicatedProgram
from tf_layoutmap.layers.base import model_rules, replica_steps, tables
from tf_layoutmap.layers.base.model_rules import ModelRule
from tf_layoutmap.layers.base.row_optimizer import RowUpdates

# Rule of a table before the optimizer of its model is built.
UNKNOWN_RULE = "the optimizer of `compile`"
_UNKNOWN = OptimizerSpec(model_rules.MODEL, 0.0)


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A step of the model's optimizer, as its tables apply it.

    Attributes:
      optimizer: The optimizer of the model.
      learning_rate: Float32 scalar, which is computed once for all tables.
      number: Number of the step, float32, 1 in the first step.
      sums_equal_ids: Whether the optimizer sums the gradients of equal ids
        before it squares them. Keras 3 does not, unless it converts the
        gradient to a dense tensor.
      clips_sums: Whether the gradients of equal ids are also summed before they
        are clipped.
    """

    optimizer: Any
    learning_rate: tf.Tensor
    number: tf.Tensor
    sums_equal_ids: bool
    clips_sums: bool


@dataclasses.dataclass
class _Binding:
    """The rule and the slot variables of a table for one model optimizer."""

    rule: ModelRule
    table: Any
    slots: list[Any]


class FollowsModel(RowUpdates):
    """A mixin that precedes the `RowOptimizer` of one Keras version.

    Each optimizer that is built with the table has its own slot variables, as
    in Keras. `slots`, and saved files, contain the slot variables of the
    optimizer that was built last.
    """

    _follows_model = True
    _bindings: weakref.WeakKeyDictionary[Any, _Binding]
    # Weak reference to the optimizer that was built last.
    _model_optimizer: Callable[[], Any]
    _step: ModelStep | None
    # Whether the slot variables were loaded before an optimizer was built.
    _has_restored_slots: bool

    def __init__(
        self, spec: OptimizerSpec = _UNKNOWN, *, name: str | None = None
    ):
        """Creates the optimizer. Only layers call this method."""
        cast("Any", super()).__init__(spec, name=name)
        # `vars` bypasses the tracking of attributes.
        vars(self).update(
            _bindings=weakref.WeakKeyDictionary(),
            _model_optimizer=lambda: None,
            _step=None,
            _has_restored_slots=False,
        )

    # The optimizer of the model.

    @property
    def model_optimizer(self) -> Any | None:
        """The model's optimizer that was built last, or None."""
        return self._model_optimizer()

    def follow(self, optimizer: Any) -> None:
        """Reads the rule of a model's optimizer and creates slot variables.

        Args:
          optimizer: Optimizer of a model, which is being built.

        Raises:
          ValueError: If the engine has no rule for the optimizer, or does not
            support a setting for a table.
        """
        if optimizer in self._bindings:
            return
        where = f"table {self._table.name!r}"
        rule = model_rules.read_rule(self._keras, optimizer, where)
        self._check_settings(optimizer, rule, where)
        if getattr(optimizer, "use_ema", False):
            user_warnings.warn(
                f"use_ema of optimizer {optimizer.name!r} does not average "
                f"{where}, whose steps update only the rows of a batch: the "
                "averaged weights are used together with the current rows."
            )
        names = [slot.name for slot in rule.slots]
        is_restored = self._has_restored_slots and sorted(
            self._own_slots()
        ) == sorted(names)
        for name in self._own_slots():
            if name not in names:
                delattr(self, name)
        vars(self).update(
            _spec=rule.spec(optimizer),
            _model_optimizer=weakref.ref(optimizer),
            _has_restored_slots=False,
        )
        table = self._table.with_rule(self._spec)
        if not is_restored:
            with tf.init_scope(), self._slot_device():
                self.create_slots(table)
        self._bindings[optimizer] = _Binding(
            rule, table, [getattr(self, name) for name in names]
        )

    def _check_settings(self, optimizer: Any, rule: ModelRule, where: str):
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps and getattr(optimizer, "global_clipnorm", None):
            raise ValueError(
                "A table that follows the model's optimizer supports either "
                "`global_clipnorm` or `gradient_accumulation_steps`, not both. "
                f"Received: global_clipnorm={optimizer.global_clipnorm} and "
                f"gradient_accumulation_steps={steps} ({where}). Use "
                "`clipnorm`, or a separate optimizer for the table."
            )
        limit = getattr(optimizer, "global_clipnorm", None)
        if limit and (
            replica_steps.has_replicas()
            or backend.is_tpu_strategy(tf.distribute.get_strategy())
        ):
            raise ValueError(
                "A table that follows the model's optimizer does not support "
                "`global_clipnorm` with several replicas or on a TPU, because "
                "Keras clips the gradients of each replica before it sums "
                "them. Received: "
                f"global_clipnorm={limit} ({where}). Use `clipnorm`, or a "
                "separate optimizer for the table."
            )
        if rule.name == "lamb" and not self._table.is_local:
            raise ValueError(
                "A table on a mesh or on parameter servers does not support "
                f"Lamb. Received: {where}. Use Adam, or a separate optimizer "
                "for the table."
            )

    def _slot_device(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which slot variables are created."""
        return contextlib.nullcontext()

    def _set_table(self, table: Any) -> None:
        """Sets the table, whose slot variables `follow` creates later."""
        self._table = table

    @property
    def learning_rate(self) -> Any:
        """The current learning rate of the model's optimizer."""
        optimizer = self.model_optimizer
        if optimizer is None:
            raise AttributeError(
                'A layer with optimizer="model" has no learning rate before '
                "the optimizer of its model is built. Received: "
                f"{self.name!r}. Read the learning rate of the model's "
                "optimizer."
            )
        return optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: object) -> None:
        del value
        raise TypeError(
            'The learning rate of a layer with optimizer="model" is the '
            "learning rate of the model's optimizer; set "
            "`model.optimizer.learning_rate`, or create the layer with a "
            f"separate optimizer. Received: {self.name!r}."
        )

    def _scalars(self) -> list[Any]:
        return [self.iterations]

    def describe(self) -> str:
        """Returns the rule and the learning rate as text."""
        optimizer = self.model_optimizer
        if optimizer is None:
            return UNKNOWN_RULE
        return f"{model_rules.describe(optimizer)} (the model's optimizer)"

    # Steps.

    @contextlib.contextmanager
    def applying(self, step: ModelStep) -> Iterator[None]:
        """Context in which updates use the settings of `step`."""
        self.follow(step.optimizer)
        vars(self)["_step"] = step
        try:
            yield
        finally:
            vars(self)["_step"] = None

    def _trained_table(self) -> Any | None:
        step = self._step
        optimizer = self.model_optimizer if step is None else step.optimizer
        binding = None if optimizer is None else self._bindings.get(optimizer)
        return binding and binding.table.trained(binding.slots)

    @contextlib.contextmanager
    def _settings_on_host(self, program: ReplicatedProgram) -> Iterator[None]:
        """Context in which `_update_rows` is called beside a TPU program."""
        step = self._step
        assert step is not None  # The caller is in `applying`.
        vars(self)["_step"] = dataclasses.replace(
            step,
            learning_rate=program.to_host(step.learning_rate)[0],
            number=program.to_host(step.number)[0],
        )
        try:
            yield
        finally:
            vars(self)["_step"] = step

    def _update_rows(self, ids: tf.Tensor, values: tf.Tensor) -> None:
        step = self._step
        if step is None:
            raise RuntimeError(
                'A table with optimizer="model" must be trained by the '
                f"optimizer of a model. Received: table {self._table.name!r}."
            )
        binding = self._bindings[step.optimizer]
        ids, values = self._clipped(step, ids, values)
        self._decay(step, ids)
        name = binding.rule.name
        sums_equal_ids = step.sums_equal_ids or not binding.table.is_local
        if binding.rule.squares and not sums_equal_ids:
            name = f"{name}_per_id"
        binding.table.update(
            binding.slots,
            ids,
            values,
            optimizer=name,
            hyperparameters=binding.rule.hyperparameters(
                step.optimizer, step.learning_rate, step.number
            ),
        )
        if self.row_constraint is not None:
            self._table.constrain(ids, self.row_constraint)

    def _clipped(
        self, step: ModelStep, ids: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the clipped gradients of rows, as Keras clips them."""
        optimizer = step.optimizer
        norm, limit = optimizer.clipnorm, optimizer.clipvalue
        # `clip_all` has applied `global_clipnorm`, which replaces `clipvalue`.
        is_limited = limit and not optimizer.global_clipnorm
        if not (norm or is_limited):
            return ids, values
        if step.clips_sums:
            ids, values = self._table.sum_equal_ids(ids, values)
        if norm:
            return ids, tf.clip_by_norm(values, norm)
        return ids, tf.clip_by_value(values, -limit, limit)

    def _decay(self, step: ModelStep, ids: tf.Tensor) -> None:
        """Applies the weight decay to rows, before the step, as in Keras."""
        decay = getattr(step.optimizer, "weight_decay", None)
        if decay is None or not self._uses_weight_decay(step.optimizer):
            return
        rate = step.learning_rate
        self._table.constrain(ids, lambda rows: rows - rows * decay * rate)

    def _uses_weight_decay(self, optimizer: Any) -> bool:
        """Returns whether the optimizer decays the table."""
        raise NotImplementedError

    # Saved state.

    def load_own_variables(self, store: Any) -> None:
        """Reads the state that `save_own_variables` wrote.

        If no optimizer is built, the slot variables are kept for an optimizer
        with the same rule. If the state is from another optimizer, a warning is
        issued and the state is not read, as in Keras.
        """
        saved = {
            name
            for name in store.keys()
            if not (name.isdigit() or name.startswith("accumulated_"))
        }
        names = {slot.name for slot in self._spec.slots}
        if self.model_optimizer is None and saved:
            vars(self)["_has_restored_slots"] = True
            # The initial values are overwritten.
            self._spec = OptimizerSpec(
                model_rules.MODEL,
                0.0,
                tuple(
                    SlotSpec(name, 0.0, is_per_row=store[name].shape[1] == 1)
                    for name in sorted(saved)
                ),
            )
            with tf.init_scope(), self._slot_device():
                self.create_slots(self._table)
        elif not saved:
            # The file was saved before an optimizer was built.
            store = {}
        elif saved != names:
            user_warnings.warn(
                f"The saved optimizer state of table {self._table.name!r} is "
                f"not loaded, because it holds {sorted(saved)}, and the "
                f"model's optimizer needs {sorted(names)}. The optimizer "
                "state of the table starts with its initial values."
            )
            return
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Raises an error, because a layer saves the string `"model"`."""
        raise NotImplementedError(
            'The layer of this optimizer saves optimizer="model".'
        )


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Multiplies a gradient, which may be sparse, by a scalar."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient * tf.cast(factor, gradient.dtype)
    return tf.IndexedSlices(
        gradient.values * tf.cast(factor, gradient.dtype),
        gradient.indices,
        gradient.dense_shape,
    )


def clip_all(
    optimizer: Any,
    gradients: Sequence[Any],
    is_clipped: Callable[[int], bool],
    *,
    scale: float | None,
    sums_equal_ids: bool,
) -> tuple[list[Any], bool]:
    """Applies `global_clipnorm` to the gradients of tables and other weights.

    Keras computes the norm of the other weights only. The norm of the returned
    gradients of these weights is at most `global_clipnorm`, so that Keras does
    not change them a second time.

    Args:
      optimizer: The optimizer of the model.
      gradients: The gradients of all variables of a step.
      is_clipped: Function of an index: whether the gradient belongs to the
        norm.
      scale: Loss scale that the gradients contain, or None.
      sums_equal_ids: Whether the gradients of equal ids are summed first.

    Returns:
      The gradients, and whether the optimizer has a `global_clipnorm`.
    """
    limit = getattr(optimizer, "global_clipnorm", None)
    result = list(gradients)
    if not limit or optimizer.clipnorm:
        return result, False
    chosen = [
        index
        for index, gradient in enumerate(result)
        if gradient is not None and is_clipped(index)
    ]
    if scale is not None:
        # The factor of scaled gradients is the same if the limit is scaled.
        limit = limit * scale
    squares = []
    for index in chosen:
        values = result[index]
        if isinstance(values, tf.IndexedSlices):
            values = (
                tables.sum_equal_ids(values.indices, values.values)[1]
                if sums_equal_ids
                else values.values
            )
        squares.append(tf.reduce_sum(tf.square(tf.cast(values, tf.float32))))
    norm = tf.sqrt(tf.add_n(squares))
    # The last term is not finite if the norm is not finite.
    factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    for index in chosen:
        result[index] = scaled(result[index], factor)
    return result, True
