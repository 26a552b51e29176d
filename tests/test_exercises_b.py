"""Exercises 7 to 12: each can be solved; unchanged code and typical mistakes are told apart, in words."""

from pathlib import Path

import pytest

import model
from exercises import check

SOLUTIONS = Path(check.__file__).parent / "solutions"


@pytest.fixture(autouse=True)
def same_parts_afterwards():
    """Answers put their parts into the table; other tests are to find it as it was."""
    before = {slot: dict(parts) for slot, parts in model.PARTS.items()}
    yield
    for slot, parts in before.items():
        model.PARTS[slot].clear()
        model.PARTS[slot].update(parts)


def solution(number):
    return (SOLUTIONS / f"{number:02}.py").read_text(encoding="utf-8")


def say(number, source, tmp_path):
    """What the checker says to this answer."""
    file = tmp_path / "my.py"
    file.write_text(source, encoding="utf-8")
    try:
        getattr(check, f"check_{number:02}")(check.load(file))
    except check.Wrong as wrong:
        return str(wrong)
    return "right"


@pytest.mark.parametrize("number", [7, 8, 9, 10, 11, 12])
def test_the_solution_is_right(number, tmp_path):
    assert say(number, solution(number), tmp_path) == "right"


def changed(number, *changes):
    """The solution with each `old -> new` carried out: one mistake."""
    source = solution(number)
    for change in changes:
        old, new = change.split(" -> ")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def unchanged(parent, name, slot, key, body="pass"):
    """An answer that registers the parent as it is, but for this body."""
    return f"from model import *\nfrom model import PARTS\nclass {name}({parent}):\n    {body}\n" \
           f"PARTS['{slot}']['{key}'] = {name}\n"


def refuses(number, source, sentence, tmp_path):
    said = say(number, source, tmp_path)
    assert sentence in said, said


@pytest.mark.parametrize("source, sentence", [
    (unchanged("GatedSpiralAttention", "SecondMoment", "mixer", "second_moment"), "reads 6 numbers, not 2 D"),
    (changed(7, 'PARTS["mixer"] -> NOT_PARTS = {"mixer": {}}; NOT_PARTS["mixer"]'),
     "not in the table of parts"),
    (changed(7, ".squared_query -> .query"), "the name '0.query'"),
    (changed(7, 'self.name + ".squared_query" -> "squared_query"'), "the name 'squared_query'"),
    (changed(7, "mean.square()) -> mean).square()"), "You square the mean"),
    (changed(7, "mean.square()) -> q.square().mean(dim=1))"), "the query of each head"),
    (changed(7, "[c, m] -> [m, c]"), "changed places"),
    (changed(7, "[c, m] -> [c, m - c.square()]"), "That is the variance"),
    (changed(7, "running_mean(past, self.name + \".squared_query\" -> "
                "past.running_sum(self.name + \".squared_query\""), "m_t is a sum"),
    (changed(7, "g.transpose(1, 2)[..., None]  # g -> g.transpose(1, 2)[..., None] ** 2  #"),
     "from that of a loop"),
])
def test_second_moment(source, sentence, tmp_path):
    refuses(7, source, sentence, tmp_path)


@pytest.mark.parametrize("source, sentence", [
    (unchanged("GatedSpiralAttention", "LearnedSpiral", "mixer", "learned_spiral"),
     "0 parameters called alpha"),
    (changed(8, "nn.Parameter(torch.tensor(float(config.alpha))) -> torch.tensor(config.alpha)"),
     "is not trained"),
    (changed(8, "float(config.alpha) -> 0.0"), "alpha starts at 0;"),
    (changed(8, "alpha=self.alpha -> alpha=self.alpha.item()"), "no gradient reaches alpha"),
    (changed(8, "dtype=torch.float64 -> dtype=torch.float32"), "compute the angles in float64"),
    (changed(8,
     "[table.type_as(rotary[0]) for table in tables] -> [r + 0 * t for r, t in zip(rotary, tables)]"),
     "no gradient reaches alpha"),
    (changed(8, "past.length, past.length + x.size(1) -> x.size(1)"), "is number past.length, not 0"),
    (changed(8,
     "replace(self.config, alpha=self.alpha) -> replace(self.config, alpha=self.alpha, rope_base=500)"),
     "are they spiral_rotary's?"),
    (changed(8, "alpha=self.alpha -> alpha=self.config.alpha + self.alpha - self.alpha.detach()"),
     "They have not changed at all"),
])
def test_learned_spiral(source, sentence, tmp_path):
    refuses(8, source, sentence, tmp_path)


