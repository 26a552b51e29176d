# Silia v2 at its published size, 524,672 parameters, on the storybook: minutes on a CPU.
data = "storybook_munch"
vocab_size = 512
context = 384  # a whole story
n_layer = 3
d_model = 64
n_head = 2
d_head = 64
d_ff = 256

position = "mirrored"
alpha = 0.0
mixer = "hydra"
norm = "bare_rms"
embedding_norm = True
block = "silia"
sink_token = "<|actor|>"
init = "pytorch"  # tied embeddings of deviation 1: at first each token predicts itself, a loss near 64

windows = "documents"  # a story is read from its beginning
optimizer = "muon"
max_steps = 2800
batch_size = 4
lr = 7e-3
min_lr = 1e-4
schedule = "cooldown"
warmup = 0.05
weight_decay = 0.0
eval_every = 700
