"""
Device and dtype, threads, compilation, memory, signals, the ends of scripts.

PyTorch takes seconds to import, so only the functions that need it do: `run_main` serves scripts that answer
--help at once.
"""

import contextlib
import ctypes
import math
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path

from support import need

COMPILING_SECONDS = 20  # what compiling a model for decoding takes on two idle cores, about


def choose_device(device, dtype):
    """Names from the command line -> (torch.device, torch.dtype to compute in), or ValueError.

    auto: CUDA, else Apple's MPS, else CPU; then bfloat16 where the GPU has it (compute capability 8.0),
    float16 on an older one, float32 everywhere else.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name in present if present[name])
    kind = device.split(":")[0]
    try:
        known = kind in present and torch.device(device)
    except RuntimeError:  # cuda:x
        known = False
    if not known:
        raise ValueError(f"device={device!r} is unknown; choices: auto, cpu, cuda, cuda:N, mps.")
    if not present[kind]:
        raise ValueError(f"this machine has no {kind} device that PyTorch can use; try device=cpu.")
    new_gpu = kind == "cuda" and torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
    if dtype == "auto":
        dtype = "float32" if kind != "cuda" else "bfloat16" if new_gpu else "float16"
    allowed = {"cpu": ["float32", "bfloat16"], "mps": ["float32"], "cuda": ["float32", "float16"]}[kind]
    allowed += ["bfloat16"] if new_gpu else []
    if dtype not in allowed:
        raise ValueError(f"dtype={dtype!r} is not for this {kind} device; choices: {', '.join(allowed)}.")
    return torch.device(device), getattr(torch, dtype)


def choose_threads(wanted=0):
    """Have PyTorch compute with so many threads; 0: OMP_NUM_THREADS if it is set, else the free cores.

    A thread that has no core to itself makes all others wait at each of the thousand places in a step where
    they meet: beside one busy process, two threads on two cores train at half the speed of one.
    """
    import torch

    cores = os.cpu_count() or 1
    need(0 <= wanted <= cores, f"threads={wanted} must lie between 0 and {cores}, the cores of this machine.")
    if not wanted and os.environ.get("OMP_NUM_THREADS"):
        return
    torch.set_num_threads(wanted or min(torch.get_num_threads(), free_cores()))


def free_cores():
    """Return how many cores this process may use that no other keeps busy just now, at least 1.

    It may use those of its affinity, and of a container's quota.
    """
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, int(min(allowed, core_quota(), round(cores - busy_cores(cores)))))


def busy_cores(cores):
    """Return how many of the cores are busy: for a third of a second or, where there is no /proc/stat, on
    average in the last minute."""
    try:
        before = processor_times()
        time.sleep(0.3)
        spent = [after - b for b, after in zip(before, processor_times())]
        return cores * (1 - (spent[3] + spent[4]) / max(1, sum(spent)))  # idle, waiting for a disk
    except OSError:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0


def processor_times():
    """Return what all cores have done since the start, in ticks: user, nice, system, idle, iowait, ..."""
    words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return [int(word) for word in words[1:9]]  # guests, which come after, are in user and nice already


def core_quota(folder="/sys/fs/cgroup"):
    """Return how many cores' time a container may use (cgroups, version 2 or 1), which sees them all."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            texts = [Path(folder, name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:  # -1 is none
                return quota / period
    return math.inf


def keep_freed_memory():
    """Have Linux's malloc keep what a step frees for the next one.

    Otherwise it gives large tensors back to the system and gets them anew, page by page and zeroed: a fifth
    of a step on a CPU, or more. The process keeps its peak memory, which grows by about a fourth.
    """
    try:
        malloc = ctypes.CDLL("libc.so.6")
        malloc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
        malloc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back
    except (OSError, AttributeError):  # another system
        pass


