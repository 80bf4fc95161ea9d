"""What the trainer promises as a whole: reports of other projects, one's own parts, chat models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import credited_rollout, settings

from evenhand.core.errors import ConfigError, DataError
from evenhand.credit import credit
from evenhand.task import Limits
from evenhand.training.batching import micro_batches, rows_of, weighted
from evenhand.training.recipes import load_recipe, recipe_from, write_recipe
from evenhand.trajectory import Kind, Trajectory, read_trajectories
from evenhand.trajectory.protocol import Document, render_information
from searching import Found, answer, play, search

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from evenhand.training.checkpoint import Checkpoints  # noqa: E402
from evenhand.training.config import LossSection  # noqa: E402
from evenhand.training.forward import Forward  # noqa: E402
from evenhand.training.loop import Trainer  # noqa: E402
from evenhand.training.losses import SUMS, TokenBatch, token_loss  # noqa: E402
from evenhand.training.setup import load_trained, new_trainer, resumed_trainer  # noqa: E402

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
REPORTS = {row["reported"]: row for row in json.loads((CASES / "reports.json").read_text())}
HOT = {"rollout__temperature": 1.6}


def begin(world: Path, out: Path, **changes: Any) -> Trainer:
    return new_trainer(recipe_from(settings(world, **(HOT | changes))), out)


def finish(trainer: Trainer) -> None:
    try:
        trainer.run()
    finally:
        trainer.close()


def weights(run: Path) -> dict[str, Any]:
    loaded, _ = load_trained(run, device="cpu")
    return {name: p.detach().clone() for name, p in loaded.trainable().items()}


def rollouts_of(run: Path, step: int = 1) -> list[Trajectory]:
    return list(read_trajectories(run / "trajectories" / f"step-{step:06d}.jsonl.gz"))


# --- reports of other projects (tests/data/cases/reports.json) -----------------------------------


def two_searches(name: str, group: str, reward: float, seed: int) -> Trajectory:
    lengths = [
        ("search", 5),
        ("information", 20),
        ("search", 4),
        ("information", 11),
        ("answer", 6),
    ]
    return credited_rollout(name, group, lengths, np.random.default_rng(seed), reward=reward)


def with_other_observations(trajectory: Trajectory) -> Trajectory:
    segments = [
        replace(s, token_ids=(s.token_ids + 1) % 20 + 3) if s.kind is Kind.INFORMATION else s  # type: ignore[operator]
        for s in trajectory.segments
    ]
    return replace(trajectory, segments=tuple(segments))


def test_observations_carry_neither_credit_nor_gradient(tiny_world: Path) -> None:
    assert REPORTS["RAGEN-AI/RAGEN #71"]["area"] == "masks"
    rollouts = [two_searches(f"t{at}", "g", float(at), at) for at in range(3)]
    credited = list(credit(rollouts, "stratified_calibadv"))
    changed = list(credit([with_other_observations(t) for t in rollouts], "stratified_calibadv"))
    for one, other in zip(rows_of(credited), rows_of(changed), strict=True):
        assert np.array_equal(one.targets.advantage, other.targets.advantage)
        assert np.array_equal(one.targets.ids, other.targets.ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_world / "model").eval()
    (micro,) = micro_batches(weighted(rows_of(credited), "token_mean"), 100_000)
    forward = Forward(model, torch.device("cpu"))
    held: list[Any] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: (inputs[0].retain_grad(), held.append(inputs[0]), None)[2]
    )
    outputs = forward(micro, entropy=True)
    handle.remove()
    t = micro.targets
    arrays = (t.advantage, t.sampled, t.old, t.reference, t.weight)
    loss = LossSection(kl=0.1, entropy=0.1)
    token_loss(outputs.logprobs, outputs.entropy, TokenBatch(*map(forward.tensor, arrays)),
               loss).loss.backward()  # fmt: skip
    for row, member in zip(held[0].grad, micro.members, strict=True):
        kinds = [s.kind for s in credited[member.index].segments for _ in range(s.n_tokens)]
        # The state at place p predicts the token at p + 1.
        for place in range(len(member.ids)):
            is_observation = kinds[place + 1] in (Kind.INFORMATION, Kind.PROMPT)
            assert bool((row[place] == 0).all()) == is_observation


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "constant"])
def test_the_gradient_of_the_trainer_does_not_depend_on_the_cut(
    tiny_world: Path, tmp_path: Path, name: str
) -> None:
    assert REPORTS["rllm-org/rllm #508"]["area"] == "masks"
    trainer = begin(tiny_world, tmp_path / "run", loss__aggregation=name, rollout__questions=6)
    model = trainer._parts.loaded.model.double()
    trajectories = list(trainer._credit(trainer._collect(1)[0]).written())
    rows = rows_of(trajectories)
    assert len({len(row.ids) for row in rows}) > 3
    trainer.recipe = trainer.recipe.model_copy(
        update={"optimizer": trainer.recipe.optimizer.model_copy(update={"max_grad_norm": None})}
    )
    found = []
    for micro_tokens in (1, 90, 170, 100_000):
        loss = trainer.recipe.loss.model_copy(update={"micro_tokens": micro_tokens})
        trainer.recipe = trainer.recipe.model_copy(update={"loss": loss})
        sums = np.zeros(len(SUMS))
        trainer.accumulate(rows, sums)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((gradient, sums))
    trainer.close()
    whole, sums = found[-1]
    assert float(whole.norm()) > 0
    for gradient, other in found[:-1]:
        assert float((gradient - whole).abs().max() / whole.abs().max()) < 1e-6
        np.testing.assert_allclose(other, sums, rtol=1e-6, atol=1e-9)


def test_an_observation_that_fills_its_budget_is_kept_and_a_longer_one_cut_between_documents() -> (
    None
):
    assert REPORTS["verl-project/verl #6309"]["area"] == "protocol"
    documents = tuple(Document(f"d{at}", "T", f"text number {at}") for at in range(3))
    length = len(render_information(documents))  # a character is a token here
    for budget, shown in ((length, 3), (length - 1, 2)):
        limits = Limits(max_observation_tokens=budget)
        segment = play([search(), answer()], Found(documents), limits=limits).segments[2]
        assert segment.documents == documents[:shown]
        assert segment.text == render_information(documents[:shown])
        assert segment.text.rstrip().endswith("</information>")


def test_a_misspelt_key_is_refused_and_the_resolved_recipe_stands_before_the_first_step(
    tiny_world: Path, tmp_path: Path
) -> None:
    assert REPORTS["wujwyi/CalibAdv train_grpo.sh"]["area"] == "config"
    path = tmp_path / "r.toml"
    write_recipe(path, recipe_from(settings(tiny_world)))
    path.write_text(path.read_text().replace("group_size", "group_sise"))
    with pytest.raises(ConfigError, match=r"'rollout\.group_sise'.*'rollout\.group_size'"):
        load_recipe(path)
    with pytest.raises(ConfigError, match=r"'loss\.clip_hihg'.*'loss\.clip_high'"):
        load_recipe(None, ["loss.clip_hihg=0.3"])
    trainer = begin(tiny_world, tmp_path / "run", loss__clip_high=0.3)
    trainer.close()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert load_recipe(tmp_path / "run" / "recipe.toml") == trainer.recipe
    assert "clip_low = 0.2" in (tmp_path / "run" / "recipe.toml").read_text()


# --- one's own parts -----------------------------------------------------------------------------


def test_reward_engine_template_and_stratum_of_ones_own_are_what_a_run_uses(
    tiny_world: Path, tmp_path: Path
) -> None:
    changes = {
        "retrieval": {"retriever": "tiny:one_book", "documents": 1},
        "credit": {"estimator": "stratified", "settings": {"stratum": "tiny:by_length"}},
        "rollout__questions": 4,
        "steps": 1,
    }
    finish(begin(tiny_world, tmp_path / "run", **changes))
    rollouts = rollouts_of(tmp_path / "run")
    assert all(t.reward == pytest.approx(tiny.varied(t)) for t in rollouts)
    assert all(t.segments[0].text == tiny.template(t.question) for t in rollouts)
    shown = {d.id for t in rollouts for s in t.segments for d in s.documents or ()}
    assert shown == {"own"}
    # The credit in the file is that of the same strata, and no other.
    own = list(credit(rollouts, "stratified", stratum="tiny:by_length"))
    other = list(credit(rollouts, "stratified"))
    written = [s.advantage for t in rollouts for s in t.segments]
    assert written == pytest.approx([s.advantage for t in own for s in t.segments])
    assert written != pytest.approx([s.advantage for t in other for s in t.segments])


def test_a_chat_template_that_gives_the_same_tokens_trains_to_the_same_weights(
    tiny_world: Path, world_copy: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(world_copy / "model")
    tokenizer.chat_template = tiny.CHAT
    tokenizer.save_pretrained(world_copy / "model")
    finish(begin(tiny_world, tmp_path / "bare", steps=2))
    finish(begin(world_copy, tmp_path / "chat", steps=2, environment__template="tiny:as_message"))
    bare, chat = (rollouts_of(tmp_path / name) for name in ("bare", "chat"))
    for one, other in zip(bare, chat, strict=True):
        ids = [np.concatenate([s.token_ids for s in t.segments]) for t in (one, other)]  # type: ignore[misc]
        assert np.array_equal(*ids)
    first, second = weights(tmp_path / "bare"), weights(tmp_path / "chat")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trajectories", "metrics.jsonl"])
def test_a_run_folder_that_stops_taking_files_is_one_sentence_and_the_checkpoint_stays_whole(
    tiny_world: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    trainer = begin(tiny_world, run, steps=3)

    def spoil(progress: Any, _metrics: Any) -> None:
        path = run / name
        if progress.step == 1 and path.is_dir():
            shutil.rmtree(path)
            path.write_text("")
        elif progress.step == 1:
            path.unlink()
            path.mkdir()

    trainer._listener.stepped = spoil  # type: ignore[method-assign]
    with pytest.raises(DataError, match=rf"{name}.*") as caught:
        finish(trainer)
    assert "\n" not in str(caught.value)
    assert Checkpoints(run / "checkpoints").steps() == [0, 1]
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    if name == "trajectories":
        (run / name).mkdir()
        finish(resumed_trainer(run))
        finish(begin(tiny_world, tmp_path / "whole", steps=3))
        first, second = weights(run), weights(tmp_path / "whole")
        assert all(torch.equal(first[key], second[key]) for key in first | second)
