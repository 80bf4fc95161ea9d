"""The on-disk cache: right answers, counted hits, no failures kept, many users at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from evenhand.core.errors import ConfigError, DataError
from evenhand.retrieval import CachedRetriever, CacheStats, SearchResult
from evenhand.testing.retrievers import ScriptedRetriever
from evenhand.trajectory.protocol import Document

TABLE = {
    "a": [Document("1", 'T"', "x\ny", 0.1 + 0.2), Document("2", "é", "🍐", -1.0)],
    "b": [Document("3", "", "")],
    "none": [],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sqlite"


def test_a_second_search_is_answered_from_the_file_exactly(path):
    base = ScriptedRetriever(TABLE)
    with CachedRetriever(base, path) as cache:
        first = cache.search(["a", "b", "none", ""], 3)
        assert cache.stats == CacheStats(hits=0, misses=3)
        assert cache.search(["none", "a", "", "b"], 3) == [first[2], first[0], first[3], first[1]]
        assert cache.stats == CacheStats(hits=3, misses=3)
    with CachedRetriever(base, path) as cache:
        assert cache.search(["a"], 3)[0].documents == tuple(TABLE["a"])
        assert cache.stats == CacheStats(hits=1, misses=0)
    assert base.calls == [["a", "b", "none"]]


def test_only_what_is_missing_is_passed_on_and_once(path):
    base = ScriptedRetriever(TABLE)
    with CachedRetriever(base, path) as cache:
        cache.search(["a"], 3)
        results = cache.search(["b", "a", "b", "b"], 3)
        assert cache.stats == CacheStats(hits=3, misses=2)
    assert [[d.id for d in r.documents] for r in results] == [["3"], ["1", "2"], ["3"], ["3"]]
    assert base.calls == [["a"], ["b"]]


def test_failures_are_never_kept(path):
    with CachedRetriever(ScriptedRetriever(TABLE, failing=["a"]), path) as cache:
        assert cache.search(["a", "b"], 3)[0].error == "scripted failure"
        assert cache.search(["a", "b"], 3)[0].error == "scripted failure"
        assert cache.stats == CacheStats(hits=1, misses=3)
    with CachedRetriever(ScriptedRetriever(TABLE), path) as cache:
        assert cache.search(["a"], 3)[0].error is None


def test_another_k_query_or_retriever_is_another_entry(path):
    base = ScriptedRetriever(TABLE)
    with CachedRetriever(base, path) as cache:
        cache.search(["a"], 1)
        assert len(cache.search(["a"], 2)[0].documents) == 2
    other = ScriptedRetriever({"a": TABLE["b"]}, fingerprint="other")
    with CachedRetriever(other, path) as cache:
        assert [d.id for d in cache.search(["a"], 2)[0].documents] == ["3"]
    with CachedRetriever(other, path, fingerprint="third") as cache:
        cache.search(["a"], 2)
        assert cache.stats.misses == 1


def test_a_retriever_that_cannot_tell_what_it_is_needs_a_fingerprint(path):
    base = ScriptedRetriever(TABLE, fingerprint=None)
    with pytest.raises(ConfigError, match="needs a fingerprint"):
        CachedRetriever(base, path)
    with CachedRetriever(base, path, fingerprint="mine") as cache:
        assert cache.search(["b"], 1)[0].documents == tuple(TABLE["b"])


def test_what_a_users_own_retriever_does_fails_its_query_and_is_not_kept(path):
    class Mine:
        def search(self, queries, _):
            if "raise" in queries:
                raise ValueError("defect")
            return [SearchResult((Document(n, "t", "x", np.float32(1.5)),)) for n in queries]

    for _ in range(2):
        with CachedRetriever(Mine(), path, fingerprint="mine") as cache:
            good, bad = cache.search(["a", "raise"], 3)
            assert good.documents == (Document("a", "t", "x", 1.5),)
            assert bad.error == "ValueError: defect"
    assert cache.stats == CacheStats(hits=1, misses=1)


def test_threads_share_a_cache(path):
    table = {f"q{n}": [Document(str(n), "", "")] for n in range(50)}
    with CachedRetriever(ScriptedRetriever(table), path) as cache:

        def ask(start):
            queries = [f"q{(start + n) % 50}" for n in range(50)]
            return [[d.id for d in r.documents] for r in cache.search(queries, 1)] == [
                [query[1:]] for query in queries
            ]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, range(40)))
        assert cache.stats.hits + cache.stats.misses == 40 * 50
        assert cache.stats.faults == 0


def test_processes_share_a_cache(path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from evenhand.trajectory.protocol import Document\n"
        "from evenhand.retrieval import CachedRetriever\n"
        "from evenhand.testing.retrievers import ScriptedRetriever\n"
        "table = {f'q{n}': [Document(str(n), '', '')] for n in range(60)}\n"
        "with CachedRetriever(ScriptedRetriever(table), Path(sys.argv[1])) as cache:\n"
        "    for n in range(60):\n"
        "        (result,) = cache.search([f'q{n}'], 1)\n"
        "        assert result.documents[0].id == str(n)\n"
        "    assert cache.stats.faults == 0, cache.stats\n"
    )
    users = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(4)]
    assert [user.wait(timeout=120) for user in users] == [0, 0, 0, 0]
    with CachedRetriever(ScriptedRetriever({}), path) as cache:
        cache.search([f"q{n}" for n in range(60)], 1)
        assert cache.stats == CacheStats(hits=60, misses=0)


def test_a_file_that_is_no_cache_is_a_data_error(path):
    path.write_bytes(b"something else, and long enough to look at " * 100)
    with pytest.raises(DataError, match="give another file or delete it"):
        CachedRetriever(ScriptedRetriever(TABLE), path)
    with pytest.raises(DataError, match="cannot be opened"):
        CachedRetriever(ScriptedRetriever(TABLE), path / "below" / "a file")


def test_a_cache_that_breaks_while_in_use_does_not_stop_the_search(path):
    cache = CachedRetriever(ScriptedRetriever(TABLE), path)
    cache.close()
    assert cache.search(["b"], 1)[0].documents == tuple(TABLE["b"])
    assert cache.stats.faults == 2
    assert cache.stats.misses == 1


def test_a_cache_works_on_both_sides_of_a_fork(path):
    import os

    with CachedRetriever(ScriptedRetriever(TABLE), path) as cache:
        cache.search(["a"], 3)
        child = os.fork()
        if child == 0:
            cache.search(["a", "b"], 3)
            os._exit(0 if cache.stats == CacheStats(hits=1, misses=2) else 1)
        assert os.waitpid(child, 0)[1] == 0
        cache.search(["b"], 3)
        assert cache.stats == CacheStats(hits=1, misses=1)
