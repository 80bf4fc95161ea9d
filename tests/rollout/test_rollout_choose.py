"""Drawing tokens: the distribution, the settings, the log-probabilities, the random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.errors import ConfigError
from evenhand.rollout import RowKey, Sampling
from evenhand.rollout.draws import BLOCK, Draws, uniform_block

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train

from evenhand.rollout.choose import choose  # noqa: E402 needs torch

LOGITS = np.log(np.array([0.05, 0.4, 0.0, 0.25, 0.3]) + 1e-30)


def frequencies(sampling: Sampling, n: int = 20_000) -> np.ndarray:
    uniforms = torch.from_numpy((np.arange(n) + 0.5) / n)
    tokens, _ = choose(torch.tensor(LOGITS).float().expand(n, -1), uniforms, sampling)
    return np.bincount(tokens.numpy(), minlength=len(LOGITS)) / n


def test_tokens_follow_the_softmax() -> None:
    np.testing.assert_allclose(frequencies(Sampling()), np.exp(LOGITS), atol=2e-4)


def test_the_temperature_divides_the_logits() -> None:
    expected = np.exp(LOGITS / 0.5)
    np.testing.assert_allclose(
        frequencies(Sampling(temperature=0.5)), expected / expected.sum(), atol=2e-4
    )


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [1]),
        (Sampling(top_k=3), [1, 3, 4]),
        (Sampling(top_k=99), [0, 1, 3, 4]),
        (Sampling(top_p=0.39), [1]),
        (Sampling(top_p=0.41), [1, 4]),
        (Sampling(top_p=0.8), [1, 3, 4]),
        (Sampling(top_k=2, top_p=0.58), [1, 4]),
        (Sampling(top_k=2, top_p=0.56), [1]),
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_likeliest_tokens_in_their_proportions(
    sampling: Sampling, kept: list[int]
) -> None:
    expected = np.zeros(len(LOGITS))
    expected[kept] = np.exp(LOGITS[kept])
    np.testing.assert_allclose(frequencies(sampling), expected / expected.sum(), atol=2e-4)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, top_k=2), Sampling(temperature=0.7, top_p=0.5)], ids=str
)
def test_logprobs_are_of_the_full_softmax_at_the_temperature(sampling: Sampling) -> None:
    uniforms = torch.tensor([0.1, 0.9])
    tokens, logprobs = choose(torch.tensor(LOGITS).float().expand(2, -1), uniforms, sampling)
    expected = torch.log_softmax(torch.tensor(LOGITS) / 0.7, -1)[tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_temperature_zero_takes_the_first_of_the_likeliest_and_reports_the_softmax() -> None:
    tokens, logprobs = choose(torch.tensor([[0.0, 2.0, 2.0]]), None, Sampling(temperature=0))
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(logprobs, 2 - np.log(1 + 2 * np.exp(2)), rtol=1e-6)


@given(
    st.lists(st.sampled_from([float("-inf"), -50.0, 0.0, 3.0]), min_size=2, max_size=40),
    st.sampled_from([0.0, 0.5, 1 - 2.0**-53]),
)
def test_a_token_without_mass_is_never_drawn(logits: list[float], uniform: float) -> None:
    logits[len(logits) // 2] = 1.0
    tokens, logprobs = choose(
        torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), Sampling()
    )
    assert logits[int(tokens)] > float("-inf")
    assert np.isfinite(float(logprobs))


def test_half_precision_logits_are_scored_in_single_precision() -> None:
    logits = torch.linspace(-3, 3, 1000)[None].bfloat16()
    tokens, logprobs = choose(logits, torch.tensor([0.5]), Sampling())
    expected = torch.log_softmax(logits.double(), -1)[0, tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
     {"top_k": 0}],
)  # fmt: skip
def test_a_sampling_value_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**options)  # type: ignore[arg-type]


def test_numbers_of_a_row_do_not_depend_on_slots_or_on_the_order_of_asking() -> None:
    keys = [RowKey(0, "q", at) for at in range(3)]
    one, other = Draws(7), Draws(7)
    for at, key in enumerate(keys):
        one.place(at, key)
        other.place(2 - at, key)
    positions = np.array([5, BLOCK - 1, 3 * BLOCK + 2])
    expected = one.at(np.arange(3), positions)
    assert (other.at(np.array([2, 1, 0]), positions) == expected).all()
    other.at(np.array([2]), np.array([1000]))
    other.place(0, keys[0])
    assert other.at(np.array([0]), positions[:1]) == expected[:1]


def test_numbers_differ_by_seed_step_question_rollout_and_position() -> None:
    rows = [(0, RowKey(0, "q", 0)), (1, RowKey(0, "q", 0)), (0, RowKey(1, "q", 0)),
            (0, RowKey(0, "r", 0)), (0, RowKey(0, "q", 1))]  # fmt: skip
    values = np.concatenate([uniform_block(*row, block) for row in rows for block in (0, 1, 2)])
    assert len(set(values.tolist())) == len(values)


def test_numbers_are_uniform() -> None:
    values = np.concatenate([uniform_block(0, RowKey(0, "q", at), at % 3) for at in range(400)])
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = ((counts - len(values) / 20) ** 2 / (len(values) / 20)).sum()
    assert chi_square < 43.8  # 0.1 % of a chi-square distribution with 19 degrees of freedom


def test_a_used_generator_gives_the_same_numbers() -> None:
    philox = np.random.Philox(3)
    philox.random_raw(5)
    key = RowKey(0, "q", 1)
    assert (uniform_block(7, key, 2, philox) == uniform_block(7, key, 2)).all()


def test_the_numbers_of_a_row_are_these_on_every_machine() -> None:
    np.testing.assert_allclose(uniform_block(1, RowKey(2, "q", 3), 4)[:3], LOCKED, atol=0)


LOCKED = [0.6607061721560169, 0.9199423497375973, 0.5770029554462633]
