"""The figure and the live picture of the straggler lab: what they show, what they say, and that it can be read."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from straggler_runs import nothing, slow, write_run

from mlsyslab.contract import Diagnosis, Prediction, Range
from mlsyslab.labs.straggler.caption import alike, title_of
from mlsyslab.labs.straggler.config import Config
from mlsyslab.phases import STYLE
from mlsyslab.teach.panel.picture import HEIGHT, WIDTH

# The lab offers the function by the module's own name.
module = importlib.import_module("mlsyslab.labs.straggler.plot")
plot, live_plot = module.plot, module.live_plot
CULPRIT = to_rgba(module.CULPRIT)


def said(cause, where=None, **more):
    return Diagnosis(cause=cause, reason="a reason", where=where, **more)


def drawn(figure):
    """The pixels, [height, width, 4]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def words(figure):
    texts = [figure.get_suptitle(), *(text.get_text() for axes in figure.axes for text in axes.texts)]
    labels = [text for axes in figure.axes for text in (axes.get_title(loc="left"), axes.get_xlabel())]
    return "\n".join([*texts, *labels]).replace("\u00a0", " ")


def lane_ends(axes):
    """Where each measured lane ends, by its place."""
    ends = {}
    for bar in axes.patches:
        if bar.get_fill():
            place = round(bar.get_y() + bar.get_height() / 2)
            ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
    return ends


def coloured(axes):
    return [line for line in axes.lines if to_rgba(line.get_color()) == CULPRIT and len(line.get_xdata()) > 2]


