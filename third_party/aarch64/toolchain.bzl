"""A C++ toolchain that uses Debian's cross compiler for aarch64.

The flags equal the flags of the toolchain that Bazel configures for the system
compiler, so that libraries for both architectures are built in the same way.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "ACTION_NAMES")
load(
    "@bazel_tools//tools/cpp:cc_toolchain_config_lib.bzl",
    "feature",
    "flag_group",
    "flag_set",
    "tool_path",
    "with_feature_set",
)

_TRIPLE = "aarch64-linux-gnu"

_COMPILE = [
    ACTION_NAMES.assemble,
    ACTION_NAMES.preprocess_assemble,
    ACTION_NAMES.c_compile,
    ACTION_NAMES.cpp_compile,
    ACTION_NAMES.cpp_header_parsing,
]

_LINK = [
    ACTION_NAMES.cpp_link_executable,
    ACTION_NAMES.cpp_link_dynamic_library,
    ACTION_NAMES.cpp_link_nodeps_dynamic_library,
]

# Flags that make the output independent of the time and the place of the build.
_REPRODUCIBLE = [
    "-fno-canonical-system-headers",
    "-Wno-builtin-macro-redefined",
    "-D__DATE__=\"redacted\"",
    "-D__TIMESTAMP__=\"redacted\"",
    "-D__TIME__=\"redacted\"",
]

def _flags(actions, flags, mode = None):
    return flag_set(
        actions = actions,
        flag_groups = [flag_group(flags = flags)],
        with_features = [with_feature_set(features = [mode])] if mode else [],
    )

def _cross_toolchain_config_impl(ctx):
    tools = {
        "ar": "ar",
        "cpp": "cpp",
        "gcc": "gcc",
        "gcov": "gcov",
        "ld": "ld",
        "nm": "nm",
        "objcopy": "objcopy",
        "objdump": "objdump",
        "strip": "strip",
    }

    # The stand-in for rules_cc, which Bazel 4 to 6 use, has no cc_common.
    # buildifier: disable=native-cc-common
    return cc_common.create_cc_toolchain_config_info(
        ctx = ctx,
        toolchain_identifier = _TRIPLE,
        compiler = "gcc",
        host_system_name = "local",
        target_cpu = "aarch64",
        target_system_name = _TRIPLE,
        target_libc = "glibc",
        abi_version = "gcc",
        abi_libc_version = "glibc",
        # Bazel compares the beginnings of paths, so the folders also contain
        # the headers of each version of the compiler.
        cxx_builtin_include_directories = [
            "/usr/lib/gcc-cross/" + _TRIPLE,
            "/usr/%s/include" % _TRIPLE,
            "/usr/include",
        ],
        tool_paths = [
            tool_path(name = name, path = "/usr/bin/%s-%s" % (_TRIPLE, tool))
            for name, tool in tools.items()
        ],
        features = [
            feature(name = "dbg"),
            feature(name = "opt"),
            feature(name = "supports_pic", enabled = True),
            feature(
                name = "default_compile_flags",
                enabled = True,
                flag_sets = [
                    _flags(_COMPILE, [
                        "-U_FORTIFY_SOURCE",
                        "-fstack-protector",
                        "-Wall",
                        "-fno-omit-frame-pointer",
                    ] + _REPRODUCIBLE),
                    _flags(_COMPILE, ["-g"], mode = "dbg"),
                    _flags(_COMPILE, [
                        "-g0",
                        "-O2",
                        "-D_FORTIFY_SOURCE=1",
                        "-DNDEBUG",
                        "-ffunction-sections",
                        "-fdata-sections",
                    ], mode = "opt"),
                ],
            ),
            feature(
                name = "default_link_flags",
                enabled = True,
                flag_sets = [
                    _flags(_LINK, [
                        "-Wl,-z,relro,-z,now",
                        "-pass-exit-codes",
                        "-lstdc++",
                        "-lm",
                    ]),
                    _flags(_LINK, ["-Wl,--gc-sections"], mode = "opt"),
                ],
            ),
        ],
    )

cross_toolchain_config = rule(
    implementation = _cross_toolchain_config_impl,
    provides = [CcToolchainConfigInfo],
)
