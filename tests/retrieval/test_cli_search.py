"""`evenhand search index | query | serve`."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from retrieval_helpers import THREE, served
from typer.testing import CliRunner

from evenhand.cli.search import app
from evenhand.errors import ConfigError, DataError, EvenhandError, RetrievalError
from evenhand.retrieval import Bm25Retriever, read_manifest

pytestmark = pytest.mark.filterwarnings("default")


def run(*arguments, text=None):
    """Run a command; errors of evenhand come through, as the main command expects them."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    if isinstance(result.exception, EvenhandError):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path):
    Bm25Retriever.build(THREE, backend="numpy").save(tmp_path / "built")
    return tmp_path / "built"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for d in THREE:
            lines.write(json.dumps({"id": d.id, "title": d.title, "text": d.text}) + "\n")
    return path


def test_index_writes_a_folder_that_query_reads(corpus, tmp_path):
    pytest.importorskip("evenhand.datasets")
    result = run(
        "index", corpus, "-o", tmp_path / "index", "--set", "k1=1.2", "--set", "stopwords=none"
    )
    assert result.exit_code == 0
    assert "3 passages" in result.stdout
    manifest = read_manifest(tmp_path / "index", verify=True)
    assert manifest.parameters["k1"] == 1.2
    found = json.loads(run("query", tmp_path / "index", "red apple", "--json").stdout)
    assert found["documents"][0]["id"] == "p10"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "k2=1"], "no setting 'k2'; did you mean 'k1'"),
        (["--set", "k1"], "expected key=value"),
        (["--set", "method=bm99"], "method must be one of"),
        (["--encoder", "x"], "goes with --kind dense"),
        (["--kind", "dense"], "needs --encoder"),
    ],
)
def test_a_wrong_setting_of_index_is_an_error(corpus, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run("index", corpus, "-o", tmp_path / "index", *options)
    assert not (tmp_path / "index").exists()


def test_an_index_that_is_there_is_noticed_before_the_work(folder, tmp_path):
    with pytest.raises(DataError, match="--overwrite"):
        run("index", tmp_path / "absent.jsonl", "-o", folder)


def test_query_prints_one_json_line_a_query_in_order(folder):
    result = run("query", folder, "red apple", "zebra", "-k", 1, "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["query"] for line in lines] == ["red apple", "zebra"]
    assert lines[0]["documents"][0].keys() == {"id", "title", "text", "score"}
    assert lines[1] == {"query": "zebra", "documents": [], "error": None}


def test_query_reads_lines_from_standard_input_or_a_file(folder, tmp_path):
    piped = run("query", folder, "--json", text="red apple\n\ngreen pear\n").stdout
    (tmp_path / "queries.txt").write_text("red apple\ngreen pear\n")
    assert run("query", folder, "--json", "-i", tmp_path / "queries.txt").stdout == piped
    assert [json.loads(line)["documents"][0]["id"] for line in piped.splitlines()] == ["p10", "p9"]


def test_query_writes_a_file_on_request(folder, tmp_path):
    result = run("query", folder, "red apple", "-o", tmp_path / "found.jsonl.gz")
    assert result.stdout == ""
    with gzip.open(tmp_path / "found.jsonl.gz", "rt", encoding="utf-8") as lines:
        assert json.loads(lines.read())["documents"][0]["title"] == "Apple"


def test_query_shows_titles_to_a_person(folder):
    shown = run("query", folder, "red apple", "zebra", "-k", 1).stdout
    assert "Apple" in shown
    assert "p10" in shown
    assert "nothing found" in shown


def test_query_asks_a_server_and_says_how_many_failed():
    with served(Bm25Retriever.build(THREE, backend="numpy")) as url:
        result = run("query", f"{url}/retrieve", "red apple", "--json")
        assert json.loads(result.stdout)["documents"][0]["id"] == "p10"
        with pytest.raises(RetrievalError, match=r"every query failed; the first: .*status 404"):
            run("query", f"{url}/nowhere", "red apple", "--set", "retries=0")


def test_query_goes_on_when_some_queries_fail():
    result = run("query", "retrieval_plugins:moody", "q", "bad", "--json")
    assert result.exit_code == 0
    assert "1 of 2 queries failed; the first: scripted failure" in result.stderr
    assert json.loads(result.stdout.splitlines()[1])["error"] == "scripted failure"


def test_sources_can_be_fused_reranked_and_cached(folder, tmp_path):
    options = ["--fuse", folder, "--rerank", "retrieval_plugins:constant"]
    cached = [*options, "--cache", tmp_path / "cache.sqlite"]
    for _ in range(2):
        result = run("query", folder, "fruit tree", "--json", *cached)
        assert [d["id"] for d in json.loads(result.stdout)["documents"]] == ["p1", "p10", "p9"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["query", "absent-folder", "q"], ConfigError, "no retriever 'absent-folder'"),
        (["query", "FOLDER", "q", "-k", "0"], ConfigError, "k must be"),
        (["query", "FOLDER", "q", "--set", "thread=1"], ConfigError, "did you mean 'threads'"),
        (["query", "FOLDER", "-i", "absent.txt"], DataError, "does not exist"),
        (["serve", "FOLDER", "--host", "256.1.1.1"], ConfigError, "cannot listen"),
    ],
)
def test_wrong_use_is_one_sentence(folder, arguments, kind, message):
    with pytest.raises(kind, match=message) as caught:
        run(*[str(folder) if a == "FOLDER" else a for a in arguments])
    assert "\n" not in str(caught.value)


def test_a_query_that_is_not_utf8_names_its_line(folder, tmp_path):
    (tmp_path / "queries.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(DataError, match=r"queries\.txt:2"):
        run("query", folder, "-i", tmp_path / "queries.txt")


def test_serve_answers_and_stops(folder):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = (
        f"from evenhand.cli.search import app; app(['serve', {str(folder)!r}, '--port', '{port}'])"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, env=os.environ, text=True
    )
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    assert json.load(answer)["passages"] == 3
                break
            except OSError:
                time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
        assert server.returncode == 0
        assert f"listening on 127.0.0.1:{port}" in log
    finally:
        server.kill()
        server.wait()
