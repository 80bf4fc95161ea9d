"""Rows that are laid over each other: every token once, and nothing else changes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.training.batching import Row, Targets, micro_batches
from evenhand.training.packing import packed_batches

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from evenhand.training.forward import Forward, head_on  # noqa: E402
from evenhand.training.sharing import can_share, shared_attention  # noqa: E402

pytestmark = pytest.mark.train

VOCABULARY = 11


def make_row(index: int, ids: list[int], trained: list[int]) -> Row:
    """A row that trains the tokens at places `trained`, the last one after its last token."""
    sequence = np.array(ids)
    position = np.array(trained)
    values = np.random.default_rng(index).normal(size=(5, len(trained)))
    targets = Targets(position, sequence[position], *values)
    return Row(index, "g", sequence[: position[-1]], targets, len(trained))


@st.composite
def row_lists(draw: Any) -> list[Row]:
    """Rows over few tokens, so that many begin alike or are the same."""
    lines = draw(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1,
                          max_size=8))  # fmt: skip
    return [
        make_row(at, line, sorted(draw(st.sets(st.integers(1, len(line) - 1), min_size=1))))
        for at, line in enumerate(lines)
    ]


@given(row_lists(), st.integers(1, 60))
def test_packed_rows_hold_each_different_beginning_once(rows: list[Row], budget: int) -> None:
    batches = packed_batches(rows, budget)
    assert sorted(row.index for batch in batches for row in batch.members) == list(range(len(rows)))
    for batch in batches:
        assert len(batch.members) == 1 or sum(len(r.ids) for r in batch.members) <= budget
        beginnings = {
            tuple(row.ids[:end]) for row in batch.members for end in range(1, len(row.ids) + 1)
        }
        assert len(batch.ids) == len(beginnings)


@given(row_lists())
def test_each_target_is_predicted_by_the_token_before_it(rows: list[Row]) -> None:
    (batch,) = packed_batches(rows, 1000)
    places = batch.predictors[batch.pairs]
    expected = [row.ids[row.targets.position - 1] for row in batch.members]
    assert np.array_equal(batch.ids[places], np.concatenate(expected))
    assert np.array_equal(batch.positions[places], batch.targets.position - 1)
    assert np.array_equal(batch.predicted[batch.pairs], batch.targets.ids)


@given(row_lists())
def test_a_token_attends_to_its_own_row_up_to_itself(rows: list[Row]) -> None:
    (batch,) = packed_batches(rows, 1000)
    found: list[tuple[int, list[int]]] = []
    for group in batch.attentions:
        for queries, keys, seen in zip(group.queries, group.keys, group.seen, strict=True):
            found += [(int(q), keys[: seen + at + 1].tolist()) for at, q in enumerate(queries)]
    beginnings = {
        tuple(row.ids[:end].tolist()) for row in rows for end in range(1, len(row.ids) + 1)
    }
    seen_beginnings = set()
    for token, place in enumerate(batch.outputs):
        query, keys = found[place]
        assert query == token == keys[-1]
        assert batch.positions[keys].tolist() == list(range(len(keys)))
        seen_beginnings.add(tuple(batch.ids[keys].tolist()))
    assert seen_beginnings == beginnings


def llama(**options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def mixed_rows() -> list[Row]:
    """Two questions, rollouts that part at different places, and two that are the same."""
    draw = np.random.default_rng(4)
    rows = []
    for prompt in (draw.integers(0, VOCABULARY, 7), draw.integers(0, VOCABULARY, 9)):
        first = np.concatenate([prompt, draw.integers(0, VOCABULARY, 30)])
        lines = [first, first, first[:25]]
        parted = ((len(prompt), 40), (len(prompt), 3), (20, 12), (24, 1))
        lines += [np.concatenate([first[:cut], draw.integers(0, VOCABULARY, n)])
                  for cut, n in parted]  # fmt: skip
        for line in lines:
            places = np.arange(len(prompt), len(line))
            rows.append(make_row(len(rows), line.tolist(), places[places % 5 < 3].tolist()))
    return rows


def outcome(model: Any, batches: Any) -> tuple[dict[int, np.ndarray], Any]:
    """Log-probabilities of each row and the gradient of a loss that weighs every target."""
    model.zero_grad()
    forward, found = Forward(model, torch.device("cpu"), 1.3), {}
    for batch in batches:
        outputs = forward(batch, entropy=True)
        weight = torch.from_numpy(batch.targets.advantage)
        forward.backward((outputs.logprobs * weight + 0.1 * outputs.entropy).sum(), batch)
        cuts = np.cumsum([len(row.targets) for row in batch.members])[:-1]
        parts = np.split(outputs.logprobs.detach().numpy(), cuts)
        found.update(zip((row.index for row in batch.members), parts, strict=True))
    return found, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("budget", [1, 90, 10_000])
def test_what_is_shared_changes_neither_log_probabilities_nor_gradient(budget: int) -> None:
    model, rows = llama(), mixed_rows()
    expected, gradient = outcome(model, micro_batches(rows, 1))
    found, other = outcome(model, packed_batches(rows, budget))
    for index, values in expected.items():
        assert found[index] == pytest.approx(values, abs=1e-12)
    # Layer norms of transformers round to float32, whatever the model.
    assert float((gradient - other).norm() / gradient.norm()) < 1e-6


def test_the_head_runs_once_for_equal_targets_after_equal_beginnings() -> None:
    model, rows = llama(), mixed_rows()
    (batch,) = packed_batches(rows, 10_000)
    different = {
        (*row.ids[:place].tolist(), int(token))
        for row in rows
        for place, token in zip(row.targets.position, row.targets.ids, strict=True)
    }
    assert len(batch.predictors) == len(different) < len(batch.targets)
    assert len(Forward(model, torch.device("cpu"))(batch).logprobs) == len(batch.targets)


def test_the_gradient_at_what_predicts_nothing_trained_is_exactly_0() -> None:
    model = llama()
    (batch,) = packed_batches(mixed_rows(), 10_000)
    held: list[Any] = []

    def keep(_module: Any, inputs: tuple[Any, ...]) -> None:
        inputs[0].retain_grad()
        held.append(inputs[0])

    model.get_output_embeddings().register_forward_pre_hook(keep)
    Forward(model, torch.device("cpu"))(batch).logprobs.sum().backward()
    idle = np.setdiff1d(np.arange(len(batch.ids)), batch.predictors)
    assert len(idle)
    assert float(held[0].grad[0, idle].abs().max()) == 0


def test_the_model_keeps_its_own_attention_afterwards() -> None:
    model = llama()
    (batch,) = packed_batches(mixed_rows(), 10_000)
    with pytest.raises(RuntimeError, match="stop"), shared_attention(model, batch):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"
    with head_on(model, torch.tensor([0]), torch.tensor([0])):
        model(input_ids=torch.tensor([[1, 2]]))


def test_llama_shares() -> None:
    assert can_share(llama())


def test_layers_with_a_sliding_window_do_not_share() -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    assert not can_share(transformers.MistralForCausalLM(config))


def test_recomputed_activations_have_the_same_gradient() -> None:
    rows, model, other = mixed_rows(), llama(), llama().train()
    with warnings.catch_warnings():
        # transformers renames it.
        warnings.simplefilter("ignore", FutureWarning)
        other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = outcome(model, packed_batches(rows, 90))[1]
    assert torch.equal(outcome(other, packed_batches(rows, 90))[1], expected)


def test_other_attention_does_not_share() -> None:
    assert not can_share(llama(attn_implementation="eager"))


def test_a_model_that_mixes_tokens_by_other_means_does_not_share() -> None:
    model = llama()
    # What a recurrent layer does: each token takes something from the one before it in line.
    model.model.layers[0].register_forward_hook(
        lambda _module, _inputs, output: output + output.roll(1, dims=1)
    )
    assert not can_share(model)
