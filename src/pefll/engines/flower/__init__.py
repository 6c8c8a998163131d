"""The flower engine: every `cohort.run` is one exchange of Flower messages with clients on other machines."""
