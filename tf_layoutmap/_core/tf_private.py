"""Private names of TensorFlow, which no other module imports.

A comment explains why each name is required. All names are checked when this
module is imported. If a name is missing, the import raises an error with a
remedy, and training does not start. If you add a name, also add its check and a
comment with the reason.
"""

import contextlib
import importlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import requirements
from tf_layoutmap._core.private_names import PrivateNames

SUPPORTED_VERSION = requirements.built_for()

_PACKAGE: dict[str, Any] = dict(
    title="TensorFlow", version=tf.__version__, supported=(SUPPORTED_VERSION,)
)
_private = PrivateNames(root="tensorflow.python", **_PACKAGE).find
_DTENSOR = PrivateNames(root="tensorflow.dtensor.python", **_PACKAGE)

# Base class of ShardedVariable. With this base class, several handles are
# passed to tf.function.
CompositeTensor = _private("framework.composite_tensor", "CompositeTensor")

# Used in tape.gradient(y, sharded) to select the handles of the shards, and to
# combine their gradients.
CompositeTensorGradient = _private(
    "framework.composite_tensor_gradient", "CompositeTensorGradient"
)

# Returns the numbers of input and output units of a weight, which determine the
# scale of its initial values.
compute_fans = _private("ops.init_ops_v2", "_compute_fans")

# Used to check whether tf.saved_model.save is tracing. Exported graphs have one
# unsharded variable per table.
in_save_context = _private("saved_model.save_context", "in_save_context")

# Used to check whether a thread of TensorFlow is saving asynchronously.
in_async_save = _private(
    "checkpoint.checkpoint_context", "in_async_metrics_context"
)

# Used to check whether XLA will compile a graph. XLA has no kernels for the ops
# of this package.
is_xla_graph = _private("ops.control_flow_util", "GraphOrParentsInXlaContext")

# Notifies tapes and the function being traced that an op of this package reads
# a variable. TensorFlow's own reads do this automatically. A tape outside of a
# function watches only the variables that the function's graph lists.
variable_accessed = _private("ops.resource_variable_ops", "variable_accessed")

# Notifies only tapes. The function that is being traced does not list the
# variable, so an exported model does not contain it.
tape_variable_accessed = _private("eager.tape", "variable_accessed")

# Used to check whether a tape records computations on a tensor. If a tape
# records, user code can request gradients, regardless of the layer's options.
could_possibly_record = _private("eager.record", "could_possibly_record")
should_record_backprop = _private("eager.record", "should_record_backprop")

# Computes the gradients of a tape. The function is replaced, because it passes
# one source per table, but one handle per shard.
imperative_grad = importlib.import_module(
    "tensorflow.python.eager.imperative_grad"
)
_DTENSOR.check_method(
    imperative_grad,
    "imperative_grad",
    "tape",
    "target",
    "sources",
    "output_gradients",
    "sources_raw",
    "unconnected_gradients",
)

# These functions select the trace of a `tf.function` for a call. They are
# replaced, because some traces depend on whether a tape records the call, and
# because calls with ragged tensors are slow.
tracing_compilation = importlib.import_module(
    "tensorflow.python.eager.polymorphic_function.tracing_compilation"
)
_DTENSOR.check_method(
    tracing_compilation,
    "_maybe_define_function",
    "args",
    "kwargs",
    "tracing_options",
)
_DTENSOR.check_method(
    tracing_compilation, "trace_function", "args", "kwargs", "tracing_options"
)
_DTENSOR.check_method(
    importlib.import_module(
        "tensorflow.core.function.polymorphism.function_type"
    ).FunctionType,
    "unpack_inputs",
    "bound_parameters",
)
function_type_utils = importlib.import_module(
    "tensorflow.python.eager.polymorphic_function.function_type_utils"
)
_DTENSOR.check_method(
    function_type_utils,
    "canonicalize_function_inputs",
    "args",
    "kwargs",
    "function_type",
    "default_values",
    "is_pure",
)
function_context = importlib.import_module(
    "tensorflow.python.eager.polymorphic_function.function_context"
)
_DTENSOR.check_method(function_context, "make_function_context", "scope_type")
for _name in ("add", "delete"):
    _DTENSOR.check_method(
        importlib.import_module(
            "tensorflow.core.function.polymorphism.function_cache"
        ).FunctionCache,
        _name,
        "context",
    )

# Records an operation on tapes with a gradient of this package.
record_operation = _private("eager.record", "record_operation")
gradients_util = importlib.import_module("tensorflow.python.ops.gradients_util")
_private("ops.gradients_util", "_GradientsHelper")
stop_recording = _private("eager.record", "stop_recording")
_tape_bindings = importlib.import_module("tensorflow.python.pywrap_tfe")
for _name in ("IsStopped", "RestartOnThread", "StopOnThread"):
    if not hasattr(_tape_bindings, f"TFE_Py_TapeSet{_name}"):
        raise _DTENSOR.refusal(f"without `TFE_Py_TapeSet{_name}`")


@contextlib.contextmanager
def resumed_tapes() -> Iterator[None]:
    """Resumes the tapes that `stop_recording` has stopped in this thread."""
    is_stopped = _tape_bindings.TFE_Py_TapeSetIsStopped()
    if is_stopped:
        _tape_bindings.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if is_stopped:
            _tape_bindings.TFE_Py_TapeSetStopOnThread()


# Maps an op to a function that computes the tangents of its outputs from the
# tangents of its inputs. If an op has no entry, TensorFlow transposes its
# gradient, which fails if the gradient is a tf.IndexedSlices.
forward_mode_of_ops = _private("eager.forwardprop", "_SPECIAL_CASES")

# Makes AutoGraph call a function without converting it. AutoGraph still
# converts the functions that this function calls. The public function
# `do_not_convert` would also disable AutoGraph for those functions.
called_as_written = _private("autograph.impl.api", "autograph_artifact")

