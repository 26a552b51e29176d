"""The promises of extras/convert.py: the packages' numbers, every tensor used once, folders whole or absent.

tests/golden/make.py says how the golden files were made.
"""

import errno
import json
import math
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
import tokenizer as tokenizers
from extras import convert
from extras.convert import load_reference, to_reference
from model import Cache, LanguageModel, ModelConfig
from support import settings
from support.checkpoint import load_checkpoint, load_model, save_checkpoint
from support.hf_tokenizer import tokenizer_to_json
from support.runtime import run_main
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
TENSORS = "model.safetensors" if convert.safetensors else "pytorch_model.bin"
SMALL = {"vocab_size": 300, "context": 32, "n_layer": 3, "d_model": 16, "n_head": 4, "d_ff": 24}
HELIX = SMALL | {"position": "helix", "mixer": "cross_layer", "ffn": "dual_stream", "norm": "offset_rms"}
SILIA = SMALL | {"position": "mirrored", "alpha": 0.0, "mixer": "hydra", "norm": "bare_rms", "d_head": 16,
                 "embedding_norm": True, "block": "silia", "lookback": 2}
MODELS = {
    "nano": SMALL | {"alpha": 0.1, "rope_base": 500.0, "norm_eps": 1e-5},
    "nano, no gate": SMALL | {"gate": False},
    "nano, gate after rotary": SMALL | {"gate_after_rotary": True},
    "helix": HELIX | {"winding": 6.0, "radial_amplitude": 0.3, "radial_frequency": 0.2, "phi": 0.5},
    "helix, grouped heads": HELIX | {"n_kv_head": 2, "d_narrow": 7, "lookback": 1},
    "helix, merging": HELIX | {"token_merging": "paper", "merge_threshold": 0.5},
    "silia": SILIA,
}


def make(fields):
    """A model of which no parameter is at its default."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**fields)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def golden(family):
    """(the file, its config, its weights)"""
    file = np.load(ROOT / "tests" / "golden" / f"{family}.npz")
    weights = {name[2:]: torch.from_numpy(file[name]) for name in file.files if name.startswith("w/")}
    return file, json.loads(str(file["config"])), weights


def difference(x, y):
    return np.abs(np.asarray(x.detach()) - y).max()


def next_token_loss(model, ids):
    """The packages shift inside, so the last token has no target."""
    return model(ids, F.pad(ids[:, 1:], (0, 1), value=-100))


# ------------------------------------------------------------------------------------------ golden files


@pytest.mark.parametrize("family", ["nano", "helix", "silia"])
def test_logits_loss_and_gradients_are_the_packages(family):
    file, config, weights = golden(family)
    model = load_reference(config, weights)
    logits, loss = next_token_loss(model, torch.from_numpy(file["ids"]))
    assert not model.training and logits.dtype == torch.float32
    assert difference(logits, file["logits"]) < 2e-4  # 7e-6 nano, 2.5e-5 helix, 3e-6 Silia, of 5 to 8
    assert difference(loss, file["loss"]) < 1e-5  # 5e-7
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    _, gradients = to_reference(model)  # under the packages' names
    compared = [name[2:] for name in file.files if name.startswith("g/")]
    assert len(compared) >= 20
    for name in compared:
        assert difference(gradients[name], file["g/" + name]) < 5e-5, name  # 1e-5, of 2.5 (helix)


@pytest.mark.parametrize("family", ["nano", "helix"])
def test_20_greedy_tokens_are_the_packages(family):
    file, config, weights = golden(family)
    prompt = torch.from_numpy(file["ids"])[:1, :5]
    tokens = load_reference(config, weights).generate(prompt, 20, temperature=0)
    assert [token.item() for token in tokens] == file["greedy"].tolist()


def untied_nano():
    """Nano's golden weights with a head of its own."""
    _, config, weights = golden("nano")
    head = 1.5 * weights["model.embed_tokens.weight"].roll(7, 0)
    return config | {"tie_word_embeddings": False}, weights | {"lm_head.weight": head}


