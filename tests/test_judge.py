"""The promises of extras/judge.py: the recogniser knows every story and its probability, and each slip."""

import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch

import storybook
from model import LanguageModel, ModelConfig
from tokenizer import count_chunks, train_bpe

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("judge", ROOT / "extras" / "judge.py")
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)

STORIES = list(storybook.stories(60, 7))


def test_every_story_is_recognised_with_its_probability():
    for text, log_prob in STORIES:
        found, wrong = judge.recognise(text)
        assert found == pytest.approx(log_prob, abs=1e-9) and wrong == ()


def test_what_is_no_story_is_not_recognised():
    text = STORIES[0][0]
    for spoilt in (text[:-1], text + " ", text.replace(".", "!", 1), text[1:], "", "Once upon a time"):
        assert judge.recognise(spoilt) is None


def test_a_word_that_changes_is_a_slip_of_its_kind():
    """The last mention of the colour, or of a name, becomes another one."""
    slips = {"colour": 0, "name": 0}
    for i, (text, _) in enumerate(STORIES):
        teller = storybook.Teller(random.Random(7 << 32 | i)).tell(storybook.BOOK)
        for kind, slot, table in (("colour", "colour", storybook.WORDS["colour"]),
                                  ("name", "friend", storybook.GIRLS + storybook.BOYS)):
            word = teller.slots[slot]
            if text.count(word) < 2:
                continue
            at = text.rindex(word)
            other = next(w for w in table if w != word and w not in text)
            found = judge.recognise(text[:at] + other + text[at + len(word):])
            if found is None:  # the word stood inside another one
                continue
            assert found[0] == -math.inf and slot in found[1]
            shares = judge.judge([text[:at] + other + text[at + len(word):]])
            assert shares["accepted"] == 0 and shares["but for words that change"] == 1
            assert shares[f"{kind} stays"] == 0 and shares["animal stays"] == 1
            slips[kind] += 1
    assert min(slips.values()) > 20


def test_shares_are_counted_over_all_texts():
    shares = judge.judge([STORIES[0][0], "no story", STORIES[1][0], ""])
    assert set(shares.values()) == {0.5}


@pytest.fixture(scope="module")
def small():
    tokenizer = train_bpe(count_chunks(text for text, _ in STORIES), 500)
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocab_size=500, context=400, n_layer=1, d_model=16, n_head=2, d_ff=16)).eval(), tokenizer


def test_losses_by_kind_add_up_to_the_loss_and_the_floor(small):
    model, tokenizer = small
    table = judge.losses_by_kind(model, tokenizer, 20, 7)
    nats = tokens = 0
    for text, _ in STORIES[:20]:
        ids = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode(text), tokenizer.end_of_text]])
        nats += model(ids[:, :-1], ids[:, 1:])[1].item() * (ids.size(1) - 1)
        tokens += ids.size(1) - 1
    assert sum(t for t, _, _ in table.values()) == tokens
    assert sum(n for _, n, _ in table.values()) == pytest.approx(nats, rel=1e-4)
    assert sum(f for _, _, f in table.values()) == pytest.approx(-sum(p for _, p in STORIES[:20]), abs=1e-6)
    assert table["colour, again"][2] == 0 and table["colour, first"][2] == pytest.approx(20 * math.log(12))


def test_generated_stories_are_as_many_as_asked_for_and_the_same_for_a_seed(small):
    model, tokenizer = small
    texts = judge.generate_stories(model, tokenizer, 7, 1.0, 3, batch=4)
    assert len(texts) == 7 and texts == judge.generate_stories(model, tokenizer, 7, 1.0, 3, batch=4)
    assert judge.judge(texts)["accepted"] == 0
