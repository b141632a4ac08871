"""The one module that imports TensorFlow's private names.

Each name stands below with the reason we need it. All are looked up when this
module is imported, so that a TensorFlow that moved one is refused here, with
the remedy, and not in the middle of a training run. To add one: a line, a why.
"""

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import requirements
from tf_layoutmap._core.private_names import PrivateNames

SUPPORTED_VERSION = requirements.TENSORFLOW

_PACKAGE: dict[str, Any] = dict(
    title="TensorFlow", version=tf.__version__, supported=SUPPORTED_VERSION
)
_private = PrivateNames(root="tensorflow.python", **_PACKAGE).find
_DTENSOR = PrivateNames(root="tensorflow.dtensor.python", **_PACKAGE)

# A ShardedVariable passes through tf.function as several handles.
CompositeTensor = _private("framework.composite_tensor", "CompositeTensor")

# tape.gradient(y, sharded): which handles to differentiate by, and how their
# gradients become one.
CompositeTensorGradient = _private(
    "framework.composite_tensor_gradient", "CompositeTensorGradient"
)

# Whether tf.saved_model.save is tracing: exported graphs see one variable.
in_save_context = _private("saved_model.save_context", "in_save_context")

# Whether a thread of TensorFlow's is saving, while the program goes on.
in_async_save = _private(
    "checkpoint.checkpoint_context", "in_async_metrics_context"
)

# Whether a graph will be compiled by XLA, which has no kernels for our ops.
is_xla_graph = _private("ops.control_flow_util", "GraphOrParentsInXlaContext")

# Tells tapes that an op of ours reads a variable; TensorFlow's own reads do so
# themselves.
variable_accessed = _private("eager.tape", "variable_accessed")

# Whether a tape records what is computed from a tensor: so a layer knows that
# gradients may be asked for, whatever it was told.
could_possibly_record = _private("eager.record", "could_possibly_record")
should_record_backprop = _private("eager.record", "should_record_backprop")

# How the tangents of an op's inputs become those of its outputs. Without an
# entry TensorFlow transposes the gradient, which must not be a
# tf.IndexedSlices then.
forward_mode_of_ops = _private("eager.forwardprop", "_SPECIAL_CASES")

# Makes AutoGraph call a function without converting it, and convert what that
# calls: its public name, `do_not_convert`, switches AutoGraph off for both.
called_as_written = _private("autograph.impl.api", "autograph_artifact")

# Lets functions run several of our reads of one variable at the same time.
register_read_only_op = _private(
    "framework.auto_control_deps_utils", "register_read_only_resource_op"
)

# The object that tf.train.Checkpoint and tf.saved_model walk over.
Trackable = _private("trackable.base", "Trackable")

# The key under which a checkpoint holds the value of a variable, so that our
# files and those of tf.Variable are the same.
VARIABLE_VALUE_KEY = _private("trackable.constants", "VARIABLE_VALUE_KEY")

# Reads and restores a part of a table as a slice of one logical tensor.
SaveableObject = _private("training.saving.saveable_object", "SaveableObject")
SaveSpec = _private("training.saving.saveable_object", "SaveSpec")

# Where all checkpoints are written and read, whatever device is to do it.
TrackableSaver = _private("checkpoint.checkpoint", "TrackableSaver")

# What `RestoreV2` can read a part of, in TensorFlow 2.21.
SLICEABLE_DTYPES = (
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.bool,
    tf.complex64,
    tf.complex128,
    tf.qint8,
    tf.quint8,
    tf.qint32,
)

# What `table.ref()` gives: a key for dictionaries, as of tf.Variable.
Reference = _private("util.object_identity", "Reference")

# TensorFlow's own class, to convert from and to; the public name is internal.
TensorFlowShardedVariable = _private(
    "distribute.sharded_variable", "ShardedVariable"
)

# The full-size variable of an exported graph: a shape, never any memory.
UninitializedVariable = _private(
    "ops.resource_variable_ops", "UninitializedVariable"
)

