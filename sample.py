"""
Let a trained model write.

    python sample.py --prompt "Once upon a time"            the newest checkpoint under out/
    python sample.py --checkpoint out/nano/best.pt --num_samples 3 --temperature 0.7 --top_p 0.9 --seed 1
    echo "The dragon" | python sample.py > story.txt        text goes to stdout, all else to stderr
    python sample.py --chat                                 talk, turn by turn (for a model trained on chats)

The prompt is continued token by token, and the memory of the tokens before is exact: see `Cache` in model.py.
"""

import argparse
import os
import sys
import time
from pathlib import Path


def parse_arguments():
    parser = argparse.ArgumentParser(description="Let a trained model write.", allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, help="default: the newest out/*/ckpt.pt")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue (default: what is piped in, else a new document)")
    source.add_argument("--prompt_file", type=Path, help="UTF-8 file with the text to continue")
    source.add_argument("--chat", action="store_true", help="read turns from the terminal and answer each")
    parser.add_argument("--num_samples", type=int, default=1, help="continuations, drawn independently (1)")
    parser.add_argument("--max_new_tokens", type=int, default=400, help="length of each, in tokens (400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top_k", type=int, default=0, help="draw among the k likeliest tokens only; 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw among the likeliest that reach p")
    parser.add_argument("--seed", type=int, default=1337, help="same seed, same text")
    parser.add_argument("--no_stop", action="store_true", help="go on after the end of a document")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--compile", action="store_true", help="takes a while, then twice as fast")
    parser.error = lambda message: sys.exit(f"error: {message}")
    args = parser.parse_args()
    for wrong, sentence in [
        (args.num_samples < 1, "--num_samples must be at least 1."),
        (args.max_new_tokens < 0, "--max_new_tokens must not be negative."),
        (not 0 <= args.temperature < float("inf"), "--temperature must be 0 or more."),
        (args.top_k < 0, "--top_k must be 0 (off) or more."),
        (not 0 <= args.seed < 2**63, "--seed must lie between 0 and 2**63 - 1."),
        (not 0 < args.top_p <= 1, "--top_p must be above 0 and at most 1."),
    ]:
        if wrong:
            raise ValueError(sentence)
    return args


def read_prompt(args):
    """The text to continue, from an option, a file or a pipe; without the newline that ends a file."""
    if args.prompt is not None:
        return args.prompt
    try:
        if args.prompt_file is not None:
            return args.prompt_file.read_text(encoding="utf-8-sig").removesuffix("\n")
        if sys.stdin is None or sys.stdin.isatty():
            return ""
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{args.prompt_file or 'the piped text'} is not UTF-8 text.") from None


class Writer:
    """A loaded model with its tokenizer and settings; writes to stdout as it decodes."""

    def __init__(self, args):
        import torch  # here, so that --help and misspelt options need not wait for it

        from support.checkpoint import checkpoint_tokenizer, load_checkpoint, load_model, newest_checkpoint
        from support.runtime import choose_device, prepare_decoding
        from tokenizer import StreamDecoder

        self.args, self.torch, self.StreamDecoder = args, torch, StreamDecoder
        device, dtype = choose_device(args.device, args.dtype)
        self.path = args.checkpoint or newest_checkpoint()
        checkpoint = load_checkpoint(self.path)
        self.tokenizer = checkpoint_tokenizer(checkpoint, self.path)
        self.model = load_model(checkpoint).to(device, dtype).eval()
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise ValueError("the checkpoint's tokenizer has more tokens than its model.")
        self.sink_token = self.model.config.sink_token
        if self.sink_token not in ("", *self.tokenizer.specials):
            raise ValueError(f"the checkpoint's tokenizer lacks its model's sink_token {self.sink_token!r}.")
        self.sink = [self.tokenizer.specials[self.sink_token]] if self.sink_token else []
        self.cache = prepare_decoding(self.model, args.compile)
        self.generator = torch.Generator(device).manual_seed(args.seed)
        self.n_tokens, self.seconds = 0, 0.0

    def write(self, ids, stops):
        """Continue `ids`, which the cache has not seen, up to an id in `stops`; stream the text.

        Returns the new ids, with the stopping one; the cache has seen all of them but the last.
        """
        args, torch, decoder, new = self.args, self.torch, self.StreamDecoder(self.tokenizer), []
        idx = torch.tensor([ids], device=self.generator.device)
        began = time.perf_counter()
        for token in self.model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                         self.generator, self.tokenizer.vocab_size, self.cache):
            new.append(token.item())
            if new[-1] in stops:
                break
            print(decoder.feed(new[-1]), end="", flush=True)
        print(decoder.flush(), flush=True)
        self.n_tokens += len(new)
        self.seconds += time.perf_counter() - began
        return new


def chat(writer):
    """Turns from stdin, answers to stdout. The cache is kept: each turn reads only what is new."""
    from tokenizer import encode_chat

    tokenizer = writer.tokenizer
    end = tokenizer.specials.get("<|end|>")
    encode_chat(tokenizer, [("user", ""), ("assistant", None)])  # if the tokenizer cannot, say so at once
    unseen = writer.sink[:]  # ids that the cache has not read yet
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin else ""
        if not line:
            return
        turn = encode_chat(tokenizer, [("user", line.rstrip("\r\n")), ("assistant", None)])
        unseen += turn if unseen == writer.sink else tokenizer.encode("\n") + turn
        answer = writer.write(unseen, {end, tokenizer.end_of_text})
        unseen = answer[-1:]  # drawn, but not read yet
        if unseen != [end]:  # cut off: the turn ends all the same
            unseen.append(end)


def main():
    if sys.stdout:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        args = parse_arguments()
        prompt = "" if args.chat else read_prompt(args)
        writer = Writer(args)
        if args.chat:
            chat(writer)
        else:
            text = prompt.removeprefix(writer.sink_token)  # typing the sink makes no second one
            ids = writer.sink + (writer.tokenizer.encode(text) or [writer.tokenizer.end_of_text])
            context = writer.model.config.context
            if len(ids) > context:
                print(f"[the prompt has {len(ids)} tokens, more than the context of {context}: the model "
                      f"sees the last {max(1, context // 2)}]", file=sys.stderr)
            for n in range(args.num_samples):
                if n:
                    print("---")
                print(prompt, end="", flush=True)
                writer.cache.reset()
                writer.write(ids, set() if args.no_stop else {writer.tokenizer.end_of_text})
        speed = writer.n_tokens / max(writer.seconds, 1e-9)
        print(f"[{writer.n_tokens} tokens, {speed:.0f} tokens/s, {writer.path}]", file=sys.stderr)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing is left to flush
    except OSError as error:
        sys.exit(f"error: {error.filename or 'output'}: {error.strerror}.")
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
