"""The index: every line of every file once, whatever happens to the files meanwhile."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError, DataError
from evenhand.pages.viewer import reading
from evenhand.pages.viewer.app import Viewer
from evenhand.pages.viewer.index import Index, cache_folder
from evenhand.pages.viewer.query import PAGE, SORTS, Filter
from evenhand.pages.viewer.records import NotARolloutError, record
from evenhand.pages.viewer.sources import open_sources
from evenhand.trajectory import to_line, write_trajectories
from run_builder import group, write_alarms, write_run
from viewer_server import make_index


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=3)


@pytest.fixture
def index(run: Path, tmp_path: Path) -> Index:
    return make_index(tmp_path / "cache", run)


def total(index: Index, **wanted: str) -> int:
    return index.rows(Filter(**wanted))[0]


def lines_of(step: int, questions: int = 1) -> list[str]:
    return [to_line(t) + "\n" for q in range(questions) for t in group(step, q)]


# --- whole files ---------------------------------------------------------------------------------


def test_every_rollout_of_a_run_is_there_and_reads_back_as_it_was(index: Index) -> None:
    assert total(index) == 3 * 2 * 4
    _, rows = index.rows(Filter(sort="oldest"))
    assert index.trajectory(rows[0].key) == group(1, 0)[0]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_any_line_reads_back_from_any_kind_of_file(
    tmp_path: Path, suffix: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(reading, "LARGE", 1)
        monkeypatch.setattr(reading, "BLOCK", 3000)
    path = tmp_path / f"file{suffix}"
    wanted = [t for q in range(20) for t in group(1, q)]
    write_trajectories(path, wanted)
    index = make_index(tmp_path / "cache", path)
    found = [
        index.trajectory(row.key)
        for offset in (0, PAGE)
        for row in index.rows(Filter(sort="oldest", source=""), offset=offset)[1]
    ]
    assert sorted(found, key=lambda t: t.id) == sorted(wanted, key=lambda t: t.id)


def test_evaluations_are_there_beside_training(run: Path, tmp_path: Path) -> None:
    write_trajectories(run / "evaluations/step-000003.jsonl.gz", group(3, 7))
    index = make_index(tmp_path / "cache", run)
    assert total(index, source="evaluations") == 4
    assert index.choices()["source"][:2] == ["evaluations", "trajectories"]


def test_a_step_is_taken_from_the_name_of_the_file_where_a_rollout_has_none() -> None:
    data = json.loads(lines_of(1)[0])
    del data["step"]
    line = json.dumps(data).encode()
    assert record(line, "evaluations/step-000050.jsonl.gz").step == 50
    assert record(line, "other.jsonl").step is None


def test_the_group_of_a_rollout_is_that_of_its_file(run: Path, tmp_path: Path) -> None:
    write_trajectories(run / "evaluations/step-000001.jsonl.gz", group(1, 0)[:1])
    index = make_index(tmp_path / "cache", run)
    _, rows = index.rows(Filter(group="s1-q0", source="trajectories"))
    keys, at = index.group(rows[2].key)
    assert len(keys) == 4
    assert keys[at] == rows[2].key


# --- files that grow, change, go -----------------------------------------------------------------


def test_a_new_step_is_taken_in(index: Index, run: Path) -> None:
    assert not index.refresh()
    write_trajectories(run / "trajectories/step-000004.jsonl.gz", group(4, 0))
    before = index.state()["changes"]
    assert index.refresh()
    assert total(index, step="4") == 4
    assert index.state()["changes"] > before


def test_a_file_that_went_takes_its_rollouts_along(index: Index, run: Path) -> None:
    (run / "trajectories/step-000002.jsonl.gz").unlink()
    index.refresh()
    assert total(index) == 16
    assert total(index, step="2") == 0


def test_a_file_that_was_written_again_is_read_again(index: Index, run: Path) -> None:
    write_trajectories(run / "trajectories/step-000002.jsonl.gz", group(2, 0, text="Anew?")[:1])
    index.refresh()
    assert total(index, step="2") == 1
    assert total(index, question="Anew") == 1


def test_a_half_line_is_waited_for_and_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    lines = lines_of(1)
    path.write_text(lines[0] + lines[1][:50])
    index = make_index(tmp_path / "cache", path)
    assert total(index) == 1
    assert "half written" in index.state()["problems"][0]
    with path.open("a") as file:
        file.write(lines[1][50:] + lines[2])
    index.refresh()
    assert total(index) == 3
    assert index.state()["problems"] == []


def test_a_last_line_without_a_line_break_counts_and_more_may_follow(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    lines = lines_of(1)
    path.write_text(lines[0].strip())
    index = make_index(tmp_path / "cache", path)
    assert total(index) == 1
    with path.open("a") as file:
        file.write("\n" + lines[1])
    index.refresh()
    assert total(index) == 2


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "live.jsonl"
    lines = lines_of(1)
    path.write_text("".join(lines[:3]))
    index = make_index(tmp_path / "cache", path)
    seen = []
    real = reading.record
    monkeypatch.setattr(reading, "record", lambda line, name: seen.append(line) or real(line, name))
    with path.open("a") as file:
        file.write(lines[3])
    index.refresh()
    assert len(seen) == 1


def test_a_longer_file_in_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    path.write_text("".join(lines_of(1)[:2]))
    index = make_index(tmp_path / "cache", path)
    path.write_text("".join(lines_of(2, questions=2)))
    index.refresh()
    assert total(index) == total(index, step="2") == 8


def test_a_compressed_file_that_is_being_written_shows_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl.gz"
    whole = gzip.compress("".join(lines_of(1, questions=40)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    index = make_index(tmp_path / "cache", path)
    part = total(index)
    assert 0 <= part < 160
    assert index.state()["problems"]
    path.write_bytes(whole)
    index.refresh()
    assert total(index) == 160
    assert index.state()["problems"] == []


def test_damaged_lines_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    lines = lines_of(1)
    path.write_text(lines[0] + "{damaged\n" + '{"schema": "other"}\n\n' + lines[1])
    index = make_index(tmp_path / "cache", path)
    assert total(index) == 2
    assert index.state()["problems"] == ["file.jsonl: 2 damaged line(s) were left out"]


def test_lines_of_other_things_in_a_folder_are_nobodys_fault(run: Path, tmp_path: Path) -> None:
    (run / "questions.jsonl").write_text('{"question": "q"}\n')
    assert make_index(tmp_path / "cache", run).state()["problems"] == []


@settings(max_examples=40)
@given(st.lists(st.integers(1, 900), max_size=30))
def test_growing_in_any_pieces_gives_the_same_rollouts(cuts: list[int]) -> None:
    import tempfile

    content = "".join(lines_of(1)[:3]).encode()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "live.jsonl"
        path.touch()
        index = make_index(Path(name) / "cache", path)
        at = 0
        for cut in [*cuts, len(content)]:
            with path.open("ab") as file:
                file.write(content[at : at + cut])
            at += cut
            index.refresh()
        assert total(index) == 3


# --- the index file ------------------------------------------------------------------------------


def test_the_index_lies_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "evenhand/viewer"


def test_nothing_is_written_into_the_run(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    make_index(tmp_path / "cache", run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.usefixtures("index")
def test_an_index_is_used_again(run: Path, tmp_path: Path) -> None:
    again = Index(open_sources([run]), tmp_path / "cache")
    assert not again.refresh()
    assert total(again) == 24


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + b"x" * 5000])
def test_a_damaged_index_is_made_anew(
    index: Index, run: Path, tmp_path: Path, content: bytes
) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{index.path}{suffix}").unlink(missing_ok=True)
    index.path.write_bytes(content)
    assert total(make_index(tmp_path / "cache", run)) == 24


def test_an_index_of_another_version_is_made_anew(index: Index, run: Path, tmp_path: Path) -> None:
    with sqlite3.connect(index.path) as base:
        base.execute("UPDATE meta SET value = '0' WHERE name = 'version'")
    base.close()
    assert total(make_index(tmp_path / "cache", run)) == 24


def test_a_cache_folder_that_cannot_be_written_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    index = Index(open_sources([run]), tmp_path / "file/cache")
    index.refresh()
    assert total(index) == 24


def test_indexes_that_nobody_used_for_long_are_removed(run: Path, tmp_path: Path) -> None:
    old = tmp_path / "cache/old.sqlite"
    old.parent.mkdir()
    old.write_text("")
    then = time.time() - 40 * 86400
    os.utime(old, (then, then))
    make_index(tmp_path / "cache", run)
    assert not old.exists()


def test_progress_ends_at_the_whole(run: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    index = Index(open_sources([run]), tmp_path / "cache")
    index.refresh(lambda *numbers: calls.append(numbers))
    done, everything, rollouts = calls[-1]
    assert done == everything
    assert rollouts == 24


# --- asking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"step": "2"}, 8),
        ({"step": "2-3"}, 16),
        ({"step": ">2"}, 8),
        ({"searches": "0"}, 12),
        ({"searches": ">=1"}, 12),
        ({"reward": "1"}, 12),
        ({"reward": "<0.5"}, 12),
        ({"reward": "none"}, 0),
        ({"question": "number 1"}, 12),
        ({"question": "100%"}, 0),
        ({"text": "query 1"}, 6),
        ({"text": "title d0"}, 6),
        ({"stop": "answered"}, 24),
        ({"stop": "failed"}, 0),
        ({"flag": "punished"}, 6),
        ({"flag": "format"}, 0),
        ({"group": "s1-q0"}, 4),
        ({"source": "trajectories/step-000001"}, 8),
        ({"alarm": "any"}, 8),
        ({"step": "1", "reward": "1", "searches": "2"}, 2),
    ],
)
def test_filters(index: Index, wanted: dict[str, str], count: int) -> None:
    assert index.rows(Filter(**wanted), [2])[0] == count


@pytest.mark.parametrize("field", ["step", "searches", "reward"])
@pytest.mark.parametrize("text", ["x", "1;DROP TABLE rollouts", "1-", "--", "> >1"])
def test_a_condition_that_cannot_be_read_is_an_error(index: Index, field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=field):
        index.rows(Filter(**{field: text}))


@pytest.mark.parametrize("order", SORTS)
def test_every_order_gives_every_rollout_once(index: Index, order: str) -> None:
    _, rows = index.rows(Filter(sort=order))
    assert len({row.key for row in rows}) == 24


def test_orders(index: Index) -> None:
    def column(order: str, name: str) -> list[float]:
        return [row.columns[name] for row in index.rows(Filter(sort=order))[1]]

    assert column("newest", "step") == sorted(column("newest", "step"), reverse=True)
    assert column("reward", "reward") == sorted(column("reward", "reward"), reverse=True)
    assert column("worst", "reward") == sorted(column("worst", "reward"))
    assert column("searches", "searches") == sorted(column("searches", "searches"), reverse=True)


@pytest.mark.parametrize(
    "key", ["", "1", "a-b", "99-1", "1-99", "../etc", "1-1-1", "1-" + "9" * 99]
)
def test_a_rollout_that_does_not_exist_is_an_error(index: Index, key: str) -> None:
    with pytest.raises(DataError):
        index.trajectory(key)
    with pytest.raises(DataError):
        index.group(key)


def test_a_file_that_vanished_under_the_index_is_a_clear_error(index: Index, run: Path) -> None:
    _, rows = index.rows(Filter())
    for path in (run / "trajectories").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        index.trajectory(rows[0].key)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"schema": "evenhand.trajectory/1"}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_rollout_is_refused(line: bytes) -> None:
    with pytest.raises(NotARolloutError):
        record(line, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=100)
@given(data=st.data())
def test_whatever_a_field_holds_a_line_is_taken_in_or_counted_as_damaged(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    value = json.loads(lines_of(1)[3])
    place = data.draw(st.sampled_from([value, *value["segments"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    (folder / "a.jsonl").write_text(json.dumps(value) + "\n")
    index = make_index(folder / "cache", folder / "a.jsonl")
    viewer = Viewer(index)
    viewer.page({})
    if index.state()["total"]:
        with contextlib.suppress(DataError):
            viewer.group(index.rows(Filter())[1][0].key)
    else:
        assert "1 damaged" in index.state()["problems"][0]


# --- sources -------------------------------------------------------------------------------------


def test_links_that_lead_out_of_the_folder_are_not_followed(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.jsonl"
    write_trajectories(outside, group(9, 0))
    (run / "trajectories/link.jsonl").symlink_to(outside)
    (tmp_path / "folder").mkdir()
    write_trajectories(tmp_path / "folder/more.jsonl", group(8, 0))
    (run / "more").symlink_to(tmp_path / "folder")
    assert total(make_index(tmp_path / "cache", run)) == 24


def test_checkpoints_figures_and_alarms_are_no_rollouts(run: Path) -> None:
    write_alarms(run)
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/step-1/x.jsonl").write_text("x")
    names = [file.name for file in open_sources([run]).scan()]
    assert names == [f"trajectories/step-00000{n}.jsonl.gz" for n in (1, 2, 3)]


def test_what_an_alarm_put_aside_is_shown_once(run: Path, tmp_path: Path) -> None:
    for step in (2, 9):
        for alarm in (3, 4):
            folder = run / f"alarms/step-00000{alarm}"
            folder.mkdir(parents=True, exist_ok=True)
            write_trajectories(folder / f"step-00000{step}.jsonl.gz", group(step, 0))
    index = make_index(tmp_path / "cache", run)
    assert total(index) == 24 + 4
    assert total(index, step="9") == 4


def test_a_run_before_its_first_step_may_be_opened(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    assert total(make_index(tmp_path / "cache", run)) == 0


@pytest.mark.parametrize("kind", ["missing", "empty", "two folders"])
def test_paths_that_stand_for_nothing_are_clear_errors(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    if kind != "missing":
        folder.mkdir()
    paths = [folder, folder] if kind == "two folders" else [folder]
    with pytest.raises(DataError, match="folder"):
        open_sources(paths)
