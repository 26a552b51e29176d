"""
Published checkpoints in, ours out.

    python extras/convert.py import SRC out/NAME/ckpt.pt  # then sample.py --checkpoint out/NAME/ckpt.pt
    python extras/convert.py export out/NAME/ckpt.pt DST  # then WiolaForCausalLM.from_pretrained("DST")

SRC and DST are folders with config.json, model.safetensors (SRC: or pytorch_model.bin) and tokenizer.json, in
the layouts of wiola13m 1.0.1, wiola 0.1.1, and Silia v2 with its port silia-v2-hf. `load_reference` makes a
model of the contents of a config.json and the tensors, in Python. Nothing in the files is executed.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project, when this is run as a script

import torch

import tokenizer as tokenizers
from model import LanguageModel, ModelConfig
from train import load_checkpoint, load_model, save_checkpoint

# ----------------------------------------------------------------------------------------------------------
# The layouts


@dataclass
class Layout:
    """How one family is published.

    parts   fields of ModelConfig that make the family
    keys    its other fields: published key, and what a config.json without that key means
    names   for each of our tensors, the published ones that lie in it, one above the other; in `layer`,
            names begin with blocks.# here and with `prefix` there, # being the number of the layer
    """

    parts: dict
    keys: dict
    prefix: str
    names: dict
    layer: dict

    def tensors(self, config):
        """{our name: [published names]} for a model of this config"""
        layer = {ours: theirs for ours, theirs in self.layer.items() if config.gate or ".gate." not in ours}
        table = self.names | {f"blocks.{i}.{ours}": " ".join(self.prefix.replace("#", str(i)) + name
                                                             for name in theirs.split())
                              for i in range(config.n_layer) for ours, theirs in layer.items()}
        return {ours: theirs.split() for ours, theirs in table.items()}


LAYOUTS = {
    "wiola13m": Layout(
        {"position": "spiral", "mixer": "gated_spiral", "ffn": "butterfly", "norm": "rms", "block": "prenorm",
         "embedding_norm": False, "token_merging": "off"},
        {"vocab_size": ("vocab_size", 32000), "context": ("max_position_embeddings", 1024),
         "n_layer": ("num_hidden_layers", 6), "d_model": ("hidden_size", 256),
         "n_head": ("num_attention_heads", 8), "d_ff": ("intermediate_size", 512),
         "rope_base": ("rope_theta", 10000.0), "alpha": ("spiral_alpha", 0.05),
         "gate": ("use_attention_gate", True), "gate_after_rotary": ("gate_pre_rope", True),
         "norm_eps": ("rms_norm_eps", 1e-6)},
        "model.layers.#.",
        {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"},
        {"norm_1.weight": "input_layernorm.weight", "norm_2.weight": "post_attention_layernorm.weight",
         "mixer.qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
         "mixer.gate.0.weight": "self_attn.gate_fc1.weight",
         "mixer.gate.2.weight": "self_attn.gate_fc2.weight", "mixer.gate.2.bias": "self_attn.gate_fc2.bias",
         "mixer.out.weight": "self_attn.o_proj.weight",
         "ffn.up.weight": "mlp.up_proj.weight mlp.bypass_proj.weight",
         "ffn.down.weight": "mlp.down_proj.weight"}),
    "wiola": Layout(
        {"position": "helix", "mixer": "cross_layer", "ffn": "dual_stream", "norm": "offset_rms",
         "block": "prenorm", "embedding_norm": False},
        {"vocab_size": ("vocab_size", 32000), "context": ("max_position_embeddings", 2048),
         "n_layer": ("num_hidden_layers", 16), "d_model": ("hidden_size", 1024),
         "n_head": ("num_attention_heads", 16), "n_kv_head": ("num_key_value_heads", 4),
         "d_ff": ("dsff_wide_size", 4096), "d_narrow": ("dsff_narrow_size", 1024),
         "rope_base": ("srpe_theta", 10000.0), "winding": ("srpe_spiral_divisor", 8),
         "radial_amplitude": ("srpe_radial_amplitude", 0.1),
         "radial_frequency": ("srpe_radial_frequency", 0.01), "lookback": ("gcla_lookback", 2),
         "phi": ("gcla_gate_init", -3.0), "norm_eps": ("rms_norm_eps", 1e-6),
         "token_merging": ("atm_enabled", True), "merge_threshold": ("atm_threshold", 0.92)},
        "model.layers.#.",
        {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.final_norm.weight",
         "norm.offset": "model.final_norm.offset"},
        {"norm_1.weight": "input_norm.weight", "norm_1.offset": "input_norm.offset",
         "norm_2.weight": "post_attn_norm.weight", "norm_2.offset": "post_attn_norm.offset",
         "mixer.qkv.weight": "attn.q_proj.weight attn.k_proj.weight attn.v_proj.weight",
         "mixer.kv_below.weight": "attn.k_ctx_proj.weight attn.v_ctx_proj.weight",
         "mixer.phi": "attn.blend_logit", "mixer.gate.weight": "attn.gate_proj.weight",
         "mixer.out.weight": "attn.o_proj.weight",
         "ffn.narrow.up.weight": "ffn.gate_a.weight ffn.up_a.weight",
         "ffn.narrow.down.weight": "ffn.down_a.weight", "ffn.wide.up.weight": "ffn.up_b.weight",
         "ffn.wide.down.weight": "ffn.down_b.weight", "ffn.fuse.weight": "ffn.fusion.weight"}),
    "silia": Layout(
        {"position": "mirrored", "alpha": 0.0, "rope_base": 10000.0, "mixer": "hydra", "norm": "bare_rms",
         "block": "silia", "embedding_norm": True},
        {"vocab_size": ("vocab_size", 512), "context": ("block_size", 1024), "n_layer": ("n_layer", 3),
         "n_head": ("n_head", 2), "d_model": ("n_embd", 64), "d_head": ("n_embd", 64),
         "d_ff": ("d_model", 256)},
        "blocks.#.",
        {"embedding.weight": "embed.weight"},
        {f"unit_{n}.{ours}": f"a{n}.{theirs}" for n in (1, 2) for ours, theirs in (
            ("latent.weight", "qkv_l.weight"), ("qkv.weight", "qkv_u.weight"), ("gate.weight", "gate.weight"),
            ("gate.bias", "gate.bias"), ("out.weight", "out.weight"))}),
}
# Said the other way round there.
FLIPPED = {"gate_after_rotary": lambda pre: not pre, "token_merging": lambda on: "paper" if on else "off"}
UNFLIPPED = {"gate_after_rotary": lambda after: not after, "token_merging": lambda kind: kind == "paper"}
HEADS = ("lm_head.weight", "unembed.weight")  # tied to the embedding, so we have no second copy


def published_keys(layout):
    """The keys by which a config.json shows its family: those that no other layout has."""
    others = {key for other in LAYOUTS.values() if other is not layout for key, _ in other.keys.values()}
    return {key for key, _ in layout.keys.values()} - others


def load_reference(config, tensors):
    """A published config.json as a dict, and its tensors by name -> LanguageModel, float32, in eval mode.

    The config's keys tell the family. ValueError, with the names, if tensors are missing or left over, or if
    the head is not tied to the embedding.
    """
    if "num_blocks" in config:  # the port of Silia counts units as layers and has other names
        config = config | {"n_layer": config["num_blocks"], "block_size": config.get("n_positions", 1024)}
        config |= {"d_model": config["d_ff"]} if "d_ff" in config else {}
        port = {"wte.weight": "embed.weight", "lm_head.weight": "unembed.weight"}
        tensors = {re.sub(r"^(transformer|model)\.", "", name): x for name, x in tensors.items()}
        tensors = {port.get(name, name): x for name, x in tensors.items()}
    layout = max(LAYOUTS.values(), key=lambda layout: len(published_keys(layout) & config.keys()))
    if not published_keys(layout) & config.keys():
        raise ValueError("the config has the keys of no known layout (wiola13m, wiola, Silia v2).")
    model_config = read_config(layout, config)
    names = layout.tensors(model_config)
    wanted = {theirs for parts in names.values() for theirs in parts}
    heads = [name for name in HEADS if name in tensors]
    unknown = tensors.keys() - wanted - {*heads}
    for what, names_of in (("missing", wanted - tensors.keys()), ("left over", unknown)):
        if names_of:
            raise ValueError(f"{len(names_of)} tensors are {what}: {', '.join(sorted(names_of)[:5])}.")
    state = {ours: torch.cat([tensors[theirs] for theirs in parts]) if len(parts) > 1 else tensors[parts[0]]
             for ours, parts in names.items()}
    state = {ours: x.detach().to("cpu", torch.float32, copy=True) for ours, x in state.items()}
    if not all(torch.equal(tensors[head].cpu().float(), state["embedding.weight"]) for head in heads):
        raise ValueError("the head is not tied to the embedding, as it is here.")
    with torch.device("meta"):
        model = LanguageModel(model_config)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"the tensors do not fit the config: {reason}") from None
    return model.eval()


def read_config(layout, config):
    """A published config -> ModelConfig, or ValueError."""
    if config.get("tie_word_embeddings") is False or config.get("norm_after_concat"):
        raise ValueError("a head of its own (tie_word_embeddings=false) or a norm after the heads "
                         "(norm_after_concat=true) is not what these models have.")
    given = {}
    for ours, (theirs, default) in layout.keys.items():
        x = config.get(theirs, default)
        given[ours] = FLIPPED[ours](x) if ours in FLIPPED else x
    if "lookback" in given:  # [-0:] there: 0 means all
        given["lookback"] = given["lookback"] or given["n_layer"]
        given["n_kv_head"] = given["n_kv_head"] or given["n_head"]
    try:
        kinds = {name: field.type for name, field in ModelConfig.__dataclass_fields__.items()}
        return ModelConfig(**layout.parts, **{name: kinds[name](x) for name, x in given.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config does not fit: {error}") from None


def to_reference(model):
    """LanguageModel -> (config, {name: tensor}) as published, or ValueError if no layout has its like."""
    config = model.config
    layout = next((layout for layout in LAYOUTS.values()
                   if all(getattr(config, field) == part for field, part in layout.parts.items())), None)
    if layout is None:
        raise ValueError("this mix of parts has no published layout.")
    shape = asdict(config) | {"n_kv_head": config.kv_heads, "d_head": config.head_width,
                              "d_narrow": config.narrow_width}
    published = {theirs: UNFLIPPED[ours](shape[ours]) if ours in UNFLIPPED else shape[ours]
                 for ours, (theirs, _) in layout.keys.items()}
    back = read_config(layout, published)
    for field, there in (("n_kv_head", back.kv_heads), ("d_head", back.head_width),
                         ("lookback", back.lookback if "lookback" in layout.keys else config.lookback)):
        if shape[field] != there:
            raise ValueError(f"the published layout cannot say {field}={shape[field]}.")
    H, K, weights, tensors = config.n_head, config.kv_heads, model.state_dict(), {}
    for ours, parts in layout.tensors(config).items():
        shares = (H, K, K) if ours.endswith("qkv.weight") else (2, 1) if "ffn.up" in ours else (1, 1)
        whole = weights[ours].detach().to("cpu", torch.float32, copy=True)
        sizes = [whole.size(0) * share // sum(shares) for share in shares]
        pieces = whole.split(sizes) if len(parts) > 1 else [whole]
        tensors |= {theirs: piece.contiguous() for theirs, piece in zip(parts, pieces)}
    return published, tensors


# ----------------------------------------------------------------------------------------------------------
# Folders


def safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("this needs the package safetensors: pip install safetensors") from None
    return safetensors.torch


def read_tensors(folder):
    """The tensors in model.safetensors, or in pytorch_model.bin, by name."""
    path, old = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if path.exists():
            return safetensors().load_file(path)
        if old.exists():
            tensors = torch.load(old, map_location="cpu", weights_only=True)
            if isinstance(tensors, dict) and all(isinstance(x, torch.Tensor) for x in tensors.values()):
                return tensors
            raise TypeError
    except ValueError:
        raise
    except Exception:  # a damaged file can end in any of a dozen errors
        path = path if path.exists() else old
        raise ValueError(f"{path} is damaged, or does not hold plain tensors.") from None
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin.")


def read_tokenizer(path):
    """A tokenizer.json -> its text as our scripts read it, and the special token that it puts in front."""
    file, sink = json.loads(path.read_text(encoding="utf-8")), ""
    post = file.get("post_processor") or {}
    if post.get("type") == "TemplateProcessing":  # it may put one special token in front, as Silia's does
        front = [piece["SpecialToken"]["id"] for piece in post["single"] if "SpecialToken" in piece]
        if len(front) != 1 or "SpecialToken" not in post["single"][0]:
            raise ValueError(f"{path} adds more to a text than one token in front of it.")
        file["post_processor"], sink = None, front[0]
    return tokenizers.parse(json.dumps(file)).to_json(), sink


def import_folder(source, target, tokenizer_path=None):
    """A published folder -> a checkpoint of ours at `target`."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError
    except (OSError, ValueError):
        raise ValueError(f"{source} has no readable config.json.") from None
    if target.exists():
        raise ValueError(f"{target} exists already; remove it, or choose another name.")
    model, tokenizer = load_reference(config, read_tensors(source)), ""
    path = tokenizer_path or source / "tokenizer.json"
    if path.exists() or tokenizer_path:
        try:
            tokenizer, sink = read_tokenizer(path)
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} is not a sound tokenizer.json.") from None
        known = tokenizers.parse(tokenizer)
        if known.vocab_size > model.config.vocab_size:
            raise ValueError(f"{path} has more tokens ({known.vocab_size}) than the model.")
        if model.config.block == "silia" and not sink and "<|actor|>" in known.specials:
            sink = "<|actor|>"
        model.config.sink_token = sink
    target.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"format": 1, "step": 0, "best_val_loss": math.inf, "model": model.state_dict(),
                     "optimizer": {}, "scaler": {}, "model_config": asdict(model.config), "train_config": {},
                     "tokenizer": tokenizer}, target)
    size = sum(p.numel() for p in model.parameters())
    print(f"{target}: {size:,} parameters.")
    if not tokenizer:
        print("It has no tokenizer, so it cannot write: import it again with --tokenizer FILE.")


