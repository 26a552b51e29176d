"""
Generate text with a trained model.

    python sample.py --prompt "Once upon a time"            the newest checkpoint under out/
    python sample.py --checkpoint out/nano/best.pt --num_samples 3 --temperature 0.7 --top_p 0.9 --seed 1
    echo "The dragon" | python sample.py > story.txt        text goes to stdout, all else to stderr
    python sample.py --chat                                 talk, turn by turn, to the model of config/chat.py

A prompt is continued token by token. The cache saves reading it again for each, and changes no logit: see
`Cache` in model.py. PyTorch is imported where it is needed, so that --help and misspelt options do not wait.
"""

import math
import sys
import time
from pathlib import Path

from support import need
from support.runtime import interruptible, open_model, prepare_decoding, run_main, start_ids
from support.settings import CommandLine
from tokenizer import StreamDecoder, encode_chat


def parse_arguments():
    parser = CommandLine(description="Generate text with a trained model.")
    option = parser.add_argument
    option("--checkpoint", type=Path, help="default: the newest out/*/ckpt.pt")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue (default: what is piped in, else a new document)")
    source.add_argument("--prompt_file", type=Path, help="UTF-8 file with the text to continue")
    source.add_argument("--chat", action="store_true", help="read turns from the terminal and answer each")
    option("--num_samples", type=int, default=1, help="continuations, drawn independently (1)")
    option("--max_new_tokens", type=int, default=400, help="length of each, in tokens (400)")
    option("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    option("--top_k", type=int, default=0, help="draw among the k likeliest tokens only; 0: all")
    option("--top_p", type=float, default=1.0, help="draw among the likeliest that reach p")
    option("--seed", type=int, default=1337, help="same seed, same text (with the same --threads and --compile)")
    option("--no_stop", action="store_true", help="go on after the end of a document")
    option("--device", default="auto", help="auto, cpu, cuda, cuda:N, mps")
    option("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    option("--threads", type=int, default=0, help="of a CPU; 0: OMP_NUM_THREADS, or the fastest number")
    option("--compile", nargs="?", const="on", default="auto", choices=("auto", "on", "off"),
           help="takes a while, then twice as fast; auto: if there is so much to write that it pays")
    args = parser.parse_args()
    need(args.num_samples >= 1, "--num_samples must be at least 1.")
    need(args.max_new_tokens >= 0, "--max_new_tokens must not be negative.")
    need(0 <= args.temperature < math.inf, "--temperature must be 0 or more.")
    need(args.top_k >= 0, "--top_k must be 0 (off) or more.")
    need(0 <= args.seed < 2**63, "--seed must lie between 0 and 2**63 - 1.")
    need(0 < args.top_p <= 1, "--top_p must be above 0 and at most 1.")
    return args


def read_prompt(args):
    """The text to continue, from an option, a file or a pipe; without the newline that ends a file.

    Line ends become LF, as in the training text.
    """
    if args.prompt is not None:
        return args.prompt.replace("\r\n", "\n").replace("\r", "\n")
    try:
        if args.prompt_file is not None:
            return args.prompt_file.read_text(encoding="utf-8-sig").removesuffix("\n")
        if sys.stdin is None or sys.stdin.isatty():
            return ""
        print("[reading the prompt from stdin, up to its end]", file=sys.stderr)
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict", newline=None)  # None: any line end
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{args.prompt_file or 'the piped text'} is not UTF-8 text.") from None


def generate(model, tokenizer, ids, stops, options, interrupted=()):
    """Continue `ids`, which the cache has not read, up to an id in `stops`; print the text as it comes.

    It also ends once `interrupted` holds a signal. Return the new ids, with the stopping one, and the seconds
    it took. The cache has read all but the last.
    """
    import torch

    decoder, new = StreamDecoder(tokenizer), []
    idx = torch.tensor([ids], device=options["generator"].device)  # (1, T)
    began = time.perf_counter()
    for token in model.generate(idx, **options):
        new.append(token.item())
        if new[-1] in stops:
            break
        print(decoder.feed(new[-1]), end="", flush=True)
        if interrupted:
            break
    print(decoder.flush(), flush=True)
    return new, time.perf_counter() - began


def continue_prompt(model, tokenizer, prompt, args, options):
    """Print the prompt and a continuation, num_samples times. Return what `generate` returned each time."""
    text = prompt.removeprefix(model.config.sink_token)  # typing the sink makes no second one
    ids = start_ids(model.config, tokenizer) + tokenizer.encode(text)
    if not text and model.config.sink_token:
        ids.append(tokenizer.end_of_text)  # anything may follow a sink, and a new document follows this
    context = model.config.context
    if len(ids) > context:
        print(f"[the prompt has {len(ids)} tokens, more than the context of {context}: the model "
              f"sees the last {max(1, context // 2)}]", file=sys.stderr)
    results = []
    for n in range(args.num_samples):
        print("---\n" if n else "", prompt, sep="", end="", flush=True)
        options["cache"].reset()
        stops = set() if args.no_stop else {tokenizer.end_of_text}
        results.append(generate(model, tokenizer, ids, stops, options))
    return results


def chat(model, tokenizer, options):
    """Answer turns from stdin on stdout, until it ends. Return what `generate` returned each time.

    The cache is kept, so that each turn reads only what is new. Ctrl-C stops an answer, another the program.
    """
    end = tokenizer.specials["<|end|>"]
    cache = options["cache"]
    unread = start_ids(model.config, tokenizer)  # ids that the cache has not read yet
    results = []
    if sys.stdin:  # a byte that is not UTF-8 is no reason to end
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace", newline=None)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin else ""
        if not line:
            return results
        if not line.strip():
            continue
        unread += tokenizer.encode(" ") if results else []
        unread += encode_chat(tokenizer, [("user", line.rstrip("\n")), ("assistant", None)])
        length = cache.length + len(unread)
        with interruptible(["SIGINT"], say=b"") as interrupted:
            answer, seconds = generate(model, tokenizer, unread, {end, tokenizer.end_of_text}, options,
                                       interrupted)
        results.append((answer, seconds))
        if answer and cache.length < length + len(answer) - 1:
            print(f"[the context of {model.config.context} tokens was full: the model has forgotten all but "
                  "its last half]", file=sys.stderr)
        unread = answer[-1:] or unread  # drawn, but not read yet
        if unread[-1] != end:  # cut off: the turn ends all the same
            unread.append(end)


def run():
    args = parse_arguments()
    prompt = "" if args.chat else read_prompt(args)

    import torch

    path, model, tokenizer = open_model(args.checkpoint, args.device, args.dtype, chat=args.chat)
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    options["n_ids"] = tokenizer.vocab_size  # the model may have more rows than the tokenizer has tokens
    answers = 10 if args.chat else args.num_samples  # for a chat, a guess
    options["cache"] = prepare_decoding(model, args.compile, args.threads, answers * args.max_new_tokens)
    options["generator"] = torch.Generator(model.embedding.weight.device).manual_seed(args.seed)
    if args.chat:
        results = chat(model, tokenizer, options)
    else:
        results = continue_prompt(model, tokenizer, prompt, args, options)
    n_tokens = sum(len(new) for new, _ in results)
    speed = n_tokens / max(sum(seconds for _, seconds in results), 1e-9)
    print(f"[{n_tokens} tokens, {speed:.0f} tokens/s, {path}]", file=sys.stderr)


def main():
    run_main(run, advice="try --dtype=bfloat16 or --device=cpu")


if __name__ == "__main__":
    main()
