"""Sphinx extension that links names to the TensorFlow, Keras and NumPy pages.

Sphinx links the types of other packages with intersphinx, which reads an
inventory of each package. TensorFlow and Keras publish no inventory, and the
build must not access the network. `docs/inventories` therefore lists the names
that the documentation uses, each with its page. This extension writes the
inventories from these lists. A listed name that does not exist is an error.
"""

import functools
import importlib
import inspect
import pathlib
import zlib
from typing import Any

FOLDER = pathlib.Path(__file__).parents[1] / "inventories"
# Base address of the pages of each package.
ADDRESSES = {
    "tensorflow": "https://www.tensorflow.org/api_docs/python/",
    "keras": "https://keras.io/",
    "numpy": "https://numpy.org/doc/stable/",
}
# Common short names of modules, and the names that the lists use.
SHORT_NAMES = {"dtensor": "tf.experimental.dtensor", "np": "numpy"}
MODULES = {"tf": "tensorflow"}


@functools.cache
def read(package: str) -> dict[str, str]:
    """Returns the page of each listed name of a package."""
    lines = (FOLDER / f"{package}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def listed_name(name: str) -> str | None:
    """Returns the listed form of a name, or None if it is not listed."""
    first, _, rest = name.partition(".")
    name = f"{SHORT_NAMES.get(first, first)}.{rest}"
    return name if any(name in read(package) for package in ADDRESSES) else None


def entries(name: str) -> dict[str, str]:
    """Returns the Sphinx kind of a name and of the alias that autodoc uses.

    Signatures contain the module that defines a class, such as
    `tensorflow.python.framework.tensor.Tensor`.
    """
    first, *rest = name.split(".")
    value: Any = importlib.import_module(MODULES.get(first, first))
    for part in rest:
        value = getattr(value, part)
    if inspect.isclass(value):
        names = (name, f"{value.__module__}.{value.__qualname__}")
        return dict.fromkeys(names, "class")
    if inspect.ismodule(value):
        return {name: "module"}
    return {name: "function" if callable(value) else "data"}


def inventory(package: str) -> bytes:
    """Returns the inventory of a package in Sphinx's format."""
    header = (
        "# Sphinx inventory version 2\n"
        f"# Project: {package}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    lines = {
        f"{alias} py:{kind} 1 {page} {name}\n"
        for name, page in read(package).items()
        for alias, kind in entries(name).items()
    }
    return header.encode() + zlib.compress("".join(sorted(lines)).encode())


def write_inventories(app: Any, config: Any) -> None:
    """Writes the inventories and adds them to the settings of intersphinx."""
    folder = pathlib.Path(app.doctreedir)
    folder.mkdir(parents=True, exist_ok=True)
    for package, address in ADDRESSES.items():
        path = folder / f"{package}.inv"
        path.write_bytes(inventory(package))
        config.intersphinx_mapping[package] = (address, str(path))


def setup(app: Any) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.intersphinx")
    # Runs before the handler of intersphinx that checks its settings (800).
    app.connect("config-inited", write_inventories, priority=100)
    return {"parallel_read_safe": True}
