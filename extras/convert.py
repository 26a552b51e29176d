"""
Published checkpoints in, ours out.

    python extras/convert.py import SRC out/NAME/ckpt.pt  # then sample.py --checkpoint out/NAME/ckpt.pt
    python extras/convert.py export out/NAME/ckpt.pt DST  # then WiolaForCausalLM.from_pretrained("DST")

SRC and DST are folders with config.json, model.safetensors or pytorch_model.bin (SRC: or the parts that an
index.json names), tokenizer.json and generation_config.json, in the layouts of wiola13m 1.0.1, wiola 0.1.1,
and, as SRC only, Silia v2 with its port silia-v2-hf. `load_reference` makes a model of the contents of a
config.json and the tensors, in Python. Nothing in the files is executed.
"""

import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PureWindowsPath

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project, when this is run as a script

import torch

from model import LanguageModel, ModelConfig
from support import need
from support.checkpoint import load_checkpoint, load_model, save_checkpoint
from support.hf_tokenizer import tokenizer_from_json, tokenizer_to_json
from support.runtime import chat_roles, out_of_memory, run_main
from support.settings import CommandLine, check_type
from tokenizer import ENDS

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

    The config's keys tell the family. ValueError, with the names, if tensors are missing, left over, of
    another shape or not finite, or if the head is not tied to the embedding.
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
    broken = [name for name, x in tensors.items() if not torch.isfinite(x.float()).all()]
    for what, names in (("missing", shapes.keys() - tensors.keys()),
                        ("left over", tensors.keys() - shapes.keys() - {layout.head}),
                        ("not of the shape that the config gives them", unfit),
                        ("not finite (the training diverged, or the file is damaged)", broken)):
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


def read_json(path):
    """The object in a JSON file as a dict, or ValueError."""
    try:
        content = json.loads(path.read_bytes())  # of bytes, it knows UTF-8 and UTF-16 by their first ones
        need(isinstance(content, dict), "it holds no object")
        return content
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path.parent} has no readable {path.name}: {reason}.") from None


def read_tensors(folder):
    """The tensors of a folder by name, from the one file that holds them or the parts that an index names."""
    names = [name + index for name in ("model.safetensors", "pytorch_model.bin")
             for index in ("", ".index.json")]
    path = next((folder / name for name in names if os.path.lexists(folder / name)), None)
    need(path, f"{folder} has none of {', '.join(names)}.")
    if path.suffix != ".json":
        return read_tensor_file(path)
    part_of = read_json(path).get("weight_map")  # tensor -> file
    need(isinstance(part_of, dict) and part_of, f"{path} has no weight_map: the file of each tensor.")
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    for part in part_of.values():  # an index out of the Internet is not to read the rest of this machine
        need(isinstance(part, str) and PureWindowsPath(part).name == part and part.endswith(suffix),
             f"{path} names {part!r}; only {suffix} files beside it are read.")
        need((folder / part).exists(), f"{path} names {part}, which is not there: fetch it, too.")
    tensors = {}
    for part in sorted({*part_of.values()}):
        tensors |= read_tensor_file(folder / part)
    return tensors


def read_tensor_file(path):
    """The tensors in a .safetensors or .bin file, by name."""
    need(path.suffix != ".safetensors" or safetensors,
         f"{path} is read with the package safetensors: pip install safetensors")
    with open(path, "rb"):  # else what the system has against it would pass for damage
        pass
    try:
        if path.suffix == ".safetensors":
            return safetensors.load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if all(isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in tensors.items()):
            return tensors
    except Exception as error:  # a damaged file can end in any of a dozen errors
        if out_of_memory(error):
            raise
    raise ValueError(f"{path} is damaged, or does not hold plain tensors.")


def write_tensors(tensors, folder):
    """Into model.safetensors, or where that package is missing into pytorch_model.bin."""
    tensors = {name: x.detach().clone() for name, x in tensors.items()}  # on their own: no shared memory
    path = folder / ("model.safetensors" if safetensors else "pytorch_model.bin")
    try:
        if safetensors:
            safetensors.save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(tensors, path)
    except OSError:
        raise
    except Exception as error:  # a full disk, in either library's own words
        raise OSError(str(error).partition("\n")[0]) from None
    path.chmod(folder.stat().st_mode & 0o666)  # as open() makes files; safetensors', only its owner may read


def read_tokenizer(path):
    """A tokenizer.json -> (Tokenizer, the special token that it puts in front of every text, or "")."""
    try:
        file, sink = json.loads(path.read_bytes()), ""
        steps = file.get("post_processor") or {}
        steps = [step for step in steps.get("processors", [steps]) if step.get("type") != "ByteLevel"]
        single = steps[0].get("single", []) if len(steps) == 1 else []
        if [[*part] for part in single] == [["SpecialToken"], ["Sequence"]]:  # else: refused below
            file["post_processor"], sink = None, single[0]["SpecialToken"]["id"]
        return tokenizer_from_json(json.dumps(file)), sink
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if type(error) is ValueError else "this is not a sound tokenizer.json."
        raise ValueError(f"{path}: {reason}") from None


def write_tokenizer(tokenizer, sink, folder):
    """The other way round, with the tokenizer_config.json that transformers wants beside it."""
    file = json.loads(tokenizer_to_json(tokenizer))
    if sink:
        front, text, second = ({kind: {"id": id, "type_id": 0}} for kind, id in (
            ("SpecialToken", sink), ("Sequence", "A"), ("Sequence", "B")))
        known = {"id": sink, "ids": [tokenizer.specials[sink]], "tokens": [sink]}
        file["post_processor"] = {"type": "TemplateProcessing", "single": [front, text],
                                  "pair": [front, text, second], "special_tokens": {sink: known}}
    (folder / "tokenizer.json").write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")
    write_json({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "eos_token": tokenizer.token_bytes(tokenizer.end_of_text).decode("utf-8"),
                **chat_template(tokenizer, sink)},
               folder / "tokenizer_config.json")


