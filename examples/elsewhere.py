"""Runs a program in a process that cannot import tf_layoutmap.

`run` starts the process. This file is also the main program of the process.
"""

import contextlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def run(program: Path, *arguments: str | Path) -> None:
    """Calls `answer(*arguments)` of a program in a separate process.

    Args:
      program: Path of a Python file that defines `answer`.
      *arguments: Arguments of `answer`, passed as strings.

    Raises:
      RuntimeError: The process failed, or it loaded tf_layoutmap or its native
        library.
    """
    # `-I` ignores PYTHONPATH and the folder of this file.
    ended = subprocess.run(
        [sys.executable, "-I", __file__, str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(
            "The exported model failed in a process without tf_layoutmap:\n"
            + ended.stderr[-2000:]
        )


class _BlockingFinder:
    """An import hook that hides tf_layoutmap."""

    def find_spec(self, name, path=None, target=None):
        """Raises ModuleNotFoundError if the module is in tf_layoutmap."""
        del path, target
        if name.partition(".")[0] == "tf_layoutmap":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def _without_tf_layoutmap() -> Iterator[None]:
    sys.meta_path.insert(0, _BlockingFinder())
    yield
    # Only the first component of a module name is compared, because the finder
    # module that `pip install -e` adds also contains the package's name.
    loaded = [
        name for name in sys.modules if name.partition(".")[0] == "tf_layoutmap"
    ]
    maps = Path("/proc/self/maps")
    if maps.exists() and "_layoutmap_ops" in maps.read_text():
        loaded.append("_layoutmap_ops")
    if loaded:
        raise SystemExit(f"tf_layoutmap must not be loaded. Found: {loaded}.")


if __name__ == "__main__":
    with _without_tf_layoutmap():
        runpy.run_path(sys.argv[1])["answer"](*sys.argv[2:])
