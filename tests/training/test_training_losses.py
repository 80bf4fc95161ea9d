"""Loss and gradient: against a plain reference, for any cut, and exactly 0 where nothing is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import mixed_rollouts

from evenhand.training.batching import Row, micro_batches, rows_of, weighted
from evenhand.training.config import LossSection
from evenhand.trajectory import Trajectory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from evenhand.testing.losses import reference_loss  # noqa: E402
from evenhand.training.forward import Forward, head_on  # noqa: E402
from evenhand.training.losses import (  # noqa: E402
    TokenBatch,
    importance,
    k3,
    policy_gradient,
    token_loss,
)

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

CASES = {
    "plain": LossSection(),
    "tight clips": LossSection(clip_low=0.05, clip_high=0.3),
    "sequence mean": LossSection(aggregation="sequence_mean"),
    "constant": LossSection(aggregation="constant", constant_length=33),
    "kl and entropy": LossSection(kl=0.1, entropy=0.05),
    "kl, sequence mean": LossSection(kl=0.3, aggregation="sequence_mean"),
}


@pytest.fixture(scope="module")
def model(tiny_world: Path) -> Any:
    # Float64, so that rounding cannot hide a wrong weight.
    found = transformers.AutoModelForCausalLM.from_pretrained(tiny_world / "model")
    return found.double().eval()


@pytest.fixture(scope="module")
def other(tiny_world: Path) -> Any:
    torch.manual_seed(3)
    found = transformers.AutoModelForCausalLM.from_pretrained(tiny_world / "model").double().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return found


@pytest.fixture(scope="module")
def rollouts(model: Any) -> list[Trajectory]:
    """Rollouts whose sampler is near the model, so that some ratios are clipped and most not."""
    generator = np.random.default_rng(5)
    rollouts = mixed_rollouts()
    values = Forward(model, torch.device("cpu"), 1.3).logprobs(rows_of(rollouts), 500)
    found = []
    for trajectory, own in zip(rollouts, values, strict=True):
        segments, at = [], 0
        for segment in trajectory.segments:
            if segment.is_policy:
                part = own[at : at + segment.n_tokens] + generator.normal(size=segment.n_tokens) / 5
                segment = replace(segment, logprobs=part)
                at += segment.n_tokens
            segments.append(segment)
        found.append(replace(trajectory, segments=tuple(segments)))
    return found


def accumulate(
    model: Any,
    rows: Sequence[Row],
    loss: LossSection,
    *,
    max_tokens: int,
    reference: Any = None,
    skip: bool = False,
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients over micro-batches."""
    forward = Forward(model, torch.device("cpu"), 1.3)
    if reference is not None:
        values = replace(forward, model=reference).logprobs(rows, max_tokens)
        rows = [replace(row, targets=replace(row.targets, reference=value))
                for row, value in zip(rows, values, strict=True)]  # fmt: skip
    model.zero_grad()
    live = weighted(rows, loss.aggregation, constant_length=loss.constant_length,
                    skip_uncredited=skip)  # fmt: skip
    total = 0.0
    for micro in micro_batches(live, max_tokens):
        outputs = forward(micro, entropy=loss.entropy > 0)
        targets = micro.targets
        arrays = (targets.advantage, targets.sampled, targets.old, targets.reference,
                  targets.weight)  # fmt: skip
        batch = TokenBatch(*map(forward.tensor, arrays))
        parts = token_loss(outputs.logprobs, outputs.entropy, batch, loss)
        parts.loss.backward()
        total += float(parts.loss.detach())
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def expect_same(first: tuple[float, dict[str, Any]], second: tuple[float, dict[str, Any]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-6, abs=1e-6)
    assert first[1].keys() == second[1].keys()
    scale = max(float(g.abs().max()) for g in second[1].values())
    for name, gradient in first[1].items():
        assert float((gradient - second[1][name]).abs().max()) <= 1e-6 * max(1.0, scale), name


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_plain_reference(
    name: str, model: Any, other: Any, rollouts: list[Trajectory]
) -> None:
    loss = CASES[name]
    reference = other if loss.kl else None
    found = accumulate(model, rows_of(rollouts), loss, max_tokens=150, reference=reference)
    model.zero_grad()
    expected = reference_loss(model, rollouts, loss, temperature=1.3, reference=reference)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    expect_same(found, (float(expected.detach()), gradients))


@pytest.mark.parametrize("max_tokens", [1, 97, 200])
@pytest.mark.parametrize("name", CASES)
def test_the_cut_into_micro_batches_changes_neither_loss_nor_gradient(
    name: str, max_tokens: int, model: Any, other: Any, rollouts: list[Trajectory]
) -> None:
    # rllm #508: padding rows counted in the denominator shrank the learning rate.
    loss = CASES[name]
    reference = other if loss.kl else None
    rows = rows_of(rollouts)
    whole = accumulate(model, rows, loss, max_tokens=100_000, reference=reference)
    cut = accumulate(model, rows, loss, max_tokens=max_tokens, reference=reference)
    expect_same(cut, whole)


@pytest.mark.parametrize("name", ["plain", "sequence mean", "constant"])
def test_skipping_rows_without_credit_changes_nothing(
    name: str, model: Any, rollouts: list[Trajectory]
) -> None:
    rows = rows_of(rollouts)
    whole = accumulate(model, rows, CASES[name], max_tokens=200)
    skipped = accumulate(model, rows, CASES[name], max_tokens=200, skip=True)
    expect_same(skipped, whole)


def test_in_float32_too_the_cut_changes_the_gradient_by_rounding_only(
    tiny_world: Path, rollouts: list[Trajectory]
) -> None:
    narrow = transformers.AutoModelForCausalLM.from_pretrained(tiny_world / "model").eval()
    rows = rows_of(rollouts)
    whole, gradient = accumulate(narrow, rows, LossSection(), max_tokens=100_000)
    norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
    for max_tokens in (1, 97, 200):
        loss, other = accumulate(narrow, rows, LossSection(), max_tokens=max_tokens)
        gap = torch.cat([(gradient[name] - other[name]).flatten() for name in gradient]).norm()
        assert loss == pytest.approx(whole, rel=1e-6)
        assert float(gap / norm) < 2e-6


def test_the_order_of_rows_does_not_matter(model: Any, rollouts: list[Trajectory]) -> None:
    loss = LossSection()
    rows = rows_of(rollouts)
    expect_same(
        accumulate(model, rows[::-1], loss, max_tokens=120),
        accumulate(model, rows, loss, max_tokens=120),
    )


def test_the_head_sees_only_positions_that_predict_policy_tokens(
    model: Any, rollouts: list[Trajectory]
) -> None:
    (micro,) = micro_batches(rows_of(rollouts), 100_000)
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0].shape)
    )
    Forward(model, torch.device("cpu"))(micro)
    handle.remove()
    tokens = sum(s.n_tokens for t in rollouts for s in t.segments if s.is_policy)
    assert [tuple(shape) for shape in seen] == [(1, tokens, 32)]


