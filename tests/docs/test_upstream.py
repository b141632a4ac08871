"""Checks that the bugs on the page "Upstream bugs" still exist."""

import re

import pytest

from tests.docs import upstream_programs
from tf_layoutmap._core import patches

SECTIONS = upstream_programs.sections()
NAME = re.compile(r"`((?:keras|tf_keras|tensorflow)\.[\w.]+)`")


def test_each_workaround_on_the_page_exists():
    replaced = {
        patches.display_name(patches.owner_of(entry), entry.name)
        for group in patches.GROUPS
        for entry in patches.entries_of(group)
    }
    assert len(SECTIONS) > 20
    for section in SECTIONS:
        names = NAME.findall(section.workaround)
        assert set(names) <= replaced, section.title
        assert names or re.search(r"`tlm\.|`DTENSOR_", section.workaround), (
            section.title
        )


def test_the_programs_do_not_use_this_package():
    for section in SECTIONS:
        assert "tf_layoutmap" not in section.program, section.title


@pytest.mark.slow  # Starts processes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(1)", "1\n"),
        ("print(1)\nraise ValueError('two\\nlines')", "1\nValueError: two\n"),
        ("import os\nos.kill(os.getpid(), 11)", "SIGSEGV\n"),
        (
            "import os, sys\n"
            "print('tf_layoutmap' in sys.modules, "
            "[name for name in os.environ if name.startswith('DTENSOR_')])",
            "False []\n",
        ),
    ],
)
def test_an_output_ends_with_the_error_or_the_signal(program, output):
    assert upstream_programs.output_of(program) == output


def test_dots_stand_for_the_rest_of_an_output():
    is_shown = upstream_programs.is_shown
    assert is_shown("1\n2\n", "1\n2\n")
    assert is_shown("1\nValueError: 12\n", "1\nValueError: 1 ...\n")
    assert not is_shown("1\nValueError: 2\n", "1\nValueError: 1 ...\n")
    assert not is_shown("1\n", "2\n")


# Each program runs in a separate process, and all programs together take more
# than five seconds.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("section", SECTIONS, ids=lambda one: one.title)
def test_the_bug_still_exists(section):
    output = upstream_programs.output_of(section.program)
    assert upstream_programs.is_shown(output, section.output), (
        f"The program of {section.title!r} in docs/upstream.md does not show "
        f"the bug anymore. It prints:\n{output}\nIf a newer version has fixed "
        "the bug, remove the section and the workaround: "
        f"{section.workaround}"
    )
