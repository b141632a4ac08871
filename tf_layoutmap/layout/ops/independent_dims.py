"""Ops that process some of their dimensions independently, on shards.

DTensor has no rule for many ops of images, or only a rule that requires certain
layouts. An op such as a resize processes each sample and each channel
independently. On a mesh, such an op runs with `shard_map`: the dimensions that
the op processes independently stay sharded, and all other dimensions are
gathered. The gradient runs on shards in the same way.

`RULES` contains one entry per function of TensorFlow. The layout of the input
is used if it is known during tracing (`known_axes`). Otherwise the first
dimension is sharded like the batches of the step.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops
from tf_layoutmap.layout.mesh import shard_map, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.known_layouts import known_axes
from tf_layoutmap.layout.ops.corrections import is_shape, static_array

# Name scope of ops that gather a dimension that is sharded.
GATHERED_SCOPE = "layoutmap_gathered_dimension"

dtensor = tf.experimental.dtensor

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The dimensions that an op processes independently.

    Attributes:
      module: Name of the module in `_core.tf_private` that creates the op.
      op: Type of the op.
      dims: Function of the arguments of the op that returns the independent
        dimensions of `input`. These dimensions have the same positions and
        sizes in the result. None as a result runs the original op.
      input: Name of the argument that is sharded.
      constants: Names of arguments whose values must be known during tracing.
      replicated: Names of other tensor arguments.
      batched: Names of other tensor arguments whose first dimension is the
        batch, or has size 1.
      public: Public names of the function in `tf`.
      has_rule: Whether DTensor's rule supports tensors that are sharded only
        along the first dimension, so that the op is not changed in this case.
      is_batch_parallel: Whether DTensor's rule raises an error if another
        dimension of the input or of the result is sharded.
    """

    module: str
    op: str
    dims: Callable[[Arguments, int], Iterable[int] | None]
    input: str = "input"
    constants: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    has_rule: bool = False
    is_batch_parallel: bool = False


def _samples_and_channels(arguments: Arguments, rank: int) -> Iterable[int]:
    del arguments
    return 0, rank - 1


def _samples(arguments: Arguments, rank: int) -> Iterable[int]:
    del arguments, rank
    return (0,)


def _all_but_channels(arguments: Arguments, rank: int) -> Iterable[int]:
    del arguments
    return range(rank - 1)


def _images_and_channels(arguments: Arguments, rank: int) -> Iterable[int]:
    """Returns all dimensions except the height and the width."""
    del arguments
    return *range(rank - 3), rank - 1


def _of_pooling(arguments: Arguments, rank: int) -> Iterable[int]:
    channels = 1 if arguments["data_format"].startswith("NC") else rank - 1
    is_pooled = [
        i
        for name in ("ksize", "strides")
        for i, size in enumerate(arguments[name])
        if size != 1
    ]
    return [i for i in (0, channels) if i not in is_pooled]


def _unpadded(arguments: Arguments, rank: int) -> Iterable[int] | None:
    paddings = arguments["paddings"]
    if paddings.shape != (rank, 2):
        return None
    return [i for i in range(rank) if not paddings[i].any()]


def _unrolled(arguments: Arguments, rank: int) -> Iterable[int] | None:
    axes = arguments["axis"].reshape(-1)
    if any(not -rank <= axis < rank for axis in axes):
        return None
    return {*range(rank)} - {int(axis) % rank for axis in axes}


def _of_blocks(arguments: Arguments, rank: int) -> Iterable[int]:
    """Returns the dimensions after the blocks of space.

    The order of samples in the result depends on the number of samples, so the
    samples cannot be sharded.
    """
    return range(1 + arguments["block_shape"].size, rank)


_ARRAYS, _IMAGES, _NN = "gen_array_ops", "gen_image_ops", "gen_nn_ops"


def _resize(op: str, **options: Any) -> Rule:
    return Rule(
        _IMAGES,
        op,
        _samples_and_channels,
        "images",
        constants=("size",),
        **options,
    )


def _pool(op: str, **options: Any) -> Rule:
    return Rule(_NN, op, _of_pooling, **options)


