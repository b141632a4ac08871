"""Loads the shared libraries. No other module loads these libraries.

The op library is compiled against C++ classes of TensorFlow. The memory layout
of these classes changes between minor versions. A wrong memory layout does not
raise an error when the library is loaded. Therefore, the version is compared
before the library is loaded.

For every op `LayoutMap>VerbNoun` in docs/ops.md, this module has an attribute
`verb_noun`. `native` is the pybind11 module, which provides the C++ core for
numpy arrays, without TensorFlow. `hide_info_logs` calls functions of
TensorFlow's own library.
"""

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from tf_layoutmap import _version
from tf_layoutmap._core import requirements

_LIBRARY = pathlib.Path(__file__).parents[1] / "_layoutmap_ops.so"
_EMULATION = _LIBRARY.with_name("_layoutmap_emulation.so")

# For example, TensorFlow's function for the op LayoutMap>RouteIds is named
# `layout_map_route_ids`.
_PREFIX = "layout_map_"

# These patterns match the prefix and suffix that TensorFlow adds to the message
# of an eager op.
_WRAPPED_OP = re.compile(r"^\{\{function_node __wrapped__[^}]*\}\} ")
_OP_NAME = re.compile(r" \[Op:LayoutMap>\w+\](?: name: .*)?$")


def _check_version(installed: str, built_for: str) -> None:
    """Raises `ImportError` if the minor version of TensorFlow differs."""
    other = requirements.other_version(
        "tensorflow", installed, (requirements.minor(built_for),)
    )
    if other is not None:
        raise other


def _version_built_for() -> str:
    """Returns the TensorFlow version for which the libraries were compiled."""
    version = requirements.built_version()
    if version is None:
        raise _not_built("_build_info.py")
    if not _LIBRARY.exists():
        raise _not_built(_LIBRARY.name)
    return version


def _not_built(missing: str) -> ImportError:
    return ImportError(
        f"tf_layoutmap's native parts are not built: {missing} is missing in "
        f"{_LIBRARY.parent}. In a checkout run `make build`, or "
        "`pip install --no-build-isolation .`; otherwise reinstall the wheel."
    )


def _import_tensorflow() -> types.ModuleType:
    try:
        return importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        # If a dependency of TensorFlow is missing, the original error is
        # raised.
        missing = requirements.not_installed("tf_layoutmap", error)
        if missing is None:
            raise
        raise missing from None


class OpLibrary:
    """The Python functions of a loaded library, as attributes.

    Loading a library registers all ops, kernels and shape functions, so that
    programs can load models that contain the ops. The Python function of an op
    is compiled when it is first used: compiling the functions of all ops, as in
    `tf.load_op_library`, would take 0.1 s, which is more than all other imports
    of this package.
    """

    def __init__(self, handle: Any):
        """Reads the definitions of the ops of a library.

        Args:
          handle: Handle that TensorFlow returned when it loaded the library.
        """
        from tf_layoutmap._core import tf_private

        self._source_of = tf_private.source_of_op
        self._definitions = {
            _function_name(definition.name): definition
            for definition in tf_private.ops_of_library(handle)
        }
        # AutoGraph does not convert the functions of a module with this
        # attribute. It finds the module of a function by its name.
        self._functions: Any = types.ModuleType(
            hashlib.sha1(" ".join(self._definitions).encode()).hexdigest()
        )
        self._functions._IS_TENSORFLOW_PLUGIN = True
        sys.modules[self._functions.__name__] = self._functions
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        definition = self._definitions.get(name)
        if definition is None:
            raise AttributeError(f"The library has no op {name!r}.")
        with self._lock:
            if not hasattr(self._functions, name):
                exec(self._source_of(definition), vars(self._functions))
        function = getattr(self._functions, name)
        setattr(self, name, function)
        return function

    def __dir__(self) -> list[str]:
        return sorted(self._definitions)


def _function_name(op: str) -> str:
    """Returns the name that TensorFlow gives to the Python function of an op.

    >>> _function_name("LayoutMap>RouteIds")
    'layout_map_route_ids'
    """
    words = re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])|>", "_", op
    )
    return words.lower()


def _load() -> OpLibrary:
    library = _load_library(_LIBRARY)
    # The import is here because `op_gradients` imports TensorFlow, and the
    # TensorFlow version must be checked first.
    from tf_layoutmap._core import op_gradients

    op_gradients.register(sys.modules[__name__])
    # Other processes of a cluster can read these versions.
    os.environ["TF_LAYOUTMAP_PROCESS"] = json.dumps(
        {
            "tensorflow": _import_tensorflow().__version__,
            "tf_layoutmap": _version.__version__,
        }
    )
    return library


