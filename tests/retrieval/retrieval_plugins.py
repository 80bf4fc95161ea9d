"""What a user might write beside a recipe; the tests name it as `module:function`."""

from __future__ import annotations

from evenhand.protocol import Document
from evenhand.testing.retrievers import ScriptedRetriever


def make(answer: str = "q") -> ScriptedRetriever:
    return ScriptedRetriever({answer: [Document("mine", "", "")]}, fingerprint=None)


def constant(pairs):
    return [0.0] * len(pairs)


def slow() -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document("slow", "", "")]}, seconds=1.0)


def moody() -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document("mine", "", "")]}, failing=["bad"])