# Maps the name of each function to its rule.
RULES: dict[str, Rule] = {
    "avg_pool": _pool("AvgPool", input="value", is_batch_parallel=True),
    "avg_pool3d": _pool("AvgPool3D", is_batch_parallel=True),
    "max_pool": _pool("MaxPool", has_rule=True, is_batch_parallel=True),
    "max_pool3d": _pool("MaxPool3D", has_rule=True, is_batch_parallel=True),
    "lrn": Rule(
        _NN,
        "LRN",
        _all_but_channels,
        public=("nn.lrn", "nn.local_response_normalization"),
    ),
    "resize_bilinear": _resize("ResizeBilinear", is_batch_parallel=True),
    "resize_nearest_neighbor": _resize(
        "ResizeNearestNeighbor", is_batch_parallel=True
    ),
    "resize_bicubic": _resize("ResizeBicubic"),
    "resize_area": _resize("ResizeArea"),
    "scale_and_translate": _resize(
        "ScaleAndTranslate", replicated=("scale", "translation")
    ),
    "image_projective_transform_v2": Rule(
        _IMAGES,
        "ImageProjectiveTransformV2",
        _samples_and_channels,
        "images",
        constants=("output_shape",),
        batched=("transforms",),
    ),
    "image_projective_transform_v3": Rule(
        _IMAGES,
        "ImageProjectiveTransformV3",
        _samples_and_channels,
        "images",
        constants=("output_shape",),
        replicated=("fill_value",),
        batched=("transforms",),
    ),
    "adjust_contrastv2": Rule(
        _IMAGES,
        "AdjustContrastv2",
        _images_and_channels,
        "images",
        replicated=("contrast_factor",),
        is_batch_parallel=True,
    ),
    "adjust_hue": Rule(
        _IMAGES,
        "AdjustHue",
        _all_but_channels,
        "images",
        replicated=("delta",),
    ),
    "adjust_saturation": Rule(
        _IMAGES,
        "AdjustSaturation",
        _all_but_channels,
        "images",
        replicated=("scale",),
        is_batch_parallel=True,
    ),
    "rgb_to_hsv": Rule(
        _IMAGES,
        "RGBToHSV",
        _all_but_channels,
        "images",
        public=("image.rgb_to_hsv",),
    ),
    "hsv_to_rgb": Rule(
        _IMAGES,
        "HSVToRGB",
        _all_but_channels,
        "images",
        public=("image.hsv_to_rgb",),
    ),
    "depth_to_space": Rule(_ARRAYS, "DepthToSpace", _samples),
    "space_to_depth": Rule(_ARRAYS, "SpaceToDepth", _samples),
    "space_to_batch_nd": Rule(
        _ARRAYS,
        "SpaceToBatchND",
        _of_blocks,
        constants=("block_shape", "paddings"),
        public=("space_to_batch_nd",),
    ),
    "batch_to_space_nd": Rule(
        _ARRAYS,
        "BatchToSpaceND",
        _of_blocks,
        constants=("block_shape", "crops"),
    ),
    "pad": Rule(
        _ARRAYS, "Pad", _unpadded, constants=("paddings",), has_rule=True
    ),
    "pad_v2": Rule(
        _ARRAYS,
        "PadV2",
        _unpadded,
        constants=("paddings",),
        replicated=("constant_values",),
        has_rule=True,
    ),
    "mirror_pad": Rule(
        _ARRAYS, "MirrorPad", _unpadded, constants=("paddings",)
    ),
    "roll": Rule(
        "gen_manip_ops",
        "Roll",
        _unrolled,
        constants=("axis",),
        replicated=("shift",),
    ),
    "extract_image_patches": Rule(
        _ARRAYS, "ExtractImagePatches", _samples, "images"
    ),
}

# Types of the ops in `RULES`, and of their gradients.
OPS = frozenset(
    type for rule in RULES.values() for type in (rule.op, rule.op + "Grad")
)


