"""Sphinx extension that links public names to their API entries.

In pages and docstrings, code such as `tlm.ShardedVariable` becomes a link to
the API entry of that name. A name without an entry causes a Sphinx warning, so
that the build detects pages that still use an old name. Code such as
`tf.Variable` becomes a link to the page of TensorFlow, Keras or NumPy if
`docs/inventories` lists the name.
"""

import re
from typing import Any

import inventories
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

NAME = re.compile(r"(\w+(?:\.\w+)+)(?:\(\))?")
# Names inside these nodes are not converted to links, because the nodes are
# already links, or are titles, which also appear in the table of contents.
LEFT_ALONE = (nodes.reference, addnodes.pending_xref, nodes.title)


def has_ancestor(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def target_of(name: str) -> str | None:
    """Returns the name to link to, or None if `name` has no page."""
    first, _, rest = name.partition(".")
    if first == "tlm":
        return f"tf_layoutmap.{rest}"
    return inventories.listed_name(name)


class LinkNames(SphinxTransform):
    """Turns code literals that are public names into cross references."""

    default_priority = 500

    def apply(self, **options: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            match = NAME.fullmatch(literal.astext())
            if match is None or has_ancestor(literal, LEFT_ALONE):
                continue
            target = target_of(match[1])
            if target is None:
                continue
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                refwarn=True,
                reftarget=target,
                refdoc=self.env.docname,
                refexplicit=True,
            )
            link.source, link.line = literal.source, literal.line
            literal.replace_self(link)
            link += literal


def setup(app: Any) -> dict[str, Any]:
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True}
