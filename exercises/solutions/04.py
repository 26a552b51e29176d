"""Exercise 4: a cache that goes on from the wrong sum, and a test that notices."""

from model import Cache

TEST = "tests/test_model.py::test_chunks_in_float32"


class BrokenCache(Cache):
    """Carries over the sum after the first token of a chunk, not after its last."""

    def running_sum(self, name, x):
        total = super().running_sum(name, x)
        self.new_sums[name] = total[:, :1].detach().clone()
        return total
