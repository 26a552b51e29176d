# The model of helix_tiny.py, 747,267 parameters, quicker at first: two exercises train it for 500 steps.
data = "storybook"
vocab_size = 1024
context = 256  # a whole story
n_layer = 3
d_model = 128
n_head = 8
n_kv_head = 4
d_ff = 256  # the wide stream; the narrow one has a fourth

position = "helix"
mixer = "cross_layer"
lookback = 2
ffn = "dual_stream"
norm = "offset_rms"
token_merging = "off"
init = "normal"
embedding_std = 0.3  # see tiny.py; the loss begins near 38

max_steps = 1200
batch_size = 8
lr = 4e-3
min_lr = 1e-4
warmup = 0.1
weight_decay = 0.0
eval_every = 300
