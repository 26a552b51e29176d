"""
Training in several processes, each with its share of every batch:

    torchrun --standalone --nproc_per_node=2 train.py config/nano.py

A batch is a function of (seed, step) alone, so each process can take its rows of it; all go on with the mean
of their gradients, and so with the same weights. DistributedDataParallel takes that mean during backward,
which hides the time of sending. Here it is one sum after it: the same numbers, and neither micro-batches nor
parameters without a gradient nor a process that is gone need special care.

The first process alone writes and prints. With one process all functions return what they were given.
"""

import contextlib
import itertools
import os
import signal
import types

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from support import checkpoint, need


class AnotherEnded(ValueError):
    """Another process of the run is gone, so that nothing can be added up any more."""


def n_processes():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank():
    """Return the number of this process, 0 .. n_processes() - 1."""
    return dist.get_rank() if n_processes() > 1 else 0


@contextlib.contextmanager
def processes():
    """Run the body as one of torchrun's processes, or alone.

    All but the first print nothing and end without a word or a status where the first says why: it may still
    be saving, and torchrun would stop it. What nobody has foreseen is shown.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield
        return
    dist.init_process_group()
    try:
        if rank() == 0:
            yield
        else:
            with (contextlib.suppress(ValueError, KeyboardInterrupt, SystemExit),
                  open(os.devnull, "w", encoding="utf-8") as nowhere,
                  contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)):
                yield
    finally:
        dist.destroy_process_group()


def share_work(config, device):
    """Check that a batch divides among the processes, and take this one's GPU, if there are GPUs."""
    n = n_processes()
    if n == 1:
        return
    need(config.batch_size % (config.grad_accum * n) == 0,
         f"batch_size={config.batch_size} does not divide among {n} processes with grad_accum="
         f"{config.grad_accum}: take a multiple of {config.grad_accum * n}.")
    need(device.type in ("cpu", "cuda") and device.index is None,
         f"device={device} is for one process; several take cpu or cuda.")
    if device.type == "cuda":
        need(int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count(),
             f"there are more processes than GPUs ({torch.cuda.device_count()}): lower --nproc_per_node.")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    print(f"processes   {n}, each with {config.batch_size // n} of the {config.batch_size} windows of a step")


@contextlib.contextmanager
def first_alone():
    """Run the body in the first process, and only then in the others."""
    if rank() > 0:
        total([0])
    yield
    if rank() == 0:
        total([0])


@contextlib.contextmanager
def save_if_another_ends(save):
    """Call save() if another process ends while the body runs: the weights are those after a whole step."""
    try:
        yield
    except AnotherEnded:
        save()
        raise


class Run(checkpoint.Run):
    """A run under way, of which only the first process has files."""

    def open_folder(self):
        if rank() == 0:
            super().open_folder()
        else:
            self.log = types.SimpleNamespace(file=contextlib.nullcontext(), write=lambda row: None)

    def save(self, *args):
        if rank() == 0:
            super().save(*args)


def own_rows(x, y):
    """Return this process's rows of inputs and targets: (B, T) -> (B / n_processes, T)."""
    return x.chunk(n_processes())[rank()], y.chunk(n_processes())[rank()]


def own_items(items):
    """Return an iterator over this process's share of the items: one in n_processes."""
    return itertools.islice(items, rank(), None, n_processes())


def add_up(tensor):
    """Add to a tensor, in place, those of all other processes, and so wait for them."""
    try:
        dist.all_reduce(tensor)
    except RuntimeError:  # at once where processes talk over gloo
        raise AnotherEnded("another process of this run has ended, so this one ends too: the same command "
                           "with --resume goes on.") from None


def total(numbers):
    """Return a list of numbers, each summed over all processes, in float64."""
    if n_processes() == 1:
        return numbers
    tensor = torch.tensor(numbers, dtype=torch.float64)
    add_up(tensor)
    return tensor.tolist()


def average(model, numbers):
    """Make the model's gradients their mean over all processes; return the means of the numbers."""
    n = n_processes()
    if n == 1:
        return numbers
    means = [x / n for x in total(numbers)]  # first: here a process that is gone is missed, on GPUs too
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    vector = parameters_to_vector(gradients)
    add_up(vector)
    vector_to_parameters(vector.div_(n), gradients)
    return means


def anyone_stops(stop):
    """Return whether one of the processes has got a signal; then `stop` has one in all of them."""
    [signals] = total([len(stop)])  # not read again: the next may come now, and to this process alone
    if signals and not stop:
        stop.append(signal.SIGTERM)
    return signals > 0
