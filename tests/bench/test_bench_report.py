"""The report stands alone, is HTML, says what is missing, and shows what it is given as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_records import STAGES, record_of, samples_of_ms, steps_record

from visionfast.bench.baselines import Absent
from visionfast.bench.chapter import Chapter, pictures
from visionfast.bench.comparison import answered_by_round, time_ratio
from visionfast.bench.records import Record, System
from visionfast.bench.report import write_plots, write_report
from visionfast.bench.report_tables import BESIDE, compared, results_table
from visionfast.bench.scaling import Curve
from visionfast.bench.summary import throughput

HOSTILE = '<script>alert("x")</script> & $x^2$ \u202e\x1b[31m 眼 https://example.com/a.png'
_VOID = {"meta", "br"}


class _Page(HTMLParser):
    """Checks that tags are closed in their order, and keeps what they say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.opened.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1] != "style":
            self.text += data


def _record(*, certificate: str = "passed", others: float | None = 0.01, name: str = "naive PyTorch") -> Record:
    own = System("visionfast", "visionfast", "visionfast", {"precision": "fp32", "certificate": certificate})
    naive = System("naive", name, "naive", {"torch": name})
    peer = System("peer", "somebody else", "peer")
    stages = dict(zip(STAGES, (3.0, 1.0, 30.0, 1.0), strict=True))
    samples = {}
    for scenario in ("single-stream", "offline"):
        samples |= {
            ("visionfast", scenario): samples_of_ms([[40.0, 41.0]] * 8, stages),
            ("naive", scenario): samples_of_ms([[100.0, 102.5]] * 8, stages),
            ("peer", scenario): samples_of_ms([[60.0, 61.5]] * 8),
        }
    return record_of([own, naive, peer], samples, images=(name, "zidane.jpg"), others=others)  # type: ignore[arg-type]


def _written(tmp_path: Path, measured: Record | Sequence[Chapter], title: str | None = None) -> tuple[str, _Page]:
    write_report(tmp_path / "report.html", measured, title=title)
    text = (tmp_path / "report.html").read_text("utf-8")
    return text, _Page(text)


