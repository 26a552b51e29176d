"""The promises of extras/judge.py: the recogniser knows every story and its probability, and each slip."""

import importlib.util
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import storybook
import train
from model import LanguageModel, ModelConfig
from support.runtime import chat_roles
from tokenizer import count_chunks, encode_chat, train_bpe

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


class KnowsTheGrammar(torch.nn.Module):
    """A model with the true probability of each story; what ends one is certain."""

    def __init__(self, tokenizer):
        super().__init__()
        self.config, self.tokenizer = ModelConfig(vocab_size=500, context=400), tokenizer
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        nats, counted = 0.0, [[id for id in row if id != -100] for row in y.tolist()]
        for row in counted:
            for story in self.tokenizer.decode(row).split("<|endoftext|>")[:-1]:
                nats -= judge.recognise(story)[0]  # of nothing but a whole story
        return None, torch.tensor(nats / sum(map(len, counted)), dtype=torch.float64)


def test_the_floor_is_reached_by_a_model_that_knows_the_grammar(small):
    """From a story's beginning; in windows cut anywhere it does not know what stood before the cut."""
    _, tokenizer = small
    ids = np.array([id for text, _ in STORIES for id in [*tokenizer.encode(text), tokenizer.end_of_text]])
    floor = -math.fsum(log_prob for _, log_prob in STORIES) / len(ids)
    model, off = KnowsTheGrammar(tokenizer), torch.autocast("cpu", enabled=False)
    loss, _ = train.evaluate(model, ids, tokenizer, 4, off, windows="documents")
    assert loss == pytest.approx(floor, abs=1e-9)
    with pytest.raises(TypeError):
        train.evaluate(model, ids, tokenizer, 4, off, windows="stream")


# ---------------------------------------------------------------------------------------------- conversations


class Speaker:
    """A model that answers the requests that it knows as it is told, and all others with an end of turn."""

    def __init__(self, tokenizer, known):
        self.tokenizer, self.known = tokenizer, known
        self.config, self.head_weight = ModelConfig(vocab_size=500, context=400), torch.zeros(1)

    def generate(self, idx, max_new_tokens, temperature, n_ids):
        assert temperature == 0
        end = self.tokenizer.specials["<|end|>"]
        texts = [self.known.get(self.tokenizer.decode(row).split("<|user|>")[1].split("<|end|>")[0], "")
                 for row in idx.tolist()]
        rows = [[*self.tokenizer.encode(text), end] for text in texts]
        for t in range(max(map(len, rows))):
            yield torch.tensor([[row[t] if t < len(row) else 7] for row in rows])


def test_answers_to_requests_of_all_lengths_and_what_they_use(small):
    """True stories are accepted, those with another name, animal or colour are not, nor one that is cut."""
    _, tokenizer = small
    requests = judge.draw_requests(12, 5)
    assert len({len(text) for text, _ in requests}) > 3
    for text, named in requests:
        assert all(re.search(rf"\b{word}\b", text) for word in named.values())
        assert {"hero", "kind", "colour"} <= named.keys()
    known = {turns[0]: turns[1] for turns, _, _ in storybook.conversations(2000, 5)}
    for changes in ({}, {"hero": "name"}, {"kind": "animal"}, {"colour": "colour"}):
        stories = dict(known)
        for text, named in requests[:6]:
            for slot in changes:
                stories[text] = re.sub(rf"\b{named[slot]}\b", "Nobody", stories[text])
        told = judge.answer(Speaker(tokenizer, stories), tokenizer, [text for text, _ in requests])
        assert told == [stories[text] for text, _ in requests]
        shares = judge.judge_requests(requests, told)
        for what in ("name", "animal", "colour"):
            assert shares[what] == (0.5 if what in changes.values() else 1)
        assert shares["all three"] == shares["accepted"] == (0.5 if changes else 1)
    cut = judge.judge_requests(requests, [known[text][:-1] for text, _ in requests])
    assert cut["accepted"] == 0 and cut["all three"] == 1


def test_conversations_are_read_on_the_assistants_tokens(small):
    """The loss is train.py's, the floor that of the conversations; who knows nothing is never right."""
    model, tokenizer = LanguageModel(replace(small[0].config, context=800)).eval(), small[1]
    tokens, nats, floor, questions, right = judge.read_conversations(model, tokenizer, 5, 9)
    ids, n_questions = [], 0
    for turns, _, _ in storybook.conversations(5, 9):
        n_questions += len(turns) // 2 - 1
        turns = [(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)]
        ids += [*encode_chat(tokenizer, turns), tokenizer.end_of_text]
    _, targets = train.validation_stream(np.array(ids), tokenizer.end_of_text, chat_roles(tokenizer))
    off = torch.autocast("cpu", enabled=False)
    loss, _ = train.evaluate(model, np.array(ids), tokenizer, 1, off, "documents", chat_roles(tokenizer))
    assert tokens == (targets != -100).sum() and nats / tokens == pytest.approx(loss, rel=1e-5)
    assert floor == pytest.approx(-sum(p for _, _, p in storybook.conversations(5, 9)))
    assert (questions, right) == (n_questions, 0)
