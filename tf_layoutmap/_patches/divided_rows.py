"""What is replaced for tables that are divided among processes."""

from tf_layoutmap._patches.rows import TENSORFLOW, Patch

GROUP = "divided"

ROWS = [
    Patch(
        GROUP,
        "_tf_private:TrackableSaver",
        "save",
        "embedding.divided.saving:save",
        "All tables are in memory, whole, before the first is written.",
        TENSORFLOW,
        "tests/embedding/divided/test_divided.py",
    ),
]