def run(
    original: Callable[..., Any],
    mesh: Mesh | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes an op of `RULES` on shards, or calls `original`."""
    rule = RULES[original.__name__]
    signature = inspect.signature(original)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return original(*args, **kwargs)  # Raises TensorFlow's error.
    bound.apply_defaults()
    call = _Call.of(rule, mesh, bound.arguments)
    if call is None:
        if (
            rule.is_batch_parallel
            and mesh is not None
            and shard_map.SCOPE not in tf.get_current_name_scope()
        ):
            images = bound.arguments[rule.input]
            bound.arguments[rule.input] = tracing.pin_unsharded_samples(
                tf.convert_to_tensor(images), mesh
            )
            return tracing.pin_unsharded_samples(
                original(*bound.args, **bound.kwargs), mesh
            )
        return original(*args, **kwargs)
    with tf.name_scope(GATHERED_SCOPE) if call.gathers else nullcontext():
        return call.run(original)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an op that can run on shards.

    Attributes:
      rule: Rule of the op.
      mesh: `dtensor.Mesh` of the input.
      arguments: All arguments of the op; constants are arrays.
      tensors: Names and layouts of the arguments that are tensors. The first
        one is the input; its layout is also the layout of the result.
      gathers: Whether a sharded dimension of the input is gathered.
    """

    rule: Rule
    mesh: Mesh
    arguments: Arguments
    tensors: dict[str, shard_map.Spec]
    gathers: bool

    @classmethod
    def of(
        cls, rule: Rule, mesh: Mesh | None, arguments: Arguments
    ) -> "_Call | None":
        """Returns a call; None if the original op must be called."""
        if shard_map.SCOPE in tf.get_current_name_scope():
            return None
        x = tf.convert_to_tensor(arguments[rule.input])
        if tf.executing_eagerly():
            if not tracing.on_mesh(x):
                return None
            mesh = dtensor.fetch_layout(x).mesh
        if (
            mesh is None
            or not x.shape.is_fully_defined()
            or 0 in x.shape
            or not x.shape.rank
            or (tf.is_symbolic_tensor(x) and is_shape(x))
            or not dtensor_ops.has_local_blocks()
        ):
            return None
        constants = {
            name: static_array(arguments[name]) for name in rule.constants
        }
        if any(value is None for value in constants.values()):
            return None
        arguments = {**arguments, **constants, rule.input: x}
        dims = rule.dims(arguments, x.shape.rank)
        if dims is None:
            return None
        return cls._with_layout(rule, mesh, arguments, {*dims})

    @classmethod
    def _with_layout(
        cls, rule: Rule, mesh: Mesh, arguments: Arguments, dims: set[int]
    ) -> "_Call | None":
        x = arguments[rule.input]
        known = known_axes(x)
        batch = tracing.batch_dim_of_trace()
        axes = known or (batch, *[None] * (x.shape.rank - 1))
        if rule.has_rule and (
            not any(axes[1:]) and (axes[0] is None or 0 in dims)
        ):
            return None
        spec = [
            axis if i in dims and _divides(mesh, axis, size) else None
            for i, (axis, size) in enumerate(zip(axes, x.shape))
        ]
        if not any(spec):
            return None
        tensors: dict[str, shard_map.Spec] = {rule.input: spec}
        for name in (*rule.replicated, *rule.batched):
            value = tf.convert_to_tensor(
                arguments[name],
                x.dtype if name == "constant_values" else None,
            )
            if not value.shape.is_fully_defined():
                return None
            if tf.executing_eagerly() and not tracing.on_mesh(value):
                value = transfer.to_replicated(value, mesh)
            arguments = {**arguments, name: value}
            others: list[str | None] = [None] * value.shape.rank
            if name in rule.batched and value.shape[0] != 1:
                if value.shape[0] != x.shape[0]:
                    return None
                others[0] = spec[0]
            tensors[name] = others
        gathers = known is not None and any(
            axis is not None and _divides(mesh, axis, 0) and axis not in spec
            for axis in known
        )
        return cls(rule, mesh, arguments, tensors, gathers)

    def run(self, original: Callable[..., Any]) -> Any:
        """Returns the result of the op, which is computed on shards."""
        names = list(self.tensors)
        options = {
            name: value
            for name, value in self.arguments.items()
            # A name of TensorFlow can place the op outside of the scope.
            if name not in (*names, "name")
        }
        x, *others = (self.arguments[name] for name in names)
        specs = list(self.tensors.values())
        return shard_map.shard_map(
            lambda *local: original(**dict(zip(names, local)), **options),
            self.mesh,
            # The op has no gradients of the other tensors.
            [x, *map(tf.stop_gradient, others)],
            specs,
            specs[0],
            key=(
                self.rule.op,
                *((name, _hashable(value)) for name, value in options.items()),
            ),
        )


def _divides(mesh: Mesh, axis: str | None, size: int) -> bool:
    """Returns whether `axis` has several devices and divides `size`."""
    return (
        axis is not None
        and mesh.dim_size(axis) > 1
        and size % mesh.dim_size(axis) == 0
    )


def _hashable(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr((value.dtype, value.tolist()))
    return repr(value)
