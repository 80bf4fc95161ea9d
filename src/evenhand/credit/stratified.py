"""Stratified estimators: rollouts are compared with rollouts of the same structure.

Stratified GRPO (arXiv 2510.06214). `stratum[N]` labels the structure of a trajectory, by default
the number of its searches. Conventions of `evenhand.credit.outcome` hold throughout.

Normalising by something that the policy chooses (how often it searches) deletes the signal about
*how often to search*: inside a stratum all members made the same choice. Only the global part of
the blend carries that signal, which is why `stratified` blends by default.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import Dense, FloatArray, cross, dense, divide, same_length, size, total
from evenhand.core.settings import check_choice, check_ddof, check_number
from evenhand.credit.outcome import rewards_and_group
from evenhand.credit.statistics import centre, standardise

LONE = ("zero", "global")
SCOPES = ("group", "batch")


class CrossStratum(NamedTuple):
    """What stratification removes from centred advantages.

    Attributes:
        offset: `[N]` `mean_k - mean`, the cross-stratum bias of trajectory `i` in stratum `k`: the
            same for all members of a stratum, 0 for unscored trajectories.
        added_variance: `[G]` `sum_k n_k (mean_k - mean)^2 / n`, groups in sorted order of their
            labels; 0 for a group without a scored member. Never negative.
    """

    offset: FloatArray
    added_variance: FloatArray


def _inputs(
    rewards: ArrayLike, group: ArrayLike, stratum: ArrayLike
) -> tuple[FloatArray, Dense, Dense]:
    values, groups = rewards_and_group(rewards, group)
    strata = dense(stratum, "stratum")
    same_length(rewards=values, stratum=strata.ids)
    return values, groups, strata


def _stratum_normalised(
    values: FloatArray,
    cells: Dense,
    fallback: FloatArray,
    *,
    ddof: int,
    eps: float,
    lone: str,
) -> FloatArray:
    """Return `[N]` SAN over `cells`; a member alone in its cell gets 0 or its `fallback`."""
    normalised = standardise(values, cells, ddof=ddof, eps=eps)
    if check_choice(lone, "lone", LONE) == "global":
        alone = size(cells, ~np.isnan(values))[cells.ids] == 1
        normalised = np.where(alone & ~np.isnan(values), fallback, normalised)
    return normalised


def stratified(
    rewards: ArrayLike,
    group: ArrayLike,
    stratum: ArrayLike,
    *,
    alpha: float = 0.5,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> FloatArray:
    r"""Stratified GRPO: stratum-normalised and global advantages, blended.

    .. math::
        A_i = \alpha\,\mathrm{SAN}_i + (1 - \alpha)\,\mathrm{GN}_i, \qquad
        \mathrm{SAN}_i = \frac{r_i - \mathrm{mean}_k}{\mathrm{std}_k + \epsilon}, \qquad
        \mathrm{GN}_i = \frac{r_i - \mathrm{mean}_g}{\mathrm{std}_g + \epsilon}

    with `k` the members of the same group *and* stratum as `i`, `g` those of the same group.
    `alpha = 0` is `grpo`; so is any alpha when a group has a single stratum. A stratum whose scored
    rewards are all equal has SAN exactly 0. Paper: alpha, deviation, eps, the rule for a lone
    member and the scope are not stated there in a form that could be read; the defaults are ours.

    Args:
        rewards: `[N]` rewards; `nan` or `None` = unscored.
        group: `[N]` labels.
        stratum: `[N]` labels of structure.
        alpha: weight of the stratified part, in [0, 1].
        ddof: 1 for the sample deviation, 0 for the population's.
        eps: added to each deviation.
        lone: `"zero"`: a member alone in its stratum has SAN 0, so that only the global part acts;
            `"global"`: its SAN is GN.
        scope: `"group"`, or `"batch"`: strata are pooled over the questions of the batch (GN stays
            with the group). Groups then depend on one another.

    Returns:
        `[N]` advantages. With `lone="zero"` and `scope="group"` they sum to 0 in each group.

    Raises:
        DataError, ConfigError: as `grpo`, and for settings out of range.

    Source: arXiv 2510.06214.
    """
    values, groups, strata = _inputs(rewards, group, stratum)
    alpha = check_number(alpha, "alpha", 0.0, 1.0)
    ddof, eps = check_ddof(ddof), check_number(eps, "eps", 0.0, 1e6)
    by_group = check_choice(scope, "scope", SCOPES) == "group"
    global_part = standardise(values, groups, ddof=ddof, eps=eps)
    cells = cross(groups, strata) if by_group else strata
    stratum_part = _stratum_normalised(values, cells, global_part, ddof=ddof, eps=eps, lone=lone)
    return alpha * stratum_part + (1.0 - alpha) * global_part


def san(
    rewards: ArrayLike,
    group: ArrayLike,
    stratum: ArrayLike,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
    scope: str = "group",
) -> FloatArray:
    """Stratified Advantage Normalization alone: `stratified` with `alpha = 1`.

    The mean is 0 in every stratum, so the result says nothing about which number of searches is
    better. Args, result and errors as for `stratified`. Source: arXiv 2510.06214.
    """
    return stratified(
        rewards, group, stratum, alpha=1.0, ddof=ddof, eps=eps, lone=lone, scope=scope
    )


def stratified_shrunk(
    rewards: ArrayLike,
    group: ArrayLike,
    stratum: ArrayLike,
    *,
    kappa: float = 2.0,
    ddof: int = 1,
    eps: float = 1e-6,
    lone: str = "zero",
) -> FloatArray:
    r"""Blend with a weight that grows with the stratum: small strata lean on the group.

    .. math:: A_i = \alpha_k\,\mathrm{SAN}_i + (1 - \alpha_k)\,\mathrm{GN}_i, \qquad
        \alpha_k = \frac{n_k}{n_k + \kappa}

    with `n_k` the scored members of the stratum in the group. `kappa = 0` is `san` (wherever a
    stratum has a scored member), large kappa tends to `grpo`. Since the weights differ between
    strata, the advantages of a group need not sum to 0.

    Args:
        kappa: how many members make the stratum count as much as the group, in [0, 1e6].

    Other args, result and errors as for `stratified`. Source: ours, not the paper's.
    """
    values, groups, strata = _inputs(rewards, group, stratum)
    kappa = check_number(kappa, "kappa", 0.0, 1e6)
    ddof, eps = check_ddof(ddof), check_number(eps, "eps", 0.0, 1e6)
    cells = cross(groups, strata)
    count = size(cells, ~np.isnan(values))
    alpha = divide(count, count + kappa)[cells.ids]
    global_part = standardise(values, groups, ddof=ddof, eps=eps)
    stratum_part = _stratum_normalised(values, cells, global_part, ddof=ddof, eps=eps, lone=lone)
    return alpha * stratum_part + (1.0 - alpha) * global_part


def cross_stratum(rewards: ArrayLike, group: ArrayLike, stratum: ArrayLike) -> CrossStratum:
    r"""What stratification removes: the offset of each stratum and the variance it adds.

    .. math::
        \mathrm{Var}[A_\mathrm{global}] - \mathrm{Var}[A_\mathrm{stratified}]
        = \frac{1}{n} \sum_k n_k\,(\mathrm{mean}_k - \mathrm{mean})^2

    per group, with population variances of centred, unscaled advantages. The right side is never
    negative and, in small groups, large by chance alone: `evenhand.diagnostics.strata` puts it
    beside its expectation under permutation.

    Args and errors as for `stratified`. Source: arXiv 2510.06214, theorem 1.
    """
    values, groups, strata = _inputs(rewards, group, stratum)
    within_group = centre(values, groups)
    cells = cross(groups, strata)
    # The mean of a stratum's deviations from the group mean is the offset; unscored members have
    # deviation 0 and are left out of the count.
    scored = ~np.isnan(values)
    offset = divide(total(within_group.deviation, cells), size(cells, scored))[cells.ids]
    offset = np.where(scored, offset, 0.0)
    added = divide(total(offset * offset, groups), within_group.members)
    return CrossStratum(offset, added)