def test_20_greedy_tokens_of_an_untied_head_are_the_packages(run):
    config, weights = untied_nano()
    write_folder("src", config, weights)
    assert run(convert, "import", "src", "a.pt")[0] is None
    assert run(convert, "export", "a.pt", "dst")[0] is None  # to which from_pretrained gives the same tokens
    assert json.loads(Path("dst/config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False
    assert run(convert, "import", "dst", "b.pt")[0] is None
    prompt = torch.from_numpy(golden("nano")[0]["ids"])[:1, :5]
    for path in ("a.pt", "b.pt"):
        model = load_model(load_checkpoint(Path(path))).eval()
        tokens = [token.item() for token in model.generate(prompt, 20, temperature=0)]
        # of wiola13m 1.0.1 with these weights and tie_word_embeddings=False
        assert tokens == [28, 26, 58, 36, 41, 26, 21, 39, 49, 15, 44, 44, 44, 44, 51, 58, 33, 8, 15, 39]


def test_silia_decodes_as_the_reference_does():
    file, config, weights = golden("silia")
    model, ids = load_reference(config, weights), torch.from_numpy(file["ids"])
    cache = Cache(model.config.context)
    with torch.no_grad():
        logits = torch.cat([model(column, cache=cache)[0] for column in ids.split(1, dim=1)], dim=1)
    assert difference(logits, file["logits_step"]) < 2e-4  # 4e-6
    assert (logits.argmax(dim=-1).numpy() == file["logits_step"].argmax(axis=-1)).all()


@pytest.mark.parametrize("family", ["nano", "helix"])
def test_20_steps_of_training_have_the_packages_losses(family):
    file, config, weights = golden(family)
    model = load_reference(config | {"atm_enabled": False}, weights).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for batch, expected in zip(torch.from_numpy(file["train_ids"]), file["train_losses"], strict=True):
        _, loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert abs(loss.item() - expected) < 1e-4  # 1e-6 nano, 2.4e-6 helix


def test_token_merging_in_training_is_the_packages():
    file, config, weights = golden("helix")
    model = load_reference(config, weights).train()
    logits, _ = model(torch.from_numpy(file["ids"]))
    assert 0.1 < model.merge_ratio() < 0.4
    assert difference(logits, file["logits_train"]) < 2e-4  # 2.1e-5
    assert np.abs(file["logits_train"] - file["logits"]).max() > 1  # so it would show if nothing merged


# --------------------------------------------------------------------------------- every tensor, just once


@pytest.mark.parametrize("family", ["nano", "helix", "silia"])
def test_a_tensor_missing_left_over_or_misshapen_is_named(family):
    _, config, weights = golden(family)
    for name in weights:
        head = name == "unembed.weight"
        if not head:  # a file may leave the head out
            with pytest.raises(ValueError, match=f"1 of the tensors are missing: {name}"):
                load_reference(config, {other: x for other, x in weights.items() if other != name})
        with pytest.raises(ValueError, match=name):
            load_reference(config, weights | {name: torch.cat([weights[name].reshape(-1), torch.ones(1)])})
    with pytest.raises(ValueError, match="1 of the tensors are left over: model.layers.9.extra"):
        load_reference(config, weights | {"model.layers.9.extra": torch.ones(2)})


def test_pieces_that_only_together_have_the_right_size_are_refused():
    _, config, weights = golden("nano")
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=f"2 of the tensors are not of the shape .*{k}, {q}"):
        load_reference(config, weights | {q: torch.cat([weights[q], weights[k][:8]]), k: weights[k][8:]})


@pytest.mark.parametrize("family, head", [("nano", "lm_head.weight"), ("helix", "lm_head.weight"),
                                          ("silia", "unembed.weight")])
def test_a_head_is_accepted_only_if_it_is_the_embedding(family, head):
    _, config, weights = golden(family)
    embedding = next(x for name, x in weights.items() if "embed" in name)
    load_reference(config, weights | {head: embedding.clone()})
    with pytest.raises(ValueError, match=head):
        load_reference(config, weights | {head: embedding + 1e-3})
    with pytest.raises(ValueError, match="missing: lm_head" if family == "nano" else "tie_word_embeddings"):
        load_reference(config | {"tie_word_embeddings": False}, weights)


@pytest.mark.parametrize("family, name, x", [
    ("nano", "model.embed_tokens.weight", math.nan), ("nano", "lm_head.weight", math.nan),
    ("helix", "model.layers.1.attn.blend_logit", -math.inf), ("silia", "unembed.weight", math.nan),
])
def test_weights_that_are_not_finite_are_called_so(family, name, x):
    """A NaN differs from itself, and so the head looked as if it were not tied."""
    _, config, weights = golden(family)
    broken = weights.get(name, weights.get("model.embed_tokens.weight")).clone()
    broken.view(-1)[-1] = x
    for copy in (broken, broken.half()):
        with pytest.raises(ValueError, match=f"1 of the tensors are not finite .*: {name}"):
            load_reference(config, weights | {name: copy})


def test_nanos_head_may_have_a_matrix_of_its_own():
    _, config, weights = golden("nano")
    embedding = weights["model.embed_tokens.weight"]
    untied = config | {"tie_word_embeddings": False}
    model = load_reference(untied, weights | {"lm_head.weight": -2 * embedding})
    tied, x = load_reference(config, weights), torch.arange(12).view(1, 12)
    assert torch.allclose(model(x)[0], -2 * tied(x)[0], atol=1e-4)
    published, tensors = to_reference(model)
    assert published["tie_word_embeddings"] is False
    assert torch.equal(tensors["lm_head.weight"], -2 * embedding)
    with pytest.raises(ValueError, match="tie_embeddings=False"):
        to_reference(make(HELIX | {"tie_embeddings": False}))


@pytest.mark.parametrize("config, sentence", [
    ({"model_type": "gpt"}, "model_type 'gpt'"),
    ({"hidden_size": 24, "vocab_size": 61}, "not that of a"),
    ({"norm_after_concat": True, "n_embd": 16}, "norm_after_concat"),
    ({"spiral_alpha": "0.05"}, "spiral_alpha takes a value of type float"),
    ({"spiral_alpha": 0.05, "num_hidden_layers": 2.5}, "num_hidden_layers takes"),
    ({"spiral_alpha": 0.05, "num_attention_heads": 5}, "n_head=5"),
    ({"spiral_alpha": 0.05, "gate_pre_rope": "no"}, "gate_pre_rope takes"),
    ({"gcla_lookback": 2, "atm_enabled": "paper"}, "atm_enabled takes"),
    ({"gcla_lookback": [2]}, "gcla_lookback takes"),
    ({"gcla_lookback": 2, "atm_enabled": [1]}, "atm_enabled takes"),
    ({"spiral_alpha": 0.05, "num_hidden_layers": 10**9}, "0 tensors are too few for 1000000000 layers"),
    ({"spiral_alpha": 0.05, "num_hidden_layers": 0}, "n_layer must be above 0"),
])
def test_configs_that_are_not_understood(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_reference(config, {})


def test_sizes_beyond_any_machine():
    _, config, weights = golden("nano")
    with pytest.raises(ValueError, match="beyond any machine"):
        load_reference(config | {"vocab_size": 10**18}, weights)


@pytest.mark.parametrize("layout, name, changes", [
    ("wiola13m", "nano", {"context": 1024}),
    ("wiola", "helix_360m", {}),
    ("silia", "silia", {"sink_token": ""}),
])
def test_the_defaults_are_those_of_the_recipes(layout, name, changes):
    """A config.json may leave out what is at its default; and so training can go on from an import."""
    layout = convert.LAYOUTS[layout]
    recipe = settings.read_settings([str(ROOT / "config" / f"{name}.py")], TrainConfig, ModelConfig)[1][1]
    assert asdict(convert.read_config(layout, {})) == asdict(recipe) | changes


def test_lookback_0_means_all_layers_there_and_none_here():
    _, config, weights = golden("helix")
    assert load_reference(config | {"gcla_lookback": 0}, weights).lookback == 3
    with pytest.raises(ValueError, match="lookback=0"):
        to_reference(make(HELIX | {"lookback": 0}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_and_the_callers_tensors_stay_theirs(dtype):
    _, config, weights = golden("helix")
    model = load_reference(config, {name: x.to(dtype) for name, x in weights.items()})
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    model = load_reference(config, weights)
    torch.nn.init.zeros_(model.embedding.weight)
    assert weights["model.embed_tokens.weight"].any()


def test_the_ports_names_of_silia():
    file, config, weights = golden("silia")
    port = {"wte.weight" if name == "embed.weight" else name: x for name, x in weights.items()}
    port["lm_head.weight"] = port.pop("unembed.weight")
    published = {"model_type": "siliav2", "num_blocks": 2, "n_layer": 4, "num_hidden_layers": 4, "n_head": 2,
                 "n_embd": 16, "d_ff": 24, "n_positions": 64, "vocab_size": 61, "rms_norm_eps": None}
    for prefix in ("", "model."):
        model = load_reference(published, {prefix + name: x for name, x in port.items()})
        assert model.config == load_reference(config, weights).config
        assert difference(model(torch.from_numpy(file["ids"]))[0], file["logits"]) < 2e-4
    with pytest.raises(ValueError, match="prefix"):
        load_reference(published, port | {"model.wte.weight": port["wte.weight"]})


# ------------------------------------------------------------------------------------------ there and back


@pytest.fixture(scope="module")
def tokenizer():
    text = "The frog saw a big red ball in the pond and jumped after it at once."
    chunks = tokenizers.count_chunks([text, text])
    return tokenizers.train_bpe(chunks, 300, tokenizers.SILIA_SPECIALS + tokenizers.SPECIALS)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(script's module, *words) in this process and an empty folder -> (exit code, stdout, stderr)"""
    monkeypatch.chdir(tmp_path)

    def call(module, *words):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        capsys.readouterr()
        code = None
        try:
            run_main(module.main)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


def write_folder(folder, config, weights):
    """A published folder with pytorch_model.bin and no tokenizer."""
    Path(folder).mkdir()
    torch.save(weights, Path(folder) / "pytorch_model.bin")
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")


def save(model, path, tokenizer=None):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"format": 1, "step": 7, "best_val_loss": 1.5, "model": model.state_dict(),
                           "optimizer": {}, "scaler": {}, "model_config": asdict(model.config),
                           "train_config": {}, "tokenizer": tokenizer_to_json(tokenizer) if tokenizer else ""},
                          Path(path))


def effective(config):
    """A config without what has no effect, or had it only in the beginning."""
    return asdict(config) | {"lookback": LanguageModel(config).lookback, "init": "", "embedding_std": 0.02}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "silia"])
def test_export_then_import_changes_nothing(run, tokenizer, name):
    model = make(MODELS[name])
    model.config.sink_token = "<|actor|>" if name == "nano" else ""
    save(model, "a.pt", tokenizer)
    assert run(convert, "export", "a.pt", "folder")[0] is None
    assert sorted(os.listdir("folder"))[:3] == ["config.json", "generation_config.json", TENSORS]
    assert run(convert, "import", "folder", "out/b/ckpt.pt")[0] is None
    checkpoint = load_checkpoint(Path("out/b/ckpt.pt"))
    back = load_model(checkpoint)
    assert effective(back.config) == effective(model.config)
    assert checkpoint["tokenizer"] == tokenizer_to_json(tokenizer)
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], x), key


