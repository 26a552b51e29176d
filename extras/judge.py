"""
What has a model learned of the storybook? Exact answers, since the stories come from a known grammar.

    python extras/judge.py --checkpoint out/tiny/ckpt.pt
    python extras/judge.py --checkpoint out/chat/ckpt.pt --chat

Two tables: the loss by kind of token (grammar, names, animals, colours, things and places when they are first
told and when they come back), with the floor of each; and of 300 stories that the model generates, the share
that the grammar accepts, and the share in which names, animals and colours stay the same throughout. With
--chat: the loss on the assistant's tokens and its floor, the share of questions answered rightly, and of
the stories told on 300 requests for a hero, an animal and a colour, the share that has them.

Every story can be derived in one way only, and at every fork the text tells which way was taken. So to
recognise a story is to generate it again, choosing at each fork what agrees with the text.
"""

import math
import os
import random
import re
import sys
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

import storybook
from support import need
from support.runtime import open_model, run_main, start_ids
from support.settings import CommandLine
from tokenizer import encode_chat

KINDS = {"hero": "name", "friend": "name", "kind": "animal", "friend.kind": "animal", "colour": "colour",
         "thing": "thing", "place": "place"}
END = "\0"  # stands for the end of a story: a character that no story has
CHECKED = ("name", "animal", "colour")


# ----------------------------------------------------------------------------------------------------------
# The recogniser


def words_for(slot, table, slots):
    """The words that may stand in a slot, given the slots that are filled."""
    teller = storybook.Teller(None)
    teller.slots = slots
    return teller.words_for(slot, table)


def others(slot, table, slots):
    """The words that stand in a filled slot by mistake: other names, animals, colours, pronouns."""
    if slot.split(".")[-1] in ("he", "him", "his", "He"):
        return {"he": ("he", "she"), "him": ("him", "her"), "his": ("his", "her"), "He": ("He", "She")}[
            slot.split(".")[-1]]
    if slot in ("hero", "friend"):
        return storybook.GIRLS + storybook.BOYS
    if slot in ("kind", "friend.kind"):
        return storybook.ANIMALS + ["girl", "boy"]
    return storybook.WORDS.get(table, ())


def derivations(text, parts, at=0, slots=None, log_prob=0.0, wrong=()):
    """Yield (end, slots, log p, wrong) for each way to derive a beginning of text[at:] from the parts.

    wrong lists the slots that come back as another word than was first told: a slip that goes on being read.
    """
    slots = slots or {}
    if not parts:
        yield at, slots, log_prob, wrong
        return
    part, rest = parts[0], parts[1:]
    if isinstance(part, str):
        if text.startswith(part, at):
            yield from derivations(text, rest, at + len(part), slots, log_prob, wrong)
    elif isinstance(part, list):
        for option in part:
            yield from derivations(text, [*option, *rest], at, slots, log_prob - math.log(len(part)), wrong)
    else:
        slot, table = part
        if slot in slots:
            if text.startswith(slots[slot], at):
                yield from derivations(text, rest, at + len(slots[slot]), slots, log_prob, wrong)
            for word in others(slot, table, slots):
                if word != slots[slot] and text.startswith(word, at):
                    yield from derivations(text, rest, at + len(word), slots, log_prob, (*wrong, slot))
            return
        words = words_for(slot, table, slots)
        for word in words:
            if text.startswith(word, at):
                yield from derivations(text, rest, at + len(word), storybook.fill(slots, slot, word),
                                       log_prob - math.log(len(words)), wrong)


def recognise(text):
    """A text -> (log p under the grammar, slots that went wrong), or None if it is no story at all.

    log p is -inf if slots went wrong.
    """
    whole = [found for found in derivations(text, storybook.BOOK) if found[0] == len(text)]
    if not whole:
        return None
    _, _, log_prob, wrong = min(whole, key=lambda found: len(found[3]))
    return (-math.inf if wrong else log_prob), wrong


# ----------------------------------------------------------------------------------------------------------
# The floor at each token


