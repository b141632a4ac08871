"""A TPUStrategy whose cores are logical CPUs.

`isinstance(strategy, tf.distribute.TPUStrategy)` holds, which is what programs
and TensorFlow's TPUEmbedding ask. Beneath, it mirrors over devices as
MirroredStrategy does: the program of each core is traced into the caller's
function, one after the other, and TensorFlow runs them side by side.
"""

# DOC-MERGE: What a TPU's compiler does to steps that have a name.
#
# `enqueue`, `dequeue` and `apply_gradients` of one name inside `strategy.run`
# are one step. If it has no `apply_gradients`, the compiler makes it look up
# only, and else train, whatever `training` says: it takes the one or the other
# constant in place of the choice between them.
#
from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.emulation.devices import Devices

_NAME_ATTR = "_tpu_embedding_layer"
_CALLS = {
    "EnqueueTPUEmbeddingArbitraryTensorBatch": "enqueue",
    "RecvTPUEmbeddingActivations": "dequeue",
    "SendTPUEmbeddingGradients": "apply_gradients",
}


@dataclasses.dataclass
class _Step:
    """The operations of one name on one core; by name, as they hold a graph.

    Attributes:
      ops: From what made it to an operation.
      choice: Which mode to enqueue with.
    """

    ops: dict[str, str] = dataclasses.field(default_factory=dict)
    choice: str | None = None


# By graph, then by core and name. A step may be spread over several calls of
# `strategy.run` in one function, which are one program to the compiler.
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def correct_step_modes(graph: tf.Graph, core: int, new: Iterable[tf.Operation]):
    """Takes the mode that each named step has by now.

    Args:
      graph: The one that `strategy.run` traces into.
      core: Its number.
      new: The operations that the core's program has added.

    Raises:
      RuntimeError: If there are two operations of a kind under one name,
        which the compiler refuses.
    """
    by_name = _steps.setdefault(graph, {})
    for op in new:
        if op.type in _CALLS and _name_of(op) is not None:
            step = by_name.setdefault((core, _name_of(op)), _Step())
            _add(step, op, _CALLS[op.type])
    for step in by_name.values():
        if step.choice is not None and "dequeue" in step.ops:
            choice = graph.get_operation_by_name(step.choice)
            enqueue = graph.get_operation_by_name(step.ops["enqueue"])
            tf_private.replace_op_input(
                enqueue,
                len(enqueue.inputs) - 1,
                choice.inputs[1 if "apply_gradients" in step.ops else 2],
            )


def _name_of(op: tf.Operation) -> str | None:
    try:
        return tf.compat.as_str(op.get_attr(_NAME_ATTR))
    except ValueError:
        return None


def _add(step: _Step, op: tf.Operation, call: str):
    if call in step.ops:
        raise RuntimeError(
            f"A name must belong to one `{call}` in a program for a TPU: its "
            "compiler pairs calls by it. Received: a second one with "
            f"name={_name_of(op)!r}."
        )
    step.ops[call] = op.name
    mode = op.inputs[-1].op if call == "enqueue" else None
    if mode is not None and mode.type == "SelectV2":
        step.choice = mode.name


# TensorFlow's TPUEmbedding takes inputs inside `strategy.run` only from its
# arguments, and knows them by this mark.
_INPUT_MARK = "_tpu_input_identity"

# Ops of the TPU, and those that may hold some.
_USES_THE_TPU = frozenset(
    {
        "EnqueueTPUEmbeddingArbitraryTensorBatch",
        "DynamicEnqueueTPUEmbeddingArbitraryTensorBatch",
        "RecvTPUEmbeddingActivations",
        "SendTPUEmbeddingGradients",
        "If",
        "While",
        "Case",
        "PartitionedCall",
        "StatefulPartitionedCall",
    }
)

_running = threading.local()


def graph_of_core() -> Any:
    """Returns the graph in which `strategy.run` calls its function.

    None outside of it.
    """
    return getattr(_running, "graph", None)


