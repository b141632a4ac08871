"""Checks the list of planted mistakes in `tools/mutations.py`."""

from tools import mutations


def test_each_mutation_replaces_one_piece_of_text():
    wrong = []
    for one in mutations.MUTATIONS:
        path = mutations.ROOT / one.path
        if not path.exists() or path.read_text().count(one.old) != 1:
            wrong.append(f"{one.name}: {one.old!r} must occur once")
        wrong += [
            f"{one.name}: {test} does not exist"
            for test in one.tests
            if test.startswith(("tests/", "tf_layoutmap/"))
            and not (mutations.ROOT / test.partition("::")[0]).exists()
        ]
    assert not wrong, "\n".join(wrong)


def test_names_of_mutations_are_unique():
    names = [one.name for one in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 20
