from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from emulator.core.device_use import DeviceUse, NodeDevice, SharedDevice
from emulator.core.specs import Slo
from emulator.report.charts import CDF_POINTS, cumulative, latency_chart, run_styles
from emulator.report.html import PLOTLY_FILE, render_html, write_report
from emulator.report.timeline import timeline_chart, timeline_window
from tests.core.made_records import made_record, made_run
from tests.report.made_compare import SLO, made_compare, made_results

HOSTILE = "<img src=x onerror=alert(1)></script><b>"


class Tags(HTMLParser):
    """The tags and the script sources of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str | None] = []
        self.sources: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.sources += [value for name, value in attrs if name == "src"]


def test_the_page_holds_the_verdict_the_table_and_four_figures() -> None:
    results = made_results()
    page = render_html(made_compare(results), results)
    found = Tags(page)
    assert [i for i in found.ids if i in ("attainment", "breakdown", "latency", "timeline")] == [
        "attainment",
        "breakdown",
        "latency",
        "timeline",
    ]
    assert found.sources == [PLOTLY_FILE]
    assert page.index('class="verdict hurts"') < page.index("<table>") < page.index('id="attainment"')
    assert "1p1d at 5Gbps against" in page
    assert "saturated, 10 of 20" in page
    assert "Every node holds all weights" in page
    assert "prices are indicative; watts are TDP, an upper bound" in page
    assert "<td>2 x 16.0</td><td>57.8</td><td>1,000/0.00</td>" in page


def test_the_page_says_who_streams_first_tokens_and_each_by_itself_where_they_differ() -> None:
    results = made_results()
    compare = made_compare(results)
    assert "first token handoff;" in render_html(compare, results)
    modes = (None, None, "prefill", "prefill", "recompute")
    runs = [
        msgspec.structs.replace(run, first_token=mode, deployment=run.deployment if mode != "recompute" else "vllm")
        for run, mode in zip(compare.runs, modes, strict=True)
    ]
    mixed = msgspec.structs.replace(compare, first_token="mixed", runs=tuple(runs))
    assert "first token prefill (1p1d), recompute (vllm);" in render_html(mixed, results)


def test_the_page_is_the_same_each_time() -> None:
    results = made_results()
    assert render_html(made_compare(results), results) == render_html(made_compare(results), results)


def test_names_cannot_become_markup() -> None:
    results = made_results(HOSTILE)
    page = render_html(made_compare(results, topology=HOSTILE), results)
    plain = render_html(made_compare(made_results()), made_results())
    assert Tags(page).tags == Tags(plain).tags
    assert "<img" not in page
    assert page.count("</script>") == plain.count("</script>")


def test_the_library_is_written_once_beside_the_page(tmp_path: Path) -> None:
    results = made_results()[:2]
    page = write_report(tmp_path, made_compare(results), results)
    library = tmp_path / PLOTLY_FILE
    assert page == tmp_path / "report.html"
    assert library.stat().st_size > 1_000_000
    before = library.stat().st_mtime_ns
    write_report(tmp_path, made_compare(results), results)
    assert library.stat().st_mtime_ns == before


def test_a_report_without_runs_or_completions() -> None:
    assert "No verdict" in render_html(made_compare([]), [])
    cut = made_results()[2:3]
    assert "NaN" not in render_html(made_compare(cut), cut)


def test_the_timeline_has_a_lane_a_node_and_one_for_the_link() -> None:
    results = made_results()
    figure = timeline_chart(results, timeline_window(results))
    lanes = list(figure.layout.yaxis.categoryarray)
    assert lanes[0] == "colocated-prefill-first | colocated-0"
    assert lanes[-2:] == ["1p1d at 10Gbps | KV to decode-0", "1p1d at 10Gbps | decode-0"]
    drawn = {trace.name: len(trace.x) for trace in figure.data}
    assert drawn["prefill"] + drawn["decode"] + drawn["mixed"] == 400
    assert drawn["KV transfer"] == 10 + 20 + 20
    assert set(lanes) >= {lane for trace in figure.data for lane in trace.y}


def test_a_long_run_is_cut_to_what_a_browser_can_draw() -> None:
    results = made_results()[:1]
    low, high = timeline_window(results, most=50)
    whole = timeline_window(results)
    assert whole[0] < low < high < whole[1]
    assert (low + high) / 2 == pytest.approx(sum(whole) / 2)
    assert sum(len(trace.x) for trace in timeline_chart(results, (low, high)).data) <= 50
    assert timeline_window([]) == (0.0, 0.0)


def test_a_distribution_is_thinned_and_keeps_its_ends() -> None:
    x, y = cumulative(np.array([5.0, np.nan, *range(10_000)]))
    assert len(x) == CDF_POINTS
    assert (x[0], x[-1], y[-1]) == (0, 9999, 100)
    assert cumulative(np.array([np.nan])) == ([], [])


def test_runs_can_be_told_apart() -> None:
    styles = run_styles([result.summary for result in made_results()])
    assert len(set(styles)) == len(styles)


def test_bounds_are_drawn_where_they_are_set() -> None:
    texts = [note.text for note in latency_chart(made_results(), SLO).layout.annotations]
    assert {"SLO 1000 ms", "SLO 40 ms", "SLO 100 ms"} <= set(texts)
    assert not [t for t in (n.text for n in latency_chart([], Slo()).layout.annotations) if t.startswith("SLO")]


def test_devices_are_named_escaped_and_their_sharing_is_stamped() -> None:
    names = ("prefill-0", "decode-0")
    nodes = tuple(NodeDevice(node=name, device_id="gpu:a", description=HOSTILE) for name in names)
    shared = SharedDevice(description=HOSTILE, nodes=names)
    use = DeviceUse(kind="cuda", nodes=nodes, shared=(shared,), sharing_allowed=True)
    run = made_run([made_record(wire_ms=5.0)], SLO, deployment="1p1d", kv_bandwidth_bps=1e9, device=use)
    page = render_html(msgspec.structs.replace(made_compare([run]), device="cuda"), [run])
    assert "; device cuda;" in page
    assert "Device cuda: prefill-0 and decode-0 on &lt;img" in page
    assert "SHARED GPU: prefill-0 and decode-0 compute on one &lt;img" in page
    assert HOSTILE not in page
