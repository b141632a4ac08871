"""Defines `pip_deps` for Bazel 7 and newer. Older versions use WORKSPACE."""

load(":tf_configure.bzl", "pip_deps")

def _pip_ext_impl(_ctx):
    pip_deps(name = "pip_deps")

pip_ext = module_extension(implementation = _pip_ext_impl)