def test_the_gradient_at_every_observation_token_is_exactly_0(
    model: Any, rollouts: list[Trajectory]
) -> None:
    # RAGEN #71. The full logits are taken from the hidden states before the head is narrowed.
    loss = LossSection(kl=0.1, entropy=0.1)
    (micro,) = micro_batches(weighted(rows_of(rollouts), "token_mean"), 100_000)
    forward = Forward(model, torch.device("cpu"))
    held: list[Any] = []

    def keep(_module: Any, inputs: tuple[Any, ...]) -> None:
        inputs[0].retain_grad()
        held.append(inputs[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    outputs = forward(micro, entropy=True)
    handle.remove()
    targets = micro.targets
    arrays = (targets.advantage, targets.sampled, targets.old, targets.reference, targets.weight)
    token_loss(
        outputs.logprobs, outputs.entropy, TokenBatch(*map(forward.tensor, arrays)), loss
    ).loss.backward()
    gradient = held[0].grad
    assert gradient.shape[:2] == micro.ids.shape
    predicts_policy = torch.zeros(micro.ids.shape, dtype=torch.bool)
    predicts_policy[micro.row, targets.position - 1] = True
    assert (gradient[~predicts_policy] == 0).all()
    assert (gradient[predicts_policy].abs().sum(-1) > 0).all()


def test_what_comes_after_a_row_changes_nothing(model: Any, rollouts: list[Trajectory]) -> None:
    (micro,) = micro_batches(rows_of(rollouts), 100_000)
    forward = Forward(model, torch.device("cpu"))
    padded = micro.ids.copy()
    for at, row in enumerate(micro.members):
        padded[at, len(row.ids) :] = 9
    with torch.no_grad():
        first, second = forward(micro).logprobs, forward(replace(micro, ids=padded)).logprobs
    assert torch.equal(first, second)


def test_the_head_is_whole_again_afterwards(model: Any) -> None:
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with head_on(model, torch.tensor([0]), torch.tensor([1])):
            narrowed = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    assert narrowed.shape[:2] == (1, 1)
    assert torch.allclose(narrowed[0, 0], before[0, 1])
    assert torch.equal(before, after)


# --- single terms --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value", "slope"),
    [
        (0.0, 2.0, -2.0, -2.0),
        (0.5, 1.0, -1.28, 0.0),  # above 1 + high, pushed up: held
        (0.5, -1.0, np.exp(0.5), np.exp(0.5)),  # above, pushed down: free
        (-0.5, -1.0, 0.8, 0.0),  # below 1 - low, pushed down: held
        (-0.5, 1.0, -np.exp(-0.5), -np.exp(-0.5)),  # below, pushed up: free
        (0.1, 1.0, -np.exp(0.1), -np.exp(0.1)),
    ],
)
def test_the_clipped_surrogate_and_its_slope(
    log_ratio: float, advantage: float, value: float, slope: float
) -> None:
    new = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss, _ = policy_gradient(
        new, old, torch.tensor([advantage], dtype=torch.float64), low=0.2, high=0.28
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(value)
    assert float(new.grad) == pytest.approx(slope)


def test_a_huge_ratio_stays_finite() -> None:
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = policy_gradient(new, torch.tensor([-900.0]), torch.tensor([-1.0]), low=0.2, high=0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


def test_k3_is_0_where_both_agree_and_positive_elsewhere() -> None:
    new = torch.tensor([-1.0, -2.0, -0.5])
    values = k3(new, torch.tensor([-1.0, -1.0, -3.0]))
    expected = [0.0, np.e - 2, np.exp(-2.5) + 1.5]
    assert values.tolist() == pytest.approx(expected)


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, 0.0, -3.0], requires_grad=True)
    weights = importance(old, torch.tensor([-1.0, -2.0, -1.0]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, np.exp(-2)])
    assert not weights.requires_grad


def test_importance_weights_scale_the_surrogate() -> None:
    loss = LossSection(old="trainer", importance_cap=2.0)
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    ones = torch.ones(2)
    batch = TokenBatch(ones, torch.tensor([-1.5, -3.0]), new.detach(), torch.zeros(2), ones)
    parts = token_loss(new, None, batch, loss)
    parts.loss.backward()
    assert new.grad.tolist() == pytest.approx([-np.exp(0.5), -2.0])
