"""`evenhand data`: list, show, check and export question sets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from evenhand.cli.common import console, plain_table, printable
from evenhand.core.errors import ConfigError, DataError, EvenhandError
from evenhand.core.files import STANDARD_STREAM, check_output, numbered_lines
from evenhand.datasets import catalogue
from evenhand.datasets.catalogue import SETS, UNION
from evenhand.datasets.checks import CorpusIndex, Finding, QuestionReport, check_questions
from evenhand.datasets.corpora import read_corpus, union
from evenhand.datasets.export import Render, verl_rows, write_parquet
from evenhand.datasets.questions import (
    VERL_PREFIX,
    Question,
    question_to_line,
    unique_questions,
    write_questions,
)
from evenhand.trajectory.protocol import Document

app = typer.Typer(
    name="data",
    help="List, show, check and export question sets and corpora.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SHOWN_IDS = 5
"""How many ids a note names before it says how many more there are."""

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Data folder. Default: EVENHAND_DATA, else ../shared/data if there, else the hub.",
    ),
]


class Layout(StrEnum):
    """What `export` writes."""

    VERL = "verl"
    """Parquet for verl: data_source is searchR1_SET."""
    SEARCHR1 = "searchr1"
    """The same for Search-R1 and CalibAdv: data_source is SET."""
    JSONL = "jsonl"
    """FlashRAG's JSON lines."""


# --- output --------------------------------------------------------------------------------------


def _say(text: str, *, err: bool = False) -> None:
    typer.echo(printable(text), err=err)