# AutoGraph does not convert the functions of TensorFlow and Keras. Without
# these rules, AutoGraph would convert each function of these packages that a
# `tf.function` calls, which takes several seconds in the first step. Other
# packages call steps of users, which AutoGraph must convert.
_autograph_config = _private("autograph.core", "config")
_autograph_config.CONVERSION_RULES = (
    *_private("autograph.core.config", "CONVERSION_RULES"),
    *(
        _private("autograph.core.config", "DoNotConvert")(
            f"tf_layoutmap.{package}"
        )
        for package in ("_core", "embedding", "layers", "sharded", "vocabulary")
    ),
)

# Allows a function to run several reads of one variable in parallel, for the
# read ops of this package.
register_read_only_op = _private(
    "framework.auto_control_deps_utils", "register_read_only_resource_op"
)

# Returns the resources that an op reads, and those that it reads and writes.
read_and_written_resources = _private(
    "framework.auto_control_deps_utils", "get_read_write_resource_inputs"
)

# Registers a function that tells TensorFlow which other resources an op uses.
register_resource_resolver = _private(
    "framework.auto_control_deps", "register_acd_resource_resolver"
)

# Base class of the objects that tf.train.Checkpoint and tf.saved_model save.
Trackable = _private("trackable.base", "Trackable")

# Key of a variable's value in a checkpoint. With this key, checkpoints of this
# package have the same format as checkpoints of tf.Variable.
VARIABLE_VALUE_KEY = _private("trackable.constants", "VARIABLE_VALUE_KEY")

# Saves and restores a shard of a table as a slice of one logical tensor.
SaveableObject = _private("training.saving.saveable_object", "SaveableObject")
SaveSpec = _private("training.saving.saveable_object", "SaveSpec")

# The class that writes and reads all checkpoints, on all devices.
TrackableSaver = _private("checkpoint.checkpoint", "TrackableSaver")

# The module that restores objects from checkpoints. The package replaces the
# function that is called before the children of an object are restored.
checkpoint_restore = importlib.import_module(
    "tensorflow.python.checkpoint.restore"
)
_private("checkpoint.restore", "_maybe_get_adapter")

# Dtypes for which `RestoreV2` can read slices, in TensorFlow 2.21.
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

# Class of the hashable reference that `table.ref()` returns, as for
# tf.Variable.
Reference = _private("util.object_identity", "Reference")

# TensorFlow's class for sharded variables, which is not public. This package
# converts tables to and from this class.
TensorFlowShardedVariable = _private(
    "distribute.sharded_variable", "ShardedVariable"
)

# A variable of an exported graph that has the full shape but allocates no
# memory.
UninitializedVariable = _private(
    "ops.resource_variable_ops", "UninitializedVariable"
)

# The module that creates variable handles. A handle has a name for error
# messages.
gen_resource_variable_ops = _private("ops", "gen_resource_variable_ops")
_DTENSOR.check_method(gen_resource_variable_ops, "var_handle_op", "debug_name")
for _name in ("assign_add_variable_op", "assign_sub_variable_op"):
    _DTENSOR.check_method(
        gen_resource_variable_ops, _name, "resource", "value", "name"
    )

# Writes the fingerprint of a SavedModel. The fingerprint changes when values
# are added to the SavedModel.
write_fingerprint = _private(
    "saved_model.fingerprinting_utils", "write_fingerprint"
)

# The type spec of a shard that is an argument of a tf.function.
VariableSpec = _private("ops.resource_variable_ops", "VariableSpec")

# Base class of the variables that have a handle in each context. A variable
# with the handle of another variable is one, too.
BaseResourceVariable = _private(
    "ops.resource_variable_ops", "BaseResourceVariable"
)

# A variable class that strategies do not replace. Under MirroredStrategy, a
# `tf.Variable` is mirrored. The tables of an embedding must not be mirrored,
# because they exist only once, on the host.
ResourceVariable = _private("ops.resource_variable_ops", "ResourceVariable")

# The methods that write to a variable. Without a replacement, each device of a
# mesh would write.
for _name in ("assign", "assign_add", "assign_sub"):
    _private("ops.resource_variable_ops", f"ResourceVariable.{_name}")

# The creator functions of `tf.variable_creator_scope`. Creators that user code
# adds are called for a table. Creators that a strategy or a function adds are
# in the modules of OWN_CREATORS and are not called.
variable_creators_of = _private(
    "framework.ops", "Graph._variable_creator_stack"
).fget
_private("distribute.distribute_lib", "StrategyExtendedV2._scope")
# The class of the object that `tf.function` returns.
Function = _private(
    "eager.polymorphic_function.polymorphic_function", "Function"
)
_private("eager.polymorphic_function.polymorphic_function", "Function._clone")
_private("eager.polymorphic_function.polymorphic_function", "Function._call")
OWN_CREATORS = ("tensorflow.python.distribute", "tensorflow.python.eager")

# All ops of this process, including ops of loaded libraries.
_all_ops = _private("client.pywrap_tf_session", "TF_GetAllOpList")
_buffer_of = _private("client.pywrap_tf_session", "TF_GetBuffer")
_OpList = importlib.import_module("tensorflow.core.framework.op_def_pb2").OpList


def registered_ops() -> Any:
    """Returns the definitions of all ops (`OpDef`)."""
    return _OpList.FromString(_buffer_of(_all_ops())).op


# Load a library of ops, and generate the Python functions of single ops. The
# public function `tf.load_op_library` compiles the functions of all ops of a
# library, which takes more time than all other imports of this package.
register_library = _private("client.pywrap_tf_session", "TF_LoadLibrary")
_ops_of_library = _private("client.pywrap_tf_session", "TF_GetOpList")
_delete_library_handle = _private(
    "client.pywrap_tf_session", "TF_DeleteLibraryHandle"
)
_generate_functions = _private(
    "framework._pywrap_python_op_gen", "GetPythonWrappers"
)


