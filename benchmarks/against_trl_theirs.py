"""TRL's side of `against_trl.py`, run by the Python of its own environment.

    .venv-trl/bin/python benchmarks/against_trl_theirs.py short 2

`GRPOTrainer` as it comes, with its own multi-turn path: an environment with a tool `search`. Only
the lengths are forced: a logits processor is handed to `model.generate`. Prints one line of JSON:
CPU seconds of each step and phase, and the number of tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
               "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}  # fmt: skip

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

import against_trl_workload as work

CHAT = """\
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '<user> ' + message.content + ' ' }}
{%- elif message.role == 'tool' %}{{ '<tool> ' + message.content + ' ' }}
{%- else %}{{ '<asst> ' + (message.content or '') + ' ' }}
{%- for call in message.tool_calls or [] -%}
{{ '<search> ' }}
{%- if call.function.name != 'search' %}{{ call.function.name + ' ' }}{% endif -%}
{%- for name, value in call.function.arguments.items() -%}
{%- if name != 'query' %}{{ name + ' ' }}{% endif -%}{{ value + ' ' }}
{%- endfor -%}
{{ '</search> ' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<asst> ' }}{% endif -%}"""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<asst>",
    "fields": {
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
        "tool_calls": {
            "open": "<search>", "close_pattern": r"</search>\s*", "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "search", "arguments": {"query": "{content}"}},
            },
        },
    },
}  # fmt: skip


def tokenizer() -> Any:
    vocabulary = {word: at for at, word in enumerate((*work.SPECIAL, *work.WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip
    made.chat_template, made.response_template = CHAT, RESPONSE
    return made


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**work.MODEL, attn_implementation="sdpa")
    llama = LlamaForCausalLM(config).float()
    llama.generation_config.eos_token_id = [work.EOS, work.SEARCH_END]
    llama.generation_config.pad_token_id = work.PAD
    return llama


class Environment:
    """One rollout's search engine."""

    plan: work.Workload
    searched = 0

    def reset(self, **_: Any) -> None:
        """Begin."""

    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: what to look up.
        """
        Environment.searched += 1
        return self.plan.page(query, wrapping=2)


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Ends turn number `turn` of each row where the script says; no special token before."""

    def __init__(self, plan: work.Workload, turn: int) -> None:
        lengths = [row for row in plan.turns if len(row) > turn]
        self.rows = len(lengths)
        self._searches = torch.tensor([turn < len(row) - 1 for row in lengths])
        self._last = torch.tensor([row[turn] for row in lengths])
        self._drawn = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ARG002 the interface
        self._drawn += 1
        scores[:, : len(work.SPECIAL)] = float("-inf")
        if self._drawn == 1:
            self._force(scores, self._searches, work.SEARCH)
        ends = self._last == self._drawn
        self._force(scores, ends & self._searches, work.SEARCH_END)
        self._force(scores, ends & ~self._searches, work.EOS)
        return scores

    def _force(self, scores: Any, rows: Any, token: int) -> None:
        at = rows.nonzero().squeeze(1)
        scores[at] = float("-inf")
        scores[at, token] = 0.0


class Timed(GRPOTrainer):  # type: ignore[misc]
    """The trainer, with clocks around two of its methods."""

    plan: work.Workload
    turn = 0
    generating = scoring = 0.0
    counts: dict[str, int]

    def force_lengths(self, plan: work.Workload) -> None:
        self.plan, plain = plan, self.model.generate

        def generate(*arguments: Any, **keywords: Any) -> Any:
            forced = Forced(plan, self.turn)
            self.turn += 1
            assert keywords["input_ids"].shape[0] == forced.rows, "the script was not followed"
            return plain(*arguments, **keywords, logits_processor=LogitsProcessorList([forced]))

        self.model.generate = generate

    def _generate(self, *arguments: Any, **keywords: Any) -> Any:
        self.turn = 0
        began = time.process_time()
        found = super()._generate(*arguments, **keywords)
        self.generating = time.process_time() - began
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.process_time()
        batch = super()._generate_and_score_completions(inputs)
        self.scoring = time.process_time() - began
        completion = batch["completion_mask"]
        self.counts = {
            "tokens": int(batch["prompt_mask"].sum() + completion.sum()),
            "trained": int((completion * batch["tool_mask"]).sum()),
            "credited": int(((completion * batch["tool_mask"]).sum(1)
                             * (batch["advantages"] != 0)).sum()),
        }  # fmt: skip
        return batch


class Clock(TrainerCallback):  # type: ignore[misc]
    """Steps from end to end: data loading, forward, backward, clipping, optimiser."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.steps: list[dict[str, Any]] = []
        self._ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ended = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        step = now - self._ended
        trainer = self.trainer
        self.steps.append({"rollouts": trainer.generating, "training": step - trainer.scoring,
                           "step": step, **trainer.counts})  # fmt: skip
        self._ended = time.process_time()


def settings(folder: str, plan: work.Workload, steps: int) -> Any:
    """Setting A of the study: none of TRL's defaults that cost a CPU time is kept."""
    return GRPOConfig(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=16,
        gradient_accumulation_steps=work.ROWS // 16, num_generations=work.GROUP,
        max_completion_length=1536 if plan.name == "long" else 512,
        max_tool_calling_iterations=8, bf16=False, gradient_checkpointing=False, use_cpu=True,
        learning_rate=work.OPTIMIZER["lr"], adam_beta1=work.OPTIMIZER["betas"][0],
        adam_beta2=work.OPTIMIZER["betas"][1], adam_epsilon=work.OPTIMIZER["eps"],
        max_grad_norm=work.OPTIMIZER["max_grad_norm"], lr_scheduler_type="constant",
        loss_type="dapo", beta=0.0, temperature=1.0, top_p=1.0, top_k=0, shuffle_dataset=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip


def main(name: str, steps: int) -> None:
    torch.set_num_threads(1)
    plan = work.workload(name)
    Environment.plan = plan
    calls = iter(range(steps))

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        step = next(calls)
        return [work.reward(row, step) for row in range(len(completions))]

    clock = Clock()
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in plan.prompts]
    with tempfile.TemporaryDirectory() as folder:
        clock.trainer = trainer = Timed(
            model=model(), processing_class=tokenizer(), args=settings(folder, plan, steps),
            reward_funcs=rewards, train_dataset=Dataset.from_list(rows),
            environment_factory=Environment, callbacks=[clock],
        )  # fmt: skip
        trainer.force_lengths(plan)
        trainer.train()
    assert Environment.searched == steps * plan.searches, "the script was not followed"
    print(json.dumps(clock.steps))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