# Where the handle of a variable is made, with a name for messages.
gen_resource_variable_ops = _private("ops", "gen_resource_variable_ops")
_DTENSOR.check_method(gen_resource_variable_ops, "var_handle_op", "debug_name")
for _name in ("assign_add_variable_op", "assign_sub_variable_op"):
    _DTENSOR.check_method(
        gen_resource_variable_ops, _name, "resource", "value", "name"
    )

# The hash of a SavedModel's files, which changes when values are added.
write_fingerprint = _private(
    "saved_model.fingerprinting_utils", "write_fingerprint"
)

# What tf.function keeps of a shard that is passed as an argument.
VariableSpec = _private("ops.resource_variable_ops", "VariableSpec")

# A variable that no strategy replaces: `tf.Variable` under MirroredStrategy
# is mirrored, and the tables of an embedding are one copy on the host.
ResourceVariable = _private("ops.resource_variable_ops", "ResourceVariable")

# The methods that write to one; on a mesh each device would.
for _name in ("assign", "assign_add", "assign_sub"):
    _private("ops.resource_variable_ops", f"ResourceVariable.{_name}")

# The creators of `tf.variable_creator_scope`: the user's are asked for a table;
# those of these modules, a strategy's or a function's, are left out.
variable_creators_of = _private(
    "framework.ops", "Graph._variable_creator_stack"
).fget
_private("distribute.distribute_lib", "StrategyExtendedV2._scope")
# What `tf.function` returns.
Function = _private(
    "eager.polymorphic_function.polymorphic_function", "Function"
)
_private("eager.polymorphic_function.polymorphic_function", "Function._clone")
OWN_CREATORS = ("tensorflow.python.distribute", "tensorflow.python.eager")

# All ops of this process, TensorFlow's and those of loaded libraries.
_all_ops = _private("client.pywrap_tf_session", "TF_GetAllOpList")
_buffer_of = _private("client.pywrap_tf_session", "TF_GetBuffer")
_OpList = importlib.import_module("tensorflow.core.framework.op_def_pb2").OpList


def registered_ops() -> Any:
    """Returns the definitions of all ops (`OpDef`)."""
    return _OpList.FromString(_buffer_of(_all_ops())).op


# Whether an op is registered, before tf.dtensor is told anything about it.
op_def_of = _private("framework.op_def_registry", "get")

# What the emulated TPUStrategy is made of: replicas on logical CPUs.
MirroredExtended = _private("distribute.mirrored_strategy", "MirroredExtended")
# What a TPUStrategy does and a MirroredStrategy does not: it gives back what
# it cannot reduce, and refuses ragged and sparse inputs on a TPU.
reduce_non_distributed_value = _private(
    "distribute.cross_device_ops", "reduce_non_distributed_value"
)
check_tpu_dataset_spec = _private(
    "distribute.tpu_strategy", "TPUExtended._check_spec"
)

# Whether a real TPU's kernels are there, before ours are loaded.
registered_kernels_of = _private(
    "framework.kernels", "get_registered_kernels_for_op"
)

# Base of the TPU optimizers: protobuf 7.34 refuses what it writes, and no
# public class has the one method that all of them go through.
TPUOptimizer = _private("tpu.tpu_embedding_v2_utils", "_Optimizer")

# The host of a TPU core. The module, so that an emulation can replace it.
device_util = _private("distribute", "device_util")
_private("distribute.device_util", "get_host_for_device")

# Whether code is traced as a TPU's program, and the way out of it to the host:
# the ids of an embedding are enqueued there.
tpu_replication = _private("tpu", "tpu_replication")
_private("tpu.tpu_replication", "TPUReplicateContext")
_private("tpu.tpu_replication", "outside_compilation")
control_flow_context_of = _private(
    "framework.ops", "Graph._get_control_flow_context"
)

# TPU embedding operations that belong together carry the same attribute, by
# which the TPU's compiler pairs them.
set_op_attr = _private("framework.ops", "Operation._set_attr")

