"""The promises of extras/page.py: the page's numbers are the model's, text stays text, a browser shows it."""

import base64
import gzip
import json
import math
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import storybook
from exercises import check
from extras import figures, judge, page
from model import PARTS, Cache, LanguageModel, ModelConfig, apply_rotary, unit_rms
from support.checkpoint import save_checkpoint
from support.hf_tokenizer import tokenizer_to_json
from support.runtime import run_main
from support.settings import read_settings
from test_figures import HELIX, IDX, TEXT, TOKENIZER, small_model
from tokenizer import count_chunks, train_bpe
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SILIA = dict(position="mirrored", alpha=0.0, mixer="hydra", norm="bare_rms", block="silia")
T = IDX.size(1)
STRANGE = 'A </script><b id="x">&amp; \'quoted\' \\ <!-- <script>"frog"\n\u2028🐸 שלום مرحبا'


def unpacked(text, kind):
    return np.frombuffer(gzip.decompress(base64.b64decode(text)), kind).astype(int)


def checkpoint(model, tokenizer=TOKENIZER):
    return {"format": 1, "model": model.float().state_dict(), "model_config": vars(model.config).copy(),
            "train_config": {}, "tokenizer": tokenizer_to_json(tokenizer), "step": 0, "optimizer": {},
            "scaler": {}, "best_val_loss": 0.0}


# ----------------------------------------------------------------------------------------------------------
# The numbers


@pytest.mark.parametrize("changes", [{}, HELIX, SILIA], ids=["nano", "helix", "silia"])
def test_the_numbers_are_the_models(changes):
    model = small_model(**changes).float()
    found = page.look(model, TOKENIZER, IDX)
    with torch.no_grad():
        logits = model(IDX)[0][0]
    losses = F.cross_entropy(logits[:-1], IDX[0, 1:], reduction="none") / math.log(2)
    assert found["bits"][0] is None and found["bits"][1:] == pytest.approx(losses.tolist(), abs=1e-4)

    V = TOKENIZER.vocab_size
    behind = unpacked(found["steps"], np.uint16).reshape(T, V).cumsum(axis=1) / page.UNIT
    ordered, ids = logits[:, :V].sort(descending=True, stable=True)
    shown = torch.from_numpy(-behind).softmax(dim=1)
    torch.testing.assert_close(shown.float(), ordered.softmax(dim=1), rtol=2e-3, atol=1e-6)
    assert found["likeliest"][5] == figures.spell(TOKENIZER, ids[5, :10].tolist())
    assert ids[5, found["rank"][5]] == IDX[0, 6] and found["rank"][-1] is None

    weights = torch.cat(list(figures.heads(figures.watch(model, IDX)[1]).values()))
    packed = unpacked(found["weights"], np.uint8).reshape(len(weights), -1)
    at = 0
    for t in range(T):
        row = packed[:, at : at + t + 1]
        assert (row.sum(axis=1) == 255).all(), "a row that does not add up to 1"
        assert np.abs(row / 255 - weights[:, t, : t + 1].numpy()).max() < 1 / 255
        at += t + 1
    assert at == packed.shape[1] and len(found["heads"]) == len(weights)

    cache = Cache(128)
    with torch.no_grad():
        model(IDX[:, :9], cache=cache)
    assert 9 * found["row_bytes"] == sum(rows[:, :, :9].nbytes for rows in cache.rows.values()) > 0
    assert found["sum_bytes"] == sum(total.nbytes for total in cache.sums.values()) > 0


