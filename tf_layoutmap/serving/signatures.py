"""Signatures of an exported model, which take tensors by name.

TensorFlow Serving sends tensors by name. A ragged input becomes two tensors,
such as `title_values` and `title_row_splits`. A sparse input becomes three:
`title_indices`, `title_values` and `title_dense_shape`.
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
    """Returns a `tf.function` with named tensors, for use as a signature.

    Args:
      function: A function with positional arguments of `specs`.
      specs: A structure of specs for each argument.
      names: A prefix of the tensor names of each argument. Arguments without a
        prefix use the paths in their structure only.

    Returns:
      A `tf.function` with an input signature. It returns the outputs of
      `function`; a nested structure becomes a dict by path.

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
    """Returns the specs of an input's tensors, and a function to rebuild it."""
    if type(spec) is tf.TensorSpec:
        return [tf.TensorSpec(spec.shape, spec.dtype, spec.name or name)], (
            lambda tensors: tensors[0]
        )
    if type(spec) is tf.RaggedTensorSpec:
        ragged: Any = spec  # The type stub lacks some attributes.
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
    # Splits that do not match the values raise an error.
    return tf.RaggedTensor.from_nested_row_splits(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
        values, splits, validate=True
    )


def _flat_outputs(outputs: Any) -> Any:
    if tf.is_tensor(outputs):
        return outputs
    is_flat = isinstance(outputs, dict | list | tuple) and all(
        tf.is_tensor(one)
        for one in (outputs.values() if isinstance(outputs, dict) else outputs)
    )
    return (
        outputs
        if is_flat
        else {path: one for path, one in inputs.flatten_with_paths(outputs)}
    )
