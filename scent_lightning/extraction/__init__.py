"""Images to features: what ``scent-lightning extract`` is made of."""
