"""The figures of the parallelism lab: what is drawn is what was counted, and it says whether it was predicted or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallelism_runs import write_run

from mlsyslab import LabError, RunError, parallelism
from mlsyslab.labs.parallelism.config import Config
from mlsyslab.labs.parallelism.plot import PARTS

MB = 1e6
HELD = {
    "params_bytes": 8 * MB,
    "grads_bytes": 4 * MB,
    "optimizer_bytes": 16 * MB,
    "activations_bytes": 20 * MB,
    "peak_bytes": 60 * MB,
}


def solid(figure: object) -> list[float]:
    """Widths of the filled bars, MB, in the order in which they were drawn."""
    axes = figure.axes[0]  # type: ignore[attr-defined]  # a Figure
    return [round(bar.get_width(), 1) for bar in axes.patches if bar.get_linestyle() in ("-", "solid")]


def test_each_ranks_parts_sum_to_its_peak(tmp_path: Path) -> None:
    figure = parallelism.plot(write_run(tmp_path / "run", Config(), held=HELD))
    assert solid(figure) == [8.0, 4.0, 16.0, 20.0, 12.0] * 2
    assert "peaks at 60 MB" in figure.get_suptitle()
    assert "(recorded)" in figure.get_suptitle()
    assert "60 MB recorded" in figure.description  # type: ignore[attr-defined]  # set by plot


def test_the_prediction_is_hollow_and_dashed(tmp_path: Path) -> None:
    axes = parallelism.plot(write_run(tmp_path / "run", Config(), held=HELD)).axes[0]
    dashed = [bar for bar in axes.patches if bar.get_linestyle() in ("--", "dashed")]
    assert dashed
    assert all(bar.get_facecolor()[:3] == (1.0, 1.0, 1.0) for bar in dashed)


def test_a_refusal_shows_what_was_live_and_the_cap(tmp_path: Path) -> None:
    live = {
        "params": 69 * MB,
        "grads": 69 * MB,
        "optimizer": 80 * MB,
        "inputs": 0.0,
        "other": 7 * MB,
        "total": 225 * MB,
    }
    note = {
        "phase": "optimizer",
        "wanted_bytes": 6 * MB,
        "cap_bytes": 250 * MB,
        "live": live,
        "says": "refused",
    }
    config = Config(model="17M", strategy="ddp", ranks=2, batch=4, memory_cap_mb=250.0)
    figure = parallelism.plot(write_run(tmp_path / "run", config, oom=note))
    assert "refused 6.0 MB more" in figure.get_suptitle()
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [250.0]


def test_splits_side_by_side_show_their_fullest_rank(tmp_path: Path) -> None:
    runs = {
        "ddp": write_run(tmp_path / "a", Config(), held=HELD),
        "fsdp": write_run(tmp_path / "b", Config(), held={**HELD, "peak_bytes": 50 * MB}),
    }
    figure = parallelism.ledger_plot(runs)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["ddp", "fsdp"]
    assert "60 MB under ddp and at 50 MB under fsdp" in figure.get_suptitle()


def test_a_pipeline_is_drawn_box_by_box(tmp_path: Path) -> None:
    config = Config(strategy="pp", microbatches=2)
    figure = parallelism.pipeline_plot(write_run(tmp_path / "run", config, stage_s=(0.06, 0.03)))
    axes = figure.axes[0]
    assert len(axes.patches) == 2 * 2 * 2
    assert sorted({text.get_text() for text in axes.texts}) == ["B0", "B1", "F0", "F1"]
    assert "2 microbatches over 2 stages" in figure.get_suptitle()


def test_a_run_without_a_pipeline_has_none_to_draw(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no pipeline to draw"):
        parallelism.pipeline_plot(write_run(tmp_path / "run", Config()))


def test_plans_are_hollow_and_called_predicted() -> None:
    plans = parallelism.plan(*parallelism.PLANS["worked_example"])
    figure = parallelism.plans_plot(plans)
    assert "all predicted" in figure.get_suptitle()
    assert all(bar.get_facecolor()[:3] == (1.0, 1.0, 1.0) for bar in figure.axes[0].patches)
    with pytest.raises(LabError, match="no plan to draw"):
        parallelism.plans_plot([])


def test_the_live_picture_follows_the_counted_steps() -> None:
    picture = parallelism.live_plot()
    assert picture.alt.endswith("nothing counted yet")
    picture.update([{"rank": rank, "step": 0, **HELD, "comm_bytes": MB} for rank in (0, 1)])
    picture.update([{"rank": 0, "step": 1, "peak_bytes": None}])
    assert "rank 1 peaks at 60 MB" in picture.alt
    assert "step 1" in picture.figure.axes[0].get_title(loc="left")
    assert len(picture.figure.axes[0].patches) == 4 * 2


def test_parts_differ_without_colour() -> None:
    assert len({hatch for _, hatch in PARTS.values()}) == len(PARTS)