def ops_of_library(handle: Any) -> Any:
    """Returns the definitions of a library's ops, and deletes the handle."""
    try:
        return _OpList.FromString(_ops_of_library(handle)).op
    finally:
        # The library stays loaded.
        _delete_library_handle(handle)


def source_of_op(definition: Any) -> bytes:
    """Returns the source code of the Python function of an op (`OpDef`)."""
    return _generate_functions(_OpList(op=[definition]).SerializeToString())


# Used to check whether an op exists before it is registered with tf.dtensor.
op_def_of = _private("framework.op_def_registry", "get")

# Base class of the emulated TPUStrategy, whose replicas run on logical CPUs.
MirroredExtended = _private("distribute.mirrored_strategy", "MirroredExtended")
# Variables of an emulated TPU. In a TPU program, TensorFlow converts a variable
# to the dtype of the other operand.
MirroredVariable = _private("distribute.values", "MirroredVariable")
# Whether `TPUEmbeddingV2` pipelines the steps that the current thread traces.
embedding_pipelining_state = _private(
    "tpu.embedding_context_utils", "embedding_pipelining_state"
)
# TPUStrategy uses these functions, but MirroredStrategy does not. With these
# functions, TPUStrategy returns values that it cannot reduce, and rejects
# ragged and sparse inputs on a TPU.
reduce_non_distributed_value = _private(
    "distribute.cross_device_ops", "reduce_non_distributed_value"
)
check_tpu_dataset_spec = _private(
    "distribute.tpu_strategy", "TPUExtended._check_spec"
)

# Used to check whether kernels of a real TPU exist before the emulated kernels
# are loaded.
registered_kernels_of = _private(
    "framework.kernels", "get_registered_kernels_for_op"
)

# Base class of the TPU optimizers. One method of this class writes a value that
# Protobuf 7.34 rejects. All TPU optimizers call this method, and no public
# class contains it.
TPUOptimizer = _private("tpu.tpu_embedding_v2_utils", "_Optimizer")

# Computes the stacks of tables on SparseCores. The names of the stacks are keys
# of a `SparseCoreEmbeddingConfig`, and no public function returns them without
# a TPU.
_LayoutStacker = _private(
    "tpu._pywrap_sparse_core_layout", "SparseCoreLayoutStacker"
)


def sparse_core_layouts(
    tables: list[Any],
    num_samples: dict[str, int],
    num_features: dict[str, int],
    num_chips: int,
    cores_per_chip: int,
    table_stacking: bool,
) -> dict[str, Any]:
    """Returns the `SparseCoreTableLayout` of each table, by its name.

    Args:
      tables: `TableConfig` objects with names and optimizers.
      num_samples: Number of samples of all features of each table and of a
        replica.
      num_features: Number of features of each table.
      num_chips: Number of chips, which is the number of replicas.
      cores_per_chip: Number of SparseCores of each chip.
      table_stacking: Whether tables are stacked.
    """
    stacker = _LayoutStacker(
        num_partitions=num_chips,
        sparse_cores_per_partition=cores_per_chip,
        disable_table_stacking=not table_stacking,
    )
    # TensorFlow 2.20 does not have this argument.
    counts_features = "num_features" in (_LayoutStacker.AddTable.__doc__ or "")
    for table in sorted(tables, key=lambda table: table.name):
        stacker.AddTable(
            table_name=table.name,
            table_height=table.vocabulary_size,
            table_width=table.dim,
            # Tables of different groups are not stacked.
            group=repr((hash(table.optimizer), table.quantization_config)),
            output_samples=num_samples[table.name],
            **(
                {"num_features": num_features[table.name]}
                if counts_features
                else {}
            ),
        )
    return {layout.table_name: layout for layout in stacker.GetLayouts().tables}


# TensorFlow's classes. The public names are not used, because a program can
# assign the classes of this package to them.
TPUEmbedding = _private("tpu.tpu_embedding_v2", "TPUEmbedding")
TPUEmbeddingV2 = _private("tpu.tpu_embedding_v3", "TPUEmbeddingV2")

# Methods of `TPUEmbeddingV2` that `embedding.v2.sparse_core` overrides.
_private("tpu.tpu_embedding_v3", "TPUEmbeddingV2._create_variables_and_slots")
_private("tpu.tpu_embedding_v3", "TPUEmbeddingV2._preprocess_features")
_private("tpu.tpu_embedding_v3", "TPUEmbeddingV2._stack_gradients")

# Class of the tables of a `TPUEmbeddingV2`. The emulation replaces its methods
# that require a TPU program.
TPUEmbeddingShardedVariable = _private(
    "tpu.tpu_embedding_v3", "TPUEmbeddingShardedVariable"
)

# The module that returns the host of a TPU core. The emulation replaces its
# function.
device_util = _private("distribute", "device_util")
_private("distribute.device_util", "get_host_for_device")

# Used to check whether code is traced as a TPU program, and to run operations
# on the host, outside of this program. The ids of an embedding are enqueued on
# the host.
tpu_replication = _private("tpu", "tpu_replication")
_private("tpu.tpu_replication", "TPUReplicateContext")
_private("tpu.tpu_replication", "outside_compilation")
control_flow_context_of = _private(
    "framework.ops", "Graph._get_control_flow_context"
)

# Sets the attribute with which the TPU compiler pairs the TPU embedding
# operations of one step.
set_op_attr = _private("framework.ops", "Operation._set_attr")

# The emulation uses this method to change the mode of a step in the graph, as
# the TPU compiler does.
replace_op_input = _private("framework.ops", "Operation._update_input")
add_control_inputs = _private("framework.ops", "Operation._add_control_inputs")

# Used to check whether `dtensor.default_mesh` is the innermost device.
_context = _private("eager.context", "context")
_private("eager.context", "Context.device_name")


def current_device() -> str:
    """Returns the name of this thread's device, also during tracing."""
    return _context().device_name


