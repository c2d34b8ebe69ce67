# SPDX-License-Identifier: Apache-2.0
"""A record of kernels is read where all of them are in the cache, and only then; writing it never fails a start."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.kernels.compiling import record as module
from phalanx.kernels.compiling.record import FOLDER, KernelRecord, sources_digest

triton = pytest.importorskip("triton")

FACTS = {"option max_batch_size": "128", "rank": "0"}
KERNELS = ["FIRST", "SECOND"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache directory, with two kernels and one that is not complete."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in KERNELS:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"__grp__{name.lower()}.json").touch()
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "kernel.ttir").touch()
    return tmp_path


def test_a_record_covers_its_kernels_in_starts_with_the_same_facts(cache: Path) -> None:
    assert not KernelRecord(FACTS).covers(["FIRST"])
    KernelRecord(FACTS).write(KERNELS)
    same = KernelRecord(dict(reversed(FACTS.items())))
    assert same.covers(["FIRST"])
    assert same.covers(["SECOND", "FIRST", "FIRST"])
    assert not same.covers(["FIRST", "THIRD"])  # it calls other kernels
    assert not same.covers(None)
    assert json.loads(same.path.read_text()) == {"facts": FACTS, "kernels": KERNELS}
    for other in ({**FACTS, "option max_batch_size": "512"}, {**FACTS, "sources": "changed"}, {"rank": "0"}):
        assert not KernelRecord(other).covers(["FIRST"])


def test_without_one_of_its_kernels_it_covers_none(cache: Path) -> None:
    record = KernelRecord(FACTS)
    record.write(KERNELS)
    (cache / "SECOND" / "__grp__second.json").unlink()  # Triton compiles it again
    assert not record.covers(["FIRST"])
    (cache / "SECOND").rmdir()
    assert not record.covers(["FIRST"])


def test_nothing_is_recorded_of_kernels_that_are_not_in_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folders in (None, ["FIRST", "THIRD"], ["BROKEN"]):
        KernelRecord(FACTS).write(folders)
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    KernelRecord(FACTS).write(KERNELS)
    assert not (cache / FOLDER).exists()


@pytest.mark.parametrize(
    "content", [b"", b'{"kernels": ["FIR', b"[]", b'{"kernels": null}', b'{"kernels": [[]]}', b'{"facts": 1}', b"\xff"]
)
def test_a_file_that_is_no_record_is_none(cache: Path, content: bytes) -> None:
    record = KernelRecord(FACTS)
    record.write(KERNELS)
    record.path.write_bytes(content)
    assert not record.covers(["FIRST"])
    record.write(KERNELS)
    assert record.covers(["FIRST"])


def test_where_no_file_can_be_written_the_log_says_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / FOLDER).touch()
    record = KernelRecord(FACTS)
    with caplog.at_level(logging.INFO, "phalanx"):
        record.write(KERNELS)
    assert "are not recorded" in caplog.text
    assert not record.covers(["FIRST"])


def test_a_file_that_cannot_take_its_place_is_removed(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = KernelRecord(FACTS)
    record.path.mkdir(parents=True)
    with caplog.at_level(logging.INFO, "phalanx"):
        record.write(KERNELS)
    assert "are not recorded" in caplog.text
    assert list((cache / FOLDER).iterdir()) == [record.path]


def test_the_records_that_were_read_last_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDS", 3)
    records = [KernelRecord({"rank": str(rank)}) for rank in range(4)]
    for age, record in enumerate(records[:3]):
        record.write(KERNELS)
        os.utime(record.path, (time.time() - 1000 + age,) * 2)
    left = cache / FOLDER / "of_a_killed_process.tmp"
    left.touch()
    os.utime(left, (1, 1))
    assert records[0].covers(KERNELS)
    records[3].write(KERNELS)
    assert {path.name for path in (cache / FOLDER).iterdir()} == {records[number].path.name for number in (0, 2, 3)}


def test_several_starts_write_and_read_at_the_same_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(facts: dict[str, str]) -> bool:
        record = KernelRecord(facts)
        record.write(KERNELS)
        return record.covers(KERNELS)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, [FACTS] * 200))
        assert len(list((cache / FOLDER).iterdir())) == 1
        monkeypatch.setattr(module, "MAX_RECORDS", 2)
        list(pool.map(start, [{"rank": str(number)} for number in range(200)]))  # they remove one another's
    assert len(list((cache / FOLDER).iterdir())) <= 2


def test_the_digest_of_the_sources_changes_with_each_file(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    names = ["engine.py", "kernels/gemm.py", "kernels/table.json"]
    for name in names:
        (tmp_path / name).write_text("1\n")
    digests = [sources_digest(tmp_path)]
    for name in names:
        (tmp_path / name).write_text("2\n")
        digests.append(sources_digest(tmp_path))
    (tmp_path / "engine.py").rename(tmp_path / "engines.py")
    digests.append(sources_digest(tmp_path))
    assert len(set(digests)) == 5
    (tmp_path / "kernels" / "gemm.pyc").write_bytes(b"any")
    assert sources_digest(tmp_path) == digests[-1]


def test_the_digest_of_the_sources_is_of_the_installed_ones() -> None:
    assert sources_digest() == sources_digest(Path(module.__file__).parents[2])
    assert (Path(module.__file__).parents[2] / "worker" / "warmup.py").exists()
