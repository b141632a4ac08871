"""One step of a model on its mesh, from host batch to host results.

Keras runs the training loop and the callbacks, and creates the logs. This
package replaces only the function of one step (`step_function_maker`).
`MeshStep` shards a host batch along the batch axis of the mesh, runs the
model's own `train_step` on the mesh, and returns the logs to the host.

`without_autotuning` avoids a delay at the end of a `tf.data` iterator.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import strategies, user_warnings
from tf_layoutmap.layout.mesh import atomic_step, errors, tracing, transfer
from tf_layoutmap.layout.ops import random_state
from tf_layoutmap.layout.processes.checks import ProcessChecks
from tf_layoutmap.layout.replication import empty_tensors
from tf_layoutmap.layout.replication.retrace import RetracedFunction


class MeshStep:
    """Base class for a callable that runs one step, in Keras 3 and tf_keras.

    Subclasses implement how the weights of a model are created before the first
    step.
    """

    # Whether AutoGraph converts the Python code of the step.
    autograph = False

    def __init__(self, model: Any, context: Any, kind: str):
        """Initializes the step; nothing is traced before the first call.

        Args:
          model: Model of Keras 3 or tf_keras.
          context: `MeshContext` of the model.
          kind: Step of the model: `"train"`, `"test"` or `"predict"`.
        """
        self.model = model
        self.context = context
        self.kind = kind
        self.checks = ProcessChecks(
            model, context.mesh, context.batch_dim, kind
        )
        self.model_step = getattr(model, f"{kind}_step")
        self._is_prepared = False
        self._is_traced = model.run_eagerly
        self.random_state = random_state.StepRandomState(context.mesh)
        self._trace_ids = random_state.TraceIds()
        self._trace_id = 1
        # DTensor requires static shapes, so a smaller last batch is traced
        # separately.
        self._run: Any = (
            self._run_or_trace
            if model.run_eagerly
            else RetracedFunction(
                lambda: tf.function(
                    self._run_or_trace, autograph=self.autograph
                ),
                model,
                kind,
                context,
            )
        )

    def prepare(self, batch: Any) -> None:
        """Creates all variables of a step before the first trace.

        If a trace created a variable, every later trace would initialize it
        again.
        """
        raise NotImplementedError

    def map_structure(
        self, function: Callable[[Any], Any], structure: Any
    ) -> Any:
        """Applies `function` to each tensor of a nested structure."""
        return tf.nest.map_structure(function, structure)

    def with_host_results(self, batch: Any) -> Any:
        """Adds the results of layers that run on the host to a batch."""
        return batch

    def run(self, batch: Any) -> Any:
        """Runs the step of the model on a batch that is on the mesh.

        Args:
          batch: Result of `with_host_results`, on the mesh.
        """
        return self.model_step(batch)

    def finish(self, outputs: Any) -> Any:
        """Returns the results of the model's step; ends the step on the host.

        Args:
          outputs: Results of `run`, on the host.
        """
        return outputs

    def num_variables(self) -> int:
        """Returns how many variables the model has, if traces draw seeds."""
        return 0

    def use_data(self, data: Any) -> None:
        """Sets the iterator or the batch that Keras passes to this step."""
        self._trace_id = self._trace_ids.id_of(data)

    def _run_or_trace(self, batch: Any, trace_id: int) -> Any:
        mesh = self.context.mesh
        with (
            atomic_step.full_step(mesh)
            if self.kind == "train"
            else contextlib.nullcontext(),
            contextlib.nullcontext()
            if tf.executing_eagerly()
            else self.random_state.tracing(trace_id),
        ):
            return self.run(batch)

    def _trace_first(self, batch: Any, num_before: int) -> None:
        """Draws the seeds of the traces with which one device begins.

        If the first trace creates variables, TensorFlow traces the function
        again on one device, and runs only the second trace.
        """
        num_before_trace = self.num_variables()
        self._run.trace(batch, self._trace_id)
        created = max(num_before_trace, self.num_variables()) > num_before
        if created and self.random_state.draws_seeds(self._trace_id):
            self.random_state.discard(self._trace_id)
            self._run.discard_traces()

    def __call__(self, batch: Any) -> Any:
        """Runs the step for a host batch; returns its results on the host."""
        strategies.check_no_replicas(f"model {self.model.name!r} on a mesh")
        mesh, batch_dim = self.context.mesh, self.context.batch_dim
        is_first = not self._is_prepared
        num_before = 0 if self._is_traced else self.num_variables()
        if is_first:
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
                run = self._run
                if empty_tensors.is_called_with_empty_tensor(batch):
                    run = self._run_or_trace
                elif not self._is_traced:
                    self._is_traced = True
                    self._trace_first(batch, num_before)
                # A step without random numbers needs only one trace.
                if not self.random_state.is_used:
                    self._trace_id = 1
                outputs = run(batch, self._trace_id)
            # If the step failed, reading the results raises the error.
            outputs = self.map_structure(transfer.to_host_tensor, outputs)
        return self.finish(outputs)

    def _warn_of_settings(self, batch: Any) -> None:
        """Warns once about settings that have no effect on a mesh."""
        warned = vars(self.model).setdefault("_mesh_warned", set())
        for what, sentence in (
            ("jit_compile", _warning_of_xla(self.model)),
            ("batch", self._warning_of_batch(batch)),
        ):
            if sentence is not None and what not in warned:
                warned.add(what)
                user_warnings.warn(sentence, errors.LayoutMapWarning)

    def _warning_of_batch(self, batch: Any) -> str | None:
        """Returns a warning if the batch axis does not divide the batch size.

        Only the first batch is checked, because the last batch of an epoch may
        be smaller.
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
            f"Mesh axis {batch_dim!r} shards batches over {count} devices only "
            f"if their size is a multiple of {count}. Received: batches of "
            f"{uneven} samples for model {self.model.name!r}, which every "
            f"device computes in full. Use a batch size of "
            f"{-(-uneven // count) * count}."
        )

    def _graph(self, batch: Any) -> Any:
        """Returns the graph that ran for `batch`; None in eager mode."""
        return (
            None
            if self.model.run_eagerly
            else self._run.graph(batch, self._trace_id)
        )


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
    """Returns a replacement for `make_<kind>_function` of a Keras model.

    Args:
      kind: `"train"`, `"test"` or `"predict"`.
      context_of: Function that returns the `MeshContext` of a model, or None.
      make: Function that creates the step function for a model and its
        context.
      check_plain: Function that is called as `(model, kind, is_new)` for a
        model without a context, before Keras creates its step function.

    Returns:
      A function `(original, model, force=False)` that sets and returns
      `model.<kind>_function`. An existing function is replaced only if `force`
      is true.
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
    """Returns `dataset` with autotuning disabled, so iterators end promptly.

    With autotuning, the deletion of a `tf.data` iterator waits for its
    autotuning thread in about one of twenty runs. The wait is as long as the
    time for which the iterator was in use, but at most one minute. The cause is
    a race in TensorFlow 2.21: the thread is woken before the thread's
    cancellation is visible. If the process belongs to a cluster, all requests
    of the coordinator also wait.

    Distributed datasets, and datasets whose options set `autotune.enabled`, are
    returned unchanged. Without autotuning, `tf.data.AUTOTUNE` always means its
    initial value: the number of cores, or 16 parallel calls if there are more
    cores.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    with warnings.catch_warnings():
        # During tracing, TensorFlow warns that the options may differ.
        warnings.filterwarnings("ignore", "To make it possible to preserve")
        is_set = dataset.options().autotune.enabled is not None
    if is_set:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
