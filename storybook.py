"""Little stories with a known probability.

A story here is a text with forks in it: at `[a|b|c]` one of the three is told, each with probability
1/3, and `{hero}` is a word that is drawn when it is first told and remembered from then on. So a
story's probability is the product of one over the number of options at every fork that was met, and
the mean of -log p over many stories is the entropy of this language: **no model, however large, can
reach a lower loss on it** (train.py prints how far above that floor a model still is).

That holds only if no story can be told in two ways, since the probability of a text is the sum over
all the ways to it. Two rules see to it, and the tests check them:

  * the options of a fork differ before either of them ends ("prefix-free"), so that whoever reads the
    text from left to right knows at every fork which way was taken;
  * nothing is drawn before it is told, so there is no choice that leaves no trace in the text.

Names, animals, colours, things and places come back at the end of a story, 50 to 150 tokens after
they were first told: a model can only know them there by looking back, which is what attention is for.

The texts below may be edited freely; keep the two rules, and run the tests.
"""

import math
import random
import re

GIRLS = "Lily Mia Anna Sara Molly Rose Lucy Daisy Emma Ruby Nora Zoe Ella Kate Polly Jane".split()
BOYS = "Tom Ben Max Sam Tim Leo Jack Finn Toby Hugo Billy Peter Fred Luke Roy Dan".split()
ANIMALS = "rabbit bear fox mouse frog duck squirrel hedgehog puppy kitten pony turtle".split()

WORDS = {
    "place": "river lake forest meadow village farm hill mill beach pond bridge market castle".split(),
    "colour": "red blue green yellow purple pink white golden brown silver black grey".split(),
    "trait": "little young kind clever shy brave good merry curious funny happy quiet".split(),
    "friend.trait": "wise tall big strong helpful cheerful lively friendly busy jolly".split(),
    "habit": "pick flowers|chase butterflies|climb trees|sing songs|paint pictures|count clouds|tell jokes|"
             "jump over puddles|build towers|dance in the sun|run in the wind|fly paper planes".split("|"),
    "skill": "swim|whistle|skate|juggle|read|ride a bike|bake bread|play the flute".split("|"),
    "toy": "ball drum boat hat bell whistle train scarf book basket doll wagon".split(),  # to lose, to share
    "flyer": "kite balloon hat ribbon scarf flag".split(),  # for the wind
    "gift": "hat box mug bag cup ring picture puppet".split(),
    "cloth": "blanket scarf towel coat cape rug".split(),
    "light": "lamp lantern candle torch".split(),
    "dish": "bowl pot pan mug jar cup".split(),
    "food": "soup|apple pie|carrot cake|berry jam|pudding|cream".split("|"),
    "missing": "milk butter honey sugar flour salt".split(),
    "baby": "bird lamb mole chick goat deer".split(),
    "hiding": "in the tall grass|under a bush|behind a log|inside an old boot|on a flat stone|"
              "on top of the fence|beside the well|next to the gate".split("|"),
}

OPENING = """
[Once upon a time, there was a {trait} {kind} named {hero}. {He} lived [in a small house|in a cosy house
    |with {his} mother|with {his} grandma] near the {place}.
|Once upon a time, a {trait} {kind} named {hero} lived near the {place}.
|Once upon a time, near the {place}, there lived a {trait} {kind} named {hero}.
|In a [small|cosy|tiny] house near the {place} lived a {trait} {kind} named {hero}.
|There once was a {trait} {kind} named {hero}, who lived near the {place}.
|{hero} was a {trait} {kind}. {He} lived [with two brothers|with two sisters|in a tall house] near the
    {place}.]
[{He} loved to {habit}.|Every day, {he} liked to {habit}.|{hero} liked to {habit} with [friends|{his} father].
|What {he} liked best was to {habit}.]
"""

