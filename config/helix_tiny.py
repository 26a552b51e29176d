# A small helix, 747,267 parameters, on the storybook: minutes on a CPU.
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
embedding_std = 0.6  # see tiny.py
weight_std = 0.0  # 1/sqrt(inputs); with the published 0.02 (and lr 2e-3) the loss ends 0.02 higher

windows = "documents"  # a story is read from its beginning
max_steps = 6000
batch_size = 2
lr = 1.5e-3
beta2 = 0.99
min_lr = 1e-4
warmup = 0.1
weight_decay = 0.0
eval_every = 1500
