"""Alarms of a run: what they leave, how they end it, and what a resume makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import settings

from evenhand.cli import main
from evenhand.training.recipes import recipe_from, write_recipe
from evenhand.trajectory import read_trajectories

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from evenhand.diagnostics.alarms import replay  # noqa: E402
from evenhand.training.checkpoint import Checkpoints  # noqa: E402
from evenhand.training.loop import Trainer  # noqa: E402
from evenhand.training.setup import new_trainer, resumed_trainer  # noqa: E402

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.train, pytest.mark.usefixtures("one_thread")]

DEAD: dict[str, Any] = {
    "rollout__temperature": 1.6,
    "reward__name": "tiny:constant_reward",
    "evaluation__at_start": False,
    "data__evaluate": None,
    "alarms__dead_groups": {"window": 3},
    "alarms__keep": 2,
    "checkpoint__every": 4,
}
"""Every group has the same reward: the alarm for dead groups fires after step 3."""


def begin(world: Path, out: Path, **changes: Any) -> Trainer:
    return new_trainer(recipe_from(settings(world, **(DEAD | changes))), out)


def finish(trainer: Trainer) -> Trainer:
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


def lines(run: Path, name: str = "alarms.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def kept(run: Path) -> dict[str, list[str]]:
    return {
        folder.name: sorted(file.name.split(".")[0] for file in folder.iterdir())
        for folder in sorted((run / "alarms").iterdir())
    }


def stop_after(trainer: Trainer, step: int) -> None:
    class Stop(Exception):  # noqa: N818 a test's own
        pass

    def stepped(progress: Any, _metrics: Any) -> None:
        if progress.step == step:
            raise Stop

    trainer._listener.stepped = stepped  # type: ignore[method-assign]
    with pytest.raises(Stop):
        trainer.run()
    trainer.close()


@pytest.fixture(scope="module")
def warned(tiny_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of five steps whose alarm only warns."""
    out = tmp_path_factory.mktemp("warned") / "run"
    finish(begin(tiny_world, out, steps=5))
    return out


