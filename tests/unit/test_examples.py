"""The demo's own parts: data preparation, scores, the sharing of slots, and its verdict."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import comparison
import flights
import runs
from clicks import Clicks, cross_keys, standardize
from criteo import CATEGORIES, EMPTY_KEY, INTEGERS, load_criteo
from embcache import savejob
from nycflights import CROSSES, PLAIN, clicks_of_flights
from scores import auc, log_loss
from synthetic import make_clicks

HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,"
    "dest,air_time,distance,hour,minute,time_hour"
)


def flight(when: str, carrier: str = "UA", number: int = 1, arrival_delay: str = "0", **changes: str) -> list[str]:
    """A line of flights.csv; `when` is "month day hhmm", scheduled."""
    month, day, clock = when.split()
    hour, minute = divmod(int(clock), 100)
    line = {
        "year": "2013", "month": month, "day": day, "dep_time": "601", "sched_dep_time": clock, "dep_delay": "1",
        "arr_time": "800", "sched_arr_time": "0805", "arr_delay": arrival_delay, "carrier": carrier,
        "flight": str(number), "tailnum": "N1", "origin": "EWR", "dest": "IAH", "air_time": "100", "distance": "1400",
        "hour": str(hour), "minute": str(minute), "time_hour": "-",
    }  # fmt: skip
    return [(line | changes)[name] for name in HEADER.split(",")]


def load(*lines: list[str]) -> Clicks:
    return clicks_of_flights([HEADER.split(","), *lines], 0.8)


def numbers_of_flights(clicks: Clicks) -> list[int]:
    return clicks.keys[PLAIN.index("flight")].tolist()


def test_flights_are_in_the_order_of_the_schedule_not_of_the_file() -> None:
    clicks = load(
        flight("2 1 600", number=5),
        flight("1 31 2359", number=4),
        flight("1 2 1200", "AA", number=3),
        flight("1 2 1159", "UA", number=2),
        flight("1 1 2300", number=1),
    )
    assert numbers_of_flights(clicks) == [1, 2, 3, 4, 5]


def test_ties_of_the_schedule_are_broken_by_carrier_flight_origin() -> None:
    clicks = load(
        flight("1 1 600", "UA", number=3),
        flight("1 1 600", "AA", number=20),
        flight("1 1 600", "UA", number=1, origin="LGA"),
        flight("1 1 600", "UA", number=1, origin="EWR"),
    )
    assert numbers_of_flights(clicks) == [20, 1, 1, 3]
    origin = clicks.keys[PLAIN.index("origin")]
    assert origin[1] == origin[3] != origin[2]


def test_a_flight_is_late_above_15_minutes_and_unknown_delays_are_left_out() -> None:
    clicks = load(
        flight("1 1 100", number=1, arrival_delay="15"),
        flight("1 1 200", number=2, arrival_delay="16"),
        flight("1 1 300", number=3, arrival_delay=""),
        flight("1 1 400", number=4, arrival_delay="NA"),
        flight("1 1 500", number=5, arrival_delay="-20"),
    )
    assert numbers_of_flights(clicks) == [1, 2, 5]
    assert clicks.labels.tolist() == [0, 1, 0]


def test_nothing_measured_after_the_scheduled_departure_is_a_feature() -> None:
    plain = load(flight("1 1 600"), flight("1 2 700"))
    other = load(
        flight("1 1 600", dep_time="900", dep_delay="180", arr_time="1200", air_time="300", arrival_delay="200"),
        flight("1 2 700"),
    )
    np.testing.assert_array_equal(plain.keys, other.keys)
    np.testing.assert_array_equal(plain.dense, other.dense)
    assert other.labels.tolist() == [1, 0]


def test_crosses_differ_in_each_of_their_parts() -> None:
    clicks = load(
        flight("1 1 600"),
        flight("1 8 600"),  # the same weekday
        flight("1 9 600"),
        flight("1 10 700", tailnum="N2"),
    )
    cross = dict(zip(clicks.features, clicks.keys, strict=True))
    assert set(CROSSES) < set(cross)
    tail_dest_hour, weekday = cross["tail_dest_hour"], cross["flight_weekday_hour"]
    assert tail_dest_hour[0] == tail_dest_hour[1] == tail_dest_hour[2] != tail_dest_hour[3]
    assert weekday[0] == weekday[1] != weekday[2]


def test_cross_keys_depend_on_order_and_spread_over_int64() -> None:
    grid = np.stack(np.meshgrid(np.arange(300), np.arange(300)), axis=0).reshape(2, -1)
    keys = cross_keys(grid[0], grid[1])
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == grid.shape[1]
    assert not np.array_equal(keys, cross_keys(grid[1], grid[0]))
    assert 0.45 < (keys < 0).mean() < 0.55


CATEGORY = [f"{i:08x}" for i in range(CATEGORIES)]


def criteo_file(folder: Path, *lines: list[str], delimiter: str = "\t", header: bool = False) -> Path:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    path = folder / "clicks.txt"
    path.write_text("".join(delimiter.join(line) + "\n" for line in ([names] if header else []) + list(lines)))
    return path


@pytest.mark.parametrize("delimiter", ["\t", ","])
@pytest.mark.parametrize("header", [False, True])
def test_criteo_is_read_with_tabs_or_commas_with_or_without_a_header(
    tmp_path: Path, delimiter: str, header: bool
) -> None:
    lines = [
        ["0", *["1"] * INTEGERS, *CATEGORY],
        ["1", *["3.0"] * INTEGERS, *["ffffffff"] * CATEGORIES],
        ["0", *["-1"] * INTEGERS, *CATEGORY[::-1]],
    ]
    clicks = load_criteo(criteo_file(tmp_path, *lines, delimiter=delimiter, header=header), 1.0)
    assert clicks.features[0] == "C1"
    assert len(clicks.features) == CATEGORIES
    assert clicks.labels.tolist() == [0, 1, 0]
    assert clicks.keys[:, 0].tolist() == list(range(CATEGORIES))
    assert set(clicks.keys[:, 1]) == {2**32 - 1}
    logs = np.array([math.log(2), math.log(4), -math.log(2)])
    np.testing.assert_allclose(clicks.dense[:, 0], (logs - logs.mean()) / logs.std(), rtol=1e-6)


def test_criteo_empty_fields_are_legal_and_a_value_of_their_own(tmp_path: Path) -> None:
    lines = [
        ["0", *["0"] * INTEGERS, *CATEGORY],
        ["1", *[""] * INTEGERS, *[""] * CATEGORIES],
        ["0", *["7"] * INTEGERS, *CATEGORY],
    ]
    clicks = load_criteo(criteo_file(tmp_path, *lines), 1.0)
    assert set(clicks.keys[:, 1]) == {EMPTY_KEY}
    assert np.isfinite(clicks.dense).all()
    np.testing.assert_allclose(clicks.dense[1], 0, atol=1e-6)  # the mean of the others


def test_criteo_a_column_that_is_always_empty_is_zero(tmp_path: Path) -> None:
    lines = [["0", "", *["5"] * (INTEGERS - 1), *CATEGORY], ["1", "", *["6"] * (INTEGERS - 1), *CATEGORY]]
    clicks = load_criteo(criteo_file(tmp_path, *lines, delimiter=","), 1.0)
    assert clicks.dense[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["0", *["1"] * INTEGERS], "line 2: 14 fields"),
        (["2", *["1"] * INTEGERS, *CATEGORY], "line 2: label '2'"),
        (["1", *["x"] * INTEGERS, *CATEGORY], "line 2: could not convert"),
        (["1", *["1"] * INTEGERS, *["123456789"] * CATEGORIES], "line 2: category"),
        (["1", *["1"] * INTEGERS, *["-1"] * CATEGORIES], "line 2: category"),
    ],
)
def test_criteo_names_a_bad_line(tmp_path: Path, line: list[str], message: str) -> None:
    good = ["0", *["1"] * INTEGERS, *CATEGORY]
    with pytest.raises(SystemExit, match=message):
        load_criteo(criteo_file(tmp_path, good, line), 0.8)


def test_criteo_refuses_a_file_without_examples(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no example"):
        load_criteo(criteo_file(tmp_path, header=True), 0.8)


def test_standardize_uses_the_training_part_only() -> None:
    dense = np.array([[0.0, 3], [2, 3], [4, 3], [1000, 4]])
    scaled = standardize(dense, 0.75)
    np.testing.assert_allclose(scaled[:3, 0], [-math.sqrt(1.5), 0, math.sqrt(1.5)], rtol=1e-6)
    assert scaled[:, 1].tolist() == [0, 0, 0, 0]


def test_split_is_by_time_and_batches_cover_everything_in_order() -> None:
    data, _ = make_clicks(103, 1.0, seed=1)
    train, test = data.split(0.8)
    assert (len(train), len(test)) == (82, 21)
    batches = list(train.batches(20))
    assert [len(batch) for batch in batches] == [20, 20, 20, 20, 2]
    np.testing.assert_array_equal(np.concatenate([batch.keys for batch in batches], axis=1), data.keys[:, :82])


def test_synthetic_clicks_are_skewed_planted_and_repeatable() -> None:
    data, logits = make_clicks(20_000, 1.2, seed=3)
    again, _ = make_clicks(20_000, 1.2, seed=3)
    np.testing.assert_array_equal(data.keys, again.keys)
    np.testing.assert_array_equal(data.labels, again.labels)
    assert auc(data.labels, logits.astype(np.float32)) > 0.7
    _, counts = np.unique(data.keys[0], return_counts=True)
    assert counts.max() > 2000
    assert (data.keys < 0).any()


def brute_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels > 0.5] for n in scores[labels < 0.5]]
    return sum(pairs) / len(pairs) if pairs else math.nan


@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), min_size=1, max_size=40))
def test_auc_and_log_loss_equal_brute_force(examples: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in examples], np.float32)
    scores = np.array([score for _, score in examples], np.float32)
    np.testing.assert_allclose(auc(labels, scores), brute_auc(labels, scores), rtol=1e-12)
    chance = 1 / (1 + np.exp(-scores.astype(np.float64)))
    expected = -np.where(labels > 0.5, np.log(chance), np.log(1 - chance)).mean()
    np.testing.assert_allclose(log_loss(labels, scores), expected, rtol=1e-12)


def test_log_loss_survives_huge_logits() -> None:
    assert log_loss(np.array([1, 0], np.float32), np.array([-1000, -1000], np.float32)) == 500


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 3000))
def test_slots_are_shared_within_budget_and_to_no_table_more_than_its_rows(distinct: list[int], budget: int) -> None:
    slots = flights.split_slots(budget, distinct)
    assert all(1 <= have <= rows for have, rows in zip(slots, distinct, strict=True))
    assert sum(slots) <= max(budget, len(distinct))
    if budget >= len(distinct):
        assert sum(slots) > min(budget, sum(distinct)) - len(distinct)


def test_batch_size_shrinks_to_what_fits_unless_it_was_asked_for() -> None:
    train, _ = make_clicks(4000, 0.5, seed=0)
    slots = [50] * len(train.features)
    size = flights.fitting_batch_size(train, slots, None)
    assert size < 100
    assert max(train.most_in_a_batch(size)) <= 50 < max(train.most_in_a_batch(2 * size))
    assert flights.fitting_batch_size(train, slots, 10) == 10
    with pytest.raises(SystemExit, match="batches of 1000 need more HBM slots than tables feature_0"):
        flights.fitting_batch_size(train, slots, 1000)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--synthetic", "3"],
        ["--synthetic", "100", "--zipf", "-1"],
        ["--batch-size", "0"],
        ["--epochs", "0"],
        ["--hbm-fraction", "0"],
        ["--hbm-fraction", "nan"],
        ["--optimizer", "lbfgs"],
        ["--criteo", "a", "--synthetic", "10"],
        ["--save-every", "0"],
    ],
)
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flights.parse(arguments)
    assert "error:" in capsys.readouterr().err


SMALL = ["--synthetic", "6000", "--zipf", "0.9", "--batch-size", "64", "--no-kill"]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_i9_the_demo_ends_in_the_same_bits_and_says_so(optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flights.main([*SMALL, "--optimizer", optimizer]) == 0
    said = capsys.readouterr().out
    assert "bit-identical" in said
    assert "FAILED" not in said


def test_the_demo_trains_on_criteo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    lines = [
        [
            str(random.integers(2)),
            *(str(x) if x else "" for x in random.integers(0, 5, INTEGERS)),
            *(f"{zlib.crc32(bytes([x])):08x}" if x else "" for x in random.zipf(1.5, CATEGORIES) % 200),
        ]
        for _ in range(400)
    ]
    assert flights.main(["--no-kill", "--criteo", str(criteo_file(tmp_path, *lines, delimiter=","))]) == 0
    assert "bit-identical" in capsys.readouterr().out


def test_the_demo_fails_when_one_bit_of_one_row_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(name: str, *rest: object) -> runs.Run:
        run = runs.run_embcache(name, *rest)  # type: ignore[arg-type]
        if name != "all in HBM":
            _, _, state = run.rows["feature_3"]
            state.view(np.uint32)[7, 2] ^= 1
        return run

    monkeypatch.setattr(flights, "run_embcache", damaged)
    assert flights.main(SMALL) == 1
    assert "FAILED: rows differ" in (said := capsys.readouterr().out)
    assert "state of 1 rows of table 'feature_3'" in said


def test_i10_the_demo_is_killed_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert flights.main(SMALL[:-1]) == 0
    said = capsys.readouterr().out
    assert "75 steps and is killed" in said and "steps have trained" in said and "so are those" in said


def test_the_demo_fails_when_the_resumed_run_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(name: str, *rest: object) -> runs.Run:
        run = runs.run_embcache(name, *rest)  # type: ignore[arg-type]
        if name == "killed, resumed":
            _, weights, _ = run.rows["feature_1"]
            weights.view(np.uint32)[3, 0] ^= 1
        return run

    monkeypatch.setattr(flights, "run_embcache", damaged)
    assert flights.main(SMALL[:-1]) == 1
    assert "FAILED: the run that was killed" in capsys.readouterr().out


def test_the_demo_saves_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flights.main([*SMALL, "--save", str(tmp_path), "--save-every", "20"]) == 0
    assert flights.main([*SMALL, "--resume", str(tmp_path)]) == 0
    assert "60 steps have trained" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other options"):
        flights.main([*SMALL, "--seed", "1", "--resume", str(tmp_path)])


def test_a_run_whose_save_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background nobody waits for it: the next save, and the end of the run, must."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    for every in (20, 70):  # a later save follows, or none
        monkeypatch.setattr(savejob.SaveJob, "_write_table", refuse)
        with pytest.raises(OSError, match="the disk is gone"):
            flights.main([*SMALL, "--save", str(tmp_path / str(every)), "--save-every", str(every)])


def test_the_demo_fails_when_plain_pytorch_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worse(*arguments: object) -> runs.Run:
        run = runs.run_stock(*arguments)  # type: ignore[arg-type]
        run.auc -= 0.003
        return run

    monkeypatch.setattr(flights, "run_stock", worse)
    assert flights.main(SMALL) == 1
    assert "away from plain PyTorch's" in capsys.readouterr().out


def test_first_difference_finds_missing_tables_keys_and_parameters() -> None:
    import torch

    def run(keys: list[int], dense: float = 0.0, table: str = "t") -> runs.Run:
        row = np.zeros((len(keys), 2), np.float32)
        result = runs.Run("r", 1.0, 1, 0.5, 0.5, 0, 0)
        result.rows[table] = np.array(keys), row, row
        result.dense["w"] = torch.tensor([dense])
        return result

    assert comparison.first_difference(run([1, 2]), run([1, 2])) == ""
    assert "tables" in comparison.first_difference(run([1]), run([1], table="u"))
    assert "keys" in comparison.first_difference(run([1, 2]), run([1, 3]))
    assert "parameter 'w'" in comparison.first_difference(run([1]), run([1], dense=1.0))
