"""Steps of `fit`, `evaluate` and `predict` of tf_keras models on a mesh."""

from collections.abc import Callable
from typing import Any

import tf_keras

from tf_layoutmap._core import tf_keras_private
from tf_layoutmap.layout import mesh_step
from tf_layoutmap.layout.mesh_step import MeshStep
from tf_layoutmap.layout.tf_keras import calls, optimizers
from tf_layoutmap.layout.tf_keras.patches import context_of, mesh_of_step


class _Step(MeshStep):
    """Runs one step of a tf_keras model on its mesh."""

    autograph = True

    def prepare(self, batch: Any) -> None:
        if calls.needs_trace_of_step(self.model, self.model_step, self.kind):
            calls.create_weights_of_step(self.model, self.model_step, batch)
            return
        x, _, _ = tf_keras.utils.unpack_x_y_sample_weight(batch)
        calls.create_weights(self.model, x)
        if self.kind == "train" and self.model.optimizer is not None:
            optimizers.build(
                self.model.optimizer,
                self.model.trainable_variables,
                self.context.mesh,
            )

    def num_variables(self) -> int:
        """Returns how many variables the model and its optimizers have."""
        optimizers_of_model = {
            id(value): value
            for value in vars(self.model).values()
            if isinstance(value, tf_keras.optimizers.Optimizer)
        }
        # The mean of the loss already exists, but is not in the list of metrics
        # before the first step.
        loss = getattr(self.model, "compiled_loss", None)
        mean_of_loss = (
            {id(metric) for metric in loss.metrics[:1]} if loss else ()
        )
        return sum(
            len(layer._trainable_weights) + len(layer._non_trainable_weights)
            for layer in (*self.model._flatten_layers(), *self.model.metrics)
            if id(layer) not in mean_of_loss
        ) + sum(
            len(optimizer.variables)
            for optimizer in optimizers_of_model.values()
        )

    def run(self, batch: Any) -> Any:
        outputs = self.model_step(batch)
        getattr(self.model, f"_{self.kind}_counter").assign_add(1)
        return outputs

    def __call__(self, batch: Any) -> Any:
        with mesh_of_step.set_to(self.context.mesh):
            return super().__call__(batch)


def _over_iterator(step: _Step) -> Callable[[Any], Any]:
    """Returns the function that `fit` calls with an iterator of batches."""

    def function(iterator: Any) -> Any:
        step.use_data(iterator)
        steps = step.model._steps_per_execution
        logs = None
        for _ in range(1 if steps is None else int(steps.numpy())):
            logs = step(step.checks.next_batch(iterator))
        return logs

    return function


def _over_one_batch(step: _Step) -> Callable[[Any], Any]:
    """Returns a function that computes predictions for the next batch."""

    def function(iterator: Any) -> Any:
        step.use_data(iterator)
        return step(step.checks.next_batch(iterator))

    return function


def make_data(
    original: Callable[..., Any], handler: Any, *args: Any, **kwargs: Any
) -> None:
    """Creates the dataset of `fit`, `evaluate` or `predict`."""
    original(handler, *args, **kwargs)
    if context_of(handler._model) is not None and isinstance(
        handler._adapter, tf_keras_private.TensorLikeDataAdapter
    ):
        handler._dataset = mesh_step.without_autotuning(handler._dataset)


make_train_function, make_test_function = (
    mesh_step.step_function_maker(
        kind,
        context_of,
        lambda model, context, kind=kind: _over_iterator(
            _Step(model, context, kind)
        ),
    )
    for kind in ("train", "test")
)
make_predict_function = mesh_step.step_function_maker(
    "predict",
    context_of,
    lambda model, context: _over_one_batch(_Step(model, context, "predict")),
)
