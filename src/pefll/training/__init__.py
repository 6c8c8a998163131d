"""From what was asked for to a trained run: settings resolved, the loop, evaluation, results."""
