"""The clinic's figures: they draw every kind of run, and say in words what they show."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from scaleup_runs import small, trained, write_run

from mlsyslab import RunError, scaleup
from mlsyslab.labs.scaleup.plot import MOST_LOSS, LossLines

GROWN = {"samples": 2048, "epochs": 3, "global_batch": 512, "base_batch": 128, "lr": 0.05, "gain": 1.0}


def run_of(
    path: Path, cause: str, names: tuple[str, ...] = ("base", "control", "large"), **change: Any
) -> Any:
    config = small(cause, **change)
    return write_run(path, config, trained(config, names))


def drawn(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("cause", "change", "title"),
    [("gradient missing", {}, "The system: gradient missing, rank 1 (virtual ranks, recorded"), ("healthy", {}, "Healthy: "),
     ("fp16 overflow", {}, "The system: fp16 overflow (virtual ranks, recorded"), ("learning rate not scaled", GROWN, "")],
)  # fmt: skip
def test_the_title_is_the_verdict_and_the_words_hold_the_numbers(
    cause: str, change: dict[str, Any], title: str, tmp_path: Path
) -> None:
    figure = scaleup.plot(run_of(tmp_path / "run", cause, **change))
    assert figure._suptitle.get_text().startswith(title)
    assert "large run, 4 ranks: loss" in figure.description
    assert len(drawn(figure)) > 5000


def test_without_a_control_it_says_so(tmp_path: Path) -> None:
    figure = scaleup.plot(run_of(tmp_path / "run", "healthy", ("large",)))
    assert "no control" in figure.description
    assert drawn(figure)


def test_the_curves_drawn_are_the_records(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "healthy")
    axes = scaleup.plot(run).axes[0]
    losses = [row["loss"] for row in run.rows() if row["part"] == "large" and row["step"] == 0]
    firsts = [line.get_ydata()[0] for line in axes.lines]
    assert any(first == pytest.approx(sum(losses) / 4) for first in firsts)
    assert axes.lines[-1].get_xdata()[-1] == pytest.approx(3)  # epochs


def test_sharpness_has_both_limits_and_needs_a_small_run(tmp_path: Path) -> None:
    figure = scaleup.sharpness_plot(run_of(tmp_path / "grown", "learning rate not scaled", **GROWN))
    assert f"limit of the small run {scaleup.sharpness_limit(0.05):.1f}" in figure.description
    assert drawn(figure)
    with pytest.raises(RunError, match="no small run"):
        scaleup.sharpness_plot(run_of(tmp_path / "split", "healthy"))


def test_the_clinic_shows_no_verdict_and_a_legend_for_every_curve(tmp_path: Path) -> None:
    runs = {
        "A": run_of(tmp_path / "a", "gradient missing"),
        "B": run_of(tmp_path / "b", "learning rate not scaled", **GROWN),
    }
    figure = scaleup.clinic_plot(runs)
    text = " ".join(t.get_text() for t in figure.findobj(lambda artist: hasattr(artist, "get_text")))
    assert "missing" not in text + figure.description
    assert {"small run", "control: 1 worker", "large run"} <= {
        label.get_text().split(", ")[0] for label in figure.legends[0].texts
    }
    assert drawn(figure)


class TestLive:
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in trained(small("healthy")) if row["kind"] == "step"]

    def test_a_point_for_each_whole_step(self) -> None:
        picture, rows = LossLines(), self.rows()
        picture.update(rows[:5])  # one step of four ranks, and a rank of the next
        assert len(picture._points["control"][0]) == 1
        picture.update(rows[5:])
        assert len(picture._points["large"][0]) == 24
        assert "control" in picture.alt
        assert drawn(picture.figure)

    def test_a_loss_that_is_no_number_is_drawn_at_the_top(self) -> None:
        picture = LossLines()
        picture.update([dict(row, loss=None) for row in self.rows()[:4]])
        assert picture._points["control"][1] == [MOST_LOSS]
        assert drawn(picture.figure)

    def test_nothing_yet(self) -> None:
        picture = scaleup.live_plot()
        picture.update([])
        assert "nothing recorded yet" in picture.alt
        assert drawn(picture.figure)


def test_a_chart_has_every_figure_and_no_verdict(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "gradients not synchronised")
    assert len(scaleup.chart(run)) == len(scaleup.RULES) > len(scaleup.diagnose(run).evidence)


def test_summary_has_the_figures_that_were_predicted(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "sum instead of mean")
    predicted, measured = scaleup.predict(run.config), run.summary()
    assert set(predicted.values) <= set(measured) | {"norm_gap"}
    assert measured["norm_ratio"] in predicted.values["norm_ratio"]
    assert measured["steps"] == predicted.values["steps"].expected
    assert 0 < measured["record_frac"] < 1
    assert dataclasses.asdict(run.config)["cause"] == "sum instead of mean"