@pytest.fixture(scope="module")
def chapters() -> list[Chapter]:
    curve = Curve("image size", "megapixels", "ms an image", "linear", (1, 2, 3), ((10.0,), (12.0,), (14.0,)))
    absent = Absent("onnxruntime", "not installed; `pip install onnxruntime`")
    whole = Chapter("YOLOv8n", _record(), steps_record([100, 60, 20]), [absent], [curve], ["the weights are seeded"])
    return [whole, Chapter("YOLOv8s", _record())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, chapters: list[Chapter]) -> tuple[str, _Page]:
    """The page with everything in it."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'visionfast[bench]'")
    return _written(tmp_path_factory.mktemp("report"), chapters)


def test_it_stands_alone(whole: tuple[str, _Page], chapters: list[Chapter]) -> None:
    text, page = whole
    assert "//" not in text  # neither a network address nor a namespace's
    assert not {"script", "link", "img", "iframe", "object", "use" if "<use" not in text else "base"} & set(page.tags)
    references = [value for _, name, value in page.attributes if name.endswith(("href", "src"))]
    references += re.findall(r"url\(([^)]*)\)", text)
    assert references
    ids = set(page.ids)
    assert all(value.startswith("#") and value[1:] in ids for value in references)
    assert len(ids) == len(page.ids)  # two pictures share none
    assert page.tags.count("svg") == len([None for one in chapters for _ in pictures(one)])
    assert "@media print" in text
    assert "prefers-color-scheme: dark" in text


def test_pictures_take_the_ink_of_the_page(whole: tuple[str, _Page]) -> None:
    text, page = whole
    assert "currentColor" in text
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert any("what each change saves" in label for label in labels)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    record = _record(name=HOSTILE)
    absent, note = Absent(HOSTILE, HOSTILE), HOSTILE
    curve = Curve(HOSTILE, "threads", "ms an image", "shared", (1, 2), ((30.0,), (20.0,)))
    text, page = _written(tmp_path, [Chapter(HOSTILE, record, None, [absent], [curve], [note])], title=HOSTILE)
    assert "script" not in page.tags
    assert "<script" not in text
    assert not {"\u202e", "\x1b"} & set(text)
    assert page.text.count('<script>alert("x")</script> & $x^2$') > 6  # in tables and in pictures
    assert not any(name.startswith("on") for _, name, _ in page.attributes)


def test_what_is_missing_comes_first(whole: tuple[str, _Page]) -> None:
    _, page = whole
    first = page.text[: page.text.index("single-stream")]
    assert "Before you read on" in first
    assert "left out: onnxruntime: not installed" in first
    assert "the weights are seeded" in first


def test_nothing_missing_is_said_too(tmp_path: Path) -> None:
    _, page = _written(tmp_path, _record())
    assert "Nothing is missing, and nothing disturbed the measurement" in page.text
    assert "2.50 ×" in page.text  # naive over visionfast
    assert "too few samples" in page.text


@pytest.mark.parametrize(
    ("others", "said"),
    [(0.2, "disturbed, no verdict"), (None, "does not tell"), (0.03, "Before you read on\nNo plots")],
)
def test_a_disturbed_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: float | None, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures say nothing here
    _, page = _written(tmp_path, _record(others=others))
    assert said.replace("\n", "") in page.text


def test_no_speedup_without_a_certificate(tmp_path: Path) -> None:
    record = _record(certificate="failed")
    assert compared(record, "naive", "single-stream") is None
    _, page = _written(tmp_path, record)
    assert "certificate failed" in page.text
    assert " ×" not in page.text.replace("810×1080", "")
    _, page = _written(tmp_path, [Chapter("YOLOv8n", record, steps_record([100, 60, 20]))])
    assert "times as fast" not in page.text
    assert "saves" not in page.text
    reduced = System("visionfast-bf16", "in BF16", "visionfast", {"certificate": "failed"})
    own = _record()
    samples = {**own.samples, ("visionfast-bf16", "offline"): own.samples["peer", "offline"]}
    assert compared(record_of([*own.systems, reduced], samples), "visionfast-bf16", "offline") is None


def test_a_loop_over_batches_shows_images_a_second_alone() -> None:
    """Its images are all begun with their heap: they would take seconds."""
    record = _record()
    loop = System("dataloader", "a DataLoader", "naive", {BESIDE: "visionfast"})
    batches = samples_of_ms([[40.0, 41.0]] * 8)
    batches.begun_ns[1::2] = batches.due_ns[1::2] = batches.begun_ns[::2]
    batches.done_ns[:] = batches.due_ns + 2_500_000_000
    record = record_of([*record.systems, loop], {**record.samples, ("dataloader", "offline"): batches})
    shown = results_table(record, "offline")
    (row,) = (line for line in shown.splitlines() if "a DataLoader" in line)
    assert "2500" not in row
    assert row.count('<td class="n">–</td>') == 4
    assert "0.8<small>" in row  # two images in 2.5 s
    assert shown.index("a DataLoader") > shown.index("naive PyTorch")  # who answers most is last
    drawn = {name: make for name, _, make in pictures(Chapter("DINOv2", record))}
    latency_ms = drawn["offline"].args[0]  # type: ignore[attr-defined]
    assert "visionfast" in latency_ms
    assert "a DataLoader" not in latency_ms


def test_what_is_compared() -> None:
    record = _record()
    found = compared(record, "naive", "single-stream")
    assert found is not None
    assert found.value == pytest.approx(2.5)
    assert found.rounds == 8
    assert compared(record, "visionfast", "single-stream") is None
    assert compared(record, "naive", "multi-stream") is None
    offline = compared(record, "naive", "offline")
    assert offline is not None
    assert offline.value > 0


def test_images_a_second_are_those_answered_over_the_time_of_all() -> None:
    """One rule, for the table's figure and for the ratio beside it."""
    samples = samples_of_ms([[500.0, 500.0], [500.0, 500.0]], failed=[3])
    samples.due_ns[:] = samples.begun_ns[:] = [0, 0, 0, 0]
    samples.done_ns[:] = [10**9, 5 * 10**8, 2 * 10**9, 10**9]
    counts, seconds = answered_by_round(samples)
    assert (counts / seconds).tolist() == [2.0, 0.5]
    assert throughput(samples).per_s == 1.0
    samples.failed[:] = [False, False, True, False]  # the last one to end failed: its time is the round's all the same
    assert throughput(samples).per_s == 1.0


def test_who_answers_nothing_has_no_ratio() -> None:
    record = _record()
    record.samples["peer", "offline"].failed[:] = True
    assert time_ratio(record, "peer", "visionfast", "offline") is None
    assert time_ratio(record, "visionfast", "peer", "offline") is None


def test_a_system_that_only_failed_has_no_figures(tmp_path: Path) -> None:
    record = _record()
    samples = {**record.samples, ("peer", "single-stream"): samples_of_ms([[60.0, 61.5]] * 8, failed=range(16))}
    _, page = _written(tmp_path, record_of(record.systems, samples))
    assert "16 failed" in page.text


def test_plots_are_written(tmp_path: Path, chapters: list[Chapter]) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    written = write_plots(tmp_path, chapters[:1])
    assert [path.name for path in written] == [
        "yolov8n-single-stream.png",
        "yolov8n-single-stream-stages.png",
        "yolov8n-offline.png",
        "yolov8n-offline-stages.png",
        "yolov8n-waterfall.png",
        "yolov8n-waterfall-stages.png",
        "yolov8n-scaling-image-size.png",
    ]
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) > 200


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text, page = _written(tmp_path, _record())
    assert "<svg" not in text
    assert "No plots: plots: expected matplotlib" in page.text
    assert "2.50 ×" in page.text
