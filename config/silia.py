# Silia v2, 524,672 parameters: attention inside the SwiGLU, and a recipe with Muon.
data = "silia"  # python prepare.py --name silia --vocab_size 512 --munch
vocab_size = 512
context = 1024
n_layer = 3
d_model = 64
n_head = 2  # one attends, one sums
d_head = 64
d_ff = 256

position = "mirrored"
alpha = 0.0  # standard rotary, the other way round
mixer = "hydra"
norm = "bare_rms"
embedding_norm = True
block = "silia"
sink_token = "<|actor|>"
init = "pytorch"  # tied embeddings of deviation 1: at first each token predicts itself, a loss near 64

optimizer = "muon"
max_steps = 20000
batch_size = 32  # ours: 32,768 tokens a step, 655 million in all
grad_accum = 4
lr = 3e-3
min_lr = 3e-4
weight_decay = 0.1
schedule = "cooldown"
warmup = 0.05  # 1,000 steps
cooldown = 0.45  # the last 9,000
eval_every = 500
eval_tokens = 500000