@pytest.mark.parametrize("sink", ["", "<|actor|>"])
def test_the_chat_template_gives_the_ids_of_encode_chat(run, tokenizer, sink):
    """Rendered by Jinja, which comes with PyTorch, with the settings of transformers."""
    jinja = pytest.importorskip("jinja2.sandbox").ImmutableSandboxedEnvironment
    environment = jinja(trim_blocks=True, lstrip_blocks=True)
    model = make(SMALL)
    model.config.sink_token = sink
    save(model, "a.pt", tokenizer)
    run(convert, "export", "a.pt", "folder")
    file = json.loads(Path("folder/tokenizer_config.json").read_text(encoding="utf-8"))
    template = environment.from_string(file["chat_template"])
    turns = [("user", " The frog\n"), ("assistant", "saw {{ a }} big {% red %}"), ("user", ""),
             ("assistant", "  ball\n\n")]
    for n in range(1, 5):
        messages = [{"role": role, "content": text} for role, text in turns[:n]]
        for more, is_open in (([], False), ([("assistant", None)], True)):
            text = template.render(messages=messages, add_generation_prompt=is_open)
            ids = tokenizers.encode_chat(tokenizer, turns[:n] + more)
            front = [tokenizer.specials[sink]] if sink else []
            assert tokenizer.encode(text, allow_special=True) == front + ids
    bare = tokenizers.train_bpe(tokenizers.count_chunks(["The frog"]), 262, tokenizers.SILIA_SPECIALS)
    save(make(SMALL), "b.pt", bare)
    run(convert, "export", "b.pt", "bare")
    assert "chat_template" not in Path("bare/tokenizer_config.json").read_text(encoding="utf-8")


