"""Pictures of runs: what they show, in which unit, with limits that show it and a legend that hides nothing."""

import itertools
import json
import math

import pytest

from hyjax.cli import main
from hyjax.train.metrics import Logger
from hyjax.train.plots import COLOURS, LABEL_WIDTH, loss_plot, short_names, smooth

PNG = b"\x89PNG"


def write_run(workdir, steps, floor=2.0, every=1, heldout=0, per_nat=None, attempts=(), **options):
    """A run whose loss falls from 6 to `floor`; `per_nat` is bits per byte of a nat per token. Returns its workdir."""
    for start, stop in attempts or [(0, steps)]:
        logger = Logger(workdir, steps, start, console=False)
        for step in range(start + 1, stop + 1):
            loss = floor + (6 - floor) * math.exp(-step / (0.05 * steps))
            loss = options.get("losses", {}).get(step, loss)
            if step % every == 0:
                logger.log(step, {"loss": loss})
            if heldout and step % heldout == 0:
                bits = {} if per_nat is None else {"bits_per_byte": per_nat * (loss + 0.1)}
                logger.log(step, {"loss": loss + 0.1} | bits, split="heldout")
        logger.close()
    return workdir


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """loss_plot, which gives the figure (drawn, so that everything has its place) instead of the path."""
    from matplotlib.figure import Figure

    def draw(runs, baselines=None, title=""):
        figures: list = []
        save = Figure.savefig
        with monkeypatch.context() as patch:
            patch.setattr(Figure, "savefig", lambda self, path: (figures.append(self), save(self, path)))
            path = loss_plot(runs, baselines or {}, tmp_path / "picture.png", title)
        assert path.read_bytes().startswith(PNG)
        return figures[0]

    return draw


def labels(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def assert_nothing_overlaps(figure) -> None:
    """Legend, title and axis labels are inside the figure, and none lies on another or on the axes' own area."""
    axes = figure.axes[0]
    title = axes.get_title(loc="left")
    titles = [child for child in axes.get_children() if title and getattr(child, "get_text", str)() == title]
    things = [axes.xaxis.label, axes.yaxis.label, *figure.legends, *titles]
    boxes = [axes.bbox, *(thing.get_window_extent() for thing in things)]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, box
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), (one, other)


def test_one_run(draw, tmp_path):
    figure = draw([write_run(tmp_path / "run", 200, heldout=50, per_nat=1.44)], {"gzip": 3.4}, "GGAG on topics")
    axes = figure.axes[0]
    assert axes.get_ylabel() == "loss (bits per byte)" and axes.get_title(loc="left") == "GGAG on topics"
    assert labels(figure) == ["training", "held-out (3.024 at the end)"]  # 1.44 · 2.1
    assert [text.get_text() for text in axes.texts] == ["gzip  3.4"]
    low, high = axes.get_ylim()
    assert 2.5 < low < 1.44 * 2.0 and 3.4 < high < 1.44 * 5  # what comes after the first fall
    assert axes.child_axes[0].get_ylabel() == "nats per token"
    assert_nothing_overlaps(figure)


def test_runs_with_and_without_held_out_points(draw, tmp_path):
    a = write_run(tmp_path / "with", 200, heldout=50, per_nat=1.44)
    b = write_run(tmp_path / "without", 200, floor=1.5)
    figure = draw([a, b])
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"  # b's bytes are not known
    assert labels(figure) == ["with: 2.100", "without: training 1.500"]
    assert_nothing_overlaps(figure)


def test_runs_of_different_lengths(draw, tmp_path):
    """The short run's end is in the picture, and its first fall does not set the scale of the long one."""
    a = write_run(tmp_path / "long", 2000, floor=2.0, every=10, heldout=200)
    b = write_run(tmp_path / "short", 60, floor=2.6)
    axes = draw([a, b]).axes[0]
    assert axes.get_xlim()[1] == pytest.approx(2000, rel=0.02)
    low, high = axes.get_ylim()
    assert low < 2.0 and 2.6 < high < 3.0


