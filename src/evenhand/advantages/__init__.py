"""Estimators of advantages as pure functions of arrays (numpy only).

Plain functions take `[N]` or `[S]` arrays; `evenhand.advantages.registry` holds them by name.
"""

from evenhand.advantages.calibrated import rebalance, soften_negative
from evenhand.advantages.outcome import dr_grpo, grpo, reinforce_baseline, rloo
from evenhand.advantages.registry import (
    ESTIMATORS,
    CreditInputs,
    Estimator,
    estimator_names,
    get_estimator,
)
from evenhand.advantages.stratified import (
    CrossStratum,
    cross_stratum,
    san,
    stratified,
    stratified_shrunk,
)

__all__ = [
    "ESTIMATORS",
    "CreditInputs",
    "CrossStratum",
    "Estimator",
    "cross_stratum",
    "dr_grpo",
    "estimator_names",
    "get_estimator",
    "grpo",
    "rebalance",
    "reinforce_baseline",
    "rloo",
    "san",
    "soften_negative",
    "stratified",
    "stratified_shrunk",
]
