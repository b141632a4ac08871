"""Checks the levels of the architecture by reading the imports.

A module imports only modules of lower levels or of its own folder. Only a few
modules may import private names or native code. The tests only read sources, so
they also work if a module cannot be imported.
"""

import ast
import functools
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "tf_layoutmap"
CORE = ROOT / "cc" / "core"

# A module may import modules of lower levels and of its own folder. The entry
# of a package also applies to all modules in the package. If several entries
# match a module, the longest one applies.
LEVELS = {
    # No TensorFlow.
    "_build_info": 0,
    "_version": 0,
    "_core.checks": 0,
    "_core.distribution_notice": 0,
    "_core.lazy": 0,
    "_core.literals": 0,
    "_core.paths": 0,
    "_core.patch_entry": 0,
    "_core.placeholders": 0,
    "_core.private_names": 0,
    "_core.requirements": 0,
    "_core.user_warnings": 0,
    "local_cluster": 0,
    "partition": 0,
    "vocabulary.open_vocabulary": 0,
    "vocabulary.bucket_layout": 0,
    "vocabulary.first_values": 0,
    "layout.key_matching": 0,
    "layout.mesh.shard_shapes": 0,
    "layout.processes.compare": 0,
    "layout.ops.einsum_axes": 0,
    "embedding.optimizers": 0,
    "embedding.inspection.id_counts": 0,
    "embedding.inspection.sparse_core_counts": 0,
    "embedding.inspection.svg_plots": 0,
    "embedding.configs": 0,
    "planning.problem": 0,
    "planning.search": 0,
    "planning.local_search": 0,
    "planning.budgets": 0,
    "planning.costs": 0,
    "planning.table_choices": 0,
    "planning.explanations": 0,
    "planning.page": 0,
    "planning.step_graph": 0,
    "planning.layout_choices": 0,
    "planning.layout_costs": 0,
    "planning.map_keys": 0,
    "serving.report": 0,
    "deltas.served.chain": 0,
    "deltas.served.packing": 0,
    "deltas.served.storage": 0,
    # Modules for private names, native ops and files.
    "dtensor": 1,
    "ops": 1,
    "process": 1,
    "_core": 1,
    "deltas.served": 1,
    "_core.files": 2,
    "process_end": 2,
    "_core.freed_gradients": 2,
    "_core.patches": 1,
    "_core.dtensor_ops": 2,
    "sharded.routing.assertions": 1,
    "sharded.routing": 2,
    "vocabulary.key_tensors": 1,
    "vocabulary.stored_keys": 1,
    # Building blocks.
    "sharded": 3,
    "vocabulary": 3,
    "layout.mesh": 4,
    "layout.variable_names": 4,
    "layout.layout_table": 5,
    "layout.assignments": 5,
    "layout.ops": 5,
    "layout.processes": 5,
    "layout.replication": 6,
    "layout.mesh_step": 7,
    "layout.keras3": 8,
    "layout.tf_keras": 9,
    "layout": 10,
    # Tables of a TPUEmbedding and its backends.
    "embedding.build_shapes": 5,
    "embedding.inputs": 5,
    "embedding.packing": 5,
    "embedding.processes": 5,
    "embedding.replicas": 5,
    "embedding.steps": 5,
    "embedding.stock_lookup": 5,
    "embedding.tpu_program": 5,
    "embedding.changes": 6,
    "embedding.key_editor": 6,
    "embedding.resizing": 6,
    "embedding.table_store": 6,
    "embedding.table_variable": 6,
    "embedding.tables": 6,
    "embedding.serving": 6,
    "embedding.inspection": 6,
    "embedding.checkpoints": 7,
    "embedding.host": 7,
    "embedding.tpu": 7,
    "embedding.process_sharded": 8,
    "embedding.servers": 8,
    "embedding": 8,
    "embedding.tpu_embedding": 9,
    "embedding.v2": 10,
    "deltas": 9,
    # Strategies, layers and programs.
    "emulation": 11,
    "planning": 11,
    "mesh_scope": 12,
    "distribution": 13,
    "ps": 11,
    "layers.evaluation": 2,
    "layers.base": 12,
    "layers.keras3": 13,
    "layers.tf_keras": 13,
    "layers": 14,
    "serving": 14,
    "server": 14,
    "": 15,  # tf_layoutmap/__init__.py
    "keras_check": 16,
    "process_report": 16,
    "__main__": 17,
}

# Only the tables of public names and of replaced names import modules of this
# package by strings. `_core.ops` imports modules that the build generates.
IMPORT_BY_STRING = {
    "_core.lazy",
    "_core.ops",
    "_core.patches",
    "_core.requirements",
}