class EmulatedTPUStrategy(tf.distribute.TPUStrategy):
    """What `tlm.emulation.enable` returns; used as any TPUStrategy.

    Outside of a `tf.function`, `run` makes one of the function it is given,
    as on a TPU.
    """

    # MirroredExtended asks for it.
    _collective_key_base = 0

    def __init__(self, devices: Devices):
        """Spreads over the cores of `devices`, which must exist."""
        # Not TPUStrategy's own: that one looks for a TPU.
        tf.distribute.Strategy.__init__(self, _Extended(self, devices))
        self._functions = weakref.WeakKeyDictionary()
        # A core runs one program after the other. TensorFlow orders the ops
        # of one resource, and the ops of the TPU have none: without these, the
        # `dequeue` behind a loop could take a batch that belongs into it.
        self._turns = []
        for core in devices.cores:
            with tf.device(core):
                self._turns.append(
                    tf_private.ResourceVariable(
                        0, dtype=tf.int64, trainable=False, name="turn"
                    )
                )

    def run(self, fn, args=(), kwargs=None, options=None):
        """Calls `fn` once for each core; see `tf.distribute.TPUStrategy.run`.

        Args:
          fn: What a core computes.
          args: Its arguments; a per-replica value gives each core its own.
          kwargs: The same by keyword.
          options: A `tf.distribute.RunOptions`. Shapes are dynamic on CPUs,
            so what it says about them and about XLA does not matter here.

        Returns:
          What `fn` returned, by replica.

        Raises:
          RuntimeError: If the caller is compiled by `jit_compile=True`.
        """
        if not tf.executing_eagerly():
            return self._run_in_graph(fn, args, kwargs)
        function = self._functions.get(fn)
        if function is None:
            # Weakly: the function that is made must not keep its key alive.
            fn_ref = weakref.ref(fn)

            @tf.function
            def in_graph(args, kwargs):
                return self._run_in_graph(fn_ref(), args, kwargs)

            self._functions[fn] = function = in_graph
        return function(args, kwargs)

    def _run_in_graph(self, fn, args, kwargs):
        graph = tf.compat.v1.get_default_graph()
        if tf_private.is_xla_graph(graph):
            raise RuntimeError(
                "`strategy.run` of an emulated TPU cannot be inside of a "
                "tf.function with jit_compile=True: its cores are several "
                "CPUs, and XLA compiles for one. Leave jit_compile out, also "
                "of Keras' `compile`; a TPU compiles the program anyway."
            )

        def core(*args, **kwargs):
            context = tf.distribute.get_replica_context()
            number = int(tf.get_static_value(context.replica_id_in_sync_group))
            turn = self._turns[number]
            num_ops = len(graph.get_operations())
            begin = turn.assign_add(1, read_value=False)
            with _core_of(graph), tf.control_dependencies([begin]):
                args, kwargs = tf.nest.map_structure(
                    _mark_input, (args, kwargs)
                )
                result = fn(*args, **kwargs)
            # Where replicas wait for each other, one is traced amid another.
            others = {
                one
                for one in self.extended.worker_devices
                if one != self.extended.worker_devices[number]
            }
            new = [
                op
                for op in graph.get_operations()[num_ops:]
                if op.device not in others
            ]
            uses = [op for op in new if op.type in _USES_THE_TPU]
            correct_step_modes(graph, number, new)
            with tf.control_dependencies(uses):
                turn.assign_add(1, read_value=False)
            return result

        return tf.distribute.Strategy.run(self, core, args, kwargs)

    @property
    def cluster_resolver(self):
        """None: there is no cluster."""
        return None

    def __repr__(self) -> str:
        return (
            f"<EmulatedTPUStrategy of {self.num_replicas_in_sync} cores "
            f"on {self.extended.num_hosts} hosts>"
        )


@contextlib.contextmanager
def _core_of(graph):
    outer = graph_of_core()
    _running.graph = graph
    try:
        yield
    finally:
        _running.graph = outer


def _mark_input(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.nest.map_structure(_mark_input, value, expand_composites=True)
    if not isinstance(value, tf.Tensor):
        return value
    marked = tf.identity(value)
    marked.op._set_attr(_INPUT_MARK, tf.compat.v1.AttrValue(b=True))
    return marked


class _Extended(tf_private.MirroredExtended):
    """Mirrors over the cores and knows the hosts."""

    def __init__(self, strategy: EmulatedTPUStrategy, devices: Devices):
        # Sums in the order of replicas, so that runs repeat to the bit.
        super().__init__(
            strategy,
            devices=list(devices.cores),
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self._devices_of_tpu = devices

    @property
    def num_hosts(self) -> int:
        return len(self._devices_of_tpu.hosts)

    @property
    def num_replicas_per_host(self) -> int:
        return self._devices_of_tpu.num_cores_per_host

    def tpu_name_of(self, device: str) -> str:
        """The name of a core as programs for a TPU have it."""
        return self._devices_of_tpu.tpu_name_of(device)

    @property
    def tpu_hardware_feature(self):
        """A chip with the engine of TPUEmbedding, not a SparseCore."""
        # In place of a proto, of which it reads these two.
        return tf.tpu.experimental.HardwareFeature(
            types.SimpleNamespace(
                embedding_feature=1, num_embedding_devices_per_chip=0
            )
        )

    def _reduce_to(self, reduce_op, value, destinations, options):
        # A structure of distributed values is none itself. Keras' `fit` asks
        # for the mean of a batch and gets it back from a TPUStrategy; a
        # MirroredStrategy makes floats of its ids and fails for ragged ones.
        if not isinstance(value, tf.distribute.DistributedValues):
            return tf_private.reduce_non_distributed_value(
                reduce_op, value, destinations, self._num_replicas_in_sync
            )
        return super()._reduce_to(reduce_op, value, destinations, options)

    _check_spec = tf_private.check_tpu_dataset_spec

    def _experimental_distribute_dataset(self, dataset, options):
        if options is None or options.experimental_fetch_to_device:
            self._check_spec(dataset.element_spec)
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        made = super()._distribute_datasets_from_function(dataset_fn, options)
        if options is None or options.experimental_fetch_to_device:
            self._check_spec(made.element_spec)
        return made

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs):
        # A shard of a table lives on its host alone.
        if kwargs.pop("skip_mirrored_creator", False):
            return next_creator(**kwargs)
        return super()._create_variable(next_creator, **kwargs)
