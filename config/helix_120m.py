# Wiola-120m as published: 147,297,804 parameters, whatever the name says.
#
# The paper tells the shape and the optimizer, not a run; steps and batch here are one pass over TinyStories.
# 20 tokens for each parameter would be 2.9 billion.
data = "tinystories"  # python prepare.py
vocab_size = 32000
context = 2048
n_layer = 12
d_model = 768
n_head = 12
n_kv_head = 4
d_ff = 3072  # d_B, the wide stream
d_narrow = 768  # d_A

position = "helix"
winding = 8.0  # k_s
radial_amplitude = 0.1  # a_s
radial_frequency = 0.01  # f_s
mixer = "cross_layer"
lookback = 2  # Lambda
phi = -3.0
ffn = "dual_stream"
norm = "offset_rms"
norm_eps = 1e-6
token_merging = "paper"  # it shows the model some next tokens in training; "off" for an honest training loss
merge_threshold = 0.92  # tau
init = "normal"

max_steps = 7000
batch_size = 32  # 32 x 2048 = 65,536 tokens a step
grad_accum = 8  # 4 windows at a time
gradient_checkpointing = True  # about a third more time for a fraction of the memory
lr = 3e-4
warmup = 0.05
weight_decay = 0.1
eval_every = 250
eval_tokens = 500000