def test_runs_of_different_tokenisations_compare_by_the_byte(draw, tmp_path):
    a = write_run(tmp_path / "bytes", 200, floor=1.4, heldout=50, per_nat=1.44)
    b = write_run(tmp_path / "bpe", 200, floor=4.0, heldout=50, per_nat=0.4)
    figure = draw([a, b])
    axes = figure.axes[0]
    assert axes.get_ylabel() == "loss (bits per byte)" and not axes.child_axes  # a nat a token means two things
    assert labels(figure) == ["bytes: 2.160", "bpe: 1.640"]  # 1.44 · 1.5, 0.4 · 4.1
    c = write_run(tmp_path / "unknown", 200)
    assert draw([a, b, c]).axes[0].get_ylabel() == "loss (nats per token, of different tokenizers)"


def test_a_run_that_was_killed_and_resumed_is_one_curve(draw, tmp_path):
    attempts = [(0, 120), (100, 170), (150, 200)]
    killed = write_run(tmp_path / "killed", 200, heldout=20, attempts=attempts)
    straight = write_run(tmp_path / "straight", 200, heldout=20)
    lines, others = (draw([run]).axes[0].lines for run in (killed, straight))
    assert [line.get_xydata().tolist() for line in lines] == [line.get_xydata().tolist() for line in others]


def test_a_lone_spike_does_not_set_the_scale(draw, tmp_path):
    run = write_run(tmp_path / "run", 1000, losses={700: 90.0})
    assert draw([run]).axes[0].get_ylim()[1] < 5


def test_names_are_as_long_as_tells_them_apart(tmp_path, monkeypatch):
    assert short_names(["runs/a", "runs/b"]) == ["a", "b"]
    assert short_names(["runs/a/1", "runs/b/1", "runs/a/2"]) == ["a/1", "b/1", "a/2"]
    monkeypatch.chdir(tmp_path)
    assert short_names(["."]) == [tmp_path.name]


def test_many_runs_with_long_names(draw, tmp_path):
    """As many as the colours go round: each still has a look of its own, and the axes keep their height."""
    runs = [write_run(tmp_path / f"{'name' * 20}-{i:02d}", 20, floor=2 + i / 10, heldout=10) for i in range(10)]
    figure = draw(runs)
    assert_nothing_overlaps(figure)
    assert [label.split(":")[0][-3:] for label in labels(figure)] == [f"-{i:02d}" for i in range(10)]
    assert all(len(label) <= LABEL_WIDTH + len(": 2.100") for label in labels(figure))
    handles = figure.legends[0].legend_handles
    assert len({(handle.get_color(), str(handle.get_linestyle())) for handle in handles}) == 10
    alone = draw(runs[:1])
    assert figure.axes[0].bbox.height > 0.9 * alone.axes[0].bbox.height


def test_many_held_out_points_are_not_all_ringed(draw, tmp_path):
    axes = draw([write_run(tmp_path / "run", 300, heldout=1)]).axes[0]
    [ringed] = [line for line in axes.lines if len(line.get_xdata()) == 300 and line.get_marker() == "o"]
    rings = range(300)[ringed.get_markevery()]
    assert len(rings) < 30 and rings[-1] == 299


def test_runs_without_a_finite_loss(draw, tmp_path):
    bad = write_run(tmp_path / "bad", 3, losses=dict.fromkeys((1, 2, 3), math.nan))
    good = write_run(tmp_path / "good", 3)
    assert labels(draw([bad])) == ["training: no finite loss"]
    assert labels(draw([bad, good]))[0] == "bad: no finite loss"
    with pytest.raises(ValueError, match="no run"):
        draw([])


