"""What the modules that import private names have in common."""

import functools
import importlib
import inspect
import sys
from typing import Any

from tf_layoutmap._core import requirements


class PrivateNames:
    """The private names of one package, in the versions that have them.

    Another version, or a name that is missing, is refused with the remedy when
    that module is imported, and not in the middle of a training run. The
    version is compared first: one that has all the names can still do other
    things.
    """

    def __init__(self, title: str, root: str, version: str, supported: str):
        """Takes what messages say, and compares the version.

        Args:
          title: Name of the package for readers.
          root: The module below which the names are.
          version: The one that is installed.
          supported: The minor version, such as `"2.21"`.

        Raises:
          ImportError: The version is not supported.
        """
        self._root = root
        self._package = root.partition(".")[0]
        self._title = title
        self._which = f"{title} {version}"
        self._needs = requirements.needs(self._package, supported)
        self._remedy = (
            f"Install the supported one: {requirements.remedy(self._package)}."
        )
        other = requirements.other_version(self._package, version, supported)
        if other is not None:
            raise other

    def refusal(self, missing: str) -> ImportError:
        """Returns the error for a package `which ...`, with the remedy."""
        return ImportError(
            f"{self._needs} Received: {self._which}, {missing}. {self._remedy}"
        )

    def find(self, module: str, name: str) -> Any:
        """Returns `<root>.<module>.<name>`, or says what is missing.

        A dotted name is an attribute of a class of the module.
        """
        try:
            return functools.reduce(
                getattr,
                name.split("."),
                importlib.import_module(f"{self._root}.{module}"),
            )
        except (ImportError, AttributeError) as error:
            raise self.refusal(
                f"which has no `{self._root}.{module}.{name}`"
            ) from error

    def check_method(self, owner: Any, name: str, *arguments: str) -> None:
        """Asserts that a class or module has one with these arguments."""
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, property):
            return
        if method is None or any(
            a not in inspect.signature(method).parameters for a in arguments
        ):
            # Not the fault of a version: another one would be no remedy.
            for patch in (owner, method):
                if patch is not None and not self._is_theirs(patch):
                    raise self._patched(owner, name, patch)
            raise self.refusal(
                f"where `{owner.__name__}.{name}` is missing or takes other "
                f"arguments than {arguments}"
            )

    def _is_theirs(self, value: Any) -> bool:
        return _module(value).partition(".")[0] == self._package

    def _patched(self, owner: Any, name: str, patch: Any) -> ImportError:
        what = self._public_name(owner)
        if patch is not owner:
            what += f".{name}"
        return ImportError(
            f"tf_layoutmap needs `{what}` as {self._title} has it. Received: "
            f"{self._which}, where somebody else has replaced it by "
            f"`{_module(patch)}.{getattr(patch, '__qualname__', patch)}`, "
            f"in which `{name}` is missing or takes other arguments than "
            f"{self._title}'s. Put `from tf_layoutmap import layout_map_scope` "
            "before whatever replaces it, or do without that."
        )

    def _public_name(self, owner: Any) -> str:
        """What programs call a class, also one that is no longer Keras'."""
        package = sys.modules.get(self._package)
        for part in ("layers", "optimizers"):
            for name, value in vars(getattr(package, part, type)).items():
                if value is owner:
                    return f"{self._package}.{part}.{name}"
        return getattr(owner, "__name__", str(owner))


def _module(value: Any) -> str:
    return getattr(value, "__module__", None) or "?"