# The options of sample.py that generation_config.json knows: type, what a file without it means, and null.
SAMPLING = {"temperature": (float, 1.0, 1.0), "top_k": (int, 50, 0), "top_p": (float, 1.0, 1.0)}


def read_generation(path, tokenizer):
    """A generation_config.json -> ({option of sample.py: value}, a remark on where texts end, or "").

    There are no options if the file does not say how to sample.
    """
    file, remark = read_json(path), ""
    ends = file.get("eos_token_id")
    stop = next((name for name in ENDS if tokenizer and name in tokenizer.specials), None)
    if stop and ends not in (None, tokenizer.specials[stop], [tokenizer.specials[stop]]):
        remark = f"A text ends at eos_token_id={ends} there; sample.py stops at {stop} only."
    if file.get("do_sample") is False:
        return {"temperature": 0.0}, remark
    options = {}
    if not file.keys() & {"do_sample", *SAMPLING}:
        return options, remark
    for name, (kind, absent, null) in SAMPLING.items():
        x = file.get(name, absent)
        options[name] = check_type(f"{path}: {name}", kind, null if x is None else x)
    return options, remark


def write_generation(options, tokenizer, sink, path):
    """The other way round; without options, what sample.py does by itself."""
    options = options or {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
    file = {"do_sample": True} | options if options["temperature"] else {"do_sample": False}
    if tokenizer:
        end = tokenizer.end_of_text
        file |= {"bos_token_id": tokenizer.specials.get(sink, end), "eos_token_id": end}
    write_json(file, path)


def chat_template(tokenizer, sink):
    """What tokenizer_config.json has, so that apply_chat_template gives encode_chat's ids, behind a sink.

    There, other than here, the name of a special token in a content becomes that token.
    """
    if None in chat_roles(tokenizer).values():
        return {}
    turn = ("{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('The roles are user and "
            "assistant.') }}{% endif %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>")
    return {"chat_template": sink + "{% for message in messages %}{% if not loop.first %} {% endif %}" + turn
            + "{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"}


def write_json(x, path):
    path.write_text(json.dumps(x, indent=2) + "\n", encoding="utf-8")


def import_tokenizer(path, model, is_port):
    """Read the Tokenizer that belongs to an imported model, and set the model's sink_token by it."""
    tokenizer, sink = read_tokenizer(path)
    need(tokenizer.vocab_size <= model.config.vocab_size,
         f"{path} has {tokenizer.vocab_size} tokens, more than the model, {model.config.vocab_size}.")
    if is_port and "<|actor|>" in tokenizer.specials:
        sink = "<|actor|>"  # Silia's port may put it there by a setting outside of tokenizer.json
    need(sink in ("", *tokenizer.specials),
         f"{path} puts {sink!r} in front of texts, which is no special token of it.")
    model.config.sink_token = sink
    return tokenizer


def import_folder(source, target, tokenizer_path=None):
    """A published folder -> a checkpoint of ours at `target`."""
    need(not target.exists(), f"{target} exists already; remove it, or choose another name.")
    config = read_json(source / "config.json")
    model, tokenizer = load_reference(config, read_tensors(source)), None
    path = tokenizer_path or source / "tokenizer.json"
    if tokenizer_path or os.path.lexists(path):  # a link to nowhere is not "no tokenizer"
        tokenizer = import_tokenizer(path, model, "num_blocks" in config)
    path, options, remark = source / "generation_config.json", {}, ""
    if os.path.lexists(path):
        options, remark = read_generation(path, tokenizer)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"format": 1, "step": 0, "best_val_loss": math.inf, "model": model.state_dict(),
                     "optimizer": {}, "scaler": {}, "model_config": asdict(model.config), "train_config": {},
                     "tokenizer": tokenizer_to_json(tokenizer) if tokenizer else "",
                     "generation": options}, target)  # for export: sample.py has options of its own
    print(f"{target}: {sum(p.numel() for p in model.parameters()):,} parameters.")
    if not tokenizer:
        print("It has no tokenizer, so it cannot generate text: import it again with --tokenizer FILE.")
    if options:
        words = [f"--{name} {x}" for name, x in options.items()]
        print("Recommended there: python sample.py --checkpoint", shlex.quote(str(target)), *words)
    if remark:
        print(remark)


def export_folder(source, target):
    """A checkpoint of ours -> a folder in its published layout, complete or absent."""
    need(not target.exists(), f"{target} exists already; remove it, or choose another name.")
    checkpoint = load_checkpoint(source)
    model = load_model(checkpoint)
    config, tensors = to_reference(model)
    need(model.config.block != "silia", "Silia v2 is only imported: the tensor names of its port are not "
         "known, so nothing else could read the folder. Share the checkpoint itself.")
    tokenizer = tokenizer_from_json(checkpoint["tokenizer"]) if checkpoint["tokenizer"] else None
    end = tokenizer and tokenizer.end_of_text
    config |= {"model_type": "wiola", "architectures": ["WiolaForCausalLM"], "torch_dtype": "float32",
               "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}  # not the packages' defaults
    options, sink = checkpoint.get("generation"), model.config.sink_token
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_json(config, temporary / "config.json")
        write_tensors(tensors, temporary)
        if tokenizer or options:
            write_generation(options, tokenizer, sink, temporary / "generation_config.json")
        if tokenizer:
            write_tokenizer(tokenizer, sink, temporary)
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
