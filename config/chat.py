# A small Wiola to talk to, 722,392 parameters: it tells the story that is asked for, and answers questions.
init_from = "out/tiny/ckpt.pt"  # python train.py config/tiny.py: it can tell stories already
data = "storybook_chat"
vocab_size = 1024
context = 384  # a request, a story and three questions
n_layer = 3
d_model = 128
n_head = 8
d_ff = 256

position = "spiral"
mixer = "gated_spiral"
ffn = "butterfly"
norm = "rms"

max_steps = 5000
batch_size = 2
windows = "documents"  # each begins with a request
lr = 1e-3
min_lr = 1e-4
warmup = 0.05
beta2 = 0.99
weight_decay = 0.0
eval_every = 1000