def test_silia_comes_in_and_not_out(run, tokenizer):
    """No loader of a folder with its tensors is known, so none is written; in Python the names are there."""
    model = make(SILIA)
    save(model, "a.pt", tokenizer)
    code, out, _ = run(convert, "export", "a.pt", "folder")
    assert code.startswith("error: Silia v2 is only imported") and "\n" not in code and out == ""
    assert os.listdir() == ["a.pt"]
    config, weights = to_reference(model)
    write_folder("src", config, {name: x.detach().clone() for name, x in weights.items()})
    assert run(convert, "import", "src", "b.pt")[0] is None
    back = load_model(load_checkpoint(Path("b.pt")))
    assert effective(back.config) == effective(model.config)
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], x), key


@pytest.mark.parametrize("fields", [
    SMALL | {"ffn": "swiglu"}, SMALL | {"mixer": "attention"}, SMALL | {"position": "helix"},
    SMALL | {"token_merging": "paper"}, HELIX | {"norm": "rms"}, SILIA | {"alpha": 0.05},
    SMALL | {"n_kv_head": 2}, SMALL | {"d_head": 8}, HELIX | {"d_head": 8}, SILIA | {"d_head": 8},
])
def test_a_mix_without_a_published_layout_is_refused(run, fields):
    save(make(fields), "a.pt")
    code, _, _ = run(convert, "export", "a.pt", "folder")
    assert "published layout" in code and "\n" not in code
    assert os.listdir() == ["a.pt"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_token_that_the_tokenizer_puts_in_front_becomes_the_sink(run, wrapped):
    """Silia's published tokenizer adds <|actor|> by a template, which may come after ByteLevel."""
    chunks = tokenizers.count_chunks(["the frog and the ball, the frog and the pond."] * 2)
    munch = tokenizers.train_bpe(chunks, 270, tokenizers.SILIA_SPECIALS, longest_match=True)
    save(make(SMALL), "a.pt")
    run(convert, "export", "a.pt", "folder")
    actor, text = {"SpecialToken": {"id": "<|actor|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    file = json.loads(tokenizer_to_json(munch))
    post = {"type": "TemplateProcessing", "single": [actor, text], "pair": [actor, text, text],
            "special_tokens": {"<|actor|>": {"id": "<|actor|>", "ids": [269], "tokens": ["<|actor|>"]}}}
    plain = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    file["post_processor"] = {"type": "Sequence", "processors": [plain, post]} if wrapped else post
    Path("folder/tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    run(convert, "import", "folder", "b.pt")
    checkpoint = load_checkpoint(Path("b.pt"))
    assert checkpoint["model_config"]["sink_token"] == "<|actor|>"
    assert checkpoint["tokenizer"] == tokenizer_to_json(munch)
    code, story, _ = run(sample, "--checkpoint=b.pt", "--prompt=the frog", "--max_new_tokens=9", "--no_stop")
    assert code is None and story.startswith("the frog")
    run(convert, "export", "b.pt", "again")  # and out again
    again = json.loads(Path("again/tokenizer.json").read_text(encoding="utf-8"))
    assert again == file | {"post_processor": again["post_processor"]}
    assert again["post_processor"]["single"] == post["single"]
    assert again["post_processor"]["special_tokens"] == post["special_tokens"]
    generation = json.loads(Path("again/generation_config.json").read_text(encoding="utf-8"))
    assert generation["bos_token_id"] == 269 and generation["eos_token_id"] == 268
    post["single"].append(actor)  # at the end, too: that is more than a sink
    Path("folder/tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    assert "post_processor" in run(convert, "import", "folder", "c.pt")[0]


# ------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def folder(run, tokenizer):
    """A published folder with pytorch_model.bin, in the current folder."""
    file, config, weights = golden("helix")
    weights["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"]] * 5)
    Path("src").mkdir()
    torch.save(weights, "src/pytorch_model.bin")
    Path("src/config.json").write_text(json.dumps(config | {"vocab_size": 305}), encoding="utf-8")
    Path("src/tokenizer.json").write_text(tokenizer_to_json(tokenizer), encoding="utf-8")
    return Path("src")


def test_an_imported_model_samples_at_once(folder):
    """As a user does it: two commands, nothing else."""
    for words in (["extras/convert.py", "import", "src", "out/x/ckpt.pt"],
                  ["sample.py", "--prompt=The frog", "--max_new_tokens=12", "--no_stop"]):
        done = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, encoding="utf-8")
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The frog") and len(done.stdout) > 12


def test_without_a_tokenizer_it_is_imported_and_sample_says_what_to_do(run, folder):
    tokenizer = folder.joinpath("tokenizer.json").rename("elsewhere.json")
    code, said, _ = run(convert, "import", "src", "a.pt")
    assert code is None and "--tokenizer" in said
    code, _, _ = run(sample, "--checkpoint=a.pt", "--prompt=x")
    assert "--tokenizer" in code and "\n" not in code
    assert run(convert, "import", "src", "b.pt", "--tokenizer", tokenizer)[0] is None
    assert run(sample, "--checkpoint=b.pt", "--prompt=x", "--max_new_tokens=1")[0] is None
    assert run(convert, "export", "a.pt", "dst")[0] is None  # and one without goes out without
    assert sorted(os.listdir("dst")) == ["config.json", TENSORS]


def test_safetensors_come_in(run, folder):
    package = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
    package.save_file(torch.load(folder / "pytorch_model.bin"), folder / "model.safetensors")
    (folder / "pytorch_model.bin").unlink()
    assert run(convert, "import", "src", "a.pt")[0] is None


def write_shards(folder, kind, split):
    """Spread pytorch_model.bin over two files of this kind, with their index. split: name -> 0 or 1"""
    stem, suffix = {"bin": ("pytorch_model", "bin"), "safetensors": ("model", "safetensors")}[kind]
    files = [f"{stem}-{n}-of-00002.{suffix}" for n in ("00001", "00002")]
    weights = torch.load(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    for n, file in enumerate(files):
        part = {name: x for name, x in weights.items() if split(name) == n}
        if kind == "bin":
            torch.save(part, folder / file)
        else:
            package = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
            package.save_file(part, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    weight_map = {name: files[split(name)] for name in weights}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}), encoding="utf-8")
    return index, files


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_parts_come_in_through_their_index(run, folder, kind):
    assert run(convert, "import", "src", "whole.pt")[0] is None
    index, files = write_shards(folder, kind, lambda name: ".layers." in name)
    assert run(convert, "import", "src", "a.pt")[0] is None
    whole, parts = (load_checkpoint(Path(name))["model"] for name in ("whole.pt", "a.pt"))
    assert whole.keys() == parts.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)

    (folder / files[1]).rename("elsewhere")
    code = run(convert, "import", "src", "b.pt")[0]
    assert code == f"error: {index} names {files[1]}, which is not there: fetch it, too."
    (folder / files[1]).write_bytes(b"torn")
    assert f"{files[1]} is damaged" in run(convert, "import", "src", "b.pt")[0]