def test_weights_of_silias_heads_are_those_of_a_loop_over_tokens():
    model = small_model(**SILIA)
    unit, inputs = model.blocks[1].unit_2, []
    hook = unit.register_forward_pre_hook(lambda unit, given: inputs.append(given))
    found = figures.heads(figures.watch(model, IDX)[1])
    hook.remove()
    assert list(found) == ["0.1", "0.2", "1.1", "1.2", "2.1", "2.2"]
    x, rotary, _ = inputs[0]
    with torch.no_grad():
        qkv = unit.qkv(unit.latent(unit_rms(x))).unflatten(-1, (4, 3, 8))[0]  # (T, H, 3, D)
    for head in range(4):
        q, k, _ = qkv[:, head].unbind(dim=1)
        if head % 2 == 0:
            q, k = unit_rms(apply_rotary(q, *rotary)), unit_rms(apply_rotary(k, *rotary))
        for t in range(T):
            if head % 2 == 0:
                expected = (k[: t + 1] @ q[t] / math.sqrt(8)).softmax(dim=0)
            else:  # coordinate by coordinate, and their mean
                expected = unit_rms(k[: t + 1]).softmax(dim=0).mean(dim=1)
            torch.testing.assert_close(found["1.2"][head, t, : t + 1], expected)
            assert (found["1.2"][head, t, t + 1 :] == 0).all()
    flags = [kind for name, head, kind in page.look(model, TOKENIZER, IDX)["heads"]]
    assert flags == [False, True] * 12


