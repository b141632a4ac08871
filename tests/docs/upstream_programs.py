"""Reads and runs the programs of `docs/upstream.md`."""

import dataclasses
import os
import pathlib
import re
import signal
import tempfile

from tests import forked_process

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "upstream.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ENDS_WITH_ERROR = re.compile(r"[\w.]*Error: ")


@dataclasses.dataclass(frozen=True)
class Section:
    """A section that describes one bug.

    Attributes:
      title: Heading of the section.
      program: Source code of the program, with the first lines of its group.
      output: Output of the program on the page.
      workaround: Last paragraph of the section.
    """

    title: str
    program: str
    output: str
    workaround: str


def sections() -> list[Section]:
    """Returns the sections of the page in their order."""
    found = []
    for group in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        head, *bodies = re.split(r"^### ", group, flags=re.MULTILINE)
        first_lines = "".join(code for _, code in _BLOCK.findall(head))
        for body in bodies:
            blocks = _BLOCK.findall(body)
            kinds = [kind for kind, _ in blocks]
            title = body.partition("\n")[0]
            assert kinds == ["python", "text"], (title, kinds)
            found.append(
                Section(
                    title,
                    first_lines + blocks[0][1],
                    blocks[1][1],
                    body.rpartition("Workaround: ")[2].strip(),
                )
            )
    return found


def output_of(program: str) -> str:
    """Runs a program in a separate process, and returns what it prints.

    Returns:
      The standard output. The last line is the name of the signal that ended
      the process, or the type and the first line of the error.
    """
    # The process must not use the switches that tf_layoutmap has set.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DTENSOR_")
    }
    with tempfile.TemporaryDirectory() as folder:
        done = forked_process.run_code(
            program,
            env=env,
            cwd=pathlib.Path(folder),
            seconds=60,
            check=False,
        )
    last = ""
    if done.returncode < 0:
        last = signal.Signals(-done.returncode).name + "\n"
    elif done.returncode:
        errors = [
            line
            for line in done.stderr.splitlines()
            if _ENDS_WITH_ERROR.match(line)
        ]
        last = errors[-1] + "\n" if errors else done.stderr[-2000:]
    return done.stdout + last


def is_shown(output: str, page: str) -> bool:
    """Returns whether an output matches the page, which may end with `...`."""
    if page.endswith("...\n"):
        return output.startswith(page.removesuffix("...\n").rstrip())
    return output == page
