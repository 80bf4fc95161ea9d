"""Training: a recipe, rollouts, credit, a clipped policy gradient, checkpoints.

`config` and `recipes` need no torch; `loop.Trainer` is the loop, `losses` the loss, `batching` the
way from trajectories to micro-batches, `checkpoint` what survives a kill.
"""