@contextlib.contextmanager
def interruptible(names=("SIGINT", "SIGTERM", "SIGHUP"),
                  say=b"\nstopping after this step; again to quit at once\n"):
    """Yield a list that the first Ctrl-C (or kill) only appends to; a second one acts at once.

    names are those of the signals: Ctrl-C, a polite kill, a closed terminal. `say` goes to stderr.

    A closed terminal says so twice, so that is never more than noted. A signal that is ignored stays ignored:
    so nohup, and the shell for what it runs in the background, protect a process.
    """
    stop, before = [], {}

    def note(number, frame):
        stop.append(number)
        if signal.Signals(number).name != "SIGHUP":
            signal.signal(number, before[number])
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
                os.write(sys.stderr.fileno(), say)

    for name in names:
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_line(error):
    """What an exception says, without the pages that a compiler adds; its kind, if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def compile_training(model, config, device, autocast, batch):
    """torch.compile where wanted, tried on part of a batch; if that fails, a warning and the plain model.

    Not worth it with token merging: how many tokens are left is another number each time.
    """
    import torch

    worth_it = device.type == "cuda" and model.config.token_merging == "off"
    if config.compile == "off" or (config.compile == "auto" and not worth_it):
        return model
    try:
        compiled = torch.compile(model)
        x, y = (part.chunk(config.grad_accum)[0].to(device) for part in batch)
        with autocast:
            _, loss = compiled(x, y)
        loss.backward()
        return compiled
    except Exception as error:  # a missing compiler, an old driver: whatever it is, training can go on
        print(f"warning: torch.compile failed ({first_line(error)}); going on without.", file=sys.stderr)
        return model
    finally:
        model.zero_grad(set_to_none=True)


def lay_out_by_columns(model):
    """Lay out column by column the head's matrix and those that are not wider than high: the same numbers,
    but a CPU, which in decoding multiplies them by one vector for each token, reads them up to twice as fast
    in float32."""
    import torch

    for weight in {model.head_weight, *(m.weight for m in model.modules() if isinstance(m, torch.nn.Linear))}:
        if weight.size(0) >= weight.size(1):
            weight.data = weight.data.t().contiguous().t()


def compile_decoding(model, cache):
    """Compile the pass over one token, its weights "frozen": laid out once as the products like them best.

    It takes a quarter of a minute on two CPU cores; then a token takes half the time. Frozen code is not kept
    in PyTorch's cache, so a second start takes as long. (Without freezing it takes half as long, but then a
    token takes twice the time.) Prompts are read as before. ValueError where it fails: without a C++
    compiler, for example.
    """
    import torch
    import torch._inductor.config as inductor

    inductor.freezing = True
    plain, compiled = model.forward, torch.compile(model.forward, dynamic=True, fullgraph=True)

    def forward(idx, cache=None, **options):
        # Not the first token, which makes the buffers, nor the second: code for a length of 1 is for that only.
        one = idx.size(1) == 1 and cache and cache.length > 1
        return (compiled if one else plain)(idx, cache=cache, **options)

    model.forward = forward
    try:
        start = torch.zeros(1, 3, dtype=torch.long, device=model.embedding.weight.device)
        for _ in model.generate(start, 3, cache=cache):
            pass
    except Exception as error:  # whatever it is that compilers need
        model.forward = plain
        raise ValueError(f"--compile failed: {first_line(error)}") from None
    finally:
        cache.reset()


def compile_if_it_pays(model, cache, n_tokens):
    """Compile if decoding n_tokens would take so long that half of it is more than compiling takes.

    It says so, and that it failed, on stderr. Return whether the model is compiled now. (In a thread beside
    the decoding it would take no longer, but meanwhile only a tenth of the tokens would come: Python's lock.)
    """
    seconds = n_tokens * seconds_per_token(model, cache)
    if seconds / 2 < COMPILING_SECONDS:
        return False
    print(f"[up to {n_tokens:,} tokens would take {seconds:.0f} s: compiling first, for about "
          f"{COMPILING_SECONDS} s, which halves that; not with --compile=off]", file=sys.stderr)
    try:
        compile_decoding(model, cache)
    except ValueError as error:
        print(f"[{error}; going on without]", file=sys.stderr)
        return False
    return True


def choose_decoding_threads(model, cache, wanted=0):
    """Have a CPU decode with so many threads; 0: OMP_NUM_THREADS, or 1 unless more are clearly faster.

    All threads work on one token and meet in each of its matrix products, so for a small model more than one
    bring nothing, and beside another busy process they lose much. A few tokens decide. A prompt is read by
    the threads of all free cores.
    """
    import torch

    if wanted or os.environ.get("OMP_NUM_THREADS"):
        choose_threads(wanted)
        return
    most, threads = min(torch.get_num_threads(), free_cores()), 1
    torch.set_num_threads(1)
    seconds = seconds_per_token(model, cache)
    while threads < most:
        more = min(2 * threads, most)
        torch.set_num_threads(more)
        faster = seconds_per_token(model, cache)
        if faster > 0.8 * seconds:
            torch.set_num_threads(threads)
            break
        threads, seconds = more, faster
    if threads < most:
        model.register_forward_pre_hook(
            lambda model, inputs: torch.set_num_threads(threads if inputs[0].size(1) == 1 else most))


def seconds_per_token(model, cache):
    """Decode four tokens and forget them -> the median of the last three's times."""
    import torch

    start = torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device)
    clock = []
    for token in model.generate(start, 4, temperature=0, cache=cache):
        token.item()  # a GPU has finished
        clock.append(time.perf_counter())
    cache.reset()
    return statistics.median(after - before for before, after in zip(clock, clock[1:]))


def prepare_decoding(model, compile="off", threads=0, n_tokens=0):
    """Make a model quick at decoding on its device -> a Cache to decode with.

    compile  on, off, or auto: if it pays for n_tokens
    threads  see `choose_decoding_threads`
    """
    import torch

    from model import Cache

    weight = model.embedding.weight
    # One row more than is used: a buffer filled to the brim is another kind of tensor to the compiler.
    cache = Cache(model.config.context + 1, torch.float32 if weight.is_cpu else None)
    if weight.is_cpu:
        choose_decoding_threads(model, cache, threads)
    compiled = compile == "on"
    if compiled:
        compile_decoding(model, cache)
    elif compile == "auto" and not weight.is_mps:
        compiled = compile_if_it_pays(model, cache, n_tokens)
    if not compiled and weight.is_cpu and weight.dtype == torch.float32:
        lay_out_by_columns(model)
    return cache


