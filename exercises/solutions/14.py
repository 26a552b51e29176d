"""Exercise 14: what the small model does with names, and with its gates.

Where a name is about to come back, head 3 of layer 1 gives 91% of its attention to the earlier mentions of just
that name (over 20 stories), head 7 of that layer 86%, head 1 48%; the other 21 at most 2.3% (one seed; another
run may have other heads, but has them in a middle layer, too). In config/helix_tiny.py it is one head, with 96%.

The gate matters at one token in a hundred: with all gates at 1, 1.2% of the tokens of those stories have a
probability that changes by 10% or more. Behind BEFORE "said" falls from 34% to 20%. These tokens are free
choices: the gate moves a little probability from one word to another, and not one name that is copied.

    python extras/page.py --checkpoint out/tiny/ckpt.pt --out story.html
    python exercises/check.py 14 exercises/solutions/14.py
"""

CHECKPOINT = "out/tiny/ckpt.pt"
HEAD = (1, 3)
BEFORE = """Once upon a time, a shy fox named Ben lived near the village. What he liked best was to dance in the sun.
One windy day, Ben went out with a red scarf. Oh no! The wind took the scarf, and it got stuck on top of the roof. \
Ben jumped and jumped, but he could not get it.
Nearby lived Rose, a helpful turtle. She heard Ben and came quickly. "Can you help me, Rose?" said Ben. "My green \
scarf is stuck." "I have an idea!" said Rose. She stood on a big box and pulled it until the scarf came down.
"Wow!\""""
