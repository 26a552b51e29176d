"""Every command in README.md and docs/use.md is run: as it is where it is quick, smaller where it is not."""

import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prepare

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README + USE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
PARTS = [part.strip() for command in COMMANDS for part in command.split("&&")]

# Added to the commands that would run for minutes; the options that the README names stay as they are.
SMALLER = {
    "train.py": "--max_steps=2 --eval_tokens=600 --sample_tokens=5 --batch_size=2 --grad_accum=1 --n_layer=1",
    "sample.py": "--max_new_tokens=10",
    "judge.py": "--n 2",
    "ablate.py": "--max_steps 1 --seeds 1 --variants nano",
}


def make_workplace():
    """The project in an empty folder, with small stand-ins for the data that the commands expect."""
    folder = Path(tempfile.mkdtemp(prefix="readme-"))
    for path in [*ROOT.glob("*.py"), *map(ROOT.joinpath, ("config", "extras", "exercises", "support"))]:
        (folder / path.name).symlink_to(path, target_is_directory=path.is_dir())
    stories = [f"Once upon a time there was a frog, number {n}. It sang and was happy." for n in range(200)]
    for name in ("mine.txt", "more.txt", "slice.txt"):
        (folder / name).write_text("<|endoftext|>\n".join(stories), encoding="utf-8")
    talk = [{"messages": [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": story}]}
            for story in stories]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)), encoding="utf-8")
    for name, kind in (("tinystories", ""), ("laptop", ""), ("silia", "--munch")):
        run(folder, f"python prepare.py --name {name} --input mine.txt --vocab_size 400 --workers 1 {kind}")
    run(folder, 'python -c "import prepare; prepare.storybook(\'storybook_chat\', train=99, val=9)"')
    return folder


def run(folder, command):
    """Run a command of the README; one that begins with python in a fork of a process that has loaded PyTorch.

    That saves some seconds for each of them.
    """
    words = shlex.split(command)
    output = folder / "output.txt"
    if words[0] == "python" and words[1].endswith(".py") and sys.platform == "linux":
        (folder / "input.txt").write_text("The frog", encoding="utf-8")
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["torch", "tiktoken", "tqdm"])
        process = forks.Process(target=script_main, args=(folder, words[1:], output))
        process.start()
        process.join(timeout=200)
        status = process.exitcode
        process.kill()
    else:
        words = [sys.executable if word == "python" else word for word in words]
        with open(output, "wb") as file:
            status = subprocess.run(words, cwd=folder, stdout=file, stderr=file, timeout=200,
                                    input=b"The frog").returncode
    assert status == 0, f"{command}\n{output.read_text(encoding='utf-8', errors='replace')}"


def script_main(folder, words, output):
    """Do in this process what `python words...` does in a new one."""
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    os.dup2(os.open("input.txt", os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.stdin = open(0, encoding="utf-8")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def test_the_readme_has_its_two_commands():
    assert "pip install -r requirements.txt" in PARTS and "python -m pytest" in PARTS
    assert "python train.py config/tiny.py" in PARTS
    assert 'python sample.py --prompt "Once upon a time"' in PARTS


def run_commands():
    """Run all, in the order of the README, since some need what the ones before have made."""
    workplace = make_workplace()
    for command in PARTS:
        script = next((Path(word).name for word in shlex.split(command) if word.endswith(".py")), "")
        if command.startswith(("pip ", "python -m pytest", "git ", "cd ")):
            continue  # the installation and this very test
        if script == "figures.py" and not importlib.util.find_spec("matplotlib"):
            continue  # optional, as the README says
        if script == "prepare.py" and "--input" not in command and "storybook" not in command:
            prepare.arguments(shlex.split(command)[2:])  # a download of 2.2 GB: only read as a command
            continue
        if script == "prepare.py" and (name := re.search(r"--name (\S+)", command)):
            if (workplace / "data" / name[1]).exists():
                continue  # made by an earlier command
        run(workplace, f"{command} {SMALLER.get(script, '')}")
    shutil.rmtree(workplace)


def start():
    """Begin to run them, beside the other tests."""
    background = ThreadPoolExecutor(1)
    running.append(background.submit(run_commands))
    background.shutdown(wait=False)


running = []


def test_every_command_runs():
    if not running:
        start()
    running[0].result()


def test_every_file_of_the_tree_is_named():
    scripts = ("model.py", "tokenizer.py", "prepare.py", "storybook.py", "train.py", "sample.py")
    others = [path.name for folder in ("config", "extras", "support") for path in ROOT.glob(f"{folder}/*.py")]
    for name in (*scripts, *others):
        assert name == "__init__.py" or name in README, name


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200 and len(README.replace('|', ' ').split()) <= 1470
