"""Tokenizers of other libraries behind the small protocol."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer

from evenhand.core.errors import ConfigError
from evenhand.task import Episode, Limits, as_tokenizer
from evenhand.testing.tokenizers import CharacterTokenizer, ChunkTokenizer
from evenhand.trajectory.protocol import Document
from searching import Found, search


def hub_tokenizer() -> HubTokenizer:
    """Bytes, two special tokens, and a post-processor that opens every text with `<s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HubTokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("<|im_end|>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=20)
    return tokenizer


def test_plain_text_gets_no_added_tokens_and_is_never_cut_or_padded() -> None:
    text = "a longer text than eight tokens, with é and 日本"
    tokenizer = as_tokenizer(hub_tokenizer())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert tokenizer.encode("") == []


def test_a_special_token_in_a_passage_stays_text() -> None:
    original = hub_tokenizer()
    end = original.token_to_id("<|im_end|>")
    episode = Episode("Q?", tokenizer=as_tokenizer(original), template=str)
    episode.feed_turn(as_tokenizer(original).encode(search()))
    episode.feed_result(Found((Document("1", "<|im_end|>", "a <|im_end|> b"),)))
    assert end not in episode.context_ids
    assert end in original.encode("<|im_end|>").ids, "the original is left as it was"


def test_a_prompt_keeps_the_special_tokens_that_the_model_expects() -> None:
    original = hub_tokenizer()
    episode = Episode("Q? <|im_end|>", tokenizer=as_tokenizer(original), template=str)
    assert episode.prompt_ids[0] == original.token_to_id("<s>")
    assert episode.prompt_ids[-1] == original.token_to_id("<|im_end|>")
    long = Episode("Q" * 50, tokenizer=as_tokenizer(original), template=str)
    assert len(long.prompt_ids) == 51


def test_an_end_of_sequence_token_stays_in_the_turn_that_sampled_it() -> None:
    original = hub_tokenizer()
    tokenizer = as_tokenizer(original)
    end = original.token_to_id("<|im_end|>")
    episode = Episode("Q?", tokenizer=tokenizer, template=str, limits=Limits(max_invalid=0))
    episode.feed_turn([*tokenizer.encode("no action"), end])
    segment = episode.next().trajectory.segments[1]  # type: ignore[union-attr]
    assert segment.token_ids[-1] == end
    assert segment.text == "no action<|im_end|>"


def test_an_object_with_encode_and_decode_is_taken_as_it_is() -> None:
    tokenizer = CharacterTokenizer()
    assert as_tokenizer(tokenizer) is tokenizer


def test_an_object_without_them_is_refused() -> None:
    with pytest.raises(ConfigError, match="int is no tokenizer: it needs encode"):
        as_tokenizer(3)


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        Episode("Q?", tokenizer=as_tokenizer(hub_tokenizer()), template="searchr1-chat")


def test_half_a_character_at_the_end_of_a_turn_is_no_error() -> None:
    tokenizer = as_tokenizer(hub_tokenizer())
    ids = list(tokenizer.encode("日"))[:2]
    episode = Episode("Q?", tokenizer=tokenizer, template=str, limits=Limits(max_invalid=0))
    episode.feed_turn(ids)
    segment = episode.next().trajectory.segments[1]  # type: ignore[union-attr]
    assert segment.token_ids.tolist() == ids
    assert "\ufffd" in segment.text


def test_a_chunk_tokenizer_reads_its_own_tokens_and_characters() -> None:
    tokenizer = ChunkTokenizer()
    ids = [*tokenizer.encode("a"), *tokenizer.ids(["</sea", "rch>"])]
    assert tokenizer.decode(ids) == "a</search>"
    assert tokenizer.decode([tokenizer.first_id + 99]) == "\ufffd"


# --- transformers, where it is installed ---------------------------------------------------------


def chat_tokenizer() -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=hub_tokenizer(),
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=(
            "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        ),
    )


def test_transformers_messages_go_through_the_chat_template() -> None:
    tokenizer = as_tokenizer(chat_tokenizer())
    episode = Episode("Why?", tokenizer=tokenizer, template="searchr1-chat", think_in_prompt=True)
    text = tokenizer.decode(episode.prompt_ids)
    assert text.startswith("[user]Answer the given question.")
    assert text.endswith("Question: Why?\n<|im_end|>[assistant]<think>")


def test_transformers_plain_text_has_no_special_tokens() -> None:
    original = chat_tokenizer()
    tokenizer = as_tokenizer(original)
    ids = tokenizer.encode("a <|im_end|>")
    assert tokenizer.decode(ids) == "a <|im_end|>"
    assert original.eos_token_id not in ids  # type: ignore[attr-defined]
    assert original.bos_token_id not in ids  # type: ignore[attr-defined]
