# A small Wiola, 722,392 parameters, on the storybook: minutes on a CPU, and stories that hang together.
data = "storybook"
vocab_size = 1024
context = 256  # a whole story
n_layer = 3
d_model = 128
n_head = 8
d_ff = 256

position = "spiral"
mixer = "gated_spiral"
ffn = "butterfly"
norm = "rms"

# Names and colours are interchangeable in these stories. From a small start their embeddings grow into one
# and the same vector before attention has learned to copy them. Large initial vectors stay apart: compare
# --embedding_std=0.02, the published value.
embedding_std = 0.6  # tied to the head: at first each token predicts itself, a loss near 66

windows = "documents"  # a story is read from its beginning, so what comes back in it can be looked up
max_steps = 8000
batch_size = 2  # many small steps: for copying, their number counts more than their size
lr = 2e-3
min_lr = 1e-4
warmup = 0.1
beta2 = 0.99
weight_decay = 0.0
eval_every = 2000