def outside(figure):
    """Texts that are cut off by the figure's edge."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [*figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, *axes.get_yticklabels()]
    if figure._suptitle:
        texts.append(figure._suptitle)
    boxes = {t.get_text(): t.get_window_extent(renderer) for t in texts if t.get_text() and t.get_visible()}
    return [s for s, b in boxes.items() if b.x0 < 0 or b.y0 < 0 or b.x1 > WIDTH or b.y1 > HEIGHT]


# ---- the figure
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_all_lanes_end_alike_and_only_the_named_rank_is_coloured(tmp_path, ranks):
    run = write_run(tmp_path / "run", slow(ranks - 1, data_s=0.15), ranks=ranks)
    figure = plot(run, verdict=said("input", f"rank {ranks - 1}"))
    lanes, lines = figure.axes
    ends = lane_ends(lanes)
    assert sorted(ends) == list(range(ranks))
    assert np.ptp(list(ends.values())) < 0.01 * max(ends.values())
    assert len(coloured(lines)) == 1
    assert coloured(lines)[0].get_ydata().mean() == pytest.approx(260, rel=0.05)
    assert outside(figure) == []
    assert drawn(figure).shape[:2] == (HEIGHT, WIDTH)


def test_the_lanes_show_each_phase_of_own_work_and_then_the_wait(tmp_path):
    figure = plot(write_run(tmp_path / "run", slow(1, data_s=0.2)), verdict=said("input", "rank 1"))
    faces = {}
    for bar in figure.axes[0].patches:
        if bar.get_y() < 1 < bar.get_y() + bar.get_height():
            faces[tuple(bar.get_facecolor())] = bar
    wide = {
        name: faces[to_rgba(colour)].get_width() for name, (_, colour, _) in STYLE.items() if name != "sync_s"
    }
    assert wide["data_s"] == pytest.approx(204, rel=0.03)
    assert wide["backward_s"] == pytest.approx(61, rel=0.05)
    wait = faces[to_rgba("white")]
    assert wait.get_hatch() == STYLE["sync_s"][2]
    assert wait.get_x() == pytest.approx(sum(wide.values()))


def test_the_title_is_the_verdict_with_the_figures_of_the_trap(tmp_path):
    run = write_run(tmp_path / "run", slow(2, data_s=0.25))
    title = title_of(run, said("input", "rank 2", kind="storage"))
    assert title.startswith("Rank 2 holds the job up: input (storage). Every rank's step takes 36")
    assert "but its own work is 35" in title or "but its own work is 36" in title
    assert "the others' 109 to 110 ms" in title or "the others' 110 ms" in title
    assert title in words(plot(run, verdict=said("input", "rank 2", kind="storage"))).replace("\n", " ")


def test_without_a_verdict_given_it_asks_the_diagnosis(tmp_path):
    run = write_run(tmp_path / "run", slow(2, data_s=0.25))
    assert title_of(run).startswith("Rank 2 holds the job up: input")
    assert len(coloured(plot(run).axes[1])) == 1


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (said("healthy"), "Healthy, no rank stands out: every rank's step takes 11"),
        (said("shared"), "No rank stands out, all became slower at once: every rank's step"),
        (said("imbalance"), "No machine is at fault, the slowest rank is another one each time"),
        (said("stage"), "No machine is at fault, a whole stage is slow"),
        (said("unknown"), "No verdict, a reason"),
        (said("unknown", "rank 1"), "Rank 1 holds the job up: why is not clear. Every rank's step"),
        (said("startup", "rank 1", kind="late start"), "Rank 1 started late. Every rank's step takes 11"),
        (said("communication", "rank 1", kind="slow link"), "Rank 1 holds the job up: communication (slow link). Every"),
        (said("compute", "ranks 1, 3"), "Ranks 1, 3 hold the job up: compute. Every"),
        ("the host was away", "the host was away"),
    ],
)  # fmt: skip
def test_each_verdict_has_its_sentence(tmp_path, verdict, says):
    run = write_run(tmp_path / "run")
    assert title_of(run, verdict).startswith(says)
    assert "but its own work" not in title_of(run, verdict)  # of a job whose ranks work alike
    figure = plot(run, verdict=verdict)
    assert figure.description.startswith(title_of(run, verdict))
    assert outside(figure) == []


def test_two_named_ranks_are_both_coloured_and_labelled_apart(tmp_path):
    run = write_run(tmp_path / "run", lambda r, s: {"forward_s": 0.1} if r in (1, 6) else {}, ranks=8)
    figure = plot(run, verdict=said("compute", "ranks 1, 6"))
    assert len(coloured(figure.axes[1])) == 2
    assert "but their own work is 2" in words(figure).replace("\n", " ")
    places = [t.xy[1] for t in figure.axes[1].texts if t.get_text() in ("rank 1", "rank 6")]
    assert abs(places[0] - places[1]) > 0.05 * figure.axes[1].get_ylim()[1]


def test_of_many_named_ranks_the_lines_have_one_label(tmp_path):
    run = write_run(
        tmp_path / "run", lambda r, s: {"forward_s": 0.1} if 20 <= r < 26 else {}, ranks=64, steps=8
    )
    figure = plot(run, verdict=said("compute", "ranks 20, 21, 22, 23, 24, 25"))
    assert "6 ranks" in words(figure)
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "20 to 25" in ticks
    assert "rank 24" not in ticks
    assert outside(figure) == []


def test_others_are_lines_up_to_eight_and_a_band_beyond(tmp_path):
    few = plot(write_run(tmp_path / "few", ranks=8), verdict=said("healthy")).axes[1]
    many = plot(write_run(tmp_path / "many", ranks=12), verdict=said("healthy")).axes[1]
    assert (len(few.lines), len(few.collections)) == (8, 0)
    assert (len(many.lines), len(many.collections)) == (0, 1)
    assert "5-95 %" in "".join(text.get_text() for text in many.texts)


def test_when_the_slowest_rotates_each_step_names_its_slowest(tmp_path):
    who = [3, 0, 2, 1, 1, 3, 0, 2, 3, 1]
    run = write_run(
        tmp_path / "run", lambda r, s: {"forward_s": 0.1} if r == who[s] else {}, steps=10, warmup=1
    )
    numbers = [
        t.get_text() for t in plot(run, verdict=said("imbalance")).axes[1].texts if t.get_text().isdigit()
    ]
    assert numbers == [str(rank) for rank in who[1:]]
    assert [t for t in plot(run, verdict=said("healthy")).axes[1].texts if t.get_text().isdigit()] == []


def test_the_prediction_is_a_hollow_dashed_lane_with_its_range(tmp_path):
    run = write_run(tmp_path / "run")
    prediction = Prediction(values={"step_s": Range(0.2, 0.3, 0.5)}, assumptions=(), cause="input")
    plain, figure = (
        plot(run, verdict=said("healthy")),
        plot(run, prediction=prediction, verdict=said("healthy")),
    )
    hollow = [bar for bar in figure.axes[0].patches if not bar.get_fill()]
    assert len(hollow) == 1
    assert hollow[0].get_linestyle() == "--"
    assert hollow[0].get_width() == pytest.approx(300)
    assert figure.axes[0].get_xlim()[1] > 500 > plain.axes[0].get_xlim()[1]
    assert "predicted step 300 ms (200 to 500)" in words(figure)
    assert not [bar for bar in plain.axes[0].patches if not bar.get_fill()]
    without = Prediction(values={}, assumptions=(), cause="input")
    assert "predicted" not in words(plot(run, without, verdict=said("healthy")))
    assert outside(figure) == []


def test_paced_and_recorded_runs_say_so_and_others_do_not(tmp_path):
    run = write_run(tmp_path / "a")
    assert "(paced accelerator; recorded, not measured here)" in words(plot(run))
    config = Config(ranks=4, fault="none", slow_rank=0, steps=26, warmup=2, paced=False)
    run = write_run(tmp_path / "b", config=config)
    run.origin = "measured"
    assert "paced" not in words(plot(run))
    assert "recorded" not in words(plot(run))


def test_warm_up_is_shaded_and_does_not_set_the_scale(tmp_path):
    def more(rank, step):
        return {"forward_s": 5.0} if step == 1 else {}

    lines = plot(write_run(tmp_path / "run", more, warmup=2), verdict=said("healthy")).axes[1]
    assert lines.get_ylim()[1] < 200
    assert "warm-up" in lines.get_xlabel()
    cold = plot(write_run(tmp_path / "cold", warmup=0), verdict=said("healthy")).axes[1]
    assert "warm-up" not in cold.get_xlabel()


@pytest.mark.parametrize(
    ("steps", "warmup", "says"), [(3, 3, "all 12 recorded steps are warm-up"), (3, 2, "no two steady steps")]
)
def test_a_run_without_steady_steps_says_why_there_is_no_figure(tmp_path, steps, warmup, says):
    figure = plot(write_run(tmp_path / "run", steps=steps, warmup=warmup))
    assert says in figure.description
    assert says in figure.get_suptitle()
    assert not any(axes.axison for axes in figure.axes)


def test_an_empty_run_says_so(tmp_path):
    assert "no step was recorded" in plot(write_run(tmp_path / "run", steps=0)).description


@pytest.mark.parametrize("ranks", [4, 64])
def test_the_alt_text_has_the_named_ranks_figures(tmp_path, ranks):
    run = write_run(tmp_path / "run", slow(3, data_s=0.15), ranks=ranks, steps=10)
    text = plot(run, verdict=said("input", "rank 3")).description
    assert "rank 3 own work 26" in text or "rank 3 own work 25" in text
    assert "wait 6 ms" in text
    assert ("rank 2 own work 1" in text) is (ranks == 4)
    assert ("63 other ranks own work 1" in text) is (ranks == 64)
    assert len(text) < 700


def test_what_is_alike_is_one_figure_and_what_is_not_is_a_span():
    assert alike(np.array([100.0, 101.0, 102.0])) == "101"
    assert alike(np.array([100.0, 140.0])) == "100 to 140"


# ---- the live picture
def rows_of(tmp_path, more=nothing, **given):
    return write_run(tmp_path / "run", more, **given).poll()


def widths(picture, name):
    """Milliseconds of a phase in each lane."""
    return [float(np.ptp(path.vertices[:, 0])) for path in picture._bars[name].get_paths()]


def test_before_the_first_step_it_is_blank_and_says_so():
    picture = live_plot()
    picture.update([])
    assert picture.alt == "Nothing recorded yet"
    assert drawn(picture.figure).shape[:2] == (HEIGHT, WIDTH)


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_lanes_hold_own_work_and_wait_of_each_rank(tmp_path, ranks):
    picture = live_plot()
    picture.update(rows_of(tmp_path, slow(1, data_s=0.15), ranks=ranks, steps=12))
    assert widths(picture, "data_s")[1] == pytest.approx(154, rel=0.03)
    assert widths(picture, "data_s")[0] == pytest.approx(4, rel=0.1)
    assert widths(picture, "sync_s")[1] < 20
    assert widths(picture, "sync_s")[0] > 100
    total = np.sum([widths(picture, name) for name in STYLE], axis=0)
    assert np.ptp(total) < 0.02 * total.max()
    assert len(total) == ranks
    assert picture.axes.get_title(loc="left").startswith("step 11: a step takes 26")
    assert outside(picture.figure) == []
    pixels = drawn(picture.figure)
    assert pixels.shape[:2] == (HEIGHT, WIDTH)
    assert (pixels[..., 3] == 255).all()


def test_it_shows_the_mean_of_the_last_eight_steps(tmp_path):
    rows = rows_of(tmp_path, lambda r, s: {"forward_s": s / 100}, steps=20, warmup=0, noise=0.0)
    picture = live_plot()
    for row in rows:
        picture.update([row])
    assert widths(picture, "forward_s") == pytest.approx([30 + 155] * 4)
    assert "mean of the last 8 steps" in picture.alt
    assert all(len(kept) == 8 for kept in picture._rows.values())


def test_warm_up_gives_way_to_steady_steps(tmp_path):
    rows = rows_of(tmp_path, lambda r, s: {"forward_s": 3.0 if s < 2 else 0.0}, steps=4, warmup=2, noise=0.0)
    picture = live_plot()
    picture.update(rows[:8])
    assert "warm-up" in picture.alt
    assert widths(picture, "forward_s")[0] == pytest.approx(3030)
    picture.update(rows[8:])
    assert "warm-up" not in picture.alt
    assert widths(picture, "forward_s") == pytest.approx([30] * 4)
    assert picture.axes.get_xlim()[1] < 200  # and the scale comes down


def test_the_scale_does_not_jump_while_the_lanes_hardly_move(tmp_path):
    rows = rows_of(tmp_path, steps=20, noise=0.1, warmup=0)
    picture, scales = live_plot(), set()
    for start in range(0, len(rows), 4):
        picture.update(rows[start : start + 4])
        scales.add(picture.axes.get_xlim())
    assert len(scales) == 1


def test_the_figures_stand_beside_few_lanes_and_not_beside_many(tmp_path):
    few, many = live_plot(), live_plot()
    few.update(rows_of(tmp_path / "a", slow(1, data_s=0.15), ranks=4, noise=0.0))
    many.update(rows_of(tmp_path / "b", ranks=17, steps=4))
    assert [text.get_text().split() for text in few.axes.texts] == [
        ["own", "wait"],
        ["107", "156"],
        ["257", "6"],
        ["107", "156"],
        ["107", "156"],
    ]
    assert list(many.axes.texts) == []


def test_a_job_that_goes_on_with_fewer_ranks_starts_its_lanes_anew(tmp_path):
    picture = live_plot()
    picture.update(rows_of(tmp_path / "a", ranks=4, steps=4))
    picture.update(rows_of(tmp_path / "b", ranks=3, steps=4))
    assert len(widths(picture, "sync_s")) == 3
    assert [label.get_text() for label in picture.axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert len(picture.axes.texts) == 4


def test_alt_text_says_each_of_few_ranks_and_the_extremes_of_many(tmp_path):
    few, many = live_plot(), live_plot()
    few.update(rows_of(tmp_path / "a", slow(1, data_s=0.15), ranks=2, noise=0.0))
    many.update(rows_of(tmp_path / "b", slow(40, data_s=0.15), ranks=64, steps=4, noise=0.0))
    assert few.alt.endswith("rank 0 own work 107 ms, wait 156 ms; rank 1 own work 257 ms, wait 6 ms")
    assert "64 ranks own work 107 to 257 ms, wait 6 to 156 ms" in many.alt
    assert "most own work on rank 40, least wait on rank 40" in many.alt


def test_a_phase_that_was_not_measured_takes_no_room(tmp_path):
    rows = [{**row, "h2d_s": None} for row in rows_of(tmp_path, steps=4)]
    picture = live_plot()
    picture.update(rows)
    assert widths(picture, "h2d_s") == [0] * 4


def test_an_update_is_cheap(tmp_path):
    rows, picture, spent = rows_of(tmp_path, ranks=64, steps=12), live_plot(), []
    for start in range(0, len(rows), 64):
        began_s = time.thread_time()
        picture.update(rows[start : start + 64])
        spent.append(time.thread_time() - began_s)
    assert sorted(spent)[len(spent) // 2] < 0.040
