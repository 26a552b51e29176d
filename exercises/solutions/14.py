"""Exercise 14: what the small model does with names, and with its gates.

Where a name is about to come back, head 7 of layer 1 gives 94% of its attention to the earlier mentions of just
that name (over 20 stories), head 0 of that layer 93%, head 5 45%; the other 21 at most 8% (one seed; another
run may have other heads, but has them in a middle layer, too).

The gate matters everywhere: with all gates at 1, 49% of the tokens of those stories have a probability that
changes by 10% or more. The model has learned its weights for scores that the gate makes smaller; without it
the heads attend too sharply. That a part cannot be taken out of a trained model says nothing on whether a
model trained without it is worse: in our ablation it is not.

    python extras/page.py --checkpoint out/tiny/ckpt.pt --out story.html
    python exercises/check.py 14 exercises/solutions/14.py
"""

CHECKPOINT = "out/tiny/ckpt.pt"
HEAD = (1, 7)
BEFORE = """Once upon a time, a shy fox named Ben lived near the village. What he liked best was to dance in the sun.
One windy day, Ben went out with a red scarf. Oh no! The wind took the scarf, and it got stuck on top of the roof. \
Ben jumped and jumped, but he could not get it.
Nearby lived Rose, a helpful turtle. She heard Ben and came quickly. "Can you help me, Rose?" said Ben. "My green \
scarf is stuck." "I have an idea!" said Rose. She stood on a big box and pulled it until the scarf came down.
"Wow!\""""