def test_weights_on_the_layers_below_are_those_of_a_loop():
    model = small_model(**HELIX)
    mixer, given, before = model.blocks[2].mixer, [], model(IDX)[0]
    with torch.no_grad():
        mixer.phi.fill_(-1.0)
        before = model(IDX)[0]
    hook = mixer.register_forward_pre_hook(lambda mixer, inputs: given.append(inputs))
    found = figures.layers_below(model, IDX)
    hook.remove()
    assert list(found) == ["1", "2"] and found["1"][1].shape == (4, T, 1)  # the first has nothing below it
    assert torch.equal(model(IDX)[0], before) and "attend_to_summaries" not in vars(mixer)  # as it was
    blend, weights = found["2"]
    assert blend == pytest.approx(1 / (1 + math.e)) and weights.std(dim=1).min() > 1e-4
    x, rotary, _, summaries = given[0]
    with torch.no_grad():
        q = apply_rotary(mixer.project(x)[0], *rotary)[0]  # (H, T, D)
        keys = [mixer.kv_summary(s)[0, :, :16].unflatten(-1, (2, 8)) for s in summaries]  # (T, K, D) each
    for head in range(4):
        for t in range(T):
            scores = torch.stack([key[t, head // 2] @ q[head, t] for key in keys]) / math.sqrt(8)
            torch.testing.assert_close(weights[head, t], scores.softmax(dim=0))
    shown = page.look(model, TOKENIZER, IDX)["below"]
    assert shown[1][0] == "2" and shown[1][1] == blend
    assert shown[1][2][7][3] == pytest.approx(weights[3, 7].tolist(), abs=1e-4)


def test_what_if_a_part_were_not_there():
    model = small_model().float()
    found = page.look_without(model, TOKENIZER, IDX)
    assert list(found) == ["as trained", "α = 0", "gate = 1"]
    for name, changes in (("as trained", {}), ("α = 0", {"alpha": 0.0}), ("gate = 1", {"gate": False})):
        other = LanguageModel(replace(model.config, **changes)).eval()
        other.load_state_dict(model.state_dict(), strict=name != "gate = 1")
        with torch.no_grad():
            losses = F.cross_entropy(other(IDX)[0][0, :-1], IDX[0, 1:], reduction="none") / math.log(2)
        assert found[name]["bits"][1:] == pytest.approx(losses.tolist(), abs=1e-3), name
        assert name == "as trained" or found[name]["bits"] != found["as trained"]["bits"]
    assert page.look(model, TOKENIZER, IDX) == found["as trained"], "the model is not as it was"
    assert set(np.ravel(found["gate = 1"]["gates"])) == {1.0}
    assert list(page.look_without(small_model(**SILIA), TOKENIZER, IDX)) == ["as trained"]


def test_which_tokens_merge():
    model = small_model(**HELIX, n_layer=6, token_merging="paper", merge_threshold=0.1)
    shown = page.page_data(checkpoint(model), TOKENIZER, IDX[0].tolist(), 0)
    expected = figures.merges(model.float(), IDX)
    expected = {layer: [t for t in range(T) if second[t]] for layer, second in expected.items()}
    assert expected == shown["merged"]
    assert list(shown["merged"]) == [2, 3] and shown["merged"][2]


@pytest.mark.parametrize("number, key", [(5, "window"), (9, "decayed_hydra"), (7, "second_moment")])
def test_a_part_of_a_learner_is_shown_as_far_as_it_reports(number, key, monkeypatch):
    monkeypatch.setitem(PARTS, "mixer", dict(PARTS["mixer"]))
    check.load(ROOT / "exercises" / "solutions" / f"{number:02}.py")
    found = page.look_without(small_model(mixer=key).float(), TOKENIZER, IDX)
    assert len(found["as trained"]["heads"]) == 12 and ("gate = 1" in found) == (number == 7)


def test_a_mixer_that_reports_nothing_is_left_out(monkeypatch):
    class ByHand(PARTS["mixer"]["attention"]):
        def attend(self, q, k, v, past):
            return (q @ k.mT).tril() @ v

    monkeypatch.setitem(PARTS["mixer"], "by_hand", ByHand)
    found = page.look(small_model(mixer="by_hand").float(), TOKENIZER, IDX)
    assert found["heads"] == found["gates"] == found["below"] == [] and found["row_bytes"] == 0
    assert unpacked(found["weights"], np.uint8).size == 0 and len(found["bits"]) == T


# ----------------------------------------------------------------------------------------------------------
# The floor


def test_the_floor_at_each_token_adds_up_to_the_storys():
    tokenizer = train_bpe(count_chunks(text for text, _ in storybook.stories(50, 3)), 300)  # short tokens
    for text, log_prob in storybook.stories(5, 11):
        pieces = [tokenizer.token_bytes(id).decode("latin-1") for id in tokenizer.encode(text)]
        found = judge.floors([*pieces, judge.END])
        assert sum(found) == pytest.approx(-log_prob / math.log(2)) and min(found) >= -1e-9
        assert found[-1] == pytest.approx(0), "the end of a story is no choice"
        assert judge.floors(pieces) == pytest.approx(found[:-1]), "a story without its end"


def test_the_floor_of_known_choices():
    begin = "Once upon a time, there was a little fox named"
    found = judge.floors([begin, " L", "eo", ".", " He", " swam", " away"])
    assert found[1] == pytest.approx(math.log2(32 / 4))  # Lily, Lucy, Leo, Luke
    assert found[2] == pytest.approx(2) and found[3] == pytest.approx(0) == found[4]
    assert found[5:] == [None, None]  # nobody swims
    assert judge.floors(["x", "y"]) == [None, None]
    assert judge.floors([begin, judge.END, begin])[1:] == [None, None]


# ----------------------------------------------------------------------------------------------------------
# The page, and the command line


class Scripts(HTMLParser):
    """The contents of the page's <script> elements, and all names of tags."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags, self.inside = [], set(), False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.inside = tag == "script"
        if self.inside:
            self.found.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, text):
        if self.inside:
            self.found[-1] += text


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """make(...) -> what the command ends with, in a folder with a model: None, or an error's sentence."""
    monkeypatch.chdir(tmp_path)
    Path("out/run").mkdir(parents=True)
    save_checkpoint(checkpoint(small_model()), Path("out/run/ckpt.pt"))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["page.py", *map(str, words)])
        try:
            run_main(page.make_page)
        except SystemExit as exit:
            return exit.code
    return call


def test_text_cannot_break_out_of_the_page(make):
    Path("strange.txt").write_text(STRANGE, encoding="utf-8")
    assert make("--text", "strange.txt", "--out", "strange.html") is None
    text = Path("strange.html").read_text(encoding="utf-8")
    scripts = Scripts(text)
    assert len(scripts.found) == 2 and "b" not in scripts.tags and "://" not in text.replace(
        "http://www.w3.org/", "")  # nothing is loaded
    data = json.loads(scripts.found[0])
    ids = [TOKENIZER.end_of_text, *TOKENIZER.encode(STRANGE)]
    assert data["tokens"] == figures.spell(TOKENIZER, ids) and data["start"] == 1
    assert "".join(data["tokens"]).startswith('<|endoftext|>A </script><b id="x">&amp;')
    assert data["source"] == str(Path("out/run/ckpt.pt"))
    page.write_page({"tokens": [STRANGE]}, "one.html")  # if all of it were one token
    scripts = Scripts(Path("one.html").read_text(encoding="utf-8"))
    assert len(scripts.found) == 2 and json.loads(scripts.found[0]) == {"tokens": [STRANGE]}


def test_the_model_goes_on_with_the_prompt(make):
    for seed in (1, 2):
        assert make("--prompt", TEXT, "--seed", seed, "--out", f"{seed}.html") is None
    pages = [Scripts(Path(f"{n}.html").read_text(encoding="utf-8")) for n in (1, 2)]
    stories = [json.loads(page.found[0])["tokens"] for page in pages]
    for tokens in stories:
        assert "".join(tokens).startswith("<|endoftext|>" + TEXT)
        assert len(tokens) == 128 or tokens[-1] == "<|endoftext|>"
    assert stories[0] != stories[1]


def test_errors_are_sentences(make):
    Path("long.txt").write_text("x" * 128, encoding="utf-8")
    Path("empty.txt").write_text("\n", encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    for words, sentence in [
        (["--text", "long.txt"], "the text has 128 tokens; a page of this model has room for 1 to 127."),
        (["--prompt", "x" * 128], "the text has 128 tokens"), (["--text", "empty.txt"], "has 0 tokens"),
        (["--text", "latin.txt"], "latin.txt is not UTF-8 text"), (["--text", "none.txt"], "none.txt"),
        (["--checkpoint", "none.pt"], "there is no checkpoint none.pt"), (["--seed", -1], "--seed must lie"),
        (["--merge_threshold", 2], "merge_threshold"), (["--out", "nowhere/a.html"], "cannot write nowhere"),
    ]:
        end = make(*words)
        assert str(end).startswith("error: ") and sentence in end and "\n" not in end, (words, end)
    assert {path.name for path in Path().iterdir()} == {"out", "long.txt", "empty.txt", "latin.txt"}


def test_256_tokens_of_a_tiny_model_fit_into_3_mb(tmp_path):
    torch.manual_seed(1)
    _, config = read_settings([str(ROOT / "config" / "tiny.py")], TrainConfig, ModelConfig)[1]
    tokenizer = train_bpe(count_chunks(text for text, _ in storybook.stories(300, 3)), 1024)
    ids = torch.randint(1024, (256,)).tolist()
    page.write_page(page.page_data(checkpoint(LanguageModel(config)), tokenizer, ids, 0), tmp_path / "a.html")
    assert 1_000_000 < (tmp_path / "a.html").stat().st_size < 3_000_000


# ----------------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture
def browser():
    """Headless Chromium, driven by playwright: its own, or the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="this takes playwright and Chromium")
    with playwright.sync_playwright() as driver:
        for path in (None, *map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
            try:
                browser = driver.chromium.launch(executable_path=path)
            except playwright.Error:
                continue
            yield browser
            browser.close()
            return
        pytest.skip("playwright finds no Chromium: playwright install chromium")


def percentages(tab):
    """The candidates as the page shows them: [(token, percent)]; what may not be drawn has 0."""
    rows = tab.locator("#candidates tr").all_inner_texts()
    cells = [row.split("\t") for row in rows]
    return [(cell[0].strip("→ \xa0")[1:-1], float(cell[1].strip("<%").replace("–", "0")))
            for cell in cells]


def expected_percentages(logits, temperature, top_k=0, top_p=1.0):
    """The same from sample_token's words: k tokens, then those before which less than p is reached."""
    probs = (logits / temperature).sort(descending=True, stable=True).values[: top_k or None].softmax(dim=0)
    probs = probs.where(probs.cumsum(dim=0) - probs < top_p, 0)
    probs = F.pad(probs / probs.sum(), (0, 10))[:10]
    return [100 * p if p == 0 or p > 0.001 else 0.1 for p in probs.tolist()]


def test_a_browser_shows_what_python_computes(make, browser):
    Path("strange.txt").write_text(STRANGE, encoding="utf-8")
    assert make("--text", "strange.txt") is None
    model = small_model().float()
    ids = [TOKENIZER.end_of_text, *TOKENIZER.encode(STRANGE)]
    logits = model(torch.tensor([ids]))[0][0, :, : TOKENIZER.vocab_size].detach()
    tab, complaints = browser.new_page(viewport={"width": 1280, "height": 720}), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url))
    tab.goto(Path("story.html").absolute().as_uri())
    tab.wait_for_selector("#candidates tr")

    # The keyboard chooses a token, and the candidates follow.
    first = percentages(tab)
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
    t, said = 5, tab.locator("#said").inner_text()
    loss = F.cross_entropy(logits[t - 1], torch.tensor(ids[t])).item() / math.log(2)
    assert said.startswith(f"Token {t}, “{figures.spell(TOKENIZER, ids)[t]}”: loss {loss:.2f} bits"), said
    assert percentages(tab) != first
    assert [token for token, _ in percentages(tab)] == [
        token.strip(" ") if not token.strip() else token
        for token in figures.spell(TOKENIZER, logits[t].argsort(descending=True, stable=True)[:10].tolist())]

    # The sliders answer with what Python computes.
    def move(**sliders):
        for name, value in sliders.items():
            tab.locator(f"#{name}").fill(str(value))
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | sliders
        shown = [p for _, p in percentages(tab)]
        assert shown == pytest.approx(expected_percentages(logits[t], **settings), abs=0.06), sliders
        return shown

    seen = [move(), move(temperature=0.5), move(temperature=1.9), move(temperature=1.9, top_k=3),
            move(temperature=1.9, top_k=0, top_p=0.7), move(temperature=1.9, top_k=4, top_p=0.7)]
    assert len(set(map(tuple, seen))) >= 5, "the numbers do not change"
    tab.locator("#temperature").fill("0")
    assert [p for _, p in percentages(tab)] == [100.0] + 9 * [0.0]

    # A head, a part that is not there, the last token; and nothing has gone wrong, and nothing was loaded.
    tab.locator("#heads button").nth(6).click()
    weights = figures.attention(model, torch.tensor([ids]))[1, 2, t]
    s = int(weights.argmax())
    most = f"Layer 1, head 2 reads: “{figures.spell(TOKENIZER, ids)[s]}” "
    reads = tab.locator("#reads").inner_text()
    assert reads.startswith(most)
    assert float(reads.removeprefix(most).split("%")[0]) == pytest.approx(100 * weights[s].item(), abs=0.45)
    tab.select_option("#pass", "gate = 1")
    assert tab.locator("#gate0").inner_text() == "Gates of layer 0, head by head: 1.00 1.00 1.00 1.00"
    tab.keyboard.press("Escape")
    tab.locator("h1").click()
    tab.keyboard.press("End")
    assert tab.locator("#said").inner_text().startswith(f"Token {len(ids) - 1}, ")
    tab.set_viewport_size({"width": 360, "height": 640})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360, "too wide for a phone"
    assert "".join(tab.locator("#text").inner_text().split("\n")) == "".join(figures.spell(TOKENIZER, ids))
    assert [Path(complaint).name for complaint in complaints] == ["story.html"]  # asked for the page itself