def tellings(text, parts, at=0, slots={}, p=1.0):
    """Yield (characters, probability) for each way to tell the parts: how far it agrees with text.

    What departs from the text is not told on, so there are few.
    """
    part, rest = (parts[0], parts[1:]) if parts else ("", [])
    if at == len(text):
        yield at, p
    elif isinstance(part, list):
        for option in part:
            yield from tellings(text, [*option, *rest], at, slots, p / len(part))
    elif isinstance(part, tuple) and part[0] not in slots:
        words = words_for(*part, slots)
        for word in words:
            filled = storybook.fill(slots, part[0], word)
            yield from tellings(text, [word, *rest], at, filled, p / len(words))
    else:
        told = part if isinstance(part, str) else slots[part[0]]
        agree = len(os.path.commonprefix([told, text[at:at + len(told)]]))
        if not told or agree < len(told):
            yield at + agree, p
        else:
            yield from tellings(text, rest, at + agree, slots, p)


def floors(pieces):
    """The texts of a story's tokens, END for its end -> the floor at each, in bits.

    That is -log2 of its probability, given the text before; None from where no story goes on like this. The
    sum is exact. Of a word that is cut into tokens, the way it is cut may give away more than the text does.
    """
    text = "".join(pieces)
    departing = [0.0] * (len(text) + 1)  # the probability that a story agrees with just so many characters
    for agree, p in tellings(text, [*storybook.BOOK, END]):
        departing[agree] += p
    agreeing = list(accumulate(reversed(departing)))[::-1]  # ... with at least so many
    found, at = [], 0
    for piece in pieces:
        before, at = agreeing[at], at + len(piece)
        found.append(math.log2(before / agreeing[at]) if agreeing[at] else None)
    return found


# ----------------------------------------------------------------------------------------------------------
# Generated stories


@torch.no_grad()
def generate_stories(model, tokenizer, n, temperature, seed, batch=50):
    """n stories as the model generates them; one that does not end within the context is cut there."""
    generator = torch.Generator(model.head_weight.device).manual_seed(seed)
    start = start_ids(model.config, tokenizer)
    texts = []
    while len(texts) < n:
        idx = torch.tensor([start] * min(batch, n - len(texts)), device=generator.device)
        columns = list(model.generate(idx, model.config.context - len(start), temperature,
                                      generator=generator, n_ids=tokenizer.vocab_size))
        for ids in torch.cat(columns, dim=1).tolist():
            end = ids.index(tokenizer.end_of_text) if tokenizer.end_of_text in ids else len(ids)
            texts.append(tokenizer.decode(ids[:end]))
    return texts


def judge(texts):
    """{what: share of the texts}: accepted by the grammar, and of which names, animals, colours stay."""
    found = [recognise(text) for text in texts]
    shares = {"accepted": sum(f is not None and not f[1] for f in found),
              "but for words that change": sum(f is not None for f in found)}
    for kind in CHECKED:
        shares[f"{kind} stays"] = sum(f is not None and all(KINDS.get(slot) != kind for slot in f[1])
                                      for f in found)
    return {what: count / len(texts) for what, count in shares.items()}


# ----------------------------------------------------------------------------------------------------------
# Loss by kind of token


class Annotator(storybook.Teller):
    """Generates a story and notes of each character its kind, and each choice's share of -log p."""

    def __init__(self, rng):
        super().__init__(rng)
        self.spans = []  # (start, end, kind)
        self.costs = []  # (kind, nats)
        self.kind = "grammar"

    def choose(self, options):
        self.costs.append((self.kind, math.log(len(options))))
        return super().choose(options)

    def word(self, slot, table):
        again = slot in self.slots
        kind = KINDS.get(slot)
        self.kind = f"{kind}, {'again' if again else 'first'}" if kind else "grammar"
        word = super().word(slot, table)
        if kind:
            self.spans.append((len(self.text), len(self.text) + len(word), self.kind))
        self.kind = "grammar"
        return word


