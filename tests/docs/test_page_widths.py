"""The check of `make docs` finds pages that are wider than the window."""

import sys

import pytest

from tools import page_widths

PAGE = """<!doctype html><meta charset="utf-8"><title>page</title>
<body style="margin:0"><div style="width:{width}px">text</div>"""


# The browser takes about two seconds to start.
@pytest.mark.exhaustive
def test_a_page_that_is_wider_than_the_window_is_found(tmp_path):
    browser = page_widths.find_browser()
    if browser is None:
        pytest.skip("no browser is installed")
    (tmp_path / "folder").mkdir()
    (tmp_path / "narrow.html").write_text(PAGE.format(width=390))
    (tmp_path / "folder" / "wide 1.html").write_text(PAGE.format(width=1100))
    assert page_widths.too_wide(tmp_path, browser) == [
        "/folder/wide%201.html: 710 px too wide in a window of 390 px",
        "/folder/wide%201.html: 76 px too wide in a window of 1024 px",
    ]


def test_without_a_browser_nothing_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["page_widths", str(tmp_path)])
    monkeypatch.setattr(page_widths, "BROWSERS", ("no_such_browser",))
    page_widths.main()
    assert "were not checked, because no browser" in capsys.readouterr().out


def test_a_folder_without_pages_raises(tmp_path):
    with pytest.raises(ValueError, match="must contain HTML pages"):
        page_widths.too_wide(tmp_path, "unused")
