"""Tables as they are: what is done to each column, and that new rows get the same."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.data import TEST, TRAIN, federation_from_frame
from pefll.data.column_plan import CLIP, ColumnPlan
from pefll.data.column_use import use_of
from pefll.data.frames import inputs_of
from pefll.data.id_columns import id_notes
from pefll.data.table_plan import TablePlan, plan_of
from pefll.data.table_samples import from_frame

ROWS = 60


def table(**columns):
    rng = np.random.default_rng(0)
    return {"n": rng.normal(size=ROWS), "user": [f"u{row % 6}" for row in range(ROWS)], "y": rng.integers(0, 2, ROWS),
            **columns}  # fmt: skip


def federation(frame, **more):
    unseen = {} if "unseen_clients" in more else {"unseen": 0.34}
    return federation_from_frame(frame, **{"label": "y", "client": "user"} | unseen | more)


def learned(name, values, **more):
    """The plan of one column, learned from a table with it."""
    plan = federation(table(**{name: values}), **more).table
    return next(each for each in plan.columns if each.name == name)


def test_scales_do_not_matter():
    x = np.random.default_rng(1).normal(size=(ROWS, 2))
    plain = federation(table(a=x[:, 0], b=x[:, 1]))
    scaled = federation(table(a=1000 * x[:, 0] + 1.7e9, b=0.01 * x[:, 1] - 5))
    assert np.abs((plain.x - scaled.x).numpy()).max() < 1e-2
    rows = plain.rows_of_clients(TRAIN, 0, plain.num_seen)
    np.testing.assert_allclose(plain.x.numpy()[rows].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(plain.x.numpy()[rows].std(axis=0), 1, atol=1e-3)


def test_only_training_rows_of_seen_clients_count():
    values = np.random.default_rng(2).normal(size=ROWS)
    before = federation(table(a=values))
    seen = set(before.rows_of_clients(TRAIN, 0, before.num_seen).tolist())
    others = [row for row in range(ROWS) if row not in seen]
    changed = values.copy()
    changed[others] = 900.0
    words = np.array(["red", "blue"] * (ROWS // 2), dtype=object)
    odd = words.copy()
    odd[others] = "green"
    assert federation(table(a=values, c=words)).table == federation(table(a=changed, c=odd)).table
    moved = values.copy()
    moved[min(seen)] = 900.0
    assert federation(table(a=values)).table != federation(table(a=moved)).table


def test_missing_numbers_are_filled_with_the_mean_and_marked():
    values = np.arange(ROWS, dtype=float)
    values[::4] = np.nan
    made = federation(table(a=values))
    assert made.table.input_names == ("n", "a", "a: missing")
    column, mark = made.x.numpy()[:, 1], made.x.numpy()[:, 2]
    assert (column[::4] == 0).all()
    assert (mark == np.isnan(values)).all()
    share = np.isnan(values[made.rows_of_clients(TRAIN, 0, made.num_seen)]).mean()
    assert made.table.columns[1].missing == pytest.approx(share, abs=1e-6)


def test_categories_rare_and_unknown_values():
    words = np.array(["red", "blue", "red"] * (ROWS // 3), dtype=object)
    words[[0, 6, 12]] = "own"  # of user u0 alone
    words[7] = None
    seen = federation(table(c=words), unseen_clients=["u5"])
    plan = seen.table.columns[1]
    assert (plan.values, plan.others) == (("blue", "red"), "u0" in seen.names[: seen.num_seen])
    new = inputs_of({"n": [0.0] * 4, "c": ["red", "own", "never", None]}, (), seen.table, "t")
    names = seen.table.input_names
    red, others = names.index("c=red"), names.index("c: others")
    assert new[:, red].tolist() == [1, 0, 0, 0]
    assert new[:, others].tolist() == [0, 1, 1, 0]
    many = [f"v{row % 40:02}" for row in range(40 * 6)]
    frame = {"c": many, "user": np.repeat([f"u{user}" for user in range(6)], 40), "y": [0, 1] * 120}
    wide = federation_from_frame(frame, "y", "user", unseen=0.0).table.columns[0]
    assert len(wide.values) == 32
    assert wide.others


def test_a_list_with_gaps_among_texts():
    assert learned("c", ["a", float("nan"), "b"] * (ROWS // 3), unseen=0.0).values == ("a", "b")
    assert learned("c", ["a", None, 7] * (ROWS // 3), unseen=0.0).values == ("7", "a")


def test_what_is_left_out():
    assert "one value" in learned("a", np.ones(ROWS)).left_out
    assert "missing" in learned("a", np.full(ROWS, np.nan)).left_out
    assert "one value" in learned("c", ["same"] * ROWS).left_out
    made = federation(table(a=np.ones(ROWS)))
    assert made.input_shape == (1,)
    assert made.table.names == ("n",), "new rows need not have it"
    with pytest.raises(PefllError, match="PEFLL-D580"):
        federation({key: value for key, value in table(a=np.ones(ROWS)).items() if key != "n"})


def test_booleans_decimals_and_numbers_in_texts():
    flags = np.arange(ROWS) % 3 == 0
    assert learned("a", flags).kind == "boolean"
    assert learned("a", [None, *flags[1:].tolist()]).kind == "boolean"
    assert learned("a", [None, *range(1, ROWS)]).kind == "number"
    assert learned("a", [str(each % 5) for each in range(ROWS)]).kind == "category"
    assert learned("a", [f"{each}.5" for each in range(ROWS)], treat={"a": "number"}).kind == "number"
    assert learned("a", np.arange(ROWS) % 5, treat={"a": "category"}).values == ("0", "1", "2", "3", "4")
    holes = np.where(np.arange(ROWS) % 7 == 0, np.nan, np.arange(ROWS) % 5)
    assert learned("a", holes, treat={"a": "category"}).values == ("0", "1", "2", "3", "4")


DAYS = [datetime.date(2024, 1, 1) + datetime.timedelta(days=7 * row) for row in range(ROWS)]


@pytest.mark.parametrize("form", [list, lambda days: [str(day) for day in days], lambda days: np.array(days, "M8[D]")])
def test_dates_need_a_rule(form):
    with pytest.raises(PefllError, match=r"'d' has dates.*calendar.*PEFLL-D585"):
        federation(table(d=form(DAYS)))
    made = federation(table(d=form(DAYS)), treat={"d": "date"})
    order = made.x.numpy()[:, 1]
    assert (np.diff(order) > 0).all()
    assert made.table.columns[1].mean == pytest.approx(19_723 + 7 * 29.5, abs=60)
    waves = federation(table(d=form(DAYS)), treat={"d": "calendar"})
    assert waves.input_shape == (5,)
    week = waves.x.numpy()[:, [waves.table.input_names.index(f"d: {wave} of the week") for wave in ("sine", "cosine")]]
    assert np.ptp(week, axis=0).max() < 1e-3, "all are Mondays"


@pytest.mark.parametrize(
    "write",
    [
        lambda day: f"{day:%Y-%m}",
        lambda day: f"{day:%Y%m%d}",
        lambda day: int(f"{day:%Y%m%d}"),
        lambda day: float(f"{day:%Y%m%d}"),
        lambda day: f"{day:%Y/%m/%d}",
        lambda day: f"{day.day} {day:%b %Y}",
        lambda day: f"{day:%B} {day.day}, {day:%Y}",
        lambda day: f"{day:%a, %d %b %Y} 12:00:00",
        lambda day: f"{day:%b %Y}",
    ],
)
def test_dates_in_other_forms_need_a_rule_too(write):
    """They were categories, or numbers, without a word."""
    written = [write(day) for day in DAYS]
    holes = [None, *written[1:]]
    for values in (written, holes, np.array(written)):
        with pytest.raises(PefllError, match=r"'d' has dates.*--?treat|treat=.*PEFLL-D585"):
            federation(table(d=values))
    made = federation(table(d=holes), treat={"d": "date"})
    plain = federation(table(d=[None, *map(str, DAYS[1:])]), treat={"d": "date"})
    assert made.table.columns[1].kind == "date"
    assert "days, standardised" in made.table.report()[1]["done"]
    error = 30 if written[0] in ("2024-01", "Jan 2024") else 0.6  # a month is its first day
    assert abs(made.table.columns[1].mean - plain.table.columns[1].mean) < error
    again = inputs_of({"n": [0.0], "d": np.array(written[5:6])}, (), made.table, "t")
    np.testing.assert_array_equal(again[0, 1:], made.x.numpy()[5, 1:])
    assert federation(table(d=written), treat={"d": "category"}).table.columns[1].kind == "category"


def test_numbers_that_look_like_dates_may_be_numbers():
    days = [int(f"{day:%Y%m%d}") for day in DAYS]
    assert learned("d", days, treat={"d": "number"}).kind == "number"
    assert learned("d", [20240100 + row for row in range(ROWS)]).kind == "number", "there is no 32 January"
    assert learned("d", [1, *days[1:]]).kind == "number"
    made = federation(table(d=days), treat={"d": "date"})
    for wrong, code in (([20241301, days[0]], "PEFLL-D586"), ([7, 8], "PEFLL-D590"), ([np.nan, 7.0], "PEFLL-D590")):
        with pytest.raises(PefllError, match=code):
            inputs_of({"n": [0.0, 0.0], "d": np.array(wrong)}, (), made.table, "t")
    federation(table(d=days), treat={"d": "calendar"})
    gaps = federation(table(d=[None if row % 3 else day for row, day in enumerate(days)]), treat={"d": "date"})
    assert inputs_of({"n": [0.0], "d": np.array([np.nan])}, (), gaps.table, "t")[0, 2] == 1, "a whole empty column"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (["31-Jan-24", "1-Feb-24"], "PEFLL-D582"),
        (["1/2/2024", "31/12/2024"], "PEFLL-D582"),
        (["2024-01", "2024-02", "2024-03", "unknown"], "PEFLL-D615"),
        (["31 Jan 2024", "1 Feb 2024", "2 Feb 2024", "soon"], "PEFLL-D615"),
        (["3,5", "4,25"], "PEFLL-D614"),
        (["3,5", "4"], "PEFLL-D614"),
        (["1.234,5", "1 000,25"], "PEFLL-D614"),
        (["1,234", "2,500"], "PEFLL-D614"),
        (["1,234,567.5", "12"], "PEFLL-D614"),
    ],
)
def test_dates_and_numbers_that_are_unclear_are_no_categories(values, code):
    assert ROWS % len(values) == 0
    with pytest.raises(PefllError, match=code):
        federation(table(a=values * (ROWS // len(values))))
    usual = ["a-b", "2024 model", "5, 6", "March", "12-34", "1999-99", "9999-01", "May 5"]
    assert learned("a", (usual * ROWS)[:ROWS]).kind == "category"


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (lambda row: f"{row / 10}", "PEFLL-D670"),
        (lambda row: f"{row:05}", "PEFLL-D670"),
        (lambda row: f"{row}%", "PEFLL-D671"),
        (lambda row: f"${row},000.50", "PEFLL-D671"),
        (lambda row: f"-€{row}", "PEFLL-D671"),
        (lambda row: f"{row}.5 kg", "PEFLL-D671"),
        (lambda row: f"{row} km/h", "PEFLL-D671"),
        (lambda row: f"{row} mg/dL", "PEFLL-D671"),
        (lambda row: f"{row - 20}.5 °C", "PEFLL-D671"),
        (lambda row: f"{row + 1}.234.567", "PEFLL-D671"),
        (lambda row: f"{row % 24}:{row:02}", "PEFLL-D672"),
        (lambda row: f"{row % 12}:{row:02} pm", "PEFLL-D672"),
    ],
)
def test_many_numbers_in_texts_are_no_category(write, code):
    """33 of 900 prices were a category of 32 values, and all others were one input."""
    values = [write(row % 40) for row in range(200)]
    frame = {
        "n": np.arange(200) / 10,
        "a": values,
        "y": np.arange(200) % 2,
        "user": [f"u{row % 6}" for row in range(200)],
    }
    with pytest.raises(PefllError, match=rf"'a'.*category.*{code}"):
        federation(frame)
    assert federation(frame, treat={"a": "category"}).table.columns[1].kind == "category"
    few = [write(row % 7) for row in range(200)]
    assert federation(frame | {"a": few}).table.columns[1].kind == "category", "as sizes of bottles"


def test_numbers_in_texts_are_numbers_by_a_rule_that_the_error_names():
    frame = table(a=[f"{row}.5" for row in range(ROWS)], d=DAYS)
    with pytest.raises(PefllError, match=r"for example treat=\{'a': 'number', 'd': 'date'\}") as error:
        federation(frame)
    assert error.value.code == "PEFLL-D670"
    assert federation(frame, treat={"a": "number", "d": "date"}).input_shape == (3,)


@pytest.mark.parametrize(
    "write",
    [
        lambda row: f"item{row}",
        lambda row: f"{row}{'th' if row % 2 else 'st'}",
        lambda row: f"{row}-{row}",
        lambda row: f"{row % 7}.{row % 6}.{row % 5}",
        lambda row: f"192.168.100.{row}",
    ],
)
@pytest.mark.parametrize("other", [True, False])
def test_names_with_numbers_are_categories(write, other):
    values = [f"{row % 40} a" if other and row % 2 else write(row % 40) for row in range(200)]
    frame = {
        "n": np.arange(200) / 10,
        "a": values,
        "y": np.arange(200) % 2,
        "user": [f"u{row % 6}" for row in range(200)],
    }
    assert federation(frame).table.columns[1].kind == "category"


def test_numbers_that_pandas_calls_categories_are_categories():
    pandas = pytest.importorskip("pandas")
    codes = np.arange(ROWS) % 5
    frame = pandas.DataFrame(table(a=pandas.Categorical(codes)))
    made = federation(frame)
    assert made.table.columns[1].values == ("0", "1", "2", "3", "4")
    np.testing.assert_array_equal(inputs_of(frame.assign(a=codes), (), made.table, "t"), made.x.numpy())
    assert federation(frame, treat={"a": "number"}).table.columns[1].kind == "number"


def test_all_columns_that_need_a_rule_are_named_at_once():
    """A table with two dates and a text took three attempts."""
    notes = [f"row {row} is fine" for row in range(ROWS)]
    frame = table(d=DAYS, e=[f"{day:%Y-%m}" for day in DAYS], note=notes, p=["3,5", "4,5"] * (ROWS // 2))
    with pytest.raises(PefllError, match=r"'d' has dates;.*'e', 'note' and 'p' need rules, too.*PEFLL-D585") as error:
        federation(frame)
    rules = {"d": "date", "e": "date", "note": "text", "p": "decimal-comma"}
    assert f"treat={rules}" in str(error.value)
    assert federation(frame, treat=rules).input_shape == (36,)
    with pytest.raises(PefllError, match=r"'note' needs a rule, too"):
        federation(table(d=DAYS, note=notes))


def test_decimal_commas():
    written = [f"{row % 7},{row % 10}5" for row in range(ROWS)]
    made = federation(table(a=written), treat={"a": "decimal-comma"})
    points = federation(table(a=[float(each.replace(",", ".")) for each in written]))
    np.testing.assert_array_equal(made.x.numpy(), points.x.numpy())
    assert made.table.report()[1]["done"].startswith("read with decimal commas, standardised with mean")
    plan = TablePlan.from_json(json.loads(json.dumps(made.table.to_json())))
    rows = {"n": [0.0] * 4, "a": ["1.234,5", "1 234,5", "1234,5", "+1.234,5"]}
    big = inputs_of(rows, (), plan, "t")
    assert (big == big[0]).all()
    np.testing.assert_array_equal(
        inputs_of({"n": [0.0], "a": [3.5]}, (), plan, "t"), inputs_of({"n": [0.0], "a": ["3,5"]}, (), plan, "t")
    )
    for wrong in ("3.5", "x", "1.23,4"):
        with pytest.raises(PefllError, match=r"such as 3,5.*PEFLL-D587"):
            inputs_of({"n": [0.0], "a": [wrong]}, (), plan, "t")
    with pytest.raises(PefllError, match="PEFLL-D587"):
        federation(table(a=written), treat={"a": "number"})
    with pytest.raises(PefllError, match=r"'0,05'.*PEFLL-D616"):
        federation(table(y=written))
    assert federation_from_frame(table(y=written), "y", "user", labels="classes").classes == len(set(written))


def test_texts_need_a_rule():
    notes = [f"row {row} is {'very good' if row % 2 else 'quite bad'}" for row in range(ROWS)]
    with pytest.raises(PefllError, match=r"'note' has 60 different texts.*drop.*treat.*PEFLL-D584"):
        federation(table(note=notes))
    assert federation(table(note=notes), drop=["note"]).input_shape == (1,)
    made = federation(table(note=notes), treat={"note": "text"})
    assert made.input_shape == (33,)
    with pytest.raises(PefllError, match=r"'note' has") as known:
        federation(table(note=notes))
    assert "names the client" not in str(known.value)
    with pytest.raises(PefllError, match=r"names the client of each row, give it with client='user_id'.*PEFLL-D584"):
        from_frame({"n": np.arange(ROWS), "user_id": notes, "y": [0, 1] * (ROWS // 2)}, "y", None)
    again = inputs_of({"n": [0.0], "note": ["ROW 3 is: very good!"]}, (), made.table, "t")
    np.testing.assert_array_equal(again[0, 1:], made.x.numpy()[3, 1:])


@pytest.mark.parametrize(
    ("column", "more", "code"),
    [
        ([f"{day}.12.2020" for day in range(1, 31)] * 2, {}, "PEFLL-D582"),
        ([*map(str, range(ROWS - 1)), "?"], {}, "PEFLL-D583"),
        (["x" * 2_000, "y"] * 30, {}, "PEFLL-D581"),
        (["soon"] * ROWS, {"treat": {"a": "date"}}, "PEFLL-D586"),
        (["2024-02-31"] * ROWS, {"treat": {"a": "date"}}, "PEFLL-D586"),
        (["1", "x"] * 30, {"treat": {"a": "number"}}, "PEFLL-D587"),
        (["1"] * ROWS, {"treat": {"b": "number"}}, "PEFLL-D589"),
        (np.ones(ROWS), {"treat": {"a": "date"}}, "PEFLL-D590"),
        ([[1, 2]] * ROWS, {}, "PEFLL-D006"),
        ([{1}] * ROWS, {}, "PEFLL-D160"),
        ([np.inf] * ROWS, {}, "PEFLL-D010"),
        ([1e16] * ROWS, {}, "PEFLL-D011"),
        (["1"] * ROWS, {"drop": ["b"]}, "PEFLL-D591"),
        (["1"] * ROWS, {"features": ["a", "y"]}, "PEFLL-D592"),
        (["1"] * ROWS, {"features": ["a"], "drop": ["a"]}, "PEFLL-D593"),
        (["1"] * ROWS, {"features": ["a", "a"]}, "PEFLL-D594"),
        ([None] * ROWS, {"features": ["n"], "time": "a"}, "PEFLL-D595"),
        (["1"] * ROWS, {"client": "y"}, "PEFLL-D673"),
        ([1] * ROWS, {"label": "y,y"}, "PEFLL-D679"),
        ([f"note {row}" for row in range(ROWS)], {"label": "a"}, "PEFLL-D678"),
        (["yes", "no", "yes "] * 20, {"label": "a"}, "PEFLL-D675"),
        (["1"] * ROWS, {"treat": {"a": "number"}, "encode": "none"}, "PEFLL-D599"),
        ([1.0, np.nan] * 30, {"missing": "refuse"}, "PEFLL-D600"),
        ([np.nan] * ROWS, {"missing": "drop"}, "PEFLL-D602"),
        (["1"] * ROWS, {"min_samples": 11}, "PEFLL-D602"),
        (["1"] * ROWS, {"unseen_clients": ["u9"]}, "PEFLL-D604"),
        (["1"] * ROWS, {"unseen_clients": [f"u{user}" for user in range(6)]}, "PEFLL-D605"),
        (["1"] * ROWS, {"treat": ["a"]}, "PEFLL-A580"),
    ],
)
def test_bad_columns(column, more, code):
    with pytest.raises(PefllError) as error:
        federation(table(a=column), **more)
    assert error.value.code == code
    assert "\n" not in str(error.value)


def test_rows_and_clients_are_left_out_with_a_note():
    holes = np.where(np.arange(ROWS) % 10 == 0, np.nan, 1.0 * np.arange(ROWS))
    with pytest.warns(UserWarning, match="6 rows of 60"):
        assert len(federation(table(a=holes), missing="drop").rows) == 54
    users = ["few"] * 3 + [f"u{row % 3}" for row in range(ROWS - 3)]
    with pytest.warns(UserWarning, match="1 of 4 clients left out.*few"):
        made = federation(table(user=users), min_samples=4)
    assert sorted(made.names) == ["u0", "u1", "u2"]


def test_without_encoding_columns_are_as_before():
    frame = table(a=1e3 * np.arange(ROWS))
    made = federation(frame, encode="none")
    np.testing.assert_array_equal(made.x.numpy(), np.stack([frame["n"], frame["a"]], axis=1).astype(np.float32))
    assert made.table is None
    with pytest.raises(PefllError, match="PEFLL-D160"):
        federation(table(a=["x"] * ROWS), encode="none")


def test_the_last_rows_in_time_are_for_the_test():
    when = np.random.default_rng(3).permutation(ROWS)
    for time in (when, np.array([DAYS[each] for each in when], "M8[D]")):
        made = federation(table(t=time), time="t")
        assert made.input_shape == (1,), "a time is no feature unless it is named"
        for client in range(made.num_clients):
            train, validation, test = (when[made.indices(client, split).numpy()] for split in (TRAIN, 1, TEST))
            assert train.max() < validation.min()
            assert validation.max() < test.min()
    with pytest.raises(PefllError, match="PEFLL-D603"):
        federation(table(t=when, s=["train", "test"] * 30), split="s", time="t")


def test_new_rows_get_the_same_inputs():
    frame = table(a=[None, *range(1, ROWS)], c=["x", "y", "z"] * 20, d=[str(day) for day in DAYS])
    made = federation(frame, treat={"d": "date"})
    plan = TablePlan.from_json(json.loads(json.dumps(made.table.to_json())))
    assert plan == made.table
    np.testing.assert_array_equal(inputs_of(dict(reversed(frame.items())), (), plan, "t"), made.x.numpy())
    far = inputs_of({"n": [1e9], "a": [-1e9], "c": ["x"], "d": ["1970-01-01"]}, (), plan, "t")
    assert np.abs(far).max() == CLIP
    with pytest.raises(PefllError, match=r"'c'.*PEFLL-M030"):
        inputs_of({key: frame[key] for key in ("n", "a", "d")}, (), plan, "t")
    with pytest.raises(PefllError, match=r"'n'.*PEFLL-D590"):
        inputs_of(frame | {"n": np.array(DAYS, "M8[D]")}, (), plan, "t")
    with pytest.raises(PefllError, match="PEFLL-D005"):
        inputs_of(frame | {"c": ["x"]}, (), plan, "t")
    with pytest.raises(PefllError, match="PEFLL-M581"):
        plan.encode_array(np.zeros((2, 4)), "t")


GOOD = {"name": "a", "kind": "number", "mean": 0.0, "deviation": 1.0, "values": [], "others": False, "hours": False,
        "indicator": False, "missing": 0.0, "left_out": ""}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"kind": "code"}, {"mean": float("nan")}, {"mean": "1"}, {"deviation": 0.0}, {"deviation": -1.0}, {"values": [1]},
     {"values": "ab"}, {"others": 1}, {"name": 7}, {"values": ["v"] * 100_000}, {"extra": 1}, {"left_out": "x"},
     {"kind": "category"}, {"kind": "date", "mean": 1e9}],
)  # fmt: skip
def test_plans_from_strangers(change):
    assert plan_of({"columns": [GOOD]}, [1]) is not None
    with pytest.raises(ValueError, match=r"."):
        plan_of({"columns": [GOOD | change]}, [1])
    for content in ({}, {"columns": []}, {"columns": [GOOD, GOOD]}, {"columns": [3]}, []):
        with pytest.raises(ValueError, match=r"."):
            plan_of(content, [1])
    with pytest.raises(ValueError, match="inputs"):
        plan_of({"columns": [GOOD]}, [2])


@pytest.mark.parametrize(
    ("mean", "deviation", "values", "several", "is_far"),
    [
        (70, 15, [70_000.0, 60_000, 90_000], False, True),  # grams in place of kilograms
        (70, 15, [0.07, 0.06, 0.09, 0.08, 0.05], False, True),  # tonnes
        (70, 15, [0.0] * 9, False, False),  # all missing, as zeros
        (70, 15, [240.0] * 9, True, True),
        (70, 15, [240.0] * 9, False, False),  # one client's values
        (0.005, 0.0705, [1.0] * 50, False, False),  # a rare flag that one client always has
        (3, 9, [0.001, 0.0, 900, 0.002, 5], True, False),  # heavy tails
        (70, 15, [np.nan, np.inf], True, False),
    ],
)
def test_which_values_are_far_from_those_of_training(mean, deviation, values, several, is_far):
    plan = ColumnPlan("mass", "number", mean=float(mean), deviation=float(deviation))
    assert bool(plan.far_off(np.array(values), several)) == is_far
    assert not ColumnPlan("mass", "boolean", mean=0.001, deviation=0.001).far_off(np.array(values), several)


def test_days_beyond_the_calendar_are_far_off():
    """A column may hold the year 200000, and a stranger's plan any mean."""
    for mean, day in ((18_000.0, 7e7), (1e30, 0.0), (-1e9, 18_000.0)):
        assert "days after 1970" in ColumnPlan("paid", "date", mean=mean).far_off(np.array([day]), False)


