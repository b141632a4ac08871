"""Answers from a SavedModel where tf_layoutmap is not installed.

Run as a program, with the SavedModel's folder, the file with the lines and
the file for the answers. It ends with an error if tf_layoutmap, or its native
library, found a way in.
"""

import sys
from pathlib import Path


class Refuse:
    """An import hook: as if tf_layoutmap were not installed."""

    def find_spec(self, name, path=None, target=None):
        """Refuses tf_layoutmap, leaves the rest to others."""
        del path, target
        if name.partition(".")[0] == "tf_layoutmap":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(folder: str, asked: str, answered: str) -> None:
    """Loads, answers, and looks around."""
    sys.meta_path.insert(0, Refuse())

    import numpy as np
    import tensorflow as tf

    model = tf.saved_model.load(folder)
    np.save(answered, model.chances(
        tf.constant(Path(asked).read_bytes().split(b"\n"))).numpy())

    loaded = [name for name in sys.modules if "tf_layoutmap" in name]
    maps = Path("/proc/self/maps")
    if maps.exists() and "_layoutmap_ops" in maps.read_text():
        loaded.append("_layoutmap_ops")
    if loaded:
        raise SystemExit(f"tf_layoutmap found a way in: {loaded}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
