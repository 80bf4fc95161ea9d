"""Question sets and corpora: reading, checking, splitting and exporting them.

`load_questions("hotpotqa:dev")` and `load_corpus("union")` find the standard sets by name in a data
folder or on the hub; `read_questions` and `read_corpus` read any file of the known layouts.
"""

from evenhand.datasets.catalogue import (
    SETS,
    QuestionSet,
    data_folder,
    load_corpus,
    load_questions,
    read_hub,
)
from evenhand.datasets.checks import CorpusIndex, Finding, QuestionReport, check_questions
from evenhand.datasets.corpora import read_corpus, union
from evenhand.datasets.export import verl_rows, write_parquet
from evenhand.datasets.questions import (
    Question,
    question_from_dict,
    question_to_dict,
    read_questions,
    split,
    write_questions,
)

__all__ = [
    "SETS",
    "CorpusIndex",
    "Finding",
    "Question",
    "QuestionReport",
    "QuestionSet",
    "check_questions",
    "data_folder",
    "load_corpus",
    "load_questions",
    "question_from_dict",
    "question_to_dict",
    "read_corpus",
    "read_hub",
    "read_questions",
    "split",
    "union",
    "verl_rows",
    "write_parquet",
    "write_questions",
]
