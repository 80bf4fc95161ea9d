"""One episode of a search agent: the state machine, its limits, and a check for users' own parts.

`Episode` does no I/O. `run_episode` is the simplest loop around it; any other loop feeds it the
same way. `check_environment` runs scripted episodes through a template, limits and a search.
"""

from evenhand.task.check import (
    CheckSummary,
    GoldCase,
    check_environment,
    check_record,
    gold_turns,
    policy_turn,
)
from evenhand.task.drive import (
    ResponseTokens,
    ScriptedPolicy,
    SearchFunction,
    Turn,
    TurnPolicy,
    response_tokens,
    run_episode,
)
from evenhand.task.episode import Episode
from evenhand.task.limits import PRESETS, Limits, preset
from evenhand.task.requests import (
    Done,
    FailedSearch,
    Generate,
    Labels,
    Request,
    Search,
    SearchOutcome,
)
from evenhand.task.tokens import PromptTokenizer, Tokenizer, as_tokenizer

__all__ = [
    "PRESETS",
    "CheckSummary",
    "Done",
    "Episode",
    "FailedSearch",
    "Generate",
    "GoldCase",
    "Labels",
    "Limits",
    "PromptTokenizer",
    "Request",
    "ResponseTokens",
    "ScriptedPolicy",
    "Search",
    "SearchFunction",
    "SearchOutcome",
    "Tokenizer",
    "Turn",
    "TurnPolicy",
    "as_tokenizer",
    "check_environment",
    "check_record",
    "gold_turns",
    "policy_turn",
    "preset",
    "response_tokens",
    "run_episode",
]
