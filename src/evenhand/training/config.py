"""What a training run can be told: one frozen model a section of a recipe.

Importable without torch. Names (estimators, rewards, templates, strata) are looked up when a recipe
is read, so that a slip fails before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from evenhand.core.errors import ConfigError
from evenhand.core.plugins import did_you_mean
from evenhand.credit import CreditRule
from evenhand.diagnostics.alarms import AlarmRules
from evenhand.task import Limits, preset
from evenhand.task.prompts import resolve_template
from evenhand.task.rewards import get_reward

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, an unknown key is an error, and `"none"` is `None`.

    TOML has no null: where a setting is optional, the text `none` switches it off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {
            name: None if _is_none(value) and _is_optional(cls, name) else value
            for name, value in data.items()
        }


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "none"


def _without_none_text(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return table
    return {name: None if _is_none(value) else value for name, value in table.items()}


def _is_optional(section: type[BaseModel], name: str) -> bool:
    field = section.model_fields.get(name)
    return field is not None and type(None) in get_args(field.annotation)


class LoraSection(Section):
    """Low-rank adapters (peft) instead of all weights.

    Attributes:
        rank: of the adapters; 0 trains all weights.
        alpha: their output is scaled by `alpha / rank`.
        targets: names of the layers that get one; `all-linear` is every linear layer but the head.
    """

    rank: Annotated[int, Field(ge=0)] = 0
    alpha: Positive = 32.0
    targets: str | list[str] = "all-linear"


class ModelSection(Section):
    """The policy.

    Attributes:
        path: folder or hub name of a causal language model with its tokenizer; `toy` is the warm
            start that comes with the package.
        device: `auto` (a GPU if there is one), or a device of torch.
        precision: of the forward and backward pass. `bf16` is autocast over float32 weights;
            `auto` is bf16 on a GPU and float32 on a CPU, where bf16 is several times slower.
        gradient_checkpointing: recompute activations instead of keeping them.
        attention: implementation in transformers (`sdpa`, `flash_attention_2`, ...); `none` leaves
            the choice to it.
        threads: threads of torch on a CPU; `none` leaves them as they are.
        lora: adapters.
    """

    path: str = "toy"
    device: str = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    attention: str | None = None
    threads: Count | None = None
    lora: LoraSection = LoraSection()


class DataSection(Section):
    """Questions to train and to evaluate on.

    Attributes:
        train: a set (`hotpotqa:train`), a file of questions, a list of these, or `world`: the toy
            world.
        evaluate: the same for held-out questions; left out, nothing is evaluated. `world` is one
            of other names than the training world.
        folder: where standard sets are looked for before the hub.
        shuffle: a new order every pass, from the seed; else the order of the file.
        world: settings of the toy world, if that is the source (`sources.WorldSettings`).
    """

    train: str | list[str] = "world"
    evaluate: str | list[str] | None = "world"
    folder: str | None = None
    shuffle: bool = True
    world: dict[str, Any] = Field(default_factory=dict)


class RetrievalSection(Section):
    """The search engine.

    Attributes:
        retriever: `bm25` over `corpus`, an index folder, an `http(s)://` address, a name of
            `evenhand.retrieval` (`remote`, `hybrid`, `web`, ...) or `module:function`.
        corpus: passages for `bm25`: a set (`hotpotqa`), `union`, or a file. Left out, those of the
            toy world.
        documents: how many a search returns.
        settings: keywords of the retriever.
    """

    retriever: str = "bm25"
    corpus: str | None = None
    documents: Count = 3
    settings: dict[str, Any] = Field(default_factory=dict)


class EnvironmentSection(Section):
    """Prompt and rules of an episode; see `evenhand.task.Limits`.

    Attributes:
        preset: rules by name: `default`, `searchr1`, `calibadv`.
        template: a name, a file with `{question}`, or `module:function`.
        think_in_prompt: the environment writes the opening `<think>`, untrained.
        notices: `module:function` that returns other `Notices`; `none`: the default ones.
        limits: single rules that differ from the preset, such as `max_searches = 6`.
    """

    preset: str = "default"
    template: str = "searchr1"
    think_in_prompt: bool = False
    notices: str | None = None
    limits: dict[str, int | bool | None] = Field(default_factory=dict)

    def rules(self) -> Limits:
        """Return the limits."""
        base = preset(self.preset)
        known = Limits.__dataclass_fields__
        for name in self.limits:
            if name not in known:
                raise ConfigError(
                    f"environment.limits has no rule {name!r}{did_you_mean(name, known)}; it has "
                    f"{', '.join(known)}"
                )
        return Limits(**{name: self.limits.get(name, getattr(base, name)) for name in known})

    @field_validator("limits", mode="before")
    @classmethod
    def _none_inside(cls, value: Any) -> Any:
        return _without_none_text(value)

    @model_validator(mode="after")
    def _check(self) -> EnvironmentSection:
        self.rules()
        resolve_template(self.template)
        return self


class RolloutSection(Section):
    """How rollouts are collected.

    Attributes:
        questions: questions a step.
        group_size: rollouts a question.
        temperature: of sampling; the loss uses log-probabilities at the same temperature.
        top_p: nucleus; below 1 the sampler draws from another distribution than the loss assumes.
        top_k: the same; `none` is off.
        rows: rollouts decoded at a time; `none` leaves it to the policy.
        filter_groups: replace groups whose rewards are all equal by groups of further questions.
        max_refills: how many times a step may draw further questions for that.
    """

    questions: Count = 8
    group_size: Count = 8
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: Count | None = None
    rows: Count | None = None
    filter_groups: bool = False
    max_refills: Count = 3


class RewardSection(Section):
    """What a rollout is worth.

    Attributes:
        name: a named reward, or `module:function`.
        convention: how answers are compared by named rewards.
    """

    name: str = "exact_match"
    convention: str = "squad"

    @model_validator(mode="after")
    def _check(self) -> RewardSection:
        get_reward(self.name, convention=self.convention)
        return self


class CreditSection(Section):
    """The estimator.

    Attributes:
        estimator: a name that `evenhand estimators` lists, or `module:function`.
        settings: its keywords, and `stratum`, `step_score`, `threshold`, `max_think_similarity`.
    """

    estimator: str = "stratified_calibadv"
    settings: dict[str, Any] = Field(default_factory=dict)

    def rule(self) -> CreditRule:
        """Return the checked rule."""
        return CreditRule.from_settings(self.estimator, self.settings)

    @field_validator("settings", mode="before")
    @classmethod
    def _none_inside(cls, value: Any) -> Any:
        return _without_none_text(value)

    @model_validator(mode="after")
    def _check(self) -> CreditSection:
        self.rule()
        return self


class LossSection(Section):
    """The clipped policy gradient; equations are in `evenhand.training.losses`.

    Attributes:
        aggregation: `token_mean`, `sequence_mean` or `constant`.
        constant_length: tokens that `constant` divides each rollout by.
        clip_low: the probability ratio counts down to `1 - clip_low` ...
        clip_high: ... and up to `1 + clip_high`.
        kl: weight of the k3 estimate of the divergence from the starting policy; 0 is off.
        entropy: weight of the entropy bonus; 0 is off.
        old: whose log-probabilities the ratio is taken to: the `sampler`'s, or the `trainer`'s own
            before the first update of the batch (one more forward pass if there are several).
        importance_cap: with `old = "trainer"`, weigh tokens by the trainer's over the sampler's
            probability, at most this; `none` is off.
        mask_truncated: leave rollouts that a limit cut out of loss and denominator. They stay in
            the baseline.
        minibatches: optimiser steps a pass, each over whole groups.
        epochs: passes over a batch.
        micro_tokens: tokens of one forward pass, padding included.
    """

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_length: Count = 512
    clip_low: Share = 0.2
    clip_high: Positive = 0.2
    kl: NotNegative = 0.0
    entropy: NotNegative = 0.0
    old: Literal["sampler", "trainer"] = "sampler"
    importance_cap: Positive | None = None
    mask_truncated: bool = False
    minibatches: Count = 1
    epochs: Count = 1
    micro_tokens: Count = 8192

    @property
    def is_policy_gradient_only(self) -> bool:
        """Whether a token without credit has no loss."""
        return self.kl == 0 and self.entropy == 0


class OptimizerSection(Section):
    """AdamW, and the learning rate over time.

    Attributes:
        lr: the peak.
        betas: decay of the two moments.
        eps: beside the second moment's root.
        weight_decay: on matrices only.
        max_grad_norm: the gradient is scaled down to this norm; `none` is off.
        schedule: a name of `transformers.get_scheduler`.
        warmup: optimiser steps of linear warm-up, a share of all if below 1.
        schedule_steps: optimiser steps that the schedule spans; `none`: those of the run.
        schedule_settings: further keywords, such as `min_lr_rate` of `cosine_with_min_lr`.
    """

    lr: Positive = 1e-6
    betas: tuple[NotNegative, NotNegative] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive | None = 1.0
    schedule: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts",
        "cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay",
    ] = "constant_with_warmup"  # fmt: skip
    warmup: NotNegative = 0.0
    schedule_steps: Count | None = None
    schedule_settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        if max(self.betas) >= 1:
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        return self


class EvaluationSection(Section):
    """Greedy evaluation on held-out questions.

    Attributes:
        every: training steps between two; `none` only at the end (and the start).
        questions: how many, the first of the set; `none` is all.
        at_start: also before the first step.
    """

    every: Count | None = None
    questions: Count | None = 256
    at_start: bool = True


class CheckpointSection(Section):
    """What survives a kill.

    Attributes:
        every: training steps between two; the last step always gets one.
        keep: how many of the newest stay.
    """

    every: Count = 10
    keep: Count = 2


class AlarmSection(AlarmRules):
    """Early warnings: a table an alarm, with its `action` (`off`, `warn`, `stop`) and limits.

    Attributes:
        stagnation: one search a question although several earn more.
        collapse: the language breaks down.
        dead_groups: groups without differing rewards.
        keep: how many of the last steps' rollouts are put aside when an alarm fires.
    """

    keep: Count = 3


class TrackingSection(Section):
    """Where figures go besides `metrics.jsonl`.

    Attributes:
        trajectories: write the credited rollouts of every step.
        keep_trajectories: how many steps' rollouts before the newest checkpoint stay; `none`: all.
        tensorboard: `auto` writes if it is installed.
        wandb: project of Weights & Biases; `none` sends nothing anywhere.
    """

    trajectories: bool = True
    keep_trajectories: Count | None = None
    tensorboard: Literal["auto", "on", "off"] = "auto"
    wandb: str | None = None


class Recipe(Section):
    """A whole training run.

    Attributes:
        name: of the run; the default folder is `runs/NAME`.
        seed: of everything random.
        steps: training steps, one batch of rollouts each.
    """

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Count = 100
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    retrieval: RetrievalSection = RetrievalSection()
    environment: EnvironmentSection = EnvironmentSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    credit: CreditSection = CreditSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    alarms: AlarmSection = AlarmSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.loss.minibatches > self.rollout.questions:
            raise ValueError(
                f"loss.minibatches is {self.loss.minibatches} and a step has only "
                f"{self.rollout.questions} groups (rollout.questions); a mini-batch holds whole "
                "groups"
            )
        if self.loss.importance_cap is not None and self.loss.old == "sampler":
            raise ValueError(
                "loss.importance_cap weighs the trainer's against the sampler's probability; it "
                'needs loss.old = "trainer"'
            )
        if self.data.train != "world" and self.retrieval.retriever == "bm25" and (
            self.retrieval.corpus is None
        ):  # fmt: skip
            raise ValueError(
                "retrieval.corpus is missing: bm25 needs passages; name a set, union or a file"
            )
        return self

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps * self.loss.minibatches * self.loss.epochs

    def warnings(self) -> list[str]:
        """Return what is allowed but seldom meant, one sentence each."""
        found = []
        rule = self.credit.rule()
        rebalances = "rebalance" in self.credit.settings or "calibadv" in self.credit.estimator
        if rebalances and self.loss.aggregation == "sequence_mean":
            found.append(
                f"{rule.estimator} balances sums over tokens, and loss.aggregation = sequence_mean "
                "weighs tokens by the length of their rollout: the two sides are not balanced in "
                "the loss; use token_mean or constant"
            )
        if self.rollout.top_p < 1 or self.rollout.top_k is not None:
            found.append(
                "rollout.top_p or top_k cut the sampler's distribution, and the loss takes "
                "log-probabilities of the uncut one: the gradient is biased towards what was cut"
            )
        if self.rollout.group_size == 1:
            found.append("rollout.group_size = 1: every group-relative advantage is 0")
        if self.optimizer.warmup >= self.optimizer_steps:
            found.append("optimizer.warmup is as long as the run: the peak lr is never reached")
        return found
