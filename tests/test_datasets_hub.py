"""The hub's layout, read by the real `datasets` library from a local copy that the test writes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenhand.core.errors import DataError
from evenhand.datasets import Question, read_hub, verl_rows, write_parquet

CARD = """---
configs:
  - config_name: hotpotqa
    data_files:
      - split: train
        path: hotpotqa/train.jsonl
      - split: dev
        path: hotpotqa/dev.jsonl
  - config_name: popqa
    data_files:
      - split: test
        path: popqa/test.jsonl
---
"""
FACTS = {"title": ["Louvre", "Paris"], "sent_id": [0, 1]}
ROWS = [
    {"id": "dev_0", "question": "Where is it?", "golden_answers": ["Paris"],
     "metadata": {"type": "bridge", "level": "hard", "supporting_facts": FACTS}},
    {"id": "dev_1", "question": "Is it?", "golden_answers": ["yes", "yeah"],
     "metadata": {"type": "comparison"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library and what it imports
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        found = pytest.importorskip("datasets")
        found.disable_progress_bars()
        yield found


@pytest.fixture
def copy(tmp_path: Path) -> str:
    (tmp_path / "README.md").write_text(CARD, encoding="utf-8")
    for name, rows in (("hotpotqa/dev", ROWS), ("hotpotqa/train", ROWS[:1]), ("popqa/test", ROWS)):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("library")
def test_a_split_of_the_hub_is_read(copy: str) -> None:
    first, second = read_hub("hotpotqa", "dev", source=copy)
    assert first.supporting_titles == ("Louvre", "Paris")
    assert (first.id, first.dataset, first.golden_answers) == ("dev_0", "hotpotqa", ("Paris",))
    assert first.metadata["level"] == "hard"
    assert second == Question(
        "dev_1", "Is it?", ("yes", "yeah"), "hotpotqa", metadata={"type": "comparison"}
    )
    assert len(list(read_hub("hotpotqa", "train", source=copy))) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("name", "part"), [("hotpotqa", "test"), ("nq", "test")])
def test_what_the_hub_lacks_is_a_data_error_with_a_remedy(copy: str, name: str, part: str) -> None:
    with pytest.raises(DataError, match=rf"cannot load {name}:{part} from .*--data"):
        list(read_hub(name, part, source=copy))


@pytest.mark.filterwarnings("ignore")
def test_verls_loader_reads_an_exported_file(tmp_path: Path, library: Any) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    question = Question("a", "Where?", ("Paris",), "nq", hops=1)
    write_parquet(path, verl_rows([question], lambda text: f"Question: {text}"))
    # As verl/utils/dataset/rl_dataset.py loads it.
    (row,) = library.load_dataset("parquet", data_files=str(path))["train"]
    assert row["prompt"] == [{"role": "user", "content": "Question: Where?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Paris"]}}
    assert row["extra_info"]["index"] == 0
