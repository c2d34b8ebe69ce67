# SPDX-License-Identifier: Apache-2.0
"""How many drafts rows verify: the best number for times and luck that are simulated, 0 where drafts cost more than they give."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.options import EngineOptions
from phalanx.engine.draft_depth import WATCHED_ROWS, AcceptanceWatch, DraftDepth
from phalanx.engine.messages import Stats
from phalanx.engine.step_times import StepLoad, StepTimes
from tests.support.checkpoints import write_checkpoint


def weights_bound(tokens: int) -> float:
    """Of a GPU: flat while it waits for weights, then in proportion to the tokens."""
    return max(10.0 + tokens / 30, tokens / 12) * 1e-3


def new_depth(most: int, table: list[tuple[int, int, int]] | None = None) -> DraftDepth:
    return DraftDepth(StepTimes(), most, table)


def run(
    depth: DraftDepth, rows: int, luck: float, steps: int, seed: int = 0, draft_seconds: float = 0.0
) -> tuple[float, list[int]]:
    """Tokens in a second, and the drafts of each step. A draft has its luck if the step before has proposed it. Of many rows, some
    are looked at. draft_seconds: for each draft that is proposed."""
    chance, tokens, chosen, proposed = random.Random(seed), 0.0, list[int](), 0
    begin = now = depth._times._ended_at
    for number in range(1, steps + 1):
        wanted = depth.choose(rows)
        drafts = min(wanted, proposed)
        depth._times.submitted(number, StepLoad(rows * (1 + drafts), 0, 0, wanted), now)
        now += (weights_bound(rows * (1 + drafts)) + wanted * draft_seconds) * chance.uniform(0.97, 1.06)
        for _ in range(min(rows, 8)):
            accepted = 0
            while accepted < drafts and chance.random() < luck:
                accepted += 1
            depth.verified(drafts, accepted)
            tokens += (1 + accepted) * max(rows / 8, 1)
        depth._times.ended(number, now)
        proposed = wanted
        chosen.append(drafts)
    return tokens / (now - begin), chosen


def best(rows: int, luck: float, most: int) -> float:
    return max(rows * sum(luck**place for place in range(k + 1)) / weights_bound(rows * (k + 1)) for k in range(most + 1))


@pytest.mark.parametrize("luck", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128, 256])
def test_throughput_is_near_the_best_of_any_fixed_number(rows: int, luck: float) -> None:
    depth = new_depth(7)
    run(depth, rows, luck, 600)
    speed, _ = run(depth, rows, luck, 1000)
    assert speed > 0.88 * best(rows, luck, 7)


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256])
def test_drafts_without_luck_cost_less_than_a_hundredth(rows: int) -> None:
    depth = new_depth(7)
    run(depth, rows, 0.0, 400)
    speed, chosen = run(depth, rows, 0.0, 4000)
    plain, _ = run(new_depth(7, [(1, 512, 0)]), rows, 0.0, 4000)
    assert speed > 0.99 * plain
    assert rows == 256 or any(chosen), "luck may change, so it is tried now and then"


def test_luck_that_comes_and_goes_is_followed() -> None:
    depth = new_depth(5)
    run(depth, 1, 0.0, 500)
    _, none = run(depth, 1, 0.0, 300)
    assert sum(none) < 100
    _, lucky = run(depth, 1, 0.95, 1500)
    assert sum(lucky[-300:]) > 300 * 4
    run(depth, 1, 0.0, 500)
    _, none = run(depth, 1, 0.0, 300)
    assert sum(none) < 100


def test_a_load_that_grows_turns_drafts_down() -> None:
    depth = new_depth(7)
    deep = {rows: run(depth, rows, 0.7, 500)[1][-100:] for rows in (1, 32, 128, 512)}
    means = [sum(drafts) / 100 for drafts in deep.values()]
    assert means == sorted(means, reverse=True)
    assert means[0] > 4
    assert means[-1] == 0


def test_a_table_decides_instead() -> None:
    depth = new_depth(5, [(1, 4, 5), (5, 16, 2)])
    assert [depth.choose(rows) for rows in (1, 4, 5, 16, 17)] == [5, 5, 2, 2, 0]


def test_drafts_that_take_long_are_fewer_and_leave_the_time_of_other_steps_as_it_is() -> None:
    """Each draft takes a quarter of a step. What a few rows take with drafts says nothing of as many tokens without."""
    depth = new_depth(7)
    _, quick = run(new_depth(7), 1, 0.8, 1000)
    _, slow = run(depth, 1, 0.8, 1000, draft_seconds=2.5e-3)
    assert 0 < sum(slow[-300:]) < 0.6 * sum(quick[-300:])
    run(depth, 4, 0.0, 600, draft_seconds=2.5e-3)
    assert depth._times.decode_seconds(4) < 1.1 * weights_bound(4) < depth._times.decode_seconds(4, 2)


def watched(record: Path, accepted: float, rows: int = WATCHED_ROWS) -> None:
    """A run in which so many of the first drafts are accepted; some rows have none."""
    watch = AcceptanceWatch("org/head", record, Stats())
    for row in range(rows):
        watch.verified(3, int(row < accepted * rows))
        watch.verified(0, 0)


def test_a_head_that_is_none_for_its_target_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By what an earlier run with it accepted, or what published heads reach; and once. A wrong run leaves the record as it is."""
    record = tmp_path / "acceptance" / "pair.json"
    watched(record, 0.1)
    assert [part for part in ("org/head", "10% of 200 rows", "published heads reach 45%") if part in caplog.text] == [
        "org/head",
        "10% of 200 rows",
        "published heads reach 45%",
    ]
    caplog.clear()
    for accepted in (0.2, 0.75, 0.3):
        watched(record, accepted)
    watched(record, 0.2, WATCHED_ROWS - 1)
    assert not caplog.records
    watched(record, 0.24)
    assert "24% of 200 rows; an earlier run had 75%" in caplog.text
    record.write_text("{")
    caplog.clear()
    watched(record, 0.24)
    assert not caplog.records


