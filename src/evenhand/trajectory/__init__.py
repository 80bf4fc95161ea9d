"""The record of one rollout, and the JSON-lines file that holds many.

The file is UTF-8, one trajectory a line, gzip by suffix. `docs/trajectory-file.md` describes every
field.
"""

from evenhand.trajectory.fields import golden_answers
from evenhand.trajectory.lines import (
    SCHEMA,
    parse_json,
    parse_line,
    read_trajectories,
    to_line,
    trajectory_from_dict,
    trajectory_to_dict,
    write_lines,
    write_trajectories,
)
from evenhand.trajectory.records import (
    POLICY_KINDS,
    Kind,
    Segment,
    Source,
    StopReason,
    Trajectory,
)

__all__ = [
    "POLICY_KINDS",
    "SCHEMA",
    "Kind",
    "Segment",
    "Source",
    "StopReason",
    "Trajectory",
    "golden_answers",
    "parse_json",
    "parse_line",
    "read_trajectories",
    "to_line",
    "trajectory_from_dict",
    "trajectory_to_dict",
    "write_lines",
    "write_trajectories",
]
