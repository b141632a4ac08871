"""Signatures of an exported model whose inputs are named tensors.

TensorFlow Serving passes tensors by name, so each ragged or sparse input is
split into several tensors. A ragged input becomes two tensors, such as
`title_values` and `title_row_splits`. A sparse input becomes three tensors,
such as `title_indices`, `title_values` and `title_dense_shape`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import inputs

_Parts = list[tf.TensorSpec]


def has_composites(specs: Any) -> bool:
    """Returns whether a structure contains ragged or sparse specs."""
    return not all(
        isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(specs)
    )


def of_tensors(
    function: Callable[..., Any],
    specs: Sequence[Any],
    names: Sequence[str] = (),
) -> Any:
    """Returns a `tf.function` with named tensors, to use as a signature.

    Args:
      function: A function with positional arguments of `specs`.
      specs: A structure of specs for each argument.
      names: A prefix for each argument, which is added to the names of its
        tensors. If an argument has no prefix, the names contain only the path
        in the structure.

    Returns:
      A `tf.function` with an input signature. The `tf.function` returns the
      outputs of `function`. A nested structure of outputs becomes a dict whose
      keys are paths in the structure.

    Raises:
      ValueError: If two tensors would have the same name.
    """
    flat: _Parts = []
    readers: list[Callable[[Sequence[Any]], Any]] = []
    for index, argument in enumerate(specs):
        prefix = names[index] if index < len(names) else ""
        for path, spec in inputs.flatten_with_paths(argument):
            name = re.sub(
                r"[^A-Za-z0-9_.]",
                "_",
                "_".join(part for part in (prefix, path) if part) or "inputs",
            )
            parts, read = _parts_of(spec, name)
            where = slice(len(flat), len(flat) + len(parts))
            flat += parts
            readers.append(
                lambda tensors, where=where, read=read: read(tensors[where])
            )
    tensor_names = [part.name for part in flat]
    if len(set(tensor_names)) < len(tensor_names):
        raise ValueError(
            "The inputs of an exported model must have unique names. "
            f"Received: {tensor_names}."
        )

    @tf.function(input_signature=flat)
    @tf.autograph.experimental.do_not_convert
    def signature(*tensors: tf.Tensor) -> Any:
        arguments = tf.nest.pack_sequence_as(
            list(specs), [read(tensors) for read in readers]
        )
        return _flat_outputs(function(*arguments))

    return signature


def _parts_of(spec: Any, name: str) -> tuple[_Parts, Callable[..., Any]]:
    """Returns tensor specs for an input, and a function that rebuilds it."""
    if type(spec) is tf.TensorSpec:
        return [tf.TensorSpec(spec.shape, spec.dtype, spec.name or name)], (
            lambda tensors: tensors[0]
        )
    if type(spec) is tf.RaggedTensorSpec:
        # The type stub of `RaggedTensorSpec` does not contain all attributes.
        ragged: Any = spec
        ranks = ragged.ragged_rank
        numbers = [""] if ranks == 1 else [f"_{i}" for i in range(ranks)]
        shape = tf.TensorShape([None]).concatenate(
            tf.TensorShape(spec.shape)[ranks + 1 :]
        )
        return [
            tf.TensorSpec(shape, spec.dtype, f"{name}_values"),
            *(
                tf.TensorSpec(
                    [None],
                    ragged.row_splits_dtype,
                    f"{name}_row_splits{number}",
                )
                for number in numbers
            ),
        ], _ragged
    rank = tf.TensorShape(spec.shape).rank
    return [
        tf.TensorSpec([None, rank], tf.int64, f"{name}_indices"),
        tf.TensorSpec([None], spec.dtype, f"{name}_values"),
        tf.TensorSpec([rank], tf.int64, f"{name}_dense_shape"),
    ], (lambda tensors: tf.SparseTensor(*tensors))


def _ragged(tensors: Sequence[tf.Tensor]) -> tf.RaggedTensor:
    values, *splits = tensors
    # If the row splits do not match the values, an error is raised.
    return tf.RaggedTensor.from_nested_row_splits(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
        values, splits, validate=True
    )


def _flat_outputs(outputs: Any) -> Any:
    if tf.is_tensor(outputs):
        return outputs
    is_flat = isinstance(outputs, dict | list | tuple) and all(
        tf.is_tensor(output)
        for output in (
            outputs.values() if isinstance(outputs, dict) else outputs
        )
    )
    return outputs if is_flat else dict(inputs.flatten_with_paths(outputs))
