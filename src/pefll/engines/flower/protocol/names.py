"""Names that server and clients use in messages."""

# A reply repeats these header fields, so that it cannot pass for the reply to another request. `cache` names the round
# or evaluation for which a client caches tensors.
ECHO = ("task", "round", "exchange", "cache", "client", "agreement")
# Tasks besides those of a method: a client says who it is; a client gets its personal model.
HELLO, DELIVER = "hello", "deliver"
# Where a client finds a tensor of the arguments: in the message; in the message, to be cached for this round or
# evaluation; in that cache; in its own store.
SENT, SHARED, KNOWN, KEPT = "sent", "shared", "known", "kept"


def client_name(number: int) -> str:
    """Return the default name of a client."""
    return f"client-{number:03d}"
