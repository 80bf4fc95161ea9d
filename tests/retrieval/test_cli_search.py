"""`evenhand search index | query | serve`."""

from __future__ import annotations

import gzip
import io
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

from evenhand.cli import search
from evenhand.cli.common import printable, read_settings
from evenhand.cli.search import _build_settings, app
from evenhand.core.errors import ConfigError, DataError, EvenhandError, RetrievalError
from evenhand.retrieval import Bm25Retriever, DenseRetriever, read_manifest

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
        (["--set", "k1=abc"], "k1 must be a number"),
        (["--set", "k1=Infinity"], "k1 must be a finite number"),
        (["--set", "threads=abc"], "no setting 'threads'"),
        (["--encoder", "x"], "goes with --kind dense"),
        (["--kind", "dense"], "needs --encoder"),
    ],
)
def test_a_wrong_setting_of_index_is_an_error(corpus, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run("index", corpus, "-o", tmp_path / "index", *options)
    assert not (tmp_path / "index").exists()


def test_index_takes_names_of_sets_from_a_data_folder(corpus, tmp_path):
    (tmp_path / "data" / "corpora").mkdir(parents=True)
    corpus.rename(tmp_path / "data" / "corpora" / "nq_corpus.jsonl.gz")
    for name in ("nq", "union"):
        result = run("index", name, "--data", tmp_path / "data", "-o", tmp_path / name)
        assert "3 passages" in result.stdout
    with pytest.raises(ConfigError, match="nowhere"):
        run("index", "nowhere", "--data", tmp_path / "data", "-o", tmp_path / "nowhere")


def test_a_prefix_keeps_its_blank():
    given = read_settings(["query_prefix=query: ", " passage_prefix =passage: "])
    assert _build_settings(DenseRetriever.build, given) == {
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
    }


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


def test_a_dash_as_file_is_standard_output(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("query", folder, "red apple", "-o", "-")
    assert json.loads(result.stdout)["documents"][0]["id"] == "p10"
    assert not (tmp_path / "-").exists()


def test_an_index_of_another_corpus_is_refused_on_request(folder, corpus, tmp_path):
    assert run("query", folder, "red apple", "--corpus", corpus).exit_code == 0
    (tmp_path / "other.jsonl").write_text('{"id": "1", "contents": "x"}\n')
    with pytest.raises(DataError, match="another corpus"):
        run("query", folder, "red apple", "--corpus", tmp_path / "other.jsonl")


def test_what_a_passage_holds_is_shown_as_it_is_but_for_control_characters():
    shown = run("query", "retrieval_plugins:hostile", "q", "[bold]bad\x1b[2J").stdout
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert shown.count("\ufffd[2Jwiped :cat: [red]C:\\") == 2
    assert "\\\\" not in shown
    assert "[bold]bad\ufffd[2J" in shown


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


def test_query_goes_on_when_a_users_own_retriever_raises(folder):
    result = run("query", "retrieval_plugins:raising", "q", "bad", "--json")
    assert result.exit_code == 0
    q, bad = (json.loads(line) for line in result.stdout.splitlines())
    assert q["documents"][0]["id"] == "mine"
    assert bad["error"] == "ValueError: scripted defect"
    fused = run("query", folder, "red", "bad", "--json", "--fuse", "retrieval_plugins:raising")
    red, bad = (json.loads(line) for line in fused.stdout.splitlines())
    assert red["documents"]
    assert "scripted defect" in bad["error"]


def test_fused_and_reranked_sources_have_settings(folder):
    options = ["--fuse", folder, "--set", "fuse.k0=1", "--set", "fuse.weights=[1, 3]"]
    result = run("query", folder, "red apple", "--json", *options)
    assert json.loads(result.stdout)["documents"][0]["score"] == 4 / 2
    options = ["--rerank", "retrieval_plugins:constant", "--set", "rerank.depth=1"]
    result = run("query", folder, "fruit tree", "-k", 1, "--json", *options)
    assert [d["id"] for d in json.loads(result.stdout)["documents"]] == ["p1"]


def test_a_cache_over_ones_own_retriever_takes_a_fingerprint(tmp_path):
    cached = ["--cache", tmp_path / "cache.sqlite", "--json"]
    with pytest.raises(ConfigError, match="give fingerprint"):
        run("query", "retrieval_plugins:make", "q", *cached)
    result = run("query", "retrieval_plugins:make", "q", *cached, "--set", "fingerprint=v1")
    assert json.loads(result.stdout)["documents"][0]["id"] == "mine"


def test_a_log_level_that_is_none_is_refused(folder):
    result = run("serve", folder, "--log-level", "foo")
    assert result.exit_code == 2
    assert "critical" in result.stderr


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
        (["query", "FOLDER", "q", "--set", "path=x"], ConfigError, "path"),
        (["query", "FOLDER", "q", "--set", "spec=x"], ConfigError, "no setting 'spec'"),
        (["query", "FOLDER", "q", "--set", "corpus=c.jsonl"], ConfigError, "--corpus"),
        (["query", "FOLDER", "q", "--set", "fuse.k0=1"], ConfigError, "goes with --fuse"),
        (["query", "FOLDER", "q", "--set", "fingerprint=x"], ConfigError, "cache=FILE"),
        (["query", "FOLDER", "q", "--fuse", "FOLDER", "--set", "fuse.k0=abc"], ConfigError, "k0"),
        (["query", "http://h", "q", "--set", "headers=x"], ConfigError, "headers must be"),
        (["query", "http://[::1/retrieve", "q"], ConfigError, "address"),
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


def test_printable_text_drives_no_terminal():
    assert printable("a\tb\nc\x1b[0m\r\x00\x7f\x9bé") == (
        "a\tb\nc\ufffd[0m\ufffd\ufffd\ufffd\ufffdé"
    )


def test_index_shows_progress_with_a_count_on_a_terminal_only_after_a_while(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for wait, expected in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(search, "PROGRESS_AFTER", wait)
        monkeypatch.setattr(sys, "stderr", Terminal())
        with search._progress() as report:
            passed = list(search._counted(THREE * 1000, report))
        assert len(passed) == 3000
        assert ("3,000" in sys.stderr.getvalue()) == expected
