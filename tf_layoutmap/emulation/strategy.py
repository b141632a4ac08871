"""A TPUStrategy in which each core is a logical CPU.

The strategy is a subclass of tf.distribute.TPUStrategy, because user programs
and TensorFlow's TPUEmbedding check the type. Variables are mirrored over
devices as in a MirroredStrategy. The programs of all cores are traced one after
the other into the caller's function, and TensorFlow runs these programs in
parallel.

The strategy also applies a rule of the TPU compiler: inside `strategy.run`, all
calls of `enqueue`, `dequeue` and `apply_gradients` with the same name form one
step. If a step contains `apply_gradients`, it is a training step. Otherwise the
step only looks up rows. The argument `training` of `enqueue` has no effect in a
step with a name. In the graph, an op selects the mode from two constants. The
strategy, like the compiler, replaces this op by the correct constant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
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
    """Names of the ops that have the same step name on one core.

    The object holds the names of ops instead of the ops, because a reference to
    an op keeps the op's graph in memory.

    Attributes:
      ops: `{"enqueue", "dequeue" or "apply_gradients": name of the op}`.
      choice: Name of the op that selects the mode of `enqueue`, or None.
    """

    ops: dict[str, str] = dataclasses.field(default_factory=dict)
    choice: str | None = None


# Maps each graph to its steps, by core and step name. If a function calls
# `strategy.run` several times, these calls may contain ops of the same step,
# because the TPU compiler compiles them as one program.
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def correct_step_modes(graph: tf.Graph, core: int, new: Iterable[tf.Operation]):
    """Sets the mode of each named step, according to the ops added so far.

    Args:
      graph: Graph that `strategy.run` traces into.
      core: Index of the core.
      new: Operations that the program of the core has added.

    Raises:
      RuntimeError: If two operations of the same kind have the same step name.
        The TPU compiler does not support repeated names either.
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
            f"A name must belong to one `{call}` in a TPU program, because "
            "the compiler pairs calls by name. Received: a second "
            f"`{call}` with name={_name_of(op)!r}."
        )
    step.ops[call] = op.name
    mode = op.inputs[-1].op if call == "enqueue" else None
    if mode is not None and mode.type == "SelectV2":
        step.choice = mode.name


# Inside `strategy.run`, inputs of TensorFlow's TPUEmbedding must be arguments
# of the function. TPUEmbedding recognizes the arguments by this attribute.
_INPUT_MARK = "_tpu_input_identity"

# Attribute of the ops that `TPUEmbeddingV2` pipelines. The value of ops that
# are not pipelined ends with `_SEQUENTIAL`.
_PIPELINING_ATTR = "_embedding_pipelining"
_SEQUENTIAL = "_sequential"
# With this flag of TensorFlow, ops are not pipelined.
_NO_PIPELINING_FLAG = "--tf_xla_disable_full_embedding_pipelining=true"
# Attribute with which the kernels identify the table of a pipelined op.
_TABLE_ATTR = "_layout_map_table"

# Types of the ops of a step that use the embedding engine or the SparseCores.
STEP_OPS = (
    "EnqueueTPUEmbeddingArbitraryTensorBatch",
    "DynamicEnqueueTPUEmbeddingArbitraryTensorBatch",
    "RecvTPUEmbeddingActivations",
    "SendTPUEmbeddingGradients",
    "XlaSparseDenseMatmulWithStaticBufferSize",
    *(
        f"XlaSparseDenseMatmulGradWith{optimizer}AndStaticBufferSize"
        for optimizer in ("Sgd", "Adagrad", "AdagradMomentum", "Adam", "Ftrl")
    ),
)