def test_an_index_reads_nothing_outside_of_its_folder(run, folder):
    index, files = write_shards(folder, "bin", lambda name: ".layers." in name)
    for place in ("other", "src/sub"):
        Path(place).mkdir()
        Path(place, "x.bin").write_bytes((folder / files[1]).read_bytes())
    content = json.loads(index.read_text(encoding="utf-8"))
    for name in ("../other/x.bin", str(Path("other/x.bin").absolute()), "sub/x.bin", "", ".", "x.txt",
                 "C:x.bin", "..\\other\\x.bin", 7, None, ["x.bin"]):
        content["weight_map"]["model.norm.weight"] = name
        index.write_text(json.dumps(content), encoding="utf-8")
        code = run(convert, "import", "src", "a.pt")[0]
        assert code == f"error: {index} names {name!r}; only .bin files beside it are read."


def test_an_index_that_is_none(run, folder):
    index, _ = write_shards(folder, "bin", lambda name: ".layers." in name)
    for content in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["x.bin"]}'):
        index.write_text(content, encoding="utf-8")
        code = run(convert, "import", "src", "a.pt")[0]
        assert code.startswith("error: src") and index.name in code and "\n" not in code


def test_without_the_package_safetensors_a_sentence_says_so(run, folder, monkeypatch):
    monkeypatch.setattr(convert, "safetensors", None)
    assert run(convert, "import", "src", "a.pt")[0] is None
    assert run(convert, "export", "a.pt", "dst")[0] is None and Path("dst/pytorch_model.bin").exists()
    (folder / "model.safetensors").write_bytes(b"")
    assert "pip install safetensors" in run(convert, "import", "src", "b.pt")[0]


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


