"""What several methods measure or send."""
