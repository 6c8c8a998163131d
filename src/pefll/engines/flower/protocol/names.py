"""Names that server and clients use in messages."""

# A reply repeats these header fields of its request, so that it cannot be taken for the reply to another one.
ECHO = ("task", "round", "exchange", "visit", "client", "agreement")
# Tasks that no method has: asking a client who it is, and sending it its personal model.
HELLO, DELIVER = "hello", "deliver"
# Where a client finds a tensor of the arguments: in the message; in the message, to be cached for this round;
# in the cache; in its own store.
SENT, SHARED, KNOWN, KEPT = "sent", "shared", "known", "kept"


def client_name(number: int) -> str:
    """Return the default name of a client; names sort as numbers do."""
    return f"client-{number:03d}"
