"""Tests the reader of Python source."""

import io

import numpy as np
import pytest
from completion.data.corpus import DataError, Names, held_out_documents
from completion.data.python_source import (
    STDLIB_SKIPS,
    python_files,
    read_file,
    read_folder,
)

SOURCE = """\
class Stack(list):
    # A comment has no items.
    def top(self, n=1): return self[-n]
    def grow(item):
        item.size
    size = 2
done = Stack
"""


def read(source):
    names, marks, scopes = Names(), Names(), Names()
    found = read_file(io.StringIO(source).readline, names, marks, scopes)
    name_of, mark_of, scope_of = list(names), list(marks), list(scopes)
    return [
        (
            name_of[item],
            [scope_of[scope] for scope in scopes_here],
            mark_of[found.marks[before - 1]] if before else "",
        )
        for item, scopes_here, before in zip(
            found.items, found.scopes, found.marks_before, strict=True
        )
    ]


def test_items_are_names_except_keywords():
    assert [item for item, _, _ in read(SOURCE)] == [
        "Stack",
        "list",
        "top",
        "self",
        "n",
        "self",
        "n",
        "grow",
        "item",
        "item",
        "size",
        "size",
        "done",
        "Stack",
    ]


def test_scope_starts_after_its_name_and_ends_with_its_body():
    inside = ["class Stack"]
    assert [scopes for _, scopes, _ in read(SOURCE)] == [
        [],
        inside,
        inside,
        *[[*inside, "def top"]] * 4,
        inside,
        *[[*inside, "def grow"]] * 3,
        inside,
        [],
        [],
    ]


def test_mark_before_an_identifier_is_the_previous_token():
    assert [mark for _, _, mark in read(SOURCE)] == [
        "class",
        "(",
        "def",
        "(",
        ",",
        "return",
        "-",
        "def",
        "(",
        "INDENT",
        ".",
        "DEDENT",
        "DEDENT",
        "=",
    ]


def test_position_does_not_depend_on_later_lines():
    for end in range(1, SOURCE.count("\n")):
        head = "".join(SOURCE.splitlines(keepends=True)[:end])
        # A class statement requires a body, which is missing after one line.
        head += "    pass\n" if end < 2 else ""
        assert read(SOURCE)[: len(read(head))] == read(head)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_folder_is_read_in_sorted_order_with_consistent_splits(tmp_path):
    write(
        tmp_path,
        {
            "b.py": "x = y\n",
            "a/__init__.py": "z\n",
            "a/c.py": "",
            ".hidden/d.py": "h\n",
            "e.txt": "no",
        },
    )
    corpus = read_folder(tmp_path)
    assert corpus.documents == ["b.py", "a/__init__.py", "a/c.py"]
    assert [corpus.item_names[item] for item in corpus.items] == ["x", "y", "z"]
    assert corpus.document_splits.tolist() == [0, 2, 3, 3]
    assert corpus.mark_splits[-1] == len(corpus.marks)
    assert corpus.marks_before[2] == corpus.mark_splits[1]
    places = [
        [corpus.place_names[place] for place in row]
        for row in corpus.places.to_lists()
    ]
    assert places == [["b"], ["a"], ["a", "c"]]


def test_unreadable_files_are_counted(tmp_path):
    write(tmp_path, {"good.py": "x\n", "open.py": "x = (\n"})
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff'\n")
    corpus = read_folder(tmp_path)
    assert corpus.documents == ["good.py"]
    assert ("files", "1 read, 2 unreadable") in corpus.facts


def test_test_suites_of_the_standard_library_are_skipped(tmp_path):
    write(tmp_path, {"test/a.py": "", "json/b.py": "", "json/tests/c.py": ""})
    found = [path.name for path in python_files(tmp_path, STDLIB_SKIPS)]
    assert found == ["b.py"]


def test_folder_without_python_files_raises(tmp_path):
    with pytest.raises(DataError, match="at least one readable Python file"):
        read_folder(tmp_path)
    with pytest.raises(DataError, match="which is missing"):
        read_folder(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="which is a file"):
        read_folder(tmp_path / "file")


def test_selection_of_a_file_does_not_depend_on_other_files():
    names = [f"file_{index}.py" for index in range(400)]
    chosen = held_out_documents(names, fraction=0.25, seed=3)
    assert 60 < chosen.sum() < 140
    half = held_out_documents(names[::2], fraction=0.25, seed=3)
    assert (half == chosen[::2]).all()
    other = held_out_documents(names, fraction=0.25, seed=4)
    assert (other != chosen).any()


def test_one_of_two_files_is_held_out():
    for seed in range(20):
        chosen = held_out_documents(["a", "b"], fraction=0.1, seed=seed)
        assert np.sort(chosen).tolist() == [False, True]
