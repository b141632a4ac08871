"""Support for sharded tables in `tf.train.Checkpoint` and `tf.saved_model`.

Checkpoints and SavedModels treat a table as one variable. Checkpoints contain
slices of one tensor. An exported graph contains one variable of the full shape.
The exporting process allocates no memory for this variable. A program that
loads the SavedModel restores the rows into the variable.
"""

import dataclasses

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded import checkpoint
from tf_layoutmap.sharded.routing.checks import Shards

_NOT_EXPORTABLE = (
    "Table {name!r} is used in a function that was traced before "
    "tf.saved_model.save and that captures the shards of this process. Pass "
    "the tf.function itself to `signatures`, with an input_signature, instead "
    "of the result of its get_concrete_function()."
)


class LogicalVariable(tf_private.Trackable):
    """Methods of a table that TensorFlow's checkpoints and SavedModels call.

    Subclasses must set `_own_shards`, `_is_component` and `_saving_variable`.
    The attribute `_saving_variable` is None until a graph is exported.
    """

    _own_shards: Shards
    _is_component: bool
    _saving_variable: tf.Variable | None

    # Checkpoints.

    def _gather_saveables_for_checkpoint(self):
        def saveables(name: str = self.name):
            shard_saveables = checkpoint.saveables(self._own_shards, name)
            self._restoring = name, shard_saveables
            return shard_saveables

        return {tf_private.VARIABLE_VALUE_KEY: saveables}

    def _checkpoint_adapter(self, path: str) -> None:
        # A restore calls this method after it has created the saveables and
        # before it reads the file. At this time, no variable has been changed.
        key, saveables = self.__dict__.pop("_restoring", (None, ()))
        if (
            path is not None
            and key is not None
            and checkpoint.check_restorable(self._own_shards, path, key)
        ):
            checkpoint.fetch_in_turn(saveables, path)

    def _copy_trackable_to_cpu(self, object_map):
        # Asynchronous checkpoints first copy all variables.
        shards = self._own_shards
        for variable in shards.variables:
            variable._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = type(self)._from_shards(
                dataclasses.replace(
                    shards,
                    variables=[
                        object_map[variable] for variable in shards.variables
                    ],
                )
            )

    # SavedModel. TensorFlow treats this object as a resource variable only
    # during the trace of a SavedModel. At other times, a gradient tape would
    # use the object as a single handle.

    def _exported_variable(self) -> tf.Variable:
        """Returns the variable that represents the table in exported graphs."""
        variable = self._saving_variable
        if variable is None:
            with tf.init_scope():
                variable = tf_private.UninitializedVariable(
                    shape=self.shape,
                    dtype=self.dtype,
                    name=self.name,
                    trainable=self.trainable,
                )
            self._saving_variable = variable
        return variable

    def _keep_out_of_exports(self) -> None:
        """Marks the function that is being traced as not exportable.

        The function captures the shards, and exported graphs do not contain
        shards.
        """
        if tf.executing_eagerly():
            return
        # A branch of tf.cond is a separate graph, so all outer graphs are also
        # marked.
        graph = tf.compat.v1.get_default_graph()
        while hasattr(graph, "mark_as_unsaveable"):
            graph.mark_as_unsaveable(_NOT_EXPORTABLE.format(name=self.name))
            graph = graph.outer_graph

    def _export_to_saved_model_graph(
        self, object_map, tensor_map, options, **kwargs
    ):
        saving_variable = self._exported_variable()
        handles = saving_variable._export_to_saved_model_graph(
            object_map, tensor_map, options, **kwargs
        )
        object_map[self] = object_map[saving_variable]
        return handles

    def _write_object_proto(self, proto, options):
        self._exported_variable()._write_object_proto(proto, options)

    @property
    def _should_act_as_resource_variable(self) -> bool:
        if self._is_component or not tf_private.in_save_context():
            raise AttributeError(
                "`_should_act_as_resource_variable` exists only during the "
                "trace of a SavedModel."
            )
        return True

    @property
    def handle(self) -> tf.Tensor:
        if self._is_component or not tf_private.in_save_context():
            raise AttributeError(
                f"Table {self.name!r} has no single handle; use `variables`."
            )
        return self._exported_variable().handle

    @property
    def _shared_name(self) -> str:
        return self.name
