"""AdamW with weight decay on matrices only, and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenhand.core.errors import ConfigError, require
from evenhand.training.config import OptimizerSection

torch: Any = require("torch", "train", "training")


def make_optimizer(parameters: Mapping[str, Any], section: OptimizerSection) -> Any:
    """Return AdamW over named parameters.

    Vectors (norms, biases) are not decayed.
    """
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
    )


def make_schedule(optimizer: Any, section: OptimizerSection, run_steps: int) -> Any:
    """Return the schedule of transformers; one step of it is one optimiser step.

    Raises:
        ConfigError: keywords that the schedule does not take.
    """
    transformers = require("transformers", "train", "training")
    total = section.schedule_steps or run_steps
    warmup = section.warmup * total if section.warmup < 1 else section.warmup
    try:
        return transformers.get_scheduler(
            section.schedule,
            optimizer,
            num_warmup_steps=round(warmup),
            num_training_steps=total,
            scheduler_specific_kwargs=section.schedule_settings or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.schedule {section.schedule!r} cannot be made: {error}; check "
            "optimizer.schedule_settings"
        ) from error


def optimizer_tensors(optimizer: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimiser as named tensors: `PARAMETER/ENTRY`."""
    tensors = {}
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{entry}"] = torch.as_tensor(value)
    return tensors


def load_optimizer_tensors(
    optimizer: Any, parameters: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Give an optimiser the state that `optimizer_tensors` returned."""
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        # AdamW keeps its count of steps on the CPU and its moments beside the parameter.
        device = value.device if entry == "step" else parameter.device
        optimizer.state[parameter][entry] = value.to(device)


def schedule_state(schedule: Any) -> dict[str, Any]:
    """Return what a schedule needs to go on, as JSON values."""
    return {
        "last_epoch": schedule.last_epoch,
        "step_count": schedule._step_count,
        "last_lr": [float(lr) for lr in schedule.get_last_lr()],
    }


def load_schedule_state(schedule: Any, state: Mapping[str, Any]) -> None:
    """Continue a schedule, and set the learning rates that were in force."""
    schedule.last_epoch = state["last_epoch"]
    schedule._step_count = state["step_count"]
    schedule._last_lr = list(state["last_lr"])
    for group, lr in zip(schedule.optimizer.param_groups, state["last_lr"], strict=True):
        group["lr"] = lr
