"""The hardware limit: plain C++ loops over random rows (`cc/benchmarks`)."""

import importlib.util
import os
import pathlib
import sysconfig
import types

_BUILT = pathlib.Path(__file__).parent.parent / "bazel-bin/cc/benchmarks"


def load(name: str = "_roof") -> types.ModuleType:
    """Returns a module of `cc/benchmarks`; `make bench` builds `_roof`.

    Raises:
      ImportError: The module is not built.
    """
    path = _BUILT / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        raise ImportError(
            f"{path} is missing. Build it: bazel build "
            f"//cc/benchmarks:{name[1:]}"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_threads() -> int:
    """Returns the default size of TensorFlow's intra-op thread pool."""
    return len(os.sched_getaffinity(0))