@pytest.mark.parametrize("content, words", [
    (pickle.dumps({"model.norm.weight": Malice()}, protocol=2), "damaged, or does not hold plain tensors"),
    (b"", "damaged"),
    (b"PK\x03\x04 not a zip", "damaged"),
])
def test_a_bad_file_runs_nothing_and_is_one_sentence(run, folder, content, words):
    (folder / "pytorch_model.bin").write_bytes(content)
    code, _, _ = run(convert, "import", "src", "a.pt")
    assert words in code and "pytorch_model.bin" in code and "\n" not in code
    if convert.safetensors:
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors is damaged" in run(convert, "import", "src", "a.pt")[0]
    assert os.listdir() == ["src"]


def test_malice_in_the_format_of_today(run, folder):
    torch.save({"model.norm.weight": Malice()}, folder / "pytorch_model.bin")
    assert "does not hold plain tensors" in run(convert, "import", "src", "a.pt")[0]
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    assert "does not hold plain tensors" in run(convert, "import", "src", "a.pt")[0]
    assert os.listdir() == ["src"]


def test_what_exists_is_not_overwritten(run, folder):
    for target in ("a.pt", "dst"):
        Path(target).write_text("precious", encoding="utf-8")
    assert "a.pt exists already" in run(convert, "import", "src", "a.pt")[0]
    assert run(convert, "import", "src", "b.pt")[0] is None
    assert "dst exists already" in run(convert, "export", "b.pt", "dst")[0]
    assert Path("a.pt").read_text(encoding="utf-8") == Path("dst").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("direction, source, target", [("import", "src", "b.pt"), ("export", "a.pt", "dst")])
