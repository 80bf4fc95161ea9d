"""Evaluation: runs over question sets, statistics, tables, comparisons. Importable without torch.

* `compare` pairs two evaluations question by question.
"""

from evenhand.evaluation.comparison import ComparedRow, Comparison, compare
from evenhand.evaluation.measures import METRICS, Metric, measures

__all__ = ["METRICS", "ComparedRow", "Comparison", "Metric", "compare", "measures"]