# The implementation of `tf.custom_gradient` in graphs, and the registry to
# which it adds gradients. TensorFlow never frees registered gradients.
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
    """Returns the name of an operation's registered gradient, or None."""
    try:
        return tf.compat.as_str(op.get_attr(_GRADIENT_NAME))
    except ValueError:
        return None


def leave_gradient_to_graph(name: str, graph: Any) -> None:
    """Moves a registered gradient from the registry to `graph`.

    The gradient is then freed together with the graph. An operation cannot own
    the gradient, because Python's garbage collector does not see the attributes
    of an operation, so the graph would never be freed.
    """
    entry = _gradients._registry.get(name)
    if entry is None:
        return
    gradient = _gradients.lookup(name)
    if not hasattr(graph, "_layoutmap_gradients"):
        graph._layoutmap_gradients = []
    graph._layoutmap_gradients.append(gradient)
    reference: Any = weakref.ref(
        gradient, lambda _: _gradients._registry.pop(name, None)
    )

    def registered(op: Any, *gradients: Any) -> Any:
        return reference()(op, *gradients)

    _gradients._registry[name] = {
        tag: registered if value is gradient else value
        for tag, value in entry.items()
    }


_private("framework.func_graph", "FuncGraph.external_captures")
_private("framework.func_graph", "FuncGraph.outer_graph")


def tensors_used_by(graph: Any) -> list[Any]:
    """Returns the eager tensors that a function's graph captures.

    The result includes variable handles. Captures of enclosing graphs, and of
    any graph whose symbolic tensors are captured, are also included.
    """
    graphs, tensors = [graph], []
    for current in graphs:
        if not isinstance(current, FuncGraph):
            continue
        outside = [current.outer_graph]
        for tensor in current.external_captures:
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


_private("framework.ops", "Graph._get_function")


def names_of_functions(node: Any) -> list[str]:
    """Returns the names of the functions that a `NodeDef` calls."""
    return [
        function.name
        for _, value in sorted(node.attr.items())
        for function in (value.func, *value.list.func)
        if function.name
    ]


def graphs_called_by(op: Any) -> list[Any]:
    """Returns the graphs of the functions that an operation calls.

    Args:
      op: A `tf.Operation`.
    """
    functions = map(op.graph._get_function, names_of_functions(op.node_def))
    return [
        function.graph
        for function in functions
        if getattr(function, "graph", None) is not None
    ]


# Used to read the programs that DTensor has compiled.
for _name in ("list_function_names", "get_function_def"):
    _private("eager.context", f"Context.{_name}")


def function_names() -> set[str]:
    """Returns the names of all functions of this process."""
    return {tf.compat.as_str(name) for name in _context().list_function_names()}


def function_def(name: str) -> Any:
    """Returns the `FunctionDef` with this name."""
    return _context().get_function_def(name)


# Options that control how functions that this thread calls are optimized.
# Functions on a mesh use different options.
for _name in ("config", "function_call_options"):
    _private("eager.context", f"Context.{_name}")
_FunctionCallOptions = _private("eager.context", "FunctionCallOptions")


def function_call_options() -> Any:
    """Returns the options with which this thread calls functions.

    TensorFlow creates a new object when its configuration changes.
    """
    return _context().function_call_options


def set_function_call_options(options: Any) -> None:
    """Sets the options with which this thread calls functions."""
    _context().function_call_options = options


def options_without_graph_optimizer(options: Any) -> Any:
    """Returns the same options with Grappler disabled."""
    config = type(_context().config).FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return _FunctionCallOptions(options.executor_type, config)


# The partitioner of a ParameterServerStrategy. This partitioner must not
# partition the shards that this package creates.
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


# Collectives for tables that are sharded over processes. This package uses
# these collectives because strategies do not support all-to-all. The processes
# use the collectives of their hosts. The ordering token determines the order of
# collectives.
all_to_all = _private("ops.collective_ops", "all_to_all_v2")
all_gather = _private("ops.collective_ops", "all_gather_v2")
broadcast_send = _private("ops.collective_ops", "broadcast_send_v2")
broadcast_recv = _private("ops.collective_ops", "broadcast_recv_v2")
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
    """Returns the launcher of collectives for the host of this process."""
    return getattr(strategy.extended, _HOST_COLLECTIVES)._launchers[0]


CollectiveKeys = _private("distribute.cross_device_utils", "CollectiveKeys")
for _name in ("_get_new_group_key", "get_instance_key"):
    _private("distribute.cross_device_utils", f"CollectiveKeys.{_name}")
# Key of the first collective of each device of a group.
FIRST_INSTANCE_KEY = _private(
    "distribute.cross_device_utils", "INSTANCE_KEY_START_NUMBER"
)
CollectiveReplicaLauncher = _private(
    "distribute.cross_device_utils", "CollectiveReplicaLauncher"
)


def separate_launcher(launcher: Any, group_key: int) -> Any:
    """Returns a launcher for the same device and processes, with other keys.

    Args:
      launcher: A launcher of a strategy.
      group_key: Key that no other launcher of this process has.
    """
    keys = CollectiveKeys(group_key)
    return CollectiveReplicaLauncher(
        keys.get_group_key([launcher._device]),
        launcher._group_size,
        keys,
        launcher._device,
        launcher._options,
    )


def device_of_collectives(launcher: Any) -> str:
    """Returns the device on which a launcher runs collectives."""
    return launcher._device


def collective_arguments(launcher: Any) -> dict[str, Any]:
    """Returns the arguments for the next collective of a launcher."""
    return {
        "group_size": launcher._group_size,
        "group_key": launcher._group_key,
        "instance_key": launcher._next_instance_key(),
        "ordering_token": launcher._get_ordering_token(),
    }


# Classes whose methods remove functions and resources from all processes of a
# cluster. These methods must do nothing after a process has stopped responding.
EagerContext = _private("eager.context", "Context")
_private("eager.context", "Context.remove_function")
_private("eager.context", "Context.sync_executors")
_eager_context = _private("eager.context", "context")
_context_id_of = _private("pywrap_tfe", "TFE_GetContextId")