def test_a_full_disk_leaves_nothing_behind(run, folder, direction, source, target):
    resource = pytest.importorskip("resource", reason="limits the size of files, which needs POSIX")
    run(convert, "import", "src", "a.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code, out, _ = run(convert, direction, source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code.startswith(f"error: cannot write {target}") and "\n" not in code and out == ""
    assert sorted(os.listdir()) == ["a.pt", "src"]


def test_a_kill_leaves_nothing_under_the_final_name(run, folder, monkeypatch):
    run(convert, "import", "src", "a.pt")

    def killed(*words):
        assert not Path("dst").exists()
        raise KeyboardInterrupt

    for name in ("write_json", "write_tensors", "write_tokenizer"):
        with monkeypatch.context() as patch:
            patch.setattr(convert, name, killed)
            assert run(convert, "export", "a.pt", "dst")[0] == 130
            assert sorted(os.listdir()) == ["a.pt", "src"]


@pytest.mark.parametrize("words, sentence", [
    (["import", "nowhere", "a.pt"], "nowhere has no readable config.json"),
    (["import", "src", "src/config.json/a.pt"], "src/config.json"),
    (["import", "src", "a.pt", "--tokenizer=none.json"], "none.json: No such file"),
    (["import", "src", "a.pt", "--tokenizer=src/config.json"], "src/config.json: This is not a sound"),
    (["export", "none.pt", "dst"], "there is no checkpoint none.pt"),
    (["export", "src/config.json", "dst"], "damaged, or no checkpoint"),
    (["export", "x.pt", "dst", "--tokenizer=t"], "--tokenizer is for import"),
    (["import", "src"], "required: target"),
    (["improt", "src", "a.pt"], "improt"),
])
def test_errors_are_one_sentence(run, folder, words, sentence):
    code, out, _ = run(convert, *words)
    assert code.startswith("error: ") and sentence in code and "\n" not in code and "Errno" not in code
    assert out == "" and not Path("a.pt").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(run, folder, tokenizer):
    big = tokenizers.train_bpe(tokenizers.count_chunks(["one two three four five six seven eight"] * 2), 306,
                               tokenizers.SPECIALS + tuple(f"<{i}>" for i in range(46)))
    (folder / "tokenizer.json").write_text(tokenizer_to_json(big), encoding="utf-8")
    assert "has 306 tokens, more than the model" in run(convert, "import", "src", "a.pt")[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_damage(run, folder, encoding):
    """Windows' editors and PowerShell put one in front of what they save."""
    write_shards(folder, "bin", lambda name: ".layers." in name)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    for path in folder.glob("*.json"):
        path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    code, out, _ = run(convert, "import", "src", "a.pt")
    assert code is None and "--temperature 0.5" in out
    assert load_checkpoint(Path("a.pt"))["tokenizer"]


def test_why_a_config_cannot_be_read_is_said(run, folder):
    for content, reason in ((b'{"a": 1,\n "b" 2}', "Expecting ':' delimiter: line 2 column 6"),
                            (b"", "Expecting value"), (b'{"a": "\xff"}', "can't decode byte 0xff"),
                            (b"[1]", "it holds no object"), (b"[" * 100_000, "recursion"),
                            (None, "No such file or directory")):
        (folder / "config.json").unlink()
        if content is not None:
            (folder / "config.json").write_bytes(content)
        code = run(convert, "import", "src", "a.pt")[0]
        assert code.startswith("error: src has no readable config.json: ") and reason in code
        assert "\n" not in code and not Path("a.pt").exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "the disk went away"), OSError("the disk went away")])
