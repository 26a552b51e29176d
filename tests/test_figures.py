"""The promises of extras/figures.py: the numbers behind the pictures, and (with matplotlib) the pictures."""

import hashlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "extras"))

import figures
import storybook
import tokenizer as tokenizers
from model import LanguageModel, ModelConfig, apply_rotary
from support.checkpoint import save_checkpoint
from support.hf_tokenizer import tokenizer_to_json
from support.runtime import run_main

TEXT = "The frog saw a big red ball in the pond and jumped after it at once, and the frog was happy."
TOKENIZER = tokenizers.train_bpe(tokenizers.count_chunks([TEXT, TEXT]), 300)
IDX = torch.tensor([TOKENIZER.encode(TEXT)])  # (1, T)
HELIX = dict(position="helix", mixer="cross_layer", ffn="dual_stream", norm="offset_rms", n_kv_head=2)


def small_model(**changes):
    """Random weights, large enough that gates, weights and neighbours differ."""
    torch.manual_seed(1)
    config = dict(vocab_size=300, context=128, n_layer=3, d_model=32, n_head=4, d_ff=48) | changes
    model = LanguageModel(ModelConfig(**config)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p *= 15 if p.dim() == 2 else 1
    return model


def layer_input(model, layer):
    """What the mixer of a layer is given for IDX, and the rotary tables."""
    found = []
    hook = model.blocks[layer].mixer.register_forward_pre_hook(lambda mixer, inputs: found.append(inputs))
    with torch.no_grad():
        model(IDX)
    hook.remove()
    return found[0][:2]


# ----------------------------------------------------------------------------------------------------------
# The numbers


def test_turns_are_the_formulas():
    position, pair, half = 700, 5, 16
    plain, spiral = ModelConfig(alpha=0.0), ModelConfig(alpha=0.3)
    w = 10000 ** (-pair / half)
    angle, radius = figures.turns(plain, 1024)
    assert angle[position, pair] == pytest.approx(position * w) and radius[position, pair] == pytest.approx(1)
    angle, radius = figures.turns(spiral, 1024)
    faster = 1 + 0.3 * math.sqrt((pair + 1) / half)
    assert angle[position, pair] == pytest.approx(position * w * faster)
    angle, radius = figures.turns(ModelConfig(position="helix"), 1024)
    assert angle[position, pair] == pytest.approx(position * w * 1.125)
    assert radius[position, pair] == pytest.approx(1 + 0.1 * math.sin(0.01 * position * w))


def test_gates_are_those_of_a_loop_over_tokens():
    model = small_model()
    found = figures.gates(model, IDX)
    assert found.shape == (3, 4, IDX.size(1)) and found.std(dim=1).min() > 1e-3
    for layer, block in enumerate(model.blocks):
        x, _ = layer_input(model, layer)
        with torch.no_grad():
            q, _, _ = block.mixer.project(x)  # (1, H, T, D)
            for t in range(IDX.size(1)):
                g = block.mixer.gate(q[0, :, : t + 1].mean(dim=(0, 1)))
                torch.testing.assert_close(found[layer, :, t], g)


@pytest.mark.parametrize("changes", [{}, {"mixer": "attention", "n_kv_head": 2}, HELIX], ids=str)
def test_attention_is_that_of_a_loop_over_tokens(changes):
    model = small_model(**changes)
    before = model(IDX)[0]
    found, T = figures.attention(model, IDX), IDX.size(1)
    assert found.shape == (3, 4, T, T)
    assert torch.equal(model(IDX)[0], before) and "attend" not in vars(model.blocks[0].mixer)  # as it was
    g = figures.gates(model, IDX) if not changes else torch.ones(3, 4, T)
    for layer in (0, 2):
        x, rotary = layer_input(model, layer)
        with torch.no_grad():
            q, k, _ = model.blocks[layer].mixer.project(x)
        q, k = apply_rotary(q, *rotary)[0], apply_rotary(k, *rotary)[0]  # (H, T, D), (K, T, D)
        for head in range(4):
            key = k[head * len(k) // 4]
            for t in range(T):
                scores = g[layer, head, t] * (key[: t + 1] @ q[head, t]) / math.sqrt(8)
                torch.testing.assert_close(found[layer, head, t, : t + 1], scores.softmax(dim=0))
                assert (found[layer, head, t, t + 1 :] == 0).all()


def test_merges_are_those_of_the_greedy_scan():
    """Algorithm 4 as a loop: left to right, a token joins the one before it if that one is still alone."""
    model = small_model(**HELIX, n_layer=6, token_merging="paper", merge_threshold=0.1)
    found = figures.merges(model, IDX)
    assert list(found) == [2, 3]
    assert 2 < found[2].sum() < IDX.size(1) / 2
    with torch.no_grad():
        x = model.eval().embedding(IDX)
        below = []
        rotary, past = model.rotary(0, IDX.size(1)), figures.NoCache()
        for layer in (0, 1):
            if layer:
                below = [x.cumsum(dim=1) / torch.arange(1, IDX.size(1) + 1)[:, None]]
            x = model.blocks[layer](x, rotary, past, below)
        h = model.blocks[2].norm_1(x)[0]
    expected = [False]
    for t in range(1, len(h)):
        expected.append(not expected[-1] and torch.cosine_similarity(h[t], h[t - 1], dim=0).item() > 0.1)
    assert found[2].tolist() == expected


@pytest.mark.parametrize("sink", ["", "<|actor|>"])
def test_story_costs_are_those_of_the_grammar_and_of_every_token(sink):
    """A model to which all tokens are alike: each costs log V, the end of the story too, a sink nothing."""
    specials = tokenizers.SILIA_SPECIALS if sink else tokenizers.SPECIALS
    tokenizer = tokenizers.train_bpe(tokenizers.count_chunks([TEXT, TEXT]), 300, specials)
    model = small_model(context=600, sink_token=sink)
    with torch.no_grad():
        model.embedding.weight.zero_()
    told = [(-log_prob, tokenizer.encode(text)) for text, log_prob in storybook.stories(20, 19)]
    fit = [(cost, (len(ids) + 1) * math.log(300)) for cost, ids in told if len(ids) + 1 <= 600]
    assert 0 < len(fit) < 20
    assert figures.story_costs(model, tokenizer, n=20) == [pytest.approx(pair) for pair in fit]


def test_cuts_grow_with_the_merges():
    ways = figures.cuts(TOKENIZER, "the frog jumped\n")
    assert [name for name in ways] == ["BPE after 0 merges", "BPE after 5 merges", "BPE after 20 merges",
                                       "BPE after 40 merges", "Maximal munch, same tokens"]
    lengths = [len(pieces) for pieces in ways.values()]
    assert lengths[0] == 16 and lengths == sorted(lengths, reverse=True) and lengths[1] > lengths[3]
    assert {"".join(pieces) for pieces in ways.values()} == {"the frog jumped↵"}
    assert ways["BPE after 40 merges"] == figures.spell(TOKENIZER, TOKENIZER.encode("the frog jumped\n"))
    made = ["".join(merge).replace("Ġ", " ") for merge in TOKENIZER.merges]
    for n in (5, 20):
        pieces = set(figures.cuts(TOKENIZER, TEXT)[f"BPE after {n} merges"])
        assert made[n - 1] in pieces and not pieces & set(made[n:])
    munch = tokenizers.train_bpe(tokenizers.count_chunks([TEXT]), 280, longest_match=True)
    ways = figures.cuts(munch, TEXT)
    assert list(ways.values()) == [figures.spell(munch, munch.encode(TEXT))]


def test_bytes_that_are_no_text_are_spelt_out():
    assert "".join(figures.spell(TOKENIZER, TOKENIZER.encode("é\t\n"))) == "\\xc3\\xa9\\t↵"


def test_lines_break_between_words():
    pieces = ["On", "ce", " up", "on", ".↵", "A", " time", "less", "ness"]
    places = [(0, 0), (0, 2), (0, 4), (0, 7), (0, 9), (1, 0), (1, 1), (1, 6), (2, 0)]
    assert figures.lay_out(pieces, 11) == places
    assert figures.lay_out(["A↵", "B"], 10) == [(0, 0), (1, 0)]
    assert figures.lay_out(["On", "ce", " up", "on", "!"], 8) == [(0, 0), (0, 2), (1, 0), (1, 3), (1, 5)]


def write_run(folder, tokenizer=TOKENIZER, rows=3, **changes):
    """out/<run> with a model that has not learned, and a log."""
    model = small_model(**changes).float()
    folder.mkdir(parents=True)
    save_checkpoint({"format": 1, "model": model.state_dict(), "model_config": vars(model.config),
                           "train_config": {"data": "tales"}, "tokenizer": tokenizer_to_json(tokenizer), "step": 0,
                           "optimizer": {}, "scaler": {}, "best_val_loss": 0.0}, folder / "ckpt.pt")
    lines = ["step,train_loss,val_loss,bits_per_byte", "0,,4,2", "5,3.5,,", "10,3,3,1.5"]
    (folder / "log.csv").write_text("\n".join(lines[: rows + 1]), encoding="utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A place with data/tales, whose floor is known, and a run on it."""
    monkeypatch.chdir(tmp_path)
    meta = {"tokenizer_sha256": hashlib.sha256(tokenizer_to_json(TOKENIZER).encode("utf-8")).hexdigest(),
            "val": {"floor_nats_per_token": 1.0, "floor_bits_per_byte": 0.5}}
    Path("data/tales").mkdir(parents=True)
    Path("data/tales/meta.json").write_text(json.dumps(meta), encoding="utf-8")
    write_run(Path("out/run"))
    return tmp_path


def test_a_run_is_read_in_both_units(here):
    _, curves = figures.read_run(Path("out/run"))
    assert curves["nats per token"] == ([(5, 3.5), (10, 3.0)], [(0, 4.0), (10, 3.0)], 1.0)
    assert curves["bits per byte"] == ([(5, 1.75), (10, 1.5)], [(0, 2.0), (10, 1.5)], 0.5)
    other = tokenizers.train_bpe(tokenizers.count_chunks([TEXT]), 290)
    write_run(Path("out/other"), other)  # data/tales is not what it was trained on
    assert figures.read_run(Path("out/other"))[1]["nats per token"][2] is None


# ----------------------------------------------------------------------------------------------------------
# The command line


@pytest.fixture
def draw(monkeypatch, capsys):
    """draw("gates", ...) -> what the command ends with: None, or the sentence of an error."""
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["figures.py", *map(str, words)])
        try:
            run_main(figures.main)
        except SystemExit as exit:
            return exit.code
    return call


def test_without_matplotlib_it_says_what_to_install(here, draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw("rotary").endswith("pip install matplotlib") and not Path("rotary.png").exists()


@pytest.fixture
def matplotlib():
    yield pytest.importorskip("matplotlib", reason="drawing takes matplotlib, which is optional")
    figures.load_matplotlib().close("all")


def test_every_picture_is_small_and_grey(here, draw, matplotlib):
    from PIL import Image

    write_run(Path("out/long"), context=900)
    for words in (["blocks"], ["loss", "out/run"], ["rotary"], ["gates"], ["attention"], ["pieces"],
                  ["stories", "--checkpoint", "out/long/ckpt.pt"], ["merges", "--merge_threshold", 0.1]):
        text = ["--text", TEXT] if words[0] not in ("blocks", "loss", "rotary", "stories") else []
        assert draw(*words, *text) is None, words
        path = Path(f"{words[0]}.png")
        image = Image.open(path)
        assert image.mode == "L" and image.width == 1280 and image.getextrema()[0] < 64, words
        assert path.stat().st_size < 150_000 and not image.info, words
    assert draw(*words, *text, "--out", "again.png") is None
    assert Path("again.png").read_bytes() == path.read_bytes(), "another file each time"
    assert {path.suffix for path in here.iterdir()} == {".png", ""}, "something half-written"


def test_losses_of_different_tokens_are_compared_in_bits(here, matplotlib):
    write_run(Path("out/other"), tokenizers.train_bpe(tokenizers.count_chunks([TEXT]), 290))
    plt, run, other = figures.load_matplotlib(), Path("out/run"), Path("out/other")
    for runs, unit, last in (([run], "nats per token", 3.0), ([run, other], "bits per byte", 1.5)):
        ax = figures.draw_loss(plt, type("", (), {"runs": runs})).axes[0]
        assert ax.get_ylabel() == unit and ax.lines[1].get_ydata()[-1] == last
        black = [line for line in ax.lines if line.get_color() == "black"]
        styles = {(line.get_linestyle(), line.get_marker()) for line in black}
        assert len(styles) == len(black) == len(runs) + 1, "curves that look the same"
        assert [line for line in ax.lines if set(line.get_ydata()) == {1.0 if unit[0] == "n" else 0.5}]


def test_errors_are_sentences(here, draw, matplotlib):
    write_run(Path("out/plain"), mixer="attention")
    write_run(Path("out/silia"), block="silia", mixer="hydra")
    write_run(Path("out/young"), rows=0, n_layer=1)
    plain, silia = ("--checkpoint", "out/plain/ckpt.pt"), ("--checkpoint", "out/silia/ckpt.pt")
    for words, sentence in [
        (["gates", *plain, "--text", "A"], "no gates"), (["gates", *silia, "--text", "A"], "no gates"),
        (["attention", *silia, "--text", "A"], "not all attention"),
        (["attention", *plain, "--text", "A", "--head", 3, 0], "no such head"),
        (["attention", *plain, "--text", "frog " * 130], "more than the context"),
        (["merges", *silia], "token_merging"),
        (["merges", "--checkpoint", "out/young/ckpt.pt", "--text", "A"], "no middle layer"),
        (["merges", *plain, "--merge_threshold", 2], "merge_threshold"),
        (["stories", *plain], "no story fits"),
        (["pieces", "--checkpoint", "out/none.pt"], "no checkpoint"), (["loss", "out/young"], "no losses"),
        (["loss"], "required: runs"), (["gates", "--chekpoint", "x"], "chekpoint"),
        (["gate"], "invalid choice"),
        (["rotary", "--out", "nowhere/rotary.png"], "cannot write nowhere/rotary.png"),
        (["rotary", "--out", "data"], "cannot write data"),
    ]:
        end = draw(*words)
        assert str(end).startswith("error: ") and sentence in end and "\n" not in end, (words, end)
    assert {path.name for path in here.iterdir()} == {"data", "out"}, "something half-written"
