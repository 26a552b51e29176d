"""The promises of sample.py: what streams to stdout, and that every option means what it says."""

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sample
import test_model
import tokenizer as tokenizers
from model import Cache, LanguageModel, ModelConfig, sample_token
from support.checkpoint import load_checkpoint, load_model, save_checkpoint
from support.hf_tokenizer import tokenizer_from_json, tokenizer_to_json
from support import runtime
from support.runtime import compile_decoding, prepare_decoding, run_main

ROOT = Path(__file__).resolve().parent.parent


def write_checkpoint(path, **changes):
    """A checkpoint of a small random model with a tokenizer of 300 tokens."""
    text = "The frog saw a big red ball in the pond and jumped after it at once."
    chunks = tokenizers.count_chunks([text, text])
    tokenizer = tokenizers.train_bpe(chunks, 300)
    torch.manual_seed(1)
    config = {"vocab_size": 300, "context": 32, "n_layer": 1, "d_model": 16, "n_head": 2, "d_ff": 24}
    model = LanguageModel(ModelConfig(**(config | changes)))
    with torch.no_grad():
        for p in model.parameters():
            p *= 20 if p.dim() == 2 else 1  # a model with opinions, on what it reads and on what it has read
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"format": 1, "model": model.state_dict(), "model_config": vars(model.config),
                           "train_config": {}, "tokenizer": tokenizer_to_json(tokenizer), "step": 0, "optimizer": {},
                           "scaler": {}, "best_val_loss": 0.0}, path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("out/run/ckpt.pt"))
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*words, stdin=b"") calls sample.py in this process -> (exit code or None, stdout, stderr)."""
    def call(*words, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--device=cpu", *words])
        piped = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", newline="\n")  # as Python makes it
        monkeypatch.setattr(sys, "stdin", piped)
        capsys.readouterr()
        code = None
        try:
            run_main(sample.main)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


def test_text_goes_to_stdout_and_speed_to_stderr(here, run):
    code, out, err = run("--prompt", "The frog", "--max_new_tokens", "12", "--no_stop")
    assert code is None and out.startswith("The frog") and len(out) > len("The frog\n") and out.endswith("\n")
    assert err.startswith("[12 tokens, ") and "tokens/s" in err and err.count("\n") == 1


def test_greedy_output_is_the_models_argmax(here, run):
    """A prompt is the beginning of a document, so an end-of-text stands before it, as in training."""
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    model, tokenizer = load_model(checkpoint).eval(), tokenizer_from_json(checkpoint["tokenizer"])
    x = torch.tensor([[tokenizer.end_of_text, *tokenizer.encode("The frog")]])
    for _ in range(10):
        x = torch.cat([x, model(x)[0][:, -1:].argmax(-1)], dim=1)
    _, out, _ = run("--prompt=The frog", "--max_new_tokens=10", "--temperature=0", "--no_stop")
    assert out == tokenizer.decode(x[0, 1:].tolist()) + "\n"
    assert run("--prompt=The frog", "--max_new_tokens=10", "--top_k=1", "--no_stop")[1] == out


def test_the_same_seed_gives_the_same_text(here, run):
    words = ["--prompt=The", "--max_new_tokens=20", "--no_stop"]
    first = run(*words, "--seed=3")[1]
    assert run(*words, "--seed=3")[1] == first != run(*words, "--seed=4")[1]


def test_several_samples_are_independent_and_begin_with_the_prompt(here, run):
    _, out, err = run("--prompt=The", "--max_new_tokens=20", "--num_samples=3", "--no_stop")
    samples = out.split("---\n")
    assert len(samples) == len(set(samples)) == 3 and all(text.startswith("The") for text in samples)
    assert err.startswith("[60 tokens")
    first, second = run("--prompt=The", "--num_samples=2", "--temperature=0", "--no_stop")[1].split("---\n")
    assert first == second  # no sample remembers the one before


def test_prompts_from_files_and_pipes(here, run):
    words = ["--max_new_tokens=8", "--temperature=0"]
    expected = run("--prompt=Der Bär", *words)[1]
    Path("prompt.txt").write_bytes("\ufeffDer Bär\n".encode())
    assert run("--prompt_file=prompt.txt", *words)[1] == expected
    assert run(*words, stdin="Der Bär\n".encode())[1] == expected
    assert "reading the prompt from stdin" in run(*words, stdin=b"x")[2]


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_all_line_ends_are_those_of_the_training_text(here, run, end):
    words = ["--max_new_tokens=8", "--temperature=0"]
    text = "The frog\nsaw"
    expected = run(f"--prompt={text}", *words)[1]
    assert expected.startswith(text)
    typed = text.replace("\n", end)
    assert run(f"--prompt={typed}", *words)[1] == expected
    Path("prompt.txt").write_bytes((typed + end).encode())
    assert run("--prompt_file=prompt.txt", *words)[1] == expected
    assert run(*words, stdin=(typed + end).encode())[1] == expected


def test_an_empty_prompt_begins_a_document(here, run):
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    model, tokenizer = load_model(checkpoint), tokenizer_from_json(checkpoint["tokenizer"])
    first = model(torch.tensor([[tokenizer.end_of_text]]))[0][0, -1].argmax().item()
    for words in (["--prompt="], []):
        _, out, _ = run(*words, "--max_new_tokens=1", "--temperature=0", "--no_stop")
        assert out == tokenizer.decode([first]) + "\n"


def test_it_stops_at_the_end_of_text_unless_told_not_to(here, run):
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    weight = checkpoint["model"]["embedding.weight"]
    weight.zero_()[:, 0] = 1.0
    weight[tokenizer_from_json(checkpoint["tokenizer"]).end_of_text, 0] = 9.0  # always the likeliest
    save_checkpoint(checkpoint, Path("out/run/ckpt.pt"))
    words = ["--prompt=The", "--max_new_tokens=9", "--temperature=0"]
    _, out, err = run(*words)
    assert out == "The\n" and err.startswith("[1 tokens")
    _, out, err = run(*words, "--no_stop")
    assert out.count("<|endoftext|>") == 9 and err.startswith("[9 tokens")


def test_long_prompts_are_cut_with_a_notice_and_long_stories_go_on(here, run):
    code, out, err = run("--prompt", "The frog saw a ball. " * 30, "--max_new_tokens=100", "--no_stop")
    assert code is None and out.startswith("The frog saw a ball. " * 30)
    assert "sees the last 16]" in err and "[100 tokens" in err


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(here, run):
    write_checkpoint(Path("out/run/ckpt.pt"), vocab_size=5000)
    code, out, err = run("--prompt=The", "--max_new_tokens=200", "--temperature=3", "--no_stop")
    assert code is None and "[200 tokens" in err


def test_the_newest_checkpoint_is_the_default(here, run):
    write_checkpoint(Path("out/older/ckpt.pt"), d_ff=25)
    os.utime("out/older/ckpt.pt", (1, 1))
    words = ["--prompt=The", "--max_new_tokens=20", "--temperature=0"]
    assert run(*words)[1] == run(*words, "--checkpoint=out/run/ckpt.pt")[1]
    os.utime("out/older/ckpt.pt")
    assert run(*words)[1] == run(*words, "--checkpoint=out/older/ckpt.pt")[1]


@pytest.mark.parametrize("words, message", [
    (["--checkpoint=nowhere.pt"], "no checkpoint nowhere.pt"), (["--temperature=-1"], "temperature"),
    (["--temperature=nan"], "temperature"), (["--top_p=0"], "top_p"), (["--top_p=1.5"], "top_p"),
    (["--top_k=-1"], "top_k"), (["--num_samples=0"], "num_samples"), (["--device=abacus"], "abacus"),
    (["--dtype=float16"], "dtype"), (["--prompt_file=nowhere.txt"], "nowhere.txt"),
    (["--prompt_file=latin1.txt"], "not UTF-8"), (["--prompt", "-hello"], 'written --prompt="-x"'),
])
def test_errors_are_one_sentence(here, run, words, message):
    Path("latin1.txt").write_bytes("Bär".encode("latin-1"))
    code, out, err = run(*words)
    assert code.startswith("error: ") and message in code and "\n" not in code and not out


def test_without_any_checkpoint_it_says_what_to_do(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    assert "train first" in run("--prompt=x")[0]


def test_chat_keeps_the_cache_across_turns(here, run):
    """The second answer equals that of a model that reads the whole conversation at once."""
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    checkpoint["model_config"]["context"] = 400
    save_checkpoint(checkpoint, Path("out/run/ckpt.pt"))
    model, tokenizer = load_model(checkpoint), tokenizer_from_json(checkpoint["tokenizer"])
    end, ids, answers = tokenizer.specials["<|end|>"], [tokenizer.end_of_text], []
    for text in ("Hi frog", "Who are <|end|> you?"):  # a special token that is typed ends nothing
        ids += tokenizer.encode(" ") if answers else []
        ids += [tokenizer.specials["<|user|>"], *tokenizer.encode(text), end, *tokenizer.encode(" "),
                tokenizer.specials["<|assistant|>"]]
        answer = []
        while len(answer) < 10 and (not answer or answer[-1] not in (end, tokenizer.end_of_text)):
            answer.append(model(torch.tensor([ids + answer]))[0][0, -1].argmax().item())
        ids += answer if answer[-1] == end else answer + [end]
        answers.append(tokenizer.decode([i for i in answer if i not in (end, tokenizer.end_of_text)]))
    typed = b"Hi frog\nWho are <|end|> you?\n"
    code, out, _ = run("--chat", "--max_new_tokens=10", "--temperature=0", stdin=typed)
    assert code is None and out == "".join(answer + "\n" for answer in answers)


def longer_context(context=400, **changes):
    """The checkpoint of `here` with another context."""
    write_checkpoint(Path("out/run/ckpt.pt"), context=context, **changes)


def test_an_empty_line_asks_again_and_end_of_input_ends(here, run):
    longer_context()
    words = ("--chat", "--max_new_tokens=5", "--temperature=0")
    once = run(*words, stdin=b"Hi frog\nAgain")
    code, out, err = run(*words, stdin=b"\n  \nHi frog\n\t\r\nAgain\n\n")
    assert code is None and out == once[1] and err.count("> ") == 7
    assert run("--chat", stdin=b"")[:2] == (None, "")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(here, run, monkeypatch):
    """The model has read what it said so far; a second Ctrl-C ends the program, as does one at the prompt."""
    longer_context()
    words = ("--chat", "--max_new_tokens=20", "--temperature=0", "--top_k=1")
    feed = tokenizers.StreamDecoder.feed
    said, cut = [], []

    def interrupt(decoder, id):
        said.append(id)
        if len(said) in cut:
            signal.raise_signal(signal.SIGINT)
        return feed(decoder, id)

    monkeypatch.setattr(tokenizers.StreamDecoder, "feed", interrupt)
    read = []
    forward = LanguageModel.forward
    monkeypatch.setattr(LanguageModel, "forward",
                        lambda self, idx, **more: (read.append(idx), forward(self, idx, **more))[1])
    cut.append(3)
    code, out, _ = run(*words, stdin=b"Hi frog\nAgain\n")
    tokenizer = tokenizer_from_json(load_checkpoint("out/run/ckpt.pt")["tokenizer"])
    first, rest = said[:3], said[3:]
    assert code is None and out.startswith(tokenizer.decode(first) + "\n") and rest
    questions = [tokenizers.encode_chat(tokenizer, [("user", text), ("assistant", None)])
                 for text in ("Hi frog", "Again")]
    ids = [tokenizer.end_of_text, *questions[0], *first, tokenizer.specials["<|end|>"],
           *tokenizer.encode(" "), *questions[1], *rest]
    seen = torch.cat(read, dim=1)[0].tolist()
    seen = seen[seen.index(tokenizer.end_of_text):]  # before it, what was read to try how many threads are best
    assert len(seen) > len(ids) - 2 and seen == ids[: len(seen)]
    monkeypatch.setattr(tokenizers.StreamDecoder, "feed",
                        lambda decoder, id: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    assert run(*words, stdin=b"Hi frog\nAgain\n")[0] == 130


@pytest.mark.parametrize("sink", ["", "<|end|>"])
def test_a_chat_says_when_the_context_is_full(here, run, sink):
    """A talk of any length goes on; with a sink, that stays in front."""
    longer_context(sink_token=sink)
    words = ("--chat", "--max_new_tokens=6", "--temperature=0")
    assert "context" not in run(*words, stdin=b"Hi frog\nAgain\n")[2]
    longer_context(context=24, sink_token=sink)
    code, out, err = run(*words, stdin=b"Hi frog\n" * 5)
    assert code is None and out.count("\n") == 5
    assert 1 <= err.count("[the context of 24 tokens was full") < 5
    assert "full" in run(*words, stdin=b"The frog saw a big red ball in the pond and jumped after it " * 9)[2]


def test_no_tokens_lose_no_question(here, run, monkeypatch):
    """With --max_new_tokens=0 nothing is read; nothing is lost either."""
    longer_context()
    seen = []
    monkeypatch.setattr(sample, "generate",
                        lambda model, tokenizer, ids, *more: (seen.append(list(ids)), ([], 0.0))[1])
    run("--chat", stdin=b"Hi\nfrog\n")
    assert seen[1][: len(seen[0])] == seen[0] and len(seen[1]) > len(seen[0])


def test_turns_in_chunks_give_the_logits_of_the_whole_conversation(here):
    longer_context()
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    model, tokenizer = load_model(checkpoint).double(), tokenizer_from_json(checkpoint["tokenizer"])
    turns = [("user", "Hi frog"), ("assistant", "The pond"), ("user", "<|end|> <|user|>"),
             ("assistant", "red")]
    ids = torch.tensor([tokenizers.encode_chat(tokenizer, turns)])
    whole = model(ids)[0]
    ends = [i + 1 for i, id in enumerate(ids[0].tolist()) if id == tokenizer.specials["<|end|>"]]
    assert len(ends) == 4
    cache = Cache(400)
    parts = [model(ids[:, begin:end], cache=cache)[0] for begin, end in zip([0, *ends], ends)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10


def test_chat_needs_a_model_that_has_learned_to(here, run):
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    for chat, data in ((False, {"data": "x"}), (None, {"data": "x"})):  # the second as it was saved before
        more = {"train_config": data} | ({} if chat is None else {"chat": chat})
        save_checkpoint(checkpoint | more, Path("out/run/ckpt.pt"))
        code, out, err = run("--chat", stdin=b"Hi\n")
        assert "was trained on plain text" in code and "train.py config/chat.py" in code and not out + err
    save_checkpoint(checkpoint | {"train_config": {"data": "x"}, "chat": True}, Path("out/run/ckpt.pt"))
    assert run("--chat", "--max_new_tokens=2", stdin=b"Hi\n")[0] is None
    silia = tokenizers.train_bpe(tokenizers.count_chunks(["the frog"]), 262, tokenizers.SILIA_SPECIALS)
    save_checkpoint(checkpoint | {"tokenizer": tokenizer_to_json(silia)}, Path("out/run/ckpt.pt"))
    code, out, err = run("--chat", stdin=b"Hi\n")
    assert "has no <|user|> and no <|assistant|> and no <|end|>: python train.py config/chat.py" in code
    assert not out + err


def test_a_byte_that_is_not_utf8_does_not_end_a_chat(here, run):
    code, out, _ = run("--chat", "--max_new_tokens=2", "--no_stop", stdin=b"Hi \xff frog\r\nHi\n")
    assert code is None and out.count("\n") >= 2


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
def test_a_script_whose_outputs_are_closed_has_no_traceback(here):
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    Path("tokenizer.json").write_text(checkpoint["tokenizer"], encoding="utf-8")
    shell = '"$@" tokenizer.json "The frog" 2>err >&-; echo $?; "$@" nothing.json x >&- 2>&-; echo $?'
    done = subprocess.run(["sh", "-c", shell, "", sys.executable, ROOT / "tokenizer.py"], capture_output=True)
    assert done.stdout == b"0\n1\n" and done.stderr == b"" == Path("err").read_bytes()


@pytest.mark.parametrize("limits, word", [
    ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"top_k": -1}, "top_k"),
    ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature")])
def test_sampling_says_its_limits(limits, word):
    with pytest.raises(ValueError, match=word):
        sample_token(torch.zeros(1, 5), **limits)


def test_a_reader_that_closes_the_pipe_is_no_error(here):
    command = [sys.executable, ROOT / "sample.py", "--prompt=The", "--max_new_tokens=3000", "--no_stop"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(5)
    process.stdout.close()
    assert b"Error" not in process.stderr.read() and process.wait(60) != 1


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_decoding_gives_the_same_logits(caplog):
    """In float64 to 1e-10, rows and sums, token by token, over a refill, after one token; compiled only once."""
    import torch._inductor.config as inductor

    caplog.set_level("ERROR", "torch.__trace")  # pytest would have the compiler write all its graphs down
    model = test_model.make(**test_model.HELIX | {"n_layer": 2}).eval()
    idx, results = test_model.ids(1, 40), []
    chunks = [idx[:, :5], *(torch.tensor([[id]]) for id in idx[0, 5:].tolist())]
    for _ in range(2):
        cache = Cache(49)
        with torch.compiler.set_stance("fail_on_recompile"):
            with torch.no_grad():
                logits = [model(chunk, cache=cache, last_only=True)[0] for chunk in chunks]
            told = [int(id) for text in (idx, idx[:, :1])
                    for id in model.generate(text, 30, temperature=0, cache=Cache(49))]
        results.append((torch.cat(logits, dim=1), told))
        with inductor.patch(freezing=False):  # compile_decoding sets it; here it is set back
            compile_decoding(model, cache)
        assert cache.length == 0 and cache.tokens is None
    (plain, told), (compiled, retold) = results
    assert (plain - compiled).abs().max() < 1e-10 and told == retold
    assert not (plain == compiled).all()  # it has been compiled: not the very same roundings


def test_matrices_laid_out_for_decoding_give_the_same_logits():
    """The head and the matrices that lead up, for one token and for many; in float32, to rounding."""
    model, idx = test_model.make().eval().float(), test_model.ids(2, 20)
    before = model(idx)[0]
    cache = prepare_decoding(model)
    after = torch.cat([model(idx[:, :19], cache=cache)[0], model(idx[:, 19:], cache=cache)[0]], dim=1)
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    block = model.blocks[0]
    up = (model.head_weight, block.mixer.qkv.weight, block.mixer.out.weight, block.ffn.up.weight)
    assert [w.t().is_contiguous() for w in (*up, block.ffn.down.weight)] == [True] * 4 + [False]


def test_a_failing_compiler_is_one_sentence(here, run, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **options: lambda *args, **options: 1 / 0)
    code, out, err = run("--compile", "--prompt", "The frog")
    assert "--compile failed: division by zero" in str(code) and not out


@pytest.mark.parametrize("words, seconds, compiles", [
    (["--max_new_tokens=9000"], 0.005, True), (["--max_new_tokens=7000"], 0.005, False),
    (["--max_new_tokens=90", "--num_samples=100"], 0.005, True), (["--max_new_tokens=9000"], 0.001, False),
    (["--chat", "--max_new_tokens=900"], 0.005, True), (["--compile=off", "--max_new_tokens=9000"], 9, False),
])
def test_it_compiles_by_itself_when_that_pays(here, run, monkeypatch, words, seconds, compiles):
    """If half the time of what is to be written is more than the 20 s of compiling. It is told, on stderr."""
    calls = []
    write_checkpoint(Path("out/run/ckpt.pt"))
    monkeypatch.setattr(runtime, "seconds_per_token", lambda model, cache: seconds)
    monkeypatch.setattr(runtime, "compile_decoding", lambda model, cache: calls.append(model))
    monkeypatch.setattr(LanguageModel, "generate", lambda *args, **options: iter(()))
    monkeypatch.setattr(sample, "chat", lambda *args: [])
    code, out, err = run("--no_stop", *words)
    assert code is None and len(calls) == compiles and ("compiling first, for about 20 s" in err) == compiles


def test_without_a_compiler_long_texts_come_all_the_same(here, run, monkeypatch):
    """And the same ones. Unasked, it compiles nothing that it cannot, and that is no error."""
    words = "--prompt", "The frog", "--max_new_tokens=20", "--no_stop"
    monkeypatch.setattr(torch, "compile", lambda *args, **options: lambda *args, **options: 1 / 0)
    _, plain, _ = run(*words)
    monkeypatch.setattr(runtime, "seconds_per_token", lambda model, cache: 9.0)
    code, out, err = run(*words)
    assert code is None and out == plain and "[--compile failed: division by zero; going on without]" in err


def test_help_and_misspelt_options_need_no_torch(here):
    slow = "import sys; sys.modules['torch'] = None; import sample; sample.run_main(sample.main)"
    for word, code in (("--help", 0), ("--temprature=1", 1)):
        done = subprocess.run([sys.executable, "-c", slow, word], capture_output=True, encoding="utf-8",
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == code and done.stderr.count("\n") == code and "Traceback" not in done.stderr


def test_decoding_imports_no_compiler():
    """Guards against imports that take as long as PyTorch itself, and want a writable temporary folder."""
    code = """if True:
        import sys, torch, sample
        from model import LanguageModel, ModelConfig
        from support.runtime import open_model, prepare_decoding
        model = LanguageModel(ModelConfig(vocab_size=16, d_model=8, n_head=2, d_ff=8)).eval()
        list(model.generate(torch.zeros(1, 3, dtype=torch.long), 3, cache=prepare_decoding(model)))
        print(*{"torch._dynamo", "sympy", "requests"} & set(sys.modules))"""
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).split() == []


def raises(error):
    def main():
        raise error
    return main


@pytest.mark.parametrize("error, sentence", [
    (ValueError("dtype=1 is none."), "error: dtype=1 is none."),
    (FileNotFoundError(2, "No such file or directory", "a.txt"), "error: a.txt: No such file or directory."),
    (OSError(28, "No space left on device"), "error: output: No space left on device."),
    (OSError("cannot write a.pt: full"), "error: cannot write a.pt: full"),
    (MemoryError(), "error: out of memory; try less."),
    (torch.OutOfMemoryError("CUDA"), "error: out of memory; try less."),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."), "error: out of memory; try less."),
    (KeyboardInterrupt(), 130), (SystemExit(1), 1),
], ids=repr)
def test_every_script_ends_with_a_sentence_and_a_status(error, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(raises(error), interrupted="stopped.", advice="try less")
    assert end.value.code == sentence
    assert capsys.readouterr().err == ("stopped.\n" if sentence == 130 else "")


def test_a_bug_keeps_its_traceback():
    for error in (RuntimeError("shapes"), KeyError("x")):
        with pytest.raises(type(error)):
            run_main(raises(error))


def test_the_sink_stands_in_front_of_every_prompt_once(here, run):
    write_checkpoint(Path("out/run/ckpt.pt"), sink_token="<|user|>")
    checkpoint = load_checkpoint("out/run/ckpt.pt")
    model, tokenizer = load_model(checkpoint), tokenizer_from_json(checkpoint["tokenizer"])
    ids = [tokenizer.specials["<|user|>"], *tokenizer.encode("The frog")]
    expected = model(torch.tensor([ids]))[0][0, -1].argmax().item()
    assert expected != model(torch.tensor([ids[1:]]))[0][0, -1].argmax().item()
    for prompt in ("The frog", "<|user|>The frog"):
        _, out, _ = run("--prompt", prompt, "--max_new_tokens=1", "--temperature=0", "--no_stop")
        assert out == prompt + tokenizer.decode([expected]) + "\n"


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(here, run):
    write_checkpoint(Path("out/run/ckpt.pt"), sink_token="<|nobody|>")
    assert "lacks its model's sink_token '<|nobody|>'" in run("--prompt=The")[0]
    write_checkpoint(Path("out/run/ckpt.pt"), vocab_size=299)
    assert "more tokens than its model" in run("--prompt=The")[0]


def test_options_are_not_abbreviated(here, run):
    assert "unrecognized arguments: --temp=1" in run("--prompt=The", "--temp=1")[0]
