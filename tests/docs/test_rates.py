"""Pages and examples pass learning rates that train embedding tables."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
# The default rates of these names, 0.01 and 0.001, hardly move a table.
WITHOUT_RATE = re.compile(
    r"""optimizer=(\\?["'](adagrad|sgd)\\?["']|(tpu|[\w.]+embedding)\.(SGD|Adagrad|Adam)\(\))"""
)
# Lines that describe the names, or that show the interface of keras-rs.
ALLOWED = {
    "docs/benchmarks.md": ['`optimizer="adagrad"`'],
    "docs/guides/keras_layers.md": ['`ShardedEmbedding(optimizer="adagrad")`'],
    "docs/migration/keras_rs.md": ['optimizer="adagrad"'],
    "docs/guides/emulation.md": ['optimizer="adagrad"'],
}


def pages():
    yield ROOT / "README.md"
    for folder, pattern in (
        ("docs", "*.md"),
        ("examples", "*.py"),
        ("tf_layoutmap", "*.py"),
    ):
        yield from (ROOT / folder).rglob(pattern)


def test_every_table_of_a_page_has_an_explicit_rate_or_follows_the_model():
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_example = line.lstrip().startswith((">>>", "..."))
            if name.startswith("tf_layoutmap") and not is_example:
                continue
            if WITHOUT_RATE.search(line) and not any(
                one in line for one in ALLOWED.get(name, [])
            ):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
