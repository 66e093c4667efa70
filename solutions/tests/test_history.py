"""lab/history.py: a run's CSV, written and read, whole and damaged."""

import pytest
from helpers import TINY, assert_one_line, names, rows_of

from lab.flags import run_parser, settings_of
from lab.history import EVALUATED, METRICS, Run, read_csv, write_csv


def test_a_csv_is_read_as_it_was_written(runs):
    folder, _ = runs["first"]
    read = read_csv(folder / "grpo_tinylm.csv")
    assert read.name == "grpo_tinylm"
    assert read.settings == settings_of(run_parser().parse_args([*TINY, "--solutions"]))
    _, rows = rows_of(folder / "grpo_tinylm.csv")
    assert {row.pop("seed") for row in rows} == {"0"}
    assert read.history == [{name: float(value) for name, value in row.items() if value} for row in rows]


def of_two_seeds() -> Run:
    """A run that was stopped in its second seed."""
    settings = settings_of(
        run_parser().parse_args(["--iters", "3", "--eval-every", "2", "--seed", "7", "--seeds", "3"])
    )
    names = [{"iteration", *EVALUATED}, set(METRICS), {*METRICS, *EVALUATED}, {*METRICS, *EVALUATED}]
    history = [dict.fromkeys(names[i], 0.5) | {"iteration": i} for i in range(4)]
    return Run("two", settings, history, (history[:2],))


def test_a_csv_of_several_seeds_keeps_them_all(tmp_path):
    run, path = of_two_seeds(), tmp_path / "two.csv"
    write_csv(run, True, path)
    _, rows = rows_of(path)
    assert [(row["seed"], row["iteration"]) for row in rows] == [
        *(("7", str(i)) for i in range(4)),
        ("8", "0"),
        ("8", "1"),
    ]
    assert read_csv(path) == run
    assert read_csv(path).whole == [run.history], "a seed that was stopped is in the file, but in no mean"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (",8\n", ",9\n"),  # another seed
        ("--seeds 3", "--seeds 1"),  # more than there should be
        ("# stopped after iteration 1\n", ""),  # a whole run has three
        ("iteration 1\n", "iteration 3\n"),
        ("\n3,", "\n2,"),  # a first seed that is not whole
    ],
)
def test_a_csv_of_several_seeds_that_is_damaged_is_one_line(tmp_path, old, new):
    path = tmp_path / "two.csv"
    write_csv(of_two_seeds(), True, path)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match="damaged"):
        read_csv(path)


DAMAGE = {
    "empty": lambda text: "",
    "another program's": lambda text: "a,b\n1,2\n",
    "no settings": lambda text: text.split("\n", 1)[1],
    "other columns": lambda text: text.replace("clip_fraction", "clipped"),
    "a column more": lambda text: text.replace("\n", ",1\n").replace(",1\n", "\n", 1),
    "settings of another version": lambda text: text.replace("--beta 0.04", "--beta 0.04 --new 1"),
    "a setting out of range": lambda text: text.replace("--G 2 ", "--G 0 "),
    "cut within a row": lambda text: text[: len(text) - 30],
    "cut within the last number": lambda text: text[:-4],
    "cut before the last line break": lambda text: text[:-1],
    "cut between two rows": lambda text: text[: text.rindex("\n3,") + 1],
    "header alone": lambda text: text[: text.index("\n0,") + 1],
    "a row missing": lambda text: text.replace("\n2,", "\n3,"),
    "a word for a number": lambda text: text.replace("\n1,", "\n1,much"),
    "a number missing": lambda text: text.replace("\n1,", "\n1,,", 1).replace(",,0", ",", 1),
    "not finite": lambda text: text.replace(text.split("\n")[3].split(",")[1], "inf", 1),
    "stopped elsewhere": lambda text: text.replace("\n", "\n# stopped after iteration 2\n", 1),
    "stopped nowhere": lambda text: text.replace("\n", "\n# stopped\n", 1),
    "a broken quote": lambda text: text.replace("\n1,", '\n1,"', 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_csv_that_is_not_a_whole_one_of_ours_is_one_line(two_csvs, call, tmp_path, kind):
    a, _ = two_csvs
    text = a.read_text(encoding="utf-8")
    assert DAMAGE[kind](text) != text
    (tmp_path / "bad.csv").write_text(DAMAGE[kind](text), encoding="utf-8", newline="")
    before = names(tmp_path)
    assert_one_line(call("--redraw", "a.csv", "bad.csv", "--out", "x.png"), "bad.csv: ")
    assert_one_line(call(*TINY, "--versus", "bad.csv"), "bad.csv: ")
    assert names(tmp_path) == before


def test_a_csv_that_is_no_text_or_a_folder_is_one_line(call, tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.csv").mkdir()
    for name in ("bad.csv", "folder.csv", "missing.csv"):
        assert_one_line(call("--redraw", name), f"{name}: ")
