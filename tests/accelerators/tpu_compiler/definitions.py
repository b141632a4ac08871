"""Returns the `FunctionDef` of a concrete function, with all shapes.

DTensor writes the shapes of arguments, variables and nodes to the same
attributes.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.ops import handle_data_util


def definition_of(concrete: Any) -> function_pb2.FunctionDef:
    """Returns the definition of a concrete function.

    The shapes of arguments and of variables must be known.
    """
    function = function_pb2.FunctionDef()
    function.CopyFrom(concrete.function_def)
    for index, x in enumerate(concrete.inputs):
        attributes = function.arg_attr[index].attr
        _set_shapes(attributes["_output_shapes"], [x.shape.as_proto()])
        if x.dtype == tf.resource:
            handle: Any = handle_data_util.get_resource_handle_data(x)
            (data,) = handle.shape_and_type
            attributes["_handle_dtypes"].list.type[:] = [data.dtype]
            _set_shapes(attributes["_handle_shapes"], [data.shape])
    for node in function.node_def:
        operation = concrete.graph.get_operation_by_name(node.name)
        _set_shapes(
            node.attr["_output_shapes"],
            (x.shape.as_proto() for x in operation.outputs),
        )
    return function


def _set_shapes(attribute: Any, shapes: Iterable[Any]) -> None:
    del attribute.list.shape[:]
    attribute.list.shape.extend(shapes)
