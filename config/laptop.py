# A Wiola of 3,444,540 parameters on real TinyStories: about an hour on a laptop's CPU.
data = "laptop"  # python prepare.py --name laptop --vocab_size 4096
vocab_size = 4096
context = 256
n_layer = 6
d_model = 192
n_head = 6
d_ff = 384

position = "spiral"
mixer = "gated_spiral"
ffn = "butterfly"
norm = "rms"

max_steps = 4000
batch_size = 8
lr = 2e-3
min_lr = 1e-4
warmup = 0.05
weight_decay = 0.1
eval_every = 500
eval_tokens = 100000
windows = "documents"  # a story is read from its beginning
