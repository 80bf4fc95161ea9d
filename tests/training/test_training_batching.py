"""Rows, weights, mini-batches and micro-batches. No torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import credited_rollout, mixed_rollouts

from evenhand.core.errors import ConfigError, DataError
from evenhand.credit import credit
from evenhand.training.batching import micro_batches, mini_batches, rows_of, weighted
from evenhand.trajectory import Kind, Source, StopReason, Trajectory


def random_rollout(**options: object) -> Trajectory:
    lengths = [("search", 3), ("information", 9), ("answer", 4)]
    return credited_rollout("t", "g", lengths, np.random.default_rng(1), **options)  # type: ignore[arg-type]


def test_only_tokens_of_the_policy_are_targets() -> None:
    (row,) = rows_of([random_rollout()])
    assert row.targets.position.tolist() == [4, 5, 6, 16, 17, 18, 19]
    assert row.policy_tokens == 7


def test_a_row_ends_before_its_last_target() -> None:
    trajectory = random_rollout()
    (row,) = rows_of([trajectory])
    whole = np.concatenate([segment.token_ids for segment in trajectory.segments])
    assert row.ids.tolist() == whole[:19].tolist()
    assert row.targets.ids[-1] == whole[19]


def test_each_target_has_the_credit_of_its_segment() -> None:
    trajectory = random_rollout()
    (row,) = rows_of([trajectory])
    expected = [trajectory.segments[1].advantage] * 3 + [trajectory.segments[3].advantage] * 4
    assert row.targets.advantage.tolist() == expected


def test_an_unscored_rollout_leaves_loss_and_denominator() -> None:
    rollouts = mixed_rollouts()
    with_failed = [*rollouts, random_rollout(reward=None, stop_reason=StopReason.FAILED)]
    assert len(rows_of(with_failed)) == len(rollouts)


def test_a_truncated_rollout_trains_unless_it_is_masked() -> None:
    cut = random_rollout(stop_reason=StopReason.TOKEN_LIMIT)
    assert len(rows_of([cut])) == 1
    assert rows_of([cut], mask_truncated=True) == []


def test_a_rollout_that_searched_too_often_is_not_truncated() -> None:
    limited = random_rollout(stop_reason=StopReason.SEARCH_LIMIT)
    assert len(rows_of([limited], mask_truncated=True)) == 1


def _changed(trajectory: Trajectory, at: int, **changes: object) -> Trajectory:
    segments = list(trajectory.segments)
    segments[at] = replace(segments[at], **changes)  # type: ignore[arg-type]
    return replace(trajectory, segments=tuple(segments))


@pytest.mark.parametrize(
    ("field", "at", "message"),
    [
        ("token_ids", 2, "segment 2 has no token_ids"),
        ("advantage", 1, "segment 1 has no advantage"),
        ("logprobs", 3, "segment 3 has no logprobs"),
    ],
)
def test_a_missing_record_is_refused_with_its_place(field: str, at: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of([_changed(random_rollout(), at, **{field: None})])


def test_a_rollout_that_begins_with_the_policy_is_refused() -> None:
    trajectory = random_rollout()
    with pytest.raises(DataError, match="begins with a token of the policy"):
        rows_of([replace(trajectory, segments=trajectory.segments[1:])])


def test_changing_the_ids_of_observations_changes_no_credit_of_the_policy() -> None:
    # RAGEN #71: an inverted mask put the gradient on observations.
    rollouts = [replace(t, reward=float(at % 3)) for at, t in enumerate(mixed_rollouts())]
    other = [
        replace(
            t,
            segments=tuple(
                replace(s, token_ids=s.token_ids[::-1] * 0 + 7)
                if s.source is Source.ENVIRONMENT and s.kind is not Kind.PROMPT
                else s
                for s in t.segments
            ),
        )
        for t in rollouts
    ]
    first = rows_of(credit(rollouts, "stratified_calibadv"))
    second = rows_of(credit(other, "stratified_calibadv"))
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one.targets.advantage, two.targets.advantage)
        assert np.array_equal(one.targets.position, two.targets.position)
        assert np.array_equal(one.targets.ids, two.targets.ids)


# --- weights -------------------------------------------------------------------------------------


def test_token_mean_weighs_every_token_by_all_tokens() -> None:
    rows = weighted(rows_of(mixed_rollouts()), "token_mean")
    tokens = sum(row.policy_tokens for row in rows)
    assert sum(row.targets.weight.sum() for row in rows) == pytest.approx(1)
    assert all((row.targets.weight == 1 / tokens).all() for row in rows)


def test_sequence_mean_gives_every_row_the_same_weight() -> None:
    rows = weighted(rows_of(mixed_rollouts()), "sequence_mean")
    assert [row.targets.weight.sum() for row in rows] == pytest.approx([1 / 8] * 8)


def test_constant_divides_by_rows_and_length() -> None:
    rows = weighted(rows_of(mixed_rollouts()), "constant", constant_length=100)
    assert all((row.targets.weight == 1 / 800).all() for row in rows)


def test_rows_without_credit_count_in_the_denominator_when_they_are_skipped() -> None:
    rows = rows_of(mixed_rollouts())
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        whole = weighted(rows, aggregation, constant_length=9)
        live = weighted(rows, aggregation, constant_length=9, skip_uncredited=True)
        assert len(live) == len(whole) - 1
        by_index = {row.index: row for row in whole}
        for row in live:
            assert row.targets.weight[0] == by_index[row.index].targets.weight[0]


def test_a_row_without_credit_at_its_end_is_cut_there() -> None:
    trajectory = _changed(random_rollout(), 3, advantage=0.0)
    (row,) = weighted(rows_of([trajectory]), "token_mean", skip_uncredited=True)
    assert row.targets.position.tolist() == [4, 5, 6]
    assert len(row.ids) == 6
    assert row.targets.weight[0] == pytest.approx(1 / 7)


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown aggregation 'mean'"):
        weighted(rows_of(mixed_rollouts()), "mean")


# --- mini-batches and micro-batches --------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 1000))
def test_mini_batches_hold_whole_groups_and_every_row_once(parts: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rollouts = [replace(random_rollout(), id=f"t{at}", group=f"g{at % 5}") for at in range(17)]
    pieces = mini_batches(rows_of(rollouts), parts, generator)
    assert sorted(row.index for piece in pieces for row in piece) == list(range(17))
    groups = [{row.group for row in piece} for piece in pieces]
    assert sum(map(len, groups)) == 5
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_more_parts_than_groups_leave_no_empty_step() -> None:
    pieces = mini_batches(rows_of(mixed_rollouts()), 5, np.random.default_rng(0))
    assert len(pieces) == 2


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 300))
def test_micro_batches_keep_the_budget_and_every_row_once(lengths: list[int], most: int) -> None:
    generator = np.random.default_rng(0)
    rollouts = [
        credited_rollout(f"t{at}", "g", [("answer", n)], generator) for at, n in enumerate(lengths)
    ]
    batches = micro_batches(rows_of(rollouts), most)
    assert sorted(row.index for b in batches for row in b.members) == list(range(len(lengths)))
    for batch in batches:
        assert batch.ids.size <= most or len(batch.members) == 1
        assert batch.real_tokens == sum(len(row.ids) for row in batch.members)
        for at, row in enumerate(batch.members):
            mine = batch.row == at
            assert np.array_equal(batch.targets.ids[mine], row.targets.ids)
            assert np.array_equal(batch.ids[at, : len(row.ids)], row.ids)


def test_rows_of_equal_length_stay_in_order() -> None:
    rollouts = [replace(random_rollout(), id=f"t{at}") for at in range(6)]
    (batch,) = micro_batches(rows_of(rollouts), 10_000)
    assert [row.index for row in batch.members] == list(range(6))


def test_sorting_leaves_little_padding() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 400, size=128)
    rollouts = [
        credited_rollout(f"t{at}", "g", [("answer", int(n))], generator)
        for at, n in enumerate(lengths)
    ]
    batches = micro_batches(rows_of(rollouts), 4096)
    real = sum(batch.real_tokens for batch in batches)
    assert real / sum(batch.ids.size for batch in batches) > 0.85
