"""Traces of pipelines: the file, the picture, and the figures for those who collect them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import embcache as ec
from embcache.cli import main
from embcache.errors import ConfigError
from embcache.metrics import Collector, exposition, samples, write_scalars
from embcache.timeline import Timeline
from embcache.traces import read_trace, write_trace


def filled() -> Timeline:
    """Three batches of 10 ms each, planned while the one before is computed."""
    now = [100.0]
    timeline = Timeline(clock=lambda: now[0])
    for number in range(1, 4):
        for stage, seconds in (("load", 0.001), ("plan", 0.004), ("compute", 0.010)):
            start = timeline.start(stage, number)
            now[0] += seconds
            timeline.stop(stage, number, start)
    return timeline


def test_a_trace_is_what_chrome_reads_and_comes_back(tmp_path: Path) -> None:
    path, timeline = tmp_path / "t.json", filled()
    assert write_trace(path, timeline.intervals()) == 9
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    stages = [event for event in events if event["ph"] == "X"]
    assert (stages[0]["ts"], stages[0]["dur"], stages[0]["name"]) == (0, 1000, "load")
    assert {event["name"]: lanes[event["tid"]] for event in stages} == {
        "load": "loader",
        "plan": "coordinator",
        "compute": "caller",
    }
    back = read_trace(path)
    assert [one[:2] for one in back] == [one[:2] for one in timeline.intervals()]
    assert back[-1][3] == pytest.approx(0.045)


@pytest.mark.parametrize(
    "content",
    ["", "[1]", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X", "name": "plan"}]}', '{"traceEvents": []}'],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_trace(path)


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "t.json", tmp_path / "out.png"
    write_trace(path, filled().intervals())
    assert main(["trace", "plot", str(path), str(picture), "--steps", "2"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "batches 1 to 2" in capsys.readouterr().out
    assert main(["trace", "plot", str(path), str(picture)]) == 2  # it exists
    assert main(["trace", "plot", str(path), str(picture), "--force", "--json", "--first", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["first"] == 3
    for wrong in (["out.gif"], ["out.svg", "--steps", "0"], ["out.svg", "--first", "9"]):
        assert main(["trace", "plot", str(path), str(tmp_path / wrong[0]), *wrong[1:]]) == 2
    assert main(["trace", "plot", str(tmp_path / "none.json"), str(tmp_path / "o.png")]) != 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.png", "t.json"]


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    writers = pytest.importorskip("torch.utils.tensorboard")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with writers.SummaryWriter(str(tmp_path)) as writer:
        for step, rate in ((3, 0.25), (4, 0.5)):
            write_scalars(writer, {"hit_rate": rate, "batches_done": step, "stage_s": {"plan": 0.004}}, step)
    found = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("embcache/hit_rate")] == [(3, 0.25), (4, 0.5)]
    assert found.Scalars("embcache/stage_seconds/plan")[0].value == pytest.approx(0.004)
    assert [one.value for one in found.Scalars("embcache/batches_done")] == [3, 4]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ec.EmbeddingBagCollection([ec.TableConfig("item", 4, hbm_rows=40)])
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: ec.JaggedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.top(self.rows(batch).values())
        return out.sum(), out


def test_stages_are_ranges_in_the_profiler() -> None:
    model = Model()
    one = ec.JaggedFeatures(["item"], torch.arange(8), torch.ones(8, dtype=torch.int64))
    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1)) as pipe:
        source = iter([one] * 6)
        pipe.progress(source)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            pipe.progress(source)
            pipe.progress(source)
        pipe.progress(source)
    ranges = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("embcache.")}
    assert ranges["embcache.compute"] == 2


def test_a_pipeline_writes_its_trace_and_its_figures(tmp_path: Path) -> None:
    model, path = Model(), tmp_path / "pipe.json"
    batches = [ec.JaggedFeatures(["item"], torch.arange(i, i + 8), torch.ones(8, dtype=torch.int64)) for i in range(12)]
    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert global_step == 12
            written[tag] = scalar_value

    with ec.TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1)) as pipe:
        source = iter(batches)
        for _ in batches:
            pipe.progress(source)
        assert pipe.trace(path) == len(read_trace(path))
        write_scalars(Writer(), pipe.stats(), 12)
        write_scalars(Writer(), model.rows.manager.stats(), 12)
        figures = pipe.stats()
    assert {number for stage, number, _, _ in read_trace(path) if stage == "compute"} == set(range(1, 13))
    assert written["embcache/batches_done"] == 12 and written["embcache/stage_seconds/plan"] > 0
    assert written["embcache/misses/item"] == model.rows.manager.stats()["misses"] == 19
    names = [sample.name for sample in samples(figures)]
    assert "hit_rate" in names and "stage_s" not in names
    if importlib.util.find_spec("prometheus_client") is None:
        with pytest.raises(ImportError, match=r"embcache\[metrics\]"):
            Collector(model.rows.manager.stats)
        pytest.skip("prometheus-client is not installed")
    text = exposition(model.rows.manager.stats, lambda: figures)
    assert re.search(r'^embcache_misses_total\{table="item"\} 19\.0$', text, re.MULTILINE)
    assert re.search(r"^# TYPE embcache_resident gauge$", text, re.MULTILINE)
    assert re.search(r'^embcache_stage_seconds\{stage="plan"\} ', text, re.MULTILINE)
    assert re.search(r"^embcache_batches_done_total 12\.0$", text, re.MULTILINE)
