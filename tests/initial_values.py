"""The matrix of initializers, dtypes and layouts in docs/initial_values.md.

    python -m tests.initial_values  # Writes the page's table.

`tests/test_initial_values.py` compares the page with the results of this
module. `differences` compares the value of each case with the value that the
initializer returns on one device.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layout import meshes
from tf_layoutmap._core import random_tensors
from tf_layoutmap.layout.keras3 import initial_values

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "initial_values.md"
START, END = "<!-- results -->\n", "<!-- end of results -->\n"

DTYPES = ("float16", "bfloat16", "float32", "float64")
SHAPES = {"2-D": (12, 20), "3-D": (4, 6, 12)}
# Mesh axes of each dimension, by name, for each rank.
LAYOUTS = {
    "rows": {2: ("a", None), 3: ("a", None, None)},
    "columns": {2: (None, "a"), 3: (None, None, "a")},
    "both": {2: ("a", "b"), 3: (None, "b", "a")},
}
RANDOM = (
    "RandomUniform",
    "RandomNormal",
    "TruncatedNormal",
    "GlorotUniform",
    "GlorotNormal",
    "HeUniform",
    "HeNormal",
    "LecunUniform",
    "LecunNormal",
)
LIBRARIES = {
    "Keras 3": keras.initializers,
    "tf_keras": tf_keras.initializers,
    # `tf.initializers` is the module of Keras 3.
    "TensorFlow": sys.modules[tf.zeros_initializer.__module__],
}


class Case(NamedTuple):
    """An initializer.

    Attributes:
      library: Name of the library, a key of `LIBRARIES`.
      name: Name of the initializer, with its arguments.
      make: Function that creates the initializer with a fixed seed.
    """

    library: str
    name: str
    make: Callable[[], Any]


def cases() -> Iterator[Case]:
    """Yields all initializers of the three libraries, and a callable."""
    for library, module in LIBRARIES.items():
        for name in RANDOM:
            kind = getattr(module, name, None)
            if kind is not None:
                yield Case(library, name, functools.partial(kind, seed=7))
        for distribution in (
            "truncated_normal",
            "untruncated_normal",
            "uniform",
        ):
            yield Case(
                library,
                f"VarianceScaling({distribution!r})",
                functools.partial(
                    module.VarianceScaling,
                    0.7,
                    "fan_out",
                    distribution,
                    seed=7,
                ),
            )
        yield Case(library, "Zeros", module.Zeros)
        yield Case(library, "Ones", module.Ones)
        yield Case(
            library, "Constant(0.3)", functools.partial(module.Constant, 0.3)
        )
        yield Case(
            library, "Orthogonal", functools.partial(module.Orthogonal, seed=7)
        )
        yield Case(library, "Identity", module.Identity)
    yield Case(
        "Keras 3",
        "RandomUniform with a SeedGenerator",
        lambda: keras.initializers.RandomUniform(
            seed=keras.random.SeedGenerator(3)
        ),
    )
    yield Case(
        "Keras 3",
        "VarianceScaling with axes",
        lambda: keras.initializers.VarianceScaling(
            0.7, "fan_in", "uniform", seed=7, input_axes=[0], output_axes=[-1]
        ),
    )
    yield Case("user code", "callable", lambda: _callable)


def _callable(shape: Any, dtype: Any = None) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [1, 2], dtype=dtype) * 2


def expected(case: Case, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns the values on one device, as bits.

    Raises:
      Exception: If the initializer does not support the shape or the dtype.
    """
    return bits(case.make()(shape, dtype=dtype))


def bits(values: Any) -> np.ndarray:
    """Returns the bits of floating-point values as integers."""
    values = np.asarray(values)
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def supported(case: Case) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields shape names, dtypes and expected bits that a case supports."""
    for shape_name, shape in SHAPES.items():
        for dtype in DTYPES:
            try:
                yield shape_name, dtype, expected(case, shape, dtype)
            except Exception:  # The initializer rejects this case.
                continue


def on_meshes(case: Case, meshes_of_axes: dict[str, Any]) -> list[str]:
    """Returns the combinations whose values on a mesh differ from one device.

    Args:
      case: The initializer.
      meshes_of_axes: Meshes with axes `a` and `b`, by name.
    """
    wrong = []
    for shape_name, dtype, wanted in supported(case):
        for layout_name, axes in LAYOUTS.items():
            for mesh_name, mesh in meshes_of_axes.items():
                layout = meshes.layout_of(mesh, *axes[wanted.ndim])
                value = initial_values.initial_value(
                    case.make(), wanted.shape, dtype, layout, name="weight"
                )
                if not _are_local_shards(value, wanted, layout):
                    wrong.append(
                        f"{shape_name} {dtype} {layout_name} on {mesh_name}"
                    )
    return wrong


def _are_local_shards(value: Any, wanted: np.ndarray, layout: Any) -> bool:
    """Compares each local shard, which also works with several processes."""
    from tf_layoutmap.layout.mesh import transfer

    parts = tf.experimental.dtensor.unpack(value)
    slices = transfer.slices_of_devices(wanted.shape, layout)
    return all(
        np.array_equal(bits(part), wanted[where])
        for part, where in zip(parts, slices, strict=True)
    )


def in_shards(
    case: Case,
    shapes: Sequence[str] = tuple(SHAPES),
    dtypes: Sequence[str] = DTYPES,
    shard_counts: Sequence[int] = (1, 2, 3),
) -> list[str]:
    """Returns the combinations whose values in shards differ."""
    wrong = []
    for shape_name, dtype, wanted in supported(case):
        if shape_name not in shapes or dtype not in dtypes:
            continue
        for num_shards in shard_counts:
            for axis in (0, 1):
                for placement in ("div", "mod") if axis == 0 else ("div",):
                    table = tlm.ShardedVariable.create(
                        case.make(),
                        wanted.shape,
                        dtype=dtype,
                        num_shards=num_shards,
                        axis=axis,
                        placement=placement,
                    )
                    if not np.array_equal(
                        bits(tf.convert_to_tensor(table)), wanted
                    ):
                        wrong.append(
                            f"{shape_name} {dtype} {num_shards} shards, axis "
                            f"{axis}, {placement}"
                        )
    return wrong


def is_drawn_in_blocks(case: Case) -> bool:
    """Returns whether each device, shard or server draws only its block."""
    return random_tensors.is_known(case.make(), tf.float32)


def to_markdown() -> str:
    """Returns the table of the page."""
    two_by_two = {"2x2": meshes.mesh_of(a=2, b=2)}
    lines = [
        "| library | initializer | dtypes | computed | mesh | shards |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases():
        dtypes = [
            dtype
            for dtype in DTYPES
            if any(dtype == one for _, one, _ in supported(case))
        ]
        computed = (
            "each block separately"
            if is_drawn_in_blocks(case)
            else "once, in full"
        )
        results = [
            "; ".join(wrong) or "identical"
            for wrong in (on_meshes(case, two_by_two), in_shards(case))
        ]
        lines.append(
            f"| {case.library} | `{case.name}` | "
            f"{'all' if len(dtypes) == len(DTYPES) else ', '.join(dtypes)} | "
            f"{computed} | {' | '.join(results)} |"
        )
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Replaces the table of the page."""
    before, rest = PAGE.read_text().split(START)
    _, after = rest.split(END)
    PAGE.write_text(before + START + to_markdown() + END + after)


if __name__ == "__main__":
    write_page()
