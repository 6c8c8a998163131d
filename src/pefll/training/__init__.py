"""Training: resolved settings, the loop, evaluation, callbacks, and a trained run."""
