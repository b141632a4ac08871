"""Lazy imports of public names and of the classes in saved Keras models.

A public name is imported when it is first used. Therefore, `import
tf_layoutmap` is fast, and modules that do not require TensorFlow can be used
without TensorFlow. If a required package is not installed, the error explains
how to install it. Type checkers do not run this code. Instead, type checkers
read the `TYPE_CHECKING` block next to each call of `exports`. `python -m
tests.public.symbols` writes these blocks.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_layoutmap._core import requirements


def exports(
    package: str, homes: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` for a package.

    `dir()` lists the names in `__all__`, but not the modules that the package
    imports.

    Args:
      package: `__name__` of the package.
      homes: Location of each public name: `"module:attribute"`, or `"module"`
        for a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            # `obj` is None, because Python would otherwise add a second
            # suggestion.
            raise AttributeError(
                f"Module {package!r} has no attribute {name!r}. "
                + _advice(package, homes, name),
                name=name,
                obj=None,
            )
        module_name, _, attribute = homes[name].partition(":")
        try:
            value = importlib.import_module(module_name)
        except ImportError as error:
            refusal = requirements.refusal(f"{package}.{name}", error)
            if refusal is None:
                raise
            # The original traceback is omitted, because it contains many
            # imports of Keras and this package, and no useful information.
            raise refusal.with_traceback(None) from None
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names


# Names of other packages, and the public names that correspond to them, if the
# most similar name is another one.
_MEANINGS = {"Embedding": "ShardedEmbedding"}


def _advice(package: str, homes: dict[str, str], name: str) -> str:
    """Returns a sentence that suggests a similar name or lists all names."""
    known = {_simplified(name): name for name in homes}
    name = _MEANINGS.get(name, name)
    if "." not in package and not name.startswith("_"):
        # Modules of this package are also searched. For example,
        # `tlm.layers.ShardedEmbedding` is suggested for `tlm.ShardedEmbedding`.
        # These modules import neither TensorFlow nor Keras, so they are fast to
        # import.
        for child, home in homes.items():
            if ":" not in home:
                for public_name in importlib.import_module(home).__all__:
                    known.setdefault(
                        _simplified(public_name), f"{child}.{public_name}"
                    )
    matches = difflib.get_close_matches(
        _simplified(name), known, n=1, cutoff=0.7
    )
    if matches:
        return f"Did you mean '{package}.{known[matches[0]]}'?"
    return f"Its public names are: {', '.join(sorted(homes))}."


def _simplified(name: str) -> str:
    return name.replace("_", "").lower()


class _RegisteredClass:
    """Stands for a class of this package in Keras' registry.

    Keras creates objects of registered classes by `from_config`. When the class
    is imported, it replaces this object in the registry.
    """

    def __init__(self, home: str):
        self._home = home

    def __repr__(self) -> str:
        return self._home.replace(":", ".")

    def from_config(self, config: dict[str, Any]) -> Any:
        """Imports the class, and creates an object of it."""
        module, _, name = self._home.partition(":")
        return getattr(importlib.import_module(module), name).from_config(
            config
        )


def register_classes(homes: Mapping[str, Sequence[str]]) -> None:
    """Registers classes with Keras that are imported when they are loaded.

    If Keras is not imported yet, its import registers the classes. Importing
    this package therefore does not import Keras.

    Args:
      homes: Location of each class, `"module:class"`, by the name of the Keras
        package: `"keras"` or `"tf_keras"`.
    """
    waiting: dict[str, Sequence[str]] = {}
    for name, classes in homes.items():
        # The attribute is missing while Keras is being imported.
        if hasattr(sys.modules.get(name), "saving"):
            _register(sys.modules[name], classes)
        else:
            waiting[name] = classes
    if waiting:
        sys.meta_path.insert(0, _RegisteringFinder(waiting))


def _register(keras: Any, classes: Sequence[str]) -> None:
    registry = keras.saving.get_custom_objects()
    for home in classes:
        name = home.partition(":")[2]
        registry.setdefault(f"tf_layoutmap>{name}", _RegisteredClass(home))


class _RegisteringFinder:
    """Finder of modules that registers classes after the import of Keras."""

    def __init__(self, waiting: dict[str, Sequence[str]]):
        self._waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec that the other finders find for Keras."""
        classes = self._waiting.pop(name, None)
        if classes is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_register(module: Any) -> None:
                del loader.exec_module
                execute(module)
                _register(module, classes)

            loader.exec_module = execute_and_register
        return spec
