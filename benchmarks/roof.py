"""The hardware limit: plain C++ loops over random rows (`cc/benchmarks`)."""

import importlib.util
import os
import pathlib
import sysconfig
import types

_BUILT = pathlib.Path(__file__).parent.parent / "bazel-bin/cc/benchmarks"


def load(name: str = "_roof") -> types.ModuleType:
    """Imports a compiled module of `cc/benchmarks`, such as `_roof`.

    `make bench` compiles the module `_roof`.

    Raises:
      ImportError: The module has not been compiled.
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
    """Returns the default number of threads of TensorFlow's intra-op pool."""
    return len(os.sched_getaffinity(0))
