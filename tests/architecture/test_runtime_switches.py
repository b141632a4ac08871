"""Code outside of the stores does not depend on the runtime of a table.

Tables can be in this process, on servers, or sharded over processes. Features
that use tables outside of steps call the methods of a `TableStore` or of a
backend. They neither check the class of an object that exists on one runtime
only, nor read attributes that only some backends have.

A check of a user argument, such as `isinstance(table, ShardedVariable)`, is not
a switch: the user has selected the class. A class of data that all runtimes
create, such as `ChangedValues`, is not a switch either.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "tf_layoutmap"

# The modules that contain the stores.
STORES = {
    "embedding/table_store.py",
    "embedding/servers/tables.py",
    "embedding/process_sharded/tables.py",
}

# Classes whose objects exist on one runtime only.
RUNTIME_TYPES = {
    "CopiedCount",
    "ProcessShardedBackend",
    "ProcessShardedEngine",
    "ProcessShardedNumbers",
    "ProcessShardedTable",
    "HostBackend",
    "HostBackendOfTPU",
    "HostEngine",
    "HostStore",
    "HostTable",
    "KeyStepOps",
    "KeyTable",
    "MeshTable",
    "ProcessStore",
    "ServerStore",
    "ServersBackend",
    "ServersTable",
    "ShardedNumbers",
    "StepOps",
    "TPUBackend",
    "WorkerEngine",
}
# Objects whose classes are declared by a protocol or a base class.
DECLARED = {"backend", "engine"}


def names_in(node: ast.AST) -> set[str]:
    """Returns all names and attributes in an expression."""
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def last_name(node: ast.AST) -> str:
    """Returns the name of a variable or of an attribute, or an empty string."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.lstrip("_")


def is_switch(node: ast.AST) -> bool:
    """Returns whether an expression depends on the runtime of a table."""
    if isinstance(node, ast.Compare):
        # A comparison such as `type(table) is HostTable`.
        return "type" in names_in(node.left) and any(
            names_in(other) & RUNTIME_TYPES for other in node.comparators
        )
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id in ("isinstance", "issubclass"):
        return bool(names_in(node.args[1]) & RUNTIME_TYPES)
    return (
        node.func.id in ("getattr", "hasattr")
        and last_name(node.args[0]) in DECLARED
    )


def test_only_stores_depend_on_the_runtime_of_a_table():
    offenders = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in STORES
        for node in ast.walk(ast.parse(path.read_text()))
        if is_switch(node)
    ]
    assert offenders == []
