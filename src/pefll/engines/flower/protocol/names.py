"""Names that server and clients use in messages."""

# A reply repeats these header fields of its request. So it cannot be taken for the reply to another request. `cache`
# names the round or evaluation for which a client caches tensors.
ECHO = ("task", "round", "exchange", "cache", "client", "agreement")
# Tasks that no method defines: a client says who it is (HELLO), or gets its personal model (DELIVER).
HELLO, DELIVER = "hello", "deliver"
# Where a client finds a tensor of the arguments. SENT: in the message. SHARED: in the message, and the client caches it
# for this round or evaluation. KNOWN: in that cache. KEPT: in the client's store on disk.
SENT, SHARED, KNOWN, KEPT = "sent", "shared", "known", "kept"


def client_name(number: int) -> str:
    """Return the default name of a client."""
    return f"client-{number:03d}"