# Modules that only the named module may import.
ONLY_IN = [
    (r"tensorflow\.(python|dtensor)(\.|$)", "_core.tf_private"),
    (r"keras\.src(\.|$)", "_core.keras_private"),
    (r"tf_keras\.src(\.|$)", "_core.tf_keras_private"),
    (r"tf_layoutmap\._native$", "_core.ops"),
    (r"tf_layoutmap\._build_info$", "_core.requirements"),
    (r"ctypes(\.|$)|cffi(\.|$)", "_core.ops"),
]
LOADERS = {"load_op_library", "load_library", "CDLL", "dlopen"}


@functools.cache
def modules() -> list[str]:
    """Returns the modules of the package; "" is the package itself."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names.append(".".join(p for p in parts if p != "__init__"))
    return names


def source_of(module: str) -> pathlib.Path:
    path = PACKAGE.joinpath(*module.split("."))
    init = path / "__init__.py"
    return init if init.exists() else path.with_suffix(".py")


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def nodes_of(tree: ast.AST):
    """Yields all syntax nodes except code that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if only_for_types(node):
            for other in node.orelse:
                yield other
                yield from nodes_of(other)
            continue
        yield node
        yield from nodes_of(node)


def imports_of(
    tree: ast.AST, module: str, is_package: bool, walk=nodes_of
) -> set[str]:
    """Returns the full names of the modules and objects that `module` imports.

    `from a import b` counts as `a.b`, because b may be a module. `walk` yields
    the nodes to examine.
    """
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ("tf_layoutmap." + module).rstrip(".").split(".")
                up = node.level - is_package
                here = here[: len(here) - up] if up else here
                base = ".".join([*here, *filter(None, [base])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def read(module: str) -> tuple[ast.AST, set[str]]:
    path = source_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, imports_of(tree, module, path.name == "__init__.py")


def own_module(imported: str) -> str | None:
    """Returns the imported module, or None if it is in another package."""
    if imported.split(".")[0] != "tf_layoutmap":
        return None
    name = ".".join(imported.split(".")[1:])
    known = set(modules()) | {"_native", "_build_info"}
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def level_entry(module: str) -> str:
    """Returns the entry of LEVELS that applies to `module`."""
    name = module
    while name and name not in LEVELS:
        name = name.rpartition(".")[0]
    return name


def folder(module: str) -> str:
    return (
        module
        if source_of(module).name == "__init__.py"
        else (module.rpartition(".")[0])
    )


def no_offenders(rule: str, offenders) -> None:
    """Asserts that `offenders` is empty; the error lists all of them."""
    assert not offenders, rule + "\n" + "\n".join(map(str, offenders))


def test_every_module_has_a_level():
    no_offenders(
        "Add these modules to LEVELS:",
        [m for m in modules() if m and not level_entry(m)],
    )


def points_up(module: str, imported: str) -> bool:
    """Returns whether the imported module is not on a lower level."""
    target = own_module(imported)
    if target is None or target in (module, "_native"):
        return False
    mine, theirs = LEVELS[level_entry(module)], LEVELS[level_entry(target)]
    # Modules of level 0 may not import modules of a higher level, even if both
    # are in the same folder.
    sideways = folder(module) == folder(target) != "" and mine > 0
    return not (theirs < mine or theirs == mine == 0 or sideways)


def test_imports_point_down_or_stay_in_the_package():
    assert points_up("partition", "tf_layoutmap.layout.explain.Explanation")
    no_offenders(
        "These imports lead to modules that are not below the importing one:",
        [
            f"{module} imports {name}"
            for module in modules()
            for name in sorted(read(module)[1])
            if points_up(module, name)
        ],
    )


def imports_by_string(module: str) -> list[str]:
    """Returns the modules of this package that `module` imports by a string."""
    return [
        ast.unparse(node)
        for node in ast.walk(read(module)[0])
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("import_module", "__import__"))
        and "tf_layoutmap" in ast.unparse(node)
    ]


def test_only_tables_import_by_string():
    no_offenders(
        "Use import statements instead:",
        [
            f"{module}: {call}"
            for module in sorted(set(modules()) - IMPORT_BY_STRING)
            for call in imports_by_string(module)
        ],
    )


def test_pure_modules_import_no_tensorflow():
    heavy = {"tensorflow", "keras", "tf_keras"}
    pure = [m for m in modules() if LEVELS[level_entry(m)] == 0]
    assert "partition" in pure
    no_offenders(
        "These modules of level 0 import TensorFlow or Keras:",
        [m for m in pure if {n.split(".")[0] for n in read(m)[1]} & heavy],
    )


def test_pure_modules_are_type_checked_strictly():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [ROOT / name for name in settings["tool"]["pyright"]["strict"]]
    strict = {
        path
        for name in named
        for path in (name.rglob("*.py") if name.is_dir() else [name])
    }
    # setup.py generates _build_info.py.
    pure = {
        source_of(m)
        for m in modules()
        if LEVELS[level_entry(m)] == 0 and m != "_build_info"
    }
    assert strict == pure


@functools.cache
def spelled(module: str) -> frozenset[str]:
    """Returns the names that a module imports, or uses without an import."""
    tree, imported = read(module)
    # `tf.python.x` is used without an import, and `import_module` calls are not
    # import statements.
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " not in node.value
    }
    attributes = {
        "tensorflow" + name[2:]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (name := ast.unparse(node)).startswith("tf.python")
    }
    return frozenset(imported | strings | attributes)


