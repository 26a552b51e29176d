"""
Published checkpoints in, ours out.

    python extras/convert.py import SRC out/NAME/ckpt.pt  # then sample.py --checkpoint out/NAME/ckpt.pt
    python extras/convert.py export out/NAME/ckpt.pt DST  # then WiolaForCausalLM.from_pretrained("DST")

SRC and DST are folders with config.json, model.safetensors or pytorch_model.bin, and tokenizer.json, in
the layouts of wiola13m 1.0.1, wiola 0.1.1, and Silia v2 with its port silia-v2-hf. `load_reference` makes a
model of the contents of a config.json and the tensors, in Python. Nothing in the files is executed.
"""

import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project, when this is run as a script

import torch

from model import LanguageModel, ModelConfig
from support import need
from support.checkpoint import load_checkpoint, load_model, save_checkpoint
from support.hf_tokenizer import tokenizer_from_json, tokenizer_to_json
from support.runtime import chat_roles, run_main
from support.settings import CommandLine, check_type

# ----------------------------------------------------------------------------------------------------------
# The layouts


@dataclass
class Layout:
    """How one family is published.

    parts   fields of ModelConfig that make the family
    keys    its other fields: published key, and what a config.json without that key means
    init    how the published package makes initial weights
    head    the published copy of the embedding, which a file may hold or leave out
    prefix  with the layer's number for #, what stands there for our blocks.#.
    names   for each of our tensors (in a block: without blocks.#.), the published ones that lie in it, one
            above the other
    """

    parts: dict
    keys: dict
    init: str
    head: str
    prefix: str
    names: dict

    def pieces(self, model):
        """Yield (our name, {published name: the piece of our tensor that it is}) for all of a model."""
        H, K = model.config.n_head, model.config.n_kv_head
        heights = {"mixer.qkv.weight": (H, K, K), "ffn.up.weight": (2, 1)}  # relative; the others are equal
        for ours, whole in model.state_dict().items():
            _, layer, name = re.fullmatch(r"(blocks\.(\d+)\.)?(.+)", ours).groups()
            theirs = self.names[name].split()
            if len(theirs) > 1:
                shares = heights.get(name, (1,) * len(theirs))
                whole = whole.split([whole.size(0) * share // sum(shares) for share in shares])
            prefix = self.prefix.replace("#", layer) if layer else ""
            yield ours, dict(zip([prefix + name for name in theirs], whole if len(theirs) > 1 else [whole]))


LAYOUTS = {
    "wiola13m": Layout(
        {"position": "spiral", "mixer": "gated_spiral", "ffn": "butterfly", "norm": "rms", "block": "prenorm",
         "embedding_norm": False, "token_merging": "off"},
        {"vocab_size": ("vocab_size", 32000), "context": ("max_position_embeddings", 1024),
         "n_layer": ("num_hidden_layers", 6), "d_model": ("hidden_size", 256),
         "n_head": ("num_attention_heads", 8), "d_ff": ("intermediate_size", 512),
         "rope_base": ("rope_theta", 10000.0), "alpha": ("spiral_alpha", 0.05),
         "gate": ("use_attention_gate", True), "gate_after_rotary": ("gate_pre_rope", True),
         "norm_eps": ("rms_norm_eps", 1e-6), "tie_embeddings": ("tie_word_embeddings", True)},
        "truncated_normal", "lm_head.weight", "model.layers.#.",
        {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
         "norm_1.weight": "input_layernorm.weight", "norm_2.weight": "post_attention_layernorm.weight",
         "mixer.qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
         "mixer.gate.0.weight": "self_attn.gate_fc1.weight",
         "mixer.gate.2.weight": "self_attn.gate_fc2.weight", "mixer.gate.2.bias": "self_attn.gate_fc2.bias",
         "mixer.out.weight": "self_attn.o_proj.weight",
         "ffn.up.weight": "mlp.up_proj.weight mlp.bypass_proj.weight",
         "ffn.down.weight": "mlp.down_proj.weight", "head.weight": "lm_head.weight"}),
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
        "normal", "lm_head.weight", "model.layers.#.",
        {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.final_norm.weight",
         "norm.offset": "model.final_norm.offset",
         "norm_1.weight": "input_norm.weight", "norm_1.offset": "input_norm.offset",
         "norm_2.weight": "post_attn_norm.weight", "norm_2.offset": "post_attn_norm.offset",
         "mixer.qkv.weight": "attn.q_proj.weight attn.k_proj.weight attn.v_proj.weight",
         "mixer.kv_summary.weight": "attn.k_ctx_proj.weight attn.v_ctx_proj.weight",
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
        "pytorch", "unembed.weight", "blocks.#.",
        {"embedding.weight": "embed.weight"} | {
            f"unit_{n}.{ours}": f"a{n}.{theirs}" for n in (1, 2) for ours, theirs in (
                ("latent.weight", "qkv_l.weight"), ("qkv.weight", "qkv_u.weight"),
                ("gate.weight", "gate.weight"), ("gate.bias", "gate.bias"), ("out.weight", "out.weight"))}),
}
# Said otherwise there: published value -> ours.
OTHERWISE = {"gate_after_rotary": {True: False, False: True}, "token_merging": {True: "paper", False: "off"}}


def find_layout(config):
    """The layout that knows the most of a config's keys."""
    known = {name: len(config.keys() & {key for key, _ in layout.keys.values()})
             for name, layout in LAYOUTS.items()}
    *_, second, best = sorted(known, key=known.get)
    need(known[second] < known[best], f"the config, of model_type {config.get('model_type')!r}, is not that "
         "of a wiola13m, wiola or Silia v2 model.")
    return LAYOUTS[best]


def read_config(layout, config):
    """A published config -> ModelConfig, or ValueError."""
    for key, wanted in (("tie_word_embeddings", True), ("norm_after_concat", False)):
        known = any(key == theirs for theirs, _ in layout.keys.values())  # only Nano has a head of its own
        need(known or config.get(key, wanted) is wanted,
             f"{key}={config.get(key)} is not what these models have.")
    kinds = {field.name: field.type for field in fields(ModelConfig)}
    given = layout.parts | {"init": layout.init}
    for ours, (theirs, default) in layout.keys.items():
        x = config.get(theirs, default)
        x = OTHERWISE[ours][check_type(theirs, bool, x)] if ours in OTHERWISE else x
        x = config[layout.keys["n_head"][0]] if ours == "n_kv_head" and x is None else x
        given[ours] = check_type(theirs, kinds[ours], x)
    if given.get("lookback") == 0:
        given["lookback"] = given["n_layer"]  # the list of layers is cut at [-0:] there, which is all of it
    return ModelConfig(**given)


def load_reference(config, tensors):
    """A published config.json as a dict, and its tensors by name -> LanguageModel, float32, in eval mode.

    The config's keys tell the family. ValueError, with the names, if tensors are missing, left over or of
    another shape, or if the head is not tied to the embedding.
    """
    if "num_blocks" in config:  # the port of Silia counts units as layers and has other names
        config = config | {"n_layer": config["num_blocks"], "block_size": config.get("n_positions", 1024),
                           "d_model": config.get("d_ff", config.get("d_model", 256))}
        port = {"wte.weight": "embed.weight", "lm_head.weight": "unembed.weight"}
        bare = {re.sub(r"^(transformer|model)\.", "", name): x for name, x in tensors.items()}
        need(len(bare) == len(tensors), "some of the tensors differ by nothing but a prefix in their names.")
        tensors = {port.get(name, name): x for name, x in bare.items()}
    layout = find_layout(config)
    model_config = read_config(layout, config)
    need(model_config.n_layer <= len(tensors),  # before a number in a file makes us build layers without end
         f"{len(tensors)} tensors are too few for {model_config.n_layer} layers.")
    try:
        with torch.device("meta"):  # shapes only
            model = LanguageModel(model_config)
    except RuntimeError:
        raise ValueError("the sizes in the config are beyond any machine.") from None
    pieces = dict(layout.pieces(model))
    shapes = {theirs: x.shape for parts in pieces.values() for theirs, x in parts.items()}
    unfit = [name for name in shapes.keys() & tensors.keys() if tensors[name].shape != shapes[name]]
    for what, names in (("missing", shapes.keys() - tensors.keys()),
                        ("left over", tensors.keys() - shapes.keys() - {layout.head}),
                        ("not of the shape that the config gives them", unfit)):
        need(not names, f"{len(names)} of the tensors are {what}: {', '.join(sorted(names)[:5])}.")
    state = {}
    for ours, parts in pieces.items():
        parts = [tensors[theirs].detach().to("cpu", torch.float32) for theirs in parts]
        state[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    embedding = state["embedding.weight"]
    head = tensors.get(layout.head, embedding).to(embedding)
    need(not model_config.tie_embeddings or torch.equal(head, embedding),
         f"the head, {layout.head}, is not tied to the embedding, as it is here.")
    model.load_state_dict(state, assign=True)
    return model.eval()


def to_reference(model):
    """LanguageModel -> (config, {name: tensor}) as published, or ValueError if no layout has its like.

    The tensors share the model's memory.
    """
    config = model.config
    layout = next((layout for layout in LAYOUTS.values()
                   if all(getattr(config, field) == part for field, part in layout.parts.items())), None)
    need(layout, "this mix of parts has no published layout.")
    published, here = {}, asdict(config)
    for ours, (theirs, _) in layout.keys.items():
        there = {x: key for key, x in OTHERWISE.get(ours, {}).items()}
        published[theirs] = there.get(here[ours], here[ours])
    back = asdict(read_config(layout, published))
    for field in (*layout.keys, "n_kv_head", "d_head", "tie_embeddings"):
        need(back[field] == here[field], f"the published layout cannot say {field}={here[field]}.")
    tensors = {theirs: x for _, parts in layout.pieces(model) for theirs, x in parts.items()}
    return published, tensors


# ----------------------------------------------------------------------------------------------------------
# Folders


try:
    import safetensors.torch as safetensors
except ImportError:  # pip install safetensors; without it there is the older pytorch_model.bin, in and out
    safetensors = None


def read_tensors(folder):
    """The tensors in model.safetensors, or in pytorch_model.bin, by name."""
    path = next((folder / name for name in ("model.safetensors", "pytorch_model.bin")
                 if (folder / name).exists()), None)
    need(path, f"{folder} has neither model.safetensors nor pytorch_model.bin.")
    need(path.suffix != ".safetensors" or safetensors,
         f"{path} is read with the package safetensors: pip install safetensors")
    try:
        if path.suffix == ".safetensors":
            return safetensors.load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if all(isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in tensors.items()):
            return tensors
    except Exception:  # a damaged file can end in any of a dozen errors
        pass
    raise ValueError(f"{path} is damaged, or does not hold plain tensors.")


def write_tensors(tensors, folder):
    """Into model.safetensors, or where that package is missing into pytorch_model.bin."""
    tensors = {name: x.detach().clone() for name, x in tensors.items()}  # on their own: no shared memory
    try:
        if safetensors is None:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # a full disk, in either library's own words
        raise OSError(str(error).splitlines()[0]) from None


def read_tokenizer(path):
    """A tokenizer.json -> (Tokenizer, the special token that it puts in front of every text, or "")."""
    try:
        file, sink = json.loads(path.read_text(encoding="utf-8")), ""
        steps = file.get("post_processor") or {}
        steps = [step for step in steps.get("processors", [steps]) if step.get("type") != "ByteLevel"]
        single = steps[0].get("single", []) if len(steps) == 1 else []
        if [[*part] for part in single] == [["SpecialToken"], ["Sequence"]]:  # else: refused below
            file["post_processor"], sink = None, single[0]["SpecialToken"]["id"]
        return tokenizer_from_json(json.dumps(file)), sink
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if type(error) is ValueError else "this is not a sound tokenizer.json."
        raise ValueError(f"{path}: {reason}") from None


def write_tokenizer(tokenizer, sink, path):
    """The other way round."""
    file = json.loads(tokenizer_to_json(tokenizer))
    if sink:
        front, text, second = ({kind: {"id": id, "type_id": 0}} for kind, id in (
            ("SpecialToken", sink), ("Sequence", "A"), ("Sequence", "B")))
        known = {"id": sink, "ids": [tokenizer.specials[sink]], "tokens": [sink]}
        file["post_processor"] = {"type": "TemplateProcessing", "single": [front, text],
                                  "pair": [front, text, second], "special_tokens": {sink: known}}
    path.write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")


def chat_template(tokenizer, sink):
    """What tokenizer_config.json needs for `apply_chat_template` to give the ids of encode_chat (a sink in front),
    where the tokenizer has the tokens for it. There, the name of a special token in a content is that token."""
    if None in chat_roles(tokenizer).values():
        return {}
    turn = ("{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('The roles are user and "
            "assistant.') }}{% endif %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>")
    return {"chat_template": sink + "{% for message in messages %}{% if not loop.first %} {% endif %}" + turn
            + "{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"}


def write_json(x, path):
    path.write_text(json.dumps(x, indent=2) + "\n", encoding="utf-8")


def import_folder(source, target, tokenizer_path=None):
    """A published folder -> a checkpoint of ours at `target`."""
    need(not target.exists(), f"{target} exists already; remove it, or choose another name.")
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{source} has no readable config.json.") from None
    model, tokenizer = load_reference(config, read_tensors(source)), ""
    path = tokenizer_path or source / "tokenizer.json"
    if path.exists() or tokenizer_path:
        known, sink = read_tokenizer(path)
        need(known.vocab_size <= model.config.vocab_size,
             f"{path} has {known.vocab_size} tokens, more than the model, {model.config.vocab_size}.")
        if "num_blocks" in config and "<|actor|>" in known.specials:
            sink = "<|actor|>"  # the port may put it there by a setting outside of tokenizer.json
        need(sink in ("", *known.specials),
             f"{path} puts {sink!r} in front of texts, which is no special token of it.")
        tokenizer, model.config.sink_token = tokenizer_to_json(known), sink
    target.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"format": 1, "step": 0, "best_val_loss": math.inf, "model": model.state_dict(),
                     "optimizer": {}, "scaler": {}, "model_config": asdict(model.config), "train_config": {},
                     "tokenizer": tokenizer}, target)
    print(f"{target}: {sum(p.numel() for p in model.parameters()):,} parameters.")
    if not tokenizer:
        print("It has no tokenizer, so it cannot generate text: import it again with --tokenizer FILE.")


def export_folder(source, target):
    """A checkpoint of ours -> a folder in its published layout, complete or absent."""
    need(not target.exists(), f"{target} exists already; remove it, or choose another name.")
    checkpoint = load_checkpoint(source)
    model = load_model(checkpoint)
    config, tensors = to_reference(model)
    tokenizer = tokenizer_from_json(checkpoint["tokenizer"]) if checkpoint["tokenizer"] else None
    end = tokenizer and tokenizer.end_of_text
    if "hidden_size" in config:  # for the packages, whose defaults are tokens of other tokenizers
        config |= {"model_type": "wiola", "architectures": ["WiolaForCausalLM"], "torch_dtype": "float32",
                   "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_json(config, temporary / "config.json")
        write_tensors(tensors, temporary)
        if tokenizer:
            write_tokenizer(tokenizer, model.config.sink_token, temporary / "tokenizer.json")
            write_json({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                        "eos_token": tokenizer.token_bytes(end).decode("utf-8"),
                        **chat_template(tokenizer, model.config.sink_token)},
                       temporary / "tokenizer_config.json")
        temporary.rename(target)
    except OSError as error:
        raise OSError(f"cannot write {target}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")


def main():
    parser = CommandLine(description="Published checkpoints in, ours out.")
    parser.add_argument("direction", choices=["import", "export"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="import: this tokenizer.json, not the one in SRC")
    args = parser.parse_args()
    if args.direction == "import":
        import_folder(args.source, args.target, args.tokenizer)
    else:
        need(not args.tokenizer,
             "--tokenizer is for import: an exported folder has the checkpoint's tokenizer.")
        export_folder(args.source, args.target)


if __name__ == "__main__":
    run_main(main, advice="a larger machine is needed")
