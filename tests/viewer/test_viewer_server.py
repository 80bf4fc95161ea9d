"""The server: whom it answers, what it never serves, and what its pages say."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenhand.core.errors import ConfigError, DataError
from evenhand.pages.viewer import app
from evenhand.pages.viewer.app import Viewer, host_name
from evenhand.pages.viewer.query import Filter
from evenhand.pages.viewer.serve import PORT, listen_near
from evenhand.trajectory import write_trajectories
from run_builder import group, write_alarms, write_run
from viewer_server import get, make_index, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("viewer")
    run = write_run(base / "run", steps=3, groups=12)
    write_alarms(run, [2])
    return base


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(make_index(folder / "cache", folder / "run")) as address:
        yield address


# --- whom it answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_its_own_names_are_answered(address: str, name: str) -> None:
    port = address.partition(":")[2]
    assert get(address, host=f"{name}:{port}")[0] == 200
    assert get(address, host=name)[0] == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example",
     "", "127.0.0.2", "192.168.0.1", "localhost@evil.example", "localhost:80x", "127.0.0.1 evil"],
)  # fmt: skip
def test_another_host_name_is_refused_on_every_path(address: str, name: str) -> None:
    for path in ("/", "/state", "/rows", "/rollout/1-1", "/static/style.css"):
        status, _, body = get(address, path, host=name)
        assert status in (400, 421), path
        assert "rollouts" not in body


def test_a_second_host_header_is_refused(address: str) -> None:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(f"GET / HTTP/1.1\r\nHost: {address}\r\nHost: evil.example\r\n"
                     "Connection: close\r\n\r\n".encode())  # fmt: skip
        assert line.recv(100).split()[1] in (b"400", b"421")


def test_bound_to_every_address_numbers_are_answered_and_names_are_not(folder: Path) -> None:
    with served(make_index(folder / "cache", folder / "run"), host="0.0.0.0") as address:
        assert get(address, host="192.168.0.1:80")[0] == 200
        assert get(address, host="evil.example")[0] == 421


@pytest.mark.parametrize(
    ("header", "name"),
    [("a:80", "a"), ("A", "a"), ("[::1]:80", "::1"), ("a:b", "a:b"), ("", "")],
)
def test_the_name_of_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent_to_it(address: str, method: str) -> None:
    assert get(address, "/", method=method)[0] == 405


# --- what it never serves ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/../recipe.toml", "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py",
     "/static/viewer.py", "/recipe.toml", "/metrics.jsonl", "/rollout/..%2f..%2frecipe.toml",
     "/rollout/%2fetc%2fpasswd", "//etc/passwd", "/static//etc/passwd", "/docs", "/openapi.json",
     "/rollout/1-99999", "/rollout/x", "/nothing"],
)  # fmt: skip
def test_other_paths_are_not_found(address: str, path: str) -> None:
    status, _, body = get(address, path)
    assert status == 404
    assert "steps = 6" not in body
    assert "Traceback" not in body


def test_every_answer_carries_a_strict_policy(address: str) -> None:
    for path in ("/", "/rows", "/state", "/static/viewer.js", "/nothing"):
        _, headers, _ = get(address, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    _, headers, _ = get(address, host="evil.example")
    assert "content-security-policy" in headers


def test_pages_hold_no_inline_script_and_no_inline_style(address: str) -> None:
    key = rows_of(address)[0]
    for path in ("/", "/rows", f"/rollout/{key}"):
        body = get(address, path)[2]
        assert "<style" not in body
        assert " style=" not in body
        assert " on" + "click" not in body
        for tag in body.split("<script")[1:]:
            assert tag.startswith(' src="static/')


def rows_of(address: str, query: str = "") -> list[str]:
    body = get(address, f"/rows{query}")[2]
    return [part.partition('"')[0] for part in body.split('data-key="')[1:]]


# --- what its pages say --------------------------------------------------------------------------


def test_the_first_page_holds_the_first_part_of_the_list(address: str) -> None:
    status, _, body = get(address)
    assert status == 200
    assert '<b id="total">144</b>' in body
    assert body.count('class="row"') == 60
    assert "Who built it?" in body


def test_the_parts_of_the_list_are_the_whole_list(address: str) -> None:
    keys = [key for offset in (0, 60, 120) for key in rows_of(address, f"?offset={offset}")]
    assert len(set(keys)) == 144
    assert 'data-next="60"' in get(address, "/rows")[2]
    assert "data-next" not in get(address, "/rows?offset=120")[2]


def test_a_filter_in_the_address_narrows_the_first_page(address: str) -> None:
    body = get(address, "/?step=2&reward=1")[2]
    assert '<b id="total">24</b>' in body
    assert 'name="step" value="2"' in body


@pytest.mark.parametrize("query", ["?step=x", "?offset=-1", "?offset=x", "?sort=x", "?flag=x"])
def test_a_wrong_filter_is_one_sentence(address: str, query: str) -> None:
    status, headers, body = get(address, f"/rows{query}")
    assert status == 400
    assert headers["content-type"].startswith("text/plain")
    assert "\n" not in body


def test_a_rollout_stands_with_its_group_and_its_marks(address: str) -> None:
    key = rows_of(address, "?step=2&searches=2&question=Number+3")[0]
    body = get(address, f"/rollout/{key}")[2]
    assert body.count("member-card") == 4
    assert "4 rollouts in the group, mean reward 0.5" in body
    assert ">silver</span>" in body
    assert "supporting page" in body
    assert "A +1.000, c 0.50" in body
    assert "entropy rose and fell" in body  # the alarm of its step


def test_the_accepted_answer_is_marked_in_documents(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.jsonl", group(1, 0))
    index = make_index(tmp_path / "cache", tmp_path / "a.jsonl")
    viewer = Viewer(index)
    key = index.rows(Filter(searches="2"))[1][0].key
    assert "<mark>" not in viewer.group(key)  # "x" is too short to mark


def test_alarms_are_shown_and_filter(address: str) -> None:
    state = json.loads(get(address, "/state")[2])
    assert state["alarms"] == [{"step": 2, "alarm": "collapse", "message": "entropy rose and fell"}]
    assert 'data-total="48"' in get(address, "/rows?alarm=collapse")[2]
    assert 'data-total="0"' in get(address, "/rows?alarm=other")[2]


def test_markup_in_a_rollout_is_text_everywhere(tmp_path: Path) -> None:
    evil = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    write_trajectories(tmp_path / "a.jsonl", group(1, 0, text=evil))
    index = make_index(tmp_path / "cache", tmp_path / "a.jsonl")
    viewer = Viewer(index)
    key = index.rows(Filter())[1][0].key
    for page in (viewer.page({}), viewer.rows({}), viewer.group(key),
                 viewer.page({"text": evil, "step": evil[:0]})):  # fmt: skip
        assert "<img" not in page
        assert "<script>" not in page


def test_half_surrogate_pairs_do_not_break_a_page(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a.jsonl", group(1, 0, text="bad \ud800 half"))
    index = make_index(tmp_path / "cache", tmp_path / "a.jsonl")
    with served(index) as address:
        assert get(address)[0] == 200
        assert get(address, f"/rollout/{rows_of(address)[0]}")[0] == 200


def test_a_new_step_shows_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "REFRESH_SECONDS", 0.0)
    run = write_run(tmp_path / "run", steps=2)
    with served(make_index(tmp_path / "cache", run)) as address:
        before = json.loads(get(address, "/state")[2])
        write_trajectories(run / "trajectories/step-000003.jsonl.gz", group(3, 0))
        after = json.loads(get(address, "/state")[2])
        assert after["changes"] > before["changes"]
        assert after["total"] == before["total"] + 4
        assert after["last_step"] == 3
        assert after["status"] == "running"


def test_a_damaged_line_in_the_middle_of_a_group_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trajectories(path, group(1, 0))
    broken = path.read_text().replace('"n_tokens": 8', '"n_tokens": -8', 1)
    path.write_text(broken)
    with served(make_index(tmp_path / "cache", path)) as address:
        status, _, body = get(address, f"/rollout/{rows_of(address)[0]}")
        assert status == 404
        assert "a.jsonl, line 1, field segments" in body


def test_a_tokenizer_that_is_not_there_is_an_error(folder: Path, tmp_path: Path) -> None:
    index = make_index(folder / "cache", folder / "run")
    with pytest.raises(DataError, match="no tokenizer"):
        Viewer(index, str(tmp_path / "none"))


# --- ports ---------------------------------------------------------------------------------------


def test_a_port_in_use_that_was_asked_for_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen_near("127.0.0.1", port)


def test_without_a_port_the_next_free_one_is_taken() -> None:
    with listen_near("127.0.0.1", None) as first, listen_near("127.0.0.1", None) as second:
        one, other = first.getsockname()[1], second.getsockname()[1]
    assert PORT <= one < other


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen on no.such.host.invalid"):
        listen_near("no.such.host.invalid", None)
