"""Saved indexes: whole or absent, tied to their corpus, never trusted blindly."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from retrieval_helpers import THREE, TWINS, BagEncoder

from evenhand.core.errors import ConfigError, DataError
from evenhand.retrieval import Bm25Retriever, DenseRetriever, corpus_hash, load_index, read_manifest
from evenhand.retrieval.manifest import Manifest, new_index
from evenhand.trajectory.protocol import Document


def build(kind, documents):
    if kind == "bm25":
        return Bm25Retriever.build(documents, backend="numpy")
    pytest.importorskip("faiss")
    return DenseRetriever.build(documents, BagEncoder())


def settings_of(kind):
    return {"backend": "numpy"} if kind == "bm25" else {"encoder": BagEncoder()}


@pytest.fixture(params=["bm25", "dense"])
def kind(request):
    return request.param


def test_a_loaded_index_answers_as_the_built_one(kind, tmp_path):
    built = build(kind, THREE + TWINS)
    built.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", **settings_of(kind))
    queries = ["fruit", "red apple", "same words", "tree"]
    assert loaded.search(queries, 4) == built.search(queries, 4)
    assert loaded.info == built.info


def test_a_memory_mapped_index_answers_the_same(tmp_path):
    built = build("bm25", THREE)
    built.save(tmp_path / "index")
    for backend in ("numpy", "auto"):
        mapped = load_index(tmp_path / "index", memory_map=True, backend=backend)
        assert mapped.search(["red fruit"], 3) == built.search(["red fruit"], 3)


def test_the_manifest_says_what_the_index_is(kind, tmp_path):
    build(kind, THREE).save(tmp_path / "index")
    record = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert record["schema"] == "evenhand.index/1"
    assert record["kind"] == kind
    assert record["corpus_hash"] == corpus_hash(THREE)
    assert record["passages"] == 3
    assert record["versions"]["evenhand"]
    names = {path.name for path in (tmp_path / "index").iterdir()} - {"manifest.json"}
    assert set(record["files"]) == names


@pytest.mark.parametrize(
    "other",
    [
        THREE[:2],
        THREE[::-1],
        [*THREE, Document("new", "", "")],
        [*THREE[:2], Document("p1", "Fruit tree", "a tree with fruit.")],
        [*THREE[:2], Document("p2", "Fruit tree", "a tree with fruit")],
        [*THREE[:2], Document("p1", "Fruit", "a tree with fruit")],
    ],
    ids=["fewer", "order", "more", "text", "id", "title"],
)
def test_an_index_of_another_corpus_is_refused_with_both_hashes(kind, tmp_path, other):
    # RUC-NLPIR/FlashRAG #95, #12
    build(kind, THREE).save(tmp_path / "index")
    with pytest.raises(DataError, match="built on another corpus") as caught:
        load_index(tmp_path / "index", other, **settings_of(kind))
    assert corpus_hash(THREE) in str(caught.value)
    assert corpus_hash(other) in str(caught.value)
    with pytest.raises(DataError, match="built on another corpus"):
        load_index(tmp_path / "index", corpus_hash(other), **settings_of(kind))
    load_index(tmp_path / "index", iter(THREE), **settings_of(kind))


def damage_battery(folder):
    """Yield (action, file) for every file of an index and every way to damage it."""
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        yield (lambda p: p.unlink()), path
        yield (lambda p: p.write_bytes(b"")), path
        yield (lambda p, n=size: p.write_bytes(p.read_bytes()[: n // 2])), path
        yield (lambda p: p.write_bytes(p.read_bytes() + b"\0")), path
        yield (lambda p, n=size: p.write_bytes(b"\0" * n)), path
        yield (lambda p, n=size: p.write_bytes(b"\xff" * n)), path


def test_a_damaged_folder_is_a_data_error_whatever_the_damage(kind, tmp_path):
    build(kind, THREE + TWINS).save(tmp_path / "index")
    for at, (act, path) in enumerate(damage_battery(tmp_path / "index")):
        copy = tmp_path / str(at)
        shutil.copytree(tmp_path / "index", copy)
        act(copy / path.name)
        with pytest.raises(
            DataError, match=r"build it again|build the index again|has no manifest"
        ):
            load_index(copy, verify=True, **settings_of(kind))
        # Sizes alone cannot show a change in place, but it must not crash either.
        with contextlib.suppress(DataError):
            load_index(copy, **settings_of(kind)).search(["same fruit"], 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "sparse"),
        ("kind", None),
        ("schema", "evenhand.index/99"),
        ("passages", 2),
        ("passages", "3"),
        ("parameters", {}),
        ("parameters", []),
        ("files", {"../secret": {"bytes": 1, "sha256": ""}}),
        ("files", {"corpus.bin": 7}),
        ("corpus_hash", 5),
    ],
)
def test_a_manifest_that_says_something_else_is_a_data_error(kind, tmp_path, field, value):
    build(kind, THREE).save(tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {field: value}))
    with pytest.raises(DataError):
        load_index(tmp_path / "index", **settings_of(kind))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_a_manifest_that_is_no_json_object_is_a_data_error(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError):
        read_manifest(tmp_path)


def test_a_folder_or_file_that_is_no_index_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(DataError, match=str(path)):
            load_index(path)


def test_a_build_that_fails_leaves_nothing_and_keeps_the_old_index(tmp_path):
    build("bm25", THREE).save(tmp_path / "index")
    before = read_manifest(tmp_path / "index")
    manifest = Manifest("bm25", "hash", 1, {})

    def interrupted():
        with new_index(tmp_path / "index", manifest, overwrite=True) as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert read_manifest(tmp_path / "index", verify=True) == before


def test_an_index_is_replaced_only_when_asked(tmp_path):
    build("bm25", THREE).save(tmp_path / "index")
    with pytest.raises(DataError, match="holds an index already"):
        build("bm25", TWINS).save(tmp_path / "index")
    build("bm25", TWINS).save(tmp_path / "index", overwrite=True)
    assert load_index(tmp_path / "index", TWINS).info.passages == 5
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_folder_of_other_files_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is not an index"):
        build("bm25", THREE).save(tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    build("bm25", THREE).save(tmp_path / "empty")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_folder_that_cannot_be_written_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot write"):
        build("bm25", THREE).save(tmp_path / "file" / "index")


def test_an_unknown_setting_of_an_index_names_the_nearest(tmp_path):
    build("bm25", THREE).save(tmp_path / "index")
    with pytest.raises(ConfigError, match="no setting 'thread'; did you mean 'threads'"):
        load_index(tmp_path / "index", thread=2)
