"""The signature of an exported model: tensors by name, for inputs of any form.

TensorFlow Serving sends tensors by name. A ragged or sparse input is several:
`title_values` and `title_row_splits`; `title_indices`, `title_values` and
`title_dense_shape`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import inputs

_Parts = list[tf.TensorSpec]


def has_composites(specs: Any) -> bool:
    """Whether a structure of specs has ragged or sparse ones."""
    return not all(
        isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(specs)
    )


def of_tensors(
    function: Callable[..., Any],
    specs: Sequence[Any],
    names: Sequence[str] = (),
) -> Any:
    """Returns a `tf.function` of named tensors, for a signature.

    Args:
      function: Takes positional arguments of `specs`.
      specs: A structure of specs for each argument.
      names: A name for each argument, of which parts of structures and
        composites have more; none where the first needs none.

    Returns:
      A `tf.function` with an input signature. It returns what `function`
      does, a nested structure as a dict of paths.

    Raises:
      ValueError: If two tensors would have one name.
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
    taken = [part.name for part in flat]
    if len(set(taken)) < len(taken):
        raise ValueError(
            "The inputs of an exported model must have names of their own. "
            f"Received: {taken}."
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
    """Specs of the tensors of an input, and what makes it of them."""
    if type(spec) is tf.TensorSpec:
        return [tf.TensorSpec(spec.shape, spec.dtype, spec.name or name)], (
            lambda tensors: tensors[0]
        )
    if type(spec) is tf.RaggedTensorSpec:
        ragged: Any = spec  # Its stub knows few names.
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
    # Whoever sends splits that do not fit the values is told so.
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
