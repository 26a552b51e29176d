"""
Pictures for the classroom: one command, one PNG, in shades of grey.

    python extras/figures.py loss out/tiny out/helix_tiny    losses of runs, and the floor of their data
    python extras/figures.py blocks                          the three models beside a Llama
    python extras/figures.py rotary                          how pairs turn: plain, spiral and helix positions
    python extras/figures.py gates                           the gate of every head at every token of a story
    python extras/figures.py attention                       what one head reads to predict the next token
    python extras/figures.py stories                         how probable stories are: to the model, in truth
    python extras/figures.py merges --merge_threshold 0.3    which tokens are merged in training
    python extras/figures.py pieces --text "A thunderstorm"  how a text is cut, as the tokenizer learns

--out names the file. The last five look into a checkpoint: the newest under out/, or --checkpoint. Drawing
takes matplotlib, which is optional: pip install matplotlib. What is drawn comes from functions of their own,
which do without it.
"""

import csv
import hashlib
import json
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project, when this is run as a script

import numpy as np
import torch
import torch.nn.functional as F

import storybook
from model import (PARTS, Attention, CrossLayerAttention, GatedSpiralAttention, ModelConfig, NoCache,
                   greedy_pairs)
from support import need
from support.checkpoint import checkpoint_tokenizer, load_checkpoint, load_model, newest_checkpoint
from support.files import atomic_write
from support.runtime import run_main, start_ids
from support.settings import CommandLine
from tokenizer import LongestMatchTokenizer, Tokenizer

STORY = next(storybook.stories(1, seed=19))[0]  # of a fox named Leo; no model has trained on it
FUSED = F.scaled_dot_product_attention
LINES, MARKERS = ["-", "--", "-.", ":"], "osD^"  # what tells curves apart, instead of colours

# ----------------------------------------------------------------------------------------------------------
# The numbers


