"""lab/pictures.py: what is drawn of a run, of several, and of extreme ones."""

import pytest
from matplotlib.text import Text

from lab import pictures
from lab.files import check_marked
from lab.flags import run_parser, settings_of
from lab.history import EVALUATED, METRICS, Run, read_csv
from lab.pictures import BLUE, GREEN, GREY, MOST_RUNS, OTHERS, REDRAW_MARK, VERMILLION, colours, labels, plot, smooth


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


@pytest.fixture
def figures(monkeypatch) -> list:
    """What is drawn, instead of being saved."""
    kept = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, *_: kept.append(figure))
    return kept


def histories(n: int, seeds: int) -> list[list[dict[str, float]]]:
    """Of several seeds, which differ, with spikes in all metrics."""
    rows = [{"iteration": i} | dict.fromkeys(METRICS, 0.4 + i / n / 9) for i in range(n + 1)]
    for i in range(7, n, 29):
        rows[i] |= dict.fromkeys(METRICS, 30.0)
    rows[0], rows[n] = {"iteration": 0}, rows[n] | dict.fromkeys(EVALUATED, 0.7)
    rows[0] |= dict.fromkeys(EVALUATED, 0.5)
    return [[{k: v + s / 50 * (k != "iteration") for k, v in row.items()} for row in rows] for s in range(seeds)]


def settings(*flags: str) -> list[str]:
    return settings_of(run_parser().parse_args(flags))


def test_the_default_run_is_blue_alone_and_in_company():
    (history,) = histories(60, 1)
    default, again = Run("a", settings(), history), Run("b", settings("--seed", "3", "--solutions"), history)
    other, third = Run("c", settings("--no-std"), history), Run("d", settings("--lr", "1e-3"), history)
    assert colours([default]) == colours([again]) == [BLUE]
    assert colours([other]) == [OTHERS[0]] and colours([other, default]) == [OTHERS[0], BLUE]
    assert colours([third, other, again, default]) == [OTHERS[0], OTHERS[1], BLUE, OTHERS[2]]
    assert len(set(colours([other] * MOST_RUNS))) == MOST_RUNS
    assert not {GREEN, VERMILLION, GREY} & {BLUE, *OTHERS}, "one colour means one thing"


def lines_of(figure, colour: str) -> list[list]:
    """The lines of that colour, panel by panel."""
    return [[line for line in panel.lines if line.get_color() == colour] for panel in figure.axes]


def test_a_run_is_drawn_in_its_colour_and_spikes_stay_below_the_legend(figures, tmp_path):
    run = Run("a", settings(), *histories(60, 1))
    plot([run], tmp_path / "a.png")
    assert len(figures[0].axes) == 9
    for panel, own in zip(figures[0].axes, lines_of(figures[0], BLUE), strict=True):
        assert own == list(panel.lines)
        low, high = panel.get_ylim()
        spikes = [line for line in own if line.get_marker() in ("^", "v")]
        assert all(low < y < high and line.get_clip_on() for line in spikes for y in line.get_ydata())
        legend = panel.get_legend().get_window_extent()
        assert legend.y0 >= panel.get_window_extent().y1
    assert sum(line.get_marker() == "^" for panel in figures[0].axes for line in panel.lines) == 6


def test_of_several_seeds_the_mean_and_the_band_are_drawn(figures, tmp_path):
    first, *further = histories(60, 3)
    run = Run("a", settings("--seeds", "3"), first, (*further, first[:5]))
    other = Run("b", settings("--no-std"), first)
    for runs in ([run], [other, run]):
        plot(runs, tmp_path / "a.png")
        accuracy = figures[-1].axes[0]
        mean = next(line for line in accuracy.lines if line.get_color() == BLUE)
        assert list(mean.get_ydata()) == pytest.approx([0.52, 0.72])
        band = accuracy.collections[0].get_paths()[0].vertices[:, 1]
        assert (min(band), max(band)) == pytest.approx((0.5, 0.74))
        assert not any(line.get_marker() in ("^", "v") for panel in figures[-1].axes for line in panel.lines)


def test_what_is_near_0_or_1_can_be_seen(figures, tmp_path):
    (history,) = histories(60, 1)
    for row in history[1:]:
        row |= {"ratio": 1 + 1e-3 * (row["iteration"] % 2), "loss": -2e-3, "clip_fraction": 0.01}
    plot([Run("a", settings(), history)], tmp_path / "a.png")
    spans = {panel.get_title(loc="left"): panel.get_ylim() for panel in figures[0].axes}
    assert 0.99 < spans["Ratio"][0] < 1 < spans["Ratio"][1] < 1.01
    assert -0.01 < spans["Loss"][0] < 0 < spans["Loss"][1] < 0.01
    assert spans["Clip fraction"][1] < 0.03


def test_two_pictures_of_one_run_have_equal_bytes(tmp_path):
    run = Run("a", settings(), *histories(60, 1))
    for ending in (".png", ".pdf"):
        for name in ("a", "b"):
            plot([run], tmp_path / f"{name}{ending}")
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()


def test_smooth_is_a_centred_mean_of_21():
    assert smooth([float(i) for i in range(41)])[20] == 20.0
    assert smooth([0.0] * 10 + [21.0] + [0.0] * 10)[10] == 1.0
    assert smooth([4.0]) == [4.0]
    assert smooth([1.0, 2.0]) == [1.5, 1.5]