def test_an_alarm_that_warns_is_recorded_and_the_run_goes_on(warned: Path) -> None:
    (alarm,) = lines(warned)
    assert (alarm["step"], alarm["alarm"], alarm["action"]) == (3, "dead_groups", "warn")
    assert "0.0% of 6 groups had rewards that differ" in alarm["message"]
    assert alarm["cause"]
    assert alarm["remedy"]
    assert alarm["figures"]["groups/too_easy"] == 1.0
    assert [row["step"] for row in lines(warned, "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_the_rollouts_of_the_last_steps_before_an_alarm_are_put_aside(warned: Path) -> None:
    assert kept(warned) == {"step-000003": ["step-000002", "step-000003"]}
    for name in ("step-000002.jsonl.gz", "step-000003.jsonl.gz"):
        copy = warned / "alarms" / "step-000003" / name
        assert copy.read_bytes() == (warned / "trajectories" / name).read_bytes()


def test_the_recorded_figures_replay_to_the_recorded_alarms(warned: Path) -> None:
    rules = recipe_from(settings(warned, **DEAD)).alarms
    alarms = [alarm.as_plain() for alarm in replay(lines(warned, "metrics.jsonl"), rules)]
    assert alarms == lines(warned)


def test_without_trajectories_the_last_steps_are_written_when_an_alarm_fires(
    tiny_world: Path, warned: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finish(begin(tiny_world, run, steps=4, tracking__trajectories=False))
    assert not list((run / "trajectories").iterdir())
    assert kept(run) == kept(warned)
    rollouts = list(read_trajectories(run / "alarms" / "step-000003" / "step-000002.jsonl.gz"))
    assert {t.step for t in rollouts} == {2}
    assert all(s.advantage is not None for t in rollouts for s in t.segments)


def test_an_alarm_that_stops_saves_a_checkpoint_and_ends_the_run(
    tiny_world: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    rule = {"window": 3, "action": "stop"}
    trainer = finish(begin(tiny_world, run, steps=5, alarms__dead_groups=rule))
    assert trainer.stopped is not None
    assert trainer.stopped.name == "dead_groups"
    assert trainer.progress.step == 3
    assert Checkpoints(run / "checkpoints").steps()[-1] == 3
    again = finish(resumed_trainer(run))
    assert again.stopped is None
    assert again.progress.step == 5
    assert len(lines(run)) == 1


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_resumed_run_has_the_alarms_of_an_uninterrupted_one(
    tiny_world: Path, warned: Path, tmp_path: Path, stop: int
) -> None:
    run = tmp_path / "run"
    # Checkpoints after steps 2 and 4: the alarm after step 3 comes from a window of both processes.
    stop_after(begin(tiny_world, run, steps=5, checkpoint__every=2), stop)
    finish(resumed_trainer(run))
    assert lines(run) == lines(warned)
    assert kept(run) == kept(warned)


def test_alarms_of_steps_that_are_done_again_are_dropped_first(
    tiny_world: Path, warned: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finish(begin(tiny_world, run, steps=2))
    (run / "alarms.jsonl").write_text('{"step": 3, "alarm": "old"}\n{"step": 4, "al')
    (run / "alarms" / "step-000003").mkdir(parents=True)
    (run / "alarms" / "step-000003" / "step-000009.jsonl.gz").write_bytes(b"half")
    finish(resumed_trainer(run, recipe_from(settings(tiny_world, **DEAD, steps=5))))
    assert lines(run) == lines(warned)
    assert kept(run) == kept(warned)


def test_old_rollouts_are_dropped_and_an_alarms_stay(tiny_world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"tracking__keep_trajectories": 2, "checkpoint__every": 1, "steps": 6}
    finish(begin(tiny_world, run, **changes))
    files = sorted(file.name for file in (run / "trajectories").iterdir())
    assert files == ["step-000005.jsonl.gz", "step-000006.jsonl.gz"]
    assert kept(run) == {"step-000003": ["step-000002", "step-000003"]}


def test_the_command_line_shows_an_alarm_and_ends_with_code_3(
    tiny_world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    rule = {"window": 2, "action": "stop"}
    changes = DEAD | {"steps": 4, "alarms__dead_groups": rule}
    write_recipe(recipe, recipe_from(settings(tiny_world, **changes)))
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(run)]) == 3
    shown = capsys.readouterr()
    # Long lines are folded to the width of the terminal.
    text = " ".join((shown.out + shown.err).split())
    assert "alarm dead_groups after step 2: over the last 2 steps only 0.0%" in text
    assert "the run ends here" in text
    assert "stopped by the alarm dead_groups after step 2" in text
    assert main(["train", "--resume", str(run)]) == 0


def test_the_other_seeds_run_when_an_alarm_stops_one(tiny_world: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    rule = {"window": 2, "action": "stop"}
    changes = DEAD | {"steps": 3, "alarms__dead_groups": rule}
    write_recipe(recipe, recipe_from(settings(tiny_world, **changes)))
    assert main(["train", str(recipe), "--seeds", "0,1", "--out", str(tmp_path / "f")]) == 3
    assert [len(lines(tmp_path / "f" / f"seed-{seed}")) for seed in (0, 1)] == [1, 1]


def test_rules_of_alarms_may_change_on_resume(tiny_world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(begin(tiny_world, run, steps=2))
    changes = DEAD | {"steps": 4, "alarms__dead_groups": {"action": "off"}}
    finish(resumed_trainer(run, recipe_from(settings(tiny_world, **changes))))
    assert not (run / "alarms.jsonl").exists()


def test_the_references_perplexity_is_recorded_where_the_loss_has_it(
    tiny_world: Path, warned: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finish(begin(tiny_world, run, steps=1, loss__kl=0.1))
    (row,) = lines(run, "metrics.jsonl")
    # Before the first update the policy is its own reference.
    assert row["actor/reference_perplexity"] == pytest.approx(np.exp(row["actor/entropy"]), 1e-4)
    assert "actor/reference_perplexity" not in lines(warned, "metrics.jsonl")[0]
