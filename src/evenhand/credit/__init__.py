"""The heart: estimators as pure functions of arrays, and the bridge from rollouts to their credit.

Plain functions take `[N]` or `[S]` arrays and know no rollout (numpy only);
`evenhand.credit.registry` holds them by name. `strata` and `evidence` read facts off rollouts, and
`bridge` turns rollouts and an estimator into credit for each segment.
"""

from evenhand.credit.calibrated import rebalance, soften_negative
from evenhand.credit.outcome import dr_grpo, grpo, reinforce_baseline, rloo
from evenhand.credit.registry import (
    ESTIMATORS,
    CreditInputs,
    Estimator,
    estimator_names,
    get_estimator,
)
from evenhand.credit.stratified import (
    CrossStratum,
    cross_stratum,
    san,
    stratified,
    stratified_shrunk,
)

from evenhand.credit.bridge import (  # isort: skip
    BridgeSettings,
    CreditBatch,
    Credited,
    CreditRule,
    concatenate,
    credit,
    credit_stream,
    gather,
    whole_groups,
)

__all__ = [
    "ESTIMATORS",
    "BridgeSettings",
    "CreditBatch",
    "CreditInputs",
    "CreditRule",
    "Credited",
    "CrossStratum",
    "Estimator",
    "concatenate",
    "credit",
    "credit_stream",
    "cross_stratum",
    "dr_grpo",
    "estimator_names",
    "gather",
    "get_estimator",
    "grpo",
    "rebalance",
    "reinforce_baseline",
    "rloo",
    "san",
    "soften_negative",
    "stratified",
    "stratified_shrunk",
    "whole_groups",
]
