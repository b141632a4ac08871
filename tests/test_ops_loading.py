"""The op library is loaded once, and load errors contain the solution."""

import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import traceback

import pytest
import tensorflow as tf

from tf_layoutmap._core import ops, requirements, tf_private

PACKAGE = pathlib.Path(ops.__file__).parents[1]


def import_error(tmp_path, prelude: str, *, without: str = "") -> str:
    """Returns the error of `import tf_layoutmap._core.ops` in a new process.

    The process can import only `_core`, so that the error comes from `ops` or
    from a module that `ops` imports. Files named `without*` are omitted.
    """
    package = tmp_path / "tf_layoutmap"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_core").mkdir()
    for pattern in (
        "_core/*.py",
        "_version.py",
        "_build_info.py",
        "*.so",
    ):
        for file in PACKAGE.glob(pattern):
            if not (without and file.name.startswith(without)):
                shutil.copy(file, package / file.relative_to(PACKAGE))
    # The import hook of `pip install -e` is removed, because it would find the
    # omitted files in the checkout.
    program = textwrap.dedent(prelude) + textwrap.dedent("""
        import sys
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if not
            getattr(finder, "__module__", "").startswith("__editable__")]
        try:
            import tf_layoutmap._core.ops
        except ImportError as error:
            print(type(error).__name__, error)
        else:
            print("loaded")
        """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_tensorflow(version: str) -> str:
    """Returns code for a fake TensorFlow that cannot load op libraries."""
    return f"""
        import sys, types
        tf = types.ModuleType("tensorflow")
        tf.__version__ = {version!r}
        def load_op_library(path):
            raise SystemExit("loaded before the check")
        tf.load_op_library = load_op_library
        sys.modules["tensorflow"] = tf
        """


BUILT_FOR = requirements.built_for()
OTHERS = [one for one in requirements.TENSORFLOW if one != BUILT_FOR]


@pytest.mark.parametrize(
    "version", [f"{OTHERS[0]}.0", "2.22.0-rc1", "3.21.0", "2.2"]
)
def test_another_minor_version_raises_before_loading(tmp_path, version):
    message = import_error(tmp_path, fake_tensorflow(version))
    assert message.startswith("ImportError")
    assert f"Received: TensorFlow {version}." in message
    # All modules that import private names raise an error with the same
    # message.
    assert message.removeprefix("ImportError ") == str(
        requirements.other_version("tensorflow", version, (BUILT_FOR,))
    )
    assert f"build of tf_layoutmap supports TensorFlow {BUILT_FOR}.*" in message
    assert f'pip install "tensorflow-cpu=={BUILT_FOR}.*"' in message
    # Versions that other builds support.
    assert ("Or install the build" in message) == version.startswith(OTHERS[0])


def test_the_error_names_the_wheel_for_the_installed_tensorflow():
    error = requirements.other_version("tensorflow", "2.20.1", ("2.21",))
    assert "the version of its wheel ends with +tf220" in str(error)


@pytest.mark.parametrize("version", ["2.21.0", "2.21.9", "2.21.1-rc2"])
def test_any_patch_version_is_accepted(version):
    ops._check_version(version, "2.21.0")


def test_missing_tensorflow_raises_with_the_install_command(tmp_path):
    message = import_error(
        tmp_path,
        """
        import sys
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name == "tensorflow":
                    raise ModuleNotFoundError("hidden", name=name)
        sys.meta_path.insert(0, Hidden())
        """,
    )
    assert "TensorFlow, which is not installed" in message
    assert f'pip install "tensorflow-cpu=={BUILT_FOR}.*"' in message


@pytest.mark.parametrize("missing", ["_layoutmap_ops.so", "_build_info.py"])
def test_an_unbuilt_checkout_raises_with_the_build_command(tmp_path, missing):
    message = import_error(tmp_path, "", without=missing)
    assert f"{missing} is missing" in message
    assert "make build" in message


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_unbuilt_python_module_raises_with_the_build_command(tmp_path):
    message = import_error(tmp_path, "", without="_native")
    assert "_native for this Python is missing" in message
    assert "make build" in message


@pytest.mark.slow
def test_a_broken_library_raises_with_both_versions(tmp_path):
    message = import_error(
        tmp_path,
        """
        import pathlib
        pathlib.Path("tf_layoutmap/_layoutmap_ops.so").write_bytes(b"no ELF")
        """,
    )
    assert f"does not load into TensorFlow {BUILT_FOR}" in message
    assert "make build" in message


def test_an_unknown_op_raises_and_lists_the_ops():
    with pytest.raises(AttributeError, match=r"no op 'paint_rows'.*It has: "):
        ops.paint_rows  # noqa: B018


def test_every_op_of_the_library_is_an_attribute():
    assert ops._op_names()
    for name in ops._op_names():
        assert callable(getattr(ops, name))
        assert name in dir(ops)


def test_functions_have_the_names_that_tensorflow_generates():
    for name, definition in ops._library._definitions.items():
        source = tf_private.source_of_op(definition).decode()
        assert f"\ndef {name}(" in source


def test_functions_are_compiled_at_first_use():
    library = ops.OpLibrary(tf_private.register_library(str(ops._LIBRARY)))
    functions = vars(library._functions)
    assert "layout_map_mark_rows" not in functions
    function = library.layout_map_mark_rows
    assert functions["layout_map_mark_rows"] is function
    assert library.layout_map_mark_rows is function
    assert not hasattr(library, "layout_map_paint_rows")
    # AutoGraph calls functions of modules with this attribute as they are.
    assert inspect.getmodule(function)._IS_TENSORFLOW_PLUGIN


def test_loading_registers_ops_without_compiling_their_functions(tmp_path):
    """A process can load a graph with ops that it has never called."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def owners(ids):
        return ops.assign_partition(ids, [0, 5, 9], placement="div")

    graph = owners.get_concrete_function().graph.as_graph_def()
    (tmp_path / "graph").write_bytes(graph.SerializeToString())
    program = """
import sys
import tensorflow as tf
from tf_layoutmap._core import ops
graph = tf.compat.v1.GraphDef.FromString(open(sys.argv[1], "rb").read())
(placeholder,) = [n.name for n in graph.node if n.op == "Placeholder"]
(op,) = [n.name for n in graph.node if n.op == "LayoutMap>AssignPartition"]
assert "layout_map_assign_partition" not in vars(ops._library._functions)
def run(ids):
    return tf.graph_util.import_graph_def(
        graph, {placeholder: ids}, [op + ":0"])
print(tf.function(run)(tf.constant([7], tf.int64))[0].numpy().tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "graph")],
        text=True,
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1]"


def test_ops_provides_the_native_module():
    assert ops.native.__name__ == "tf_layoutmap._native"


def test_an_eager_error_contains_only_the_kernel_message():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        ops.assign_partition([5], [0, 5], placement="div")
    error = caught.value
    assert error.message == "Id 5 (ids[0]) is outside the table with 5 rows"
    assert str(error) == error.message
    assert type(error) is tf.errors.InvalidArgumentError
    assert error.error_code == tf.errors.INVALID_ARGUMENT
    shown = "".join(traceback.format_exception(error))
    assert "__wrapped__" not in shown
    assert "During handling" not in shown


def test_errors_of_functions_and_arguments_are_unchanged():
    with pytest.raises(TypeError, match="missing 1 required positional"):
        ops.assign_partition([5], placement="div")

    @tf.function
    def assign(ids):
        return ops.assign_partition(ids, [0, 5], placement="div")

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Id 5 \(ids\[0\]\) is outside"
    ):
        assign(tf.constant([5]))


def test_every_op_raises_plain_errors():
    for name in ops._op_names():
        op = getattr(ops, name)
        assert op is getattr(ops, name)
        assert op.__wrapped__.__wrapped__ is getattr(
            ops._library, f"layout_map_{name}"
        )
