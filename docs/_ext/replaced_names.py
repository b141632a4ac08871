"""Sphinx directive that lists the names that a patch group replaces.

.. replaced-names:: GROUP
"""

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from tf_layoutmap._core import patches


class ReplacedNames(SphinxDirective):
    """The directive `replaced-names`, whose argument is a patch group."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = [
            ".. list-table::",
            "   :header-rows: 1",
            "",
            "   * - Name",
            "     - Why",
            "     - Seen in",
            "     - Test",
        ]
        for entry in patches.entries_of(self.arguments[0]):
            name = patches.display_name(patches.owner_of(entry), entry.name)
            test = entry.test.removeprefix("tests/")
            lines += [
                f"   * - ``{name}``",
                f"     - {entry.why}",
                f"     - {entry.seen_in}",
                f"     - ``{test}``",
            ]
        parent = nodes.section()
        parent.document = self.state.document
        self.state.nested_parse(
            StringList(lines, self.arguments[0]), self.content_offset, parent
        )
        return parent.children


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("replaced-names", ReplacedNames)
    return {"parallel_read_safe": True}