def read_run(folder):
    """out/<run> -> the text of its tokenizer, and {unit: (training, validation, floor)}: two curves, lists of
    (step, loss), and the floor of the whole validation split, or None."""
    checkpoint = load_checkpoint(folder / "ckpt.pt")
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    training, nats, bits = ([(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
                            for name in ("train_loss", "val_loss", "bits_per_byte"))
    need(training and nats and bits, f"{folder / 'log.csv'} has no losses yet.")
    ratio, floor = bits[-1][1] / nats[-1][1], {}
    meta = Path("data") / checkpoint["train_config"].get("data", "") / "meta.json"
    if meta.is_file():
        meta = json.loads(meta.read_text(encoding="utf-8"))
        if meta["tokenizer_sha256"] == hashlib.sha256(checkpoint["tokenizer"].encode("utf-8")).hexdigest():
            floor = meta["val"]  # the data has not been made anew
    answers = checkpoint.get("chat") and checkpoint["train_config"]["assistant_only"]  # what counted
    return checkpoint["tokenizer"], {
        "nats per token": (training, nats, floor.get(f"floor_nats_per_{'assistant_' * bool(answers)}token")),
        "bits per byte": ([(step, loss * ratio) for step, loss in training], bits,
                          None if answers else floor.get("floor_bits_per_byte")),
    }


def turns(config, T):
    """How pairs of coordinates turn: angles in radians, and radii, (T, D/2) each, read off the tables."""
    cos, sin = PARTS["position"][config.position](config, torch.arange(T, dtype=torch.float64))
    return np.unwrap(torch.atan2(sin, cos).numpy(), axis=0), torch.hypot(cos, sin).numpy()


class Watch(NoCache):
    """The past of one pass, which notes what the layers keep and what their heads read.

    Fused kernels do not return their weights. But a head reads weights times values; with the identity matrix
    as its values, it reads the weights.
    """

    def __init__(self):
        self.rows = {}  # name -> (1, K, T, D)
        self.sums = {}  # name -> what is added up, and the sums so far, (1, T, ...) each
        self.weights = {}  # name of the mixer -> (H, T, S)

    def append(self, name, x):
        self.rows[name] = x
        self.mixer = name.rpartition(".")[0]  # it is about to attend
        return x

    def running_sum(self, name, x):
        total = super().running_sum(name, x)
        self.sums[name] = x, total
        return total

    def attend(self, q, k, v, **options):
        """Stands before F.scaled_dot_product_attention during the pass."""
        identity = torch.eye(k.size(2), dtype=v.dtype).expand(*k.shape[:2], -1, -1)  # (1, K, S, S)
        self.weights[self.mixer] = FUSED(q, k, identity, **options)[0]
        return FUSED(q, k, v, **options)


@torch.no_grad()
def watch(model, idx):
    """Token ids idx (1, T) -> logits (T, V), and a Watch of this pass."""
    past = Watch()
    with patch.object(F, "scaled_dot_product_attention", past.attend):
        logits, _ = model(idx, cache=past)
    return logits[0], past


def heads(past):
    """A Watch -> {mixer: (H, T, T)}, the weight that each token gives to each, of the mixers that tell.

    A head of Silia that keeps sums weighs each coordinate by itself; of these weights it is the mean.
    """
    found = {name: weights for name, weights in past.weights.items() if weights.size(1) == weights.size(2)}
    for name, (x, total) in past.sums.items():
        mixer, _, kind = name.rpartition(".")
        if kind == "weight" and mixer in found and x.dim() == 4 and x.size(2) == len(found[mixer]):
            odd = torch.einsum("shd,thd->hts", x[0], 1 / total[0]).tril() / x.size(3)
            found[mixer] = torch.stack([found[mixer], odd], dim=1).flatten(0, 1)  # the two kinds alternate
    return found


def attention(model, idx):
    """Token ids idx (1, T) -> the weight that each token gives to each, (layers, H, T, T)."""
    need(isinstance(getattr(model.blocks[0], "mixer", None), Attention),
         "this model's heads are not all attention; take one with another mixer.")
    return torch.stack(list(heads(watch(model, idx)[1]).values()))


def gate_modules(model):
    """The gates of Gated Spiral Attention, one for each layer that has one."""
    mixers = [part for part in model.modules() if isinstance(part, GatedSpiralAttention)]
    return [mixer.gate for mixer in mixers if mixer.gate is not None]


@torch.no_grad()
def gates(model, idx):
    """Token ids idx (1, T) -> the gates of Gated Spiral Attention, (layers, H, T), each in (0, 1)."""
    found = []
    hooks = [gate.register_forward_hook(lambda gate, inputs, g: found.append(g[0].T))
             for gate in gate_modules(model)]
    need(hooks, "this model has no gates; Wiola Nano has, and config/tiny.py.")
    model(idx)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@torch.no_grad()
def layers_below(model, idx):
    """Token ids idx (1, T) -> {mixer: (blend, (H, T, L))}: the share that the L layers below get in
    Cross-Layer Attention, and the weight of each, from the lowest up. By the trick of a `Watch`."""
    found = {}

    def watched(mixer, attend):
        def attend_twice(q, summaries):
            L, D = len(summaries), mixer.d_head

            def identity_as_values(module, inputs, kv):  # (1, T, L, 2*K*D), first the keys
                k, v = kv.chunk(2, dim=-1)
                return torch.cat([k, torch.eye(L, D).repeat(1, v.size(-1) // D).expand_as(v)], dim=-1)

            hook = mixer.kv_summary.register_forward_hook(identity_as_values)
            found[mixer.name] = mixer.phi.sigmoid().item(), attend(q, summaries)[0, :, :, :L]
            hook.remove()
            return attend(q, summaries)
        return attend_twice

    mixers = [part for part in model.modules() if isinstance(part, CrossLayerAttention)]
    for mixer in mixers:
        mixer.attend_to_summaries = watched(mixer, mixer.attend_to_summaries)  # stands before the method
    model(idx)
    for mixer in mixers:
        del mixer.attend_to_summaries
    return found


@torch.no_grad()
def merges(model, idx):
    """Token ids idx (1, T) -> {layer: (T,), True where a token merges with the one before it}."""
    found = {}
    for layer, block in enumerate(model.blocks):
        if block.find_pairs:
            def find_pairs(x, threshold, layer=layer):
                found[layer] = greedy_pairs(x, threshold)
                return found[layer]
            block.find_pairs = find_pairs
    model.train()(idx)
    need(found, f"a model of {len(model.blocks)} layers has no middle layer that merges.")
    return {layer: second[0] for layer, second in found.items()}


def cuts(tokenizer, text):
    """{what cuts the text: its pieces}, for BPE after 0, some and all merges, and for the longest match."""
    learned = tokenizer.merges or []  # a LongestMatchTokenizer has none

    def vocab(n):  # after n merges
        later = {left + right for left, right in learned[n:]}
        tokens = [token for token in sorted(tokenizer.vocab, key=tokenizer.vocab.get) if token not in later]
        return {token: id for id, token in enumerate(tokens)}

    n, how = len(learned), (tokenizer.pattern, tokenizer.nfc)
    ways = {f"BPE after {k} merges": Tokenizer(vocab(k), learned[:k], {}, *how)
            for k in ([0, n // 8, n // 2, n] if n else [])}
    ways["Maximal munch, same tokens"] = LongestMatchTokenizer(vocab(n), {}, *how)
    return {name: spell(way, way.encode(text)) for name, way in ways.items()}


def spell(tokenizer, ids):
    """Tokens as they are drawn: an arrow for a line break; what is no text, as Python writes it."""
    texts = [tokenizer.token_bytes(id).decode("utf-8", errors="backslashreplace") for id in ids]
    return ["".join(char if char.isprintable() else "↵" if char == "\n" else ascii(char)[1:-1]
                    for char in text) for text in texts]


def lay_out(pieces, width):
    """Where pieces stand on a page of `width` characters: [(line, column)]. Words stay whole if they fit."""
    after_break = [False, *(piece[-1] == "↵" for piece in pieces)]
    words = [i for i, piece in enumerate(pieces) if i == 0 or piece[0] == " " or after_break[i]]
    places, line, column = [], 0, 0
    for start, end in zip(words, [*words[1:], len(pieces)]):
        length = sum(map(len, pieces[start:end]))
        if after_break[start] or column + length > width >= length:
            line, column = line + 1, 0
        for piece in pieces[start:end]:
            if column + len(piece) > width:
                line, column = line + 1, 0
            places.append((line, column))
            column += len(piece)
    return places


@torch.no_grad()
def story_costs(model, tokenizer, n=300, seed=19):
    """-log p of n stories that no model has trained on, in nats: a list of (by the grammar, by the model).

    The grammar's is exact, so on average no model has a lower one. A story longer than the context is left
    out.
    """
    costs = []
    start = start_ids(model.config, tokenizer)
    for story, log_prob in storybook.stories(n, seed):
        ids = start + tokenizer.encode(story) + [tokenizer.end_of_text]
        if len(ids) - 1 <= model.config.context:
            idx = torch.tensor([ids])
            logits, _ = model(idx[:, :-1])
            told = slice(len(start) - 1, None)  # a sink is given, not told
            loss = F.cross_entropy(logits[0, told].double(), idx[0, 1:][told], reduction="sum")
            costs.append((-log_prob, loss.item()))
    need(costs, f"no story fits a context of {model.config.context} tokens.")
    return costs


# ----------------------------------------------------------------------------------------------------------
# The pictures


def load_matplotlib():
    """matplotlib.pyplot, set up for pictures that are shown 800 pixels wide."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("drawing takes matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "text.parse_math": False, "axes.titlesize": 12,
                         "axes.titleweight": "bold", "axes.titlelocation": "left",
                         "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                         "patch.linewidth": 0.6})
    return plt


def save(figure, path):
    """A PNG in 256 shades of grey, whole or not at all; the same picture is the same file."""
    from PIL import Image  # comes with matplotlib

    figure.set_dpi(160)  # 8 inches: 1280 pixels
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("L")
    with atomic_write(path) as file:
        image.save(file, "PNG", optimize=True)


def draw_loss(plt, args):
    runs = {str(folder): read_run(folder) for folder in args.runs}
    same_tokens = len({tokenizer for tokenizer, _ in runs.values()}) == 1
    unit = "nats per token" if same_tokens else "bits per byte"  # fair to all tokenizers
    curves = {name: units[unit] for name, (_, units) in runs.items()}
    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for i, (name, (training, validation, _)) in enumerate(curves.items()):
        ax.plot(*zip(*training), LINES[i % 4], color="0.6", linewidth=1)
        ax.plot(*zip(*validation), LINES[i % 4] + MARKERS[(i + i // 4) % 4], color="black",
                label=f"{name}, validation: {validation[-1][1]:.3f}")
    ax.plot([], [], color="0.6", linewidth=1, label="the same, training")
    floors = {floor for *_, floor in curves.values()} - {None}
    for floor in floors:
        ax.axhline(floor, color="black", linewidth=3, label=f"entropy floor: {floor:.3f}")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    lowest = min(validation[-1][1] for _, validation, _ in curves.values())
    ax.set_ylim(top=min(ax.get_ylim()[1], 12 * lowest))  # the first steps may begin far above
    ax.set(title="Loss, and the least that is possible" if floors else "Loss", xlabel="steps", ylabel=unit)
    ax.legend()
    return figure


# One block of each model, from its input up: (what, changed from a Llama?). "+" adds what the branch made.
ADD = ("+", False)
BLOCKS = {
    "Llama": [("RMSNorm", False), ("attention\nrotary positions", False), ADD,
              ("RMSNorm", False), ("SwiGLU\nSiLU(a) · b", False), ADD],
    "Wiola Nano": [("RMSNorm", False),
                   ("attention, each head's\nscores times a gate;\nspiral rotary positions", True), ADD,
                   ("RMSNorm", False), ("butterfly\nSiLU(a) · b + c", True), ADD],
    "helix": [("RMSNorm of x + δ", True),
              ("attention to the text and\nto the layers below, gated;\nhelical rotary positions", True), ADD,
              ("RMSNorm of x + δ", True), ("two streams, blended\nSwiGLU and GELU", True), ADD],
    "Silia v2": [("projection to u and v,\nin it attention: half softmax,\nhalf a running sum", True),
                 ("gated as in a SwiGLU\nu · SiLU(v)", False),
                 ("projection back,\nin it attention, too", True), ADD],
}


def draw_blocks(plt, args):
    figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    ax.axis("off")
    ax.set(xlim=(0, 4), ylim=(-1.4, 12.3))
    for column, (name, parts) in enumerate(BLOCKS.items()):
        middle, y, branch = column + 0.5, 0.6, 0.2
        ax.text(middle, 11.6, name, ha="center", weight="bold", size=12)
        ax.annotate("", (middle, 10.9), (middle, -0.6), arrowprops=dict(arrowstyle="->", color="0.4"),
                    zorder=0)
        ax.text(middle, -1.1, "x, from the layer below", ha="center", size=8)
        for what, changed in parts:
            if what == "+":
                y += 0.2
                ax.plot([middle, column + 0.03, column + 0.03, middle], [branch, branch, y, y], "0.4", lw=1,
                        zorder=0)
                ax.text(middle, y, "+", ha="center", va="center", size=11,
                        bbox=dict(boxstyle="circle,pad=0.1", facecolor="white", edgecolor="0.2"))
                branch, y = y + 0.5, y + 0.9
                continue
            height = 0.3 + 0.65 * (what.count("\n") + 1)
            ax.add_patch(plt.Rectangle((column + 0.08, y), 0.84, height, edgecolor="0.2", zorder=1,
                                       facecolor="0.8" if changed else "white", lw=1.6 if changed else 0.8))
            ax.text(middle, y + height / 2, what, ha="center", va="center", size=8.5)
            y += height + 0.35
    return figure


def draw_rotary(plt, args):
    kinds = {"plain": ModelConfig(alpha=0.0), "spiral": ModelConfig(), "helix": ModelConfig(position="helix")}
    found, half = {name: turns(config, 1024) for name, config in kinds.items()}, ModelConfig().d_head // 2
    figure, axes = plt.subplot_mosaic([["angle", "speed"], ["radius", "radius"]], figsize=(8, 6),
                                      layout="constrained")
    for i, (name, (angle, _)) in enumerate(found.items()):
        style = dict(linestyle=LINES[i], marker=MARKERS[i], color="black", label=name)
        axes["angle"].plot(angle[:, -1], markevery=128, **style)
        axes["speed"].plot(angle[1] / found["plain"][0][1], **style)
    for style, pair in zip(LINES, (0, 2, 4, half - 1)):
        axes["radius"].plot(found["helix"][1][:, pair], style, color="black", label=f"pair {pair}")
    axes["radius"].axhline(1, color="0.75", linewidth=4, zorder=0, label="plain, spiral")
    axes["angle"].set(title="How far the slowest pair turns", xlabel="position", ylabel="angle (radians)")
    axes["speed"].set(title="How fast each pair turns", xlabel="pair, from fast to slow",
                      ylabel="plain rotary = 1", ylim=(0.99, 1.16), xticks=range(0, half, 3))
    axes["radius"].set(title="The helix also stretches queries and keys", xlabel="position", ylabel="radius",
                       ylim=(0.88, 1.17))
    axes["angle"].legend()
    for name, columns in (("speed", 3), ("radius", 5)):
        axes[name].legend(ncols=columns, loc="upper center", columnspacing=1, handlelength=1.8)
    return figure


def draw_gates(plt, args):
    model, tokenizer, ids = read_model(args, STORY[: STORY.index("\nThen")])
    g = gates(model, torch.tensor([ids]))  # (layers, H, T)
    layers, H, T = g.shape
    figure, axes = plt.subplots(layers, figsize=(8, 1 + 1.6 * layers), sharex=True, squeeze=False,
                                layout="constrained")
    for layer, ax in enumerate(axes[:, 0]):
        image = ax.imshow(g[layer].numpy(), "gray", vmin=g.min(), vmax=g.max(), aspect="auto",
                          interpolation="none")
        ax.set(ylabel=f"layer {layer}", yticks=range(H))
    if T <= 70:  # else tokens are numbered
        ax.set_xticks(range(T), [piece.strip() for piece in spell(tokenizer, ids)], rotation=90, size=10)
    axes[0, 0].set_title("The gate of each head at each token")
    figure.colorbar(image, ax=axes, pad=0.01, label="gate")
    return figure


class Page:
    """A text as it is printed, its tokens in boxes. Units: a character's width, and a box's height."""

    width = 82

    def __init__(self, plt):
        self.figure, self.box = plt.figure(), plt.Rectangle
        self.ax = self.figure.add_axes((0, 0, 1, 1))
        self.y = 0.3

    def say(self, sentence, weight="bold"):
        self.ax.text(0, self.y + 0.5, sentence, va="center", size=12, weight=weight)
        self.y += 1.3

    def show(self, pieces, shades, seams={}):
        """Boxes in shades from 0, white, to 1, black. seams: {box: width of the first of its two tokens}"""
        size = 8 * 72 / (self.width + 2) / 0.602  # in points: this font's characters are 0.602 as wide
        for i, (piece, shade, (line, x)) in enumerate(zip(pieces, shades, lay_out(pieces, self.width))):
            y = self.y + 1.25 * line
            self.ax.add_patch(self.box((x + 0.07, y), len(piece) - 0.14, 1, facecolor=str(1 - shade),
                                       edgecolor="0.5"))
            self.ax.text(x, y + 0.5, piece, family="monospace", size=size, va="center_baseline",
                         color="white" if shade > 0.5 else "black")
            if i in seams:
                self.ax.vlines(x + seams[i], y, y + 1, color="0.5", linewidth=0.6, linestyle=":")
        self.y = y + 1.5

    def done(self):
        self.ax.axis("off")
        self.ax.set(xlim=(-1, self.width + 1), ylim=(self.y, 0))
        self.figure.set_size_inches(8, 0.235 * self.y)
        return self.figure


def draw_attention(plt, args):
    model, tokenizer, ids = read_model(args, STORY[: STORY.rindex(" Leo")])
    idx = torch.tensor([ids])
    weights = attention(model, idx)[:, :, -1]  # (layers, H, T): those of the last token
    chances = model(idx, last_only=True)[0][0, -1].softmax(dim=-1)
    predicted = int(chances.argmax())
    before = weights[:, :, idx[0] == predicted].sum(dim=-1)  # (layers, H): the share of its earlier mentions
    (layers, H), name = before.shape, spell(tokenizer, [predicted])[0].strip()
    layer, head = args.head or divmod(int(before.argmax()), H)
    need(0 <= layer < layers and 0 <= head < H,
         f"there is no such head: it is {layers} layers of {H} heads, counted from 0.")
    page, w = Page(plt), weights[layer, head]
    page.say(f"What head {head} of layer {layer} reads at the end, to go on with “{name}” "
             f"({chances[predicted]:.0%})")
    page.show(spell(tokenizer, ids), w.tolist())
    page.say(f"White is 0%, black is 100% of its attention. Earlier “{name}”: {before[layer, head]:.0%}.",
             weight="normal")
    return page.done()


def draw_stories(plt, args):
    checkpoint, tokenizer = read_checkpoint(args)
    costs = story_costs(load_model(checkpoint).eval(), tokenizer)
    truth, found = (sum(column) / len(costs) for column in zip(*costs))
    ends = [min(costs)[0], max(costs)[0]]
    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    ax.plot(ends, ends, color="0.6", label=f"the grammar: {truth:.1f} nats a story")
    ax.plot(*zip(*costs), "o", color="black", markersize=3, label=f"the model: {found:.1f}")
    ax.set(title=f"{len(costs)} stories, each as probable as it really is?",
           xlabel="-log p by the grammar, nats", ylabel="-log p by the model, nats")
    ax.legend()
    return figure


def draw_merges(plt, args):
    changes = {} if args.merge_threshold is None else {"merge_threshold": args.merge_threshold}
    model, tokenizer, ids = read_model(args, STORY, token_merging="paper", **changes)
    page = Page(plt)
    for layer, second in merges(model, torch.tensor([ids])).items():
        boxes, shades, seams = [], [], {}
        for piece, joins in zip(spell(tokenizer, ids), second):
            if joins:
                seams[len(boxes) - 1] = len(boxes[-1])
                boxes[-1], shades[-1] = boxes[-1] + piece, 0.3
            else:
                boxes, shades = [*boxes, piece], [*shades, 0]
        page.say(f"Layer {layer} merges {len(seams)} pairs among {len(ids)} tokens (cosine above "
                 f"{model.config.merge_threshold:g})")
        page.show(boxes, shades, seams)
    return page.done()


def draw_pieces(plt, args):
    _, tokenizer = read_checkpoint(args)
    page = Page(plt)
    text = args.text or "Whether it was a wonderful thunderstorm or not, the fisherman was reading."
    for name, pieces in cuts(tokenizer, text).items():
        page.say(f"{name}: {len(pieces)} tokens")
        page.show(pieces, [0.2 * (i % 2) for i in range(len(pieces))])
    return page.done()


# ----------------------------------------------------------------------------------------------------------


def read_checkpoint(args):
    """The checkpoint that the options name, and its tokenizer."""
    path = args.checkpoint or newest_checkpoint()
    checkpoint = load_checkpoint(path)
    return checkpoint, checkpoint_tokenizer(checkpoint, path)


def read_model(args, text, **changes):
    """The model, with some fields of its configuration changed; its tokenizer; ids of --text, or of text."""
    checkpoint, tokenizer = read_checkpoint(args)
    checkpoint["model_config"] |= changes
    model = load_model(checkpoint).eval()
    ids = start_ids(model.config, tokenizer) + tokenizer.encode(args.text or text)
    need(len(ids) <= model.config.context,
         f"the text has {len(ids)} tokens, more than the context of {model.config.context}.")
    return model, tokenizer, ids


PICTURES = {
    "loss": (draw_loss, ["runs"]),
    "blocks": (draw_blocks, []),
    "rotary": (draw_rotary, []),
    "gates": (draw_gates, ["--checkpoint", "--text"]),
    "attention": (draw_attention, ["--checkpoint", "--text", "--head"]),
    "stories": (draw_stories, ["--checkpoint"]),
    "merges": (draw_merges, ["--checkpoint", "--text", "--merge_threshold"]),
    "pieces": (draw_pieces, ["--checkpoint", "--text"]),
}
OPTIONS = {
    "runs": dict(type=Path, nargs="+", help="folders of runs, such as out/tiny"),
    "--checkpoint": dict(type=Path, help="default: the newest out/*/ckpt.pt"),
    "--text": dict(help="default: a story"),
    "--head": dict(type=int, nargs=2, metavar=("LAYER", "HEAD"), help="counted from 0; default: the one that "
                   "reads most where the next token stood before"),
    "--merge_threshold": dict(type=float, help="cosine above which neighbours merge; default: as trained"),
    "--out": dict(type=Path, help="default: the name of the picture, .png"),
}


def main():
    parser = CommandLine(description="Pictures for the classroom.")
    commands = parser.add_subparsers(dest="picture", required=True, metavar="|".join(PICTURES))
    for name, (_, options) in PICTURES.items():
        command = commands.add_parser(name)
        for option in [*options, "--out"]:
            command.add_argument(option, **OPTIONS[option])
    args = parser.parse_args()
    plt = load_matplotlib()
    path = args.out or Path(f"{args.picture}.png")
    draw, _ = PICTURES[args.picture]
    save(draw(plt, args), path)
    print(path)


if __name__ == "__main__":
    run_main(main, advice="try a shorter --text")
