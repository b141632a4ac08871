"""Traces the step of a Keras model to a `StepGraph`, without allocation.

The model is called once in a graph in which each weight is a placeholder. The
names of layers and weights are not used.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layout.keras3.context import is_planning
from tf_layoutmap.planning.step_graph import (
    Dim,
    Op,
    StepGraph,
    Tensor,
    reshaped_dims,
)

# Sizes that are tried for unknown dimensions, except for the number of samples.
_LENGTHS = (128, 32, 16, 8, 224)

_SUMS = frozenset(("Add", "AddV2", "AddN", "BiasAdd", "Sub"))
# Operations whose outputs have a different order of elements.
_REORDERED = frozenset(
    ("Reverse", "ReverseV2", "Roll", "Cumsum", "Cumprod", "FFT", "FFT2D")
    + ("IFFT", "IFFT2D", "MatrixInverse", "Cholesky", "RandomShuffle", "Qr")
    + ("While", "StatelessWhile", "If", "StatelessIf", "XlaSort", "Unique")
)
_CONVOLUTIONS = frozenset(
    ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput")
    + ("Conv3DBackpropInputV2",)
)
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))


class NotTracedError(Exception):
    """The model cannot be called with inputs that are known."""


def trace(
    model: Any,
    weights: Sequence[Any],
    *,
    batch_size: int,
    length: int | None = None,
    inputs: Any = None,
) -> StepGraph:
    """Returns the graph of the forward pass of a model.

    Args:
      model: Keras 3 model.
      weights: The weights, which can be pending.
      batch_size: Number of samples per step.
      length: Size of unknown dimensions, such as the length of a text. None
        tries a few sizes.
      inputs: Batch, or structure with an object with `shape` and `dtype` for
        each input. None uses the inputs with which the model was built.

    Raises:
      NotTracedError: If the inputs are unknown or a call raises an error.
    """
    inputs = _inputs_of(model) if inputs is None else inputs
    errors: list[Exception] = []
    for size in _LENGTHS if length is None else (length,):
        for candidate in _candidates(inputs):
            try:
                return _trace(model, weights, candidate, batch_size, size)
            except Exception as error:
                errors.append(error)
        if not _has_unknown(inputs):
            break
    raise NotTracedError(
        f"the model cannot be called with inputs {_described(inputs)}: "
        f"{type(errors[0]).__name__}: {str(errors[0])[:500]}"
    ) from errors[0]


def _inputs_of(model: Any) -> Any:
    recorded = getattr(model, "_mesh_inputs", None)
    if isinstance(model, keras_private.Functional):
        return model._inputs_struct
    if isinstance(model, keras.Sequential) and model._functional is not None:
        return model._functional._inputs_struct
    if recorded is not None:
        return recorded
    shapes = getattr(model, "_build_shapes_dict", None)
    if not shapes:
        raise NotTracedError(
            "the inputs of the model are unknown; pass `inputs=`, for example "
            "a batch"
        )
    tensors = {
        name.removesuffix("_shape"): keras.tree.map_shape_structure(
            _Unknown, shape
        )
        for name, shape in shapes.items()
    }
    return (
        next(iter(tensors.values()))
        if len(tensors) == 1
        else _Arguments(tensors)
    )


class _Arguments(dict):
    """Inputs that are passed as keyword arguments."""


class _Unknown:
    """An input with a known shape and an unknown dtype."""

    def __init__(self, shape: Any):
        self.shape, self.dtype = tuple(shape), None


def _candidates(inputs: Any) -> Iterable[Any]:
    if any(getattr(x, "dtype", 0) is None for x in _flat(inputs)):
        yield _map(lambda x: (x.shape, "float32"), inputs)
        yield _map(lambda x: (x.shape, "int32"), inputs)
    else:
        yield _map(
            lambda x: (
                tuple(x.shape),
                keras.backend.standardize_dtype(x.dtype),
            ),
            inputs,
        )


def _flat(inputs: Any) -> list[Any]:
    return keras.tree.flatten(
        dict(inputs) if isinstance(inputs, _Arguments) else inputs
    )


def _map(function: Any, inputs: Any) -> Any:
    if isinstance(inputs, _Arguments):
        return _Arguments(
            (k, keras.tree.map_structure(function, v))
            for k, v in inputs.items()
        )
    return keras.tree.map_structure(
        lambda x: None if x is None else function(x), inputs
    )


def _has_unknown(inputs: Any) -> bool:
    return any(
        size is None
        for x in _flat(inputs)
        if x is not None
        for size in tuple(x.shape)[1:]
    )


def _described(inputs: Any) -> str:
    return ", ".join(
        f"{tuple(x.shape)} {x.dtype or ''}".strip()
        for x in _flat(inputs)
        if x is not None
    )


def _trace(
    model: Any, weights: Sequence[Any], inputs: Any, batch_size: int, size: int
) -> StepGraph:
    variables = list({id(v): v for v in [*weights, *model.variables]}.values())
    specs = [tf.TensorSpec(tuple(v.shape), v.dtype) for v in variables]
    leaves: list[tf.TensorSpec] = []

    def add(shape: Sequence[int | None], dtype: str) -> int:
        known = [batch_size, *(size if s is None else s for s in shape[1:])]
        leaves.append(tf.TensorSpec(known[: len(shape)], dtype))
        return len(leaves) - 1

    structure = _feed(add, inputs)
    traced: list[Any] = []

    def call(values: list[Any], fed: list[Any]) -> None:
        traced.extend([values, fed])
        with (
            is_planning.set_to(True),
            keras.StatelessScope(state_mapping=list(zip(variables, values))),
        ):
            call_model(model, _feed(fed.__getitem__, structure))

    # A graph of a function can contain eager tensors, for example constants
    # that a layer stores.
    graph = (
        tf.function(call, autograph=False)
        .get_concrete_function(specs, leaves)
        .graph
    )
    values, fed = traced[-2:]
    by_id = {id(v): value for v, value in zip(variables, values)}
    ids = {by_id[id(w)].name: index for index, w in enumerate(weights)}
    return _Reader(ids, fed).read(graph)


def call_model(model: Any, inputs: Any) -> Any:
    options = {"training": True} if model._call_has_training_arg else {}
    if isinstance(inputs, _Arguments):
        return model(**inputs, **options)
    return model(inputs, **options)


def _feed(feed: Any, inputs: Any) -> Any:
    """Replaces each leaf of a structure by the result of `feed`.

    A leaf is a tuple of a shape and a dtype, or an index.
    """

    def convert(x: Any) -> Any:
        if isinstance(x, int):
            return feed(x)
        if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], str):
            return feed(*x)
        if isinstance(x, dict):
            return type(x)((k, convert(v)) for k, v in x.items())
        if isinstance(x, list | tuple):
            return type(x)(convert(v) for v in x)
        return x

    return convert(inputs)


class _Reader:
    """Converts the operations of a graph of TensorFlow."""

    def __init__(self, weights: dict[str, int], batch: Sequence[Any]):
        self._weights = weights
        self._fed = {tensor.name for tensor in batch}
        self._features = {t.name for t in batch if t.dtype.is_floating}
        self._ids: dict[str, int] = {}
        self._tensors: list[Tensor] = []
        self._ops: list[Op] = []

    def read(self, graph: tf.Graph) -> StepGraph:
        for op in graph.get_operations():
            for tensor in op.outputs:
                self._add(tensor)
            if op.type not in ("Placeholder", "Const") and op.outputs:
                self._ops.append(self._convert(op))
        return StepGraph(
            self._tensors,
            self._ops,
            len(self._weights),
            [self._ids[name] for name in self._fed if self._shape_of(name)],
            [self._ids[name] for name in self._features],
        )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[self._ids[name]].shape

    def _add(self, tensor: Any) -> None:
        self._ids[tensor.name] = len(self._tensors)
        shape = (
            ()
            if tensor.shape.rank is None
            else tuple(size or 0 for size in tensor.shape.as_list())
        )
        size = 0 if tensor.dtype in _WITHOUT_SIZE else tensor.dtype.size
        self._tensors.append(
            Tensor(shape, size, self._weights.get(tensor.name))
        )

    def _convert(self, op: Any) -> Op:
        inputs = tuple(self._ids[t.name] for t in op.inputs)
        outputs = tuple(self._ids[t.name] for t in op.outputs)
        shapes = [self._tensors[t].shape for t in inputs]
        out = self._tensors[outputs[0]].shape
        if op.type in ("Shape", "ShapeN", "Rank", "Size"):
            # Shapes do not depend on the values of the inputs.
            return Op("other", (), outputs)
        equation = _equation(op, shapes)
        if equation is not None:
            same, contracted, flops = _of_equation(*equation, shapes, out)
            return Op("product", inputs, outputs, same, contracted, flops)
        if op.type in _CONVOLUTIONS:
            return _convolution(op.type, inputs, outputs, shapes, out)
        if op.type in ("GatherV2", "ResourceGather", "GatherNd", "Gather"):
            return _lookup(op, inputs, outputs, shapes, out)
        same = _same_dims(op, shapes, out)
        kind = "sum" if op.type in _SUMS else "other"
        if op.type in ("Unpack", "Split", "SplitV", "IdentityN"):
            return Op(
                kind,
                inputs,
                outputs,
                tuple(
                    pair
                    for o, tensor in enumerate(outputs)
                    for pair in _of_part(
                        op, o, shapes, self._tensors[tensor].shape
                    )
                ),
            )
        return Op(kind, inputs, outputs, tuple(same))


_WITHOUT_SIZE = (tf.string, tf.resource, tf.variant)


def _of_part(op: Any, o: int, shapes: Any, out: Any) -> list[tuple[Dim, Dim]]:
    if op.type == "IdentityN":
        return [((o, d), (o, d)) for d in range(len(out))]
    i = 1 if op.type == "Split" else 0
    if op.type == "Unpack":
        axis = op.get_attr("axis") % len(shapes[i])
        dims = [d for d in range(len(shapes[i])) if d != axis]
        return [((i, d), (o, k)) for k, d in enumerate(dims)]
    return [
        ((i, d), (o, d))
        for d in range(min(len(out), len(shapes[i])))
        if shapes[i][d] == out[d]
    ]


def _equation(op: Any, shapes: Any) -> tuple[list[str], str] | None:
    """Returns the labels of the operands and the result of a product."""
    if op.type == "MatMul":
        a = "ab" if not op.get_attr("transpose_a") else "ba"
        b = "bc" if not op.get_attr("transpose_b") else "cb"
        return [a, b], "ac"
    if op.type in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        rank = max(map(len, shapes))
        labels = string.ascii_uppercase[: rank - 2]
        a = "ab" if not op.get_attr("adj_x") else "ba"
        b = "bc" if not op.get_attr("adj_y") else "cb"
        return [
            labels[rank - len(shapes[0]) :] + a,
            labels[rank - len(shapes[1]) :] + b,
        ], labels + "ac"
    if op.type == "Einsum":
        equation = tf.compat.as_str(op.get_attr("equation"))
        left, _, result = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        hidden = max(
            (
                len(shape) - len(term.replace("...", ""))
                for term, shape in zip(terms, shapes)
                if "..." in term
            ),
            default=0,
        )
        free = [c for c in string.ascii_uppercase if c not in equation]
        labels = "".join(free[:hidden])

        def expanded(term: str, rank: int | None) -> str:
            if "..." not in term:
                return term
            missing = (
                hidden if rank is None else rank - len(term.replace("...", ""))
            )
            return term.replace("...", labels[hidden - missing :])

        return [
            expanded(term, len(shape)) for term, shape in zip(terms, shapes)
        ], expanded(result, None)
    return None


def _of_equation(
    terms: list[str], result: str, shapes: Any, out: Any
) -> tuple[Any, Any, int]:
    sizes: dict[str, int] = {}
    same, contracted = [], []
    where: dict[str, Dim] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes)):
        for d, (label, size) in enumerate(zip(term, shape)):
            sizes[label] = max(sizes.get(label, 0), size)
            if label in result:
                o = result.index(label)
                if o < len(out) and out[o] == size:
                    same.append(((i, d), (0, o)))
            elif label in where:
                contracted.append((where[label], (i, d)))
            where.setdefault(label, (i, d))
    flops = 2 * math.prod(sizes.values()) if len(terms) == 2 else 0
    return tuple(same), tuple(contracted), flops


def _convolution(
    kind: str, inputs: Any, outputs: Any, shapes: Any, out: Any
) -> Op:
    # Inputs and outputs of convolution layers are unsharded on a mesh, except
    # for their samples. Their channels therefore do not correspond.
    kernel = shapes[1]
    backward = "Backprop" in kind
    x = 2 if backward else 0
    flops = (
        2 * math.prod(kernel[:-1]) * math.prod(shapes[x] if backward else out)
    )
    if kind == "DepthwiseConv2dNative":
        flops //= max(kernel[-2], 1)
    elif backward:
        flops = (
            2 * math.prod(kernel) // max(kernel[-1], 1) * math.prod(shapes[x])
        )
    same = [((x, 0), (0, 0))] if shapes[x][:1] == out[:1] else []
    columns, rows = len(kernel) - 1, len(kernel) - 2
    if backward:
        rows, columns = columns, rows
    channel = len(out) - 1
    if kind == "DepthwiseConv2dNative":
        kernel_dims = (None, len(kernel) - 2, channel)
    else:
        kernel_dims = (rows, columns, channel)
    return Op(
        "convolution", inputs, outputs, tuple(same), (), flops, kernel_dims
    )


def _lookup(op: Any, inputs: Any, outputs: Any, shapes: Any, out: Any) -> Op:
    table, ids = shapes[0], shapes[1]
    same: list[tuple[Dim, Dim]] = []
    axis, batch_dims = 0, 0
    if op.type == "GatherV2":
        value = tf.get_static_value(op.inputs[2])
        batch_dims = op.get_attr("batch_dims")
        if value is None:
            return Op("other", inputs, outputs)
        axis = int(value) % max(len(table), 1)
    if op.type == "GatherNd" or batch_dims:
        pairs = [((0, 0), (0, 0))] if table[:1] == out[:1] else []
        return Op("other", inputs, outputs, tuple(pairs))
    same += [((0, d), (0, d)) for d in range(axis)]
    same += [((1, d), (0, axis + d)) for d in range(len(ids))]
    same += [
        ((0, d), (0, d + len(ids) - 1)) for d in range(axis + 1, len(table))
    ]
    return Op("lookup" if axis == 0 else "other", inputs, outputs, tuple(same))


def _same_dims(op: Any, shapes: Any, out: Any) -> list[tuple[Dim, Dim]]:
    """Returns the dimensions of inputs and output that correspond."""
    kind = op.type
    if kind in _REORDERED or kind in _CALLS or not shapes:
        return []
    first = shapes[0]
    if kind == "Reshape" and op.inputs[0].op.type in ("Tile", "BroadcastTo"):
        # Merging a repeated dimension with the dimension before it is what
        # `repeat` does, for example for the keys of grouped queries.
        return [
            ((0, i), (0, o))
            for i, o in reshaped_dims(first, out)
            if first[i] == out[o]
        ]
    if kind == "Reshape":
        return [((0, i), (0, o)) for i, o in reshaped_dims(first, out)]
    if kind in ("ExpandDims", "Squeeze"):
        return [((0, i), (0, o)) for i, o in reshaped_dims(first, out)]
    if kind == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        if order is None:
            return []
        return [((0, int(i)), (0, o)) for o, i in enumerate(order)]
    if kind in ("Mean", "Sum", "Max", "Min", "Prod", "Any", "All"):
        axes = tf.get_static_value(op.inputs[1])
        if axes is None:
            return []
        reduced = (
            {int(a) % max(len(first), 1) for a in axes.reshape(-1)}
            if (first)
            else set()
        )
        if op.get_attr("keep_dims"):
            kept = [(d, d) for d in range(len(first)) if d not in reduced]
        else:
            dims = [d for d in range(len(first)) if d not in reduced]
            kept = [(d, o) for o, d in enumerate(dims)]
        return [((0, i), (0, o)) for i, o in kept]
    if kind in ("Tile", "BroadcastTo"):
        shift = len(out) - len(first)
        # A repeated dimension and the dimension before it are often merged
        # afterwards, for example for the heads of grouped queries.
        return [
            ((0, d), (0, d + shift))
            for d in range(len(first))
            if first[d] == out[d + shift]
            and not (d + 1 < len(first) and first[d + 1] != out[d + 1 + shift])
        ]
    if kind == "Pack":
        axis = op.get_attr("axis") % len(out)
        dims = [d for d in range(len(out)) if d != axis]
        return [
            ((i, k), (0, d))
            for i, shape in enumerate(shapes)
            for k, d in enumerate(dims)
        ]
    if kind == "StridedSlice":
        if (
            op.get_attr("new_axis_mask")
            or op.get_attr("shrink_axis_mask")
            or op.get_attr("ellipsis_mask")
        ):
            return [((0, i), (0, o)) for i, o in _aligned(first, out)]
        return [((0, d), (0, d)) for d in range(len(out)) if first[d] == out[d]]
    # Elementwise operations, with broadcasting.
    pairs: list[tuple[Dim, Dim]] = []
    for i, shape in enumerate(shapes):
        if not shape or len(shape) > len(out):
            continue
        if kind in ("Slice", "Pad", "PadV2", "MirrorPad", "OneHot") and i:
            continue
        if len(shape) == 1 and i and kind in ("Slice", "Cumsum", "ArgMax"):
            continue
        shift = len(out) - len(shape)
        pairs += [
            ((i, d), (0, d + shift))
            for d, size in enumerate(shape)
            if size == out[d + shift] and size != 1
        ]
    return pairs


def _aligned(before: Any, after: Any) -> list[tuple[int, int]]:
    """Returns pairs of equal sizes in order, if they are unambiguous."""
    pairs, start = [], 0
    for i, size in enumerate(before):
        for o in range(start, len(after)):
            if after[o] == size:
                pairs.append((i, o))
                start = o + 1
                break
    return pairs


def graph_of_layers(
    weights: Sequence[Any], owners: Sequence[Any], batch_size: int
) -> StepGraph:
    """Returns the graph of a model that cannot be traced.

    The graph has one operation per kernel of a known layer. It does not contain
    which layer follows which.
    """
    tensors: list[Tensor] = []
    ops: list[Op] = []
    batch: list[int] = []

    def add(shape: Sequence[int], weight: int | None = None) -> int:
        tensors.append(Tensor(tuple(shape), 4, weight))
        return len(tensors) - 1

    number = {id(w): i for i, w in enumerate(weights)}
    ids = [add(tuple(w.shape), i) for i, w in enumerate(weights)]
    kernels = ("_kernel", "kernel", "_embeddings", "embeddings")
    for weight, owner in zip(weights, owners):
        if owner is None or not any(
            getattr(owner, "__dict__", {}).get(name) is weight
            for name in kernels
        ):
            continue
        shape = tuple(weight.shape)
        if isinstance(owner, keras.layers.Embedding):
            out = add((batch_size, *shape[1:]))
            x = add((batch_size,))
            same = [((1, 0), (0, 0)), ((0, 1), (0, 1))]
            ops.append(
                Op("lookup", (ids[number[id(weight)]], x), (out,), tuple(same))
            )
        elif isinstance(owner, keras.layers.Dense):
            out, x = add((batch_size, shape[1])), add((batch_size, shape[0]))
            same, contracted, flops = _of_equation(
                ["ab", "bc"],
                "ac",
                [tensors[x].shape, shape],
                tensors[out].shape,
            )
            ops.append(
                Op(
                    "product",
                    (x, ids[number[id(weight)]]),
                    (out,),
                    same,
                    contracted,
                    flops,
                )
            )
        else:
            continue
        batch.append(x)
        bias = getattr(owner, "bias", None)
        if bias is not None:
            total = add(tensors[out].shape)
            ops.append(
                Op(
                    "sum",
                    (out, ids[number[id(bias)]]),
                    (total,),
                    (((0, 0), (0, 0)), ((0, 1), (0, 1)), ((1, 0), (0, 1))),
                )
            )
    return StepGraph(tensors, ops, len(weights), batch)
