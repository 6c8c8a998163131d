"""The client's app of `flower_exchanges`: ours, and beside it what is Flower and nothing else.

A client's process has torch loaded either way.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pefll.deploy.apps import client as ours

NATURAL, CARRIED, PLAIN = "query.natural", "query.carried", "query.plain"


class BenchmarkNode(ClientApp):  # type: ignore[misc]
    """Answers three kinds of messages with Flower alone, and all others as every client does.

    What is only carried comes back as it is, be it one array or several. A plain app reads the arrays it is sent and
    makes a message of those it has computed, as every Flower app has to; this one computes nothing.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        if message.metadata.message_type in (NATURAL, CARRIED):
            return Message(message.content, reply_to=message)
        if message.metadata.message_type == PLAIN:
            model = message.content["model"].to_numpy_ndarrays()
            facts = MetricRecord({"num-examples": 32})
            return Message(RecordDict({"model": ArrayRecord(model), "metrics": facts}), reply_to=message)
        return ours(message, context)


class SimulatedNode(BenchmarkNode):
    """Has its run config with it, which Flower's simulation from Python does not hand out.

    Args:
        config: the run config.
    """

    def __init__(self, config: dict[str, str | int | float | bool]) -> None:
        super().__init__()
        self._config = config

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        given = context.run_config
        context.run_config = dict(self._config)
        try:
            return super().__call__(message, context)
        finally:
            context.run_config = given  # Flower does not let an app change it


client = BenchmarkNode()