@pytest.mark.parametrize(("luck", "named"), [(0.0, True), (0.02, True), (0.2, False), (0.45, False)])
def test_a_head_without_hope_is_named_early_and_no_other_one(tmp_path: Path, luck: float, named: bool) -> None:
    for seed in range(20):
        stats, chance = Stats(), random.Random(seed)
        watch, rows = AcceptanceWatch("org/head", tmp_path / f"{luck}-{seed}.json", stats), 0
        while rows < 150 and not stats.wrong_head:
            watch.verified(3, int(chance.random() < luck))
            rows += 1
        assert bool(stats.wrong_head) == named
        assert luck or rows == 57


def test_a_pair_of_checkpoints_has_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = [write_checkpoint(tmp_path / name, "llama", num_hidden_layers=1, seed=seed) for seed, name in enumerate("abc")]
    draft = {"method": "draft_model", "num_speculative_tokens": 2}

    def record(target: Path, **config: Any) -> Path:
        watch = AcceptanceWatch.of(EngineOptions.of(model=str(target), speculative_config=config), Stats())
        assert watch is not None
        return watch._record

    assert record(folders[0], **draft, model=str(folders[1])).is_relative_to(tmp_path)
    pairs = [record(folders[0], **draft, model=str(folder)) for folder in folders[1:]]
    assert len({*pairs, record(folders[1], **draft, model=str(folders[2]))}) == 3
    for config in ({"method": "ngram", "num_speculative_tokens": 2}, {
        **draft, "model": str(folders[1]), "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0,
    }):  # fmt: skip
        assert AcceptanceWatch.of(EngineOptions.of(model=str(folders[0]), speculative_config=config), Stats()) is None
