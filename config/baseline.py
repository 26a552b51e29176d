# A plain transformer of Nano's size, 12,915,456 parameters: what Nano has to beat, trained in the same way.
data = "tinystories"  # python prepare.py
vocab_size = 32000
context = 512
n_layer = 6
d_model = 256
n_head = 8
d_ff = 683  # 3 C F parameters, 256 a layer more than the butterfly's 4 C F with F = 512

position = "spiral"
alpha = 0.0  # no spiral: standard rotary positions
mixer = "attention"  # no gate: 328 parameters a layer less
ffn = "swiglu"
norm = "rms"

max_steps = 20000
batch_size = 32
grad_accum = 4
lr = 3e-4
warmup = 0.05
weight_decay = 0.01
eval_every = 500
eval_tokens = 500000