# What that compiler does to a step's mode, an emulation does to the graph.
replace_op_input = _private("framework.ops", "Operation._update_input")

# Whether TensorFlow's own `dtensor.default_mesh` is the innermost device.
_context = _private("eager.context", "context")
_private("eager.context", "Context.device_name")


def current_device() -> str:
    """Returns the name of this thread's device, also while it traces."""
    return _context().device_name


# What `tf.custom_gradient` does while a graph is traced, and where it leaves
# the gradient: among all that are registered, which are never freed.
custom_gradient = _private("ops", "custom_gradient")
_DTENSOR.check_method(
    custom_gradient, "_graph_mode_decorator", "f", "args", "kwargs"
)
_GRADIENT_NAME = "_gradient_op_type"
if (
    _GRADIENT_NAME
    not in _private("framework.ops", "get_gradient_function").__code__.co_consts
):
    raise _DTENSOR.refusal(f"where operations have no `{_GRADIENT_NAME}`")
_gradients = _private("framework.ops", "gradient_registry")
_private("framework.registry", "Registry._registry")


def gradient_name_of(op: Any) -> str | None:
    """Returns the name of an operation's registered gradient; None without."""
    try:
        return tf.compat.as_str(op.get_attr(_GRADIENT_NAME))
    except ValueError:
        return None


def leave_gradient_to_graph(name: str, graph: Any) -> None:
    """Lets `graph` keep a registered gradient, alone.

    Not the operation, whose attributes Python's garbage collector does not
    see: the graph would never be freed.
    """
    entry = _gradients._registry.get(name)
    if entry is None:
        return
    gradient = _gradients.lookup(name)
    if not hasattr(graph, "_layoutmap_gradients"):
        graph._layoutmap_gradients = []
    graph._layoutmap_gradients.append(gradient)
    found: Any = weakref.ref(
        gradient, lambda _: _gradients._registry.pop(name, None)
    )

    def registered(op: Any, *gradients: Any) -> Any:
        return found()(op, *gradients)

    _gradients._registry[name] = {
        tag: registered if value is gradient else value
        for tag, value in entry.items()
    }


_private("framework.func_graph", "FuncGraph.external_captures")
_private("framework.func_graph", "FuncGraph.outer_graph")


def tensors_used_by(graph: Any) -> list[Any]:
    """Returns the eager tensors that a function's graph captures.

    Handles of variables are among them. Those of the graphs that it is in, and
    of those that it captures symbolic tensors of, are its own, too.
    """
    graphs, tensors = [graph], []
    for one in graphs:
        if not isinstance(one, FuncGraph):
            continue
        outside = [one.outer_graph]
        for tensor in one.external_captures:
            if tf.is_symbolic_tensor(tensor):
                outside.append(tensor.graph)
            else:
                tensors.append(tensor)
        graphs += [
            other
            for other in dict.fromkeys(outside)
            if not any(other is known for known in graphs)
        ]
    return tensors


# How the functions that this thread calls are optimized: for a mesh otherwise.
for _name in ("config", "function_call_options"):
    _private("eager.context", f"Context.{_name}")
_FunctionCallOptions = _private("eager.context", "FunctionCallOptions")


def function_call_options() -> Any:
    """Returns the options of this thread's calls of functions.

    TensorFlow makes another object of them when its configuration changes.
    """
    return _context().function_call_options


def set_function_call_options(options: Any) -> None:
    """Sets what `function_call_options` returns in this thread."""
    _context().function_call_options = options


def options_without_graph_optimizer(options: Any) -> Any:
    """Returns the same options, but with Grappler switched off."""
    config = type(_context().config).FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return _FunctionCallOptions(options.executor_type, config)


# How a ParameterServerStrategy divides variables: a shard is not divided again.
_PARTITIONER = "_variable_partitioner"
if (
    _PARTITIONER
    not in _private(
        "distribute.parameter_server_strategy_v2",
        "ParameterServerStrategyV2Extended._create_variable",
    ).__code__.co_names
):
    raise _DTENSOR.refusal(
        f"where `ParameterServerStrategyV2Extended.{_PARTITIONER}` is missing"
    )


