"""What makes the five scripts safe to use. Nothing in here is needed to understand them."""


def need(condition, sentence):
    """Raise ValueError with a sentence for the user, unless the condition holds."""
    if not condition:
        raise ValueError(sentence)
