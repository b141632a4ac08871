"""A libtpu that aborts the import of TensorFlow raises an error before it."""

import os
import subprocess
import sys

import pytest

from tf_layoutmap._core import requirements

REPAIR = 'pip install "libtpu>=0.0.17,<0.0.32"'


def install(folder, **versions):
    """Creates the metadata of installed packages in a folder."""
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        title = name.replace("_", "-")
        metadata.write_text(f"Name: {title}\nVersion: {version}\n")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Returns a function that adds metadata of packages to the search path."""
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **versions: install(tmp_path, **versions)


@pytest.mark.parametrize("version", ["0.0.32", "0.0.52", "0.1.0.dev2+nightly"])
def test_a_libtpu_that_is_too_new_raises_with_the_repair(version, packages):
    packages(tensorflow_tpu="2.20.0", libtpu=version)
    with pytest.raises(ImportError) as error:
        requirements.check_libtpu()
    sentence = str(error.value)
    assert "needs a libtpu that tensorflow-tpu 2.20.0 supports" in sentence
    assert f"Received: libtpu {version}, with which" in sentence
    assert REPAIR in sentence
    # A public name of the package raises the same error, not another one.
    assert requirements.refusal("tlm.X", error.value) is error.value


@pytest.mark.parametrize(
    "versions",
    [
        {"tensorflow_tpu": "2.20.0", "libtpu": "0.0.17"},
        {"tensorflow_tpu": "2.20.0", "libtpu": "0.0.29"},
        {"tensorflow_tpu": "2.20.0", "libtpu": "0.0.31.1"},
        {"tensorflow_tpu": "2.20.0"},
        # JAX uses a newer libtpu.
        {"tensorflow_cpu": "2.20.0", "libtpu": "0.0.52"},
        # The supported versions of libtpu are known for one version only.
        {"tensorflow_tpu": "2.22.0", "libtpu": "0.0.52"},
    ],
    ids=str,
)
def test_other_packages_are_accepted(versions, packages):
    packages(**versions)
    requirements.check_libtpu()


def test_a_library_that_the_user_selects_is_accepted(packages, monkeypatch):
    packages(tensorflow_tpu="2.20.0", libtpu="0.0.52")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/opt/libtpu.so")
    requirements.check_libtpu()


def run(folder, *arguments):
    """Runs Python with a TensorFlow that aborts the process at import."""
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow/__init__.py").write_text("import os\nos.abort()\n")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_report_prints_the_repair_instead_of_aborting(tmp_path):
    install(tmp_path, tensorflow_tpu="2.20.0", libtpu="0.0.52")
    ended = run(tmp_path, "-m", "tf_layoutmap")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count(REPAIR) == 1
    assert "Traceback" not in ended.stderr
    assert "tensorflow-tpu 2.20.0, libtpu 0.0.52)" in ended.stdout


def test_each_import_of_tensorflow_raises_instead_of_aborting(tmp_path):
    install(tmp_path, tensorflow_tpu="2.20.0", libtpu="0.0.52")
    program = (
        "import tf_layoutmap as tlm\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import tensorflow\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "tlm.ShardedVariable\n"
    )
    ended = run(tmp_path, "-c", program)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count(REPAIR) == 2
    assert ended.stderr.count(REPAIR) == 1


def test_the_import_is_not_changed_without_libtpu(tmp_path):
    """The TensorFlow of this test then aborts, as a real one would not."""
    ended = run(tmp_path, "-c", "import tf_layoutmap, tensorflow")
    assert ended.returncode < 0
