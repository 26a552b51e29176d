"""Exercise 1: the budget of a Nano, by hand.

Of Nano's 12,915,888 parameters 63% are the embedding. A text of 1,024 tokens leaves 12,582,912 bytes of keys
and values, and 768 of running sums; at 4,204 tokens its cache weighs as much as the model:

    cp exercises/solutions/01.py my_01.py
    python -c "import model, my_01 as my; c = model.ModelConfig(); n = my.parameters(c); print(n,
        c.vocab_size * c.d_model / n, my.cache_bytes(c, 1024), my.state_bytes(c),
        4 * n / my.cache_bytes(c, 1))"
"""


def parameters(config):
    C, F, H, K, D = config.d_model, config.d_ff, config.n_head, config.n_kv_head, config.d_head
    attention = C * (H + 2 * K) * D + H * D * C  # W_q, W_k, W_v and W_out
    gate = D * H + H * H + H if config.gate else 0  # W_1, W_2, b_2
    butterfly = 4 * C * F  # three matrices up, one down
    block = attention + gate + butterfly + 2 * C  # two norms
    return config.vocab_size * C + config.n_layer * block + C  # the head is the embedding again


def cache_bytes(config, length):
    return config.n_layer * 2 * config.n_kv_head * length * config.d_head * 4


def state_bytes(config):
    return config.n_layer * config.d_head * 4 if config.gate else 0
