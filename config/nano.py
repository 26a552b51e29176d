# Wiola Nano, 12,915,888 parameters, on TinyStories: the published run, as far as its log tells.
#
# That run (first TinyStories release, its own 32,000-token tokenizer, one GPU) reports validation losses of
# 3.01 after 1,000 steps, 2.40 after 2,000 and 1.726 at the end. Other data, other numbers.
data = "tinystories"  # python prepare.py
vocab_size = 32000
context = 512
n_layer = 6
d_model = 256
n_head = 8  # each of width d_model / n_head = 32, with keys and values of its own
d_ff = 512

position = "spiral"
alpha = 0.05  # the slowest pair turns by this share faster than standard rotary's, which is 0
rope_base = 10000.0
mixer = "gated_spiral"
gate = True
ffn = "butterfly"
norm = "rms"
norm_eps = 1e-6
block = "prenorm"
init = "truncated_normal"
embedding_std = 0.02

max_steps = 20000
batch_size = 32  # 32 x 512 = 16,384 tokens a step, 328 million in all: most of an epoch
grad_accum = 4  # 8 windows at a time; set it to 1 on a large GPU
optimizer = "adamw"
lr = 3e-4
min_lr = 0.0
schedule = "cosine"
warmup = 0.05  # 1,000 steps, then a cosine to 0
weight_decay = 0.01  # as in the published run; the helix paper recommends 0.1
eval_every = 500
eval_tokens = 500000  # a tenth of the split
