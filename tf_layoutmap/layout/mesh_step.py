"""One step of a model on its mesh, from host batch to host results.

The loop, callbacks and logs are Keras' own. Only the function of one step is
ours: it takes a batch from the host, divides it along the batch axis of the
mesh, runs the model's own `train_step` there, and brings the logs back.
"""

# DOC-MERGE: What takes the place of `make_train_function` and its two siblings.
# DOC-MERGE: Datasets whose iterators end at once: without tf.data's autotuning.
#
# An iterator of tf.data that autotunes waits at its end for a thread of its own,
# in one of twenty cases for as long as it was used, at most for a minute: the
# thread is woken before it can see that it was cancelled (TensorFlow 2.21). In a
# process of a cluster all that comes from the coordinator waits with it.
#
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import atomic_step, errors, tracing, transfer
from tf_layoutmap.layout.processes.checks import ProcessChecks
from tf_layoutmap.layout.replication.retrace import RetracedFunction


class MeshStep:
    """A callable that runs one step; what both Keras versions have in common.

    Subclasses say how a model gets its weights before the first step.
    """

    # Whether AutoGraph converts the step of the model.
    autograph = False

    def __init__(self, model: Any, context: Any, kind: str):
        """Makes the step; nothing is traced before it is called.

        Args:
          model: Of Keras 3 or tf_keras.
          context: `MeshContext` of the model.
          kind: `"train"`, `"test"` or `"predict"`: which step of the model.
        """
        self.model = model
        self.context = context
        self.kind = kind
        self.checks = ProcessChecks(
            model, context.mesh, context.batch_dim, kind
        )
        self.model_step = getattr(model, f"{kind}_step")
        self._is_prepared = False
        run = self._run_atomically if kind == "train" else self.run
        # Shapes are kept: DTensor needs to know them, so the last, smaller
        # batch has a trace of its own.
        self._run: Any = (
            run
            if model.run_eagerly
            else RetracedFunction(
                lambda: tf.function(run, autograph=self.autograph),
                model,
                kind,
                context,
            )
        )

    def prepare(self, batch: Any) -> None:
        """Makes all variables of a step, before the first one is traced.

        A variable that a trace creates would start anew with every trace.
        """
        raise NotImplementedError

    def map_structure(
        self, function: Callable[[Any], Any], structure: Any
    ) -> Any:
        """Returns a structure of tensors with `function` applied to each."""
        return tf.nest.map_structure(function, structure)

    def with_host_results(self, batch: Any) -> Any:
        """Returns a batch of the host as `run` takes it."""
        return batch

    def run(self, batch: Any) -> Any:
        """Runs the step of the model on a batch that is on the mesh.

        Args:
          batch: As `with_host_results` returns it.
        """
        return self.model_step(batch)

    def _run_atomically(self, batch: Any) -> Any:
        with atomic_step.full_step(self.context.mesh):
            return self.run(batch)

    def __call__(self, batch: Any) -> Any:
        """Returns what the step returns for a batch, as host tensors."""
        mesh, batch_dim = self.context.mesh, self.context.batch_dim
        if not self._is_prepared:
            self.prepare(batch)
            self._is_prepared = True
            self._warn_of_settings(batch)
        self.checks.compare_model()
        batch = self.with_host_results(batch)
        batch = self.map_structure(
            lambda x: transfer.to_batch(x, mesh, batch_dim), batch
        )
        with self.checks.running(), errors.errors_once(mesh):
            with (
                tracing.default_mesh(mesh, batch_dim),
                (
                    errors.explain_error(
                        self.model, self.kind, lambda: self._graph(batch)
                    )
                ),
            ):
                outputs = self._run(batch)
            # Errors of a step arrive with what is read of it.
            return self.map_structure(transfer.to_host_tensor, outputs)

    def _warn_of_settings(self, batch: Any) -> None:
        """Warns once of what is accepted and without effect on a mesh."""
        warned = vars(self.model).setdefault("_mesh_warned", set())
        for what, sentence in (
            ("jit_compile", _warning_of_xla(self.model)),
            ("batch", self._warning_of_batch(batch)),
        ):
            if sentence is not None and what not in warned:
                warned.add(what)
                warnings.warn(sentence, errors.LayoutMapWarning, stacklevel=4)

    def _warning_of_batch(self, batch: Any) -> str | None:
        """Returns what a batch size costs that the mesh does not divide.

        The first batch counts: the last one of an epoch may be smaller.
        """
        mesh, batch_dim = self.context.mesh, self.context.batch_dim
        if batch_dim is None:
            return None
        count = mesh.dim_size(batch_dim)
        sizes = [
            x.shape[0]
            for x in tf.nest.flatten(batch)
            if len(getattr(x, "shape", ())) > 0
        ]
        uneven = next((size for size in sizes if size % count), None)
        if uneven is None:
            return None
        return (
            f"Mesh axis {batch_dim!r} divides batches among {count} devices "
            f"where their size is a multiple of {count}. Received: batches of "
            f"{uneven} samples for model {self.model.name!r}, which every "
            f"device computes in full. Use a batch size of "
            f"{-(-uneven // count) * count}."
        )

    def _graph(self, batch: Any) -> Any:
        """Returns the graph that ran for `batch`, or None without one."""
        return None if self.model.run_eagerly else self._run.graph(batch)


def _warning_of_xla(model: Any) -> str | None:
    if not getattr(model, "jit_compile", None):
        return None
    return (
        f"Steps on a mesh are not compiled with XLA. Received: model "
        f"{model.name!r}, compiled with jit_compile=True, which has no "
        "effect. Use jit_compile=False."
    )


def step_function_maker(
    kind: str,
    context_of: Callable[[Any], Any],
    make: Callable[[Any, Any], Any],
    check_plain: Callable[[Any, str, bool], None] | None = None,
) -> Callable[..., Any]:
    """Returns the replacement of `make_<kind>_function`.

    Args:
      kind: `"train"`, `"test"` or `"predict"`.
      context_of: Returns the `MeshContext` of a model, or None.
      make: Makes the function for a model and its context.
      check_plain: Called as `(model, kind, is_new)` for a model without a
        context, before Keras makes its function.

    Returns:
      A function `(original, model, force=False)` that sets
      `model.<kind>_function`, if there is none yet or `force`, and returns it.
    """
    name = f"{kind}_function"

    def make_function(
        original: Callable[..., Any], model: Any, force: bool = False
    ) -> Any:
        context = context_of(model)
        if context is None:
            if check_plain is not None:
                check_plain(model, kind, force or getattr(model, name) is None)
            return original(model, force)
        if force or getattr(model, name) is None:
            setattr(model, name, make(model, context))
        return getattr(model, name)

    make_function.__name__ = f"make_{name}"
    return make_function


def without_autotuning(dataset: Any) -> Any:
    """Returns a `tf.data.Dataset` whose iterators end at once.

    What a strategy has distributed stays as it is, and so does a dataset whose
    options say whether it autotunes. `tf.data.AUTOTUNE` is then what it starts
    with: 16 calls at a time, or as many as there are cores if these are fewer.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    with warnings.catch_warnings():
        # While a function is traced TensorFlow warns that options may differ.
        warnings.filterwarnings("ignore", "To make it possible to preserve")
        is_set = dataset.options().autotune.enabled is not None
    if is_set:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