def variable_partitioner_of(strategy: Any) -> Any:
    """Returns the partitioner of a parameter server strategy, or None."""
    return getattr(strategy.extended, _PARTITIONER, None)


# Tables divided among processes: strategies have no all-to-all. Processes meet
# by the collectives of their hosts, in the order that the token keeps.
all_to_all = _private("ops.collective_ops", "all_to_all_v2")
all_gather = _private("ops.collective_ops", "all_gather_v2")
for _name in ("_next_instance_key", "_get_ordering_token"):
    _private(
        "distribute.cross_device_utils", f"CollectiveReplicaLauncher.{_name}"
    )
_HOST_COLLECTIVES = "_host_cross_device_ops"
if (
    _HOST_COLLECTIVES
    not in _private(
        "distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._initialize_multi_worker",
    ).__code__.co_names
):
    raise _DTENSOR.refusal(
        f"where `CollectiveAllReduceExtended.{_HOST_COLLECTIVES}` is missing"
    )


def host_collectives_of(strategy: Any) -> Any:
    """Returns what launches the collectives of this process's host."""
    return getattr(strategy.extended, _HOST_COLLECTIVES)._launchers[0]


def device_of_collectives(launcher: Any) -> str:
    """Returns where collectives that this launches must be."""
    return launcher._device


def collective_arguments(launcher: Any) -> dict[str, Any]:
    """Returns the arguments of the next collective of a group."""
    return {
        "group_size": launcher._group_size,
        "group_key": launcher._group_key,
        "instance_key": launcher._next_instance_key(),
        "ordering_token": launcher._get_ordering_token(),
    }


# Classes whose methods remove functions and resources from all processes of a
# cluster; without an effect once one of them does not answer.
EagerContext = _private("eager.context", "Context")
_private("eager.context", "Context.remove_function")
EagerResourceDeleter = _private(
    "ops.resource_variable_ops", "EagerResourceDeleter"
)
CapturableResource = _private("trackable.resource", "CapturableResource")

# Waits until a closure has ended and raises its error; what it returned stays
# on its worker, which may be gone by then.
wait_for_closure = _private(
    "distribute.coordinator.values", "RemoteValueImpl._wait_and_maybe_error"
)


# A closure that a coordinator can cancel stops between two servers, and its
# iterator is cancelled with it, for good. One that is a Python function is not
# cancelled: `Cluster.schedule` takes it, the public method does not. Then it is
# traced here, with the type of an iterator that workers have not made yet.
_BEING_SCHEDULED, _CLUSTER = "_being_scheduled", "_cluster"
_QUEUE, _QUEUE_ERROR = "closure_queue", "_error"
_ITERATORS, _TYPE_SPEC, _DATASET_FUNCTION = (
    "_values",
    "_type_spec",
    "_dataset_fn",
)
_DTENSOR.check_method(
    _private("distribute.coordinator.cluster_coordinator", "Cluster"),
    "schedule",
    "function",
    "args",
    "kwargs",
)
for _module, _method, _name in (
    ("cluster_coordinator", "ClusterCoordinator.schedule", _BEING_SCHEDULED),
    ("cluster_coordinator", "ClusterCoordinator.schedule", _CLUSTER),
    ("cluster_coordinator", "Cluster.schedule", _QUEUE),
    (
        "cluster_coordinator",
        "_CoordinatedClosureQueue.mark_failed",
        _QUEUE_ERROR,
    ),
    ("values", "PerWorkerValues.__init__", _ITERATORS),
    ("values", "RemoteValueImpl.__init__", _TYPE_SPEC),
    (
        "values",
        "PerWorkerDatasetFromDatasetFunction.__init__",
        _DATASET_FUNCTION,
    ),
):
    if (
        _name
        not in _private(
            f"distribute.coordinator.{_module}", _method
        ).__code__.co_names
    ):
        raise _DTENSOR.refusal(f"where `{_method}` has no `{_name}`")


