"""The storybook: every story has one derivation, so its probability (and the entropy floor) is exact."""

import itertools
import math
import random
import re
from collections import Counter

import pytest

import storybook
from storybook import Talker, Teller, conversations, parse, stories


class Stray(Exception):
    """What was told so far is no beginning of the story that is searched for."""


class Open(Exception):
    """The plan has run out at a choice between args[0] options."""


class Replay(Teller):
    """Tells by a plan, a list of option numbers, as long as the text agrees with `goal` (None: any text)."""

    def __init__(self, plan, goal=None):
        super().__init__(None)
        self.plan, self.goal, self.made = plan, goal, 0

    def choose(self, options):
        if self.goal is not None and not self.goal.startswith(self.text):
            raise Stray
        if self.made == len(self.plan):
            raise Open(len(options))
        self.made += 1
        self.log_prob -= math.log(len(options))
        return options[self.plan[self.made - 1]]


def derivations(tree, goal=None):
    """All the ways through a text with forks (that give `goal`) -> [(text, log_prob)]."""
    found, plans = [], [[]]
    while plans:
        plan = plans.pop()
        try:
            teller = Replay(plan, goal).tell(tree)
        except Stray:
            continue
        except Open as choice:
            plans += [plan + [option] for option in range(choice.args[0])]
        else:
            if goal is None or teller.text == goal:
                found.append((teller.text, teller.log_prob))
    return found


def test_every_story_has_exactly_one_derivation_and_its_probability():
    for text, log_prob in stories(120, seed=11):
        (found, again), = derivations(storybook.BOOK, text)
        assert found == text and again == pytest.approx(log_prob, abs=1e-9)


def test_the_search_sees_a_second_derivation():
    """The test above has teeth: here are the three ways in which a grammar goes wrong."""
    for ambiguous in ("A [red|red] ball.", "A [big|big red] [ball|red ball].", "[A|A big] [cat|big cat]."):
        texts = Counter(text for text, _ in derivations(parse(ambiguous)))
        twice, = [text for text, times in texts.items() if times > 1]
        assert len(derivations(parse(ambiguous), twice)) == 2


class Checker(Teller):
    """Tells at random, and checks at each choice that the options differ before any of them ends."""

    def first_texts(self, parts):
        """How an option may begin: up to and with the first thing in it that is not fixed yet."""
        text = ""
        for part in parts:
            if isinstance(part, list):
                return {text + more for option in part for more in self.first_texts(option)}
            if isinstance(part, tuple) and part[0] not in self.slots:
                return {text + word for word in self.words_for(*part)}
            text += part if isinstance(part, str) else self.slots[part[0]]
        return {text}

    def choose(self, options):
        begin = [{option} if isinstance(option, str) else self.first_texts(option) for option in options]
        for one, other in itertools.combinations(begin, 2):
            assert not any(a.startswith(b) or b.startswith(a) for a in one for b in other), (one, other)
        return super().choose(options)


def test_options_are_prefix_free_wherever_a_story_leads():
    """This is why there is one derivation: read from the left, a text allows one option at each choice."""
    for i in range(400):
        Checker(random.Random(i)).tell(storybook.BOOK)
    with pytest.raises(AssertionError):
        Checker(random.Random(0)).tell(parse("A [big|big red] ball."))


def test_a_book_that_can_be_read_to_the_end_has_total_probability_one(monkeypatch):
    """All texts of opening and ending, with short lists of words: they differ, and probabilities sum to 1."""
    for table, words in storybook.WORDS.items():
        monkeypatch.setitem(storybook.WORDS, table, words[:1])
    for table, words in (("GIRLS", ["Lily"]), ("BOYS", ["Tom"]), ("ANIMALS", ["fox", "bear"])):
        monkeypatch.setattr(storybook, table, words)
    middle = "With a {colour} {thing:toy} came {friend}, a {friend.kind}. {friend.He} said hello to {him}."
    told = derivations(parse(f"{storybook.OPENING}\n\n{middle}\n\n{storybook.ENDING}"))
    assert len(told) > 1000 and len({text for text, _ in told}) == len(told)
    assert math.fsum(math.exp(log_prob) for _, log_prob in told) == pytest.approx(1, abs=1e-12)


def test_chances_are_what_log_prob_says():
    """The generator draws as often as it claims: the first choice of 4,000 stories, within five sigma."""
    begin = Counter(text.split(",")[0].split(" ")[0] for text, _ in stories(4000, seed=3))
    assert abs(begin["Once"] / 4000 - 3 / 6) < 5 * math.sqrt(0.25 / 4000)


def test_the_same_stories_every_time():
    """Fixed for good: a change of the texts or of the random stream changes every measured floor."""
    few, many = list(stories(3, seed=5)), list(stories(20, seed=5))
    assert many[:3] == few
    assert not {text for text, _ in stories(500, seed=2)} & {text for text, _ in stories(500, seed=3)}