LOST = """
One morning, {hero} [could not find {his} {colour} {thing:toy}.|saw that {his} {colour} {thing:toy} was
gone.|wanted to play with {his} {colour} {thing:toy}, but it was not there.] {He} looked [under the
bed|behind the door|in the kitchen|on the shelf], but [found nothing|saw only dust|there was nothing]. [A
big tear rolled down {his} nose.|{hero} sat down and began to cry.|{He} felt very sad.]

[A {friend.trait} {friend.kind} named {friend} heard {him} and came over.|Then {friend}, a {friend.trait}
{friend.kind}, came by.|Soon a {friend.trait} {friend.kind} named {friend} walked past.] "[What is wrong|Why
are you sad|What happened], {hero}?" asked {friend}. "I [lost|cannot find|miss] my {colour} {thing}," said
{hero}. "[Do not cry|Do not worry|Cheer up]," said {friend}. "[I will help you|Let us look together|We will
find it]."

They looked [all over the garden|up and down the road|here and there|near and far]. [At last|After a
while|Then], they saw something {colour} {hiding}. It was the {thing}! [The wind had blown it there.|A bird
had hidden it there.] "[Thank you|You are so kind|I am so happy], {friend}!" said {hero}. {He} [hugged
{friend}|held the {thing} tight|jumped for joy], and they [laughed|danced|played|sang] until
[noon|dark|bedtime].
"""

STUCK = """
One windy day, {hero} went out with a {colour} {thing:flyer}. [Whoosh!|Oh no!|Oh dear!] The wind took the
{thing}, and it got stuck [high up in a tree|on top of the roof|on a tall pole]. {hero} [jumped and
jumped|climbed on a chair|threw a stick], but {he} could not [reach|get] it.

[Nearby lived {friend}, a {friend.trait} {friend.kind}.|Not far away was {friend}, a {friend.trait}
{friend.kind}.] {friend.He} heard {hero} and came [running|at once|quickly]. "[Will|Can|Could] you help me,
{friend}?" said {hero}. "My {colour} {thing} is stuck." "[I have an idea|I know what to do|Wait here]!" said
{friend}. {friend.He} [brought a long ladder|found a long stick|stood on a big box] and
[pulled|pushed|shook] it until the {thing} came down.

"[Yes|Wow|You did it]!" [shouted|cried|said] {hero}. {He} took the {colour} {thing} and
[thanked|hugged|kissed] {friend}. "Next time I will hold it [tight|with both hands]," {he} said, and
{friend} [laughed|smiled|nodded].
"""

LEARN = """
More than anything, {hero} wanted to learn to {skill}. {He} tried [every day|again and again|all week|very
hard], but [it was too hard|it was not easy|it did not work].

[A {friend.trait} {friend.kind} named {friend} saw {him} try.|Next door lived a {friend.trait} {friend.kind}
named {friend}, who could {skill} very well.] "[Can you teach me|Will you show me how], {friend}?" asked
{hero}. "[Yes|Of course|I will]," said {friend}. "But you must [not give up|try every day|take your time].
Take my {colour} {thing:toy}. It will bring you luck."

[Two|Three|Five|Ten] days later, {hero} [shouted|called|cried], "[Look|Watch me|See], {friend}! I can
{skill}!" {friend} [clapped and cheered|smiled a big smile|was so proud|jumped up and down]. {hero} wanted
to give back the {colour} {thing}. "[Keep it|It is yours now]," said {friend}. "But it was not luck. You did
it [all by yourself|because you did not give up]!"
"""

BIRTHDAY = """
Soon it was the birthday of {friend}, a {friend.trait} {friend.kind} who lived next door. {hero} had no
[money|coins|gift], so {he} [made|painted] a {colour} {thing:gift} for {friend.him}.

On the way to the party, {hero} [fell over a stone|slipped on a leaf|ran too fast and fell], and the {thing}
[landed in the mud|fell into a puddle|got all dirty]. "[Oh no|Oh dear]! Now I have nothing [for|to give to]
{friend}," {he} [cried|said sadly]. {He} [wanted to go home|hid behind a tree|sat down by the road].

But {friend} [found {him}|came to look for {him}|saw {him} there]. "It was a {colour} {thing} for you," said
{hero}. "[I am so sorry|But look at it now]." {friend} [laughed|smiled] and [took it with care|looked at
it]. "You made it for me, so it is the [best|finest|nicest] {thing} of all. [We can clean it together|Let us
wash it now]." Then they ate [cake|pie|ice cream|plums] and [danced|sang|played|told stories] until
[night|bedtime|dark].
"""