def trace_for_workers(
    coordinator: Any, function: Any, iterator: Any, *specs: Any
) -> Any:
    """Returns a concrete function of what each worker has of an iterator."""
    strategy = coordinator.strategy
    with strategy.scope():
        setattr(strategy.extended, _BEING_SCHEDULED, True)
        try:
            return function.get_concrete_function(
                getattr(getattr(iterator, _ITERATORS)[0], _TYPE_SPEC), *specs
            )
        finally:
            setattr(strategy.extended, _BEING_SCHEDULED, False)


def schedule_call(coordinator: Any, call: Any, args: tuple[Any, ...]) -> Any:
    """Schedules a Python function on a worker, which is never cancelled."""
    with coordinator.strategy.scope():
        return getattr(coordinator, _CLUSTER).schedule(call, args, {})


def has_failed_closure(coordinator: Any) -> bool:
    """Returns whether a closure has failed that `join` will raise."""
    queue = getattr(getattr(coordinator, _CLUSTER), _QUEUE)
    return getattr(queue, _QUEUE_ERROR) is not None


def dataset_function_of(dataset: Any) -> Any:
    """Returns the traced function that makes the dataset of a worker."""
    return getattr(dataset, _DATASET_FUNCTION)


@contextlib.contextmanager
def undivided_variables(strategy: Any) -> Iterator[None]:
    """Lets a parameter server strategy place variables as they are."""
    partitioner = variable_partitioner_of(strategy)
    if partitioner is None:
        yield
        return
    setattr(strategy.extended, _PARTITIONER, None)
    try:
        yield
    finally:
        setattr(strategy.extended, _PARTITIONER, partitioner)


# Short messages between the processes of a mesh: what each is about to do.
for _name in (
    "coordination_service",
    "set_config_key_value",
    "get_config_key_value",
    "delete_config_key_value",
    "report_error_to_cluster",
):
    _private("eager.context", f"Context.{_name}")


def has_coordination() -> bool:
    """Whether this process has joined a coordination service."""
    return _context().coordination_service is not None


def set_cluster_value(key: str, value: str) -> None:
    """Stores a value that all processes can read."""
    _context().set_config_key_value(key, value)


def cluster_value(key: str, timeout_seconds: float) -> str:
    """Returns a stored value; waits until it is there, or raises."""
    return _context().get_config_key_value(
        key, max(1, int(1000 * timeout_seconds))
    )


def delete_cluster_value(key: str) -> None:
    """Deletes a stored value."""
    _context().delete_config_key_value(key)


def abort_cluster(why: str) -> None:
    """Ends what other processes wait for in operations, for good."""
    _context().report_error_to_cluster(tf.errors.ABORTED, why)


# Where all of TensorFlow's Python makes an operation: on a mesh, those that
# DTensor gets wrong without an error are corrected there.
gen_array_ops = _private("ops", "gen_array_ops")
gen_linalg_ops = _private("ops", "gen_linalg_ops")
gen_nn_ops = _private("ops", "gen_nn_ops")
gen_random_ops = _private("ops", "gen_random_ops")
gen_stateless_random_ops_v2 = _private("ops", "gen_stateless_random_ops_v2")
_HOLDERS = (
    gen_array_ops,
    _private("ops", "array_ops"),
    gen_linalg_ops,
    gen_nn_ops,
)
for _module, _name, _arguments in (
    (gen_array_ops, "concat_v2", ("values", "axis")),
    (gen_array_ops, "_slice", ("input", "begin", "size")),
    (gen_array_ops, "strided_slice", ("input", "begin", "end", "strides")),
    (
        gen_array_ops,
        "strided_slice_grad",
        ("shape", "begin", "end", "strides", "dy"),
    ),
    (
        gen_array_ops,
        "tensor_strided_slice_update",
        ("input", "begin", "end", "strides", "value"),
    ),
    (gen_linalg_ops, "einsum", ("inputs", "equation")),
    (gen_nn_ops, "bias_add", ("value", "bias", "data_format")),
    (
        gen_nn_ops,
        "sparse_softmax_cross_entropy_with_logits",
        ("features", "labels"),
    ),
    *(
        (gen_random_ops, _name, ("seed", "seed2"))
        for _name in (
            "random_standard_normal",
            "truncated_normal",
            "random_uniform",
            "random_uniform_int",
            "random_gamma",
            "random_poisson_v2",
            "multinomial",
            "random_shuffle",
            "parameterized_truncated_normal",
        )
    ),
    *(
        (gen_stateless_random_ops_v2, _name, ("shape", "key"))
        for _name in (
            "stateless_random_normal_v2",
            "stateless_truncated_normal_v2",
            "stateless_random_uniform_v2",
            "stateless_random_uniform_int_v2",
            "stateless_random_uniform_full_int_v2",
        )
    ),
):
    _DTENSOR.check_method(_module, _name, *_arguments)


