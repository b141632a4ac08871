"""Stand-ins with which Bazel 4 to 6 can build C++ without a network.

These versions of Bazel fetch rules_cc and rules_java when they look up a C++
toolchain, and fetch a coverage tool when they build a test. They load only
`defs.bzl` from rules_cc and rules_java. The stand-in for `defs.bzl` uses the
native rules.
"""

_NATIVE_RULES = {
    "cc": [
        "cc_binary",
        "cc_import",
        "cc_library",
        "cc_proto_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
        "fdo_prefetch_hints",
        "fdo_profile",
        "objc_import",
        "objc_library",
    ],
    "java": [
        "java_binary",
        "java_import",
        "java_library",
        "java_lite_proto_library",
        "java_package_configuration",
        "java_plugin",
        "java_proto_library",
        "java_runtime",
        "java_test",
        "java_toolchain",
    ],
}

def _native_rules_impl(ctx):
    language = ctx.name.split("_")[-1]
    lines = [
        "%s = native.%s" % (rule, rule)
        for rule in _NATIVE_RULES[language]
    ]
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file(language + "/BUILD", "")
    ctx.file(language + "/defs.bzl", "\n".join(lines) + "\n")

native_rules = repository_rule(
    implementation = _native_rules_impl,
    doc = "Creates `rules_<language>`, whose defs.bzl refers to the native rules.",
)

def _no_coverage_tools_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("BUILD", """
filegroup(
    name = "coverage_report_generator",
    visibility = ["//visibility:public"],
)
""")

no_coverage_tools = repository_rule(
    implementation = _no_coverage_tools_impl,
    doc = "Creates an empty report generator, because `bazel coverage` is not used.",
)