@pytest.mark.parametrize("source, sentence", [
    (unchanged("HydraAttention", "DecayedHydra", "mixer", "decayed_hydra"), "needs a class attribute decay"),
    (unchanged("HydraAttention", "DecayedHydra", "mixer", "decayed_hydra", "decay = 0.9"),
     "There is no decay"),
    (changed(9, '.weight", growth * weight) -> .weight", weight)'), "sum in the denominator does not decay"),
    (changed(9, "growth * weight * v) -> weight * v)"), "sum in the numerator does not decay"),
    (changed(9, "self.decay**-position -> self.decay**position"), "decays the wrong way"),
    (changed(9, "1e-6 * growth -> 1e-6"), "So little is the epsilon"),
    (changed(9, "past.length, past.length + q.size(1) -> q.size(1)"), "is number past.length, not 0"),
    (changed(9, "self.decay**-position -> 0.9**-position"), "Does it read self.decay?"),
    (changed(9, "> 80 -> > 1e9"), "at a context of 256 with decay = 0.5, results are not finite"),
    (changed(9, "math.sqrt(self.d_head) - config -> - config", "> 80 -> > 88"), "decay = 0.9, results are not"),
    (changed(9, "> 80 -> > 8"), "refuses a context of 256"),
    (changed(9, "if math -> if config.context > 256 or math"), "refuses a context of 8192 with decay = 1.0"),
])
def test_decayed_sum(source, sentence, tmp_path):
    refuses(9, source, sentence, tmp_path)


@pytest.mark.parametrize("source, sentence", [
    (changed(10, "cache or WholeMean() -> cache"), "its summaries are running means"),
    (changed(10, " * count[:, None]  # -> + 0 * count[:, None]  #"),
     "running_mean divides what running_sum returns"),
    (changed(10, "cache or WholeMean() -> WholeMean()"), "At each step all tokens are those so far"),
    (changed(10, "steps=200 -> steps=20", "phi=0.0 -> phi=-3.0"), "Try more steps"),
    (changed(10, "    for _ in range(steps):\n        idx = torch.randint(8, (64, 9)) -> "
                 "    idx = torch.randint(8, (16, 9))\n    for _ in range(100):"),
     "knows its training windows by heart"),
    (changed(10, "steps=200 -> steps=60", ") - loss.item() -> ) + loss.item()"),
     "measure says that the loss is"),
    (changed(10, "steps=200 -> steps=60", "(logits - steps) -> (logits - logits)"),
     "one Cache for all of them"),
])
def test_mean_pooled(source, sentence, tmp_path):
    refuses(10, source, sentence, tmp_path)


@pytest.mark.parametrize("source, sentence", [
    (unchanged("PreNormBlock", "CausalMerging", "block", "causal_merging"),
     "still the average of both its tokens"),
    (unchanged("PreNormBlock", "CausalMerging", "block", "causal_merging",
               "def forward(self, x, *rest): return PreNormBlock.forward(self.eval(), x, *rest)"),
     "nothing merges"),
    (changed(11, "self.training and  -> "), "in eval mode nothing may merge"),
    (changed(11, " and isinstance(past, NoCache) -> "), "with a cache nothing may merge"),
    (changed(11, "[first_twice(summary) for summary in below] -> below"),
     "below are those of the second token"),
    (changed(11, "second, first_twice(h), -> second, h,"), "still the average of both its tokens"),
    (changed(11,
     "second[..., None], y.roll(1, dims=1) -> second.roll(-1, dims=1)[..., None], y.roll(-1, dims=1)"),
     "represented by its second token"),
    (changed(11, "self.find_pairs(h.detach(), -> self.find_pairs(h.detach().roll(-1, dims=1),"),
     "decide by the next one"),
    (changed(11, "self.merge_ratio = -> ratio ="), "merge_ratio is 0.000"),
    (changed(11, "below)\n        return -> below) * ~second[..., None]\n        return"),
     "both get the result"),
])
def test_causal_merging(source, sentence, tmp_path):
    refuses(11, source, sentence, tmp_path)


@pytest.mark.parametrize("source, sentence", [
    (changed(12, "pairs[pair] * len(pair[0] + pair[1]) -> pairs[pair]"),
     "That is the standard trainer's choice"),
    (changed(12, "len(pair[0] + pair[1]) -> len(pair[0])"), "By count times length"),
    (changed(12, "merges.append((a, b)) -> merges.append((str(a), str(b)))"), "a list of 140 pairs of bytes"),
    (changed(12, "PREDICTION = 0.03 -> PREDICTION = -0.03"), "the effect has the other sign"),
    (changed(12, "PREDICTION = 0.03 -> PREDICTION = 0.5"), "more than four times as small"),
])
def test_another_trainer(source, sentence, tmp_path):
    refuses(12, source, sentence, tmp_path)
