"""Rollouts: what a policy is, its back ends, and `collect`, which drives all episodes of a step.

The back end for models of transformers is `evenhand.rollout.transformers.TransformersPolicy`; it is
not imported here because it needs torch.
"""

from evenhand.rollout.collect import (
    Progress,
    ProgressCallback,
    SearchEnvironment,
    Searcher,
    collect,
    group_name,
    leaves_room,
    new_episode,
)
from evenhand.rollout.policy import (
    Policy,
    RowKey,
    SampledTurn,
    Sampling,
    Session,
    Stop,
    TurnRequest,
    generate,
)
from evenhand.rollout.scripted import Script, ScriptedRollouts

__all__ = [
    "Policy",
    "Progress",
    "ProgressCallback",
    "RowKey",
    "SampledTurn",
    "Sampling",
    "Script",
    "ScriptedRollouts",
    "SearchEnvironment",
    "Searcher",
    "Session",
    "Stop",
    "TurnRequest",
    "collect",
    "generate",
    "group_name",
    "leaves_room",
    "new_episode",
]
