"""The report: whole in itself, hostile names escaped, what is missing said, and what cannot be read left out."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import made_run

from fasttrain.errors import StorageError
from fasttrain.history.charts import Series, chart
from fasttrain.history.report import write_report
from fasttrain.run_folder import RunFolder

HOSTILE = '<script>alert("x")</script><img src=http://evil.example/a.png>'
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Reader(HTMLParser):
    """What a page is made of: its tags, where it points, and its text; complains of what is left open."""

    VOID = ("meta", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "srcset", "data", "action", "poster")
        ]
        self.addresses += re.findall(r"url\(", " ".join(value or "" for _, value in attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def test_a_page_with_everything_asks_for_nothing(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", price=2.5)
    folder.pictures.mkdir()
    for role in ("worst", "median", "best"):
        (folder.pictures / f"epoch_0003_{role}_case_a.png").write_bytes(PNG)
    (folder.pictures / "epoch_0002_worst_case_b.png").write_bytes(PNG)
    (folder.pictures / "epoch_0003_only_none.png").write_bytes(b"no picture")
    page = read(write_report(folder))
    assert folder.report.exists()
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert page.tags.count("img") == 3
    assert page.tags.count("svg") >= 4
    for text in (
        "ended, done",
        "dice 0.3000 (epoch 3)",
        "case_a",
        "measured <b>so</b>",
        "a network",
        "A CPU",
        "worst case of epoch 3",
    ):
        assert text in page.text, text
    # The worst first, and a class that was not counted as such
    assert page.text.index("case_b") < page.text.rindex("case_a")
    assert "0.5000–" in page.text
    assert "default-src &#x27;none&#x27;" in folder.report.read_text()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", cases={HOSTILE: {"liver": 0.5, HOSTILE: None}}, status="failed", error=HOSTILE)
    folder.pictures.mkdir()
    (folder.pictures / "epoch_0003_worst_<script>alert(1)<.png").write_bytes(PNG)
    folder.recipe.write_text(folder.recipe.read_text() + f"# </pre>{HOSTILE}\n")
    plan = json.loads(folder.plan.read_text())
    plan["skipped_cases"] = {HOSTILE: [HOSTILE]}
    folder.plan.write_text(json.dumps(plan))
    text = write_report(folder).read_text()
    page = Reader(text)
    assert "script" not in page.tags
    assert page.tags.count("img") == 1
    assert page.text.count(HOSTILE) >= 5
    assert "<script" not in text


def test_a_run_without_anything_has_a_page_that_says_so(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "killed", epochs=0, status=None, of=3)
    page = read(write_report(folder))
    assert "killed" in page.text
    assert "No epoch was closed" in page.text
    assert "drawn before the run ended" in page.text
    for path in (folder.summary, folder.plan, folder.environment, folder.metrics, folder.events):
        path.write_bytes(b"\xff{")
    page = read(write_report(folder))
    assert page.text.count("damaged: ") >= 3


def test_why_there_are_no_pictures(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "off", recipe={"output.pictures": "off"})
    assert "output.pictures: off" in read(write_report(folder)).text
    assert "holds no pictures" in read(write_report(made_run(tmp_path / "on"))).text


def test_scores_are_said_to_be_of_the_last_validation(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([*lines[:2], lines[2].replace("0.2", "0.9"), lines[3]]))
    text = read(write_report(folder)).text
    assert "epoch 3; best.pt is that of epoch 2" in text


def test_all_folds_are_on_one_page(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "whole")
    whole.path.mkdir()
    whole.recipe.write_text("name: whole\n")
    whole.folds.write_text(json.dumps({"format": 1, "folds": 2, "device": "cpu"}))
    made_run(whole.fold(0))
    made_run(whole.fold(1), epochs=2, status=None)
    text = read(write_report(whole)).text
    assert "fold_0" in text
    assert "fold_1 loss" in text
    assert "killed" in text


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    with pytest.raises(StorageError, match=r"nowhere.*cannot be written"):
        write_report(folder, tmp_path / "nowhere" / "page.html")
    assert write_report(folder, tmp_path / "page.html") == tmp_path / "page.html"
    assert not folder.report.exists()


def test_charts_bear_any_numbers() -> None:
    assert chart("none", [Series("a", [])]) == ""
    assert chart("none", [Series("a", [(1, float("nan")), (float("inf"), 2)])]) == ""
    for points in (
        [(1, 2.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, 1e30), (2, -1e30)],
        [(1, 1e-300), (2, 2e-300)],
        [(1e6, 5e15), (1e6, 5e15)],
    ):
        drawn = chart("some", [Series("<a>", points)], from_zero=True)
        Reader(drawn)
        assert "nan" not in drawn
        assert "<a>" not in drawn
    many = chart("many", [Series(f"s{index}", [(x, x * index) for x in range(5000)]) for index in range(25)])
    assert "and 5 more" in many
    assert many.count("<circle") == 0
    assert len(many) < 2_000_000
