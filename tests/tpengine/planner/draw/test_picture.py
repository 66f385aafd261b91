"""Rung: pure. Pictures of timelines: the boxes of the XML are counted and measured, and a rendered one is looked at."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tpengine.plan import (
    SCHEDULES,
    Action,
    Kind,
    Plan,
    RankTimeline,
    Span,
    Timeline,
    clock,
    make_schedule,
    parse_action,
)
from tpengine.planner import ChunkBytes, Costs, simulate
from tpengine.planner.costs import unit_costs
from tpengine.planner.draw import (
    Picture,
    bytes_text,
    check_picture_file,
    draw_html,
    draw_svg,
    draw_to_file,
    picture,
    render_png,
    scene,
)
from tpengine.planner.draw.file import size_of
from tpengine.planner.draw.scene import BASE, IDLE, PAPER, PATTERNS

SVG = "{http://www.w3.org/2000/svg}"


def spans(text: str) -> tuple[Span, ...]:
    """Read "0F0 0 1, 0F1 1 2": actions with start and end."""
    words = (part.rsplit(None, 2) for part in text.split(",") if part.strip())
    return tuple(Span(parse_action(name), float(start), float(end)) for name, start, end in words)


def one_rank(**lanes: str) -> Timeline:
    return Timeline((RankTimeline(**{name: spans(text) for name, text in lanes.items()}),))


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def ranks_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "rank"]


def boxes_of(rank: ElementTree.Element, kinds: str = "FBIW") -> list[ElementTree.Element]:
    return [box for box in rank.iter(f"{SVG}rect") if box.get("class", "").split()[0] in list(kinds)]


def texts(root: ElementTree.Element, style: str) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text") if style in node.get("class", "").split()]


def edges(box: ElementTree.Element) -> tuple[float, float]:
    start = float(box.attrib["x"])
    return start, start + float(box.attrib["width"])


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_computed_action_is_one_box_of_its_rank(name: str, v: int) -> None:
    made = make_schedule(name, 4, 8, v)
    root = parse(draw_svg([Picture(name, clock(made.compute))]))
    ranks = ranks_of(root)
    assert len(ranks) == 4
    for rank, actions in zip(ranks, made.compute, strict=True):
        boxes = boxes_of(rank)
        assert sorted(box.attrib["data-action"] for box in boxes) == sorted(map(str, actions))
        for box in boxes:
            kind = parse_action(box.attrib["data-action"]).kind
            assert box.attrib["class"].startswith(f"{kind} s")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(4, 8), pytest.param(16, 64, marks=pytest.mark.slow)])
def test_boxes_lie_where_time_has_them_and_never_on_each_other(name: str, p: int, m: int) -> None:
    timeline = clock(make_schedule(name, p, m).compute)
    shown = Picture(name, timeline)
    root, laid_out = parse(draw_svg([shown])), scene.make_scene([shown])
    for rank, lanes in zip(ranks_of(root), timeline.ranks, strict=True):
        places = sorted(map(edges, boxes_of(rank)))
        for (start, end), span in zip(places, lanes.compute, strict=True):
            assert start == pytest.approx(laid_out.x(span.start), abs=0.5)
            assert end == pytest.approx(laid_out.x(span.end), abs=0.5)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_are_those_of_the_boxes_and_lie_within_them(name: str) -> None:
    timeline = clock(make_schedule(name, 4, 8).compute)
    root = parse(draw_svg([Picture(name, timeline)]))
    for rank in ranks_of(root):
        boxes = sorted(boxes_of(rank), key=edges)
        numbers = [node for node in rank.iter(f"{SVG}text") if node.get("class", "").startswith("number ")]
        assert len(numbers) == len(boxes)
        for node in numbers:
            x, half = float(node.attrib["x"]), 0.32 * float(node.attrib["font-size"]) * len(node.text or "")
            (box,) = [box for box in boxes if edges(box)[0] <= x - half and x + half <= edges(box)[1]]
            assert node.text == str(parse_action(box.attrib["data-action"]).microbatch)
        chunks = [node.text for node in rank.iter(f"{SVG}text") if node.get("class", "").startswith("chunk ")]
        several = len({parse_action(box.attrib["data-action"]).chunk for box in boxes}) > 1
        assert len(chunks) == (len(boxes) if several else 0)


def test_numbers_are_left_out_where_a_box_is_too_narrow() -> None:
    root = parse(draw_svg([Picture("long", clock(make_schedule("1f1b", 2, 400).compute))]))
    assert len(boxes_of(ranks_of(root)[0])) == 800
    assert texts(root, "number") == []


def test_an_ending_that_takes_time_is_drawn_and_one_that_takes_none_is_not() -> None:
    root = parse(draw_svg([Picture("x", one_rank(compute="0F0 0 1, 0B0 1 3, t0 3 3.5, CLIP 3.5 3.5, STEP 3.5 4"))]))
    drawn = [box.attrib["data-action"] for box in root.iter(f"{SVG}rect") if "data-action" in box.attrib]
    assert drawn == ["0F0", "0B0", "t0", "STEP"]
    assert texts(root, "legend")[:4] == ["F forward", "B backward", "t ties", "step"]


def test_communication_lies_on_lanes_that_are_there_only_if_used(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("zbv", 3, 5)
    free, unit = simulate(plan), unit_costs(plan)
    assert texts(parse(draw_svg([Picture("x", free, plan=plan)])), "lane") == ["memory"] * 3
    costs = Costs(unit.compute, latency=0.1, reductions={bucket.index: 0.3 for bucket in plan.buckets})
    timeline = simulate(plan, costs)
    root = parse(draw_svg([Picture("x", timeline, plan=plan)]))
    assert texts(root, "lane") == ["send", "receive", "reduce", "memory"] * 3
    for rank, lanes in zip(ranks_of(root), timeline.ranks, strict=True):
        for kinds, expected in (
            (("SEND_F", "SEND_B"), lanes.sends),
            (("RECV_F", "RECV_B"), lanes.receives),
            (("r",), lanes.reductions),
        ):
            drawn = [box.get("data-action") for box in rank.iter(f"{SVG}rect") if box.get("class") in kinds]
            assert expected and sorted(map(str, drawn)) == sorted(str(span.action) for span in expected)
    assert texts(root, "legend")[3:] == [
        "shade and small number: chunk",
        "activation under way",
        "gradient under way",
        "bucket reduced",
        "micro-batches whose activations are held",
        "critical path",
    ]


def test_what_is_under_way_at_once_lies_on_tracks_of_its_own() -> None:
    timeline = one_rank(
        compute="0F0 0 1, 0F1 1 2, 0B0 2 4", sends="0SEND_F0 1 3, 0SEND_F1 2 4, 0SEND_F2 3 5, 0SEND_B0 4 5"
    )
    (rank,) = ranks_of(parse(draw_svg([Picture("x", timeline)])))
    sends = [box for box in rank.iter(f"{SVG}rect") if box.get("class", "").startswith("SEND")]
    heights = [float(box.attrib["y"]) for box in sends]
    assert heights[0] == heights[2] < heights[1] == heights[3]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_no_track_holds_two_spans_of_one_time(pieces: list[tuple[int, int]]) -> None:
    ordered = [
        Span(Action(Kind.SEND_F, 0, number), start, start + length)
        for number, (start, length) in enumerate(sorted(pieces))
    ]
    chosen = scene.tracks(ordered, 0.0)
    for number, span in enumerate(ordered):
        for other, track in zip(ordered[:number], chosen, strict=False):
            assert track != chosen[number] or other.end <= span.start


def test_hover_texts_give_action_start_and_end_and_the_peer(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("1f1b", 2, 2)
    costs = Costs(unit_costs(plan).compute, latency=0.5, activations={0: ChunkBytes(saved=1e6)})
    root = parse(draw_svg([Picture("x", simulate(plan, costs), plan=plan)]))
    hover = {
        box.attrib["data-action"]: box.findtext(f"{SVG}title", "")
        for box in root.iter(f"{SVG}rect")
        if "data-action" in box.attrib
    }
    assert hover["0F1"] == "0F1: 1 to 2 forwards"
    assert hover["0SEND_F0"] == "0SEND_F0 to rank 1, 32.8 kB: 1 to 1.5 forwards"
    assert hover["1RECV_F0"] == "1RECV_F0 from rank 0, 32.8 kB: 1 to 1.5 forwards"
    # The box is named by the action alone, and its text has what begins inside.
    assert hover["1B1"].startswith("1B1[r3 r2]: ")


def test_the_critical_path_underlines_its_boxes() -> None:
    made = one_rank(compute="0F0 0 1, 0B0 1 3")
    timeline = Timeline(made.ranks, critical_path=tuple((0, span) for span in made.ranks[0].compute))
    lines = [node for node in parse(draw_svg([Picture("x", timeline)])).iter(f"{SVG}path")]
    assert len([line for line in lines if line.get("class") == "critical"]) == 2
    assert "critical path" not in texts(parse(draw_svg([Picture("x", made)])), "legend")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 8), (5, 3)])
def test_the_curve_of_live_activations_has_the_timelines_peaks(name: str, p: int, m: int) -> None:
    timeline = clock(make_schedule(name, p, m).compute)
    shown = Picture(name, timeline)
    assert shown.peaks == pytest.approx(timeline.peak_live_activations)
    assert [curve[-1][1] for curve in shown.memory] == [0.0] * p
    assert texts(parse(draw_svg([shown])), "peak") == [f"peak {peak:g}" for peak in timeline.peak_live_activations]


def test_memory_is_in_bytes_where_they_are_known() -> None:
    lanes = RankTimeline(compute=spans("0F0 0 1, 0B0 1 3"), memory=((0.0, 1e9), (1.0, 2.5e9), (3.0, 1e9)))
    root = parse(draw_svg([Picture("x", Timeline((lanes,)))]))
    assert texts(root, "peak") == ["peak 2.5 GB"]
    assert texts(root, "figures") == ["makespan 3 forwards, bubble 0.0%, peak 2.5 GB"]
    assert "memory held, bytes" in texts(root, "legend")
    (curve,) = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("class") == "held"]
    levels = [float(step.split("V")[1]) for step in curve.split("H")[1:4]]
    base = float(curve.split("H")[0].split()[1])
    assert [base - level for level in levels] == pytest.approx([8.0, 20.0, 8.0])


@pytest.mark.parametrize(
    ("held", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1.25e9, "1.25 GB"), (3e15, "3e+03 TB")]
)
def test_bytes_as_a_person_writes_them(held: float, text: str) -> None:
    assert bytes_text(held) == text


@pytest.mark.parametrize(
    ("unit", "makespan", "text"),
    [("s", 3.0, "3 s"), ("s", 0.25, "250 ms"), ("s", 4e-5, "40 \N{MICRO SIGN}s"), ("forwards", 0.25, "0.25 forwards")],
)
def test_seconds_are_shown_in_the_unit_that_suits(unit: str, makespan: float, text: str) -> None:
    timeline = one_rank(compute=f"0F0 0 {makespan}")
    root = parse(draw_svg([Picture("x", timeline, unit)]))
    assert texts(root, "figures")[0].startswith(f"makespan {text}, ")
    assert texts(root, "tick")[-1] == f"time, {text.split()[1]}"


def test_two_pictures_stand_on_one_time_axis() -> None:
    short, long = one_rank(compute="0F0 0 1, 0B0 1 3"), one_rank(compute="0F0 0 1, 0B0 3 6")
    root = parse(draw_svg([Picture("measured", long), Picture("predicted", short)]))
    assert texts(root, "title") == ["measured", "predicted"]
    first, second = (boxes_of(rank) for rank in ranks_of(root))
    assert edges(first[0]) == edges(second[0])
    assert edges(first[1])[0] == pytest.approx(edges(second[1])[1], abs=1.0)
    assert float(first[0].attrib["y"]) < float(second[0].attrib["y"])


@pytest.mark.parametrize("draw", [draw_svg, draw_html])
def test_pictures_on_one_axis_show_one_unit(draw: Callable[[list[Picture]], str]) -> None:
    measured, predicted = (
        Picture(name, one_rank(compute=f"0F0 0 {end}"), "s") for name, end in (("m", 1.1), ("p", 0.9))
    )
    for pictures in ([measured, predicted], [predicted, measured]):
        drawn = draw(pictures)
        assert drawn.count("time, s<") == 2 and "makespan 0.9 s" in drawn and "makespan 1.1 s" in drawn
        assert not re.search(r"\d ms", drawn)
    # Another unit beside it is another matter.
    assert "time, ms<" in draw([predicted, Picture("f", one_rank(compute="0F0 0 5"))])


def test_what_is_rounding_is_shown_as_nothing() -> None:
    shown = Picture("x", one_rank(compute="0F0 0 1.5"))
    assert [shown.time_text(time) for time in (8.9e-16, -1e-16, 1e-6)] == ["0 forwards", "0 forwards", "1e-06 forwards"]
    assert [shown.memory_text(live) for live in (13 / 3, 0.1 + 0.2, 4.0, 1234.5)] == ["4.33", "0.3", "4", "1234.5"]


def test_text_is_escaped() -> None:
    title = """<script>"a" & 'b'</script>"""
    shown = Picture(title, one_rank(compute="0F0 0 1"), unit="<i>")
    svg = draw_svg([shown])
    root = parse(svg)
    assert texts(root, "title") == [title]
    assert root.get("aria-label") == title
    assert "<script" not in svg and "<i>" not in svg
    page = draw_html([shown])
    assert page.count("<script") == 1 and "<i>" not in page


def test_the_svg_is_self_contained() -> None:
    svg = draw_svg([Picture("x", clock(make_schedule("zbv", 4, 8).compute))])
    assert svg.count("http") == 1  # the name of the SVG language itself
    assert "sans-serif;" in svg and "@import" not in svg and "<image" not in svg


@pytest.mark.by_default("zbv")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rendered_picture_shows_its_kinds(name: str) -> None:
    made = make_schedule(name, 4, 8)
    svg = draw_svg([Picture(name, clock(made.compute))])
    image = rendered(svg)
    counts = {colour: number for number, colour in image.getcolors(maxcolors=1 << 24)}
    assert image.size == size_of(svg)
    kinds = {action.kind for actions in made.compute for action in actions}
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        # Patterns and numbers leave more than half of a box's area in its colour.
        area = counts.get(rgb(BASE[kind]), 0)
        assert area > 1000 if kind in kinds else area == 0, (kind, area)
    # Idle is as pale as paper, and the most of the picture is paper.
    assert counts[rgb(IDLE)] > 1000
    assert counts[rgb(PAPER)] > image.width * image.height / 3


def test_a_rendered_picture_has_text_without_the_machines_fonts() -> None:
    timeline = one_rank(compute="0F0 0 1")
    plain, titled = (rendered(draw_svg([Picture(title, timeline)])) for title in (" ", "a title in bold letters"))
    assert plain.size == titled.size
    ink = [
        sum(value < 80 for value in image.convert("L").crop((0, 0, image.width, 28)).tobytes())
        for image in (plain, titled)
    ]
    assert ink[0] == 0 and ink[1] > 300


def test_zoom_multiplies_the_size() -> None:
    svg = draw_svg([Picture("x", one_rank(compute="0F0 0 1"))])
    width, height = size_of(svg)
    assert rendered(svg, zoom=2.0).size == (2 * width, 2 * height)


@pytest.mark.parametrize(("kind", "other"), [("F", "B"), ("F", "I"), ("I", "W"), ("B", "W"), ("F", "W")])
def test_kinds_differ_in_grey_too(kind: str, other: str) -> None:
    grey = {kind: sum(w * c for w, c in zip((0.299, 0.587, 0.114), rgb(BASE[Kind(kind)]), strict=True))}
    grey[other] = sum(w * c for w, c in zip((0.299, 0.587, 0.114), rgb(BASE[Kind(other)]), strict=True))
    assert abs(grey[kind] - grey[other]) > 25
    patterns = [PATTERNS.get(Kind(name)) for name in (kind, other)]
    assert patterns[0] != patterns[1]


def test_a_page_has_the_picture_and_a_row_of_figures_for_every_rank(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("1f1b", 3, 4)
    page = draw_html([Picture("x", simulate(plan), plan=plan), Picture("y", simulate(plan))])
    reader = _Reader()
    reader.feed(page)
    assert reader.count["svg"] == 1 and reader.count["table"] == 2
    assert reader.count["td"] == 3 * 6 + 3 * 3
    assert re.search(r"stage [012] waits \d+ % of the step on stage [012]", page)
    assert all(not value.startswith(("http", "//")) for value in reader.sources)


def test_nothing_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for timeline in (Timeline(()), one_rank(compute="CLIP 0 0")):
        with pytest.raises(ValueError, match="needs an action that takes time: got none"):
            draw_svg([Picture("x", timeline)])
    monkeypatch.setattr(picture, "MAX_BOXES", 5)
    shown = Picture("x", one_rank(compute="0F0 0 1, 0B0 1 3", sends="0SEND_F0 1 2"))
    assert draw_svg([shown])
    with pytest.raises(ValueError, match="at most 5 boxes: got 6: draw fewer ranks or fewer micro-batches"):
        draw_svg([shown, shown])


def test_a_png_has_a_largest_size() -> None:
    svg = draw_svg([Picture("x", clock(make_schedule("1f1b", 4, 8).compute))])
    with pytest.raises(ValueError, match=r"at most 64000000 pixels: got \d+ times \d+: draw an \.svg"):
        render_png(svg, zoom=40.0)


def test_a_png_without_the_extra_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "resvg_py" else found(name))
    with pytest.raises(ValueError, match=r"^drawing a \.png needs: pip install 'tpengine\[plot\]'$"):
        check_picture_file(tmp_path / "out.png")
    check_picture_file(tmp_path / "out.svg")


def test_a_file_has_the_form_of_its_ending(tmp_path: Path) -> None:
    shown = [Picture("x", one_rank(compute="0F0 0 1"))]
    for name in ("a.svg", "a.html", "a.png"):
        (tmp_path / name).write_text("old")
        draw_to_file(tmp_path / name, shown)
    assert parse((tmp_path / "a.svg").read_text()).tag == f"{SVG}svg"
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "a.html", "a.png"}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("out.pdf", ["must end in one of .svg, .html, .png", "out.pdf", "use out.svg"]),
        ("out", ["must end in one of", "use out.svg"]),
        ("no/out.svg", ["directory that exists", "no/out.svg", "make "]),
        ("folder.svg", ["can only replace a regular file", "folder.svg"]),
        ("pipe.svg", ["can only replace a regular file", "pipe.svg"]),
        (f"{'x' * 250}.svg", ["must be writable", "File name too long", "choose another file"]),
    ],
)
def test_files_that_cannot_be_are_refused_in_one_line(name: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    os.mkfifo(tmp_path / "pipe.svg")
    with pytest.raises(ValueError) as refused:
        draw_to_file(tmp_path / name, [Picture("x", one_rank(compute="0F0 0 1"))])
    message = str(refused.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    if name.endswith(".svg"):
        with pytest.raises(ValueError) as early:
            check_picture_file(tmp_path / name)
        assert str(early.value) == message
    assert {path.name for path in tmp_path.iterdir()} == {"folder.svg", "pipe.svg"}


def test_a_place_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("old")
    for name in ("old.svg", "new.svg"):
        check_picture_file(tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.svg", "old")]
    with pytest.raises(ValueError, match=r"^a file must be writable: /proc/x\.svg: .*: choose another file$"):
        check_picture_file(Path("/proc/x.svg"))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def rendered(svg: str, zoom: float = 1.0) -> Any:
    """The picture's pixels, as RGB."""
    return Image.open(io.BytesIO(render_png(svg, zoom))).convert("RGB")


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))