def test_stories_are_plain_english_that_holds_together():
    for text, _ in stories(400, seed=7):
        assert text.isascii() and text == text.strip() and not re.search(r"[\[\]{}|]|  |\n\n| [,.!?]", text)
        assert text.count('"') % 2 == 0 and text[-1] == "."
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text), text
        assert re.fullmatch(r'["A-Z]+', "".join(re.findall(r"(?:^|[.] )(.)", text, re.MULTILINE))), text
        assert 100 <= len(text.split()) <= 175


def test_names_and_things_come_back_at_the_end():
    """There is something to remember: hero, friend and one word more return in the last paragraph."""
    for i in range(200):
        teller = Teller(random.Random(i)).tell(storybook.BOOK)
        slots, (*_, last) = teller.slots, teller.text.split("\n")
        before = teller.text[:-len(last)]
        assert all(slots[slot] in last and slots[slot] in before for slot in ("hero", "friend"))
        assert any(re.search(rf"\b{slots[slot]}\b", last) for slot in ("place", "colour", "thing", "habit"))
        assert slots["hero"] != slots["friend"] and slots["kind"] != slots["friend.kind"]
        named = {"girl": storybook.GIRLS, "boy": storybook.BOYS}.get(slots["kind"])
        assert named is None or slots["hero"] in named


# ---------------------------------------------------------------------------------------------- conversations


def talks(n, seed):
    return [Talker(random.Random(seed << 32 | i)).tell(storybook.TALK) for i in range(n)]


def test_every_conversation_has_exactly_one_derivation_and_its_probability():
    for talker, (turns, log_prob, _) in zip(talks(40, 11), conversations(40, seed=11)):
        (found, again), = derivations(storybook.TALK, talker.text)
        assert found == talker.text and again == pytest.approx(log_prob, abs=1e-9)
        assert talker.text.replace("~ ", "~") == "~".join(turns) + "~~"  # nothing is lost on the way to turns


def test_options_are_prefix_free_wherever_a_conversation_leads():
    for i in range(100):
        Checker(random.Random(i)).tell(storybook.TALK)


class Reached(Exception):
    """All of the beginning that is searched for has been told."""


class Beginning(Replay):
    """Tells by a plan, up to the first choice after `goal`."""

    def choose(self, options):
        if self.text.startswith(self.goal):
            raise Reached(self.log_prob)
        return super().choose(options)


def log_prob_of_beginning(goal):
    """The probability that a conversation begins with `goal`, from all ways to tell that."""
    found, plans = [], [[]]
    while plans:
        plan = plans.pop()
        try:
            teller = Beginning(plan, goal).tell(storybook.TALK)
            found.append(teller.log_prob)
        except Reached as reached:
            found.append(reached.args[0])
        except Stray:
            continue
        except Open as choice:
            plans += [plan + [option] for option in range(choice.args[0])]
    return math.log(math.fsum(map(math.exp, found)))


def test_the_assistants_cost_is_that_of_its_turns_given_all_before():
    """log p(turn | before) = log p(before and turn) - log p(before), each by a search through the grammar."""
    for talker in talks(12, 4):
        ends = [0] + [match.end() for match in re.finditer("~", talker.text)][:-1]  # of each turn
        known = [log_prob_of_beginning(talker.text[:end]) for end in ends]
        answers = [after - before for before, after in zip(known, known[1:])][1::2]
        assert sum(answers) == pytest.approx(talker.answers_log_prob, abs=1e-9)
        assert answers[0] < -20 and all(answer == pytest.approx(0, abs=1e-9) for answer in answers[1:])


def test_a_request_names_what_the_story_has_and_a_question_what_it_tells():
    seen, lengths = Counter(), Counter()
    for talker, (turns, _, _) in zip(talks(300, 5), conversations(300, seed=5)):
        request, story, *questions = turns
        lengths[len(questions)] += 1
        for text in turns:
            assert text.isascii() and text == text.strip()
            assert not re.search(r"[\[\]{}|~]|  |\n\n| [,.!?]", text), text
            assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text), text
        for slot in ("hero", "kind", "trait", "colour", "thing", "skill", "food", "baby"):
            word = rf"\b{talker.slots.get(slot, '~')}\b"
            if re.search(word, request):
                seen[slot] += 1
                assert re.search(word, story), (request, story)
        for question, answer in zip(questions[::2], questions[1::2]):
            seen[question.split()[1]] += 1
            assert question.endswith("?") and answer.endswith(".")
            assert all(re.search(rf"\b{word}\b", story) for word in re.findall(r"\w+", answer)
                       if word not in ("was", "lived", "near", "s", "friend", "The", "a", "the")), answer
    assert lengths.keys() == {2, 4, 6} and min(seen.values()) > 10 and len(seen) == 11


def test_the_same_conversations_every_time():
    few, many = list(conversations(3, seed=5)), list(conversations(20, seed=5))
    assert many[:3] == few
