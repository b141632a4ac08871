"""The repository `pip_deps`: headers and libraries that pip installed.

The repository links TensorFlow's headers and libtensorflow_framework, pybind11's
headers and Python's headers from the environment of one interpreter. It uses
the interpreter in PYTHON_BIN_PATH if this variable is set. Otherwise, it uses
.venv of this checkout if it exists, and python3 on PATH if it does not exist.
Folders in TF_LAYOUTMAP_BUILD_PACKAGES have priority (see probe.py).
TF_LAYOUTMAP_ARCH selects another processor architecture.
"""

def _interpreter(ctx):
    named = ctx.os.environ.get("PYTHON_BIN_PATH")
    if named:
        return named
    checkout = ctx.path(ctx.attr.workspace_file).dirname
    own = checkout.get_child(".venv").get_child("bin").get_child("python")
    if own.exists:
        return str(own)
    found = ctx.which("python3")
    if not found:
        fail("No Python interpreter found. Set PYTHON_BIN_PATH to Python 3.11 to 3.13.")
    return str(found)

def _pip_deps_impl(ctx):
    result = ctx.execute([_interpreter(ctx), "-I", str(ctx.path(ctx.attr.probe))])
    if result.return_code != 0:
        fail(result.stderr.strip() or "third_party/tf/probe.py failed without a message.")
    found = {}
    for line in result.stdout.splitlines():
        key, value = line.split("=", 1)
        found[key] = value
    ctx.symlink(found["TF_INCLUDE"], "tf_include")
    ctx.symlink(found["TF_LIB"], "libtensorflow_framework.so.2")
    ctx.symlink(found["PYBIND11_INCLUDE"], "pybind11_include")
    ctx.symlink(found["PYTHON_INCLUDE"], "python_include")

    # Debian's pyconfig.h includes a file in a folder of each architecture.
    if "PYTHON_CONFIG" in found:
        ctx.symlink(found["PYTHON_CONFIG"], "python_config/" + found["PYTHON_CONFIG_NAME"])
    ctx.template("BUILD", ctx.attr.build_template)
    ctx.file("vars.bzl", "EXT_SUFFIX = %r\n" % found["EXT_SUFFIX"])

pip_deps = repository_rule(
    implementation = _pip_deps_impl,
    doc = "Links headers and libraries that pip installed into one repository.",
    environ = [
        "PYTHON_BIN_PATH",
        "TF_LAYOUTMAP_ARCH",
        "TF_LAYOUTMAP_BUILD_PACKAGES",
    ],
    local = True,
    attrs = {
        "build_template": attr.label(
            default = "//third_party/tf:pip_deps.BUILD.tpl",
        ),
        "probe": attr.label(default = "//third_party/tf:probe.py"),
        "workspace_file": attr.label(default = "//:WORKSPACE"),
    },
)
