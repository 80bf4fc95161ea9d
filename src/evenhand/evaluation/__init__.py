"""Evaluation: runs over question sets, statistics, tables, comparisons. Importable without torch.

* `evaluate` puts question sets to an `Answerer` (a `PolicyAnswerer`, or a baseline of
  `evenhand.evaluation.baselines`) and fills an `EvaluationFolder`; `summarise` makes its results.
* `compare` pairs two evaluations question by question.
"""

from evenhand.evaluation.comparison import ComparedRow, Comparison, compare
from evenhand.evaluation.folder import EvaluationFolder, read_evaluation
from evenhand.evaluation.measures import METRICS, Metric, measures
from evenhand.evaluation.run import Answerer, EvaluationSet, PolicyAnswerer, evaluate
from evenhand.evaluation.summary import summarise

__all__ = [
    "METRICS",
    "Answerer",
    "ComparedRow",
    "Comparison",
    "EvaluationFolder",
    "EvaluationSet",
    "Metric",
    "PolicyAnswerer",
    "compare",
    "evaluate",
    "measures",
    "read_evaluation",
    "summarise",
]
