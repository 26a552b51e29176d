# Wiola Small, 54,154,944 parameters: nano.py, twice as wide and twice as deep.
data = "tinystories"  # python prepare.py
vocab_size = 32000
context = 512
n_layer = 12
d_model = 512
n_head = 16
d_ff = 1024

position = "spiral"
mixer = "gated_spiral"
ffn = "butterfly"
norm = "rms"

max_steps = 20000
batch_size = 32
grad_accum = 8
lr = 3e-4
warmup = 0.05
weight_decay = 0.01
eval_every = 500
eval_tokens = 500000
