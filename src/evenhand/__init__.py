"""Train LLM search agents with reinforcement learning, with fair credit for every step.

The public pieces by room:

* `evenhand.credit`: estimators as pure functions of arrays (numpy only).
* `evenhand.trajectory`: the record of a rollout and its JSON-lines file.
* `evenhand.credit`: the bridge from trajectories and an estimator to credit for each segment.
* `evenhand.diagnostics`: what a user should know about the rollouts of a run.
"""

__version__ = "0.1.0"