def _load_library(path: pathlib.Path) -> OpLibrary:
    built_for = _version_built_for()
    tf = _import_tensorflow()
    _check_version(tf.__version__, built_for)
    if not path.exists():
        raise _not_built(path.name)
    # The import is here because the version must be checked first.
    from tf_layoutmap._core import tf_private

    try:
        return OpLibrary(tf_private.register_library(str(path)))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"{path.name}, built for TensorFlow {built_for}, does not load "
            f"into TensorFlow {tf.__version__}: {error.message}. Build it "
            "again on this machine: `make build`, or "
            "`pip install --no-build-isolation .`"
        ) from error


@functools.cache
def load_emulation() -> OpLibrary:
    """Registers CPU kernels for TensorFlow's TPU embedding ops.

    The registration lasts until the process ends. Callers must first check that
    no such kernels exist, because a second kernel for an op ends the process.

    Returns:
      The library, in which the names of this package's ops begin with
      `layout_map_`.
    """
    return _load_library(_EMULATION)


def exchange_paths(path: str, other: str) -> None:
    """Exchanges two files or folders in one atomic operation.

    Raises:
      OSError: If the paths cannot be exchanged. `errno` is ENOSYS or EINVAL if
        the operating system or the file system does not support the operation.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    at_working_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        rename = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if rename(
        at_working_folder,
        os.fsencode(path),
        at_working_folder,
        os.fsencode(other),
        exchange,
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path, None, other)


# The C++ code of TensorFlow 2.21 uses these functions of Abseil, and exports
# them. The names contain the version of Abseil. TensorFlow 2.20 has its own log
# messages, whose level cannot change after the first message.
_LOG_LEVEL = "_ZN4absl12lts_2025081411MinLogLevelEv"
_SET_LOG_LEVEL = (
    "_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"
)
_WARNING = 1
# If the user has set one of these variables, log messages are not hidden.
_LOG_VARIABLES = (
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_CPP_MAX_VLOG_LEVEL",
    "TF_CPP_VMODULE",
)


class _InfoLogs:
    """Hides the log messages of level INFO while any thread requests it."""

    def __init__(self):
        import ctypes

        import tensorflow as tf

        self._lock = threading.Lock()
        self._num_requests = 0
        self._level = 0
        library = ctypes.CDLL(
            os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
        )
        # With another version of Abseil, the messages are not hidden.
        self._is_found = hasattr(library, _LOG_LEVEL)
        self._get: Any = getattr(library, _LOG_LEVEL, None)
        self._set: Any = getattr(library, _SET_LOG_LEVEL, None)

    @property
    def can_be_hidden(self) -> bool:
        return self._is_found and not any(
            os.environ.get(variable) for variable in _LOG_VARIABLES
        )

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        with self._lock:
            self._num_requests += 1
            if self._num_requests == 1:
                self._level = self._get()
                self._set(max(self._level, _WARNING))
        try:
            yield
        finally:
            with self._lock:
                self._num_requests -= 1
                if self._num_requests == 0:
                    self._set(self._level)


def hide_info_logs() -> contextlib.AbstractContextManager[None]:
    """Hides messages of TensorFlow's C++ code of level INFO in a context.

    DTensor logs two lines for each function that it compiles. Messages are not
    hidden if an environment variable sets the levels of log messages.
    """
    return (
        _info_logs.hidden()
        if _info_logs.can_be_hidden
        else contextlib.nullcontext()
    )


def _load_native() -> types.ModuleType:
    try:
        return importlib.import_module("tf_layoutmap._native")
    except ModuleNotFoundError:
        # The file name contains the Python version. Therefore, this error also
        # occurs if the module was built for a different Python version.
        raise _not_built("_native for this Python") from None


_library = _load()
native = _load_native()
_info_logs = _InfoLogs()
# The TensorFlow version for which both libraries were compiled.
BUILT_FOR = _version_built_for()


def __getattr__(name: str) -> Callable[..., Any]:
    function = getattr(_library, _PREFIX + name, None)
    if function is None:
        raise AttributeError(
            f"tf_layoutmap's op library has no op {name!r}. "
            f"It has: {', '.join(_op_names()) or 'none'}."
        )
    return _with_plain_errors(function)


@functools.cache
def _with_plain_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls an op and shortens its error messages.

    TensorFlow adds text to the message of an eager op. The name of the wrapping
    function, all attributes and the device are added before the message. The
    name of the op is added after the message.
    """
    op_error = _import_tensorflow().errors.OpError

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except op_error as error:
            plain = _WRAPPED_OP.sub("", error.message)
            if plain == error.message:
                raise
            raise type(error)(
                error.node_def,
                error.op,
                _OP_NAME.sub("", plain),
                error.experimental_payloads,
            ) from None

    return _import_tensorflow().autograph.experimental.do_not_convert(call)


def __dir__() -> list[str]:
    return sorted([*globals(), *_op_names()])


def _op_names() -> list[str]:
    return sorted(
        name[len(_PREFIX) :]
        for name in dir(_library)
        if name.startswith(_PREFIX)
    )