# Types of TPU ops, and of ops that may contain TPU ops.
_USES_THE_TPU = frozenset(
    {
        *STEP_OPS,
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

    Outside `strategy.run`, the function returns None.
    """
    return getattr(_running, "graph", None)


class EmulatedTPUStrategy(tf.distribute.TPUStrategy):
    """The strategy of `tlm.emulation.enable`, with emulated TPU cores.

    Outside a `tf.function`, the method `run` converts its argument `fn` to a
    `tf.function`, as on a TPU.
    """

    # The class MirroredExtended reads this attribute.
    _collective_key_base = 0

    def __init__(self, devices: Devices, sparse_cores_per_chip: int = 0):
        """Creates a strategy. The logical CPUs of `devices` must exist.

        Args:
          devices: The devices of all cores and hosts.
          sparse_cores_per_chip: Number of SparseCores of each core, which then
            represents a chip. 0 for a TPU with an embedding engine.
        """
        # `TPUStrategy.__init__` is not called, because it requires a TPU.
        tf.distribute.Strategy.__init__(
            self, _Extended(self, devices, sparse_cores_per_chip)
        )
        self._functions = weakref.WeakKeyDictionary()
        # The `turn` variables make a core run its programs one after the other.
        # TensorFlow orders only ops that use the same resource, and TPU ops do
        # not use a resource. Without the variables, a `dequeue` after a loop
        # could dequeue a batch that belongs to the loop.
        self._turns = []
        for core in devices.cores:
            with tf.device(core):
                self._turns.append(
                    tf_private.ResourceVariable(
                        0, dtype=tf.int64, trainable=False, name="turn"
                    )
                )

    def run(
        self,
        fn: Callable[..., object],
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once for each core; see `tf.distribute.TPUStrategy.run`.

        Args:
          fn: Function that each core runs.
          args: Positional arguments of `fn`. A per-replica value passes a
            separate value to each core.
          kwargs: Keyword arguments of `fn`.
          options: A `tf.distribute.RunOptions`. The options have no effect,
            because shapes are dynamic on CPUs, and XLA is not used.

        Returns:
          The return value of `fn` on each replica.

        Raises:
          RuntimeError: If the calling function has `jit_compile=True`.
        """
        if not tf.executing_eagerly():
            return self._run_in_graph(fn, args, kwargs)
        function = self._functions.get(fn)
        if function is None:
            # The reference is weak, so that the cached function does not keep
            # its cache key `fn` in memory.
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
                "`strategy.run` of an emulated TPU is not supported inside a "
                "tf.function with jit_compile=True: its cores are several "
                "CPUs, and XLA compiles for one device. Leave jit_compile "
                "out, also in Keras' `compile`; a real TPU always compiles "
                "the program."
            )

        # The state belongs to a thread, and replicas have separate threads.
        pipelining = tf_private.embedding_pipelining_state
        is_pipelined = pipelining.enabled

        def core(*args, **kwargs):
            pipelining.enabled = is_pipelined
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
            # Ops of other cores are excluded. If replicas wait for each other,
            # the programs of other replicas are traced before `fn` returns, and
            # their ops are in the same graph.
            others = {
                device
                for device in self.extended.worker_devices
                if device != self.extended.worker_devices[number]
            }
            new = [
                op
                for op in graph.get_operations()[num_ops:]
                if op.device not in others
            ]
            uses = [op for op in new if op.type in _USES_THE_TPU]
            for op in uses:
                _prepare_pipelining(op)
            correct_step_modes(graph, number, new)
            with tf.control_dependencies(uses):
                turn.assign_add(1, read_value=False)
            return result

        return tf.distribute.Strategy.run(self, core, args, kwargs)

    @property
    def cluster_resolver(self):
        """None, because there is no cluster."""
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


def _prepare_pipelining(op: tf.Operation) -> None:
    """Adds the name of the table to an op whose updates are one step late.

    The kernels of the emulation use the name to save the tables of earlier
    iterations of a loop.
    """
    try:
        mode = tf.compat.as_str(op.get_attr(_PIPELINING_ATTR))
    except ValueError:
        return
    if op.type not in STEP_OPS or mode.endswith(_SEQUENTIAL):
        return
    if _NO_PIPELINING_FLAG in os.environ.get("TF_XLA_FLAGS", ""):
        # The TPU compiler then runs the ops one after the other.
        _set_string(op, _PIPELINING_ATTR, mode + _SEQUENTIAL)
        return
    names = [argument.name for argument in op.op_def.input_arg]
    read = op.inputs[names.index("embedding_table")].op
    while read.type == "Identity":
        read = read.inputs[0].op
    if read.type != "ReadVariableOp":
        raise NotImplementedError(
            "With `pipeline_execution_with_tensor_core=True`, the emulation "
            "supports only tables that are variables. Received: a table that "
            f"is the output of {read.type} ({read.name})."
        )
    _set_string(op, _TABLE_ATTR, read.inputs[0].name)


def _set_string(op: tf.Operation, name: str, value: str) -> None:
    attribute = tf.compat.v1.AttrValue(s=tf.compat.as_bytes(value))
    op._set_attr(name, attribute)


def _mark_input(value: Any) -> Any:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return tf.nest.map_structure(_mark_input, value, expand_composites=True)
    if not isinstance(value, tf.Tensor):
        return value
    marked = tf.identity(value)
    marked.op._set_attr(_INPUT_MARK, tf.compat.v1.AttrValue(b=True))
    return marked


class _Extended(tf_private.MirroredExtended):
    """Implementation of the strategy, with variables mirrored over cores."""

    def __init__(
        self,
        strategy: EmulatedTPUStrategy,
        devices: Devices,
        sparse_cores_per_chip: int,
    ):
        # ReductionToOneDevice is used because it sums in the order of replicas,
        # so that repeated runs are bitwise identical.
        super().__init__(
            strategy,
            devices=list(devices.cores),
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        self._devices_of_tpu = devices
        self.sparse_cores_per_chip = sparse_cores_per_chip
        # Read by `TPUEmbeddingV2`. A replica has one device.
        self._tpu_devices = np.array([[core] for core in devices.cores])

    @property
    def num_hosts(self) -> int:
        return len(self._devices_of_tpu.hosts)

    @property
    def num_replicas_per_host(self) -> int:
        return self._devices_of_tpu.num_cores_per_host

    def tpu_name_of(self, device: str) -> str:
        """Returns the TPU device name of a core."""
        return self._devices_of_tpu.tpu_name_of(device)

    @property
    def tpu_hardware_feature(self):
        """Whether a chip has an embedding engine (1) or SparseCores (2)."""
        # HardwareFeature expects a proto, and reads only these two fields.
        return tf.tpu.experimental.HardwareFeature(
            types.SimpleNamespace(
                embedding_feature=2 if self.sparse_cores_per_chip else 1,
                num_embedding_devices_per_chip=self.sparse_cores_per_chip,
            )
        )

    def _reduce_to(self, reduce_op, value, destinations, options):
        # To build a model, Keras' `fit` calls `strategy.reduce` with the first
        # batch. A batch is a structure of distributed values, and not itself a
        # distributed value. As in a TPUStrategy, the batch is returned
        # unchanged. A MirroredStrategy would convert the ids to floats, and
        # would raise an error for ragged ids.
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
        dataset = super()._distribute_datasets_from_function(
            dataset_fn, options
        )
        if options is None or options.experimental_fetch_to_device:
            self._check_spec(dataset.element_spec)
        return dataset

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs):
        # Shards of tables are not mirrored, because each shard exists only on
        # its host.
        if kwargs.pop("skip_mirrored_creator", False):
            return next_creator(**kwargs)
        return super()._create_variable(next_creator, **kwargs)