@torch.no_grad()
def losses_by_kind(model, tokenizer, n, seed):
    """{kind: (tokens, nats, nats of the floor)} over n validation stories, each read from its beginning."""
    tokens, nats, floor = defaultdict(int), defaultdict(float), defaultdict(float)
    start = start_ids(model.config, tokenizer)
    for i in range(n):
        story = Annotator(random.Random(seed << 32 | i)).tell(storybook.BOOK)
        ids = tokenizer.encode(story.text) + [tokenizer.end_of_text]
        idx = torch.tensor([start + ids], device=model.head_weight.device)
        if idx.size(1) - 1 > model.config.context:
            continue
        logits = model(idx[:, :-1])[0][0, len(start) - 1:]
        loss = F.cross_entropy(logits.float(), idx[0, len(start):], reduction="none").tolist()
        kinds = ["grammar"] * (len(story.text.encode("utf-8")) + 1)
        for begin, end, kind in story.spans:
            kinds[begin:end] = [kind] * (end - begin)
        at = 0
        for id, x in zip(ids, loss):
            size = 1 if id == tokenizer.end_of_text else len(tokenizer.token_bytes(id))
            kind = next((k for k in kinds[at:at + size] if k != "grammar"), "grammar")
            tokens[kind] += 1
            nats[kind] += x
            at += size
        for kind, cost in story.costs:
            floor[kind] += cost
    return {kind: (tokens[kind], nats[kind], floor[kind]) for kind in sorted(tokens)}


# ----------------------------------------------------------------------------------------------------------
# Conversations

ASKED = {"name": "hero", "animal": "kind", "colour": "colour"}


def draw_requests(n, seed):
    """n requests that name a hero, an animal and a colour -> [(request, {slot: word that it names})]."""
    found = []
    i = 0
    while len(found) < n:
        talker = storybook.Talker(random.Random(seed << 32 | i)).tell(storybook.TALK)
        request, _, rest = talker.text.partition("~")
        named = {slot: word for slot, word in talker.slots.items()
                 if slot in ("hero", "kind", "trait", "colour", "thing") and has_word(request, word)}
        if named.keys() >= set(ASKED.values()):
            found.append((request, named))
        i += 1
    return found


def has_word(text, word):
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


@torch.no_grad()
def answer(model, tokenizer, requests):
    """The answer to each request, of likeliest tokens. Requests of the same length at once: no padding."""
    end = tokenizer.specials["<|end|>"]
    start = start_ids(model.config, tokenizer)
    prompts = [start + encode_chat(tokenizer, [("user", text), ("assistant", None)]) for text in requests]
    answers = {}
    for length in sorted({len(ids) for ids in prompts}):
        rows = [i for i, ids in enumerate(prompts) if len(ids) == length]
        idx = torch.tensor([prompts[i] for i in rows], device=model.head_weight.device)
        columns = []
        ended = torch.zeros(len(rows), 1, dtype=torch.bool, device=idx.device)
        for column in model.generate(idx, model.config.context - length, temperature=0,
                                     n_ids=tokenizer.vocab_size):
            columns.append(column)
            ended |= column == end
            if ended.all():
                break
        for i, ids in zip(rows, torch.cat(columns, dim=1).tolist()):
            answers[i] = tokenizer.decode(ids[:ids.index(end)] if end in ids else ids)
    return [answers[i] for i in range(len(requests))]


def judge_requests(requests, stories):
    """{what: share of the stories that have the word asked for}, that have all three of them, and that the
    grammar accepts, with all that was asked for in its place throughout."""
    counts = dict.fromkeys([*ASKED, "all three", "accepted"], 0)
    for (_, named), story in zip(requests, stories):
        used = [has_word(story, named[slot]) for slot in ASKED.values()]
        for what, uses in zip(ASKED, used):
            counts[what] += uses
        counts["all three"] += all(used)
        slots = named | storybook.pronouns(named["hero"])
        counts["accepted"] += any(end == len(story) and not wrong for end, _, _, wrong
                                  in derivations(story, storybook.BOOK, slots=slots))
    return {what: count / len(requests) for what, count in counts.items()}