INCOMES = np.random.default_rng(0).lognormal(10.3, 0.6, 400)
WEEK = np.tile([200.0, 201, 202, 203], 100)


@pytest.mark.parametrize(
    ("training", "values", "is_far"),
    [
        (INCOMES, INCOMES[:100] / 1000, True),  # skewed, so that the mean is no more than a deviation from 0
        (INCOMES, INCOMES[:100] / 100, True),
        (INCOMES, INCOMES[:99] / 1000, False),  # too few values
        (INCOMES - INCOMES.mean(), (INCOMES - INCOMES.mean()) * 100, True),
        (INCOMES, np.append(INCOMES[:200], 1e9), False),  # one value for "missing"
        (np.arange(366.0), WEEK, False),  # a narrow part of the range of training
        (np.append(np.ones(40), np.zeros(360)), np.append(1, np.zeros(19_999)), False),  # a flag that became rare
        (np.append(INCOMES, 1e9), INCOMES, False),  # training had the odd value
    ],
)
def test_another_unit_shows_by_the_spread(training, values, is_far):
    plan = ColumnPlan("income", "number", mean=float(training.mean()), deviation=float(training.std()))
    assert bool(plan.far_off(values, True)) == is_far
    assert not plan.far_off(values, False), "one client may be like that"


@pytest.mark.parametrize("name", ["user_id", "userId", "CLIENTID", "id", "shop id", "customer"])
def test_a_forgotten_column_of_clients_gets_a_note(name):
    frame = {name: [7, 7, 8, 9], "age": [1, 2, 3, 4], "paid": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
    samples = from_frame(frame, "y", None)
    (note,) = id_notes(samples)
    assert repr(name) in note
    assert "client=" in note
    (note,) = id_notes(from_frame(frame | {"who": [1, 1, 2, 2]}, "y", "who"))
    assert "client=" not in note
    for fine in ([0.5, 1, 2, 3], [0, 1, 0, 1]):
        assert not id_notes(from_frame(frame | {name: fine}, "y", None))
    assert not id_notes(from_frame(frame, "y", None, use=use_of(treat={name: "category"})))
