"""The toy world: a generated encyclopedia, questions that need several searches, a small policy.

* `generate_world` makes entities, passages and questions from a seed; `build_retriever` their
  search engine.
* `Agent` plays a question with a `Skill`; `demonstrate` lets it do so in the real environment.
* `load_policy` loads the warm-start policy that ships with the package; `pretrain` makes one.

`LIMITS`, `DOCUMENTS_SHOWN`, `template` and `notices` are the settings of its episodes.
"""

from evenhand.world.demonstrations import (
    DOCUMENTS_SHOWN,
    LIMITS,
    build_retriever,
    demonstrate,
)
from evenhand.world.generator import (
    DEFAULT_SHARES,
    QuestionKind,
    World,
    generate_world,
)
from evenhand.world.language import notices, template
from evenhand.world.names import NameSplit
from evenhand.world.policy import WARMSTART, load_policy, new_policy
from evenhand.world.skills import Agent, Skill
from evenhand.world.tokenizer import build_fast_tokenizer, build_tokenizer

__all__ = [
    "DEFAULT_SHARES",
    "DOCUMENTS_SHOWN",
    "LIMITS",
    "WARMSTART",
    "Agent",
    "NameSplit",
    "QuestionKind",
    "Skill",
    "World",
    "build_fast_tokenizer",
    "build_retriever",
    "build_tokenizer",
    "demonstrate",
    "generate_world",
    "load_policy",
    "new_policy",
    "notices",
    "template",
]