def modules_with(function: Any, name: str) -> list[Any]:
    """Returns TensorFlow's modules whose `name` is this function."""
    return [m for m in _HOLDERS if getattr(m, name, None) is function]


# Where all of TensorFlow's Python makes a loop in a graph, and an array for it:
# on a mesh loops are unrolled. And what the conditions of loops come to.
while_v2 = _private("ops", "while_v2")
tensor_array_ops = _private("ops", "tensor_array_ops")
_private("ops.tensor_array_ops", "_GraphTensorArrayV2")
_DTENSOR.check_method(
    while_v2,
    "while_loop",
    "cond",
    "body",
    "loop_vars",
    "maximum_iterations",
    "return_same_structure",
)
evaluated_constant = _private("framework.tensor_util", "try_evaluate_constant")

# Where all of TensorFlow's Python makes an operation of a function's graph: one
# that DTensor refused to divide is given whole inputs there.
FuncGraph = _private("framework.func_graph", "FuncGraph")
_DTENSOR.check_method(
    FuncGraph,
    "_create_op_internal",
    "op_type",
    "inputs",
    "dtypes",
    "input_types",
    "name",
    "attrs",
    "op_def",
    "compute_device",
)
for _name in ("captures", "outer_graph"):
    _private("framework.func_graph", f"FuncGraph.{_name}")