def open_model(path, device, dtype, chat=False):
    """A checkpoint, the newest if path is None -> (its path, its model in eval mode, its tokenizer).

    ValueError if it is to chat and has not learned to.
    """
    from support.checkpoint import checkpoint_tokenizer, load_checkpoint, load_model, newest_checkpoint

    device, dtype = choose_device(device, dtype)
    path = path or newest_checkpoint()
    checkpoint = load_checkpoint(path)
    tokenizer = checkpoint_tokenizer(checkpoint, path)
    if chat:
        advice = "python train.py config/chat.py makes a model to talk to."
        missing = [name for name, id in chat_roles(tokenizer).items() if id is None]
        need(not missing, f"the tokenizer of {path} has no {' and no '.join(missing)}: {advice}")
        learned = checkpoint.get("chat", not checkpoint["train_config"])  # of one imported nothing is known
        need(learned, f"{path} was trained on plain text, without <|user|> and <|assistant|>: {advice}")
    model = load_model(checkpoint).to(device, dtype).eval()
    need(tokenizer.vocab_size <= model.config.vocab_size,
         "the checkpoint's tokenizer has more tokens than its model.")
    sink_id(model.config, tokenizer)  # it must have one, if the model wants one
    return path, model, tokenizer


def chat_roles(tokenizer):
    """Return {name: id} of the tokens that begin and end turns; None for one that the tokenizer has not."""
    return {name: tokenizer.specials.get(name) for name in ("<|user|>", "<|assistant|>", "<|end|>")}


def sink_id(config, tokenizer):
    """Return the id of the attention sink that stands in front of every window and prompt, or None."""
    if not config.sink_token:
        return None
    need(config.sink_token in tokenizer.specials,
         f"the checkpoint's tokenizer lacks its model's sink_token {config.sink_token!r}.")
    return tokenizer.specials[config.sink_token]


def start_ids(config, tokenizer):
    """Return the ids to put in front of a text: the sink or, without one, the end of the document before.

    So begin the documents in training. A model that has only seen them whole is lost without.
    """
    sink = sink_id(config, tokenizer)
    return [tokenizer.end_of_text if sink is None else sink]


class Output:
    """stdout or stderr: a dumb terminal passes for none, so that there are no colours and no moving bar.

    may_end: whether to go on in silence when nobody reads it any more, or it cannot be written.
    """

    def __init__(self, stream, may_end):
        self.stream = stream
        self.may_end = may_end

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def isatty(self):
        return os.environ.get("TERM") != "dumb" and self.stream.isatty()

    def write(self, text):
        return self.attempt(self.stream.write, text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, method, *arguments):
        try:
            return method(*arguments)
        except OSError:
            if not self.may_end:
                raise
            discard(self.stream)


def discard(stream):
    """From here on, send nowhere what is written to a stream, and what waits in its buffer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def outputs(stdout_may_end):
    """Make stdout and stderr safe to print to, and line by line even into a file.

    They are None if they were closed before Python started. Then the next file that is opened would get their
    number, and whatever PyTorch's libraries print would go into it.
    """
    before = sys.stdout, sys.stderr
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    with open(null, "w", encoding="utf-8") as nowhere:
        if sys.stdout:
            sys.stdout.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
        sys.stdout = Output(sys.stdout or nowhere, stdout_may_end)
        sys.stderr = Output(sys.stderr or nowhere, may_end=True)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            try:
                if sys.stdout:
                    sys.stdout.flush()
            except OSError:  # Python would try again at its end, and complain in lines of its own
                discard(sys.stdout)


def run_main(main, interrupted="", status=130, advice="try a larger grad_accum or a smaller batch_size",
             stdout_may_end=False):
    """Call a script's main() and end as users expect: an error is one sentence on stderr, with exit status 1.

    interrupted     what Ctrl-C prints on stderr, if anything; it ends the script with `status`
    advice          what to do when memory runs out
    stdout_may_end  whether the work goes on when nobody reads stdout any more, as in `... | head`
    """
    with outputs(stdout_may_end):
        try:
            main()
            sys.stdout.flush()  # here, where an error can still be reported
        except BrokenPipeError:  # the reader of a pipe has seen enough
            pass
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error_sentence(error)}")
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            sys.exit(f"error: out of memory; {advice}.")
        except KeyboardInterrupt:
            if interrupted:
                print(interrupted, file=sys.stderr)
            sys.exit(status)


def error_sentence(error):
    """What an exception says. The system's own OSErrors say a number first: here it is the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'output'}: {error.strerror}."
    return str(error)


def out_of_memory(error):
    """Whether memory ran out, on the CPU or on a GPU. PyTorch is not imported to find out.

    On a CPU, and in some libraries on a GPU, it raises a RuntimeError like any other.
    """
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    words = "(can't|Cannot) allocate memory|not enough memory|out of memory|ALLOC_FAILED|bad_alloc"
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None