def export_folder(source, target):
    """A checkpoint of ours -> a folder in its published layout, complete or absent."""
    if target.exists():
        raise ValueError(f"{target} exists already; remove it, or choose another name.")
    checkpoint = load_checkpoint(source)
    config, tensors = to_reference(load_model(checkpoint))
    wiola = "hidden_size" in config
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        if checkpoint["tokenizer"]:
            tokenizer = tokenizers.parse(checkpoint["tokenizer"])
            (temporary / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            end = tokenizer.token_bytes(tokenizer.end_of_text).decode("utf-8")
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end,
                        "clean_up_tokenization_spaces": False}
            (temporary / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
            config["eos_token_id"] = tokenizer.end_of_text
        config |= {"model_type": "wiola", "architectures": ["WiolaForCausalLM"], "torch_dtype": "float32",
                   "tie_word_embeddings": True} if wiola else {}
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        safetensors().save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(target)
    except OSError as error:
        raise OSError(f"cannot write {target}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")


def main():
    parser = argparse.ArgumentParser(description="Published checkpoints in, ours out.", allow_abbrev=False)
    parser.add_argument("direction", choices=["import", "export"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="import: this tokenizer.json, not the one in SRC")
    parser.error = lambda message: sys.exit(f"error: {message}")
    args = parser.parse_args()
    try:
        if args.direction == "import":
            import_folder(args.source, args.target, args.tokenizer)
        else:
            export_folder(args.source, args.target)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
