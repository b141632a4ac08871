"""Checks in a browser that no page is wider than the window.

    python -m tools.page_widths site

The program opens all HTML pages of a folder in headless Chromium, at each of
`WIDTHS`. The exit code is 1 if a page has a horizontal scroll bar. Without a
browser, the program prints that it has checked nothing. `make docs` runs it.
"""

import argparse
import functools
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.parse

WIDTHS = (390, 1024, 1280, 1366, 1440, 1920)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Seconds until the browser must have opened all pages.
TIMEOUT = 300

# The browser opens this page, which opens each page in a frame. Rules for
# small windows depend on the width of the frame, so a frame is equivalent to a
# window.
_HARNESS = """<!doctype html><meta charset="utf-8"><title>widths</title>
<body style="margin:0"><iframe id="frame" style="border:0;height:900px">
</iframe><script>
const {pages, widths} = DATA;
const frame = document.getElementById("frame");
const loaded = () => new Promise(done => { frame.onload = done; });
async function run() {
  const found = [];
  for (const page of pages) {
    const ready = loaded();
    frame.style.width = widths[0] + "px";
    frame.src = page;
    await ready;
    for (const width of widths) {
      frame.style.width = width + "px";
      const root = frame.contentDocument.documentElement;
      // In a small window, Furo's text has a scroll bar instead of the page.
      const boxes = [root, ...root.querySelectorAll(".content")];
      const excess = boxes.map(box => box.scrollWidth - box.clientWidth);
      found.push([page, width, Math.max(...excess)]);
    }
  }
  return found;
}
run().then(
  found => JSON.stringify({found}),
  error => JSON.stringify({error: String(error)})
).then(body => fetch("/result", {method: "POST", body}));
</script>"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the pages and the harness, and receives the result."""

    harness = ""
    result: dict | None = None
    is_finished = threading.Event()

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        body = self.harness.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        type(self).result = json.loads(self.rfile.read(size))
        self.send_response(204)
        self.end_headers()
        self.is_finished.set()

    def log_message(self, format: str, *args: object) -> None:
        """Prints no line for each request."""


def find_browser() -> str | None:
    """Returns the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def too_wide(
    folder: pathlib.Path, browser: str, widths: tuple[int, ...] = WIDTHS
) -> list[str]:
    """Returns one line for each page and width with a horizontal scroll bar.

    Args:
      folder: Folder of HTML pages, with subfolders.
      browser: Path of Chromium or Chrome.
      widths: Widths of the window in CSS pixels.

    Raises:
      ValueError: If `folder` contains no HTML page.
      RuntimeError: If the browser does not open all pages.
    """
    pages = [
        urllib.parse.quote(f"/{path.relative_to(folder).as_posix()}")
        for path in sorted(folder.rglob("*.html"))
    ]
    if not pages:
        raise ValueError(
            f"`folder` must contain HTML pages. Received: {folder}, which "
            "contains none. Run `make docs`."
        )
    data = json.dumps({"pages": pages, "widths": widths})

    class Handler(_Handler):
        harness = _HARNESS.replace("DATA", data)
        is_finished = threading.Event()

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                browser,
                "--headless=new",
                "--disable-gpu",
                "--no-first-run",
                f"--user-data-dir={profile}",
                # Chromium cannot create a sandbox for the user root.
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                f"http://127.0.0.1:{server.server_port}/",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            Handler.is_finished.wait(TIMEOUT)
        finally:
            # Also ends the child processes of the browser.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
            server.server_close()
    result = Handler.result
    if result is None or "error" in result:
        raise RuntimeError(
            f"{browser} must open {len(pages)} pages within {TIMEOUT} s. "
            f"Received: {'no result' if result is None else result['error']}."
        )
    assert len(result["found"]) == len(pages) * len(widths)
    return [
        f"{page}: {excess} px too wide in a window of {width} px"
        for page, width, excess in result["found"]
        if excess > 0
    ]


def main() -> None:
    """Checks the pages of a folder, and prints the pages that are too wide."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    browser = find_browser()
    if browser is None:
        print(
            "The widths of the pages were not checked, because no browser is "
            f"installed ({', '.join(BROWSERS)}). On Debian, install one with "
            "`apt-get install chromium`."
        )
        return
    wide_pages = too_wide(folder.resolve(), browser)
    if wide_pages:
        sys.exit(
            "Pages with a horizontal scroll bar:\n" + "\n".join(wide_pages)
        )
    print(f"No page is wider than the window at {WIDTHS} px.")


if __name__ == "__main__":
    main()