def test_an_error_of_the_system_without_a_name_or_number_gets_one(run, folder, monkeypatch, error):
    run(convert, "import", "src", "a.pt")

    def fail(*words, **options):
        raise error

    for name in ("write_json", "write_tensors", "write_tokenizer"):
        with monkeypatch.context() as patch:
            patch.setattr(convert, name, fail)
            code = run(convert, "export", "a.pt", "dst")[0]
            assert code == "error: cannot write dst: the disk went away."
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        code = run(convert, "export", "a.pt", "dst")[0]
        assert code == "error: cannot read a.pt: the disk went away."
    monkeypatch.setattr(Path, "read_bytes", fail)
    code = run(convert, "import", "src", "b.pt")[0]
    assert code == "error: src has no readable config.json: the disk went away."


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_the_system_says_of_a_file_is_not_called_damage(run, folder, name):
    if name == "model.safetensors":
        pytest.importorskip("safetensors", reason="needs the package safetensors")
    (folder / "pytorch_model.bin").unlink()
    assert "has none of model.safetensors, " in run(convert, "import", "src", "a.pt")[0]
    (folder / name).mkdir()
    assert run(convert, "import", "src", "a.pt")[0] == f"error: {folder / name}: Is a directory."


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "tokenizer.json", "generation_config.json"])
def test_a_link_to_nowhere_is_named(run, folder, name):
    """As in the cache of a download that was broken off."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/none")
    code = run(convert, "import", "src", "a.pt")[0]
    assert code.startswith("error: src") and name in code and "No such file" in code


def test_memory_that_runs_out_is_not_called_damage(run, folder, monkeypatch):
    def fail(*words, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    assert "out of memory" in run(convert, "import", "src", "a.pt")[0]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize("package", [True, False])
def test_files_have_the_permissions_that_the_umask_gives(run, folder, monkeypatch, package):
    if package:
        pytest.importorskip("safetensors", reason="needs the package safetensors")
    else:
        monkeypatch.setattr(convert, "safetensors", None)
    before = os.umask(0o027)
    try:
        assert run(convert, "import", "src", "a.pt")[0] is None
        assert run(convert, "export", "a.pt", "dst")[0] is None
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (Path("a.pt"), *Path("dst").iterdir())}
    assert len(modes) == 6 and modes == dict.fromkeys(modes, 0o640)
    assert Path("dst").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("closed", [["stdout"], ["stdout", "stderr"]])
def test_nobody_has_to_read_what_it_prints(run, folder, monkeypatch, closed):
    """After `convert.py ... >&-` Python has no sys.stdout."""
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    assert run(convert, "import", "src", "a.pt")[0] is None
    assert run(convert, "export", "a.pt", "dst")[0] is None
    assert Path("dst/config.json").exists()
    assert run(convert, "--help")[0] == 0
    assert run(convert)[0].startswith("error: ")


# -------------------------------------------------------------------------------- generation_config.json


@pytest.mark.parametrize("content, options", [
    ({"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}, (0.7, 40, 0.9)),
    ({"do_sample": True, "temperature": 1}, (1.0, 50, 1.0)),  # transformers' default of top_k
    ({"temperature": 0.7, "top_k": 0}, (0.7, 0, 1.0)),
    ({"temperature": None, "top_k": None, "top_p": None}, (1.0, 0, 1.0)),  # null turns one off
    ({"do_sample": False, "temperature": 0.7}, (0.0,)),
    ({"_from_model_config": True, "bos_token_id": 1}, ()),
])
def test_what_a_generation_config_recommends(tmp_path, content, options):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    options = dict(zip(("temperature", "top_k", "top_p"), options))
    assert convert.read_generation(path, None) == (options, "")
    if options:
        convert.write_generation(options, None, "", path)
        assert convert.read_generation(path, None) == (options, "")


def test_it_is_said_at_import_and_goes_out_again(run, folder, tokenizer):
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.7, "top_k": 40, "eos_token_id": 7}', encoding="utf-8")
    code, out, _ = run(convert, "import", "src", "a b/ckpt.pt")
    assert code is None
    words = "--checkpoint 'a b/ckpt.pt' --temperature 0.7 --top_k 40 --top_p 1.0"
    assert f"Recommended there: python sample.py {words}" in out.splitlines()
    assert "A text ends at eos_token_id=7 there; sample.py stops at <|endoftext|> only." in out.splitlines()
    assert run(sample, *shlex.split(words), "--prompt=The", "--max_new_tokens=3")[0] is None
    assert run(convert, "export", "a b/ckpt.pt", "dst")[0] is None
    generation = json.loads(Path("dst/generation_config.json").read_text(encoding="utf-8"))
    end = tokenizer.end_of_text
    assert generation == {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 1.0,
                          "bos_token_id": end, "eos_token_id": end}


def test_a_trained_checkpoint_goes_out_with_what_sample_does(run, tokenizer, monkeypatch):
    save(make(SMALL | {"vocab_size": 310}), "a.pt", tokenizer)
    assert run(convert, "export", "a.pt", "dst")[0] is None
    end = tokenizer.end_of_text
    generation = json.loads(Path("dst/generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0,
                          "bos_token_id": end, "eos_token_id": end}
    monkeypatch.setattr(sys, "argv", ["sample.py"])
    args = sample.parse_arguments()
    assert (args.temperature, args.top_k, args.top_p) == (0.8, 0, 1.0)


def test_only_another_end_of_text_is_said(tmp_path, tokenizer):
    path, end = tmp_path / "generation_config.json", tokenizer.end_of_text
    for ends, same in ((end, True), ([end], True), (None, True), (7, False), ([end, 7], False)):
        path.write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
        assert (convert.read_generation(path, tokenizer) == ({}, "")) is same


def test_a_generation_config_that_is_not_understood(run, folder):
    path = folder / "generation_config.json"
    for content in ("[]", '{"temperature": NaN}', '{"top_p": true}', '{"top_k": 1.5}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="src.*generation_config.json: "):
            convert.read_generation(path, None)
    code, out, _ = run(convert, "import", "src", "a.pt")
    assert code == f"error: {path}: top_k takes a value of type int, not 1.5."
    assert out == "" and sorted(os.listdir()) == ["src"]
