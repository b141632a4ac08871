"""The shared libraries contain no paths of their build folder."""

import pathlib

import pytest

import tf_layoutmap

elffile = pytest.importorskip("elftools.elf.elffile")

LIBRARIES = sorted(pathlib.Path(tf_layoutmap.__file__).parent.glob("*.so"))


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name.split(".")[0])
def elf(request):
    with request.param.open("rb") as file:
        yield elffile.ELFFile(file)


def test_all_three_libraries_exist():
    assert len(LIBRARIES) == 3


def test_libraries_have_no_search_path(elf):
    tags = {
        tag.entry.d_tag
        for tag in elf.get_section_by_name(".dynamic").iter_tags()
    }
    assert "DT_NEEDED" in tags
    assert not tags & {"DT_RUNPATH", "DT_RPATH"}


def test_needed_libraries_have_no_folder(elf):
    needed = [
        tag.needed
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
    ]
    assert not [name for name in needed if "/" in name]


def test_unused_symbols_are_stripped(elf):
    assert elf.get_section_by_name(".symtab") is None
    assert not [
        section.name
        for section in elf.iter_sections()
        if section.name.startswith(".debug")
    ]


def test_no_symbol_of_gcc_12_requires_a_newer_system(elf):
    symbols = {
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol.entry.st_shndx == "SHN_UNDEF"
    }
    assert symbols
    assert not [
        name
        for name in symbols
        if name.startswith("_ZNSt18condition_variable4wait")
    ]
