"""BM25 on the real corpora: recall of gold titles, speed, memory; bm25s by hand beside it.

    python benchmarks/retrieval.py [--fast] [--rounds 5]

Each side indexes the union of all corpora in a process of its own (for its peak memory); then both
search the same questions in one process, in turns. `--fast` leaves out the recall.

Exit code 1 if a recall is off, if a median ratio of the rates is below 0.9, or if loading
takes more than twice as long as bm25s by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from evenhand.retrieval import Bm25Retriever, Retriever, load_index
from evenhand.trajectory.protocol import Document
from retrieval_data import all_questions, corpus, need_data, questions, union

K = 3
SETS = {  # questions, corpus, recall at 3 and 10 in its own corpus and in the union
    "hotpotqa_dev": ("hotpotqa", 0.66, 0.85, 0.65, 0.83),
    "2wikimultihopqa_dev": ("2wikimultihopqa", 0.60, 0.72, 0.61, 0.72),
    "musique_dev": ("musique", 0.47, 0.60, 0.44, 0.57),
    "nq_test": ("nq", 0.82, 0.92, 0.74, 0.87),
    "popqa_test": ("popqa", 0.66, 0.95, 0.62, 0.92),
}
"""The figures of the data's README, measured there with bm25s by hand."""

TOLERANCE = 0.02
LEAST_RATIO, MOST_LOAD = 0.9, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="leave out the recall")
    parser.add_argument("--rounds", type=int, default=5, help="searches of all questions a side")
    parser.add_argument("--index", choices=["ours", "by hand"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    need_data()
    if options.index:
        print(json.dumps(build(options.index, options.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folders = {side: Path(temporary) / side for side in ("by hand", "ours")}
        for side, folder in folders.items():
            found = in_own_process(side, folder)
            print(
                f"{side:>8}: index {found['seconds']:5.1f} s, peak {found['peak_mib']:.0f} MiB, "
                f"on disk {size(folder):.0f} MiB"
            )
        wrong = speed(folders, options.rounds)
        if not options.fast:
            wrong |= recall(load_index(folders["ours"]))
        sys.exit(wrong)


def build(side: str, folder: Path) -> dict:
    """Index the union and save it; the corpus is read inside the measured time on both sides."""
    start = time.perf_counter()
    if side == "ours":
        Bm25Retriever.build(union()).save(folder)
    else:
        import bm25s
        import Stemmer

        documents = list(union())
        tokens = bm25s.tokenize(
            [f"{d.title} {d.text}" for d in documents],
            stemmer=Stemmer.Stemmer("english"),
            show_progress=False,
        )
        model = bm25s.BM25(backend="numba")
        model.index(tokens, show_progress=False)
        corpus_rows = [{"id": d.id, "title": d.title, "text": d.text} for d in documents]
        model.save(str(folder), corpus=corpus_rows, show_progress=False)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "peak_mib": peak}


def in_own_process(side: str, folder: Path) -> dict:
    command = [sys.executable, __file__, "--index", side, "--folder", str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 2**20


def speed(folders: dict[str, Path], rounds: int) -> int:
    """Search all questions, both sides in turns; print medians and ratios; 1 if one is off."""
    queries = all_questions()
    load: dict[str, list[float]] = {side: [] for side in folders}
    for _ in range(5):
        for side, times in load.items():
            times.append(timed(loader(side, folders[side])))
    for side, times in load.items():
        print(f"{side:>8}: load {statistics.median(times):.2f} s")
    slower = statistics.median(
        ours / hand for ours, hand in zip(load["ours"], load["by hand"], strict=True)
    )
    wrong = slower > MOST_LOAD
    print(f"load ratio {slower:.2f}{'   OFF' if wrong else ''}")
    ours = {threads: load_index(folders["ours"], threads=threads) for threads in (1, 2)}
    hand = ByHand(folders["by hand"])
    for threads in (1, 2):
        sides = {
            "by hand": lambda batch, n=threads: hand.search(batch, n),
            "ours": lambda batch, n=threads: ours[n].search(batch, K),
        }
        for batch_size in (16, len(queries)):
            rates = {side: [] for side in sides}
            for number in range(rounds + 1):
                for side, search in sides.items():
                    rate = rate_of(search, queries, batch_size)
                    if number > 0:  # the first round compiles and warms up
                        rates[side].append(rate)
            pairs = zip(rates["ours"], rates["by hand"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            middle = {side: statistics.median(values) for side, values in rates.items()}
            off = ratio < LEAST_RATIO
            wrong |= off
            print(
                f"{threads} thread{'s' * (threads > 1)}, batches of {batch_size:>5}: "
                f"by hand {middle['by hand']:6.0f}/s   ours {middle['ours']:6.0f}/s   "
                f"ratio {ratio:.2f}{'   OFF' if off else ''}"
            )
    print(f"{len(queries)} questions, k = {K}, {rounds} rounds, {os.cpu_count()} cores")
    return int(wrong)


class ByHand:
    """bm25s as its documentation uses it, with the passages looked up in a list."""

    def __init__(self, folder: Path) -> None:
        import bm25s
        import Stemmer

        self.bm25s = bm25s
        self.model = bm25s.BM25.load(str(folder), load_corpus=True)
        self.stemmer = Stemmer.Stemmer("english")

    def search(self, batch: list[str], threads: int) -> list[list[dict]]:
        words = self.bm25s.tokenize(
            batch, stemmer=self.stemmer, show_progress=False, return_ids=False
        )
        found = self.model.retrieve(words, k=K, n_threads=threads, show_progress=False)
        return found.documents.tolist()


def loader(side: str, folder: Path):
    if side == "ours":
        return lambda: load_index(folder)
    import bm25s

    return lambda: bm25s.BM25.load(str(folder))  # without the passages


def timed(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rate_of(search, queries: list[str], batch_size: int) -> float:
    """Return queries a second."""
    start = time.perf_counter()
    for at in range(0, len(queries), batch_size):
        search(queries[at : at + batch_size])
    return len(queries) / (time.perf_counter() - start)


def recall(common: Retriever) -> int:
    """Print the recall of gold titles beside the published figures; 1 if one is off."""
    wrong = 0
    print("recall of gold titles @3/@10         own corpus    README      union     README")
    for name, (own_name, *published) in SETS.items():
        rows = [row for row in questions(name) if row["metadata"].get("supporting_titles")]
        own = Bm25Retriever.build(corpus(own_name))
        figures = [*title_recall(own, rows), *title_recall(common, rows)]
        off = [abs(a - b) > TOLERANCE for a, b in zip(figures, published, strict=True)]
        wrong += sum(off)
        text = [f"{a:.3f}" for a in figures] + [f"{a:.2f}" for a in published]
        print(
            f"{name:>20} (n = {len(rows):>4})   {text[0]}/{text[1]}   {text[4]}/{text[5]}   "
            f"{text[2]}/{text[3]}   {text[6]}/{text[7]}{'   OFF' if any(off) else ''}"
        )
    return int(wrong > 0)


def title_recall(retriever: Retriever, rows: list[dict]) -> list[float]:
    """Return the mean share of gold titles among the titles of the best 3, and of the best 10."""
    results = retriever.search([row["question"] for row in rows], 10)
    return [
        statistics.mean(
            share(row["metadata"]["supporting_titles"], result.documents[:k])
            for row, result in zip(rows, results, strict=True)
        )
        for k in (3, 10)
    ]


def share(gold: list[str], documents: Iterable[Document]) -> float:
    wanted = set(gold)
    return len(wanted & {document.title for document in documents}) / len(wanted)


if __name__ == "__main__":
    main()
