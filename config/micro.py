# Wiola Micro, 26,454,624 parameters: nano.py, wider and deeper.
data = "tinystories"  # python prepare.py
vocab_size = 32000
context = 512
n_layer = 8
d_model = 384
n_head = 12
d_ff = 768

position = "spiral"
mixer = "gated_spiral"
ffn = "butterfly"
norm = "rms"

max_steps = 20000
batch_size = 32
grad_accum = 4
lr = 3e-4
warmup = 0.05
weight_decay = 0.01
eval_every = 500
eval_tokens = 500000
