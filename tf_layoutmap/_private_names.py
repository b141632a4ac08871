"""What the doors to private names have in common."""

import functools
import importlib
import inspect
from typing import Any


class PrivateNames:
    """The private names of one package.

    A name that is missing is refused with the supported versions and the
    remedy, when the door is imported, and not in the middle of a training run.
    """

    def __init__(self, title: str, root: str, version: str,
                 supported: tuple[str, ...], install: str):
        """Takes what messages say.

        Args:
          title: Name of the package for readers.
          root: The module below which the names are.
          version: The one that is installed.
          supported: Minor versions, such as `"2.21"`.
          install: What `pip install` is told; `{}` stands for a version.
        """
        self._root = root
        self._which = f"{title} {version}"
        versions = " or ".join(f"{one}.*" for one in supported)
        self._needs = f"tf_layoutmap supports {title} {versions}."
        self._remedy = (
            "Install a supported one: pip install "
            f"{install.format(supported[-1] + '.*')}.")

    def refusal(self, missing: str) -> ImportError:
        """Returns the error for a package `which ...`, with the remedy."""
        return ImportError(
            f"{self._needs} Received: {self._which}, {missing}. "
            f"{self._remedy}")

    def find(self, module: str, name: str) -> Any:
        """Returns `<root>.<module>.<name>`, or says what is missing.

        A dotted name is an attribute of a class of the module.
        """
        try:
            return functools.reduce(
                getattr, name.split("."),
                importlib.import_module(f"{self._root}.{module}"))
        except (ImportError, AttributeError) as error:
            raise self.refusal(
                f"which has no `{self._root}.{module}.{name}`") from error

    def check_method(self, owner: type, name: str, *arguments: str) -> None:
        """Asserts that a class has a method with these arguments."""
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, property):
            return
        known = [] if method is None else inspect.signature(method).parameters
        if method is None or any(a not in known for a in arguments):
            raise self.refusal(
                f"where `{owner.__name__}.{name}` is missing or takes other "
                f"arguments than {arguments}")
