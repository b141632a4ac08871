"""Open vocabularies, for tables that accept arbitrary ids as keys.

Start with `OpenVocabulary`, which contains the settings of a table. A layer or
a `TPUEmbedding` creates a `Vocabulary` from the settings. It gives access to
the keys of the table. `KeyExpiry` evicts keys by time, `import_rows` writes the
rows of other tables by key, and `convert` changes the capacity of the tables in
a checkpoint.

`state.py` defines `Vocabulary`. `bucket_layout.py` assigns keys to shards, and
`checkpoint_files.py` reads and writes checkpoints. `row_files.py`,
`vector_files.py` and `foreign_rows.py` read files with rows.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "Conversion": "tf_layoutmap.vocabulary.state:Conversion",
    "EvictedKeys": "tf_layoutmap.vocabulary.evicted:EvictedKeys",
    "KeyBlock": "tf_layoutmap.vocabulary.key_rows:KeyBlock",
    "KeyExpiry": "tf_layoutmap.vocabulary.key_expiry:KeyExpiry",
    "OpenVocabulary": "tf_layoutmap.vocabulary.open_vocabulary:OpenVocabulary",
    "Vocabulary": "tf_layoutmap.vocabulary.state:Vocabulary",
    "WrittenKeys": "tf_layoutmap.vocabulary.key_rows:WrittenKeys",
    "convert": "tf_layoutmap.vocabulary.conversion:convert",
    "import_rows": "tf_layoutmap.vocabulary.imported_rows:import_rows",
}

if TYPE_CHECKING:
    from tf_layoutmap.vocabulary.conversion import convert
    from tf_layoutmap.vocabulary.evicted import EvictedKeys
    from tf_layoutmap.vocabulary.imported_rows import import_rows
    from tf_layoutmap.vocabulary.key_expiry import KeyExpiry
    from tf_layoutmap.vocabulary.key_rows import KeyBlock, WrittenKeys
    from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
    from tf_layoutmap.vocabulary.state import Conversion, Vocabulary
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "Conversion",
    "EvictedKeys",
    "KeyBlock",
    "KeyExpiry",
    "OpenVocabulary",
    "Vocabulary",
    "WrittenKeys",
    "convert",
    "import_rows",
]