def graphs_around() -> Iterator[Any]:
    """Yields the graphs of the functions being traced, from the inside out.

    None where operations run eagerly.
    """
    graph = (
        None if tf.executing_eagerly() else (tf.compat.v1.get_default_graph())
    )
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def kept_by_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` for `tf.py_function`, freed with the traced graphs.

    TensorFlow 2.21 keeps what `tf.py_function` is given in the default graph,
    for as long as the process lives, with all that it refers to.
    """
    for graph in graphs_around():
        if isinstance(graph, FuncGraph):
            if not hasattr(graph, "_layoutmap_functions"):
                graph._layoutmap_functions = []
            graph._layoutmap_functions.append(function)
    # Alive whenever it is called: by a function with one of these graphs.
    kept: Any = weakref.ref(function)

    def call(*args: Any) -> Any:
        return kept()(*args)

    return call


def captured_by_trace(tensor: Any) -> Any:
    """Returns the tensor that functions being traced have captured as this."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        tensor = next(
            (outside for outside, inside in graph.captures if inside is tensor),
            tensor,
        )
        graph = graph.outer_graph
    return tensor


def outermost_graph() -> Any:
    """Returns the graph of the function that is traced, not of its loops."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return graph


# What makes DTensor's device when it is first used. Errors of one that keeps
# queues can end the process.
dtensor_api = importlib.import_module("tensorflow.dtensor.python.api")
_DTENSOR.check_method(dtensor_api, "reset_dtensor_device", "is_async")
if "reset_dtensor_device" not in dtensor_api._dtensor_device.__code__.co_names:
    raise _DTENSOR.refusal("where `_dtensor_device` makes its device itself")
_DTENSOR.find("api", "_dtensor_singleton")


def has_dtensor_device() -> bool:
    """Whether DTensor's device is made, which happens at its first use."""
    return dtensor_api._dtensor_singleton is not None


_OUTPUT_LAYOUT = "_current_output_layout"
if (
    _OUTPUT_LAYOUT
    not in _DTENSOR.find(
        "dtensor_device", "DTensorDevice._default_layout"
    ).__wrapped__.__code__.co_names
):
    raise _DTENSOR.refusal(f"where `DTensorDevice` has no `{_OUTPUT_LAYOUT}`")


def has_output_layout() -> bool:
    """Whether all eager results get one layout: in `call_with_layout`."""
    return (
        getattr(dtensor_api._dtensor_singleton, _OUTPUT_LAYOUT, None)
        is not None
    )


def dtensor_device() -> Any:
    """Returns DTensor's device; makes it if there is none.

    `tf.experimental.dtensor.shutdown_accelerator_system` makes the next use
    of DTensor make another one, on which tensors of this one are of no use.
    """
    return dtensor_api._dtensor_device()


def kept_with_device(kind: str) -> dict[Any, Any]:
    """Returns the dict of one kind of tensors that lives as long as the device.

    Args:
      kind: What is kept.
    """
    kept = vars(dtensor_device()).setdefault("_layoutmap_kept", {})
    return kept.setdefault(kind, {})


# Where all of TensorFlow's Python runs an eager operation, the fast way and the
# general one, and what the fast one raises. DTensor refuses tensors of the host
# there.
pywrap_tfe = importlib.import_module("tensorflow.python.pywrap_tfe")
_private("pywrap_tfe", "TFE_Py_FastPathExecute")
_private("pywrap_tfe", "TFE_Py_Execute")
OperationFailed = _private("eager.core", "_NotOkStatusException")
FastWayRefused = _private("eager.core", "_FallbackException")

# The saver of `dtensor.DTensorCheckpoint`, which takes tensors on a mesh only.
DTrackableSaver = _DTENSOR.find("d_checkpoint", "DTrackableSaver")

# The end of its data leaves a mesh unusable: it is not let go that far.
DTensorIterator = _DTENSOR.find("input_util", "_DTensorIterator")

# How many clients share a replica's batch: DTensorDataset also counts devices
# outside of its mesh. Instance attributes, so its source is asked.
for _name in (
    "_mesh",
    "_batched_dataset",
    "_num_clients_per_replica",
    "_partition_offset",
    "_num_local_devices_per_replica",
):
    if _name not in (
        tf.experimental.dtensor.DTensorDataset.__init__.__code__.co_names
    ):
        raise _DTENSOR.refusal(f"where `DTensorDataset.{_name}` is missing")


def set_constraint(variable: Any, constraint: Any) -> None:
    """Sets what `tf.Variable(constraint=)` does, once a variable is there.

    That of a table in shards needs all of them.
    """
    variable._constraint = constraint


# The list in which a layer keeps the weights of an attribute. Once an item is
# replaced, it can be neither saved nor searched.
ListWrapper = _private("trackable.data_structures", "ListWrapper")
for _name in ("_non_append_mutation", "_update_snapshot"):
    _private("trackable.data_structures", f"ListWrapper.{_name}")


def replace_item(items: Any, index: int, value: Any) -> None:
    """Replaces an item of a `ListWrapper` as if `value` had always been it."""
    old, is_changed = items[index], items._non_append_mutation
    items[index] = value
    items._self_extra_variables = [
        v for v in items._self_extra_variables if v is not old
    ]
    items._non_append_mutation = is_changed
    items._update_snapshot()


# Reads the value of an eager tensor. DTensor's copy to the host refuses one
# that is sharded.
EagerTensor = _private("framework.ops", "_EagerTensorBase")
_private("framework.ops", "_EagerTensorBase._numpy")