FOUND = """
On a rainy evening, {hero} heard a [small|soft|strange] sound outside. {He} went to look, and there was a
[tiny|wet|cold] baby {baby} {hiding}. "I want my [mother|father|family]," [cried|said|sobbed] the {baby}.

{hero} [put a {colour} {thing:cloth} around the {baby}|dried the {baby} with a {colour} {thing:cloth}|gave
the {baby} a {colour} {thing:cloth}] and made some [warm milk|hot tea|soup]. "[I know who can help us|Do not
be afraid]," {he} said. "My friend {friend} the {friend.kind} [knows everyone here|can find the way|is very
{friend.trait}]." {friend} came [right away|at once|in the rain]. [Together|Hand in hand], {hero}, {friend}
and the {baby} walked [through|across|past] the [dark forest|wet meadow|tall grass].

"[There they are|I see them|That is my home]!" shouted the {baby} [at last|at the end of the road|soon
after]. The {baby} wanted to give back the {colour} {thing}, but {hero} [shook {his} head|said no|smiled].
"Keep it," {he} said, "and [come to see us|do not get lost again|stay warm]."
"""

SHARE = """
One afternoon, {hero} and {friend}, a {friend.trait} {friend.kind}, found a {colour} {thing:toy} {hiding}.
"[It is mine|I saw it first|Give it to me]!" said {hero}. "[No|Never|Wait]! I want the {thing} too!" said
{friend}. They both [pulled and pulled|pulled and pushed|shouted], and {friend} [fell down|began to cry|hurt
{friend.his} foot].

{hero} [stopped|felt bad|was sorry]. "[I am sorry|Do not be sad|Do not cry], {friend}," {he} said. "[A
friend is better than a {thing}|We can both have it|I do not want to fight]. You may [have it|play with it]
first." {friend} [wiped {friend.his} eyes|smiled a little|gave {him} a hug]. "[Let us take turns|Let us
share it]," {friend.he} said. "[You can have it today, and I the next day|One day for you and one day for
me]."

So they [shared|took turns with] the {colour} {thing}, and it was [much more fun|a lovely day|so much
better|good to play]. When [it got dark|the sun went down|the stars came out], {friend} said, "[Thank
you|This was fun|That was nice], {hero}."
"""

NIGHT = """
One night, {hero} could not sleep. There was a [loud|strange|scary] noise outside. "[Bump, bump|Tap,
tap|Crack, crack|Hoo, hoo]!" it went. "What if it is a [monster|ghost|dragon|wolf|giant]?" {he}
[thought|cried|said].

{He} [ran|went|hurried] to {his} [good|dear] friend {friend}, who was a {friend.trait} {friend.kind}. "[I am
scared|Please wake up], {friend}," said {hero}. {friend} took a {colour} {thing:light}. "[Let us go and
see|We will look together|Come with me]," {friend.he} said. They went [into the dark|side by side|very
slowly|hand in hand]. {friend} held up the {colour} {thing}, and there, {hiding}, they saw a
[tiny|sleepy|hungry] [baby|lost] {baby}.

"[It is only a {baby}|Look, just a {baby}]!" said {hero} and [laughed|smiled]. They gave the {baby} some
[bread|milk|berries|nuts], and it was quiet again. "[Thank you for the light|I am not scared now|You are a
good friend], {friend}," said {hero}, and soon {he} was [fast asleep|back in bed|asleep].
"""