@pytest.mark.parametrize(("private", "only_in"), ONLY_IN)
def test_private_names_are_imported_in_one_module(private, only_in):
    if only_in in modules() and only_in != "_core.ops":
        assert any(re.match(private, name) for name in spelled(only_in))
    no_offenders(
        f"Only tf_layoutmap.{only_in} may import these:",
        [
            f"{module}: {name}"
            for module in modules()
            if module != only_in
            for name in sorted(spelled(module))
            if re.match(private, name)
        ],
    )


def test_only_keras_private_depends_on_the_version_of_keras():
    """Another module must not compare versions or read the columns."""
    version = re.compile(r"\bkeras\.__version__|(?<!patch_entry\.)\bKERAS\b")
    compares = {
        module
        for module in modules()
        for node in ast.walk(read(module)[0])
        if isinstance(node, ast.Attribute | ast.Name)
        and version.search(ast.unparse(node))
        # `patch_entry.KERAS` is a text for descriptions.
        and not module.endswith(("replacements", "patch_entry"))
    }
    assert "_core.keras_private" in compares
    no_offenders(
        "Add an entry to `_COLUMNS` of _core/keras_private.py instead:",
        sorted(compares - {"_core.keras_private", "_core.requirements"}),
    )


def test_only_ops_loads_shared_libraries():
    exempt = {
        "_core.ops",
        "_core.tf_private",
        "_core.keras_private",
        "_core.private_names",
    }
    assert exempt <= set(modules())
    no_offenders(
        "Only tf_layoutmap._core.ops may load libraries:",
        [
            module
            for module in set(modules()) - exempt
            if LOADERS
            & {
                node.attr if isinstance(node, ast.Attribute) else node.id
                for node in ast.walk(read(module)[0])
                if isinstance(node, ast.Attribute | ast.Name)
            }
        ],
    )


def test_the_package_itself_only_lists_public_names():
    tree, _ = read("")
    body = list(tree.body)
    for node in filter(only_for_types, tree.body):
        assert all(
            isinstance(imported, ast.Import | ast.ImportFrom)
            for imported in node.body
        )
        body.remove(node)
        body += node.orelse
    for node in body:
        assert isinstance(
            node,
            ast.Import
            | ast.ImportFrom
            | ast.Assign
            | ast.AugAssign
            | ast.AnnAssign
            | ast.Expr,
        ), (
            f"line {node.lineno}: tf_layoutmap/__init__.py imports and "
            "exports; what it does belongs into a module"
        )


def core_sources() -> list[pathlib.Path]:
    return sorted(
        p
        for p in CORE.rglob("*")
        if p.suffix in (".h", ".cc") and "_test." not in p.name
    )


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(
        r'^\s*#\s*include\s+[<"]([^>"]+)[>"]',
        path.read_text(encoding="utf-8"),
        re.M,
    )


def test_the_core_has_sources():
    assert core_sources()


def including(pattern: str, paths) -> list[str]:
    """Returns the includes that match a pattern, with the including files."""
    return [
        f"{path.relative_to(CORE)} includes {name}"
        for path in paths
        for name in includes(path)
        if re.search(pattern, name)
    ]


def test_the_core_uses_neither_tensorflow_nor_threads():
    banned = (
        r"^(tensorflow/|absl/|tsl/|xla/|Eigen|unsupported/|pybind11/|"
        r"Python\.h|thread$|future$|pthread|cc/(?!core/))"
    )
    no_offenders("cc/core is C++17 alone:", including(banned, core_sources()))


def test_processor_headers_stay_in_simd():
    elsewhere = [p for p in core_sources() if p.parent.name != "simd"]
    pattern = r"intrin\.h$|arm_neon|cpuid"
    assert including(pattern, set(core_sources()) - set(elsewhere))
    no_offenders(
        "Only cc/core/simd has vector code:", including(pattern, elsewhere)
    )


def test_bodies_per_instruction_set_include_no_templates():
    # If these sources used inline functions of the standard library, the linker
    # might keep only the copy that is compiled for AVX-512, which fails on
    # other CPUs.
    bodies = sorted((CORE / "simd").glob("*_isa.cc"))
    assert bodies
    seen, todo = set(), list(bodies)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in includes(path):
            if name.startswith("cc/"):
                todo.append(ROOT / name)
                continue
            assert re.search(r"^cstd(int|def)$|intrin\.h$|arm_neon", name), (
                f"{path.relative_to(ROOT)} includes <{name}>"
            )
