# SPDX-License-Identifier: Apache-2.0
"""The three pictures: what they must show is asked of the figures, and the files are whole."""

from __future__ import annotations

import pandas
import pytest
from matplotlib.colors import LogNorm

from phalanx.errors import OptionError, TableError
from phalanx.tune import plots, records
from tests.support.tune_benchmarks import bench

NORM = "RESIDUAL_RMS_NORM"
DRAWN = (plots.visualize_2d_heatmap, plots.visualize_strategy_difference_heatmaps, plots.visualize_2d_best_strategy)


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    """The full 15 x 7 grid."""
    return plots.read_frame(records.write(bench(), tmp_path_factory.mktemp("csv")))


def panels(figure):
    return [axes for axes in figure.axes if axes.get_xlabel() == "tokens" and axes.get_visible()]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_heatmap(frame, tmp_path):
    figure = plots.visualize_2d_heatmap(frame, NORM, tmp_path / "deep" / "a_heatmap.png")
    names = [axes.get_title(loc="left") for axes in panels(figure)]
    assert names == ["NCCL", "ONESHOT", "TWOSHOT", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED"]
    norms = {id(axes.images[0].norm) for axes in panels(figure)}
    assert len(norms) == 1
    assert isinstance(panels(figure)[0].images[0].norm, LogNorm)
    assert any("us" in axes.get_ylabel() for axes in figure.axes)
    for axes in panels(figure):
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(2**i) for i in range(15)]
        assert [label.get_text() for label in axes.get_yticklabels()] == [str(2**i) for i in range(7, 14)]
        assert len(texts(axes)) == 105
    data = (tmp_path / "deep" / "a_heatmap.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a_heatmap.png"]


def test_a_cell_is_readable(frame):
    """Each cell is at least as wide as its widest text, at the picture's own resolution."""
    for figure in (plots.visualize_2d_heatmap(frame), plots.visualize_2d_best_strategy(frame)):
        figure.canvas.draw()
        axes = panels(figure)[0]
        (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
        for text in axes.texts:
            extent = text.get_window_extent()
            assert extent.width <= 0.95 * (x1 - x0)
            assert extent.height <= 0.8 * (y1 - y0)


def test_best_strategy(frame):
    figure = plots.visualize_2d_best_strategy(frame)
    (axes,) = panels(figure)
    grid = axes.images[0].get_array()
    rows = frame[frame["fusion"] == "NONE"]
    names = ["NCCL", "ONESHOT", "TWOSHOT"]
    for (tokens, hidden), cell in rows.groupby(["num_tokens", "hidden_size"]):
        best = cell.loc[cell["time (us)"].idxmin(), "strategy"]
        column, row = int(tokens).bit_length() - 1, int(hidden).bit_length() - 8
        assert names[int(grid[row, column])] == best
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label.split(":")[0] for label in labels] == names
    assert sum(int(label.split()[1]) for label in labels) == 105


def test_difference(frame):
    figure = plots.visualize_strategy_difference_heatmaps(frame)
    grids = [axes.images[0].get_array() for axes in panels(figure)]
    for row in range(7):
        for column in range(15):
            assert min(grid[row, column] for grid in grids) == 0
    image = panels(figure)[0].images[0]
    assert image.cmap(image.norm(0.0))[:3] == (1.0, 1.0, 1.0)
    red, green, blue, _ = image.cmap(image.norm(60.0))
    assert red > 2 * max(green, blue)
    assert "0" in texts(panels(figure)[1])


def test_accepted_spellings_and_a_small_grid(frame):
    small = frame[frame["num_tokens"].isin([1, 16]) & (frame["hidden_size"] == 128)]
    times = small["time (us)"] / 1000
    other = small.drop(columns="time (us)").assign(time_ms=times).rename(columns={"fusion": "fusion_op"})
    assert texts(panels(plots.visualize_2d_heatmap(other))[0]) == texts(panels(plots.visualize_2d_heatmap(small))[0])
    for picture in (plots.visualize_2d_best_strategy, plots.visualize_strategy_difference_heatmaps):
        assert picture(small, NORM) is not None
    one = small[(small["num_tokens"] == 1) & (small["strategy"] == "NCCL")]
    assert len(texts(panels(plots.visualize_2d_heatmap(one))[0])) == 1


def test_a_frame_of_two_operations(frame):
    """The rows of TensorRT-LLM's --profile_gemm_allreduce have the same names, and times that contain the GEMM."""
    small = frame[frame["num_tokens"].isin([1, 16]) & (frame["hidden_size"] == 128)].drop(columns="op")
    gemm = small.assign(**{"time (us)": small["time (us)"] + 100})
    both = pandas.concat([small.assign(op="allreduce"), gemm.assign(op="gemm_allreduce")])
    for op, alone in (("all_reduce", small), ("gemm_all_reduce", gemm)):
        drawn = plots.visualize_2d_heatmap(both, op=op)
        assert texts(panels(drawn)[0]) == texts(panels(plots.visualize_2d_heatmap(alone))[0])
    with pytest.raises(OptionError, match="op 'all_gather' is unknown"):
        plots.visualize_2d_heatmap(small.assign(op="all_gather"))


def test_missing_cells_stay_empty_and_grey_is_explained(frame):
    gone = frame[~((frame["strategy"] == "ONESHOT") & (frame["num_tokens"] == 16384))]
    assert len(texts(panels(plots.visualize_2d_heatmap(gone))[1])) == 98
    grey = {draw: draw(gone).get_suptitle().endswith("grey: not measured") for draw in DRAWN}
    assert list(grey.values()) == [True, True, False], "of each cell another strategy was measured"
    assert not any("grey" in draw(frame).get_suptitle() for draw in DRAWN)


def test_a_title_names_gpu_driver_and_date(tmp_path):
    """And the unit, or it stands at the scale."""
    measured = bench()
    measured.facts |= {"gpu": "NVIDIA H200", "driver": "580.1", "date": "2026-11-26 16:39 UTC"}
    frame = plots.read_frame(records.write(measured, tmp_path))
    for draw in DRAWN:
        assert draw(frame, NORM).get_suptitle().splitlines()[1] == "NVIDIA H200, driver 580.1, 2026-11-26 16:39 UTC"
    bare = frame.copy()
    bare.attrs.clear()
    assert plots.visualize_2d_heatmap(bare, NORM).get_suptitle().count("\n") == 0


def test_refusals(frame, tmp_path):
    path = tmp_path / "x.png"
    with pytest.raises(OptionError, match=r"fusion 'X' was not measured; measured: NONE, RESIDUAL_RMS_NORM"):
        plots.visualize_2d_heatmap(frame, "X", path)
    with pytest.raises(TableError, match="lacks the column 'strategy'"):
        plots.visualize_2d_heatmap(frame.drop(columns="strategy"), save_path=path)
    several = frame.assign(world_size=[2, 4] * (len(frame) // 2))
    with pytest.raises(OptionError, match="one at a time"):
        plots.visualize_2d_best_strategy(several, save_path=path)
    with pytest.raises(OptionError, match="only AUTO"):
        plots.visualize_2d_best_strategy(frame.assign(strategy="AUTO"), save_path=path)
    assert not path.exists()
