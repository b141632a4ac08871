"""The variables of a tf_keras model, with their names and who holds them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.plan import assignments

dtensor = tf.experimental.dtensor

# Lists and tables that hold again what an attribute holds.
CACHES = frozenset(_tf_keras_private.LAYOUT_MODULE._KERAS_ATTRIBUTES_TO_SKIP)
# Optimizers, losses and metrics are no weights; penalties come in _regularize.
_NOT_WEIGHTS = frozenset(
    (
        "optimizer",
        "compiled_loss",
        "compiled_metrics",
        "_metrics",
        "_captured_weight_regularizer",
    )
)


class Found:
    """One variable of a model, with all the places that hold it."""

    def __init__(self, variable: Any):
        self.variable = variable
        self.places: list[tuple[Any, tuple]] = []
        self.names: dict[str, None] = {}
        self.owner: Any = None

    # What `assignments` asks of a Keras variable.
    @property
    def shape(self) -> Any:
        return self.variable.shape

    @property
    def _dtype(self) -> str:
        variable = getattr(self.variable, "_variable", self.variable)
        return tf.as_dtype(variable.dtype).name

    @property
    def path(self) -> str:
        return self.variable.name.removesuffix(":0")


class _Names:
    """The names of found variables, as `assignments` asks for them."""

    def __init__(self, found: Iterable[Found]):
        self._all = {
            name for one in found for name in self.of_variable(one, None)
        }

    def aliases(self, found: Found, owner: Any) -> tuple[str, ...]:
        del found, owner
        return ()

    def all_names(self) -> set[str]:
        return self._all

    def of_variable(self, found: Found, owner: Any) -> list[str]:
        del owner
        names = dict(found.names)
        names[found.path] = None
        names[found.path.replace("/", ".")] = None
        return list(names)

    def with_holders(self, layer: Any) -> list[Any]:
        return [layer]


def find(model: Any, wanted: Callable[[Any], bool]) -> list[Found]:
    """Returns the `wanted` variables of `model` in the order of its weights.

    Names start with attributes in subclassed models, and with the name of the
    layer in Functional and Sequential ones: `"d1.kernel"`.
    """
    found: dict[int, Found] = {}
    for owner, prefix, path, variable in _paths(model):
        if not wanted(variable) or _NOT_WEIGHTS.intersection(path):
            continue
        one = found.setdefault(id(variable), Found(variable))
        one.places.append((owner, path))
        if not CACHES.intersection(path):
            one.names[
                ".".join((*prefix, *(str(part).lstrip("_") for part in path)))
            ] = None
    layers = assignments.layers_of_variables(model)
    for one in found.values():
        one.owner = layers.get(id(one.variable))
    order = {id(v): i for i, v in enumerate(model.weights)}
    return sorted(
        found.values(), key=lambda one: order.get(id(one.variable), len(order))
    )


def _paths(model: Any) -> Iterator[tuple[Any, tuple, tuple, Any]]:
    def is_variable(x: Any) -> bool:
        return isinstance(x, tf.Variable)

    by_name = isinstance(model, tf_keras.Sequential) or hasattr(
        model, "_nested_inputs"
    )
    roots = (
        [(layer, (layer.name,)) for layer in model.layers] if (by_name) else []
    )
    for root, prefix in (*roots, (model, ())):
        for path, variable in root._flatten(
            predicate=is_variable, with_path=True
        ):
            yield root, prefix, path, variable


def is_pending(variable: Any) -> bool:
    """Whether `variable` has no value, or one outside of any mesh."""
    variable = getattr(variable, "_variable", variable)
    return isinstance(variable, tf.Variable) and not isinstance(
        variable, dtensor.DVariable
    )


def assign_layouts(
    layout_map: Any, found: list[Found]
) -> list[assignments.LayoutAssignment]:
    """Returns which layout each of `found` gets; allocates nothing."""
    return assignments.assign(
        layout_map, found, _Names(found), owners=[one.owner for one in found]
    )
