"""The client's app of `flower_exchanges`: our app, and three apps without our code.

The client's process has torch loaded in all cases.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pefll.deploy.apps import client as ours

NATURAL, CARRIED, PLAIN = "query.natural", "query.carried", "query.plain"


class BenchmarkNode(ClientApp):  # type: ignore[misc]
    """Answers three types of messages without our code, and all others with our app.

    The two echoes return one array or several without reading them. The plain app reads the arrays that it gets and
    makes a message of arrays, as every Flower app has to; it computes nothing.
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
    """Brings its own run config, because Flower's simulation does not pass one when it is started from Python.

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
