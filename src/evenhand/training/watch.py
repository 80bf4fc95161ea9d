"""The alarms of a run: what fires is written down, and the rollouts before it are put aside."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evenhand.diagnostics.alarms import Action, Alarm, Alarms, is_training_step
from evenhand.training.config import Recipe
from evenhand.training.metrics import Metrics
from evenhand.training.run_folder import RunFolder
from evenhand.trajectory import Trajectory


class AlarmWatch:
    """Looks at every step of a run."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        """Look again at the steps that the run has recorded, without recording their alarms twice.

        Without `tracking.trajectories` the rollouts of earlier steps are gone after a resume: an
        alarm then puts aside those since.
        """
        self._run = run
        self._alarms = Alarms(recipe.alarms)
        self._has_files = recipe.tracking.trajectories
        self._last: deque[tuple[int, Sequence[Trajectory] | None]] = deque(
            maxlen=recipe.alarms.keep
        )
        for row in run.rows():
            if is_training_step(row):
                self._alarms.update(row["step"], row)
                if self._has_files:
                    self._last.append((row["step"], None))

    def look(self, step: int, figures: Metrics, rollouts: Sequence[Trajectory]) -> list[Alarm]:
        """Return the alarms of a step whose figures and rollouts are written.

        Raises:
            DataError: they cannot be recorded.
        """
        self._last.append((step, None if self._has_files else rollouts))
        fired = self._alarms.update(step, figures)
        if fired:
            self._run.write_alarms([alarm.as_plain() for alarm in fired])
            self._run.keep(step, dict(self._last))
        return fired


def stopping(fired: Sequence[Alarm]) -> Alarm | None:
    """Return the alarm that ends the run, if one does."""
    return next((alarm for alarm in fired if alarm.action is Action.STOP), None)
