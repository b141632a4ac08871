"""Runs test programs in forks of a process that has imported TensorFlow.

Importing TensorFlow takes three seconds of CPU time. A fork of a process that
has imported TensorFlow takes almost no time. Use `subprocess` for programs that
must not have TensorFlow imported, or that test how a process starts.
"""

import ctypes
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

_forks = multiprocessing.get_context("forkserver")
# tf_layoutmap is not preloaded, because it reads environment variables when it
# is imported.
_forks.set_forkserver_preload(["tensorflow", "keras", "tf_keras"])


class ForkedProcess:
    """Equivalent of `subprocess.Popen` for Python programs with TensorFlow.

    Args:
      arguments: Arguments after `python`: ["-m", module, ...] or [path, ...].
      log: Path of the file that receives the standard output.
      errors: Path of the file that receives the standard error, or None for
        `log`.
      env: Full environment. TensorFlow's log level and oneDNN setting are
        inherited from this process.
      cwd: Working directory.
      as_user: Whether permission bits apply to the process even if it runs as
        root.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: pathlib.Path,
        *,
        errors: pathlib.Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
        as_user: bool = False,
    ):
        self._arguments = list(arguments)
        # The log is truncated before the start, so that tests that poll the log
        # do not read old text.
        pathlib.Path(log).write_bytes(b"")
        self._process = _forks.Process(
            target=_run,
            daemon=True,
            args=(
                self._arguments,
                os.path.abspath(log),
                os.path.abspath(errors) if errors else None,
                dict(os.environ if env is None else env),
                str(cwd or pathlib.Path.cwd()),
                as_user,
            ),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process is running."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(
    arguments: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: pathlib.Path | None = None,
) -> subprocess.CompletedProcess:
    """Runs a program and waits until it ends, like `subprocess.run`.

    Args:
      arguments: See `ForkedProcess`.
      seconds: Timeout in seconds.
      env: See `ForkedProcess`.
      cwd: See `ForkedProcess`.

    Returns:
      The exit code and the printed text.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, errors = pathlib.Path(folder, "log"), pathlib.Path(folder, "err")
        process = ForkedProcess(arguments, log, errors=errors, env=env, cwd=cwd)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(
            list(arguments),
            code,
            *(one.read_text(errors="replace") for one in (log, errors)),
        )


def run_code(
    code: str,
    *arguments: str,
    seconds: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: pathlib.Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess:
    """Runs Python code to its end, like `python -c`.

    Args:
      code: Source code of the program.
      *arguments: `sys.argv[1:]` of the program.
      seconds: Timeout in seconds.
      env: See `ForkedProcess`.
      cwd: See `ForkedProcess`.
      check: Whether to raise an error if the program fails.

    Returns:
      The exit code and the printed text.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "program.py")
        program.write_text(code)
        done = run(
            [str(program), *arguments], seconds=seconds, env=env, cwd=cwd
        )
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done


def _run(
    arguments: list[str],
    log: str,
    errors: str | None,
    env: dict[str, str],
    cwd: str,
    as_user: bool,
) -> None:
    if as_user:
        _heed_permissions()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in ((1, log), (2, errors)):
        if path is None:
            os.dup2(1, 2)
        else:
            with open(path, "a") as file:
                os.dup2(file.fileno(), number)
    # New streams are opened, because the inherited streams are not
    # line-buffered.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.path[:0] = [
        path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    # Programs that restart themselves read `sys.orig_argv`.
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _heed_permissions() -> None:
    """Drops the capabilities that let root ignore permission bits."""
    third_version, overrides_permissions = 0x20080522, 1 << 1  # DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(third_version, 0)
    # The first element is the set of effective capabilities.
    capabilities = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, capabilities):
        raise OSError(ctypes.get_errno(), "capget")
    capabilities[0] &= ~overrides_permissions
    if libc.capset(header, capabilities):
        raise OSError(ctypes.get_errno(), "capset")