BAKE = """
For a picnic, {hero} wanted to make {food} in {his} {colour} {thing:dish}. But there was no {missing} [in
the house|left|in the box]. "[I cannot make {food} without {missing}|I need {missing} for my {food}]," said
{hero}.

{He} [went|walked|ran] to {friend}, a {friend.trait} {friend.kind}. "[Do you have some|May I have a
little|Can you give me] {missing}, {friend}?" "[Yes|Of course|I have a lot]," said {friend}. "But [I
am hungry too|I have nothing to eat|I am alone today]." "Then [come with me|help me]," said {hero}, "and we
will [share it|eat it together]." So they put the {missing} into the {colour} {thing} and
[mixed|waited|sang] until the {food} [was done|was ready|smelled good].

They sat [in the grass|under a tree|in the sun|on a hill] and ate. "[This is the best {food} ever|I love
your {food}|What good {food}], {hero}," said {friend}. "It is good because of your {missing}," said {hero}.
"""

ENDING = """
[From that day on|From then on|After that], {hero} and {friend} were [best|good|true|dear|great] friends.
[And if you walk near the {place}, you may see a {kind} and a {friend.kind} with a {colour} {thing}.
|On sunny days, {hero} and {friend} the {friend.kind} liked to {habit} near the {place}.
|They kept the {colour} {thing} for a long, long time.
|The {kind} and the {friend.kind} met near the {place} every [day|week|Sunday] to {habit}.
|Whenever {hero} saw something {colour}, {he} thought of {friend} and the {thing}.]
"""

PLOTS = [LOST, STUCK, LEARN, BIRTHDAY, FOUND, SHARE, NIGHT, BAKE]


def parse(source, **texts):
    """Text with forks -> a list of parts: text to be told as it is, a (slot, table) pair, or a list of
    options, each of them a list of parts again. Lines run on; a blank line begins a paragraph.

    texts are parsed already: `{NAME}` is where one goes in.
    """
    source = re.sub(r"\s*\n\s*(?=[|\]])|(?<=[|\[])\s*\n\s*", "", source)  # a line may end beside [ | ]
    paragraphs = re.split(r"\n\s*\n", source.strip())
    source = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    tokens = iter(re.findall(r"[\[|\]]|\{[^}]*\}|[^\[|\]{]+", source))

    def options():  # up to the closing bracket
        found = [[]]
        for token in tokens:
            if token == "]":
                return found
            if token == "|":
                found.append([])
            elif token == "[":
                found[-1].append(options())
            elif token[1:-1] in texts:
                found[-1] += texts[token[1:-1]]
            elif token[0] == "{":
                slot, _, table = token[1:-1].partition(":")
                found[-1].append((slot, table or slot))
            else:
                found[-1].append(token)
        return found

    return options()[0]


BOOK = parse(f"{OPENING}\n[{'|'.join(PLOTS)}]\n\n{ENDING}")  # all the stories, as one text with forks

# Conversations: a request, the story, and one to three questions with their answers. Each turn ends in ~,
# which no story has; another ~ ends the conversation. A word that the request names is drawn there, so in the
# story it is certain. A request that tells what happens stands in one option with that plot: here, too, every
# choice leaves one trace.

REQUESTS = {
    " who loses a {colour} {thing:toy}": LOST,
    " whose {colour} {thing:flyer} gets stuck": STUCK,
    " who learns to {skill}": LEARN,
    " who makes a {colour} {thing:gift}": BIRTHDAY,
    " who finds a baby {baby}": FOUND,
    " who finds a {colour} {thing:toy}": SHARE,
    " who cannot sleep": NIGHT,
    " who makes {food}": BAKE,
    "": f"[{'|'.join(PLOTS)}]",  # any of them
}
STORIES = [f"{request}.~{OPENING}\n{plot}\n{ENDING.rstrip()}~" for request, plot in REQUESTS.items()]
PLOT = parse(f"[{'|'.join(STORIES)}]")
NAME = parse("[ named {hero}{PLOT}|{PLOT}]", PLOT=PLOT)