def eager_context_id() -> int:
    """Returns the number of this process's context in other processes.

    A server frees the variables of a context when the context is closed.
    """
    return _context_id_of(_eager_context()._handle)


# This module converts the status of each eager call to an exception.
eager_core = _private("eager", "core")
_private("eager.core", "_status_to_exception")
constant_op = _private("framework", "constant_op")
_private("framework.constant_op", "convert_to_eager_tensor")
EagerResourceDeleter = _private(
    "ops.resource_variable_ops", "EagerResourceDeleter"
)
CapturableResource = _private("trackable.resource", "CapturableResource")

# Waits for a closure and raises its error. The result is not fetched from the
# worker, because the worker may have failed after the closure.
wait_for_closure = _private(
    "distribute.coordinator.values", "RemoteValueImpl._wait_and_maybe_error"
)


# If the coordinator cancels a closure, the closure may stop after it has
# updated one server but before it has updated another server. The iterator of
# the closure is also cancelled permanently. The coordinator never cancels a
# closure that is a Python function. The public `schedule` method does not
# accept a Python function, but `Cluster.schedule` does. Therefore, this module
# traces the function itself. The workers may not have created their iterators
# yet, so the function is traced with the type of the iterator.
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
    """Returns a concrete function for the iterator of each worker."""
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
    """Schedules a Python function, which is never cancelled, on a worker.

    The current strategy must be the strategy of `coordinator`.
    """
    return getattr(coordinator, _CLUSTER).schedule(call, args, {})


def has_failed_closure(coordinator: Any) -> bool:
    """Returns whether a closure has failed, which means that `join` raises."""
    queue = getattr(getattr(coordinator, _CLUSTER), _QUEUE)
    return getattr(queue, _QUEUE_ERROR) is not None


def dataset_function_of(dataset: Any) -> Any:
    """Returns the traced function that creates the dataset of a worker."""
    return getattr(dataset, _DATASET_FUNCTION)


@contextlib.contextmanager
def undivided_variables(strategy: Any) -> Iterator[None]:
    """Disables the partitioning of variables inside the context."""
    partitioner = variable_partitioner_of(strategy)
    if partitioner is None:
        yield
        return
    setattr(strategy.extended, _PARTITIONER, None)
    try:
        yield
    finally:
        setattr(strategy.extended, _PARTITIONER, partitioner)


# Methods that exchange short messages between the processes of a mesh.
for _name in (
    "coordination_service",
    "set_config_key_value",
    "get_config_key_value",
    "delete_config_key_value",
    "report_error_to_cluster",
    "wait_at_barrier",
):
    _private("eager.context", f"Context.{_name}")


def has_coordination() -> bool:
    """Returns whether this process has joined a coordination service."""
    return _context().coordination_service is not None


def set_cluster_value(key: str, value: str) -> None:
    """Stores a value that all processes can read."""
    _context().set_config_key_value(key, value)


def cluster_value(key: str, timeout_seconds: float) -> str:
    """Returns a stored value; waits for it until the timeout."""
    return _context().get_config_key_value(
        key, max(1, int(1000 * timeout_seconds))
    )


def delete_cluster_value(key: str) -> None:
    """Deletes a stored value."""
    _context().delete_config_key_value(key)


def wait_at_barrier(name: str, timeout_seconds: float) -> None:
    """Waits until all processes wait at the barrier, or until the timeout."""
    _context().wait_at_barrier(name, int(1000 * timeout_seconds))


def abort_cluster(why: str) -> None:
    """Permanently aborts the collectives of all processes of the cluster."""
    _context().report_error_to_cluster(tf.errors.ABORTED, why)


