"""A process in which tf_layoutmap is as good as not installed.

`run` starts one. This file is also the program that it starts.
"""

import contextlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def run(program: Path, *arguments: str | Path) -> None:
    """Calls `answer(*arguments)` of a program in a process of its own.

    Raises:
      RuntimeError: It ended with an error, or tf_layoutmap, or its native
        library, found a way in.
    """
    # -I: no folder of ours on the path, no variable of the environment.
    ended = subprocess.run(
        [sys.executable, "-I", __file__, str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(
            "The exported model does not work in a process of its own:\n"
            + ended.stderr[-2000:]
        )


class _Refuse:
    """An import hook that knows nothing of tf_layoutmap."""

    def find_spec(self, name, path=None, target=None):
        """Refuses tf_layoutmap, leaves the rest to others."""
        del path, target
        if name.partition(".")[0] == "tf_layoutmap":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def _without_tf_layoutmap() -> Iterator[None]:
    sys.meta_path.insert(0, _Refuse())
    yield
    # Not by substring: `pip install -e` leaves a module of its own behind; it
    # has our name in its name, and nothing of ours in it.
    loaded = [
        name for name in sys.modules if name.partition(".")[0] == "tf_layoutmap"
    ]
    maps = Path("/proc/self/maps")
    if maps.exists() and "_layoutmap_ops" in maps.read_text():
        loaded.append("_layoutmap_ops")
    if loaded:
        raise SystemExit(f"tf_layoutmap found a way in: {loaded}.")


if __name__ == "__main__":
    with _without_tf_layoutmap():
        runpy.run_path(sys.argv[1])["answer"](*sys.argv[2:])