QUESTION = parse("""
[What colour was the {thing}?~The {thing} was {colour}.
|Who was {hero}'s friend?~{hero}'s friend was {friend}.
|What animal was {friend}?~{friend} was a {friend.kind}.
|Who was {hero}?~{hero} was a {trait} {kind}.
|Where did {hero} live?~{hero} lived near the {place}.]~
""")

TALK = parse("""
[Tell me|Please tell me|I want to hear] a story about [{hero}{PLOT}|a {kind}{NAME}|a {trait} {kind}{NAME}]
{QUESTION}[~|{QUESTION}[~|{QUESTION}~]]
""", PLOT=PLOT, NAME=NAME, QUESTION=QUESTION)


def pronouns(name, prefix=""):
    """The pronouns of a character as slots: {he}, {him}, {his}, {He}; of the friend {friend.he}, ..."""
    he, him, his = ("she", "her", "her") if name in GIRLS else ("he", "him", "his")
    return {prefix + "he": he, prefix + "him": him, prefix + "his": his, prefix + "He": he.capitalize()}


def fill(slots, slot, word):
    """The slots with one more; a name brings its pronouns."""
    slots = slots | {slot: word}
    if slot in ("hero", "friend"):
        slots |= pronouns(word, "" if slot == "hero" else "friend.")
    return slots


class Teller:
    """Tells one story. Every choice is made by `choose`, which keeps the account of the probability: a
    subclass that chooses otherwise (by plan instead of by chance) replays the very same story code."""

    def __init__(self, rng):
        self.rng, self.text, self.log_prob, self.slots = rng, "", 0.0, {}

    def choose(self, options):
        self.log_prob -= math.log(len(options))
        return options[int(self.rng.random() * len(options))]  # random() is the same in every Python

    def tell(self, parts):
        for part in parts:
            if isinstance(part, str):
                self.text += part
            elif isinstance(part, list):
                self.tell(self.choose(part))
            else:
                self.text += self.word(*part)
        return self

    def word(self, slot, table):
        """The word in a slot; the first time it is asked for, it is drawn."""
        if slot not in self.slots:
            self.slots = fill(self.slots, slot, self.choose(self.words_for(slot, table)))
        return self.slots[slot]

    def words_for(self, slot, table):
        """The words that fit into a slot, given what has been told: a girl has a girl's name and a girl's
        name makes a child a girl; the friend is an animal and shares neither name nor kind with the hero."""
        hero, kind = self.slots.get("hero"), self.slots.get("kind")
        if slot == "hero":
            return {"girl": GIRLS, "boy": BOYS}.get(kind, GIRLS + BOYS)
        if slot == "kind":
            return ANIMALS + (["girl", "boy"] if hero is None else ["girl"] if hero in GIRLS else ["boy"])
        if slot == "friend":
            return [name for name in GIRLS + BOYS if name != hero]
        if slot == "friend.kind":
            return [animal for animal in ANIMALS if animal != kind]
        return WORDS[table]


class Talker(Teller):
    """Tells a conversation, with one more account: of the choices that the assistant makes."""

    answers_log_prob = 0.0

    def choose(self, options):
        if self.text.count("~") % 2:  # the first turn is the user's, the second the assistant's, and so on
            self.answers_log_prob -= math.log(len(options))
        return super().choose(options)


def stories(n, seed):
    """n stories as (text, natural logarithm of its probability). Story i depends on (seed, i) alone; two
    seeds share no random stream."""
    for i in range(n):
        teller = Teller(random.Random(seed << 32 | i)).tell(BOOK)
        yield teller.text, teller.log_prob


def conversations(n, seed):
    """n conversations as (turns, the user's first; log_prob; that of the assistant's turns alone).
    The mean of the last over the tokens of these turns is, but for its sign, the lowest loss on them."""
    for i in range(n):
        talker = Talker(random.Random(seed << 32 | i)).tell(TALK)
        turns = [turn.strip() for turn in talker.text.strip("~").split("~")]
        yield turns, talker.log_prob, talker.answers_log_prob
