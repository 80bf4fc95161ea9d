"""The loop on a tiny taught policy: exactness, options, faults, resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import settings

from evenhand.core.errors import ConfigError, DataError
from evenhand.training.batching import rows_of
from evenhand.training.recipes import recipe_from
from evenhand.trajectory import StopReason, Trajectory, read_trajectories

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from evenhand.training.checkpoint import Checkpoints  # noqa: E402
from evenhand.training.loop import Trainer  # noqa: E402
from evenhand.training.setup import (  # noqa: E402
    load_trained,
    new_trainer,
    open_parts,
    resumed_trainer,
)
from evenhand.training.sources import QuestionStream  # noqa: E402

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

HOT = {"rollout__temperature": 1.6}


def begin(world: Path, out: Path, **changes: Any) -> Trainer:
    return new_trainer(recipe_from(settings(world, **(HOT | changes))), out)


def finish(trainer: Trainer) -> Trainer:
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


def weights(run: Path) -> dict[str, Any]:
    loaded, _ = load_trained(run, device="cpu")
    return {name: p.detach().clone() for name, p in loaded.trainable().items()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first | second)


def rollouts_of(run: Path) -> list[list[Trajectory]]:
    files = sorted((run / "trajectories").iterdir())
    return [list(read_trajectories(file)) for file in files]


def rows_in(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(begin(tiny_world, out, steps=4))
    return out


# --- what a run leaves ---------------------------------------------------------------------------


def test_a_run_writes_recipe_versions_figures_rollouts_and_checkpoints(whole: Path) -> None:
    assert (whole / "recipe.toml").is_file()
    versions = json.loads((whole / "versions.json").read_text())
    assert {"evenhand", "torch", "transformers", "python"} <= versions.keys()
    assert [row["step"] for row in rows_in(whole)] == [0, 1, 2, 3, 4]
    assert [len(step) for step in rollouts_of(whole)] == [8, 8, 8, 8]
    assert Checkpoints(whole / "checkpoints").steps() == [3, 4]


def test_the_rollouts_of_a_step_are_credited_and_multi_turn(whole: Path) -> None:
    rollouts = [t for step in rollouts_of(whole) for t in step]
    assert {s.advantage for t in rollouts for s in t.segments if not s.is_policy} == {0.0}
    assert all(s.advantage is not None for t in rollouts for s in t.segments)
    assert len({len(t.executed_searches()) for t in rollouts}) > 1
    assert {t.step for t in rollouts} == {1, 2, 3, 4}


def test_the_weights_move_and_evaluation_is_recorded_by_hops(tiny_world: Path, whole: Path) -> None:
    from evenhand.training.models import load_model

    start = load_model(recipe_from(settings(tiny_world)).model).trainable()
    assert not same(start, weights(whole))
    last = rows_in(whole)[-1]
    assert last["eval/n"] == 4
    assert last["eval/hops_1/n"] + last["eval/hops_2/n"] == 4


def test_two_runs_of_one_recipe_are_bit_identical(
    tiny_world: Path, whole: Path, tmp_path: Path
) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=4))
    assert same(weights(whole), weights(tmp_path / "run"))


def test_another_seed_is_another_run(tiny_world: Path, whole: Path, tmp_path: Path) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=4, seed=1))
    assert not same(weights(whole), weights(tmp_path / "run"))


# --- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_the_trainer_computes_the_log_probabilities_of_the_sampler(
    tiny_world: Path, tmp_path: Path, temperature: float
) -> None:
    trainer = begin(tiny_world, tmp_path / "run", rollout__temperature=temperature,
                    rollout__questions=8)  # fmt: skip
    kept, _, _ = trainer._collect(1)
    credited = list(trainer._credit(kept).written())
    rows = rows_of(credited)
    values = trainer._forward.logprobs(rows, 300)
    trainer.close()
    assert len({len(row.ids) for row in rows}) > 3
    assert max(len(t.executed_searches()) for t in credited) == 2
    gaps = [
        np.abs(value - row.targets.sampled).max() for value, row in zip(values, rows, strict=True)
    ]
    assert max(gaps) < 1e-4


def test_the_sampler_gap_is_recorded(whole: Path) -> None:
    assert all(row["actor/sampler_gap"] < 1e-4 for row in rows_in(whole)[1:])


@pytest.mark.parametrize("changes", [{"loss__micro_tokens": 1}, {"loss__micro_tokens": 150}])
def test_micro_batches_do_not_change_where_a_run_goes(
    tiny_world: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    finish(begin(tiny_world, tmp_path / "a", steps=1))
    finish(begin(tiny_world, tmp_path / "b", steps=1, **changes))
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    # AdamW's first step is lr * sign of the gradient: compare what the gradient was, not its sign.
    norms = [rows_in(tmp_path / name)[-1]["actor/grad_norm"] for name in ("a", "b")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0
    assert first.keys() == second.keys()


def test_a_step_without_credit_has_no_gradient(tiny_world: Path, tmp_path: Path) -> None:
    trainer = begin(tiny_world, tmp_path / "run", steps=1, reward__name="tiny:constant_reward")
    before = {n: p.detach().clone() for n, p in trainer._parts.loaded.trainable().items()}
    finish(trainer)
    assert rows_in(tmp_path / "run")[-1]["actor/grad_norm"] == 0
    assert same(before, weights(tmp_path / "run"))


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"loss__minibatches": 2, "loss__epochs": 2},
        {"loss__minibatches": 2, "loss__old": "trainer", "loss__importance_cap": 2.0},
        {"loss__old": "trainer", "loss__importance_cap": 2.0},
        {"loss__kl": 0.1, "loss__entropy": 0.01},
        {"loss__aggregation": "sequence_mean", "loss__mask_truncated": True},
        {"loss__aggregation": "constant", "optimizer__weight_decay": 0.1},
        {"model__gradient_checkpointing": True},
        {"optimizer__schedule": "cosine", "optimizer__warmup": 0.2},
        {"optimizer__schedule": "cosine_with_min_lr",
         "optimizer__schedule_settings": {"min_lr_rate": 0.1}},
        {"credit__estimator": "stratified_calibadv"},
        {"credit__estimator": "reinforce_baseline"},
        {"environment__think_in_prompt": True},
        {"optimizer__max_grad_norm": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_trains(tiny_world: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = finish(begin(tiny_world, tmp_path / "run", steps=2, **changes))
    last = rows_in(tmp_path / "run")[-1]
    updates = changes.get("loss__minibatches", 1) * changes.get("loss__epochs", 1)
    assert trainer.progress.updates == 2 * updates
    assert last["actor/grad_norm"] > 0
    assert last["actor/skipped_updates"] == 0


def test_several_updates_clip_some_tokens(tiny_world: Path, tmp_path: Path) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=1, loss__epochs=4, optimizer__lr=0.02))
    last = rows_in(tmp_path / "run")[-1]
    assert last["actor/pg_clipfrac"] + last["actor/pg_clipfrac_lower"] > 0


def test_gradient_checkpointing_changes_no_weight(
    tiny_world: Path, whole: Path, tmp_path: Path
) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=4, model__gradient_checkpointing=True))
    assert same(weights(whole), weights(tmp_path / "run"))


def test_bf16_autocast_keeps_float32_weights(tiny_world: Path, tmp_path: Path) -> None:
    trainer = begin(tiny_world, tmp_path / "run", steps=1, model__precision="bf16")
    finish(trainer)
    assert {p.dtype for p in trainer._parts.loaded.trainable().values()} == {torch.float32}
    assert rows_in(tmp_path / "run")[-1]["actor/grad_norm"] > 0


def test_the_reference_is_the_policy_that_training_started_from(
    tiny_world: Path, tmp_path: Path
) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=2, loss__kl=0.01))
    first, second = (row["actor/kl_loss"] for row in rows_in(tmp_path / "run")[1:])
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-6


def test_lora_trains_adapters_only_and_its_reference_is_the_model_without_them(
    tiny_world: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    changes = {"model__lora": {"rank": 2, "alpha": 4.0}, "loss__kl": 0.01, "steps": 2}
    trainer = finish(begin(tiny_world, tmp_path / "run", **changes))
    assert all("lora_" in name for name in trainer._parts.loaded.trainable())
    first, second = (row["actor/kl_loss"] for row in rows_in(tmp_path / "run")[1:])
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 0


@pytest.mark.parametrize("most", [1, 2])
def test_groups_without_spread_are_replaced_counted_and_kept_in_the_file(
    tiny_world: Path, tmp_path: Path, most: int
) -> None:
    changes = {"rollout__filter_groups": True, "rollout__max_refills": most, "steps": 1,
               "reward__name": "tiny:only_lamps", "rollout__questions": 3}  # fmt: skip
    finish(begin(tiny_world, tmp_path / "run", **changes))
    (rollouts,) = rollouts_of(tmp_path / "run")
    last = rows_in(tmp_path / "run")[-1]
    replaced = [t for t in rollouts if t.metadata.get("replaced")]
    # There are two questions about lamps and three groups to fill: the cap ends the search.
    assert last["groups/refills"] == most
    assert last["groups/without_spread"] == len({t.group for t in replaced}) > 0
    assert all("lamp" in t.question for t in rollouts if not t.metadata.get("replaced"))
    assert {s.advantage for t in replaced for s in t.segments} == {0.0}
    assert last["groups/missing"] == 3 - len(
        {t.group for t in rollouts} - {t.group for t in replaced}
    )


# --- faults --------------------------------------------------------------------------------------


def test_a_failing_search_ends_its_rollouts_and_the_run_goes_on(
    tiny_world: Path, tmp_path: Path
) -> None:
    changes = {"retrieval": {"retriever": "tiny:broken_for_lamps", "documents": 1}, "steps": 2,
               "rollout__questions": 8, "data__evaluate": None}  # fmt: skip
    finish(begin(tiny_world, tmp_path / "run", **changes))
    rollouts = [t for step in rollouts_of(tmp_path / "run") for t in step]
    failed = [t for t in rollouts if t.stop_reason is StopReason.FAILED]
    assert failed
    assert all(t.reward is None for t in failed)
    assert {s.advantage for t in failed for s in t.segments} == {0.0}
    assert sum(row["rollouts/unscored"] for row in rows_in(tmp_path / "run")) == len(failed)


def test_a_reward_that_fails_leaves_that_rollout_unscored(tiny_world: Path, tmp_path: Path) -> None:
    changes = {"reward__name": "tiny:fails_at_times", "steps": 1, "rollout__questions": 8}
    finish(begin(tiny_world, tmp_path / "run", **changes))
    last = rows_in(tmp_path / "run")[-1]
    assert 0 < last["rollouts/reward_errors"] < 32
    assert last["rollouts/reward_errors"] == last["rollouts/unscored"]


def test_a_question_longer_than_the_context_is_passed_over_and_counted(
    world_copy: Path, tmp_path: Path
) -> None:
    row = {"id": "long", "question": "who made the lamp ? " * 60, "golden_answers": ["Anna"]}
    with (world_copy / "questions.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    finish(begin(world_copy, tmp_path / "run", steps=1, rollout__questions=8))
    last = rows_in(tmp_path / "run")[-1]
    assert last["training/questions_too_long"] == 1
    assert all(t.question_id != "long" for t in rollouts_of(tmp_path / "run")[0])


def test_a_model_folder_without_a_tokenizer_is_one_clear_error(
    world_copy: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world_copy / "model" / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"has no tokenizer .*tokenizer\.json"):
        begin(world_copy, tmp_path / "run")


def test_a_missing_model_folder_is_one_clear_error(tiny_world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path '/no/such/model' is no folder"):
        begin(tiny_world, tmp_path / "run", model__path="/no/such/model")


def test_fewer_questions_than_a_step_takes_are_refused(tiny_world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 training questions are fewer than a step takes"):
        begin(tiny_world, tmp_path / "run", rollout__questions=9)


def test_a_gradient_that_is_not_finite_is_dropped_and_counted(
    tiny_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin(tiny_world, tmp_path / "run", steps=1)
    before = {n: p.detach().clone() for n, p in trainer._parts.loaded.trainable().items()}
    monkeypatch.setattr(trainer, "accumulate", lambda *_: float("nan"))
    finish(trainer)
    assert same(before, weights(tmp_path / "run"))


# --- the stream of questions ---------------------------------------------------------------------


def test_the_stream_goes_through_every_question_before_one_comes_again(tiny_world: Path) -> None:
    questions = open_parts(recipe_from(settings(tiny_world))).sources.train
    stream = QuestionStream(questions, seed=3)
    first = [q.id for _ in range(4) for q in stream.take(2)]
    second = [q.id for _ in range(4) for q in stream.take(2)]
    assert sorted(first) == sorted(second) == sorted(q.id for q in questions)
    assert first != second
    again = QuestionStream(questions, seed=3, position=4)
    assert [q.id for q in again.take(2)] == first[4:6]


def test_a_step_never_holds_a_question_twice(tiny_world: Path) -> None:
    questions = open_parts(recipe_from(settings(tiny_world))).sources.train
    stream = QuestionStream(questions, seed=0)
    for _ in range(20):
        taken = stream.take(5)
        more = stream.take(3, besides=taken)
        assert len({q.id for q in taken + more}) == 8


# --- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tiny_world: Path, whole: Path, tmp_path: Path, stop: int
) -> None:
    trainer = begin(tiny_world, tmp_path / "run", steps=4)

    class Stop(Exception):  # noqa: N818 a test's own
        pass

    def stop_at(progress: Any, _metrics: Any) -> None:
        if progress.step == stop:
            raise Stop

    trainer._listener.stepped = stop_at  # type: ignore[method-assign]
    with pytest.raises(Stop):
        trainer.run()
    trainer.close()
    finish(resumed_trainer(tmp_path / "run"))
    assert same(weights(whole), weights(tmp_path / "run"))
    assert [row["step"] for row in rows_in(tmp_path / "run")] == [0, 1, 2, 3, 4]
    ids = [t.id for step in rollouts_of(tmp_path / "run") for t in step]
    assert len(ids) == len(set(ids)) == 32


def test_resume_drops_half_lines_debris_and_later_steps(
    tiny_world: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finish(begin(tiny_world, run, steps=2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "x": 1}\n{"step": 4, "tru')
    (run / "trajectories" / "step-000003.jsonl.gz").write_bytes(b"half")
    (run / "evaluations" / "step-000003.jsonl.gz").write_bytes(b"half")
    (run / "checkpoints" / ".step-000003.77").mkdir()
    (run / "checkpoints" / ".step-000003.77" / "weights.safetensors").write_bytes(b"half")
    recipe = recipe_from(settings(tiny_world, **HOT, steps=4))
    finish(resumed_trainer(run, recipe))
    assert [row["step"] for row in rows_in(run)] == [0, 1, 2, 3, 4]
    assert not list((run / "checkpoints").glob(".*"))
    assert not (run / "evaluations" / "step-000003.jsonl.gz").exists()
    assert same(weights(whole), weights(run))


def test_evaluations_leave_their_rollouts_in_the_run_folder(whole: Path) -> None:
    rows = [row for row in rows_in(whole) if "eval/exact_match" in row]
    files = sorted((whole / "evaluations").iterdir())
    assert [file.name for file in files] == [f"step-{row['step']:06d}.jsonl.gz" for row in rows]
    for row, file in zip(rows, files, strict=True):
        scores = [t.scores for t in read_trajectories(file)]
        assert len(scores) == row["eval/n"]
        exact = [score["exact_match"] for score in scores if score is not None]
        assert np.mean([float(value or 0) for value in exact]) == pytest.approx(
            row["eval/exact_match"]
        )


def test_a_finished_run_resumes_to_itself(tiny_world: Path, tmp_path: Path) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    finish(resumed_trainer(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_resume_with_lora_several_updates_and_a_schedule(tiny_world: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    changes: dict[str, Any] = {"model__lora": {"rank": 2}, "loss__minibatches": 2, "steps": 3,
               "optimizer__schedule": "cosine", "loss__kl": 0.05}  # fmt: skip
    finish(begin(tiny_world, tmp_path / "a", **changes))
    trainer = begin(tiny_world, tmp_path / "b", **changes)
    trainer.recipe = trainer.recipe.model_copy(update={"steps": 2})
    finish(trainer)
    finish(resumed_trainer(tmp_path / "b"))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_what_would_change_the_run_cannot_change_on_resume(
    tiny_world: Path, tmp_path: Path
) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=1))
    other = recipe_from(settings(tiny_world, **HOT, optimizer__lr=0.5, steps=1))
    with pytest.raises(ConfigError, match=r"optimizer\.lr cannot change when"):
        resumed_trainer(tmp_path / "run", other)


def test_a_folder_that_holds_a_run_is_not_overwritten(tiny_world: Path, tmp_path: Path) -> None:
    begin(tiny_world, tmp_path / "run").close()
    with pytest.raises(DataError, match="holds a run already; continue it with --resume"):
        begin(tiny_world, tmp_path / "run")


def test_two_processes_cannot_train_in_one_folder(tiny_world: Path, tmp_path: Path) -> None:
    trainer = begin(tiny_world, tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="another process is training"):
        resumed_trainer(tmp_path / "run")
    trainer.close()
    resumed_trainer(tmp_path / "run").close()


def test_a_damaged_checkpoint_is_one_clear_error(tiny_world: Path, tmp_path: Path) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=1))
    path = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert path is not None
    (path / "weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"weights\.safetensors cannot be read"):
        resumed_trainer(tmp_path / "run")


def test_a_checkpoint_of_another_model_is_refused(tiny_world: Path, tmp_path: Path) -> None:
    finish(begin(tiny_world, tmp_path / "run", steps=1))
    parts = open_parts(recipe_from(settings(tiny_world)))
    loaded = replace(parts.loaded, model=torch.nn.Linear(2, 2))
    trained = replace(parts.trained, loaded=loaded)
    with pytest.raises(DataError, match="holds the weights of another model"):
        Checkpoints(tmp_path / "run" / "checkpoints").load(trained)


def test_tensorboard_gets_the_figures_and_a_resumed_run_goes_on(
    tiny_world: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changes = {"tracking__tensorboard": "on", "steps": 2}
    finish(begin(tiny_world, tmp_path / "run", **changes))
    recipe = recipe_from(settings(tiny_world, **HOT, **(changes | {"steps": 3})))
    finish(resumed_trainer(tmp_path / "run", recipe))
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("actor/grad_norm")]
    assert steps == [1, 2, 3]
