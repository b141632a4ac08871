"""How a table meets `tf.train.Checkpoint` and `tf.saved_model`.

To both it is one variable. Checkpoints see slices of one tensor; an exported
graph sees one variable of the full shape, which has no memory here: the
exported graph's own copy is what the restored rows go into.
"""

import dataclasses

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded import checkpoint
from tf_layoutmap.sharded.routing.checks import Shards

_NOT_EXPORTABLE = (
    "Table {name!r} is used in a function that was traced before "
    "tf.saved_model.save, with its shards as they are here. Give the "
    "tf.function itself to `signatures`, with an input_signature, and not "
    "what its get_concrete_function() returned."
)


class LogicalVariable(tf_private.Trackable):
    """The part of a table that TensorFlow's savers call.

    Needs `_own_shards`, `_is_component` and `_saving_variable`, which is None
    until a graph is exported.
    """

    _own_shards: Shards
    _is_component: bool
    _saving_variable: tf.Variable | None

    # Checkpoints.

    def _gather_saveables_for_checkpoint(self):
        def saveables(name: str = self.name):
            found = checkpoint.saveables(self._own_shards, name)
            self._restoring = name, found
            return found

        return {tf_private.VARIABLE_VALUE_KEY: saveables}

    def _checkpoint_adapter(self, path: str) -> None:
        # A restore calls this between asking for the saveables and reading
        # the file: the last moment at which nothing has been written.
        key, saveables = self.__dict__.pop("_restoring", (None, ()))
        if (
            path is not None
            and key is not None
            and checkpoint.check_restorable(self._own_shards, path, key)
        ):
            checkpoint.fetch_in_turn(saveables, path)

    def _copy_trackable_to_cpu(self, object_map):
        # Asynchronous checkpoints write from copies.
        shards = self._own_shards
        for variable in shards.variables:
            variable._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            object_map[self] = type(self)._of(
                dataclasses.replace(
                    shards,
                    variables=[
                        object_map[variable] for variable in shards.variables
                    ],
                )
            )

    # SavedModel. While one is traced, this object counts as a resource
    # variable for TensorFlow, and only then: at other times the tape would
    # take it for one handle.

    def _exported_variable(self) -> tf.Variable:
        """The one variable that stands for the table in exported graphs."""
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
        """Makes the function being traced refuse to be exported as it is.

        Its captures are the shards, and an exported graph has none.
        """
        if tf.executing_eagerly():
            return
        # The branches of tf.cond are graphs of their own: mark all around.
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
            raise AttributeError("Only while a SavedModel is traced.")
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
