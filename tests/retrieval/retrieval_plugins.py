"""What a user might write beside a recipe; the tests name it as `module:function`."""

from __future__ import annotations

from evenhand.testing.retrievers import ScriptedRetriever
from evenhand.trajectory.protocol import Document


def make(answer: str = "q") -> ScriptedRetriever:
    return ScriptedRetriever({answer: [Document("mine", "", "")]}, fingerprint=None)


def constant(pairs):
    return [0.0] * len(pairs)


def slow() -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document("slow", "", "")]}, seconds=1.0)


def broken() -> ScriptedRetriever:
    raise RuntimeError("no engine")


NUMBER = 3


def plain(a=1, b="x", c=None) -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document(f"{a}{b}{c}", "", "")]})


def raising() -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document("mine", "", "")]}, raising=["bad"])


def hostile() -> ScriptedRetriever:
    text = "\x1b[2Jwiped :cat: [red]C:\\"
    return ScriptedRetriever({"q": [Document("i\x9bd", text, text)]}, failing=["bad\x1b[2J"])


def moody() -> ScriptedRetriever:
    return ScriptedRetriever({"q": [Document("mine", "", "")]}, failing=["bad"])
