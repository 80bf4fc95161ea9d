"""Outcome estimators: one advantage a trajectory, relative to its group.

Arrays: `rewards[N]` (`nan` = unscored), `group[N]` (any labels). All results are `[N]` float64. The
order of rows is irrelevant, groups may be uneven, inputs are never changed. An unscored trajectory
is left out of every statistic and gets 0. A group with one scored member, or whose scored rewards
are all equal, gets exactly 0. If *every* group has a single member, which is what wrong group ids
look like, one `SingleMemberGroupsWarning` says so.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import ArrayLike

from evenhand.core.arrays import Dense, FloatArray, dense, divide, reward_vector, same_length
from evenhand.core.errors import SingleMemberGroupsWarning
from evenhand.core.settings import check_ddof, check_number
from evenhand.credit.statistics import centre, standardise


def rewards_and_group(rewards: ArrayLike, group: ArrayLike) -> tuple[FloatArray, Dense]:
    """Check the two arrays that every estimator takes and make the group labels dense."""
    values, groups = reward_vector(rewards), dense(group, "group")
    same_length(rewards=values, group=groups.ids)
    if groups.n == len(values) > 1:
        warnings.warn(
            f"every group has a single member ({groups.n} groups, {len(values)} trajectories), so "
            "every advantage is 0; rollouts of one question and step must share their group label",
            SingleMemberGroupsWarning,
            stacklevel=3,
        )
    return values, groups


def grpo(rewards: ArrayLike, group: ArrayLike, *, ddof: int = 1, eps: float = 1e-6) -> FloatArray:
    r"""Group-relative advantage, standardised.

    .. math:: A_i = (r_i - \mathrm{mean}_g) / (\mathrm{std}_g + \epsilon)

    with mean and deviation over the scored members of the group `g` of trajectory `i`.

    Args:
        rewards: `[N]` rewards; `nan` or `None` = unscored.
        group: `[N]` labels; trajectories of one group are compared with one another.
        ddof: 1 for the sample deviation (divides by n - 1), 0 for the population's.
        eps: added to the deviation.

    Returns:
        `[N]` advantages; they sum to 0 in each group.

    Raises:
        DataError: arrays that are not parallel, infinite rewards, rewards above 1e6 in magnitude.
        ConfigError: `ddof` or `eps` out of range.

    Source: Shao et al., DeepSeekMath (arXiv 2402.03300), section 4.1.
    """
    values, groups = rewards_and_group(rewards, group)
    return standardise(
        values, groups, ddof=check_ddof(ddof), eps=check_number(eps, "eps", 0.0, 1e6)
    )


def dr_grpo(rewards: ArrayLike, group: ArrayLike) -> FloatArray:
    r"""Group-relative advantage, centred only.

    .. math:: A_i = r_i - \mathrm{mean}_g

    Without the division, questions of low reward variance are not weighted up.

    Args and errors as for `grpo`. The advantages sum to 0 in each group.

    Source: Liu et al., Understanding R1-Zero-Like Training (arXiv 2503.20783).
    """
    values, groups = rewards_and_group(rewards, group)
    return centre(values, groups).deviation


def rloo(rewards: ArrayLike, group: ArrayLike) -> FloatArray:
    r"""Leave-one-out advantage: the baseline is the mean of the *other* members.

    .. math:: A_i = r_i - \frac{1}{n-1}\sum_{j \ne i} r_j = \frac{n}{n-1}\,(r_i - \mathrm{mean}_g)

    with `n` scored members. Args and errors as for `grpo`. The advantages sum to 0 in each group.

    Source: Kool et al., Buy 4 REINFORCE Samples, Get a Baseline for Free! (2019); Ahmadian et al.
    (arXiv 2402.14740).
    """
    values, groups = rewards_and_group(rewards, group)
    centred = centre(values, groups)
    factor = divide(centred.members, centred.members - 1)
    return centred.deviation * factor[groups.ids]


def reinforce_baseline(rewards: ArrayLike, group: ArrayLike, *, eps: float = 1e-6) -> FloatArray:
    r"""Group mean as the baseline, one deviation for the whole batch.

    .. math:: A_i = d_i / (\mathrm{std}(d) + \epsilon), \qquad d_i = r_i - \mathrm{mean}_g

    `std(d)` is the sample deviation of `d` over all scored trajectories of the batch, each counted
    once. Easy and hard questions keep their relative scale, but an advantage depends on every group
    of the batch. A batch with fewer than two scored trajectories gets 0.

    Args and errors as for `grpo`. The advantages sum to 0 in each group.

    Source: Hu et al., REINFORCE++ (arXiv 2501.03262), the variant with a group baseline.
    """
    values, groups = rewards_and_group(rewards, group)
    centred = centre(values, groups)
    eps = check_number(eps, "eps", 0.0, 1e6)
    largest = float(centred.spread.max(initial=0.0))
    if largest == 0.0:
        return centred.unit
    # In units of the largest spread, so that squares neither vanish nor overflow.
    unit = centred.unit * (centred.spread / largest)[groups.ids]
    scored = unit[~np.isnan(values)]
    with np.errstate(over="ignore"):
        return np.asarray(unit / (scored.std(ddof=1) + np.float64(eps) / largest))
