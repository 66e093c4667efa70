"""lab/pictures.py: what is drawn of a run, of several, and of extreme ones."""

import pytest
from matplotlib.text import Text

from lab import pictures
from lab.files import check_marked
from lab.history import EVALUATED, METRICS, Run, read_csv
from lab.pictures import REDRAW_MARK, labels, plot, smooth


def test_labels_are_the_settings_that_differ(two_csvs):
    a, b = map(read_csv, two_csvs)
    assert labels([a, b]) == ["--inner-steps 2 --clip 0.2", "--inner-steps 8 --clip 1000.0"]
    assert labels([a, a._replace(name="again")]) == ["a", "again"]
    mean_only = a._replace(settings=[*a.settings, "--no-std"])
    assert labels([a, mean_only]) == ["a", "--no-std"]
    twice = labels([a, b, b._replace(name="c")])
    assert twice == ["--inner-steps 2 --clip 0.2", *(f"--inner-steps 8 --clip 1000.0 {name}" for name in "bc")]


def test_a_picture_of_several_runs_names_them_and_may_be_drawn_again(two_csvs, tmp_path, monkeypatch):
    a, b = map(read_csv, two_csvs)
    drawn, save_figure = [], pictures.save_figure
    monkeypatch.setattr(
        pictures, "save_figure", lambda figure, *rest: drawn.append(figure) or save_figure(figure, *rest)
    )
    plot([a, b], tmp_path / "both.svg", REDRAW_MARK)
    texts = {text.get_text() for text in drawn[0].findobj(Text)}
    assert {"--inner-steps 8 --clip 1000.0", "--inner-steps 2 --clip 0.2", "greedy", "measured"} <= texts
    check_marked(tmp_path / "both.svg", REDRAW_MARK)
    plot([a, b], tmp_path / "both.svg")  # as the picture of a run
    with pytest.raises(ValueError, match="is there already"):
        check_marked(tmp_path / "both.svg", REDRAW_MARK)


@pytest.mark.filterwarnings("error")  # such as a layout that does not fit, or an axis without height
@pytest.mark.parametrize(
    ("case", "n", "ending"),
    [("one iteration", 1, ".jpg"), ("spikes", 60, ".svg"), ("all zero", 60, ".pdf"), ("many", 2000, ".png")],
)
def test_plot_draws_extreme_histories(tmp_path, case, n, ending):
    history = [{"iteration": i} | dict.fromkeys(METRICS, 0.0) for i in range(n + 1)]
    history[0] = {"iteration": 0}
    if case == "spikes":
        for row in history[1:]:
            row["kl"] = 50.0 if row["iteration"] % 30 == 1 else 0.1
    for i in (0, n):
        history[i] = history[i] | dict.fromkeys(EVALUATED, 0.0)
    path = tmp_path / f"plot{ending}"
    plot([Run("plot", ["--lr 1.2345678901234567e-05"] * 20, history)], path)
    assert path.stat().st_size > 10_000
    if case == "spikes":
        assert "up to 50" in path.read_text(encoding="utf-8"), "the spikes are cut off without a word"


def test_smooth_is_a_centred_mean_of_21():
    assert smooth([float(i) for i in range(41)])[20] == 20.0
    assert smooth([0.0] * 10 + [21.0] + [0.0] * 10)[10] == 1.0
    assert smooth([4.0]) == [4.0]
    assert smooth([1.0, 2.0]) == [1.5, 1.5]