def test_colours_differ_for_every_common_form_of_colour_vision():
    """No pair is closer than a plain difference of lightness or hue, as a deuteranope or protanope sees them.

    Matrices: Viénot, Brettel and Mollon 1999, in linear RGB.
    """
    import numpy as np
    from matplotlib.colors import to_rgb

    colours = np.array([to_rgb(colour) for colour in COLOURS])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    protan = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]
    deutan = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
    for sight in (np.eye(3), protan, deutan):
        seen = np.clip(linear @ np.array(sight).T, 0, 1) ** (1 / 2.4)
        for one, other in itertools.combinations(seen, 2):
            assert np.abs(one - other).max() > 0.08


def test_smoothing_keeps_a_straight_line_and_ends_on_a_mean():
    line = [float(i) for i in range(500)]
    assert smooth(line)[:490] == pytest.approx(line[:490])
    assert smooth([]) == [] and smooth([3.0]) == [3.0] and smooth([1.0, 5.0, 2.0]) == [1.0, 5.0, 2.0]
    noisy = [2.0 + 0.5 * (-1) ** i for i in range(500)]
    assert smooth(noisy)[20:] == pytest.approx([2.0] * 480, abs=0.1)


# ------------------------------------------------------------------------------------------------ the command


def test_plot_command(tmp_path, capsys, monkeypatch):
    a = write_run(tmp_path / "a", 50, heldout=10, per_nat=1.44)
    b = write_run(tmp_path / "b", 50)
    assert main(["plot", f"--workdir={a}"]) == 0
    assert capsys.readouterr().out == f"{a}/loss.png\n" and (a / "loss.png").read_bytes().startswith(PNG)
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "--workdir=a", "--workdir=b"]) == 0
    assert capsys.readouterr().out == "losses.png\n" and (tmp_path / "losses.png").exists()
    assert main(["plot", f"--workdir={a}", f"--workdir={b}", "--out=deep/er/both.PNG", "--title=T"]) == 0
    assert (tmp_path / "deep" / "er" / "both.PNG").exists()


def test_plot_command_keeps_what_the_run_itself_drew(tmp_path, monkeypatch):
    """Title and baselines of a run alone; of several, the baselines only where all have the same."""
    seen: list = []
    monkeypatch.setattr("hyjax.train.plots.loss_plot", lambda *args: seen.append(args[1:2] + args[3:]))
    config = {"model": {"layout": "GGAG"}, "data": {"source": "topics"}}
    for name, gzip in (("a", 2.4), ("b", 2.4), ("c", 2.5)):
        write_run(tmp_path / name, 5)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "result.json").write_text(json.dumps({"baselines": {"gzip": gzip}}))
    for names in ("a", "ab", "ac"):
        main(["plot", *(f"--workdir={tmp_path / name}" for name in names), f"--out={tmp_path}/x.png"])
    main(["plot", f"--workdir={tmp_path / 'a'}", "--title="])
    assert seen == [({"gzip": 2.4}, "GGAG on topics"), ({"gzip": 2.4}, ""), ({}, ""), ({"gzip": 2.4}, "")]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--workdir=RUN/nowhere"], "holds no run: there is no metrics.jsonl in it"),
        (["--workdir=EMPTY"], "has logged no loss yet"),
        (["--workdir=RUN", "--workdir=RUN/../run"], "names the same run twice"),
        (["--workdir=RUN", "--out=x.jpg"], "--out=x.jpg must end in .png"),
        (["--workdir=RUN", "--out=RUN/metrics.jsonl/x.png"], "can't be written"),
        (["--wrokdir=RUN"], "no flag --wrokdir; did you mean --workdir?"),
        ([], "required: --workdir"),
    ],
)
def test_plot_command_refuses(argv, said, tmp_path, capsys):
    write_run(tmp_path / "run", 5)
    Logger(tmp_path / "empty", 5, console=False).close()
    places = {"RUN": str(tmp_path / "run"), "EMPTY": str(tmp_path / "empty")}
    words = ["plot", *argv]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1
