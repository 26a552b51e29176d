"""Exercise 4: a cache that goes on from the wrong sum, and a test that notices.

The mistake cannot be seen as long as tokens come one at a time, and seldom changes the likeliest token. Of
the 42 tests in tests/test_model.py 6 notice: that of chunks (66 of its 135 cases), of chunks in float32, of a
pass that fails halfway, of a context that is full, of a part of one's own in Silia's block, and that which
counts what the cache calls:

    cp exercises/solutions/04.py my_04.py
    python -c "import my_04, model, pytest; model.Cache = my_04.BrokenCache; pytest.main(['-q', '--tb=no',
        'tests/test_model.py'])"
"""

from model import Cache

TEST = "tests/test_model.py::test_chunks_in_float32"


class BrokenCache(Cache):
    """Carries over the sum after the first token of a chunk, not after its last."""

    def running_sum(self, name, x):
        total = super().running_sum(name, x)
        self.new_sums[name] = total[:, :1].detach().clone()
        return total