def _print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], names: int) -> None:
    """Print a table whose first `names` columns are text and the others numbers."""
    table = plain_table(*headers)
    for column in table.columns[:names]:
        column.justify = "left"
    for row in rows:
        # A path or a name may hold square brackets, Rich's markup, or worse.
        table.add_row(*[Text(printable(cell)) for cell in row])
    console().print(table)


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Show on a terminal that work goes on; nothing in a pipe."""
    out = console(err=True)
    with out.status(Text(printable(what))) if out.is_terminal else nullcontext():
        yield


def _share(part: int | None, whole: int | None) -> str:
    if part is None or whole is None:
        return "-"
    return f"{part}/{whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


# --- list ----------------------------------------------------------------------------------------


@app.command("list")
def list_sets(data: DataOption = None) -> None:
    """List the standard sets: splits, questions, own corpus, and where they are found."""
    folder = catalogue.data_folder(data)
    with _working("counting questions and passages"):
        rows, further = _listed(folder, on_hub=not catalogue.is_given(data))
    _print_table(["set", "split", "where", "questions", "golds each", "own corpus"], rows, 3)
    for path, count in further.items():
        _say(f"further corpus: {path} ({count} passages)")


def _listed(folder: Path | None, *, on_hub: bool) -> tuple[list[list[str]], dict[Path, int]]:
    """Return the rows of the table, and the passages of the corpora that belong to no set."""
    rows = []
    for name, each in SETS.items():
        corpus = catalogue.find_corpus(name, folder) if folder else None
        passages = str(_count_lines(corpus)) if corpus else "-"
        for part in each.splits:
            path = catalogue.find_questions(name, part, folder) if folder else None
            if path is None:
                hub = on_hub and part != "dev_inferred"
                rows.append([name, part, "hub" if hub else "not found", "-", "-", "-"])
                continue
            questions = catalogue.load_questions(f"{name}:{part}", data=folder)
            golds = sum(len(question.golden_answers) for question in questions)
            rows.append([name, part, str(path), str(len(questions)),
                         f"{golds / len(questions):.1f}", passages])  # fmt: skip
    further = [
        path
        for path in (catalogue.corpora_in(folder) if folder else [])
        if path.name.partition("_corpus")[0] not in SETS
    ]
    return rows, {path: _count_lines(path) for path in further}


def _count_lines(path: Path) -> int:
    return sum(1 for _ in numbered_lines(path))


# --- show ----------------------------------------------------------------------------------------


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="SET", help="SET, SET:SPLIT or a file.")],
    n: Annotated[int, typer.Option("--n", min=1, help="How many questions.")] = 5,
    identity: Annotated[
        str | None, typer.Option("--id", help="Only the question with this id.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines, with all metadata.")] = False,
    data: DataOption = None,
) -> None:
    """Show questions with their golden answers."""
    questions = catalogue.load_questions(name, data=data)
    if identity is not None:
        chosen = [question for question in questions if question.id == identity]
        if not chosen:
            raise DataError(
                f"{name} has no question with id {identity!r} ({len(questions)} looked at)"
            )
    else:
        chosen = questions[:n]
    if as_json:
        for question in chosen:
            typer.echo(question_to_line(question))
        return
    for question in chosen:
        _say(f"{question.id}: {question.question}")
        _say(f"  golden answers: {' | '.join(question.golden_answers)}")
        if question.supporting_titles:
            _say(f"  supporting titles: {' | '.join(question.supporting_titles)}")
        facts = [("set", question.dataset), ("hops", question.hops),
                 ("answer in corpus", _yes_no(question.answer_in_corpus))]  # fmt: skip
        known = [f"{key} {value}" for key, value in facts if value is not None]
        _say(f"  {', '.join([*known, *(f'has {key}' for key in question.metadata)])}")
    typer.echo(f"{len(chosen)} of {len(questions)} questions", err=True)


def _yes_no(flag: bool | None) -> str | None:
    return None if flag is None else "yes" if flag else "no"


# --- check ---------------------------------------------------------------------------------------


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="SET", help="SET, SET:SPLIT, a file, or 'all'.")],
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            help="SET, 'union', a file, or 'none'; several are joined. Default: the set's own.",
        ),
    ] = None,
    data: DataOption = None,
) -> None:
    """Check golds, duplicates, and whether a corpus holds answers and supporting titles.

    Findings are notes and leave exit code 0; data that cannot be read leaves 2.
    """
    folder = catalogue.data_folder(data)
    jobs = _all_splits(folder) if name == "all" else [name]
    indexes: dict[str, CorpusIndex | None] = {}
    failed = False
    rows, notes = [], []
    for job in jobs:
        try:
            questions = catalogue.load_questions(job, data=data)
            index = _index_for(job, corpus, folder, indexes)
            with _working(f"checking {job}"):
                report = check_questions(questions, index, compare_flags=_is_own(job, index))
        except EvenhandError as error:
            if name != "all":
                raise
            _say(f"evenhand: error: {error}", err=True)
            failed = True
            continue
        rows.append(_report_row(job, report, index))
        notes += [f"note: {job}: {_finding_text(finding)}" for finding in report.findings]
    if rows:
        headers = ["set", "corpus", "hops", "questions", "golds", "with titles", "answer findable",
                   "flag agrees", "notes"]  # fmt: skip
        _print_table(headers, rows, 3)
    for note in notes:
        _say(note)
    if name == "all" and folder is not None:
        _check_union(folder)
    if failed:
        raise typer.Exit(2)


def _all_splits(folder: Path | None) -> list[str]:
    if folder is None:
        raise DataError("no data folder to check; give one with --data or EVENHAND_DATA")
    jobs = [
        f"{name}:{part}"
        for name, each in SETS.items()
        for part in each.splits
        if catalogue.find_questions(name, part, folder)
    ]
    if not jobs:
        raise DataError(f"{folder} holds none of the standard sets: {', '.join(SETS)}")
    return jobs


def _index_for(
    job: str,
    corpus: Sequence[str] | None,
    folder: Path | None,
    indexes: dict[str, CorpusIndex | None],
) -> CorpusIndex | None:
    """Return the corpus to look things up in, built once for all splits that share it."""
    specs = list(corpus or [])
    if not specs and not catalogue.is_file_name(job):
        own = catalogue.find_set(job)[0].name
        specs = [own] if folder and catalogue.find_corpus(own, folder) else []
    if not specs or specs == ["none"]:
        return None
    key = " + ".join(specs)
    if key not in indexes:
        indexes.clear()  # one corpus at a time is enough to hold
        with _working(f"reading the corpus {key}"):
            indexes[key] = CorpusIndex(catalogue.load_corpus(*specs, data=folder), key)
    return indexes[key]


def _is_own(job: str, index: CorpusIndex | None) -> bool:
    return index is not None and index.name == job.partition(":")[0]


def _report_row(job: str, report: QuestionReport, index: CorpusIndex | None) -> list[str]:
    hops = " ".join(f"{'?' if hop is None else hop}:{count}" for hop, count in report.hops.items())
    where = f"{index.name} ({index.n_passages})" if index else "-"
    return [
        job, where, hops, str(report.n_questions), str(report.n_golds), str(report.n_with_titles),
        _share(report.n_findable, report.n_asked), _share(report.n_agreeing, report.n_flagged),
        str(len(report.findings)),
    ]  # fmt: skip


def _finding_text(finding: Finding) -> str:
    more = len(finding.ids) - SHOWN_IDS
    shown = ", ".join(finding.ids[:SHOWN_IDS])
    return f"{finding.message} ({shown}{f', and {more} more' if more > 0 else ''})"


def _check_union(folder: Path) -> None:
    paths = catalogue.corpora_in(folder)
    if not paths:
        return
    read = 0
    empty = []

    def counted(path: Path) -> Iterator[Document]:
        nonlocal read
        for document in read_corpus(path):
            read += 1
            yield document

    joined = 0
    with _working("joining the corpora"):
        for document in union(map(counted, paths)):
            joined += 1
            if not document.text.strip():
                empty.append(document.id)
    typer.echo(
        f"{UNION}: {joined} passages from {len(paths)} corpora ({read - joined} duplicates removed)"
    )
    if empty:
        message = f"passage without text: {len(empty)}"
        _say(f"note: {UNION}: {_finding_text(Finding(message, tuple(empty)))}")


# --- export --------------------------------------------------------------------------------------


@app.command()
def export(
    names: Annotated[
        list[str], typer.Argument(metavar="SET...", help="SET, SET:SPLIT or a file; joined.")
    ],
    to: Annotated[Layout, typer.Option("--to", help="Layout to write.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="File to write; - is standard output (jsonl only)."),
    ],
    template: Annotated[
        str | None,
        typer.Option(
            help="Prompt template (verl, searchr1): a name, a file or module:function. "
            "Default: searchr1."
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="Value of extra_info.split (verl, searchr1). Default: from the SET, or train.",
        ),
    ] = None,
    data_source: Annotated[
        str | None,
        typer.Option(
            help="Value of data_source (verl, searchr1), for a reward function of your own."
        ),
    ] = None,
    data: DataOption = None,
) -> None:
    """Write question sets for verl's and Search-R1's training scripts, or as JSON lines."""
    if to is Layout.JSONL:
        _refuse_unused({"--template": template, "--split": part, "--data-source": data_source})
    elif out == STANDARD_STREAM:
        raise ConfigError("parquet cannot be written to standard output; give a file with -o")
    if out != STANDARD_STREAM:
        check_output(out)
    questions = _joined(names, data)
    if to is Layout.JSONL:
        count = _write_jsonl(out, questions)
    else:
        rows = verl_rows(
            questions,
            _renderer(template or "searchr1"),
            part=part or _part_of(names),
            prefix=VERL_PREFIX if to is Layout.VERL else "",
            data_source=data_source,
        )
        with _working(f"writing {out}"):
            count = write_parquet(out, rows)
    _say(f"{count} questions written to {out}", err=True)


def _refuse_unused(options: dict[str, str | None]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is of no use with --to jsonl, got {value!r}; leave it out or choose "
                "--to verl or --to searchr1"
            )


def _joined(names: Sequence[str], data: Path | None) -> list[Question]:
    pairs: list[tuple[Question, str]] = []
    for name in names:
        with _working(f"reading {name}"):
            pairs += [(question, name) for question in catalogue.load_questions(name, data=data)]
    return list(unique_questions(pairs))


def _write_jsonl(output: Path, questions: Iterable[Question]) -> int:
    if output != STANDARD_STREAM:
        return write_questions(output, questions)
    count = 0
    for question in questions:
        typer.echo(question_to_line(question))
        count += 1
    return count


def _part_of(names: Sequence[str]) -> str:
    parts = {
        "train" if catalogue.is_file_name(name) else catalogue.find_set(name)[1] for name in names
    }
    return parts.pop() if len(parts) == 1 else "train"


def _renderer(template: str) -> Render:
    # The templates load their own code and files: only an export needs them.
    from evenhand.task import prompts

    render: Callable[[str, str], str | Sequence[dict[str, str]]] = prompts.render_prompt
    return functools.partial(render, template)