@torch.no_grad()
def read_conversations(model, tokenizer, n, seed):
    """Read n validation conversations -> (the assistant's tokens, nats, nats of the floor, questions, right).

    An answer of likeliest tokens is right, word for word, if each token of the right one is the likeliest.
    Conversations longer than the context are left out.
    """
    tokens = questions = right = 0
    nats = floor = 0.0
    for turns, _, answers_log_prob in storybook.conversations(n, seed):
        ids = start_ids(model.config, tokenizer)
        answers = []  # (begin, end)
        for i, turn in enumerate(turns):
            role = ("user", "assistant")[i % 2]
            ids += (tokenizer.encode(" ") if i else []) + encode_chat(tokenizer, [(role, "")])[:1]
            begin = len(ids)
            ids += encode_chat(tokenizer, [(role, turn)])[1:]
            if role == "assistant":
                answers.append((begin, len(ids)))
        if len(ids) - 1 > model.config.context:
            continue
        idx = torch.tensor([ids], device=model.head_weight.device)
        logits = model(idx[:, :-1])[0][0].float()
        loss = torch.nn.functional.cross_entropy(logits, idx[0, 1:], reduction="none")
        likeliest = logits.argmax(dim=-1) == idx[0, 1:]
        nats += sum(loss[begin - 1:end - 1].sum().item() for begin, end in answers)
        tokens += sum(end - begin for begin, end in answers)
        floor -= answers_log_prob
        right += sum(bool(likeliest[begin - 1:end - 1].all()) for begin, end in answers[1:])
        questions += len(answers) - 1
    return tokens, nats, floor, questions, right


def judge_chat(model, tokenizer, n, seed):
    tokens, nats, floor, questions, right = read_conversations(model, tokenizer, n, 2 * seed + 1)
    need(tokens, f"The context of {model.config.context} tokens is too short for these conversations.")
    print(f"{n} validation conversations: {tokens:,} tokens of the assistant, {nats / tokens:.4f} nats each, "
          f"floor {floor / tokens:.4f}")
    print(f"questions answered rightly: {right} of {questions}, {right / questions:.1%}")
    requests = draw_requests(n, 2 * seed + 1)
    shares = judge_requests(requests, answer(model, tokenizer, [request for request, _ in requests]))
    print(f"stories for {n} requests that name a hero, an animal and a colour, likeliest tokens: "
          + ", ".join(f"{what} {share:.1%}" for what, share in shares.items()))


def judge_checkpoint():
    parser = CommandLine(description=__doc__.splitlines()[1])
    parser.add_argument("--checkpoint", type=Path, help="default: the newest out/*/ckpt.pt")
    parser.add_argument("--n", type=int, default=300, help="stories, or conversations (300)")
    parser.add_argument("--chat", action="store_true", help="judge conversations, not stories")
    parser.add_argument("--seed", type=int, default=1, help="of the data and of the drawing (1)")
    args = parser.parse_args()
    need(args.n >= 1, "--n must be at least 1.")
    path, model, tokenizer = open_model(args.checkpoint, "auto", "float32", args.chat)
    if args.chat:
        print(path)
        judge_chat(model, tokenizer, args.n, args.seed)
        return
    print(f"{path}: {args.n} validation stories, each read from its beginning")
    print(f"{'kind of token':<20}{'tokens':>8}{'nats each':>11}{'floor':>9}")
    table = losses_by_kind(model, tokenizer, args.n, 2 * args.seed + 1)
    table["all"] = tuple(map(sum, zip(*table.values())))
    for kind, (tokens, nats, floor) in table.items():
        print(f"{kind:<20}{tokens:>8,}{nats / tokens:>11.4f}{floor / tokens:>9.4f}")
    for temperature in (1.0, 0.7):
        shares = judge(generate_stories(model, tokenizer, args.n, temperature, args.seed))
        found = ", ".join(f"{what} {share:.1%}" for what, share in shares.items())
        print(f"temperature {temperature}: {found}")


def main():
    run_main(judge_checkpoint)


if __name__ == "__main__":
    main()