# All Python code of TensorFlow uses these modules to create operations. On a
# mesh, this package corrects functions in these modules if DTensor computes
# their operations incorrectly.
gen_array_ops = _private("ops", "gen_array_ops")
gen_image_ops = _private("ops", "gen_image_ops")
gen_linalg_ops = _private("ops", "gen_linalg_ops")
gen_manip_ops = _private("ops", "gen_manip_ops")
gen_math_ops = _private("ops", "gen_math_ops")
gen_state_ops = _private("ops", "gen_state_ops")
gen_nn_ops = _private("ops", "gen_nn_ops")
gen_random_ops = _private("ops", "gen_random_ops")
nn_impl = _private("ops", "nn_impl")
nn_ops = _private("ops", "nn_ops")
gen_stateless_random_ops_v2 = _private("ops", "gen_stateless_random_ops_v2")
_HOLDERS = (
    gen_array_ops,
    _private("ops", "array_ops"),
    gen_image_ops,
    gen_linalg_ops,
    gen_manip_ops,
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
    (gen_math_ops, "mat_mul", ("a", "b", "transpose_a", "transpose_b")),
    (gen_array_ops, "transpose", ("x", "perm")),
    (gen_math_ops, "_pow", ("x", "y")),
    (gen_math_ops, "arg_max", ("input", "dimension", "output_type")),
    *(
        (gen_math_ops, _name, ("data", "segment_ids", "num_segments"))
        for _name in ("unsorted_segment_prod", "unsorted_segment_sum")
    ),
    (gen_array_ops, "placeholder_with_default", ("input", "shape")),
    (
        gen_array_ops,
        "scatter_nd_non_aliasing_add",
        ("input", "indices", "updates"),
    ),
    (gen_math_ops, "batch_mat_mul_v3", ("x", "y", "Tout", "adj_x", "adj_y")),
    (gen_nn_ops, "bias_add", ("value", "bias", "data_format")),
    (
        gen_state_ops,
        "resource_scatter_nd_update",
        ("ref", "indices", "updates", "use_locking", "bad_indices_policy"),
    ),
    *(
        (gen_nn_ops, _name, ("x", "scale", "offset", "mean"))
        for _name in (
            "_fused_batch_norm",
            "fused_batch_norm_v2",
            "fused_batch_norm_v3",
        )
    ),
    *(
        (gen_nn_ops, _name, ("input", "filter"))
        for _name in ("conv2d", "conv3d", "depthwise_conv2d_native")
    ),
    *(
        (gen_nn_ops, _name, ("input_sizes", "filter", "out_backprop"))
        for _name in ("conv2d_backprop_input", "conv3d_backprop_input_v2")
    ),
    (
        gen_nn_ops,
        "sparse_softmax_cross_entropy_with_logits",
        ("features", "labels"),
    ),
    (nn_ops, "convolution_internal", ("input", "filters", "dilations")),
    (nn_impl, "depthwise_conv2d", ("input", "filter", "rate", "dilations")),
    (gen_nn_ops, "avg_pool", ("value", "ksize", "strides", "data_format")),
    *(
        (gen_nn_ops, _name, ("input", "ksize", "strides", "data_format"))
        for _name in ("avg_pool3d", "max_pool", "max_pool3d")
    ),
    (gen_nn_ops, "lrn", ("input",)),
    *(
        (gen_image_ops, _name, ("images", "size"))
        for _name in (
            "resize_bilinear",
            "resize_nearest_neighbor",
            "resize_bicubic",
            "resize_area",
            "scale_and_translate",
        )
    ),
    (gen_image_ops, "scale_and_translate", ("scale", "translation")),
    *(
        (gen_image_ops, _name, ("images", "transforms", "output_shape"))
        for _name in (
            "image_projective_transform_v2",
            "image_projective_transform_v3",
        )
    ),
    (gen_image_ops, "image_projective_transform_v3", ("fill_value",)),
    (gen_image_ops, "adjust_contrastv2", ("images", "contrast_factor")),
    (gen_image_ops, "adjust_hue", ("images", "delta")),
    (gen_image_ops, "adjust_saturation", ("images", "scale")),
    (gen_image_ops, "rgb_to_hsv", ("images",)),
    (gen_image_ops, "hsv_to_rgb", ("images",)),
    (gen_array_ops, "depth_to_space", ("input",)),
    (gen_array_ops, "space_to_depth", ("input",)),
    (gen_array_ops, "space_to_batch_nd", ("input", "block_shape", "paddings")),
    (gen_array_ops, "batch_to_space_nd", ("input", "block_shape", "crops")),
    (gen_array_ops, "pad", ("input", "paddings")),
    (gen_array_ops, "pad_v2", ("input", "paddings", "constant_values")),
    (gen_array_ops, "mirror_pad", ("input", "paddings")),
    (gen_manip_ops, "roll", ("input", "shift", "axis")),
    (gen_array_ops, "extract_image_patches", ("images",)),
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
    """Returns the modules of TensorFlow in which `name` is `function`."""
    return [m for m in _HOLDERS if getattr(m, name, None) is function]


# The modules that create loops and tensor arrays in a graph, and a function
# that evaluates loop conditions. This package uses these names to unroll loops
# on a mesh.
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

# Number of op seeds that each graph has drawn. The body of a loop is a separate
# graph on one device, but not if the loop is unrolled.
_num_op_seeds = _private("framework.random_seed", "_graph_to_seed_dict")


@contextlib.contextmanager
def op_seeds_from_zero(graph: Any) -> Iterator[None]:
    """Context manager in which `graph` draws the op seeds of a new graph."""
    before = _num_op_seeds.get(graph, 0)
    _num_op_seeds[graph] = 0
    try:
        yield
    finally:
        _num_op_seeds[graph] = before


# The method that creates all operations in the graph of a function. Its
# replacement replicates the inputs of operations that DTensor cannot partition.
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

# The type of a value with one component per replica, such as a batch of a
# distributed dataset.
_PerReplicaSpec = _private("distribute.values", "PerReplicaSpec")
_DTENSOR.check_method(_PerReplicaSpec, "__init__", "value_specs")


def spec_of_first_replica(spec: Any) -> Any:
    """Returns the type of the first local component of a distributed value."""
    return spec._value_specs[0] if isinstance(spec, _PerReplicaSpec) else spec


# The datasets from which a dataset was created, and classes of datasets that
# shuffle samples or read files. If each process shuffles in a different order,
# the processes do not train on all samples.
_private("data.ops.dataset_ops", "DatasetV2._inputs")
_ShuffleDataset = _private("data.ops.shuffle_op", "_ShuffleDataset")
_FILE_DATASETS = (
    _private("data.ops.flat_map_op", "_FlatMapDataset"),
    _private("data.ops.interleave_op", "_InterleaveDataset"),
    _private("data.ops.interleave_op", "_ParallelInterleaveDataset"),
    tf.data.FixedLengthRecordDataset,
    tf.data.TextLineDataset,
    tf.data.TFRecordDataset,
)


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Returns the seeds of all shuffles of a dataset in memory.

    A shuffle without a seed has two zeros. The result is empty for datasets
    that may read files, because TensorFlow can shard the files instead of the
    samples.
    """
    datasets = [dataset]
    for source in datasets:
        datasets += source._inputs()
    if any(isinstance(source, _FILE_DATASETS) for source in datasets):
        return []
    return [
        (int(source._seed), int(source._seed2))
        for source in datasets
        if isinstance(source, _ShuffleDataset)
    ]


# Used to split a function at a loop: functions for the parts of the graph, with
# the order of stateful ops that `tf.function` gives them.
ConcreteFunction = _private(
    "eager.polymorphic_function.concrete_function", "ConcreteFunction"
)
_private(
    "eager.polymorphic_function.concrete_function",
    "ConcreteFunction.from_func_graph",
)
_DTENSOR.check_method(
    ConcreteFunction, "_call_flat", "tensor_inputs", "captured_inputs"
)
AutomaticControlDependencies = _private(
    "framework.auto_control_deps", "AutomaticControlDependencies"
)
func_graph_from_py_func = _private(
    "framework.func_graph", "func_graph_from_py_func"
)
for _name in ("external_captures", "internal_captures"):
    _private("framework.func_graph", f"FuncGraph.{_name}")
_gen_functional_ops = _private("ops", "gen_functional_ops")


def call_by_name(
    name: str, inputs: Iterable[Any], dtypes: Iterable[tf.DType]
) -> list[Any]:
    """Adds a call of a function to the default graph; returns its results.

    Args:
      name: Name of a function of the eager context.
      inputs: Arguments of the function.
      dtypes: Dtypes of the results.
    """
    return _gen_functional_ops.stateful_partitioned_call(
        [*inputs], [*dtypes], name
    )


variables_as_tensors = _private(
    "util.variable_utils", "convert_variables_to_tensors"
)
flatten_up_to = _private("util.nest", "flatten_up_to")
_with_autograph = _private(
    "eager.polymorphic_function.autograph_util", "py_func_from_autograph"
)


_AutoGraphScope = _private("autograph.core.ag_ctx", "ControlStatusCtx")
_AutoGraphStatus = _private("autograph.core.ag_ctx", "Status")


def converted_function(function: Any) -> Callable[..., Any]:
    """Returns the Python function of a `tf.function`, after AutoGraph."""
    python_function = function.python_function
    if not function._autograph:
        return python_function
    options = function._experimental_autograph_options
    converted = _with_autograph(python_function, options)

    def call(*args: Any, **kwargs: Any) -> Any:
        # TensorFlow disables AutoGraph in the trace of the copy.
        with _AutoGraphScope(_AutoGraphStatus.ENABLED, options):
            return converted(*args, **kwargs)

    return call


def clone_without_autograph(function: Any, python_function: Any) -> Any:
    """Returns a copy of a `tf.function` that does not use AutoGraph.

    Args:
      function: The `tf.function`.
      python_function: Function that the copy traces.
    """
    clone = function._clone(python_function)
    clone._autograph = False
    return clone


def graphs_around() -> Iterator[Any]:
    """Yields the graphs of the functions being traced, innermost first.

    Yields nothing if operations run eagerly.
    """
    graph = (
        None if tf.executing_eagerly() else (tf.compat.v1.get_default_graph())
    )
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


# Graph of the body of a `tf.while_loop`, and of a `tf.range` loop of AutoGraph.
_WhileBody = _private("ops.control_flow_v2_func_graphs", "WhileBodyFuncGraph")
_ReplicaThread = _private("distribute.mirrored_run", "_MirroredReplicaThread")


def in_loop_of_replica() -> bool:
    """Returns whether a loop inside `strategy.run` is being traced.

    `MirroredStrategy` and `MultiWorkerMirroredStrategy` trace each replica in a
    separate thread, whose attribute `graph` is the graph around `strategy.run`.
    """
    thread: Any = threading.current_thread()
    if not isinstance(thread, _ReplicaThread):
        return False
    inside = itertools.takewhile(
        lambda graph: graph is not thread.graph, graphs_around()
    )
    return any(isinstance(graph, _WhileBody) for graph in inside)


class _WithoutIndependentOps(set):
    """The ops for which the results of a traced function wait."""

    def __init__(self, ops: Iterable[Any]):
        super().__init__(ops)
        self.independent: set[Any] = set()

    def update(self, *others: Iterable[Any]) -> None:
        for ops in others:
            super().update(op for op in ops if op not in self.independent)


def run_independently_of_results(op: Any) -> None:
    """Makes a traced function return its results without waiting for an op.

    The function still runs the op, and a call ends after the op. By default,
    TensorFlow adds a control dependency from each op with side effects to the
    results of the function. If the op runs in another process, each such
    dependency costs one call between the processes.

    Args:
      op: An op of the function that is being traced.
    """
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is None:
        return
    if not isinstance(manager.ops_which_must_run, _WithoutIndependentOps):
        manager.ops_which_must_run = _WithoutIndependentOps(
            manager.ops_which_must_run
        )
    manager.ops_which_must_run.independent.add(op)
    op.graph.control_outputs.append(op)


def kept_by_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of `function` to pass to `tf.py_function`.

    TensorFlow 2.21 stores the argument of `tf.py_function` until the process
    ends, together with all objects to which it refers. The wrapper refers to
    `function` only weakly, so `function` is freed with the graphs that call it.
    """
    for graph in graphs_around():
        if isinstance(graph, FuncGraph):
            if not hasattr(graph, "_layoutmap_functions"):
                graph._layoutmap_functions = []
            graph._layoutmap_functions.append(function)
    # When `call` runs, the reference is always valid, because only functions
    # that own one of these graphs run it.
    kept: Any = weakref.ref(function)

    def call(*args: Any) -> Any:
        return kept()(*args)

    return call


def captured_by_trace(tensor: Any) -> Any:
    """Returns the tensor outside of traced functions that `tensor` captures."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        tensor = next(
            (outside for outside, inside in graph.captures if inside is tensor),
            tensor,
        )
        graph = graph.outer_graph
    return tensor


def outermost_graph() -> Any:
    """Returns the graph of the outermost function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return graph


# The function that creates DTensor's device at its first use. An asynchronous
# device has queues, and errors in these queues can end the process.
dtensor_api = importlib.import_module("tensorflow.dtensor.python.api")
_DTENSOR.check_method(dtensor_api, "reset_dtensor_device", "is_async")
if "reset_dtensor_device" not in dtensor_api._dtensor_device.__code__.co_names:
    raise _DTENSOR.refusal("where `_dtensor_device` makes its device itself")
_DTENSOR.find("api", "_dtensor_singleton")

# The function that creates the op RelayoutLike, also in the gradient of a
# relayout.
gen_dtensor_ops = importlib.import_module(
    "tensorflow.dtensor.python.gen_dtensor_ops"
)
_DTENSOR.check_method(
    gen_dtensor_ops, "relayout_like", "input", "layout_input", "name"
)


def has_dtensor_device() -> bool:
    """Returns whether DTensor's device has already been created."""
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
    """Returns whether `call_with_layout` sets the layout of eager results."""
    return (
        getattr(dtensor_api._dtensor_singleton, _OUTPUT_LAYOUT, None)
        is not None
    )


def dtensor_device() -> Any:
    """Returns DTensor's device; creates it if it does not exist.

    After `tf.experimental.dtensor.shutdown_accelerator_system`, the next use of
    DTensor creates a new device. The new device does not support tensors of the
    old device.
    """
    return dtensor_api._dtensor_device()


def kept_with_device(kind: str) -> dict[Any, Any]:
    """Returns a dict of tensors that is freed together with DTensor's device.

    Args:
      kind: Name of the dict.
    """
    kept = vars(dtensor_device()).setdefault("_layoutmap_kept", {})
    return kept.setdefault(kind, {})


# These functions run all eager operations, on the fast path and on the general
# path, and these classes are the errors of the fast path. DTensor rejects host
# tensors in these functions.
pywrap_tfe = importlib.import_module("tensorflow.python.pywrap_tfe")
_private("pywrap_tfe", "TFE_Py_FastPathExecute")
_private("pywrap_tfe", "TFE_Py_Execute")
_private("pywrap_tfe", "TFE_Py_ExecuteCancelable")
OperationFailed = _private("eager.core", "_NotOkStatusException")
FastWayRefused = _private("eager.core", "_FallbackException")

# Finds the names of operations in the messages of errors. The function is
# replaced, because its time is quadratic in the length of a message, and
# DTensor's messages contain whole programs.
error_interpolation = importlib.import_module(
    "tensorflow.python.framework.error_interpolation"
)
_DTENSOR.check_method(error_interpolation, "parse_message", "message")
ErrorTag = _private("framework.error_interpolation", "_ParseTag")
_ERROR_TAG = re.compile(
    _private("framework.error_interpolation", "_TAG_REGEX"), re.DOTALL
)


def tags_of_error(message: str) -> Iterator[tuple[int, int, Any]]:
    """Yields the start, the end and the tag of each `{{type name}}`."""
    for match in _ERROR_TAG.finditer(message):
        yield *match.span(), ErrorTag(match["type"], match["name"])


def shorten_message(error: tf.errors.OpError, message: str) -> None:
    """Replaces the message of an error of TensorFlow."""
    error._message = message


# The saver of `dtensor.DTensorCheckpoint`, which supports only mesh tensors.
DTrackableSaver = _DTENSOR.find("d_checkpoint", "DTrackableSaver")

# The iterator of DTensorDataset. If an iterator reaches the end of its data,
# the mesh becomes unusable. Therefore, this package stops before the end.
DTensorIterator = _DTENSOR.find("input_util", "_DTensorIterator")

# Attributes that hold the number of clients that share the batch of a replica.
# DTensorDataset computes a wrong number, because it counts devices outside its
# mesh. These attributes belong to instances, so the code of `__init__` is
# checked.
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
    """Sets the constraint of an existing variable.

    The constraint is set later, because the constraint of a sharded table
    requires all shards.

    Raises:
      RuntimeError: If the variable ignores the constraint.
    """
    stored = variable
    # A variable on parameter servers is a wrapper, or two wrappers, and returns
    # the constraint of the wrapped variable.
    while hasattr(stored, "_v"):
        stored = stored._v
    stored._constraint = constraint
    if variable.constraint is not constraint:
        raise RuntimeError(
            "A constraint cannot be set for a variable of the type "
            f"{type(variable).__name__}. Received: variable {variable.name!r}."
        )


# The class that replaces a list of weights in an attribute of a layer. By
# default, such a list cannot be saved or searched after an item is replaced.
ListWrapper = _private("trackable.data_structures", "ListWrapper")
for _name in ("_non_append_mutation", "_update_snapshot"):
    _private("trackable.data_structures", f"ListWrapper.{_name}")


def replace_item(items: Any, index: int, value: Any) -> None:
    """Replaces an item of a `ListWrapper`; the list can still be saved."""
    old, is_changed = items[index], items._non_append_mutation
    items[index] = value
    items._self_extra_variables = [
        v for v in items._self_extra_variables if v is not old
    ]
    items._non_append_mutation = is_changed
    items._update_snapshot()


# Reads the value of an eager tensor. DTensor's copy to the host raises an error
# for a sharded tensor.
EagerTensor = _private("framework.ops", "_EagerTensorBase")
_private("framework.ops", "_EagerTensorBase._numpy")
_private("framework.ops", "EagerTensor._num_elements")

# The class of all eager tensors, and methods that return parts of their type
# spec without creating a `tf.TensorShape`.
EagerTensorClass = _private("framework.ops", "EagerTensor")
for _name in ("_datatype_enum", "_rank", "_shape_tuple"):
    _private("framework.ops", f"EagerTensor.{_name}")


def num_elements(tensor: Any) -> int:
    """Returns the number of elements of an eager tensor.

    Every eager operation calls this function, and `tensor.shape` is slower.
    """
    return tensor._num_elements()


# Creates the branches of `tf.switch_case` and `tf.cond`, and their gradients.
# DTensor does not support the operations that they contain.
switch_case = importlib.import_module(
    "tensorflow.python.ops.control_flow_switch_case"
)
_DTENSOR.check_method(
    switch_case,
    "_indexed_case_helper",
    "branch_fns",
    "default",
    "branch_index",
    "name",
)
checked_branches = _private(
    "ops.control_flow_switch_case", "_indexed_case_verify_and_canonicalize_args"
)
cond_v2 = importlib.import_module("tensorflow.python.ops.cond_v2")
_DTENSOR.check_method(
    cond_v2, "_create_fakeparams", "func_graph", "template_tensors"
)
eager_context = importlib.import_module("tensorflow.python.eager.context")
_private("eager.context", "optionals_in_gradients_enabled")
