"""The report in a real browser: it is drawn, and nothing is asked of anywhere."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from made_runs import made_run
from test_report import HOSTILE, PNG

from fasttrain.history.report import write_report

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("FASTTRAIN_TEST_BROWSER") or next(
    (path for name in NAMES if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (or named by FASTTRAIN_TEST_BROWSER)"
)


def opened(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The document as the browser has it after all has loaded, and every address that it asked for on the page's behalf: some
    builds ask their makers for the time and for updates whatever is opened.
    """
    log = folder / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
    ended = subprocess.run(
        [str(BROWSER), *options, f"--log-net-log={log}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(log.read_text())
    told = [event["params"] for event in found["events"] if event.get("params", {}).get("url")]
    browsers_own = {one["url"] for one in told if one.get("initiator") == "not an origin"}
    return ended.stdout, sorted({one["url"] for one in told} - browsers_own)


@needs_browser
def test_it_opens_and_asks_for_nothing(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", cases={HOSTILE: {"liver": 0.5}, "case_b": {"liver": 0.25}})
    folder.pictures.mkdir()
    (folder.pictures / "epoch_0003_worst_case_b.png").write_bytes(PNG)
    document, asked = opened(write_report(folder), tmp_path)
    assert asked == []
    assert "case_b" in document
    assert document.count("<svg") >= 4
    assert "<script>alert" not in document


@needs_browser
def test_the_watch_over_requests_sees_one(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<p>some</p><img src="http://127.0.0.1:9/a.png">')
    assert opened(page, tmp_path)[1] == ["http://127.0.0.1:9/a.png"]


@needs_browser
def test_what_a_page_might_hold_all_the_same_is_refused(tmp_path: Path) -> None:
    page = write_report(made_run(tmp_path / "run"))
    page.write_text(page.read_text().replace("<footer>", '<img src="http://127.0.0.1:9/a.png"><footer>'))
    assert opened(page, tmp_path)[1] == []
