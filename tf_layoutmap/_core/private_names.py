"""`PrivateNames`, which checks and returns private names of a package."""

import functools
import importlib
import inspect
import os
import subprocess
import sys
from typing import Any

from tf_layoutmap._core import requirements, user_warnings

# Value of the environment variable in the process that runs the check.
_CHECKING = "checking"
# The check takes seconds; this limit covers a busy machine.
_CHECK_SECONDS = 180


class PrivateNames:
    """The private names of one package, which must have a supported version.

    If the version is not supported or a name is missing, `ImportError` with a
    remedy is raised. Because names are checked during imports, the error does
    not occur in the middle of training. The version is compared first, because
    a version that has all names can still behave differently.
    """

    def __init__(
        self,
        title: str,
        root: str,
        version: str,
        supported: tuple[str, ...],
        *,
        is_allowed: bool = False,
    ):
        """Compares the version.

        Args:
          title: Name of the package for messages.
          root: Module that contains all names.
          version: Installed version.
          supported: Supported minor versions, such as `("2.21",)`.
          is_allowed: Whether the user allows the version in any case.

        Raises:
          ImportError: If the version is not supported.
        """
        self._root = root
        self._package = root.partition(".")[0]
        self._title = title
        self._which = f"{title} {version}"
        self._needs = requirements.needs(self._package, supported)
        remedy = requirements.remedy(self._package)
        self._remedy = f"Install a supported version: {remedy}."
        other = requirements.other_version(self._package, version, supported)
        if other is not None and not is_allowed:
            raise other

    def refusal(self, missing: str) -> ImportError:
        """Returns the error for a missing name, with a remedy."""
        return ImportError(
            f"{self._needs} Received: {self._which}, {missing}. {self._remedy}"
        )

    def find(self, module: str, name: str) -> Any:
        """Returns `<root>.<module>.<name>`.

        `module` is empty if the root imports all modules of the name. If the
        name contains a dot, it is an attribute of a class in the module.

        Raises:
          ImportError: If the name is missing.
        """
        owner = f"{self._root}.{module}" if module else self._root
        try:
            return functools.reduce(
                getattr, name.split("."), importlib.import_module(owner)
            )
        except (ImportError, AttributeError) as error:
            raise self.refusal(f"which has no `{owner}.{name}`") from error

    def check_method(self, owner: Any, name: str, *arguments: str) -> None:
        """Checks that a class or module has a function with certain arguments.

        Raises:
          ImportError: If the function is missing, or does not have these
            arguments.
        """
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, property):
            return
        if method is None or any(
            a not in inspect.signature(method).parameters for a in arguments
        ):
            # Other code may have replaced the function. In this case, a
            # different version of the package would not solve the problem.
            for patch in (owner, method):
                if patch is not None and not self._is_theirs(patch):
                    raise self._replaced_error(owner, name, patch)
            raise self.refusal(
                f"where `{owner.__name__}.{name}` is missing or takes other "
                f"arguments than {arguments}"
            )

    def check_methods(self, owner: Any, *signatures: str) -> None:
        """Calls `check_method` for each function of a class or module.

        Args:
          owner: Class or module.
          *signatures: Names with arguments, such as `"build(variables)"`.

        Raises:
          ImportError: If one of the functions does not match.
        """
        for signature in signatures:
            name, _, arguments = signature.rstrip(")").partition("(")
            self.check_method(owner, name, *filter(None, arguments.split(", ")))

    def _is_theirs(self, value: Any) -> bool:
        return _module(value).partition(".")[0] == self._package

    def _replaced_error(self, owner: Any, name: str, patch: Any) -> ImportError:
        public_name = self._public_name(owner)
        if patch is not owner:
            public_name += f".{name}"
        return ImportError(
            f"tf_layoutmap requires the original `{public_name}` of "
            f"{self._title}. Received: {self._which}, where other code has "
            "replaced it by "
            f"`{_module(patch)}.{getattr(patch, '__qualname__', patch)}`, "
            f"in which `{name}` is missing or takes other arguments than "
            f"{self._title}'s. Put `from tf_layoutmap import layout_map_scope` "
            "before the code that replaces it, or remove that code."
        )

    def _public_name(self, owner: Any) -> str:
        """Returns the public name of a class, even if it has been replaced."""
        package = sys.modules.get(self._package)
        for part in ("layers", "optimizers"):
            for name, value in vars(getattr(package, part, type)).items():
                if value is owner:
                    return f"{self._package}.{part}.{name}"
        return getattr(owner, "__name__", str(owner))


def _module(value: Any) -> str:
    return getattr(value, "__module__", None) or "?"


def is_allowed_untested(version: str, newest: str) -> bool:
    """Returns whether the user allows a version that was not tested.

    Args:
      version: Installed version of Keras.
      newest: Newest supported minor version.
    """
    return requirements.is_newer(version, newest) and os.environ.get(
        requirements.ALLOW_UNTESTED
    ) in ("1", _CHECKING)


def check_untested(version: str, newest: str) -> None:
    """Checks a version of Keras that was not tested, and issues a warning.

    The check runs in another process, because it initializes the devices of
    TensorFlow. The other process does not use GPUs.

    Args:
      version: Installed version of Keras.
      newest: Newest supported minor version, whose column is used.

    Raises:
      ImportError: If the check fails or does not end.
    """
    if os.environ[requirements.ALLOW_UNTESTED] == _CHECKING:
        return
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tf_layoutmap", "check"],
            env={
                **os.environ,
                requirements.ALLOW_UNTESTED: _CHECKING,
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        failure = f"The check did not end within {_CHECK_SECONDS} s."
    else:
        failure = ended.stderr[-2000:] if ended.returncode else ""
        if not failure:
            user_warnings.warn(
                f"Keras {version} was not tested with this version of "
                f"tf_layoutmap, and is used like Keras {newest}, because "
                f"{requirements.ALLOW_UNTESTED}=1 is set. Differences:\n"
                f"{ended.stdout.strip()}"
            )
            return
    raise ImportError(
        f"tf_layoutmap does not work with Keras {version}: {failure} Install "
        f"a supported version: {requirements.remedy('keras')}.",
        name="keras",
    )
