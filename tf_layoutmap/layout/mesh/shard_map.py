"""Computations in which each device uses only its shards.

DTensor has no rule that shards a convolution by channels. `shard_map` runs any
function on the shards of each device: the function gets the local shard of each
input, and returns the local shard of the result.

To DTensor, the local shards look like replicated tensors. An op on replicated
tensors needs no communication, so each device runs the op on its own values.
`_to_local` and `_to_global` are the only places where the difference matters:

* `_to_local` uses an op for which this package registers an expander that
  leaves sharded inputs unchanged and declares the result replicated
  (`dtensor_ops.local_shard`, on GPUs `dtensor_ops.local_block`, on TPUs
  `dtensor_ops.local_block_of_tpu`).
* `_to_global` inserts a block dimension of size 1 in front of each sharded
  dimension, and broadcasts it to the number of shards. DTensor shards the block
  dimension, so each device keeps its own block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, tf_private
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

# Mesh axis of each dimension of a tensor.
Spec = Sequence[str | None]

# Name scope of ops on local shards, and of the conversions. The gradients of
# these ops are created in the same scope.
SCOPE = "layoutmap_on_shards"


@dataclasses.dataclass(frozen=True)
class ShardedKernel:
    """A sharded convolution kernel of a layer.

    Attributes:
      kind: `"convolution"`, `"transpose"` or `"depthwise"`.
      channels: Sizes of the last two dimensions of the kernel.
      axes: Mesh axes of the last two dimensions of the kernel.
    """

    kind: str
    channels: tuple[int, int]
    axes: tuple[str | None, str | None]


def shard_map(
    function: Callable[..., Any],
    mesh: Mesh,
    inputs: Sequence[Any],
    specs: Sequence[Spec],
    out_spec: Spec,
    summed: Sequence[str] = (),
    *,
    key: Hashable = None,
    has_separate_gradients: bool = False,
) -> Any:
    """Returns the result of `function` on the shards of each device.

    The gradients of the inputs have the layouts of the inputs.

    Args:
      function: Function of the local shards that returns the local shard of the
        result. Its ops must not depend on anything else on the mesh.
      mesh: `dtensor.Mesh` of the inputs.
      inputs: Tensors with static shapes.
      specs: Layout of each input. A mesh axis must divide its dimension.
      out_spec: Layout of the result.
      summed: Mesh axes over which the local results are summed.
      key: Hashable value that identifies `function`. In eager mode, the
        function is traced only once per key; None to trace it in each call.
      has_separate_gradients: Whether a gradient that is not used is not
        computed. The gradients are then computed separately, so the gradient
        of an input must not need other results of `function`. Used for
        convolutions: the gradient of the images of a batch is not used.
    """
    (result,) = _mapped(
        lambda *local: [function(*local)],
        mesh,
        [tf.convert_to_tensor(x) for x in inputs],
        [_of_several_devices(mesh, spec) for spec in specs],
        [_of_several_devices(mesh, out_spec)],
        [[axis for axis in summed if mesh.dim_size(axis) > 1]],
        None if key is None else (key, str(specs), str(out_spec), str(summed)),
        has_separate_gradients=has_separate_gradients,
    )
    return result


def _mapped(
    function: Callable[..., list[Any]],
    mesh: Mesh,
    inputs: list[Any],
    specs: list[list[str | None]],
    out_specs: list[list[str | None]],
    summed: list[list[str]],
    key: Hashable,
    known: Sequence[Any] = (),
    has_separate_gradients: bool = False,
) -> list[Any]:
    """Returns the results of a function with several results.

    No local shard leaves the function in which it is created. Otherwise DTensor
    could copy the local shard of one device to all devices, because it looks
    like a replicated tensor. The gradient is therefore also computed from the
    inputs, and not from tensors of the forward pass.

    Args:
      function: Function from local inputs to local results.
      mesh: `dtensor.Mesh`.
      inputs: Tensors on the mesh.
      specs: Layout of each input.
      out_specs: Layout of each result.
      summed: For each result, the mesh axes over which it is summed.
      key: See `shard_map`.
      known: Local shards of the first inputs, if they are known.
      has_separate_gradients: See `shard_map`.
    """
    axes = dict.fromkeys(
        axis
        for spec in (*specs, *out_specs, *summed)
        for axis in spec
        if axis is not None
    )

    num_parts = math.prod(mesh.dim_size(axis) for axis in axes)

    def run(*inputs: Any) -> tuple[list[Any], list[Any]]:
        # Measurements read the number of parts from the scope.
        with tf.name_scope(f"{SCOPE}_over_{num_parts}"):
            graph = tf.compat.v1.get_default_graph()
            local = [
                known[i]
                if i < len(known) and known[i].graph is graph
                else _to_local(x, mesh, spec)
                for i, (x, spec) in enumerate(zip(inputs, specs))
            ]
            return [
                _to_global(y, mesh, spec, over)
                for y, spec, over in zip(function(*local), out_specs, summed)
            ], local

    # Reports name the layer of the gradient.
    scope = tf.get_current_name_scope()

    @tf.custom_gradient
    def mapped(*inputs: Any) -> Any:
        if tf.executing_eagerly():
            # The gradient is computed from the inputs, so the function needs
            # no gradient, which some ops do not have.
            constants = map(tf.stop_gradient, inputs)
            results = _traced(lambda *x: run(*x)[0], mesh, key)(*constants)
            local = []
        else:
            results, local = run(*inputs)

        def gradient(*dys: Any) -> Any:
            # Integers have no gradient.
            floating = [i for i, x in enumerate(inputs) if x.dtype.is_floating]

            def local_gradients(wanted: list[int], *values: Any) -> list[Any]:
                xs, dys = values[: len(inputs)], values[len(inputs) :]
                watched = [xs[i] for i in wanted]
                with tf.GradientTape() as tape:
                    tape.watch(watched)
                    ys = function(*xs)
                return tape.gradient(
                    ys,
                    watched,
                    output_gradients=[*dys],
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )

            # TensorFlow groups the results of a custom gradient, so that all of
            # them are computed if one of them is used.
            groups = (
                [[i] for i in floating]
                if has_separate_gradients and local
                else [floating]
            )
            gradients: list[Any] = [None] * len(inputs)
            with tf.name_scope(f"{scope}/" if scope else "gradient"):
                for group in groups:
                    values = _mapped(
                        functools.partial(local_gradients, group),
                        mesh,
                        [*inputs, *dys],
                        [*specs, *out_specs],
                        [specs[i] for i in group],
                        # The gradient is summed over the axes along which the
                        # input is replicated and the computation is sharded.
                        [
                            [axis for axis in axes if axis not in specs[i]]
                            for i in group
                        ],
                        None if key is None else ("gradient", *group, key),
                        local,
                    )
                    for i, value in zip(group, values):
                        gradients[i] = value
            return gradients

        return results, gradient

    return mapped(*inputs)


def _traced(function: Callable[..., Any], mesh: Mesh, key: Hashable) -> Any:
    """Returns `function` as a `tf.function`; equal keys share one."""
    kept = tf_private.kept_with_device("shard_map")
    if key is None or (mesh.to_string(), key) not in kept:
        traced = tf.function(function, autograph=False)
        if key is None:
            return traced
        kept[mesh.to_string(), key] = traced
    return kept[mesh.to_string(), key]


def local_size(size: int, mesh: Mesh, axis: str | None) -> int:
    """Returns the size of a local dimension that `axis` shards."""
    return size if axis is None else size // mesh.dim_size(axis)


def _of_several_devices(mesh: Mesh, spec: Spec) -> list[str | None]:
    return [
        None if axis is None or mesh.dim_size(axis) == 1 else axis
        for axis in spec
    ]


def _to_local(x: Any, mesh: Mesh, spec: Spec) -> Any:
    """Returns the local shard of `x`, whose layout becomes `spec`."""
    x = _pin(x, mesh, spec)
    sharded = [dim for dim, axis in enumerate(spec) if axis is not None]
    if not sharded:
        return x
    if _shares_memory(mesh) and not _has_tpus(mesh):
        shape = [local_size(n, mesh, axis) for n, axis in zip(x.shape, spec)]
        return _pin(dtensor_ops.local_shard(x, shape), mesh)
    return _local_block(x, mesh, spec)


def _local_block(x: Any, mesh: Mesh, spec: Spec) -> Any:
    """Returns the local shard of `x` on a mesh of GPUs or TPUs.

    The dimension of blocks is moved to the front, because the op selects the
    block by an index into the first dimensions.
    """
    shape: list[int] = []
    axes: list[str | None] = []
    blocks: list[int] = []
    local: list[int] = []
    for size, axis in zip(x.shape, spec):
        if axis is not None:
            blocks.append(len(shape))
            shape.append(mesh.dim_size(axis))
            axes.append(axis)
        local.append(local_size(size, mesh, axis))
        shape.append(local[-1])
        axes.append(None)
    order = blocks + [i for i in range(len(shape)) if i not in blocks]
    x = _pin(tf.reshape(x, shape), mesh, axes)
    # On each device, the block dimensions have size 1, so the transposition
    # does not copy the shard.
    axes = [axes[i] for i in order]
    x = _pin(tf.transpose(x, order), mesh, axes)
    axes = [*axes[: len(blocks)], None]
    x = _pin(tf.reshape(x, [*x.shape[: len(blocks)], -1]), mesh, axes)
    if _has_tpus(mesh):
        segments = _pin(tf.zeros(x.shape[:-1], tf.int32), mesh, axes[:-1])
        x = dtensor_ops.local_block_of_tpu(segments, x)
    else:
        x = dtensor_ops.local_block(
            _pin(tf.zeros([1] * len(blocks) + x.shape[-1:], x.dtype), mesh),
            _pin(tf.zeros([*x.shape[:-1], len(blocks)], tf.int32), mesh, axes),
            x,
        )
    return _pin(tf.reshape(_pin(x, mesh), local), mesh)


def _shares_memory(mesh: Mesh) -> bool:
    """Returns whether `local_shard`, which does not copy, can be used."""
    return mesh.device_type() == "CPU"


def _has_tpus(mesh: Mesh) -> bool:
    return mesh.device_type() == "TPU"


def _to_global(x: Any, mesh: Mesh, spec: Spec, summed: Sequence[str]) -> Any:
    """Returns the tensor whose local shards are `x`, summed over `summed`."""
    block = [1] * len(summed)
    shape = [mesh.dim_size(axis) for axis in summed]
    axes: list[str | None] = list(summed)
    full = []
    for size, axis in zip(x.shape, spec):
        count = 1 if axis is None else mesh.dim_size(axis)
        if axis is not None:
            block.append(1)
            shape.append(count)
            axes.append(axis)
        block.append(size)
        shape.append(size)
        axes.append(None)
        full.append(size * count)
    x = _pin(x, mesh)
    if len(block) > len(full):
        x = _pin(tf.reshape(x, block), mesh)
        x = _pin(tf.broadcast_to(x, shape), mesh, axes)
    if any(axis is not None for axis in spec):
        x = _pin(
            tf.reshape(x, [*x.shape[: len(summed)], *full]),
            mesh,
            [*summed, *spec],
        )
    if summed:
        x = tf.reduce_sum(x, axis=list(range(len(summed))))
    return _pin(x, mesh, spec)


def _pin(x: Any, mesh: Mesh, axes: Spec | None = None) -> Any:
    """Returns `x` with a fixed layout, by default replicated."""
    specs = [dtensor.UNSHARDED] * x.shape.rank
    if axes is not None:
        specs = [dtensor.UNSHARDED if axis is None else axis for axis in axes]
    return dtensor.relayout(x, dtensor.Layout(specs, mesh))
