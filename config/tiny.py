# A small Wiola, 919,248 parameters, on the storybook: minutes on a CPU, and stories that hang together.
data = "storybook"
vocab_size = 1024
context = 256
n_layer = 4
d_model = 128
n_head = 4
d_ff = 256

max_steps = 600
batch_size = 16
lr = 3e-3
min_lr = 1e-4
warmup = 0.1
weight_decay = 0.1
eval_every = 200
eval_tokens = 0
